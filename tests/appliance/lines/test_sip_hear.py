"""When a telephone line hands frames in: as early as all its calls need, and no earlier."""

import itertools

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.sip_hear import (
    CALM_TICKS,
    LEAD_NS,
    LOOKED_AT,
    MANY_LEAD_NS,
    MOST_LEAD_NS,
    OUTLIERS,
    SPARE_LEAD_NS,
    HandIn,
)
from appliance.lines.sip_server import turn_ns

PERIOD_NS = 80 * NS_PER_MS


class Line:
    """Ticks of a line whose last frame is handed in some time after it should be."""

    def __init__(self) -> None:
        self.hand_in = HandIn()
        self.start_ns = 3 * NS_PER_S

    def tick(self, late_ns: int, calls: int = 3) -> None:
        self.start_ns += PERIOD_NS
        take_ns = self.start_ns - self.hand_in.lead_ns
        for call in range(calls):
            self.hand_in.saw(self.start_ns, take_ns + late_ns * (call + 1) // calls)


def test_a_few_calls_are_handed_in_shortly_before_their_tick() -> None:
    line = Line()
    for _ in range(500):
        line.tick(4 * NS_PER_MS)
    assert line.hand_in.lead_ns == LEAD_NS
    assert line.hand_in.may_stretch


def test_the_lead_is_what_the_last_of_all_calls_needs_within_a_few_ticks() -> None:
    line = Line()
    for _ in range(OUTLIERS + 3):
        line.tick(20 * NS_PER_MS, calls=100)
    assert line.hand_in.lead_ns - 20 * NS_PER_MS >= SPARE_LEAD_NS
    assert line.hand_in.lead_ns <= 32 * NS_PER_MS


def test_one_stall_moves_nothing_and_no_lead_is_longer_than_the_longest() -> None:
    line = Line()
    for _ in range(50):
        line.tick(NS_PER_MS)
    line.tick(300 * NS_PER_MS)
    line.tick(NS_PER_MS)
    assert line.hand_in.lead_ns == LEAD_NS
    for _ in range(50):
        line.tick(300 * NS_PER_MS)
    assert line.hand_in.lead_ns == MOST_LEAD_NS


def test_many_calls_begin_with_the_lead_that_many_need_and_few_get_the_short_one_back() -> None:
    line = Line()
    line.hand_in.look_after(100)
    assert line.hand_in.lead_ns == MANY_LEAD_NS
    for _ in range(10 * LOOKED_AT):
        line.tick(NS_PER_MS)
    assert line.hand_in.lead_ns == MANY_LEAD_NS
    line.hand_in.look_after(8)
    for _ in range(10 * LOOKED_AT):
        line.tick(NS_PER_MS)
    assert line.hand_in.lead_ns == LEAD_NS


def test_the_lead_shrinks_step_by_step_once_less_was_enough_for_long() -> None:
    line = Line()
    for _ in range(10):
        line.tick(25 * NS_PER_MS)
    grown_ns = line.hand_in.lead_ns
    for _ in range(LOOKED_AT - 10):
        line.tick(NS_PER_MS)
    assert line.hand_in.lead_ns == grown_ns
    leads = []
    for _ in range(8 * LOOKED_AT):
        line.tick(NS_PER_MS)
        leads.append(line.hand_in.lead_ns)
    assert leads[-1] == LEAD_NS
    assert max(a - b for a, b in itertools.pairwise(leads)) <= 4 * NS_PER_MS


def test_boxes_whose_ticks_lie_elsewhere_share_a_lead() -> None:
    hand_in = HandIn()
    for tick in range(1, 60):
        for origin_ns in (0, 30 * NS_PER_MS):
            start_ns = 3 * NS_PER_S + tick * PERIOD_NS + origin_ns
            hand_in.saw(start_ns, start_ns - hand_in.lead_ns + 20 * NS_PER_MS)
    assert 26 * NS_PER_MS <= hand_in.lead_ns <= 32 * NS_PER_MS


def test_nothing_is_stretched_for_a_second_after_a_tick_that_was_missed_by_far() -> None:
    line = Line()
    for _ in range(20):
        line.tick(NS_PER_MS)
    line.tick(200 * NS_PER_MS)
    allowed = []
    for _ in range(CALM_TICKS + 2):
        line.tick(NS_PER_MS)
        allowed.append(line.hand_in.may_stretch)
    assert allowed == [False] * CALM_TICKS + [True] * 2


def test_the_more_calls_the_rarer_they_are_looked_at() -> None:
    turns = [turn_ns(calls) for calls in (1, 24, 25, 48, 49, 500)]
    assert turns == [ms * NS_PER_MS for ms in (5, 5, 10, 10, 20, 20)]
    assert turn_ns(0) == 20 * NS_PER_MS
