"""One telephone call: what the model hears of it, what the caller hears of the model, how it ends.

Decides a call's life from the line's side, as `web_call` does for a websocket. It is told the
time, what the box said and what the stack said; it touches its channel, the call's audio and a
queue of wishes, `wants`, that the shell carries out. Does not know SIP, other calls, or threads.

    JOINING -- Admitted: answer --> ANSWERING -- Established --> TALKING -- somebody ends it
       |                               |                            |
       +-- Refused: reject             +-------- Closed ------------+--> LEAVING -- Gone --> OVER

In: `sip_hear`; on hold the model hears silence and the clock goes on. Out: `sip_speak`.
"""

import enum
from collections import deque
from dataclasses import dataclass

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import ChannelError, Outcome
from appliance.lines.sip_announce import Announcing
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_figures import Figures, Took
from appliance.lines.sip_hear import HandIn, Hearing
from appliance.lines.sip_recorder import Tape
from appliance.lines.sip_speak import Speaking
from appliance.lines.sip_stack import Incoming, Media
from appliance.lines.sip_transfer import HANG_UP, Transfer
from appliance.lines.sip_words import Words
from appliance.lines.web_pace import TickTimes

ANSWER_NS = 10 * NS_PER_S
PRIMED_NS = 600 * NS_PER_S
"""How long the box may take to answer a Join; if it has to feed a persona first."""

SETTLE_NS = 10 * NS_PER_S
"""How long the box may take to say Gone, and the stack to say Closed."""

WATCH_NS = 50 * NS_PER_MS
"""Between two looks whether a call should end; nothing asks for less than half a second."""

MOST_DIGITS = 256
"""Kept of a call, for its record."""


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
    transfer_to: tuple[str, ...] = ()
    """Addresses to which callers may be transferred."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What an account may have besides, for one call."""

    words: Words | None = None
    """What the model's words do."""
    announcing: Announcing | None = None
    """What the caller hears before the model hears the caller."""
    tape: Tape | None = None
    """Where both sides are recorded."""


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
        extras: Extras | None = None,
        hand_in: HandIn | None = None,
    ) -> None:
        """number: the `request` of its Join. times, hand_in: shared by all calls of a line."""
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
        self.sent_on = Transfer()
        """How the caller's transfer stands."""
        self.stats: dict[str, float] = {}
        self.began_ns = now_ns
        self.talked_from_ns: int | None = None
        self.ended_ns: int | None = None
        self._line = line
        self._limits = limits
        self._extras = extras or Extras()
        self._media = media
        self._welcome = welcome
        self._asked = False
        self._is_released = False
        waits_ns = PRIMED_NS if account.voice or account.persona else ANSWER_NS
        self._until_ns = now_ns + waits_ns
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._samples = welcome.samples_per_frame
        self._rate_hz = welcome.sample_rate_hz
        self._times = times
        self._channel: Channel | None = None
        self._speaking: Speaking | None = None
        self._held_since_ns: int | None = None
        self._held_ns = 0
        self._look_ns = self._watch_ns = 0
        """When the downlink is looked at next, and whether the call should end."""
        self._took = Took()
        self._hand_in = hand_in or HandIn()
        self.hearing = Hearing(
            self._samples,
            self._rate_hz,
            number,
            media,
            self._took,
            self._extras.tape,
            self._hand_in,
            now_ns,
        )
        self._to_box: list[control.ToBox] = []

    @property
    def tape(self) -> Tape | None:
        """Its recording; whoever made it closes it."""
        return self._extras.tape

    @property
    def codec(self) -> str:
        """What its audio travels in, as far as the stack says."""
        return self._media.codec

    @property
    def is_done(self) -> bool:
        """Neither the box nor the stack knows of it any more."""
        return self.state is State.OVER and not self.leg_open

    # --- the stack

    def established(self, now_ns: int) -> None:
        if self.state is not State.ANSWERING:
            return
        self.state = State.TALKING
        self.talked_from_ns = now_ns
        self.hearing.begin(self._grid, now_ns)

    def closed(self, why: str, stats: dict[str, float], now_ns: int) -> None:
        """The peer has gone, or the stack has let go of it."""
        self.leg_open = False
        self.wants.clear()
        self.stats = stats
        self.sent_on.end(f"the call ended before the peer said: {why}", is_done=False)
        self._leave(why, now_ns)

    def digit(self, digit: str, now_ns: int) -> None:
        """The caller pressed a key; the account may have a rule for it."""
        if len(self.digits) < MOST_DIGITS:
            self.digits += digit
        self._obey(self.account.digits.get(digit, ""), f"key {digit}", now_ns)

    def held(self, is_held: bool, now_ns: int) -> None:
        """The caller put us on hold, or took us back."""
        if self._speaking is not None:
            self._speaking.is_held = is_held
        if is_held and self._held_since_ns is None:
            self._held_since_ns = now_ns
            self.hearing.may_miss_caller = False
        elif not is_held and self._held_since_ns is not None:
            self._held_ns += now_ns - self._held_since_ns
            self._held_since_ns = None
            self.hearing.heard_ns = now_ns

    def transfer(self, target: str, by: str) -> str:
        """Ask the peer to call somebody else instead of us; why not, or nothing."""
        if self.state is not State.TALKING or not self.leg_open:
            return "nobody talks on this call"
        why = self.sent_on.ask(target, by, self._limits.transfer_to)
        if not why:
            self.wants.append(Want(Verb.TRANSFER, target))
        return why

    def transfer_ended(self, outcome: str, is_done: bool, now_ns: int) -> bool:
        """What became of it: the session ends with a transfer that is done, and no other.

        False: that is no news.
        """
        if not self.sent_on.end(outcome, is_done=is_done):
            return False
        if is_done:
            self.hang_up(f"transferred to {self.sent_on.target}", now_ns)
        elif self.state is State.OVER:  # there is nobody left to talk to
            self._release(now_ns)
        return True

    def began_anew(self) -> None:
        """The box has reset the model: what it said before does not count."""
        if self._extras.words is not None:
            self._extras.words.forget()

    def hang_up(self, why: str, now_ns: int) -> None:
        """The line itself ends the call."""
        self._leave(why, now_ns)
        self._release(now_ns)

    # --- what the box said

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int) -> None:
        """The slot is this caller's: answer. t0_ns: origin of the grid of the box that said so."""
        self.session = message.session
        self._grid = TickGrid(t0_ns, self._grid.period_ns)
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
            self._hand_in,
            self._extras.tape,
        )
        self.wants.append(Want(Verb.ANSWER))

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self.why = self.why or message.words
        self._over(now_ns)
        self._release(now_ns)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        why = message.detail or f"the box ended it ({message.why})"
        self._part(why, now_ns, is_final=message.why == control.OPERATOR)

    def lost(self, why: str, now_ns: int) -> None:
        """The box is gone, and the session with it."""
        self._part(why, now_ns)

    def _part(self, why: str, now_ns: int, is_final: bool = False) -> None:
        """The session is over. A caller who was talking may be somebody else's then."""
        may_fall_back = self.state is State.TALKING and self.leg_open and not is_final
        target = self.account.fallback if may_fall_back else ""
        self.why = self.why or why
        self._over(now_ns)
        if target and not self.sent_on.ask(target, self.why, self._limits.transfer_to):
            self.wants.append(Want(Verb.TRANSFER, target))
        if is_final or not self.sent_on.is_under_way:
            self._release(now_ns)

    # --- the clock

    def hear(self, now_ns: int) -> int | None:
        """The way in, which ticks wait for; when the next frame's time comes, if one does."""
        if not self._is_heard or self._channel is None:
            return None
        return self.hearing.turn(self._channel, self._grid, now_ns)

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box."""
        if self.state is State.JOINING:
            self._ask(now_ns)
        elif self.state is State.TALKING and self._announces(now_ns):
            self._watch(now_ns)
        elif self.state is State.TALKING:
            self.hear(now_ns)
            self._listen(now_ns)
            if now_ns >= self._watch_ns:
                self._mind_words(now_ns)
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
        hearing, speaking = self.hearing, self._speaking
        counts = hearing.receive.counts
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
            rate_hz=hearing.rate_in_hz,
            digits=self.digits,
            frames=hearing.sent,
            whole=counts.whole,
            short=counts.short,
            holes=counts.holes,
            concealed_ms=round(counts.concealed_samples / per_s),
            noise_ms=round(counts.noise_samples / per_s),
            cut_ms=round(counts.cut_samples / per_s),
            stretch_ppm=round(hearing.receive.ppm, 1),
            stretched=counts.stretched,
            overslept=hearing.overslept,
            paid_back=hearing.paid_back,
            not_taken=hearing.not_taken,
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
    def _is_heard(self) -> bool:
        """By the model, once they talk and an announcement is over."""
        announcing = self._extras.announcing
        return self.state is State.TALKING and (announcing is None or announcing.is_over)

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
                    transfers=bool(self._limits.transfer_to),
                )
            )
        elif now_ns >= self._until_ns:
            self.hang_up("the box did not answer", now_ns)

    def _announces(self, now_ns: int) -> bool:
        """Whether the announcement still goes on; the session goes live after it."""
        announcing = self._extras.announcing
        if announcing is None or announcing.is_over:
            return False
        self.hearing.leave_out(now_ns)
        announcing.turn(self._media)
        if announcing.is_over:
            self.hearing.begin(self._grid, now_ns)
        return True

    # --- out

    def _listen(self, now_ns: int) -> None:
        """What the model says, to the caller when its time has come."""
        speaking = self._speaking
        assert speaking is not None
        if now_ns >= self._look_ns:
            for header in speaking.collect(now_ns):
                self.hearing.came_back(header)
                # The next one cannot be there before its tick has begun.
                self._look_ns = self._grid.start_ns(header.tick + 1)
        if not speaking.has_work(now_ns):
            return
        words = self._extras.words
        for header, _ in speaking.send(now_ns):
            if words is not None:
                words.hear(header.text, now_ns, self.hearing.spoke_ns)
            if (arrived_ns := self.hearing.arrived_ns(header.heard)) is not None:
                self._took.arrived_to_queued.append(now_ns - arrived_ns)
        speaking.settle()

    # --- how it ends

    def _mind_words(self, now_ns: int) -> None:
        """Do what the model's words mean, once it has been heard out."""
        words = self._extras.words
        if words is not None and (meant := words.due(now_ns, self.hearing.spoke_ns)) is not None:
            self._obey(meant.what, f'words "{meant.phrase}"', now_ns)

    def _obey(self, what: str, by: str, now_ns: int) -> None:
        """What an account says of a key, or of words; empty: nothing."""
        if what == HANG_UP:
            self.hang_up(by, now_ns)
        elif what:
            self.transfer(what, by)

    def _watch(self, now_ns: int) -> None:
        """Callers who are not there any more, and calls that have lasted long enough."""
        assert self.talked_from_ns is not None
        self._watch_ns = now_ns + WATCH_NS
        if now_ns - self.talked_from_ns > self.account.max_s * NS_PER_S:
            self.hang_up(f"longer than {self.account.max_s} s", now_ns)
        elif self._held_since_ns is not None:
            if now_ns - self._held_since_ns > self._limits.hold_ns:
                self.hang_up(f"on hold for {self._limits.hold_ns // NS_PER_S} s", now_ns)
        elif now_ns - self.hearing.heard_ns > self._limits.media_timeout_ns:
            seconds = self._limits.media_timeout_ns // NS_PER_S
            self.hang_up(f"no audio from the caller for {seconds} s", now_ns)

    def _leave(self, why: str, now_ns: int) -> None:
        """Leave the session if there is one. A second time is nothing."""
        self.why = self.why or why
        if self._is_heard and self._channel is not None:
            self.hearing.end(self._channel, self._grid, now_ns)
        if self.state in (State.TALKING, State.ANSWERING):
            self.state = State.LEAVING
            self.ended_ns = now_ns  # what the box takes to say goodbye is nobody's call
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
        if self.leg_open and not self._is_released:
            self._is_released = True
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
        self.ended_ns = self.ended_ns or now_ns
