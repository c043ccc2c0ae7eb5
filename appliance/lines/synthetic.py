"""A synthetic caller: real speech, a real channel, and the troubles of a network, from a seed.

Decides when each frame is handed in and whether it ever is. Used to load a box and to measure it
(`certify`); what a caller hears is only counted. Everything takes the time as an argument; the
process around it is `callers`.

    captured(n) = first + n * period * (1 - skew)      the caller's own clock, fast or slow
    handed in   = captured(n) + jitter(n), in order    the way here
    never       = with probability `loss`              the last frame is never lost

The caller's frames lie at any phase of the tick. A frame that comes after its tick has begun is
concealed by the box; from then on the caller is one frame behind, which is what a jitter buffer
would have cost. What comes back is played on the box's grid: making up for a caller's clock on
the way out is the matter of the line that has such a clock.
"""

import enum
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import (
    LAST,
    ChannelError,
    ChannelGone,
    Outcome,
    Receipt,
    UplinkHeader,
)
from appliance.lines.playout import Playout

EARLIEST_NS = 20 * NS_PER_MS
"""Least time from a frame's capture to the tick it is meant for, as `lines.call.LEAD_NS`."""

POLL_NS = 2 * NS_PER_MS
NEVER_NS = 2**63 - 1
ANSWER_NS = 10 * NS_PER_S
SETTLE_NS = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between a caller and the box. Pure: the same seed gives the same troubles."""

    jitter_ns: int = 0
    """Frames are late by anything from 0 to this, evenly."""
    loss: float = 0.0
    """Share of frames that never arrive."""
    skew_ppm: float = 0.0
    """How much faster the caller's clock runs than the box's; negative: slower."""

    def due_ns(self, first_ns: int, period_ns: int, frame_index: int) -> int:
        """When the caller has captured ``frame_index``."""
        return first_ns + round(frame_index * period_ns * (1 - self.skew_ppm / 1e6))


@dataclass(frozen=True, slots=True)
class SyntheticPlan:
    """What one caller is going to do."""

    number: int
    """From 1; the `request` of its Join."""
    start_ns: int
    """When to ask for admission."""
    talk_ns: int
    """How long to talk, from the first frame; at least one frame is said."""
    network: Network
    offset_frames: int
    """Where in the speech it begins, so that callers do not speak in chorus."""
    phase: float
    """Where in the tick its frames are captured, 0..1."""
    seed: int
    """Of its jitter and losses."""


class State(enum.Enum):
    """WAITING -> JOINING -> TALKING -> LISTENING -> OVER; a refusal or an end skips to OVER."""

    WAITING = "waiting"
    JOINING = "joining"
    TALKING = "talking"
    LISTENING = "listening"
    OVER = "over"


class SyntheticReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a synthetic call went, as its own line saw it. Counts are frames."""

    number: int
    session: int
    """0: it was never admitted."""
    ended: str
    """The box's word for the end, or `refused`, or what went wrong in the line."""
    refused: str
    """The reason of a refusal, else empty."""
    detail: str
    skew_ppm: float
    sent: int
    lost_on_purpose: int
    overflows: int
    """Frames the box had no room for."""
    delivered: int
    late: int
    filled: int
    discarded: int
    strays: int
    smallest_buffer_ns: int
    """Least playout buffer of a frame that was heard."""


class SyntheticCall:
    """One caller. `advance` does whatever is due."""

    def __init__(
        self, plan: SyntheticPlan, speech: NDArray[np.float32], welcome: control.Welcome
    ) -> None:
        """speech: (frames, S) float32 at the model's rate; said in a loop."""
        self.plan = plan
        self.state = State.WAITING
        self.session = 0
        self._speech = speech
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._frames = max(1, plan.talk_ns // welcome.period_ns)
        self._rng = np.random.default_rng(plan.seed)
        self._channel: Channel | None = None
        self._playout: Playout[None] | None = None
        self._receipts: deque[Receipt] = deque()
        self._pcm = np.empty(welcome.samples_per_frame, np.float32)
        self._first_ns = 0
        self._until_ns = 0
        self._next = 0
        self._put_ns = 0
        """When the next frame is handed in: its capture and the way here."""
        self._due_ns = NEVER_NS
        """When the next frame is heard, as far as is known."""
        self._sent = 0
        self._lost = 0
        self._overflows = 0
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._smallest_ns: int | None = None
        self._ended = ""
        self._missing = ""
        """What was wrong when the box's channel was not there."""
        self._refused = ""
        self._detail = ""

    @property
    def is_over(self) -> bool:
        return self.state is State.OVER

    def wake_ns(self, now_ns: int) -> int:
        """When `advance` is wanted next, at the latest."""
        if self.state is State.WAITING:
            return self.plan.start_ns
        if self.state is State.JOINING:
            return self._until_ns
        wake_ns = now_ns + POLL_NS
        return min(wake_ns, self._put_ns) if self.state is State.TALKING else wake_ns

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box."""
        match self.state:
            case State.WAITING if now_ns >= self.plan.start_ns:
                self.state = State.JOINING
                self._until_ns = now_ns + ANSWER_NS
                return [control.Join(self.plan.number, "synthetic", f"caller {self.plan.number}")]
            case State.JOINING if now_ns >= self._until_ns:
                self.end(now_ns, "the box did not answer")
            case State.TALKING:
                if now_ns >= self._put_ns:
                    self._talk(now_ns)
                self._look(now_ns)
            case State.LISTENING:
                if self._channel is not None:
                    self._look(now_ns)
                if now_ns >= self._until_ns:
                    self.end(now_ns, self._missing or "the box did not end the call")
        return []

    def hang_up(self) -> None:
        """The next frame is the last."""
        self._frames = min(self._frames, self._next + 1)

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int | None = None) -> None:
        """Attach to the channel and begin to talk. t0_ns: of the grid of the box that said yes."""
        if t0_ns is not None:
            self._grid = TickGrid(t0_ns, self._grid.period_ns)
        self.session = message.session
        try:
            self._channel = Channel.attach(message.channel)
        except ChannelGone as err:  # the box's word, or its end, is on its way and says why
            self._missing = str(err)
            self.state = State.LISTENING
            self._until_ns = now_ns + SETTLE_NS
            return
        except ChannelError as err:
            self.end(now_ns, str(err))
            return
        period_ns = self._grid.period_ns
        self._playout = Playout(message.session, message.generation, period_ns, period_ns)
        lead_ns = EARLIEST_NS + round(self.plan.phase * (period_ns - EARLIEST_NS))
        tick = self._grid.tick_at(now_ns + lead_ns) + 1
        self._first_ns = self._grid.start_ns(tick) - lead_ns
        self.state = State.TALKING
        self._schedule()

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self._detail = message.detail
        if message.reason.value == control.OPERATOR:
            self.end(now_ns, control.OPERATOR)
            return
        self._refused = message.reason.value
        self.end(now_ns, "refused")

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, whether or not we wanted it to."""
        self._detail = message.detail
        self.end(now_ns, message.why)

    def lost(self, why: str, now_ns: int) -> None:
        """The box itself is gone."""
        self.end(now_ns, why)

    def end(self, now_ns: int, ended: str) -> None:
        """Settle what is in hand and let go of the channel. A second time changes nothing."""
        if self.is_over:
            return
        self._ended = ended
        if self._channel is not None and self._playout is not None:
            self._listen(now_ns)
            for receipt in self._playout.hang_up(now_ns):
                self._owe(receipt)
            self._settle()
            self._channel.close()
        self.state = State.OVER

    def report(self) -> SyntheticReport:
        return SyntheticReport(
            number=self.plan.number,
            session=self.session,
            ended=self._ended,
            refused=self._refused,
            detail=self._detail,
            skew_ppm=self.plan.network.skew_ppm,
            sent=self._sent,
            lost_on_purpose=self._lost,
            overflows=self._overflows,
            delivered=self._outcomes[Outcome.DELIVERED],
            late=self._outcomes[Outcome.LATE],
            filled=self._outcomes[Outcome.FILLED],
            discarded=self._outcomes[Outcome.DISCARDED],
            strays=0 if self._playout is None else self._playout.strays,
            smallest_buffer_ns=self._smallest_ns or 0,
        )

    # --- the two directions

    def _schedule(self) -> None:
        """When the next frame is handed in; never before the one before it."""
        network = self.plan.network
        due_ns = network.due_ns(self._first_ns, self._grid.period_ns, self._next)
        arrives_ns = due_ns + round(self._rng.random() * network.jitter_ns)
        self._put_ns = max(self._put_ns, arrives_ns)

    def _talk(self, now_ns: int) -> None:
        assert self._channel is not None
        network = self.plan.network
        while self.state is State.TALKING and self._put_ns <= now_ns:
            is_last = self._next >= self._frames - 1
            if not is_last and self._rng.random() < network.loss:
                self._lost += 1
            else:
                due_ns = network.due_ns(self._first_ns, self._grid.period_ns, self._next)
                header = UplinkHeader(self._next, LAST if is_last else 0, due_ns)
                pcm = self._speech[(self.plan.offset_frames + self._next) % len(self._speech)]
                if not self._channel.uplink.put(header, pcm):
                    if is_last:  # without it the session would never end: offer it again
                        return
                    self._overflows += 1
                self._sent += 1
            self._next += 1
            if is_last:
                self.state = State.LISTENING
                self._until_ns = now_ns + SETTLE_NS
            else:
                self._schedule()

    def _look(self, now_ns: int) -> None:
        """`_listen` if there is anything: hundreds of callers look hundreds of times a second."""
        assert self._channel is not None
        if now_ns >= self._due_ns or self._channel.downlink.waiting or self._receipts:
            self._listen(now_ns)

    def _listen(self, now_ns: int) -> None:
        """Take what the model made and say what became of it."""
        channel, playout = self._channel, self._playout
        assert channel is not None
        assert playout is not None
        while (header := channel.downlink.get(self._pcm)) is not None:
            receipt = playout.arrive(header, None, now_ns)
            if receipt is not None:
                self._owe(receipt)
        for receipt in playout.due(now_ns)[1]:
            self._owe(receipt)
        due_ns = playout.next_due_ns
        self._due_ns = NEVER_NS if due_ns is None else due_ns
        self._settle()

    def _owe(self, receipt: Receipt) -> None:
        outcome = Outcome(receipt.outcome)
        self._outcomes[outcome] += 1
        if outcome in (Outcome.DELIVERED, Outcome.LATE):
            smallest_ns = self._smallest_ns
            left_ns = receipt.buffer_ns
            self._smallest_ns = left_ns if smallest_ns is None else min(smallest_ns, left_ns)
        self._receipts.append(receipt)

    def _settle(self) -> None:
        assert self._channel is not None
        while self._receipts and self._channel.receipts.put(self._receipts[0]):
            self._receipts.popleft()
