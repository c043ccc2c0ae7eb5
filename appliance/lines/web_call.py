"""One websocket caller: what it is sent and when, what becomes of what it sends, how it ends.

Decides a call's life from the line's side, as `call` does for a file. It is told the time, what
the box said and what the client sent; it touches its channel, its codec and a queue of messages,
`outbox`, that the shell empties. Does not know sockets, other calls, or HTTP (`web_server`).

    JOINING -- Admitted: handshake --> TALKING -- client or box ends it --> LEAVING -- Gone --> OVER
       |  audio is parsed and dropped     one frame in, one message out per tick       |
       +-- Refused -------------------------------------------------------------> OVER

In: samples wait in `jitter` and one frame is handed in `LEAD_NS` before each tick; a tick this
process overslept is left out, so that nothing ever queues in the uplink ring, and a backlog that
the box built up (it missed ticks) is paid back the same way. Out: frame k leaves at its tick's
deadline plus `GUARD_NS`, never when it happens to be made: the published web client drops what
arrives some 10 ms early and stutters at what comes 10 ms late (audio-processor.ts in
kyutai-labs/moshi: 80 ms to begin with, 10 ms of slack on either side).
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import (
    Channel,
    ChannelError,
    DownlinkHeader,
    Outcome,
    Receipt,
    UplinkHeader,
)
from appliance.lines import wire
from appliance.lines.jitter import Intake
from appliance.lines.limits import Bucket
from appliance.lines.ogg import OPUS_RATE_HZ, OggError, PageSplitter
from appliance.lines.opus import RATE_HZ, OpusIn, OpusOut
from appliance.lines.playout import Played, Playout
from appliance.lines.resample import Quality, Resampler
from appliance.lines.stretch import Stretcher
from appliance.lines.transcript import PieceText
from appliance.lines.web_figures import Figures, Took, parts
from appliance.lines.wire import Ending, Wish

LEAD_NS = 20 * NS_PER_MS
"""How long before a tick its frame is handed in: what a busy event loop may be late by."""

GUARD_NS = 10 * NS_PER_MS
"""How long after its deadline a frame leaves: `POLL_NS`, encoding (1.4 ms each on the machine this
was written on) and what an event loop is late by, so that sending does not depend on them."""

POLL_NS = 2 * NS_PER_MS
"""How often a live call looks for frames of the model."""

ANSWER_NS = 10 * NS_PER_S
PRIMED_NS = 600 * NS_PER_S
"""How long the box may take to answer a Join; if it has to feed a persona first."""

SETTLE_NS = 10 * NS_PER_S
"""How long the box may take to say Gone."""

SILENT_NS = 30 * NS_PER_S
"""A client that sends no audio for so long is not there; a muted microphone still sends."""

QUIET_NS = 3 * NS_PER_S
"""With nothing to send for so long, a ping is: the web client leaves after 10 s of silence
(useSocket.ts in kyutai-labs/moshi)."""

MOST_WAITING = 64
"""Messages that may wait for a client that does not read: 2.5 s of audio and as many words."""

MESSAGES_PER_S, MESSAGES_BURST = 250, 4_000
BYTES_PER_S, BYTES_BURST = 64_000, 1_000_000
"""A client sends 25 to 50 messages and 4 to 8 kB per second; the bursts are 30 s of a stream that
was held up somewhere, ten times over in bytes."""

AUDIO_BURST_SAMPLES = 4 * OPUS_RATE_HZ
"""Audio that is decoded at once; beyond it twice real time is. What is more is not decoded, since
a page of 300 bytes may claim 30 s of it."""

PAY_BACK_TICKS = 6
"""So many ticks in a row must have heard an older frame than theirs before a backlog is one."""


class State(enum.Enum):
    """Where a call is in its life; see the picture above."""

    JOINING = "joining"
    TALKING = "talking"
    LEAVING = "leaving"
    OVER = "over"


@dataclass(slots=True)
class _Reply:
    """One frame of the model in hand."""

    header: DownlinkHeader
    pcm: NDArray[np.float32]
    message: bytes | None = None
    """Encoded, if that has been done."""


class WebCall:
    """One caller. `advance` does whatever is due; everything takes the time as an argument."""

    def __init__(
        self,
        number: int,
        wish: Wish,
        caller: str,
        welcome: control.Welcome,
        pieces: Sequence[str],
        now_ns: int,
    ) -> None:
        """number: the `request` of its Join."""
        self.number = number
        self.state = State.JOINING
        self.outbox: deque[bytes] = deque()
        """Messages for the client, oldest first."""
        self.ending: tuple[Ending, str] | None = None
        """Why its connection is to be closed, once `outbox` is empty; None while it is open."""
        self.session = 0
        self._wish = wish
        self._caller = caller[: control.LONGEST_CALLER]
        self._asked = False
        self._until_ns = now_ns + (PRIMED_NS if wish.voice or wish.persona else ANSWER_NS)
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._samples = welcome.samples_per_frame
        self._splitter = PageSplitter()
        self._opus_in = OpusIn()
        self._opus_out = OpusOut()
        self._stretch = Stretcher(RATE_HZ, welcome.sample_rate_hz)
        self._intake = Intake(self._samples, welcome.sample_rate_hz, welcome.period_ns)
        self._to_client = Resampler(welcome.sample_rate_hz, RATE_HZ, Quality.LIVE)
        self._unsent = np.zeros(0, np.float32)
        self._text = PieceText(pieces, welcome.silent_ids)
        self._channel: Channel | None = None
        self._playout: Playout[_Reply] | None = None
        self._receipts: deque[Receipt] = deque()
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._tick = 0
        """The tick whose frame is handed in next."""
        self._sent = 0
        self._put: dict[int, tuple[int, int]] = {}
        """By uplink frame_index: the tick it was meant for and when its last sample arrived."""
        self._behind = 0
        self._pay_back = False
        self._paid_back = 0
        self._overslept = 0
        self._encoded = 0
        """The frame_index whose turn it is to be encoded."""
        self._replies: dict[int, _Reply] = {}
        self._heard_ns = now_ns
        self._spoke_ns = now_ns
        self._messages = Bucket(MESSAGES_PER_S, MESSAGES_BURST)
        self._bytes = Bucket(BYTES_PER_S, BYTES_BURST)
        self._audio = Bucket(2 * OPUS_RATE_HZ, AUDIO_BURST_SAMPLES)
        self._dropped_pages = 0
        self._took = Took()
        self._to_box: list[control.ToBox] = []

    @property
    def is_over(self) -> bool:
        """The box knows nothing of it any more."""
        return self.state is State.OVER

    def wake_ns(self, now_ns: int) -> int:
        """When `advance` is wanted next, at the latest."""
        if self.state is State.JOINING:
            return self._until_ns if self._asked else now_ns
        wake_ns = now_ns + POLL_NS
        if self.state is State.TALKING:
            wake_ns = min(wake_ns, self._take_ns)
        if self._playout is not None and (due_ns := self._playout.next_due_ns) is not None:
            wake_ns = min(wake_ns, due_ns)
        return wake_ns

    # --- the client

    def receive(self, message: bytes, now_ns: int) -> None:
        """A binary message came. Whatever is in it, nothing is raised."""
        if self.ending is not None:
            return
        if not self._messages.take(1, now_ns):
            self._close(Ending.RULES, f"more than {MESSAGES_PER_S} messages a second", now_ns)
            return
        if not self._bytes.take(len(message), now_ns):
            self._close(Ending.RULES, f"more than {BYTES_PER_S} bytes a second", now_ns)
            return
        data = wire.audio_of(message)
        if data is None:
            return
        try:
            pages = self._splitter.push(data)
        except OggError as err:
            self._close(Ending.MEDIA, str(err), now_ns)
            return
        for page in pages:
            self._heard_ns = now_ns
            # Before the handshake audio is nobody's: a backlog would be lag for the whole call.
            wanted = self.state is State.TALKING and self._audio.take(page.samples, now_ns)
            pcm = self._opus_in.decode(page.raw) if wanted else np.zeros(0, np.float32)
            if not pcm.size:
                self._dropped_pages += 1
                continue
            self._intake.push(self._stretch.push(pcm, self._intake.ppm), now_ns, self._take_ns)

    def disconnect(self, now_ns: int) -> None:
        """The client has gone, or its connection has; nothing can be sent any more."""
        self._close(Ending.OVER, "", now_ns)
        self.outbox.clear()

    def dismiss(self, ending: Ending, detail: str, now_ns: int) -> None:
        """The line itself ends the call."""
        self._close(ending, detail, now_ns)

    # --- what the box said

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int) -> None:
        """The slot is this caller's: tell it. t0_ns: origin of the grid of the box that said so."""
        self.session = message.session
        self._grid = TickGrid(t0_ns, self._grid.period_ns)
        period_ns = self._grid.period_ns
        self._playout = Playout(message.session, message.generation, period_ns, period_ns)
        if self.state is not State.JOINING:  # the client has gone meanwhile
            self._to_box.append(control.Leave(message.session, "hung up"))
            self._until_ns = now_ns + SETTLE_NS
            return
        try:
            self._channel = Channel.attach(message.channel)
            if self._channel.samples != self._samples:
                raise ChannelError(
                    f"frames of {self._channel.samples} samples, not {self._samples}"
                )
        except ChannelError as err:
            self.state = State.TALKING  # there is a session to leave
            self._close(Ending.FAULT, str(err), now_ns)
            return
        self.state = State.TALKING
        self._tick = self._grid.tick_at(now_ns + LEAD_NS) + 1
        self._heard_ns = now_ns
        self._say(wire.HANDSHAKE, now_ns)
        if self._wish.notes:
            self._say(wire.metadata({"notes": list(self._wish.notes)}), now_ns)

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self._close(wire.REFUSED[message.reason], message.detail, now_ns)
        self._end(now_ns)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        ending = wire.GONE.get(message.why, Ending.FAULT)
        self._close(ending, f"the box ended the call ({message.why})", now_ns)
        self._end(now_ns)

    def lost(self, why: str, now_ns: int) -> None:
        """The box is gone, and the session with it."""
        self._close(Ending.FAULT, why, now_ns)
        self._end(now_ns)

    # --- the clock

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box.

        Encodes at most one frame that is not due yet, so that many calls share one thread fairly.
        """
        if self.state is State.JOINING:
            self._ask(now_ns)
        if self.state is State.TALKING:
            self._send_due(now_ns)
            self._hand_in(now_ns)
            self._collect(now_ns)
            self._encode_next()
            self._watch(now_ns)
        elif self.state is State.LEAVING:
            if self._channel is not None:
                self._collect(now_ns)
            if now_ns >= self._until_ns:
                self._end(now_ns)
        self._settle()
        said, self._to_box = self._to_box, []
        return said

    def figures(self) -> Figures:
        """How it is going."""
        return Figures(
            number=self.number,
            session=self.session,
            state=self.state.value,
            sent=self._sent,
            short=self._intake.short,
            overslept=self._overslept,
            paid_back=self._paid_back,
            delivered=self._outcomes[Outcome.DELIVERED],
            late=self._outcomes[Outcome.LATE],
            filled=self._outcomes[Outcome.FILLED],
            discarded=self._outcomes[Outcome.DISCARDED],
            cut_samples=self._intake.cut_samples,
            junk_bytes=self._splitter.junk_bytes,
            dropped_pages=self._dropped_pages + self._splitter.dropped_pages,
            stretch_ppm=round(self._intake.ppm, 1),
            arrived_to_tick=parts(self._took.arrived_to_tick),
            tick_to_made=parts(self._took.tick_to_made),
            made_to_sent=parts(self._took.made_to_sent),
            arrived_to_sent=parts(self._took.arrived_to_sent),
        )

    # --- in

    @property
    def _take_ns(self) -> int:
        return self._grid.start_ns(self._tick) - LEAD_NS

    def _ask(self, now_ns: int) -> None:
        if not self._asked:
            self._asked = True
            wish = self._wish
            self._to_box.append(
                control.Join(
                    self.number, "websocket", self._caller, wish.settings, wish.voice, wish.persona
                )
            )
        elif now_ns >= self._until_ns:
            self._close(Ending.LOADING, "the box did not answer", now_ns)

    def _hand_in(self, now_ns: int) -> None:
        assert self._channel is not None
        while self._take_ns <= now_ns:
            tick, start_ns = self._tick, self._grid.start_ns(self._tick)
            self._tick += 1
            if now_ns >= start_ns:  # the tick has begun without it
                self._overslept += self._intake.started
                continue
            if self._pay_back:
                self._pay_back, self._behind = False, 0
                self._paid_back += 1
                continue
            arrived_ns = self._intake.arrived_ns
            pcm = self._intake.take(start_ns - LEAD_NS)
            if pcm is None:
                continue
            # What is still held came later than the frame's own last sample, as the sound flies.
            rate_hz = self._intake.rate_hz
            arrived_ns -= self._intake.held_samples * NS_PER_S // rate_hz
            if not self._channel.uplink.put(UplinkHeader(self._sent, 0, arrived_ns), pcm):
                continue  # the box does not read: it is stopping, or stuck, and will be heard of
            self._put[self._sent] = (tick, arrived_ns)
            self._put.pop(self._sent - 64, None)
            self._took.arrived_to_tick.append(start_ns - arrived_ns)
            self._sent += 1

    def _notice_backlog(self, header: DownlinkHeader) -> None:
        """Frames that wait in the ring on every tick are lag for ever: leave one out."""
        meant = self._put.get(header.heard)
        if meant is None:
            return
        self._behind = self._behind + 1 if header.tick > meant[0] else 0
        if self._behind >= PAY_BACK_TICKS:
            self._pay_back = True

    # --- out

    def _collect(self, now_ns: int) -> None:
        """Take what the model made; `_send_due` has run, so none of it is due already."""
        channel, playout = self._channel, self._playout
        assert channel is not None
        assert playout is not None
        pcm = np.empty(self._samples, np.float32)
        while (header := channel.downlink.get(pcm)) is not None:
            if playout.first_ns is None and header.session == playout.session:
                # On the box's grid, wherever the first frame happened to arrive.
                playout.buffer_ns = header.deadline_ns + GUARD_NS - now_ns
            reply = _Reply(header, pcm)
            receipt = playout.arrive(header, reply, now_ns)
            if receipt is not None:
                self._owe(receipt)
            else:
                self._replies[header.frame_index] = reply
            if header.session == playout.session:
                start_ns = self._grid.start_ns(header.tick)
                self._took.tick_to_made.append(header.made_ns - start_ns)
                self._notice_backlog(header)
            pcm = np.empty(self._samples, np.float32)  # the one before is held until it is played

    def _send_due(self, now_ns: int) -> None:
        assert self._playout is not None
        played, receipts = self._playout.due(now_ns)
        for receipt in receipts:
            self._owe(receipt)
        for frame in played:
            self._send(frame, now_ns)

    def _send(self, frame: Played[_Reply], now_ns: int) -> None:
        """One frame, or silence in its place; then what is said in it."""
        self._replies.pop(frame.frame_index, None)
        reply = frame.frame
        if reply is None or reply.message is None:
            pcm = np.zeros(self._samples, np.float32) if reply is None else reply.pcm
            message = self._encode(pcm)
            self._encoded = frame.frame_index + 1
        else:
            message = reply.message
        if message:
            self._say(wire.audio(message), now_ns)
        if reply is None:
            return
        self._took.made_to_sent.append(now_ns - reply.header.made_ns)
        if (meant := self._put.get(reply.header.heard)) is not None:
            self._took.arrived_to_sent.append(now_ns - meant[1])
        if words := self._text.hear(reply.header.text):
            self._say(wire.text(words), now_ns)

    def _encode_next(self) -> None:
        """Off the clock: the next frame of the stream, if it is in hand."""
        reply = self._replies.get(self._encoded)
        if reply is not None:
            reply.message = self._encode(reply.pcm)
            self._encoded += 1

    def _encode(self, pcm: NDArray[np.float32]) -> bytes:
        """Pages of a frame of the model's rate. Frames must come in their order."""
        if not np.isfinite(pcm).all():
            pcm = np.nan_to_num(pcm, nan=0.0, posinf=1.0, neginf=-1.0)
        whole = np.concatenate([self._unsent, self._to_client.push(pcm)])
        packet = RATE_HZ // 25  # 40 ms, the page that published servers send
        ready = whole.size // packet * packet
        self._unsent = whole[ready:]
        return b"".join(
            self._opus_out.encode(np.clip(whole[at : at + packet], -1.0, 1.0))
            for at in range(0, ready, packet)
        )

    def _say(self, message: bytes, now_ns: int) -> None:
        self.outbox.append(message)
        self._spoke_ns = now_ns

    # --- how it ends

    def _watch(self, now_ns: int) -> None:
        """Clients that do not read, do not speak, or must be told that we are still here."""
        if len(self.outbox) > MOST_WAITING:
            waiting = len(self.outbox)
            self._close(Ending.RULES, f"{waiting} messages wait; read faster", now_ns)
            self.outbox.clear()
        elif now_ns - self._heard_ns > SILENT_NS:
            self._close(Ending.RULES, f"no audio for {SILENT_NS // NS_PER_S} s", now_ns)
        elif now_ns - self._spoke_ns > QUIET_NS:
            self._say(wire.PING, now_ns)

    def _close(self, ending: Ending, detail: str, now_ns: int) -> None:
        """End the connection, and leave the session if there is one. A second time is nothing."""
        if self.ending is None:
            self.ending = (ending, detail)
            if ending is not Ending.OVER:
                self.outbox.append(wire.error(ending.reason(detail)))
        if self.state is State.TALKING:
            self.state = State.LEAVING
            self._until_ns = now_ns + SETTLE_NS
            self._to_box.append(control.Leave(self.session, ending.reason(detail)))
            assert self._playout is not None
            for receipt in self._playout.hang_up(now_ns):
                self._owe(receipt)
        elif self.state is State.JOINING and not self._asked:
            self.state = State.OVER
        elif self.state is State.JOINING:
            # Nothing can be said before the box has answered: it does not know a session yet.
            self.state = State.LEAVING
            self._until_ns = max(self._until_ns, now_ns + SETTLE_NS)
        self._replies.clear()

    def _end(self, now_ns: int) -> None:
        """Let go of everything."""
        if self.is_over:
            return
        if self._channel is not None:
            self._collect(now_ns)
            self._settle()
            self._channel.close()
            self._channel = None
        self.state = State.OVER
        self._replies.clear()

    def _owe(self, receipt: Receipt) -> None:
        self._outcomes[Outcome(receipt.outcome)] += 1
        self._receipts.append(receipt)

    def _settle(self) -> None:
        """Hand in the receipts the ring has room for; the rest waits, none is dropped."""
        while (
            self._receipts
            and self._channel is not None
            and self._channel.receipts.put(self._receipts[0])
        ):
            self._receipts.popleft()
