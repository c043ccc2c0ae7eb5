"""One telephone call on a fake clock, between a fake stack and a fake box."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance import control
from appliance.admission import Reason
from appliance.channel import Capacities, Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import DownlinkHeader, Outcome, Receipt
from appliance.lines.sip_announce import Announcing
from appliance.lines.sip_call import Extras, Limits, PhoneCall, State, Verb, Want
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_stack import Format, Incoming
from appliance.lines.sip_transfer import MOST
from appliance.lines.sip_words import Words
from appliance.lines.web_pace import TickTimes

PERIOD_NS = 80 * NS_PER_MS
SAMPLES = 1_920
TURN_NS = 10 * NS_PER_MS
T0_NS = 3 * NS_PER_S
LIMITS = Limits(40 * NS_PER_MS, 5 * NS_PER_S, 20 * NS_PER_S, ("sip:d@p", "sip:2*@p"))
WELCOME = control.Welcome(
    control.PROTOCOL, "b", "echo", False, "", PERIOD_NS, 24_000, SAMPLES, T0_NS, "", (0,)
)


class FakeMedia:
    """A stack's audio: what the test says comes, what is written is taken 20 ms at a time."""

    codec = "g711"

    def __init__(self) -> None:
        self.in_hz = 8_000
        self.incoming: list[NDArray[np.int16]] = []
        self.queued = 0
        self.written: list[NDArray[np.int16]] = []
        self.is_active = True
        self.gaps = 0

    def format(self) -> Format | None:
        return Format(8_000, self.queued) if self.is_active else None

    def read(self) -> NDArray[np.int16]:
        ready, self.incoming = self.incoming, []
        return np.concatenate(ready) if ready else np.zeros(0, np.int16)

    def write(self, pcm: NDArray[np.int16]) -> int:
        self.written.append(pcm)
        self.queued += pcm.size
        return int(pcm.size)

    def send_packet(self) -> None:
        self.gaps += bool(self.written) and self.queued < 160
        self.queued = max(0, self.queued - 160)


class Rig:
    """A call, its stack, and a box that echoes `STEP_NS` after each tick's start."""

    def __init__(self, folder: Path, account: SipAccount, extras: Extras | None = None) -> None:
        self.media = FakeMedia()
        self.now_ns = T0_NS + 7 * NS_PER_MS
        self.call = PhoneCall(
            1,
            Incoming(1, "bot", "sip:ann@pbx", "c1", "10.0.0.1"),
            account,
            LIMITS,
            self.media,
            WELCOME,
            TickTimes(PERIOD_NS),
            self.now_ns,
            extras=extras,
        )
        self.grid = TickGrid(T0_NS, PERIOD_NS)
        self.channel = Channel.create(f"sip-{id(self)}", SAMPLES, Capacities(16, 64, 256))
        self.said: list[control.ToBox] = []
        self.wants: list[Want] = []
        self.heard: list[int] = []
        """Per tick since the session is live: how many frames the box found."""
        self.receipts: list[Receipt] = []
        self.frame = 0
        self.is_gone = False
        self.talks = True
        self.level = 1000
        """Of the caller's audio: a voice's."""
        self.step_ns = 5 * NS_PER_MS
        self.skip: Callable[[int], bool] = lambda frame: False
        self.token: Callable[[int], int] = lambda frame: 0
        self._tick = self.grid.tick_at(self.now_ns) + 1
        self._ready: list[tuple[int, DownlinkHeader]] = []

    def close(self) -> None:
        self.channel.close()
        self.channel.unlink()

    def turn(self) -> None:
        self.said += self.call.advance(self.now_ns)
        while self.call.wants:
            self.wants.append(self.call.wants.popleft())

    def run(self, seconds: float) -> None:
        """Let time pass, 10 ms at a time."""
        end_ns = self.now_ns + int(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.now_ns += TURN_NS
            if self.now_ns % (2 * TURN_NS) < TURN_NS:
                self.media.send_packet()
                if self.talks:
                    self.media.incoming.append(np.full(160, self.level, np.int16))
            self._box()
            self.turn()
            while (receipt := self.channel.receipts.get()) is not None:
                self.receipts.append(receipt)

    def _box(self) -> None:
        pcm = np.zeros(SAMPLES, np.float32)
        while self.grid.start_ns(self._tick) <= self.now_ns:
            tick, self._tick = self._tick, self._tick + 1
            if self.is_gone or (not self.frame and not self.channel.uplink.waiting):
                continue
            self.heard.append(self.channel.uplink.waiting)
            header = self.channel.uplink.get(pcm)
            heard = -1 if header is None else header.frame_index
            made_ns = self.grid.start_ns(tick) + self.step_ns
            out = DownlinkHeader(
                *(1, 7, self.frame, tick, self.grid.deadline_ns(tick), made_ns),
                text=self.token(self.frame),
                heard=heard,
            )
            if not self.skip(self.frame):
                self._ready.append((made_ns, out))
            self.frame += 1
        while self._ready and self._ready[0][0] <= self.now_ns:
            assert self.channel.downlink.put(self._ready.pop(0)[1], pcm)

    def admit(self) -> None:
        self.turn()
        admitted = control.Admitted(1, 1, 7, self.channel.name, 16, 64, 256)
        self.call.admitted(admitted, self.now_ns, T0_NS)
        self.turn()

    def answer(self) -> None:
        """Up to the moment when both talk."""
        self.admit()
        assert self.wants == [Want(Verb.ANSWER)]
        self.wants.clear()
        self.call.established(self.now_ns)

    def bye(self) -> None:
        self.call.closed("bye", {"rx_packets": 5.0}, self.now_ns)
        self.turn()

    def gone(self, why: str = "left") -> None:
        self.is_gone = True
        self.run(0.2)
        self.call.gone(control.Gone(1, why), self.now_ns)
        while (receipt := self.channel.receipts.get()) is not None:
            self.receipts.append(receipt)
        self.turn()

    def outcomes(self) -> dict[Outcome, list[int]]:
        return {o: [r.frame_index for r in self.receipts if r.outcome == o] for o in Outcome}


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


def test_keys_are_kept_and_do_what_the_account_says(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    for key in "12":
        rig.call.digit(key, rig.now_ns)
    rig.turn()
    assert rig.wants == []
    rig.call.digit("0", rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p")]
    rig.call.digit("0", rig.now_ns)  # pressed by who does not want to wait: it is under way
    rig.turn()
    assert len(rig.wants) == 1
    rig.call.digit("#", rig.now_ns)
    rig.turn()
    assert rig.wants[-1] == Want(Verb.HANG_UP)
    assert rig.call.figures().digits == "1200#"
    for _ in range(1000):
        rig.call.digit("5", rig.now_ns)
    assert len(rig.call.figures().digits) == 256


def test_a_transfer_that_fails_keeps_the_session_and_one_that_is_done_lets_it_go(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    said = len(rig.said)
    assert rig.call.transfer("sip:d@p", "operator") == ""
    assert "is under way" in rig.call.transfer("sip:d@p", "operator")
    rig.run(0.5)
    rig.call.transfer_ended("486 Busy Here", False, rig.now_ns)
    rig.run(1)
    assert rig.call.state is State.TALKING
    assert len(rig.said) == said
    assert (rig.call.sent_on.target, rig.call.sent_on.outcome) == ("sip:d@p", "486 Busy Here")
    assert rig.call.transfer("sip:22@p", "key 0") == ""
    rig.turn()
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p"), Want(Verb.TRANSFER, "sip:22@p")]
    rig.call.transfer_ended("answered", True, rig.now_ns)
    rig.call.closed("Call transfered", {}, rig.now_ns)
    rig.turn()
    assert rig.said[-1] == control.Leave(1, "transferred to sip:22@p")
    rig.gone()
    assert rig.call.is_done
    assert rig.call.sent_on.is_done
    assert len(rig.wants) == 2  # the stack has closed it already


def test_a_peer_that_hangs_up_before_it_says_what_came_of_a_transfer(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    rig.call.transfer("sip:d@p", "operator")
    rig.bye()
    assert rig.call.sent_on.outcome == "the call ended before the peer said: bye"
    assert not rig.call.sent_on.is_done
    assert rig.call.transfer("sip:d@p", "operator") == "nobody talks on this call"


def test_nobody_is_transferred_where_the_operator_did_not_say_so(rig: Rig) -> None:
    rig.answer()
    assert "not allowed" in rig.call.transfer("sip:1900555@p", "operator")
    assert "not allowed" in rig.call.transfer("sip:d@p;maddr=evil.example", "operator")
    for _ in range(MOST):
        assert rig.call.transfer("sip:d@p", "operator") == ""
        rig.call.transfer_ended("603 Decline", False, rig.now_ns)
    assert f"asked for {MOST} transfers" in rig.call.transfer("sip:d@p", "operator")


class Says:
    """A model that says a word's piece in one frame each, from ``after`` frames on."""

    PIECES = ("", "\u2581so", "\u2581good", "bye", ",", "\u2581have", "\u2581a", "\u2581day")

    def __init__(self, after: int, *ids: int) -> None:
        self.after, self.ids = after, ids

    def __call__(self, frame: int) -> int:
        at = frame - self.after
        return self.ids[at] if 0 <= at < len(self.ids) else 0


@pytest.fixture
def saying(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(what: str, says: Callable[[int], int]) -> Rig:
        words = Words({"Goodbye": what}, Says.PIECES, (0,), 1500 * NS_PER_MS)
        rig = Rig(tmp_path, SipAccount(user="bot"), Extras(words))
        rig.token = says
        rig.level = 30  # the caller is quiet, as a room is
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


def test_the_models_goodbye_ends_the_call_once_it_has_been_heard(
    saying: Callable[..., Rig],
) -> None:
    rig = saying("hang-up", Says(25, 1, 2, 3, 4, 0, 5, 6, 7))
    rig.answer()
    rig.run(4.0)  # its last word is in frame 32, handed over 2.7 s after the first
    assert rig.wants == []
    rig.run(0.7)
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == 'words "Goodbye"'
    # All of what it said, and the pause after it, has been heard.
    assert rig.outcomes()[Outcome.DELIVERED][-1] >= 32 + 1500 // 80
    rig.call.closed("we hung up", {}, rig.now_ns)
    rig.gone()
    assert rig.said[-1] == control.Leave(1, 'words "Goodbye"')


def test_a_caller_who_still_talks_is_heard_out(saying: Callable[..., Rig]) -> None:
    rig = saying("hang-up", Says(25, 2, 3))
    rig.level = 1000
    rig.answer()
    rig.run(6.0)
    assert rig.wants == []
    rig.level = 30
    rig.run(1.3)
    assert rig.wants == []
    rig.run(0.5)
    assert rig.wants == [Want(Verb.HANG_UP)]


def test_a_model_that_talks_on_did_not_mean_to_end(saying: Callable[..., Rig]) -> None:
    rig = saying("hang-up", Says(25, 2, 3, *([1] * 100)))
    rig.answer()
    rig.run(14)
    assert rig.wants == []


def test_words_may_send_the_caller_on_and_a_reset_forgets_them(
    saying: Callable[..., Rig],
) -> None:
    rig = saying("sip:d@p", Says(25, 2, 3))
    rig.answer()
    rig.run(3.0)
    rig.call.began_anew()
    rig.run(3.0)
    assert rig.wants == []
    rig.token = Says(rig.frame + 5, 2, 3)
    rig.run(3.0)
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p")]
    assert rig.call.sent_on.by == 'words "Goodbye"'


def test_an_announcement_is_heard_whole_before_the_session_goes_live(tmp_path: Path) -> None:
    tone = np.sin(np.arange(24_000) / 10).astype(np.float32)
    rig = Rig(tmp_path, SipAccount(user="bot"), Extras(announcing=Announcing(tone, 24_000)))
    rig.answer()
    rig.run(0.9)
    assert rig.heard == []
    assert rig.media.queued <= 800
    rig.run(3.0)
    said = np.concatenate(rig.media.written[: len(rig.media.written)])
    assert np.abs(said[:8_000].astype(np.float64)).mean() > 10_000
    assert rig.heard[0] == 1
    assert rig.frame == pytest.approx((3.9 - 1.1) / 0.08, abs=4)
    figures = rig.call.figures()
    assert figures.whole >= figures.frames - 2
    rig.close()


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


@pytest.mark.parametrize("is_done", [True, False])
def test_a_box_that_fails_hands_the_caller_to_somebody(tmp_path: Path, is_done: bool) -> None:
    rig = Rig(tmp_path, SipAccount(user="bot", fallback="sip:22@p"))
    rig.answer()
    rig.run(1)
    rig.call.gone(control.Gone(1, "shed"), rig.now_ns)
    rig.run(5)
    assert rig.wants == [Want(Verb.TRANSFER, "sip:22@p")]
    assert not rig.call.is_done
    assert (rig.call.sent_on.by, rig.call.why) == ("the box ended it (shed)",) * 2
    if is_done:
        rig.call.transfer_ended("answered", True, rig.now_ns)
    else:
        rig.call.transfer_ended("486 Busy Here", False, rig.now_ns)
        rig.turn()
        assert rig.wants[1:] == [Want(Verb.HANG_UP)]
    rig.call.closed("x", {}, rig.now_ns)
    rig.turn()
    assert rig.call.is_done
    rig.close()


def test_a_call_that_was_ended_on_purpose_falls_back_on_nobody(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SipAccount(user="bot", fallback="sip:22@p"))
    rig.answer()
    rig.run(1)
    rig.call.hang_up("key #", rig.now_ns)
    rig.gone()
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.sent_on.target == ""
    rig.close()


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
    assert rig.media.gaps == 0
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
