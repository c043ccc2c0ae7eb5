"""A call's frames, and how it begins and ends; `test_sip_call_control`: who ends it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance import control
from appliance.admission import Reason
from appliance.clock import NS_PER_MS
from appliance.frame_ring import Outcome
from appliance.lines.sip_call import State, Verb, Want
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_hear import HandIn
from tests.sip_call_rig import PERIOD_NS, T0_NS, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, SipAccount(user="bot", max_s=60, digits={"0": "sip:d@p", "#": "hang-up"}))
    yield made
    made.close()


def test_a_call_hands_in_one_frame_a_tick_and_every_frame_of_the_model_has_one_receipt(
    rig: Rig,
) -> None:
    rig.answer()
    join = rig.said[0]
    assert isinstance(join, control.Join)
    assert (join.line, join.caller) == ("sip", "sip:ann@pbx")
    rig.run(20)
    assert set(rig.heard) == {1}
    assert rig.media.gaps == 0
    rig.bye()
    assert rig.said[-1] == control.Leave(1, "bye")
    rig.gone()
    assert rig.call.is_done
    outcomes = rig.outcomes()
    assert sorted(i for found in outcomes.values() for i in found) == list(range(rig.frame))
    assert len(outcomes[Outcome.DELIVERED]) >= rig.frame - 4
    figures = rig.call.figures()
    assert figures.frames == pytest.approx(20_000 / 80, abs=1)
    assert figures.whole >= figures.frames - 2
    assert rig.call.stats == {"rx_packets": 5.0}


def test_ticks_that_take_longer_cost_a_gap_or_two_and_the_delay_is_given_back_later(
    rig: Rig,
) -> None:
    rig.answer()
    rig.run(5)
    before = rig.call.figures()
    rig.step_ns = 72 * NS_PER_MS
    rig.run(5)
    slow = rig.call.figures()
    assert slow.underruns - before.underruns <= 2
    assert rig.media.gaps <= 4
    assert slow.delivered > before.delivered + 55
    rig.step_ns = 5 * NS_PER_MS
    rig.run(40)
    after = rig.call.figures()
    assert after.underruns == slow.underruns
    assert rig.media.gaps <= 4
    # The phase went back, and what then waited in the sender was worked off.
    assert rig.media.queued <= 8 * (40 + 30 + 20 + 80)
    assert after.made_to_queued is not None
    assert after.made_to_queued.p50_ms < 60


def test_a_silent_peer_gets_frames_of_comfort_noise_until_it_is_given_up(rig: Rig) -> None:
    rig.answer()
    rig.talks = False
    rig.run(4.9)
    assert set(rig.heard) == {1}
    rig.run(0.3)
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == "no audio from the caller for 5 s"
    assert any(isinstance(m, control.Leave) for m in rig.said)


@pytest.mark.parametrize("how", ["silent", "one packet", "on hold"])
def test_a_caller_of_whom_nothing_has_ever_come_is_missed_once(rig: Rig, how: str) -> None:
    rig.answer()
    rig.talks = how == "one packet"
    rig.run(0.1)
    rig.talks = False
    if how == "on hold":
        rig.call.held(True, rig.now_ns)
    rig.run(2.8)
    assert not rig.call.hearing.misses_caller(rig.now_ns)
    rig.run(0.2)
    assert rig.call.hearing.misses_caller(rig.now_ns) == (how == "silent")
    assert not rig.call.hearing.misses_caller(rig.now_ns)


def test_on_hold_the_clock_goes_on_frames_are_discarded_and_the_call_resumes(rig: Rig) -> None:
    rig.answer()
    rig.run(4)
    rig.call.held(True, rig.now_ns)
    rig.call.held(True, rig.now_ns)  # hold twice is hold
    rig.talks = False
    before = rig.frame
    rig.run(10)
    during = rig.frame
    rig.call.held(False, rig.now_ns)
    rig.talks = True
    rig.run(4)
    assert set(rig.heard) == {1}
    assert rig.wants == []
    discarded = rig.outcomes()[Outcome.DISCARDED]
    assert len(discarded) == pytest.approx(during - before, abs=3)
    assert rig.call.figures().held_ms == 10_000
    assert rig.call.figures().underruns == 0
    assert rig.outcomes()[Outcome.DELIVERED][-1] > during


def test_a_hold_that_does_not_end_is_ended(rig: Rig) -> None:
    rig.answer()
    rig.call.held(True, rig.now_ns)
    rig.run(20.2)
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == "on hold for 20 s"


def test_a_call_that_lasts_too_long_is_ended(rig: Rig) -> None:
    rig.answer()
    rig.run(60.2)
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == "longer than 60 s"
    assert not rig.call.is_done
    rig.call.closed("we hung up", {}, rig.now_ns)
    rig.gone()
    assert rig.call.is_done
    assert rig.call.why == "longer than 60 s"


def test_a_caller_the_box_refuses_is_refused_with_its_reason(rig: Rig) -> None:
    rig.turn()
    rig.call.refused(control.Refused(1, Reason.MEMORY, "full"), rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.REJECT)]
    assert rig.call.why == "refused (memory): full"
    rig.call.closed("rejected", {}, rig.now_ns)
    assert rig.call.is_done


def test_a_caller_who_hangs_up_while_it_rings_leaves_no_session_behind(rig: Rig) -> None:
    rig.turn()
    rig.bye()
    assert rig.call.state is State.LEAVING
    assert rig.said[1:] == [control.Withdraw(1)]  # a box that feeds its persona may stop
    rig.call.admitted(control.Admitted(1, 1, 7, rig.channel.name, 16, 64, 256), rig.now_ns, T0_NS)
    rig.turn()
    assert rig.said[2:] == [control.Leave(1, "hung up")]
    assert Want(Verb.ANSWER) not in rig.wants
    rig.call.gone(control.Gone(1, "left"), rig.now_ns)
    assert rig.call.is_done


def test_a_caller_taken_back_in_time_is_refused_by_the_box_and_over(rig: Rig) -> None:
    rig.turn()
    rig.bye()
    rig.call.refused(control.Refused(1, Reason.FAULT, "its line took it back"), rig.now_ns)
    assert rig.call.is_done
    assert rig.call.why == "bye"
    assert rig.said[1:] == [control.Withdraw(1)]


def test_a_box_that_never_answers_is_waited_for_10_s(rig: Rig) -> None:
    rig.run(9.9)
    assert rig.wants == []
    rig.run(0.3)
    assert rig.wants == [Want(Verb.REJECT)]


@pytest.mark.parametrize("how", ["gone", "lost"])
def test_when_the_box_ends_it_or_dies_the_caller_is_hung_up_on(rig: Rig, how: str) -> None:
    rig.answer()
    rig.run(1)
    if how == "gone":
        rig.call.gone(control.Gone(1, "shed"), rig.now_ns)
    else:
        rig.call.lost("the box is gone", rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == ("the box ended it (shed)" if how == "gone" else "the box is gone")
    rig.call.closed("x", {}, rig.now_ns)
    assert rig.call.is_done


def test_a_stack_that_never_says_closed_is_still_told_only_once(rig: Rig) -> None:
    rig.answer()
    rig.call.hang_up("a", rig.now_ns)
    rig.call.hang_up("b", rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == "a"


def test_a_frame_the_box_never_made_is_filled_and_the_rest_keeps_its_time(rig: Rig) -> None:
    rig.skip = lambda frame: frame == 30
    rig.answer()
    rig.run(6)
    outcomes = rig.outcomes()
    assert outcomes[Outcome.FILLED] == [30]
    figures = rig.call.figures()
    assert figures.late == figures.underruns == 0
    assert figures.queued is not None
    assert figures.queued.max_ms - figures.queued.p50_ms <= 10  # as often as this test looks
    assert outcomes[Outcome.DELIVERED][-1] > 60


def test_ticks_that_take_longer_move_the_phase_and_lose_no_frame(rig: Rig) -> None:
    rig.answer()
    rig.run(30)  # long enough that short ticks are what is expected
    other = Rig(Path(), SipAccount(user="bot"))
    other.call._times = rig.call._times
    other.answer()
    other.run(2)
    other.step_ns = 60 * NS_PER_MS
    other.run(4)
    figures = other.call.figures()
    other.close()
    assert figures.phase_moved >= 1
    assert figures.filled == 0
    assert figures.discarded == 0


def test_a_process_that_oversleeps_leaves_ticks_out_and_queues_nothing(rig: Rig) -> None:
    rig.answer()
    rig.run(2)
    rig.now_ns += 400 * NS_PER_MS
    rig.run(4)
    assert rig.call.figures().overslept >= 4
    assert max(rig.heard) == 1
    assert rig.heard.count(0) == rig.call.figures().overslept


def test_ticks_that_passed_unseen_before_the_end_are_the_calls_too(rig: Rig) -> None:
    rig.answer()
    rig.run(2.0)
    began_ns = rig.call.talked_from_ns
    assert began_ns is not None
    rig.now_ns += 300 * NS_PER_MS  # and the process sleeps meanwhile
    rig.call.closed("the caller hung up", {}, rig.now_ns)
    figures = rig.call.figures()
    counted = figures.frames + figures.overslept
    assert counted == pytest.approx((rig.now_ns - began_ns) / PERIOD_NS, abs=1.0)


@pytest.mark.parametrize(("first_ms", "then_ms"), [(12, 44), (44, 12)])
def test_a_call_has_a_tick_for_every_80_ms_however_much_earlier_frames_come_to_be_handed_in(
    tmp_path: Path, first_ms: int, then_ms: int
) -> None:
    for began in range(8):
        for lasted in range(8):
            hand_in = HandIn()
            hand_in.lead_ns = first_ms * NS_PER_MS
            rig = Rig(tmp_path, SipAccount(user="bot"), hand_in=hand_in)
            rig.run(0.01 * began)
            rig.answer()
            began_ns = rig.now_ns
            rig.run(0.3)
            hand_in.lead_ns = then_ms * NS_PER_MS
            rig.run(0.3 + 0.01 * lasted)
            rig.bye()
            figures = rig.call.figures()
            rig.close()
            counted = figures.frames + figures.overslept
            assert abs(counted - (rig.now_ns - began_ns) / PERIOD_NS) < 1.0


def test_whenever_a_call_begins_what_is_said_waits_no_longer_for_its_tick(tmp_path: Path) -> None:
    """Audio from before the first frame would be lag until it has been stretched away."""
    noise_ms = []
    for began_ms in range(80):
        rig = Rig(tmp_path, SipAccount(user="bot"))
        rig.now_ns += began_ms * NS_PER_MS
        rig.run(0.05)  # it has the answer, and talks, before we know that it has
        rig.answer()
        rig.run(1.0)
        figures = rig.call.figures()
        rig.close()
        assert figures.stretched == figures.cut_ms == 0
        assert figures.arrived_to_tick is not None
        # 12 ms before its tick, 8 to spare, a packet, and the 10 ms at which this test looks.
        assert figures.arrived_to_tick.p50_ms <= 12 + 8 + 20 + 10
        noise_ms.append(figures.noise_ms)
    # And all of a frame's time is heard where there is as much before it, but for a packet.
    assert min(noise_ms) <= 20 + 10


def test_a_caller_who_sends_nothing_has_nothing_that_waited(rig: Rig) -> None:
    rig.answer()
    rig.run(2)
    rig.talks = False
    rig.run(4)
    figures = rig.call.figures()
    assert figures.noise_ms > 3_000
    assert figures.arrived_to_tick is not None
    assert figures.arrived_to_queued is not None
    assert figures.arrived_to_tick.max_ms < 600
    assert figures.arrived_to_queued.max_ms < 700


def test_a_codec_that_changes_during_the_call_is_followed(rig: Rig) -> None:
    rig.answer()
    rig.run(2)
    rig.media.is_active = False
    rig.talks = False
    rig.run(0.3)
    rig.media.is_active = True
    rig.media.in_hz = 16_000
    for _ in range(100):
        rig.media.incoming.append(np.full(320, 1000, np.int16))
        rig.run(0.02)
    figures = rig.call.figures()
    assert figures.rate_hz == 16_000
    assert set(rig.heard) == {1}
    assert figures.concealed_ms < 500
