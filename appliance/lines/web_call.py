"""One websocket caller: what it is sent and when, what becomes of what it sends, how it ends.

Decides a call's life from the line's side, as `call` does for a file. It is told the time, what
the box said and what the client sent; it touches its channel, its codec and a queue of messages,
`outbox`, that the shell empties. Does not know sockets, other calls, or HTTP (`web_server`).

    JOINING -- Admitted: handshake --> TALKING -- client or box ends it --> LEAVING -- Gone --> OVER
       |  audio is parsed and dropped     one frame in, one message out per tick       |
       +-- Refused -------------------------------------------------------------> OVER

In: samples wait in `jitter` and one frame is handed in some ms before each tick; a tick this
process overslept is left out, so that nothing ever queues in the uplink ring, and a backlog that
the box built up (it missed ticks) is paid back the same way. Out: `web_reply`, at a time that
`web_pace` chooses.
"""

import enum
from collections import deque
from collections.abc import Sequence

import numpy as np

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import ChannelError, ChannelGone, DownlinkHeader, Outcome, UplinkHeader
from appliance.lines import wire
from appliance.lines.jitter import Intake
from appliance.lines.limits import Bucket, Pace
from appliance.lines.ogg import OPUS_RATE_HZ, OggError
from appliance.lines.stretch import Stretcher
from appliance.lines.transcript import PieceText
from appliance.lines.web_figures import KEPT, Figures, Pulse, Took, parts
from appliance.lines.web_pace import Cushion, TickTimes
from appliance.lines.web_reply import POLL_NS, Meant, Replies
from appliance.lines.web_voice import VOICES, Voice
from appliance.lines.wire import Ending, Wish

RESERVE_NS, MOST_RESERVE_NS = 8 * NS_PER_MS, 80 * NS_PER_MS
"""How long a caller's audio waits for its tick: what network, client and this event loop may be
late by, all together, without the model missing a frame; grows where that is too little."""

PUT_NS = NS_PER_MS
"""A frame that is whole so long before its tick is still handed in."""

FIRST_NS = 6 * NS_PER_MS
"""A call's first frame is handed in so long before its tick. The others go as soon as they are
whole, this one waits for its time; woken a millisecond late it would miss its tick, and from then
on one frame would lie in the ring."""

OPEN_NS = 10 * NS_PER_MS
"""A tick has taken its frame so long after its start; then the next one's may be handed in."""

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

TOO_FAST = 1.6
"""So many seconds of audio per second, for ten of them, are no voice but another sample rate."""

PAY_BACK_TICKS = 6
"""So many ticks in a row must have heard an older frame than theirs before a backlog is one."""


class State(enum.Enum):
    """Where a call is in its life; see the picture above."""

    JOINING = "joining"
    TALKING = "talking"
    LEAVING = "leaving"
    OVER = "over"


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
        subprotocol: str = "",
        times: TickTimes | None = None,
    ) -> None:
        """number: the `request` of its Join. subprotocol: one of `web_voice.VOICES`.

        times: what ticks took, shared by all calls of a box.
        """
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
        self._voice: Voice = VOICES[subprotocol]()
        self._pulse = Pulse() if subprotocol else None
        self._stretch = Stretcher(self._voice.rate_hz, welcome.sample_rate_hz)
        self._reserve = Cushion(RESERVE_NS, MOST_RESERVE_NS)
        self._intake = Intake(self._samples, welcome.sample_rate_hz, welcome.period_ns, RESERVE_NS)
        self._rate_hz = welcome.sample_rate_hz
        self._times = times or TickTimes(welcome.period_ns)
        self._text = PieceText(pieces, welcome.silent_ids)
        self._channel: Channel | None = None
        self._missing = ""
        """What was wrong when the box's channel was not there."""
        self._replies: Replies | None = None
        self._tick = 0
        """The tick whose frame is handed in next."""
        self._sent = 0
        self._handed_in: dict[int, Meant] = {}
        """By uplink frame_index."""
        self._arrived_to_tick: deque[int] = deque(maxlen=KEPT)
        self._behind = 0
        self._pay_back = False
        self._paid_back = 0
        self._overslept = 0
        self._heard_ns = now_ns
        self._spoke_ns = now_ns
        self._messages = Bucket(MESSAGES_PER_S, MESSAGES_BURST)
        self._bytes = Bucket(BYTES_PER_S, BYTES_BURST)
        self._audio = Bucket(2 * OPUS_RATE_HZ, AUDIO_BURST_SAMPLES)
        self._pace = Pace(OPUS_RATE_HZ, TOO_FAST)
        self._dropped_pages = 0
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
        if self._replies is not None and (due_ns := self._replies.next_due_ns) is not None:
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
            found = self._voice.unpack(data)
        except OggError as err:
            self._close(Ending.MEDIA, str(err), now_ns)
            return
        for part in found:
            self._heard_ns = now_ns
            if self.state is State.TALKING:
                fast = self._pace.too_fast(part.samples, now_ns)
                if fast is not None:
                    detail = f"{fast / OPUS_RATE_HZ:.1f} s of audio come per second; send 24 kHz"
                    self._close(Ending.MEDIA, detail, now_ns)
                    return
            # Before the handshake audio is nobody's: a backlog would be lag for the whole call.
            wanted = self.state is State.TALKING and self._audio.take(part.samples, now_ns)
            pcm = self._voice.decode(part) if wanted else np.zeros(0, np.float32)
            if not pcm.size:
                self._dropped_pages += 1
                continue
            self._intake.push(self._stretch.push(pcm, self._intake.ppm), now_ns, self._take_ns)
        if self.state is State.TALKING:
            self._hand_in(now_ns)

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
        except ChannelGone as err:  # whose word is on its way knows why
            self._missing = str(err)
            self._part("the channel is gone", now_ns)
            return
        except ChannelError as err:
            self.state = State.TALKING  # there is a session to leave
            self._close(Ending.FAULT, str(err), now_ns)
            return
        self._replies = Replies(
            self._channel,
            (message.session, message.generation),
            self._grid,
            self._rate_hz,
            self._voice,
            self._text,
            self._times,
            self._pulse,
        )
        self.state = State.TALKING
        self._tick = self._grid.tick_at(now_ns + PUT_NS) + 1
        self._heard_ns = now_ns
        self._say(wire.HANDSHAKE, now_ns)
        if self._wish.notes:
            self._say(wire.metadata({"notes": list(self._wish.notes)}), now_ns)

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self._close(wire.REFUSED[message.reason], message.detail, now_ns)
        self._end(now_ns)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        if self._missing and message.why == "left":  # by us; the box knows of no trouble
            self._close(Ending.FAULT, self._missing, now_ns)
        ending = wire.GONE.get(message.why, Ending.FAULT)
        self._close(ending, message.detail or f"the box ended the call ({message.why})", now_ns)
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
            self._hand_in(now_ns)
            self._listen(now_ns)
            self._watch(now_ns)
        elif self.state is State.LEAVING:
            if self._replies is not None:
                self._replies.collect(now_ns)
            if now_ns >= self._until_ns:
                if self._missing:
                    self._close(Ending.FAULT, self._missing, now_ns)
                self._end(now_ns)
        if self._replies is not None and self._channel is not None:
            self._replies.settle()
        said, self._to_box = self._to_box, []
        return said

    def figures(self) -> Figures:
        """How it is going."""
        outcomes = self._replies.outcomes if self._replies else dict.fromkeys(Outcome, 0)
        took = self._replies.took if self._replies else Took()
        return Figures(
            number=self.number,
            session=self.session,
            state=self.state.value,
            sent=self._sent,
            short=self._intake.short,
            overslept=self._overslept,
            paid_back=self._paid_back,
            delivered=outcomes[Outcome.DELIVERED],
            late=outcomes[Outcome.LATE],
            filled=outcomes[Outcome.FILLED],
            discarded=outcomes[Outcome.DISCARDED],
            cut_samples=self._intake.cut_samples,
            junk_bytes=self._voice.junk_bytes,
            dropped_pages=self._dropped_pages + self._voice.dropped,
            stretch_ppm=round(self._intake.ppm, 1),
            phase_ms=round(self._replies.phase_ms, 1) if self._replies else 0.0,
            arrived_to_tick=parts(self._arrived_to_tick),
            tick_to_made=parts(took.tick_to_made),
            made_to_sent=parts(took.made_to_sent),
            arrived_to_sent=parts(took.arrived_to_sent),
        )

    # --- in

    @property
    def _take_ns(self) -> int:
        """The last moment for the next frame."""
        lead_ns = PUT_NS if self._intake.started else FIRST_NS
        return self._grid.start_ns(self._tick) - lead_ns

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
        """Each tick's frame as soon as it is whole: who waits for its time may oversleep it."""
        while True:
            start_ns = self._grid.start_ns(self._tick)
            if now_ns >= start_ns:  # the tick has begun without it
                if self._intake.started:  # nobody misses what nobody has said
                    self._overslept += 1
                    self._reserve.too_small(now_ns)
                self._intake.skip()
            elif now_ns >= self._take_ns or (
                self._intake.is_whole and now_ns >= self._grid.start_ns(self._tick - 1) + OPEN_NS
            ):
                self._take(start_ns, now_ns)
            else:
                return
            self._tick += 1

    def _take(self, start_ns: int, now_ns: int) -> None:
        assert self._channel is not None
        intake = self._intake
        if self._pay_back:
            self._pay_back, self._behind = False, 0
            self._paid_back += 1
            intake.skip()
            return
        arrived_ns, short = intake.arrived_ns, intake.short
        pcm = intake.take(now_ns, max(0, start_ns - PUT_NS - now_ns))
        if intake.short > short:
            self._reserve.too_small(now_ns)
        intake.spare_ns = self._reserve.at(now_ns)
        if pcm is None:
            return
        # What is still held came later than the frame's own last sample, as the sound flies.
        arrived_ns -= intake.held_samples * NS_PER_S // intake.rate_hz
        if not self._channel.uplink.put(UplinkHeader(self._sent, 0, arrived_ns), pcm):
            return  # the box does not read: it is stopping, or stuck, and will be heard of
        self._handed_in[self._sent] = Meant(self._tick, arrived_ns)
        self._handed_in.pop(self._sent - 64, None)
        self._arrived_to_tick.append(start_ns - arrived_ns)
        self._sent += 1

    def _notice_backlog(self, header: DownlinkHeader) -> None:
        """Frames that wait in the ring on every tick are lag for ever: leave one out."""
        meant = self._handed_in.get(header.heard)
        if meant is None:
            return
        self._behind = self._behind + 1 if header.tick > meant.tick else 0
        if self._behind >= PAY_BACK_TICKS:
            self._pay_back = True

    # --- out

    def _listen(self, now_ns: int) -> None:
        """What the model says: take it, send what is due, get the next frame ready."""
        assert self._replies is not None
        for header in self._replies.collect(now_ns):
            self._notice_backlog(header)
        for message in self._replies.send(now_ns, self._handed_in):
            self._say(message, now_ns)
        if self._pulse is not None and (told := self._pulse.take(self.session)) is not None:
            self._say(wire.metadata({"pulse": told}), now_ns)
        self._replies.encode_next()

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
            self._part(ending.reason(detail), now_ns)
            if self._replies is not None:
                self._replies.hang_up(now_ns)
        elif self.state is State.JOINING and not self._asked:
            self.state = State.OVER
        elif self.state is State.JOINING:
            self._to_box.append(control.Withdraw(self.number))
            self.state = State.LEAVING
            self._until_ns = max(self._until_ns, now_ns + SETTLE_NS)

    def _part(self, why: str, now_ns: int) -> None:
        """Ask the box to end the session, and wait for its word."""
        self.state = State.LEAVING
        self._until_ns = now_ns + SETTLE_NS
        self._to_box.append(control.Leave(self.session, why))

    def _end(self, now_ns: int) -> None:
        """Let go of everything."""
        if self.is_over:
            return
        if self._channel is not None:
            if self._replies is not None:
                self._replies.collect(now_ns)
                self._replies.settle()
            self._channel.close()
            self._channel = None
        self.state = State.OVER
