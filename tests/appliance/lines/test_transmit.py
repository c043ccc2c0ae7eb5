"""How much of the model's audio waits in a telephone call's sender."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS
from appliance.lines.transmit import (
    CALM_FRAMES,
    GROW_PPM,
    LOW_NS,
    MOST_NS,
    SLACK_NS,
    WORK_OFF_PPM,
    Handover,
    Lead,
)

LEAD_NS = 40 * NS_PER_MS


class Sender:
    """A stack's sender on a fake clock: takes 20 ms every 20 ms, and silence when it is empty."""

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.queued_ns = 0
        self.now_ns = 0
        self.gaps_ns = 0

    def until(self, now_ns: int) -> None:
        for _ in range(self.now_ns // (20 * NS_PER_MS), now_ns // (20 * NS_PER_MS)):
            self.gaps_ns += max(0, 20 * NS_PER_MS - self.queued_ns)
            self.queued_ns = max(0, self.queued_ns - 20 * NS_PER_MS)
        self.now_ns = now_ns

    def hand_over(self, now_ns: int) -> Handover:
        self.until(now_ns)
        plan = self.lead.hand_over(self.queued_ns)
        frame_ns = 80 * NS_PER_MS - plan.drop_ns
        self.queued_ns += plan.pad_ns + frame_ns + int(frame_ns * plan.ppm / 1e6)
        return plan


def test_frames_at_their_pace_wait_for_the_lead_and_never_run_dry() -> None:
    sender = Sender(Lead(LEAD_NS))
    plans = [sender.hand_over(tick * 80 * NS_PER_MS + 7) for tick in range(200)]
    assert plans[0].pad_ns == LEAD_NS
    assert all(plan == Handover() for plan in plans[1:])
    assert sender.gaps_ns == sender.lead.underruns == 0


def test_what_is_late_by_less_than_the_lead_is_not_heard() -> None:
    sender = Sender(Lead(LEAD_NS))
    for tick in range(50):
        sender.hand_over((tick * 80 + (19 if tick % 7 == 3 else 0)) * NS_PER_MS)
    assert sender.gaps_ns == 0


def test_a_late_frame_is_one_gap_and_the_delay_it_leaves_is_worked_off() -> None:
    sender = Sender(Lead(LEAD_NS))
    at_ms = [tick * 80 + (95 if tick == 20 else 0) for tick in range(21)]
    at_ms += [tick * 80 + max(0, 95 - 80 * (tick - 20)) for tick in range(21, 220)]
    plans = [sender.hand_over(ms * NS_PER_MS) for ms in at_ms]
    assert sum(plan.is_late for plan in plans) == sender.lead.underruns == 1
    assert any(plan.ppm == WORK_OFF_PPM for plan in plans)
    assert plans[-1].ppm == 0.0
    assert sender.queued_ns - 80 * NS_PER_MS <= LEAD_NS + SLACK_NS + 20 * NS_PER_MS


def test_frames_that_come_later_for_good_find_the_lead_laid_again() -> None:
    sender = Sender(Lead(LEAD_NS))
    plans = [
        sender.hand_over((tick * 80 + (60 if tick >= 20 else 0)) * NS_PER_MS + 7)
        for tick in range(300)
    ]
    assert sender.lead.underruns == 2
    assert [tick for tick, plan in enumerate(plans) if plan.pad_ns] == [0, 21]
    assert sender.gaps_ns <= 20 * NS_PER_MS
    assert plans[22:] == [Handover()] * 278


def test_frames_that_come_later_bit_by_bit_find_the_lead_grown_before_it_is_gone() -> None:
    """As when more and more calls are on: 5 ms a second for ten seconds."""
    sender = Sender(Lead(30 * NS_PER_MS))
    plans = [
        sender.hand_over((tick * 80 + min(tick * 2 // 5, 50)) * NS_PER_MS + 7)
        for tick in range(400)
    ]
    assert any(plan.ppm == GROW_PPM for plan in plans)
    assert sender.gaps_ns == sender.lead.underruns == 0
    assert plans[-100:] == [Handover()] * 100


def test_after_a_pause_on_purpose_the_lead_is_laid_again_and_nobody_was_late() -> None:
    lead = Lead(LEAD_NS)
    lead.hand_over(0)
    lead.restart()
    assert lead.hand_over(0) == Handover(pad_ns=LEAD_NS)
    assert lead.underruns == 0


@given(st.lists(st.integers(0, 2_000 * NS_PER_MS), min_size=1, max_size=60))
def test_whatever_waits_the_bound_holds_and_every_gap_is_counted(queued: list[int]) -> None:
    lead = Lead(LEAD_NS)
    plans = [lead.hand_over(ns) for ns in queued]
    for ns, plan in zip(queued, plans, strict=True):
        assert plan.pad_ns == 0 or ns + plan.pad_ns <= MOST_NS
        assert plan.drop_ns >= 0
        if plan.drop_ns:
            assert ns - plan.drop_ns == MOST_NS
    assert lead.underruns == sum(ns == 0 for ns in queued[1:])
    assert lead.dropped_ns == sum(plan.drop_ns for plan in plans)
    shortened = [plan for plan in plans if plan.ppm == WORK_OFF_PPM]
    assert len(queued) >= CALM_FRAMES or not shortened
    longer = [ns for ns, plan in zip(queued, plans, strict=True) if plan.ppm == GROW_PPM]
    assert all(0 < ns < LOW_NS for ns in longer)
