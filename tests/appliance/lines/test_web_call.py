"""One websocket call on a fake clock: a box that ticks, a client that talks, and all that is odd.

The box is a channel and a loop over milliseconds: on each tick it takes a frame, and hands out an
echo a chosen time later. Nothing here waits, and every time asserted is exact.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from appliance import control
from appliance.admission import Reason
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.frame_ring import CONCEALED, GENERATED, DownlinkHeader, Outcome
from appliance.lines import web_call, web_pace
from appliance.lines.ogg import PageSplitter
from appliance.lines.opus import OpusIn, OpusOut
from appliance.lines.web_call import State, WebCall
from appliance.lines.web_pace import TickTimes
from appliance.lines.web_voice import OPUS, PCM
from appliance.lines.wire import Ending, Wish
from tests.web_clients import PageBuffer

SAMPLES, PERIOD_MS, T0_MS = 1920, 80, 40
WELCOME = control.Welcome(
    version=control.PROTOCOL,
    bundle="b",
    model="echo",
    trained=False,
    notice="",
    period_ns=PERIOD_MS * MS,
    sample_rate_hz=24_000,
    samples_per_frame=SAMPLES,
    t0_ns=T0_MS * MS,
    pieces="",
    silent_ids=(0,),
)
PIECES = ["", "\u2581so", "\u2581it", "<0xC3>", "<0xA9>"]
_names = itertools.count()


@dataclass
class Sim:
    """A call, its box and its client, a millisecond at a time."""

    call: WebCall
    channel: Channel
    made_ms: Callable[[int], float] = lambda tick: 5
    """How long after its start a tick's frame is there."""
    reads: bool = True
    """Whether the client takes what is sent."""
    sends: bool = True
    at_ms: int = 0
    admitted: bool = False
    heard: list[tuple[int, bytes]] = field(default_factory=list)
    """What the client got, and when (ms)."""
    said: list[control.ToBox] = field(default_factory=list)
    receipts: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By frame_index and outcome."""
    uplink: list[int] = field(default_factory=list)
    concealed: int = 0
    made: int = 0
    live: bool = False
    left: bool = False
    backlog: int = 0
    """Uplink frames that the box leaves lying, as after ticks it missed."""
    _ready: list[tuple[float, DownlinkHeader, NDArray[np.float32]]] = field(default_factory=list)
    _opus: OpusOut = field(default_factory=OpusOut)
    _before: NDArray[np.float32] = field(default_factory=lambda: np.zeros(SAMPLES, np.float32))

    def admit(self) -> None:
        message = control.Admitted(1, 9, 3, self.channel.name, 16, 64, 256)
        self.call.admitted(message, self.at_ms * MS, T0_MS * MS)
        self.admitted = True

    def run(self, until_ms: int) -> None:
        while self.at_ms < until_ms:
            self.at_ms += 1
            if self.sends and self.at_ms % 40 == 13:  # a page of 40 ms
                tone = np.sin(np.arange(960, dtype=np.float32) / 9) * 0.3
                pages = self._opus.encode(tone.astype(np.float32))
                self.call.receive(b"\x01" + pages, self.at_ms * MS)
            if self.admitted and (self.at_ms - T0_MS) % PERIOD_MS == 0:
                self._tick((self.at_ms - T0_MS) // PERIOD_MS)
            while self._ready and self._ready[0][0] <= self.at_ms:
                _, header, pcm = self._ready.pop(0)
                now = header._replace(made_ns=self.at_ms * MS)
                assert self.channel.downlink.put(now, pcm)
            self.turn()

    def turn(self) -> None:
        self.said += self.call.advance(self.at_ms * MS)
        self.left |= any(isinstance(m, control.Leave) for m in self.said)
        while self.reads and self.call.outbox:
            self.heard.append((self.at_ms, self.call.outbox.popleft()))
        self.settle()

    def settle(self) -> None:
        while (receipt := self.channel.receipts.get()) is not None:
            assert (receipt.session, receipt.generation) == (9, 3)
            self.receipts[receipt.frame_index, receipt.outcome] += 1

    def gone(self, why: str = "left") -> None:
        self.call.gone(control.Gone(9, why), self.at_ms * MS)
        self.settle_after()

    def settle_after(self) -> None:
        self.settle()
        while self.call.outbox:
            self.heard.append((self.at_ms, self.call.outbox.popleft()))

    def _tick(self, tick: int) -> None:
        waiting = self.channel.uplink.waiting
        if self.left or (not self.live and not waiting):
            return
        self.live = True
        pcm = np.zeros(SAMPLES, np.float32)
        got = self.channel.uplink.get(pcm) if waiting > self.backlog else None
        flags = GENERATED
        if got is None:
            flags |= CONCEALED
            self.concealed += 1
        else:
            self.uplink.append(got.frame_index)
        start_ms = T0_MS + tick * PERIOD_MS
        header = DownlinkHeader(
            9,
            3,
            self.made,
            tick,
            (start_ms + PERIOD_MS) * MS,
            0,
            self.made % len(PIECES),
            flags,
            -1 if got is None else got.frame_index,
        )
        self._ready.append((start_ms + self.made_ms(tick), header, self._before))
        self._before = pcm
        self.made += 1

    def kinds(self) -> list[int]:
        return [message[0] for _, message in self.heard]

    def audio_ms(self) -> list[int]:
        return [at for at, message in self.heard if message[0] == 1]

    def outcomes(self) -> dict[int, list[int]]:
        return {outcome: sorted(i for i, o in self.receipts if o == outcome) for outcome in Outcome}


def start(wish: Wish | None = None, subprotocol: str = "", times: TickTimes | None = None) -> Sim:
    call = WebCall(1, wish or Wish({}), "127.0.0.1", WELCOME, PIECES, 0, subprotocol, times)
    channel = Channel.create(f"dbx-test-web-{id(call)}-{next(_names)}", SAMPLES)
    return Sim(call, channel)


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = start()
    yield sim
    sim.channel.close()
    sim.channel.unlink()


def test_the_handshake_comes_first_and_what_was_said_before_it_is_nobodys(sim: Sim) -> None:
    sim.run(1000)
    assert sim.said == [control.Join(1, "websocket", "127.0.0.1")]
    assert sim.heard == []
    assert sim.channel.uplink.waiting == 0
    sim.admit()
    sim.run(3000)
    assert sim.heard[0] == (1001, b"\x00")
    assert sim.kinds().count(0) == 1
    # The second before is 25 pages; had it been kept, the call would begin 12 frames late.
    assert sim.call.figures().dropped_pages == 25
    assert sim.channel.uplink.waiting == 0
    assert sim.uplink == list(range(len(sim.uplink)))
    assert sim.concealed == 0


def test_frames_leave_at_their_deadlines_whenever_they_were_made(sim: Sim) -> None:
    rng = np.random.default_rng(3)
    sim.made_ms = lambda tick: int(rng.integers(2, 79))
    sim.admit()
    sim.run(20_000)
    at_ms = sim.audio_ms()
    assert set(np.diff(at_ms)) == {PERIOD_MS}
    assert (at_ms[0] - T0_MS - web_pace.GUARD_NS // MS) % PERIOD_MS == 0
    page = PageBuffer()
    for ms in at_ms:
        page.arrive(80, ms)
    assert (page.drops, page.dry) == (0, 0)
    assert sim.outcomes()[Outcome.DELIVERED] == list(range(len(at_ms)))


def test_the_page_would_drop_and_stutter_if_frames_left_when_made() -> None:
    page, rng = PageBuffer(), np.random.default_rng(3)
    for tick in range(200):
        page.arrive(80, tick * 80 + int(rng.integers(2, 79)))
    assert page.drops > 5
    assert page.dry > 5


def test_the_echo_is_what_was_said(sim: Sim) -> None:
    sim.admit()
    sim.run(6000)
    splitter, opus = PageSplitter(), OpusIn()
    audio = b"".join(m[1:] for _, m in sim.heard if m[0] == 1)
    pcm = np.concatenate([opus.decode(p.raw) for p in splitter.push(audio)])
    assert (splitter.junk_bytes, splitter.dropped_pages) == (0, 0)  # whole pages, headers first
    assert pcm.size == len(sim.audio_ms()) * SAMPLES
    tone = pcm[24_000:].astype(np.float64)
    assert np.sqrt((tone**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.05)
    spectrum = np.abs(np.fft.rfft(tone * np.hanning(tone.size)))
    assert spectrum.argmax() * 24_000 / tone.size == pytest.approx(24_000 / 9 / 2 / np.pi, abs=1)


def test_text_is_whole_characters_with_spaces(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    words = b"".join(m[1:] for _, m in sim.heard if m[0] == 2).decode()
    assert words.startswith(" so ité so ité")
    for _, message in sim.heard:
        message[1:].decode() if message[0] == 2 else None


def test_a_frame_the_box_made_too_late_is_silence_and_the_stream_keeps_its_time(sim: Sim) -> None:
    late = {20, 21, 40}
    sim.made_ms = lambda tick: 130 if tick in late else 5
    sim.admit()
    sim.run(6000)
    sim.call.disconnect(sim.at_ms * MS)
    sim.run(sim.at_ms + 50)
    sim.gone()
    assert set(np.diff(sim.audio_ms())) == {PERIOD_MS}
    filled = sim.outcomes()[Outcome.FILLED]
    assert len(filled) == 3
    assert set(filled) <= set(sim.outcomes()[Outcome.DISCARDED])
    heard = sim.outcomes()[Outcome.DELIVERED] + sim.outcomes()[Outcome.LATE] + filled
    assert sorted(heard) == list(range(len(heard)))


def test_every_frame_has_one_fate_when_the_client_vanishes(sim: Sim) -> None:
    sim.made_ms = lambda tick: 70
    sim.admit()
    sim.run(3071)  # frames are in hand and in the ring
    sim.call.disconnect(sim.at_ms * MS)
    assert sim.call.state is State.LEAVING
    sim.run(sim.at_ms + 200)
    leaves = [m for m in sim.said if isinstance(m, control.Leave)]
    assert [leave.session for leave in leaves] == [9]
    sim.gone()
    assert sim.call.is_over
    fates = Counter(index for index, _ in sim.receipts.elements())
    assert fates == dict.fromkeys(range(sim.made), 1)


def test_a_client_that_vanishes_at_once_is_never_asked_for(sim: Sim) -> None:
    sim.call.disconnect(0)
    assert sim.call.is_over
    sim.run(10)
    assert sim.said == []


@pytest.mark.parametrize("before_ms", [1, 500])
def test_a_client_that_vanishes_before_the_answer_leaves_no_session(
    sim: Sim, before_ms: int
) -> None:
    sim.run(before_ms)
    sim.call.disconnect(sim.at_ms * MS)
    sim.run(sim.at_ms + 5)
    sim.admit()
    sim.run(sim.at_ms + 5)
    # It is taken back at once; if the answer was on its way already, the session is left.
    assert sim.said[1:] == [control.Withdraw(sim.call.number), control.Leave(9, "hung up")]
    assert not sim.call.is_over
    sim.gone()
    assert sim.call.is_over
    assert sim.heard == []


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_is_a_message_and_a_close(sim: Sim, reason: Reason) -> None:
    sim.run(10)
    sim.call.refused(control.Refused(1, reason, "4 of 4 slots are taken"), sim.at_ms * MS)
    sim.settle_after()
    assert sim.call.is_over
    assert sim.call.ending is not None
    ending, detail = sim.call.ending
    assert sim.heard == [(10, b"\x05" + ending.reason(detail).encode())]
    assert "4 of 4" in detail


@pytest.mark.parametrize(
    ("why", "ending"),
    [("shed", Ending.FULL), ("stopped", Ending.DRAINING), ("timeout", Ending.RULES)],
)
def test_the_box_may_end_a_call(sim: Sim, why: str, ending: Ending) -> None:
    sim.admit()
    sim.run(1000)
    sim.gone(why)
    assert sim.call.is_over
    assert sim.call.ending is not None
    assert sim.call.ending[0] is ending
    assert sim.heard[-1][1].startswith(b"\x05")


def test_a_client_that_says_nothing_is_pinged_and_then_sent_away(sim: Sim) -> None:
    sim.sends = False
    sim.admit()
    sim.run(29_900)
    pings = [at for at, message in sim.heard if message == b"\x06"]
    assert len(pings) == 9  # the page leaves after 10 s without a message
    assert max(np.diff(pings)) < 3_100
    assert sim.call.ending is None
    sim.run(30_100)
    assert sim.call.ending == (Ending.RULES, "no audio for 30 s")
    assert sim.left


def test_a_client_that_does_not_read_is_sent_away_and_its_queue_is_bounded(sim: Sim) -> None:
    sim.reads = False
    sim.admit()
    most = 0
    for until_ms in range(10, 12_000, 10):
        sim.run(until_ms)
        most = max(most, len(sim.call.outbox))
    assert most <= web_call.MOST_WAITING + 2
    assert sim.call.ending is not None
    assert sim.call.ending[0] is Ending.RULES
    assert len(sim.call.outbox) <= 1


def test_too_many_messages_too_many_bytes_and_no_voice_end_a_call(sim: Sim) -> None:
    for _ in range(web_call.MESSAGES_BURST):
        sim.call.receive(b"\x03\x00", 0)
    assert sim.call.ending is None
    sim.call.receive(b"\x03\x00", 0)
    assert sim.call.ending == (Ending.RULES, "more than 250 messages a second")


def test_too_many_bytes_end_a_call(sim: Sim) -> None:
    for _ in range(15):
        sim.call.receive(b"\x01" + bytes(65_000), 0)
    assert sim.call.ending is None
    sim.call.receive(b"\x01" + bytes(65_000), 0)
    assert sim.call.ending == (Ending.RULES, "more than 64000 bytes a second")


def test_thirty_seconds_of_audio_at_once_are_not_decoded_into_lag(sim: Sim) -> None:
    sim.admit()
    sim.run(1000)
    tone = np.zeros(960, np.float32)
    for _ in range(30 * 25):
        sim.call.receive(b"\x01" + sim._opus.encode(tone), sim.at_ms * MS)
    assert sim.call.ending is None
    assert sim.call.figures().dropped_pages >= 25 * 25
    sim.run(20_000)
    assert sim.concealed == 0
    lag_ms = sim.call.figures().arrived_to_tick
    assert lag_ms is not None
    assert lag_ms.p50_ms < 200


@pytest.mark.parametrize(("times", "ends"), [(1, False), (2, True)])
def test_samples_of_another_rate_are_told_so(times: int, ends: bool) -> None:
    sim = start(subprotocol=PCM)
    sim.sends = False
    sim.admit()
    while sim.at_ms < 25_000 and sim.call.ending is None:
        sim.call.receive(b"\x01" + bytes(2 * 480 * times), sim.at_ms * MS)  # every 20 ms
        sim.run(sim.at_ms + 20)
    assert (sim.call.ending is not None) == ends
    if sim.call.ending is not None:
        assert sim.call.ending == (
            Ending.MEDIA,
            "2.0 s of audio come per second; send 24 kHz",
        )
    sim.channel.close()
    sim.channel.unlink()


def test_half_a_minute_before_the_handshake_is_nobodys() -> None:
    sim = start(Wish({}, voice="alto"))  # whose prompt takes the box so long
    sim.run(30_000)
    sim.admit()
    sim.run(33_000)
    assert sim.call.figures().dropped_pages == 25 * 30
    lag_ms = sim.call.figures().arrived_to_tick
    assert lag_ms is not None
    assert lag_ms.p99_ms < 100
    sim.channel.close()
    sim.channel.unlink()


def test_a_page_of_ours_is_told_how_its_call_goes(sim: Sim) -> None:
    ours = start(subprotocol=OPUS)
    ours.admit()
    ours.run(5000)
    told = [json.loads(m[1:])["pulse"] for _, m in ours.heard if m[0] == 4]
    frames = len(ours.audio_ms())
    assert len(told) == frames // 6
    assert told[-1]["frames"] == frames // 6 * 6
    assert all(margin == 75 for one in told for margin in one["margins_ms"])
    assert (told[-1]["late"], told[-1]["filled"], told[-1]["lag_frames"]) == (0, 0, 0)
    ours.channel.close()
    ours.channel.unlink()
    sim.admit()
    sim.run(5000)
    assert 4 not in sim.kinds()  # published clients are sent nothing that they do not know


def test_frames_leave_soon_after_they_are_made_once_ticks_are_known(sim: Sim) -> None:
    times = TickTimes(PERIOD_MS * MS)
    times.forecast_ns = 20 * MS
    soon = start(times=times)
    soon.made_ms = lambda tick: 12 if tick < 30 or tick > 60 else 45  # then ticks take longer
    soon.admit()
    soon.run(20_000)
    at_ms = soon.audio_ms()
    phases = sorted({(ms - T0_MS) % PERIOD_MS for ms in at_ms})
    assert phases[0] == 30  # the forecast and its guard
    assert phases[-1] in (45, 46, 47)  # and, once, as much later as was needed
    assert len(phases) == 2
    assert soon.outcomes()[Outcome.FILLED] == []
    gaps = np.diff(at_ms)
    assert sorted(set(gaps.tolist()) - {PERIOD_MS}) == [PERIOD_MS + phases[-1] - 30]
    soon.channel.close()
    soon.channel.unlink()


def test_ticks_the_line_overslept_are_left_out_and_nothing_queues(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    waiting = []
    sim.at_ms += 500  # the process slept; the box did not tick for us meanwhile
    sim.run(T0_MS + 70 * PERIOD_MS + 5)  # a tick has just taken its frame
    waiting.append(sim.channel.uplink.waiting)
    assert waiting == [0]
    assert 5 <= sim.call.figures().overslept <= 7


def test_a_backlog_the_box_built_up_is_paid_back(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    sim.backlog = 2  # two ticks were missed: two frames will wait from now on
    sim.run(T0_MS + 26 * PERIOD_MS + 5)  # a tick has just taken its frame
    sim.backlog = 0
    assert sim.channel.uplink.waiting == 2
    sim.run(T0_MS + 50 * PERIOD_MS + 5)
    assert sim.channel.uplink.waiting == 0
    assert sim.call.figures().paid_back == 2
    assert sim.concealed == 2
    assert sim.uplink == list(range(len(sim.uplink)))


def test_what_is_not_granted_is_told() -> None:
    sim = start(Wish({}, notes=("this model takes no persona",)))
    sim.admit()
    sim.run(5)
    assert sim.kinds() == [0, 4]
    assert json.loads(sim.heard[1][1][1:]) == {"notes": ["this model takes no persona"]}
    sim.channel.close()
    sim.channel.unlink()


def test_the_parts_of_the_way_add_up(sim: Sim) -> None:
    sim.admit()
    sim.run(20_000)
    figures = sim.call.figures()
    assert figures.arrived_to_tick is not None
    assert figures.tick_to_made is not None
    assert figures.made_to_sent is not None
    assert figures.arrived_to_sent is not None
    assert figures.tick_to_made.p50_ms == 5
    assert figures.made_to_sent.p50_ms == 85  # the rest of the tick, and the guard
    # A page of 40 ms and 10 to spare, the lead of 8; then the box and the way out.
    assert figures.arrived_to_tick.p50_ms == pytest.approx(58, abs=8)
    assert figures.arrived_to_sent.p50_ms == pytest.approx(148, abs=8)
    assert (figures.short, figures.overslept, figures.filled, figures.late) == (0, 0, 0, 0)


fuzz = st.binary(max_size=400) | st.builds(
    lambda kind, rest: bytes([kind]) + rest,
    st.integers(0, 255),
    st.binary(max_size=100) | st.just(b"OggS" + bytes(22) + b"\x01\x03\x9b\x06x"),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(fuzz, max_size=30), st.booleans())
def test_nothing_a_client_sends_raises_or_costs_the_box_a_frame(
    messages: list[bytes], early: bool
) -> None:
    sim = start()
    try:
        sim.sends = False
        if not early:
            sim.admit()
        for message in messages:
            sim.call.receive(message, sim.at_ms * MS)
            sim.run(sim.at_ms + 7)
        sim.call.disconnect(sim.at_ms * MS)
        sim.run(sim.at_ms + 30)
        if not early:
            sim.gone()
            fates = Counter(index for index, _ in sim.receipts.elements())
            assert fates == dict.fromkeys(range(sim.made), 1)
    finally:
        sim.channel.close()
        sim.channel.unlink()
