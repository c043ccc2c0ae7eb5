"""One telephone call: what the model hears of it, what the caller hears of the model, how it ends.

Decides a call's life from the line's side, as `web_call` does for a websocket. It is told the
time, what the box said and what the stack said; it touches its channel, the call's audio and a
queue of wishes, `wants`, that the shell carries out. Does not know SIP, other calls, or threads.

    JOINING -- Admitted: answer --> ANSWERING -- Established --> TALKING -- somebody ends it
       |                               |                            |
       +-- Refused: reject             +-------- Closed ------------+--> LEAVING -- Gone --> OVER

In: what the stack has is read every `READ_NS`, brought to the model's rate and put into
`receive`, which gives one frame for every tick, handed in `LEAD_NS` before it; on hold the model
hears silence and the clock goes on. Out: `sip_speak`.
"""

import enum
from collections import deque
from dataclasses import dataclass

import numpy as np

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import ChannelError, DownlinkHeader, Outcome, UplinkHeader
from appliance.lines.receive import ReceiveBuffer
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_figures import Figures, Took
from appliance.lines.sip_speak import Speaking
from appliance.lines.sip_stack import Incoming, Media
from appliance.lines.speex import Stretches, stretcher
from appliance.lines.web_pace import TickTimes

LEAD_NS = 20 * NS_PER_MS
"""How long before a tick its frame is handed in: what this process may be late by, and what it
needs for all calls' frames."""

READ_NS = 10 * NS_PER_MS
"""How often audio is looked for: half a packet, so that a hole is found where it is."""

ANSWER_NS = 10 * NS_PER_S
PRIMED_NS = 600 * NS_PER_S
"""How long the box may take to answer a Join; if it has to feed a persona first."""

SETTLE_NS = 10 * NS_PER_S
"""How long the box may take to say Gone, and the stack to say Closed."""

PAY_BACK_TICKS = 6
"""So many ticks in a row must have heard an older frame than theirs before a backlog is one."""

MOST_DIGITS = 256
"""Kept of a call, for its record."""

TRANSFER = "transfer"
HANG_UP = "hang-up"


class State(enum.Enum):
    """Where a call is in its life; see the picture above."""

    JOINING = "joining"
    ANSWERING = "answering"
    TALKING = "talking"
    LEAVING = "leaving"
    OVER = "over"


class Verb(enum.Enum):
    """What the stack is to do."""

    ANSWER = "answer"
    REJECT = "reject"
    HANG_UP = "hang up"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Want:
    """One thing for the stack to do."""

    verb: Verb
    target: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator decides for all calls."""

    lead_ns: int
    media_timeout_ns: int
    hold_ns: int


class PhoneCall:
    """One caller. `advance` does whatever is due; everything takes the time as an argument."""

    def __init__(
        self,
        number: int,
        incoming: Incoming,
        account: SipAccount,
        limits: Limits,
        media: Media,
        welcome: control.Welcome,
        times: TickTimes,
        now_ns: int,
        line: str = "sip",
    ) -> None:
        """number: the `request` of its Join. times: what ticks took, shared by all calls."""
        self.number = number
        self.incoming = incoming
        self.account = account
        self.state = State.JOINING
        self.wants: deque[Want] = deque()
        """For the stack, oldest first."""
        self.leg_open = True
        """The stack knows this call."""
        self.why = ""
        """Why it ended, once it has begun to."""
        self.session = 0
        self.digits = ""
        self.stats: dict[str, float] = {}
        self.began_ns = now_ns
        self.talked_from_ns: int | None = None
        self.ended_ns: int | None = None
        self._line = line
        self._limits = limits
        self._media = media
        self._welcome = welcome
        self._asked = False
        waits_ns = PRIMED_NS if account.voice or account.persona else ANSWER_NS
        self._until_ns = now_ns + waits_ns
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._samples = welcome.samples_per_frame
        self._rate_hz = welcome.sample_rate_hz
        self._receive = ReceiveBuffer(self._samples, self._rate_hz, seed=number)
        self._in: tuple[int, Stretches] | None = None
        """Rate of the call's audio, and what brings it to the model's."""
        self._times = times
        self._channel: Channel | None = None
        self._speaking: Speaking | None = None
        self._tick = 0
        """The tick whose frame is handed in next."""
        self._sent = 0
        self._meant: dict[int, tuple[int, int]] = {}
        """By uplink frame_index: the tick it was meant for and when its last sample arrived."""
        self._behind = 0
        self._pay_back = False
        self._paid_back = 0
        self._overslept = 0
        self._read_ns = now_ns
        self._arrived_ns: int | None = None
        self._heard_ns = now_ns
        self._held_since_ns: int | None = None
        self._held_ns = 0
        self._look_ns = 0
        """When the downlink is looked at next."""
        self._took = Took()
        self._to_box: list[control.ToBox] = []

    @property
    def is_done(self) -> bool:
        """Neither the box nor the stack knows of it any more."""
        return self.state is State.OVER and not self.leg_open

    # --- the stack

    def established(self, now_ns: int) -> None:
        if self.state is not State.ANSWERING:
            return
        self.state = State.TALKING
        self.talked_from_ns = self._heard_ns = self._read_ns = now_ns
        self._tick = self._grid.tick_at(now_ns + LEAD_NS) + 1

    def closed(self, why: str, stats: dict[str, float], now_ns: int) -> None:
        """The peer has gone, or the stack has let go of it."""
        self.leg_open = False
        self.wants.clear()
        self.stats = stats
        self._leave(why, now_ns)

    def digit(self, digit: str, now_ns: int) -> None:
        """The caller pressed a key; the account may have a rule for it."""
        if len(self.digits) < MOST_DIGITS:
            self.digits += digit
        rule = self.account.digits.get(digit, "")
        if rule == HANG_UP:
            self.hang_up(f"key {digit}", now_ns)
        elif rule:
            self.transfer(rule)

    def held(self, is_held: bool, now_ns: int) -> None:
        """The caller put us on hold, or took us back."""
        if self._speaking is not None:
            self._speaking.is_held = is_held
        if is_held and self._held_since_ns is None:
            self._held_since_ns = now_ns
        elif not is_held and self._held_since_ns is not None:
            self._held_ns += now_ns - self._held_since_ns
            self._held_since_ns = None
            self._heard_ns = now_ns

    def transfer(self, target: str) -> None:
        """Ask the peer to call somebody else instead of us."""
        if self.state is State.TALKING and self.leg_open:
            self.wants.append(Want(Verb.TRANSFER, target))

    def hang_up(self, why: str, now_ns: int) -> None:
        """The line itself ends the call."""
        self._leave(why, now_ns)
        self._release(now_ns)

    # --- what the box said

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int) -> None:
        """The slot is this caller's: answer. t0_ns: origin of the grid of the box that said so."""
        self.session = message.session
        period_ns = self._grid.period_ns
        self._grid = TickGrid(t0_ns, period_ns)
        if self.state is not State.JOINING:  # the caller has gone meanwhile
            self._to_box.append(control.Leave(message.session, "hung up"))
            self._until_ns = now_ns + SETTLE_NS
            return
        self.state = State.ANSWERING
        try:
            self._channel = Channel.attach(message.channel)
            if self._channel.samples != self._samples:
                raise ChannelError(
                    f"frames of {self._channel.samples} samples, not {self._samples}"
                )
        except ChannelError as err:
            self.hang_up(str(err), now_ns)
            return
        self._speaking = Speaking(
            message.session,
            message.generation,
            self._grid,
            self._rate_hz,
            self._channel,
            self._media,
            self._limits.lead_ns,
            self._times,
            self._took,
        )
        self.wants.append(Want(Verb.ANSWER))

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self.why = self.why or f"refused ({message.reason.value}): {message.detail}"
        self._over(now_ns)
        self._release(now_ns)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        self.why = self.why or f"the box ended it ({message.why})"
        self._over(now_ns)
        self._release(now_ns)

    def lost(self, why: str, now_ns: int) -> None:
        """The box is gone, and the session with it."""
        self.why = self.why or why
        self._over(now_ns)
        self._release(now_ns)

    # --- the clock

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box."""
        if self.state is State.JOINING:
            self._ask(now_ns)
        elif self.state is State.TALKING:
            self._read(now_ns)
            self._hand_in(now_ns)
            self._listen(now_ns)
            self._watch(now_ns)
        elif self.state is State.LEAVING:
            if self._speaking is not None:
                self._speaking.collect(now_ns)
                self._speaking.settle()
            if now_ns >= self._until_ns:
                self._over(now_ns)
        said, self._to_box = self._to_box, []
        return said

    def figures(self) -> Figures:
        """How it is going, or went."""
        counts, speaking = self._receive.counts, self._speaking
        outcomes = {} if speaking is None else speaking.outcomes
        phase = None if speaking is None else speaking.phase
        per_s = self._rate_hz / 1000
        return Figures(
            number=self.number,
            session=self.session,
            account=self.account.user,
            caller=self.incoming.caller,
            call_id=self.incoming.call_id,
            state=self.state.value,
            rate_hz=0 if self._in is None else self._in[0],
            digits=self.digits,
            frames=self._sent,
            whole=counts.whole,
            short=counts.short,
            holes=counts.holes,
            concealed_ms=round(counts.concealed_samples / per_s),
            noise_ms=round(counts.noise_samples / per_s),
            cut_ms=round(counts.cut_samples / per_s),
            stretch_ppm=round(self._receive.ppm, 1),
            stretched=counts.stretched,
            overslept=self._overslept,
            paid_back=self._paid_back,
            delivered=outcomes.get(Outcome.DELIVERED, 0),
            late=outcomes.get(Outcome.LATE, 0),
            filled=outcomes.get(Outcome.FILLED, 0),
            discarded=outcomes.get(Outcome.DISCARDED, 0),
            underruns=0 if speaking is None else speaking.lead.underruns,
            phase_moved=0 if phase is None else phase.moved,
            held_ms=self._held_ns // NS_PER_MS,
            **self._took.parts(),
        )

    # --- in

    @property
    def _take_ns(self) -> int:
        return self._grid.start_ns(self._tick) - LEAD_NS

    def _ask(self, now_ns: int) -> None:
        if not self._asked:
            self._asked = True
            account = self.account
            self._to_box.append(
                control.Join(
                    self.number,
                    self._line,
                    self.incoming.caller[: control.LONGEST_CALLER],
                    account.settings,
                    account.voice,
                    account.persona,
                )
            )
        elif now_ns >= self._until_ns:
            self.hang_up("the box did not answer", now_ns)

    def _read(self, now_ns: int) -> None:
        """What the caller said since the last time, into the receive buffer."""
        if now_ns < self._read_ns:
            return
        self._read_ns = (now_ns // READ_NS + 1) * READ_NS
        pcm = self._media.read()
        rate_hz = self._media.in_hz
        if not pcm.size or not rate_hz:
            return
        self._heard_ns = now_ns
        if self._in is None or self._in[0] != rate_hz:
            self._in = (rate_hz, stretcher(rate_hz, self._rate_hz))
        audio = pcm.astype(np.float32) / np.float32(32_768)
        self._arrived_ns = now_ns
        self._receive.push(self._in[1].push(audio, self._receive.ppm), now_ns, self._take_ns)

    def _hand_in(self, now_ns: int) -> None:
        assert self._channel is not None
        while self._take_ns <= now_ns:
            tick, start_ns = self._tick, self._grid.start_ns(self._tick)
            self._tick += 1
            if now_ns >= start_ns:  # the tick has begun without it
                self._overslept += 1
                continue
            if self._pay_back:
                self._pay_back, self._behind = False, 0
                self._paid_back += 1
                continue
            # Of a caller who has said nothing yet, the noise is as old as this moment.
            arrived_ns = now_ns if self._arrived_ns is None else self._arrived_ns
            pcm = self._receive.take(now_ns)
            arrived_ns -= self._receive.held_samples * NS_PER_S // self._rate_hz
            if not self._channel.uplink.put(UplinkHeader(self._sent, 0, arrived_ns), pcm):
                continue  # the box does not read: it is stopping, or stuck, and will be heard of
            self._meant[self._sent] = (tick, arrived_ns)
            self._meant.pop(self._sent - 64, None)
            self._took.arrived_to_tick.append(start_ns - arrived_ns)
            self._sent += 1

    def _notice_backlog(self, header: DownlinkHeader) -> None:
        """Frames that wait in the ring on every tick are lag for ever: leave one out."""
        meant = self._meant.get(header.heard)
        if meant is None:
            return
        self._behind = self._behind + 1 if header.tick > meant[0] else 0
        if self._behind >= PAY_BACK_TICKS:
            self._pay_back = True

    # --- out

    def _listen(self, now_ns: int) -> None:
        """What the model says, to the caller when its time has come."""
        speaking = self._speaking
        assert speaking is not None
        if now_ns >= self._look_ns:
            for header in speaking.collect(now_ns):
                self._notice_backlog(header)
                # The next one cannot be there before its tick has begun.
                self._look_ns = self._grid.start_ns(header.tick + 1)
        due_ns = speaking.next_ns
        if due_ns is None or now_ns < due_ns:
            return
        for header, _ in speaking.send(now_ns):
            if (meant := self._meant.get(header.heard)) is not None:
                self._took.arrived_to_queued.append(now_ns - meant[1])
        speaking.settle()

    # --- how it ends

    def _watch(self, now_ns: int) -> None:
        """Callers who are not there any more, and calls that have lasted long enough."""
        assert self.talked_from_ns is not None
        if now_ns - self.talked_from_ns > self.account.max_s * NS_PER_S:
            self.hang_up(f"longer than {self.account.max_s} s", now_ns)
        elif self._held_since_ns is not None:
            if now_ns - self._held_since_ns > self._limits.hold_ns:
                self.hang_up(f"on hold for {self._limits.hold_ns // NS_PER_S} s", now_ns)
        elif now_ns - self._heard_ns > self._limits.media_timeout_ns:
            seconds = self._limits.media_timeout_ns // NS_PER_S
            self.hang_up(f"no audio from the caller for {seconds} s", now_ns)

    def _leave(self, why: str, now_ns: int) -> None:
        """Leave the session if there is one. A second time is nothing."""
        self.why = self.why or why
        if self.state in (State.TALKING, State.ANSWERING):
            self.state = State.LEAVING
            self._until_ns = now_ns + SETTLE_NS
            self._to_box.append(control.Leave(self.session, self.why[:200]))
            if self._speaking is not None:
                self._speaking.hang_up(now_ns)
        elif self.state is State.JOINING and not self._asked:
            self._over(now_ns)
        elif self.state is State.JOINING:
            self._to_box.append(control.Withdraw(self.number))
            self.state = State.LEAVING
            self._until_ns = max(self._until_ns, now_ns + SETTLE_NS)

    def _release(self, now_ns: int) -> None:
        """Let the stack end its part, if it has not."""
        if self.leg_open and not any(w.verb in (Verb.HANG_UP, Verb.REJECT) for w in self.wants):
            answered = self.talked_from_ns is not None
            self.wants.append(Want(Verb.HANG_UP if answered else Verb.REJECT))

    def _over(self, now_ns: int) -> None:
        """Let go of everything of the box's."""
        if self.state is State.OVER:
            return
        self.held(False, now_ns)
        if self._speaking is not None:
            self._speaking.collect(now_ns)
            self._speaking.hang_up(now_ns)
            self._speaking.settle()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.state = State.OVER
        self.ended_ns = now_ns
