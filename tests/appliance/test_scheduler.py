"""Tables of what a tick does and which one runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.scheduler import Occupant, SlotPlan, TickPlan, plan_resume, plan_slot, plan_tick

PERIOD_NS = 80 * MS


def test_a_missing_frame_is_concealed_not_waited_for() -> None:
    plan = plan_tick(9, [Occupant(0, 1), Occupant(1, 0)], lag_limit_frames=4)
    assert plan == TickPlan(
        tick=9,
        batch=2,
        slots=(
            SlotPlan(0, skip=0, hears=True, lag=0),
            SlotPlan(1, skip=0, hears=False, lag=0),
        ),
    )


def test_an_empty_box_steps_nobody() -> None:
    assert plan_tick(3, [], lag_limit_frames=4) == TickPlan(tick=3, batch=0, slots=())


@pytest.mark.parametrize(
    ("waiting", "skip", "lag"), [(1, 0, 0), (2, 0, 1), (5, 0, 4), (6, 1, 4), (16, 11, 4)]
)
def test_a_backlog_beyond_the_limit_is_skipped(waiting: int, skip: int, lag: int) -> None:
    assert plan_slot(0, waiting, 4) == SlotPlan(0, skip=skip, hears=True, lag=lag)


@given(waiting=st.integers(0, 64), limit=st.integers(1, 15))
def test_every_waiting_frame_is_skipped_heard_or_still_waiting(waiting: int, limit: int) -> None:
    plan = plan_slot(0, waiting, limit)
    assert plan.skip + plan.hears + plan.lag == waiting
    assert plan.lag <= limit


# Next due tick is 1, which starts at 80 ms and has its deadline at 160 ms.
@pytest.mark.parametrize(
    ("now_ms", "step_ms", "catch_up_ms", "runs"),
    [
        (80, 10, 0, 1),  # in time
        (155, 10, 0, 1),  # late already, but this is its own period
        (165, 10, 0, 2),  # nothing left of it, and a late frame is no use
        (165, 10, 80, 1),  # a late frame is of use for 80 ms: catch up
        (230, 10, 80, 1),  # just
        (231, 10, 80, 2),
        (410, 10, 80, 4),  # 2 and 3 are missed with 1; 4 is worth it though late
        (410, 10, 0, 5),
        (410, 200, 80, 5),  # steps too slow for any tick: the current one runs all the same
        (10, 10, 0, 1),  # not started yet
        (10, 500, 0, 1),
    ],
)
def test_what_runs_after_an_overrun(now_ms: int, step_ms: int, catch_up_ms: int, runs: int) -> None:
    assert plan_resume(1, now_ms * MS, 0, PERIOD_NS, step_ms * MS, catch_up_ms * MS) == runs


@given(
    tick=st.integers(0, 100),
    now_ms=st.integers(0, 20_000),
    step_ms=st.integers(0, 300),
    catch_up_ms=st.integers(0, 400),
    t0_ms=st.integers(-5_000, 5_000),
)
def test_a_missed_tick_could_not_have_been_of_use(
    tick: int, now_ms: int, step_ms: int, catch_up_ms: int, t0_ms: int
) -> None:
    def useful(k: int) -> bool:
        return now_ms + step_ms <= t0_ms + (k + 1) * 80 + catch_up_ms

    runs = plan_resume(tick, now_ms * MS, t0_ms * MS, PERIOD_NS, step_ms * MS, catch_up_ms * MS)
    current = (now_ms - t0_ms) // 80
    assert tick <= runs <= max(tick, current)
    assert not any(useful(missed) for missed in range(tick, runs))
    assert useful(runs) or runs in (tick, current)
