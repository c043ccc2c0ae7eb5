"""The grid does not move, and nobody wakes up early."""

import pytest

from appliance.clock import NS_PER_MS as MS
from appliance.clock import MonotonicClock, TickGrid
from tests.fakes import FakeClock


def test_a_late_tick_does_not_delay_the_ones_after_it() -> None:
    clock = FakeClock()
    grid = TickGrid(t0_ns=0, period_ns=80 * MS)
    starts = []
    for tick, work_ms in enumerate([10, 95, 10]):
        clock.sleep_until(grid.start_ns(tick))
        starts.append(clock.now_ns() // MS)
        clock.advance(work_ms * MS)
    assert starts == [0, 80, 175]
    clock.sleep_until(grid.start_ns(3))
    assert clock.now_ns() == 240 * MS


def test_an_hour_of_ticks_is_an_hour() -> None:
    grid = TickGrid(t0_ns=7, period_ns=80 * MS)
    assert grid.start_ns(45_000) - grid.t0_ns == 3_600 * 1_000_000_000


def test_margin_is_what_is_left_until_the_next_tick() -> None:
    grid = TickGrid(t0_ns=100, period_ns=80)
    assert grid.margin_ns(0, finished_ns=150) == 30
    assert grid.margin_ns(0, finished_ns=181) == -1


def test_a_time_lies_in_exactly_one_tick() -> None:
    grid = TickGrid(t0_ns=100, period_ns=80)
    assert [grid.tick_at(now) for now in (99, 100, 179, 180)] == [-1, 0, 0, 1]


@pytest.mark.clock
def test_the_real_clock_never_returns_before_its_time_and_not_far_after() -> None:
    clock = MonotonicClock()
    late_ns = []
    for _ in range(20):
        deadline_ns = clock.now_ns() + 2 * MS
        clock.sleep_until(deadline_ns)
        late_ns.append(clock.now_ns() - deadline_ns)
    assert min(late_ns) >= 0
    # The quickest of 20: the others may have met a busy machine.
    assert min(late_ns) < 1 * MS


@pytest.mark.clock
def test_a_deadline_that_has_passed_is_not_slept_for() -> None:
    clock = MonotonicClock()
    before_ns = clock.now_ns()
    clock.sleep_until(before_ns - 10_000 * MS)
    assert clock.now_ns() - before_ns < 1_000 * MS
