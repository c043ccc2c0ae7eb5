"""When replies leave, and what is held back: on times that a test chooses."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.lines.web_pace import (
    EASE_NS,
    GIVE_NS,
    GUARD_NS,
    LOOKED_AT,
    STEADY_NS,
    Cushion,
    Phase,
    TickTimes,
)

PERIOD_NS = 80 * MS


def test_a_phase_begins_at_what_a_tick_takes_and_its_guard() -> None:
    assert Phase(PERIOD_NS, 15 * MS, follows=False).phase_ns == 15 * MS + STEADY_NS
    assert Phase(PERIOD_NS, 15 * MS, follows=True).phase_ns == 15 * MS + EASE_NS
    assert Phase(PERIOD_NS, 500 * MS, follows=False).phase_ns == PERIOD_NS + GUARD_NS


def test_a_miss_moves_everything_later_but_not_beyond_the_deadline_and_its_guard() -> None:
    phase = Phase(PERIOD_NS, 15 * MS, follows=False)
    assert phase.miss(5 * MS) == 5 * MS
    assert phase.phase_ns == 20 * MS + STEADY_NS
    assert phase.miss(500 * MS) == 70 * MS - STEADY_NS
    assert phase.miss(MS) == 0
    assert (phase.phase_ns, phase.moved) == (phase.latest_ns, 2)


def test_only_a_client_that_follows_is_sent_frames_earlier_and_only_after_a_while() -> None:
    published, ours = Phase(PERIOD_NS, PERIOD_NS, False), Phase(PERIOD_NS, PERIOD_NS, True)
    gave = 0
    for frame in range(2000):
        assert published.sent(60 * MS) == 0
        in_hand_ns = ours.phase_ns - 20 * MS  # ticks take 20 ms
        given_ns = ours.sent(in_hand_ns)
        assert given_ns <= GIVE_NS
        assert frame >= LOOKED_AT - 1 or not given_ns
        gave += given_ns
    assert published.phase_ns == PERIOD_NS + STEADY_NS
    assert ours.phase_ns == PERIOD_NS + EASE_NS - gave
    assert ours.phase_ns - 20 * MS == pytest.approx(EASE_NS, abs=2 * GIVE_NS)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=400), st.booleans())
def test_no_frame_leaves_before_it_is_made_and_none_that_was_made_in_time_is_lost(
    made_ms: list[int], follows: bool
) -> None:
    phase = Phase(PERIOD_NS, 15 * MS, follows)
    for made in made_ms:
        late_ns = made * MS - phase.phase_ns
        if late_ns > 0:
            phase.miss(late_ns)
        if made <= 80:
            assert phase.phase_ns >= made * MS
            phase.sent(phase.phase_ns - made * MS)
        assert 0 <= phase.phase_ns <= phase.latest_ns


def test_what_ticks_take_is_a_period_until_something_is_known() -> None:
    times = TickTimes(PERIOD_NS)
    assert times.expected_ns == PERIOD_NS
    times.forecast_ns = 25 * MS
    assert times.expected_ns == 25 * MS
    times.saw(31 * MS)
    assert times.expected_ns == 31 * MS
    for _ in range(LOOKED_AT):
        times.saw(6 * MS)
    for outlier_ms in (70, 75):
        times.saw(outlier_ms * MS)
    assert times.expected_ns == 6 * MS  # three hiccups are not what ticks take
    times.forecast_ns = 500 * MS
    assert times.expected_ns <= PERIOD_NS


def seconds(until: int) -> Iterator[int]:
    yield from (second * NS_PER_S for second in range(until))


def test_a_cushion_grows_at_once_and_shrinks_slowly() -> None:
    cushion = Cushion(10 * MS, 30 * MS)
    assert cushion.at(0) == 10 * MS
    for _ in range(9):
        cushion.too_small(5 * NS_PER_S)
    assert cushion.at(5 * NS_PER_S) == 30 * MS
    held = [cushion.at(now) for now in seconds(1000)]
    assert held[24] == 30 * MS
    assert held[25] == 29 * MS
    assert held[-1] == 10 * MS
    assert held == sorted(held, reverse=True)
