"""One call, second by second, with the box played by the test and no time passing."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from appliance import control
from appliance.admission import Reason
from appliance.channel import Capacities, Channel
from appliance.clock import NS_PER_MS
from appliance.frame_ring import FINAL, GENERATED, LAST, DownlinkHeader, Outcome, UplinkHeader
from appliance.lines.call import ANSWER_NS, LEAD_NS, SETTLE_NS, Call, CallPlan
from appliance.lines.wav import WavError, WavReader

PERIOD_NS = 80 * NS_PER_MS
S = 1_920
T0_NS = 7_000_000_123
_names = itertools.count()

WELCOME = control.Welcome(
    version=control.PROTOCOL,
    bundle="",
    model="",
    trained=True,
    notice="",
    period_ns=PERIOD_NS,
    sample_rate_hz=24_000,
    samples_per_frame=S,
    t0_ns=T0_NS,
    pieces="",
    silent_ids=(),
)


class Desk:
    """A call, the box's side of its channel, and the time."""

    def __init__(self, folder: Path, frames: float, plan: CallPlan, uplink: int) -> None:
        tone = np.full(round(frames * S), 0.25)
        soundfile.write(os.fsencode(plan.wav), tone, 24_000, "PCM_16", format="WAV")
        self.folder = folder
        self.call = Call(1, plan, WavReader(plan.wav), folder, WELCOME, [])
        self.channel = Channel.create(
            f"dbxtest-desk-{os.getpid()}-{next(_names)}", S, Capacities(uplink, 64, 4)
        )
        self.now_ns = T0_NS
        self.row = np.empty(S, np.float32)

    def advance(self, ns: int = 0) -> list[control.ToBox]:
        self.now_ns += ns
        return self.call.advance(self.now_ns)

    def admit(self) -> None:
        """Join at t0, admission 1 ms later: the first frame is due 60 ms after t0."""
        assert len(self.advance()) == 1
        message = control.Admitted(1, 5, 9, self.channel.name, 1, 1, 1)
        assert self.call.admitted(message, T0_NS + NS_PER_MS) == []

    def take(self) -> list[UplinkHeader]:
        taken = []
        while (header := self.channel.uplink.get(self.row)) is not None:
            taken.append(header)
        return taken

    def reply(self, index: int, flags: int = GENERATED, heard: int | None = None) -> None:
        deadline_ns = self.now_ns + PERIOD_NS
        header = DownlinkHeader(
            5, 9, index, 0, deadline_ns, self.now_ns, -1, flags, index if heard is None else heard
        )
        assert self.channel.downlink.put(header, np.full(S, 0.5, np.float32))

    def outcomes(self) -> list[tuple[int, Outcome]]:
        receipts = []
        while (receipt := self.channel.receipts.get()) is not None:
            assert (receipt.session, receipt.generation) == (5, 9)
            receipts.append((receipt.frame_index, Outcome(receipt.outcome)))
            self.advance()  # the ring holds few; the call hands in the next as there is room
        return receipts

    def reply_samples(self) -> int:
        return int(soundfile.info(self.folder / "x.reply.wav").frames)


MakeDesk = Callable[..., Desk]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[MakeDesk]:
    desks: list[Desk] = []

    def make(
        frames: float = 3,
        uplink: int = 16,
        hang_up_after_ns: int | None = None,
        abrupt: bool = False,
        start_ns: int = T0_NS,
        wav: str = "in.wav",
    ) -> Desk:
        plan = CallPlan(
            tmp_path / wav, "x", start_ns, hang_up_after_ns, abrupt, {"sampling.seed": 3.0}
        )
        desks.append(Desk(tmp_path, frames, plan, uplink))
        return desks[-1]

    yield make
    for made in desks:
        made.call.end(made.now_ns)
        made.channel.close()
        made.channel.unlink()


def test_frames_are_due_a_lead_before_each_tick_whenever_the_line_wakes_up(desk: MakeDesk) -> None:
    box = desk(frames=3)
    box.admit()
    first_ns = T0_NS + PERIOD_NS - LEAD_NS
    assert box.call.wake_ns(first_ns - 1) == first_ns
    box.now_ns = first_ns - 1
    box.advance()
    assert box.take() == []
    box.advance(1)
    assert box.take() == [UplinkHeader(0, 0, first_ns)]
    # It oversleeps by a tick and a half: both frames, at once, with the times they were due at.
    box.advance(PERIOD_NS * 5 // 2)
    assert box.take() == [
        UplinkHeader(1, 0, first_ns + PERIOD_NS),
        UplinkHeader(2, LAST, first_ns + 2 * PERIOD_NS),
    ]
    assert (box.row == 0.25).all()


def test_a_call_that_goes_well(desk: MakeDesk) -> None:
    box = desk(frames=2.5)
    box.admit()
    box.now_ns = T0_NS + 60 * NS_PER_MS
    for index in range(3):
        box.advance()
        box.now_ns += 30 * NS_PER_MS
        box.reply(index, GENERATED | (FINAL if index == 2 else 0))
        box.advance()
        box.now_ns += 50 * NS_PER_MS
    assert box.outcomes() == [(0, Outcome.DELIVERED), (1, Outcome.DELIVERED)]
    box.advance(PERIOD_NS)
    assert box.outcomes() == [(2, Outcome.DELIVERED)]
    assert not box.call.is_over
    box.call.gone(control.Gone(5, "finished"), box.now_ns)
    assert box.call.is_over
    assert box.call.trouble == ""
    report = box.call.report()
    assert (report.ended, report.frames_sent, report.frames_heard) == ("finished", 3, 3)
    assert (report.delivered, report.filled, report.receipts_unsent) == (3, 0, 0)
    assert report.round_trip_ms == 80 + 30 + 80
    span = report.captured_to_in_hand_ms
    assert span is not None
    assert (span.min, span.median, span.max) == (30.0, 30.0, 30.0)
    assert report.samples_in == report.reply_samples == box.reply_samples() == round(2.5 * S)


def test_join_says_who_calls_and_what_is_wanted(desk: MakeDesk) -> None:
    box = desk(start_ns=T0_NS + 5)
    assert box.call.wake_ns(T0_NS) == T0_NS + 5
    assert box.advance() == []
    assert box.advance(5) == [control.Join(1, "file", "in.wav", {"sampling.seed": 3.0})]
    assert box.advance(5) == []


@pytest.mark.parametrize(
    ("name", "caller"),
    [
        ("x" * 240 + ".wav", "x" * control.LONGEST_CALLER),
        (os.fsdecode(b"caf\xe9.wav"), "caf\ufffd.wav"),
    ],
    ids=["too long", "not UTF-8"],
)
def test_a_strange_file_name_is_no_trouble_for_the_line(
    desk: MakeDesk, name: str, caller: str
) -> None:
    """The box would cut off a line that sends it, and every other call of that line."""
    box = desk(wav=name)
    (join,) = box.advance()
    assert isinstance(join, control.Join)
    assert join.caller == caller
    assert control.decode_to_box(control.encode(join)) == join
    assert msgspec.json.encode(box.call.report())


def test_a_refusal_is_said_in_words(desk: MakeDesk) -> None:
    box = desk()
    box.advance()
    box.call.refused(control.Refused(1, Reason.LINES, "all 4 slots are taken"), box.now_ns)
    assert box.call.is_over
    assert box.call.trouble == "refused (lines): all 4 slots are taken"
    assert list(box.folder.glob("x.*")) == []


def test_a_box_that_does_not_answer_is_given_up_and_told_if_it_does(desk: MakeDesk) -> None:
    box = desk()
    box.advance()
    box.advance(ANSWER_NS - 1)
    assert not box.call.is_over
    box.advance(1)
    assert box.call.trouble == "the box did not answer for 10 s"
    late = control.Admitted(1, 5, 9, box.channel.name, 1, 1, 1)
    assert box.call.admitted(late, box.now_ns) == [control.Leave(5, "admitted too late")]
    assert box.call.is_over


def test_a_box_that_never_says_gone_is_given_up(desk: MakeDesk) -> None:
    box = desk(frames=1)
    box.admit()
    box.advance(PERIOD_NS)
    box.advance(SETTLE_NS)
    assert box.call.trouble == "the box did not end it within 10 s"


def test_an_operators_words_are_what_ended_the_call(desk: MakeDesk) -> None:
    box = desk(frames=3)
    box.admit()
    box.advance(PERIOD_NS)
    said = "an operator ended it: the hall is closing"
    box.call.gone(control.Gone(5, control.OPERATOR, said), box.now_ns)
    assert (box.call.is_over, box.call.trouble, box.call.report().ended) == (True, said, said)
    primed = desk()
    primed.advance()
    primed.call.refused(control.Refused(1, Reason.OPERATOR, said), primed.now_ns)
    assert (primed.call.is_over, primed.call.trouble) == (True, said)


@pytest.mark.parametrize(
    ("why", "trouble"),
    [
        ("stopped", "the box ended it: stopped"),
        ("shed", "the box ended it: shed"),
        ("left", "dbxtest-none cannot be opened"),
        ("", "dbxtest-none cannot be opened"),
    ],
)
def test_a_channel_that_is_not_there_ends_the_call_for_the_boxs_reason(
    desk: MakeDesk, why: str, trouble: str
) -> None:
    """The box may say Admitted, Gone, and take the channel away before either has been read."""
    box = desk()
    box.advance()
    replies = box.call.admitted(control.Admitted(1, 5, 9, "dbxtest-none", 1, 1, 1), box.now_ns)
    assert replies == [control.Leave(5, "the channel is gone")]
    assert box.advance(1) == []
    assert not box.call.is_over
    if why:
        box.call.gone(control.Gone(5, why), box.now_ns)
    else:
        box.advance(SETTLE_NS)
    assert box.call.is_over
    assert trouble in box.call.trouble
    assert box.call.report().ended == box.call.trouble


def test_a_channel_of_another_model_ends_the_call(desk: MakeDesk) -> None:
    box = desk()
    box.advance()
    other = Channel.create(f"{box.channel.name}-other", S // 2)
    try:
        message = control.Admitted(1, 5, 9, other.name, 1, 1, 1)
        assert box.call.admitted(message, box.now_ns) == [control.Leave(5, "the line failed")]
    finally:
        other.close()
        other.unlink()
    assert box.call.is_over
    assert f"carries frames of {S // 2} samples" in box.call.trouble


def test_a_full_uplink_drops_frames_and_counts_them_but_not_the_last(desk: MakeDesk) -> None:
    box = desk(frames=6, uplink=2)
    box.admit()
    box.advance(20 * PERIOD_NS)
    assert [header.frame_index for header in box.take()] == [0, 1]
    box.advance()
    assert [(h.frame_index, h.flags) for h in box.take()] == [(5, LAST)]
    box.advance()
    assert box.take() == []
    assert box.call.report().uplink_overflows == 3


def test_a_goodbye_makes_the_frame_it_falls_into_the_last(desk: MakeDesk) -> None:
    box = desk(frames=10, hang_up_after_ns=3 * PERIOD_NS - 1)
    box.admit()
    box.advance(20 * PERIOD_NS)
    assert [h.flags for h in box.take()] == [0, 0, LAST]
    for index in range(3):
        box.reply(index, GENERATED | (FINAL if index == 2 else 0))
    box.advance()
    box.advance(3 * PERIOD_NS)
    box.call.gone(control.Gone(5, "finished"), box.now_ns)
    assert box.call.trouble == ""
    assert box.reply_samples() == 3 * S


def test_ctrl_c_makes_the_next_frame_the_last(desk: MakeDesk) -> None:
    box = desk(frames=10)
    box.admit()
    box.advance(PERIOD_NS)
    box.call.hang_up()
    box.advance(PERIOD_NS)
    assert [h.flags for h in box.take()] == [0, LAST]
    never = desk(start_ns=T0_NS + 1)
    never.call.hang_up()
    assert never.advance() == []
    assert never.call.is_over


def test_throwing_the_handset_discards_what_was_not_heard(desk: MakeDesk) -> None:
    box = desk(frames=10, hang_up_after_ns=3 * PERIOD_NS, abrupt=True)
    box.admit()
    box.now_ns = T0_NS + 60 * NS_PER_MS
    box.advance()
    box.reply(0)
    box.advance()
    box.advance(PERIOD_NS)
    box.reply(1)
    assert box.advance(PERIOD_NS - 1) == []
    assert box.outcomes() == [(0, Outcome.DELIVERED)]
    assert box.advance(1) == [control.Leave(5, "hung up")]
    assert [h.flags for h in box.take()] == [0, 0]
    assert box.outcomes() == [(1, Outcome.DISCARDED)]
    box.reply(2)
    box.advance(NS_PER_MS)
    assert box.outcomes() == [(2, Outcome.DISCARDED)]
    box.call.gone(control.Gone(5, "left"), box.now_ns)
    assert (box.call.trouble, box.call.report().ended) == ("", "left")
    assert box.reply_samples() == S


def test_a_missing_frame_is_silence_in_the_reply_and_may_come_too_late(desk: MakeDesk) -> None:
    box = desk(frames=4)
    box.admit()
    box.now_ns = T0_NS + 60 * NS_PER_MS
    box.advance()
    box.reply(0)
    box.advance()
    box.advance(PERIOD_NS)
    box.advance(PERIOD_NS)
    assert box.outcomes() == [(0, Outcome.DELIVERED), (1, Outcome.FILLED)]
    box.reply(1)
    box.reply(2, GENERATED | FINAL)
    box.advance(NS_PER_MS)
    box.advance(PERIOD_NS)
    assert box.outcomes() == [(1, Outcome.DISCARDED), (2, Outcome.DELIVERED)]
    box.call.gone(control.Gone(5, "finished"), box.now_ns)
    reply, _ = soundfile.read(box.folder / "x.reply.wav")
    assert (reply == np.repeat([0.5, 0.0, 0.5], S)).all()


def test_receipts_wait_for_room_in_their_ring(desk: MakeDesk) -> None:
    box = desk(frames=20)
    box.admit()
    box.advance(PERIOD_NS)
    for index in range(10):
        box.reply(index)
    box.advance()
    box.advance(10 * PERIOD_NS)
    assert box.channel.receipts.waiting == 4
    assert box.outcomes() == [(index, Outcome.DELIVERED) for index in range(10)]


def test_a_file_that_breaks_half_way_ends_the_call_in_good_order(desk: MakeDesk) -> None:
    box = desk(frames=20)
    box.admit()
    box.advance(2 * PERIOD_NS)
    broken = box.call._source.reader
    broken.read = failing  # type: ignore[method-assign]
    box.advance(20 * PERIOD_NS)
    headers = box.take()
    assert headers[-1].flags == LAST
    assert len(headers) < 6
    box.reply(0, GENERATED | FINAL)
    box.advance()
    box.advance(PERIOD_NS)
    box.call.gone(control.Gone(5, "finished"), box.now_ns)
    assert box.call.trouble == "in.wav cannot be read on: the disk broke"


def failing(samples: int) -> NDArray[np.float32]:
    raise WavError("in.wav cannot be read on: the disk broke")


@pytest.mark.parametrize("why", ["fault", "timeout", "stopped", "finished"])
def test_a_call_the_box_ends_early_was_no_success(desk: MakeDesk, why: str) -> None:
    box = desk(frames=20)
    box.admit()
    box.advance(3 * PERIOD_NS)
    box.call.gone(control.Gone(5, why), box.now_ns)
    assert box.call.trouble == f"the box ended it: {why}"


def test_a_disk_that_is_full_ends_the_call_and_says_so(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = desk(frames=20)
    box.admit()
    box.advance(PERIOD_NS)
    box.reply(0)
    box.advance()
    recording = box.call._recording
    assert recording is not None
    full = Path("/dev/full").open("wb")  # noqa: SIM115, the call closes it
    recording._reply._file.close()
    recording._reply._file = full
    recording._reply.path = Path("out") / ("long/" * 60) / "x.reply.wav"
    for index in range(1, 20):
        box.reply(index)
    box.advance()
    messages = box.advance(20 * PERIOD_NS)
    assert len(messages) == 1
    assert isinstance(messages[0], control.Leave)
    assert control.decode_to_box(control.encode(messages[0])) == messages[0]  # whoever else calls
    assert "x.reply.wav cannot be written: No space left on device" in box.call.trouble
