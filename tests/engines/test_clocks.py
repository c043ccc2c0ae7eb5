"""Native clocks: everything about state size and age follows from the declaration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.clocks import (
    ClockKind,
    NativeClock,
    Order,
    bytes_at,
    check,
    pages_due,
)


def ring(retain: int, advance: str = "1", pinned: int = 0, axis: int = 1) -> NativeClock:
    return NativeClock(ClockKind.RING, axis, advance, retain, pinned, Order.MODULO)


@pytest.mark.parametrize(
    ("clock", "ticks", "rows"),
    [
        (ring(3000), 0, 0),
        (ring(3000), 1, 1),
        (ring(3000), 2999, 2999),
        (ring(3000), 3001, 3000),
        (ring(250, "2"), 1, 2),
        (ring(250, "2"), 125, 250),
        (ring(250, "1/2"), 3, 1),
        (NativeClock(ClockKind.WINDOW, 0, "1920", 6), 0, 6),
    ],
)
def test_valid_rows_follow_age_until_the_retention(
    clock: NativeClock, ticks: int, rows: int
) -> None:
    assert clock.valid_rows(ticks) == rows


def test_a_ring_writes_over_its_oldest_row_and_never_over_a_pinned_one() -> None:
    assert [ring(4).row_of(p) for p in range(7)] == [0, 1, 2, 3, 0, 1, 2]
    assert [ring(5, pinned=2).row_of(p) for p in range(10)] == [0, 1, 2, 3, 4, 2, 3, 4, 2, 3]


@given(
    retain=st.integers(1, 60),
    pinned=st.integers(0, 59),
    advance=st.sampled_from(["1", "2", "3", "1/2", "2/3"]),
    positions=st.integers(1, 400),
)
def test_a_ring_always_holds_its_prefix_and_its_newest_rows(
    retain: int, pinned: int, advance: str, positions: int
) -> None:
    """Simulate the writes one by one and compare what is left with the definition."""
    clock = ring(retain, advance, min(pinned, retain - 1))
    held: dict[int, int] = {}
    for position in range(positions):
        held[clock.row_of(position)] = position
    prefix = set(range(min(clock.pinned, positions)))
    newest = set(range(max(positions - (retain - clock.pinned), 0), positions))
    assert set(held.values()) == prefix | newest


def test_a_ring_costs_nothing_before_its_first_row_and_everything_else_is_whole() -> None:
    shape = (1, 3000, 4096)  # one layer's keys of the 7B model
    clock = ring(3000)
    assert bytes_at(clock, shape, 2, ticks=0) == 0
    assert bytes_at(clock, shape, 2, ticks=750) == 750 * 8192
    assert bytes_at(clock, shape, 2, ticks=10**6) == 3000 * 8192
    window = NativeClock(ClockKind.WINDOW, 1, "1920", 6)
    assert bytes_at(window, (1, 6), 4, ticks=0) == 24
    assert bytes_at(ring(8), (2, 8, 4), 4, ticks=1) == 2 * 8 * 4 * 4  # rows are not contiguous


def test_pages_are_asked_for_before_the_row_that_needs_them() -> None:
    shape, page = (1, 3000, 4096), 2 * 1024 * 1024  # 256 rows of 8 KiB to a page
    clock = ring(3000)
    assert pages_due(clock, shape, 2, ticks=0, page_bytes=page, ahead_ticks=1) == 1
    assert pages_due(clock, shape, 2, ticks=250, page_bytes=page, ahead_ticks=6) == 1
    assert pages_due(clock, shape, 2, ticks=250, page_bytes=page, ahead_ticks=7) == 2
    assert pages_due(clock, shape, 2, ticks=10**6, page_bytes=page, ahead_ticks=7) == 12


def test_a_session_stops_growing_when_its_slowest_ring_is_full() -> None:
    assert ring(250, "2").ticks_until_full() == 125
    assert ring(3000).ticks_until_full() == 3000
    assert ring(5, "1/2").ticks_until_full() == 10
    assert NativeClock(ClockKind.CONSTANT).ticks_until_full() == 0


@pytest.mark.parametrize(
    ("clock", "shape", "fault"),
    [
        (ring(250, "two"), (1, 250, 4), "rational"),
        (ring(250, "1/0"), (1, 250, 4), "rational"),
        (ring(250, "-1"), (1, 250, 4), "backwards"),
        (ring(250, "0"), (1, 250, 4), "cannot advance by 0"),
        (ring(250, axis=3), (1, 250, 4), "axis 3"),
        (ring(250), (1, 240, 4), "240"),
        (ring(250, pinned=250), (1, 250, 4), "pinned"),
        (ring(251, "2"), (1, 251, 4), "straddling"),
        (NativeClock(ClockKind.RING, 1, "1", 4), (1, 4), "modulo"),
        (NativeClock(ClockKind.CONSTANT, advance="1"), (), "cannot advance by 1"),
        (NativeClock(ClockKind.COUNTER), (), "cannot advance by 0"),
    ],
)
def test_a_contradictory_clock_says_what_is_wrong(
    clock: NativeClock, shape: tuple[int, ...], fault: str
) -> None:
    assert fault in (check(clock, shape) or "no fault found")


def test_the_models_own_clocks_are_sound() -> None:
    assert check(ring(3000), (1, 3000, 4096)) is None
    assert check(ring(250, "2"), (1, 250, 512)) is None
    assert check(NativeClock(ClockKind.COUNTER, advance="2"), ()) is None
