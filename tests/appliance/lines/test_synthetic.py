"""A synthetic caller on a fake clock, with a real channel and a box that is a few lines long."""

import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import control
from appliance.admission import Reason
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.frame_ring import FINAL, GENERATED, LAST, DownlinkHeader, UplinkHeader
from appliance.lines.synthetic import EARLIEST_NS, Network, State, SyntheticCall, SyntheticPlan

PERIOD_NS = 80 * MS
SAMPLES = 16
SPEECH = np.arange(5 * SAMPLES, dtype=np.float32).reshape(5, SAMPLES)
PERFECT = Network()
WELCOME = control.Welcome(
    control.PROTOCOL, "b", "echo", False, "", PERIOD_NS, 200, SAMPLES, 0, "p", ()
)


def plan(
    network: Network = PERFECT, frames: int = 10, phase: float = 0.0, offset: int = 0
) -> SyntheticPlan:
    return SyntheticPlan(1, 0, frames * PERIOD_NS, network, offset, phase, seed=3)


class Desk:
    """One call and the box's end of its channel."""

    def __init__(self, call: SyntheticCall) -> None:
        self.call = call
        self.name = f"dbxtest-{uuid.uuid4().hex[:12]}"
        self.channel = Channel.create(self.name, SAMPLES)
        self.heard: list[tuple[int, UplinkHeader, float]] = []
        self._pcm = np.zeros(SAMPLES, np.float32)

    def join(self) -> None:
        assert self.call.advance(0) == [control.Join(1, "synthetic", "caller 1")]
        self.call.admitted(control.Admitted(1, 7, 9, self.name, 16, 64, 256), 0)

    def run(self, until_ns: int, answers: bool = True) -> None:
        """Advance every 2 ms; the box takes frames as they come and answers each after 30 ms."""
        for now_ns in range(0, until_ns, 2 * MS):
            self.call.advance(now_ns)
            while (header := self.channel.uplink.get(self._pcm)) is not None:
                self.heard.append((now_ns, header, float(self._pcm[0])))
                if answers:
                    flags = GENERATED | (FINAL if header.flags & LAST else 0)
                    index = len(self.heard) - 1
                    reply = DownlinkHeader(7, 9, index, 0, now_ns + 99 * MS, now_ns, 0, flags)
                    assert self.channel.downlink.put(reply, self._pcm)


@pytest.fixture
def desks() -> Iterator[list[Desk]]:
    made: list[Desk] = []
    yield made
    for desk in made:
        desk.channel.close()
        desk.channel.unlink()


def test_a_perfect_caller_says_its_speech_in_a_loop_on_the_grid(desks: list[Desk]) -> None:
    desk = Desk(SyntheticCall(plan(frames=7, offset=3), SPEECH, WELCOME))
    desks.append(desk)
    desk.join()
    desk.run(900 * MS)
    assert [header.frame_index for _, header, _ in desk.heard] == list(range(7))
    assert [value for *_, value in desk.heard] == [48, 64, 0, 16, 32, 48, 64]
    assert [bool(header.flags & LAST) for _, header, _ in desk.heard] == [False] * 6 + [True]
    # Before tick 1, by the least lead; then one per period.
    assert [header.captured_ns for _, header, _ in desk.heard] == [
        PERIOD_NS - EARLIEST_NS + n * PERIOD_NS for n in range(7)
    ]
    assert desk.call.state is State.LISTENING
    desk.call.gone(control.Gone(7, "finished"), 900 * MS)
    found = desk.call.report()
    assert (found.sent, found.delivered, found.filled, found.discarded) == (7, 7, 0, 0)
    assert (found.ended, found.session, found.strays) == ("finished", 7, 0)
    assert 70 * MS < found.smallest_buffer_ns <= 80 * MS
    assert desk.channel.receipts.waiting == 7


def test_a_silent_box_fills_and_the_line_gives_up(desks: list[Desk]) -> None:
    desk = Desk(SyntheticCall(plan(frames=3), SPEECH, WELCOME))
    desks.append(desk)
    desk.join()
    desk.run(11 * NS_PER_S, answers=False)
    assert desk.call.is_over
    assert desk.call.report().ended == "the box did not end the call"


def test_a_full_ring_loses_frames_but_never_the_last_one(desks: list[Desk]) -> None:
    desk = Desk(SyntheticCall(plan(frames=30), SPEECH, WELCOME))
    desks.append(desk)
    desk.join()
    for now_ns in range(0, 4 * NS_PER_S, 10 * MS):
        desk.call.advance(now_ns)  # the box reads nothing
    waiting = desk.channel.uplink.waiting
    found = desk.call.report()
    assert (found.overflows, desk.call.state) == (29 - waiting, State.TALKING)
    pcm = np.zeros(SAMPLES, np.float32)
    assert desk.channel.uplink.get(pcm) is not None
    desk.call.advance(4 * NS_PER_S)
    assert desk.call.state is State.LISTENING  # there was room for the last frame


def test_losses_and_jitter_come_from_the_seed_and_frames_keep_their_order(
    desks: list[Desk],
) -> None:
    seen = []
    for _ in range(2):
        network = Network(jitter_ns=200 * MS, loss=0.3)
        desk = Desk(SyntheticCall(plan(network, frames=60, phase=0.5), SPEECH, WELCOME))
        desks.append(desk)
        desk.join()
        desk.run(7 * NS_PER_S)
        seen.append([(now_ns, header.frame_index) for now_ns, header, _ in desk.heard])
        found = desk.call.report()
        assert found.sent + found.lost_on_purpose == 60
        assert 5 < found.lost_on_purpose < 35
    assert seen[0] == seen[1]
    indices = [index for _, index in seen[0]]
    assert indices == sorted(indices)
    late = [now_ns - 60 * MS - index * PERIOD_NS for now_ns, index in seen[0]]
    assert max(late) > 100 * MS


def test_a_refused_caller_says_why() -> None:
    call = SyntheticCall(plan(), SPEECH, WELCOME)
    call.advance(0)
    call.refused(control.Refused(1, Reason.TIME, "too slow"), 1)
    found = call.report()
    assert (found.ended, found.refused, found.detail) == ("refused", "time", "too slow")
    assert (found.session, found.sent) == (0, 0)


def test_a_caller_whom_an_operator_ends_was_not_refused_and_says_so() -> None:
    said = "an operator ended it"
    call, primed = (SyntheticCall(plan(), SPEECH, WELCOME) for _ in range(2))
    for each in (call, primed):
        each.advance(0)
    call.gone(control.Gone(7, control.OPERATOR, said), 1)
    primed.refused(control.Refused(1, Reason.OPERATOR, said), 1)
    for each in (call, primed):
        found = each.report()
        assert (found.ended, found.refused, found.detail) == ("operator", "", said)


def test_a_box_that_never_answers_is_given_up() -> None:
    call = SyntheticCall(plan(), SPEECH, WELCOME)
    call.advance(0)
    call.advance(10 * NS_PER_S)
    assert (call.is_over, call.report().ended) == (True, "the box did not answer")


@given(skew=st.floats(-1000, 1000), frames=st.integers(0, 45_000))
def test_a_fast_clock_gains_what_its_skew_says(skew: float, frames: int) -> None:
    due = Network(skew_ppm=skew).due_ns(0, PERIOD_NS, frames)
    assert due == pytest.approx(frames * PERIOD_NS * (1 - skew / 1e6), abs=1)


def test_a_session_that_ended_before_its_channel_was_opened_ends_for_the_boxs_reason() -> None:
    """The box may say Admitted, Gone, or die, and its memory go, before either has been read."""

    def admitted() -> SyntheticCall:
        call = SyntheticCall(plan(), SPEECH, WELCOME)
        call.advance(0)
        call.admitted(control.Admitted(1, 7, 9, "dbxtest-none", 16, 64, 256), 0)
        assert call.advance(1) == []
        assert not call.is_over
        return call

    shed, lost, silent = admitted(), admitted(), admitted()
    shed.gone(control.Gone(7, "shed"), 2)
    lost.lost("the box closed the connection", 2)
    silent.advance(10 * NS_PER_S)
    assert shed.report().ended == "shed"
    assert lost.report().ended == "the box closed the connection"
    assert "dbxtest-none cannot be opened" in silent.report().ended
    assert {call.report().session for call in (shed, lost, silent)} == {7}
