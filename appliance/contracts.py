"""Timing contracts other than the voice's, expressed through the same scheduler. Pure.

The voice keeps every frame in order and catches up while it is worth it. Other models that run
beside it are owed something else:

    hard        one result per period, in hand before the period ends; later it is worthless: the
                one before stands in, the miss is recorded, and an alarm is raised
    freshness   only the newest input counts; older ones are dropped and recorded, and a result
                is never of an input older than the bound when it is in hand
    event       a step for every input when it comes, within the bound; one whose result could not
                be in hand in time is dropped and recorded, so that the next is not late as well

All three are `scheduler.plan_resume` and `plan_slot` with other numbers: no catch-up, no lag, or no
limit to it. None starves: however slow steps have become, the newest input that is not too old
already is run on, and its lateness is then a fact and not a guess.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.scheduler import plan_resume, plan_slot


class Contract(enum.Enum):
    """What a result must be to be of use."""

    HARD = "hard"
    FRESHNESS = "freshness"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class Terms:
    """A contract with its numbers."""

    contract: Contract
    period_ns: int
    """Between inputs."""
    bound_ns: int
    """From an input's capture to its result in hand. HARD: the grid decides, this is not used."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is done now."""

    tick: int
    """HARD: the period whose result this is."""
    missed: int
    """HARD: periods before it that can no longer be met; each gets a substitute and an alarm."""
    skip: int
    """Oldest waiting inputs to drop, each recorded."""
    runs: bool
    """False: there is nothing to run on."""
    due_ns: int
    """When the result must be in hand."""
    waits: bool = False
    """HARD: the input has not come, and there is still time for it. Ask again."""


PATIENCE = 4
"""HARD waits for an input until a quarter of the period, or two steps, are left."""


def plan_work(
    terms: Terms, due_tick: int, now_ns: int, t0_ns: int, captured_ns: Sequence[int], step_ns: int
) -> Work:
    """What to do at ``now_ns``.

    due_tick: HARD: the next period whose result is owed. captured_ns: of waiting inputs, oldest
    first. step_ns: what a step is expected to take.
    """
    waiting = len(captured_ns)
    if terms.contract is Contract.HARD:
        tick = plan_resume(due_tick, now_ns, t0_ns, terms.period_ns, step_ns, catch_up_ns=0)
        slot = plan_slot(0, waiting, lag_limit_frames=0)
        due_ns = t0_ns + (tick + 1) * terms.period_ns
        last_ns = due_ns - max(terms.period_ns // PATIENCE, 2 * step_ns)
        waits = not slot.hears and now_ns < last_ns
        return Work(tick, tick - due_tick, slot.skip, slot.hears, due_ns, waits)
    if terms.contract is Contract.FRESHNESS:
        slot = plan_slot(0, waiting, lag_limit_frames=0)
        if not waiting:
            return Work(due_tick, 0, 0, runs=False, due_ns=now_ns + terms.bound_ns)
        due_ns = captured_ns[-1] + terms.bound_ns
        if now_ns > due_ns:  # even the newest is too old: it goes as well
            return Work(due_tick, 0, waiting, runs=False, due_ns=due_ns)
        return Work(due_tick, 0, slot.skip, runs=True, due_ns=due_ns)
    spent = sum(captured + terms.bound_ns < now_ns for captured in captured_ns)
    hopeless = sum(captured + terms.bound_ns < now_ns + step_ns for captured in captured_ns)
    hopeless = max(spent, min(hopeless, waiting - 1))
    slot = plan_slot(0, waiting - hopeless, lag_limit_frames=waiting)
    due_ns = captured_ns[hopeless] + terms.bound_ns if slot.hears else now_ns + terms.bound_ns
    return Work(due_tick, 0, hopeless + slot.skip, slot.hears, due_ns)


class Outcome(enum.IntEnum):
    """What became of one period or one input."""

    DELIVERED = 1
    """The result was in hand in time."""
    SUBSTITUTED = 2
    """HARD: it was not, or there was no input; the result before stood in."""
    DROPPED = 3
    """The input was never run on: a newer one counted, or it could not be in time."""
    LATE = 4
    """FRESHNESS, EVENT: run on, but the result came after the bound: withheld."""


def judge(terms: Terms, work: Work, finished_ns: int) -> Outcome:
    """What becomes of a result that was in hand at ``finished_ns``."""
    if finished_ns <= work.due_ns:
        return Outcome.DELIVERED
    return Outcome.SUBSTITUTED if terms.contract is Contract.HARD else Outcome.LATE


def raises_alarm(terms: Terms, outcome: Outcome) -> bool:
    """Whether somebody must be told. A dropped input is what freshness is for, and no alarm."""
    if terms.contract is Contract.FRESHNESS:
        return outcome is Outcome.LATE
    return outcome is not Outcome.DELIVERED
