"""Decide what one tick does, and which tick that is. Pure: no clock, no I/O, no numpy, no engine.

`tick_loop` calls `plan_resume` when it wakes up and `plan_tick` for the tick that runs. The same
arguments always give the same plan, so a recorded tick can be replayed in a test.

What happens after an overrun:

    grid      |  n   | n+1  | n+2  | n+3  |
    ran        [nnnnnnnnnnnnnnnn][n+2][n+3 ...      one tick took 2.3 periods
                                 ^ now: n+1 would finish more than `catch_up_ns` after its deadline,
                                   so it is missed and recorded; n+2 is late but still worth it

A late frame is of use as long as the line's playout buffer has not run dry; one that comes later
still only makes the next ones late as well. The tick whose period is now always runs: however
slow steps have become, a session is stepped rather than starved.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Occupant(NamedTuple):
    """A live session as the scheduler sees it: its slot and what its caller has sent."""

    slot: int
    frames_waiting: int


class SlotPlan(NamedTuple):
    """What one slot does on this tick."""

    slot: int
    skip: int
    """Oldest waiting frames to drop unheard, because the session lags more than is allowed."""
    hears: bool
    """False: the caller's frame is missing; the model is fed silence (concealed)."""
    lag: int
    """Frames still waiting once this tick has taken its own: how far the session is behind."""


class TickPlan(NamedTuple):
    """What one tick does."""

    tick: int
    batch: int
    """Exactly the live sessions: the profile that runs."""
    slots: tuple[SlotPlan, ...]
    """In order of slots, 0..batch-1."""


def plan_tick(tick: int, occupants: Sequence[Occupant], lag_limit_frames: int) -> TickPlan:
    """Every occupied slot steps on every tick; what differs is what it hears.

    A slot that skipped a tick would fall one frame behind its caller for the rest of the call,
    so a missing frame is concealed, never waited for. A caller that runs ahead (its clock is
    fast, or its frames came in a burst) is heard late by at most ``lag_limit_frames``.
    """
    return TickPlan(
        tick=tick,
        batch=len(occupants),
        slots=tuple([plan_slot(slot, frames, lag_limit_frames) for slot, frames in occupants]),
    )


def plan_slot(slot: int, frames_waiting: int, lag_limit_frames: int) -> SlotPlan:
    """One slot's share of `plan_tick`."""
    if frames_waiting <= 0:
        return SlotPlan(slot, skip=0, hears=False, lag=0)
    lag = min(frames_waiting - 1, lag_limit_frames)
    return SlotPlan(slot, skip=frames_waiting - 1 - lag, hears=True, lag=lag)


def plan_resume(
    tick: int, now_ns: int, t0_ns: int, period_ns: int, step_ns: int, catch_up_ns: int
) -> int:
    """The tick to run at ``now_ns``; those from ``tick`` up to it are missed and recorded so.

    tick: the next one that is due, started or not. step_ns: what a tick is expected to take.
    catch_up_ns: how long after its deadline a frame may be finished and still be of use.
    Returns ``tick`` itself when nothing was missed, also when its start is still to come.
    """
    current = (now_ns - t0_ns) // period_ns
    # The first tick k with now + step <= t0 + (k + 1) * period + catch_up: rounded up.
    worthwhile = -((t0_ns + catch_up_ns - now_ns - step_ns) // period_ns) - 1
    return max(tick, min(current, worthwhile))
