"""The one call of a local line: what is handed in and played when, and how the call ends.

Decides a call's life from the line's side, as `call` does for a file. It is told the time, what the
box said, and which sound there is; it touches its channel, a microphone and a loudspeaker. Does not
know sound libraries, the terminal, or the control socket (`local_line`).

    JOINING -- Admitted --> TALKING -- hang up: LAST --> LISTENING -- Gone --> OVER
        +-- Refused --> OVER   +-- box or channel fails: Leave --> LEAVING -- Gone --> OVER

In: one frame is handed in `LEAD_NS` before each tick, of the microphone's or, while it is muted or
away, of silence; a tick this process overslept is left out, and a backlog that the box built up is
paid back the same way. Out: every frame is played at the same time after its tick's start, which
moves later when a frame is not in hand, and earlier again, slowly, when all of them are
(`web_pace.Phase`). What comes while there is no sound card is discarded, and receipted so.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import (
    CONCEALED,
    LAST,
    ChannelError,
    ChannelGone,
    DownlinkHeader,
    Outcome,
    Receipt,
    UplinkHeader,
)
from appliance.lines.local_figures import Figures, Took
from appliance.lines.local_sound import Microphone, Speaker
from appliance.lines.playout import Played, Playout
from appliance.lines.transcript import PieceText
from appliance.lines.web_pace import Phase

LEAD_NS = 20 * NS_PER_MS
"""How long before a tick its frame is handed in: what this process may be late by. With 10 ms, and
five others that wanted the same two cores, a third of the frames missed their tick."""

POLL_NS = 2 * NS_PER_MS
"""How often a live call looks for frames of the model and blocks of the microphone."""

ANSWER_NS = 10 * NS_PER_S
PRIMED_NS = 600 * NS_PER_S
"""How long the box may take to answer a Join; if it has to feed a persona first."""

SETTLE_NS = 10 * NS_PER_S
"""How long the box may take to say Gone."""

OVERSLEPT_NS = 20 * NS_PER_MS
"""A turn that comes so long after the one before tells nothing of what the box takes."""

PAY_BACK_TICKS = 6
"""So many ticks in a row must have heard an older frame than theirs before a backlog is one."""

REMEMBERED = 64
"""Frames that were handed in and may still be answered."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asks the box for."""

    caller: str
    settings: dict[str, float] = field(default_factory=dict)
    persona: str = ""
    voice: str = ""


class State(enum.Enum):
    """Where the call is in its life; see the picture above."""

    JOINING = "joining"
    TALKING = "talking"
    LISTENING = "listening"
    LEAVING = "leaving"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class _Meant:
    """What is remembered of a frame that was handed in."""

    tick: int
    arrived_ns: int


_Reply = tuple[DownlinkHeader, NDArray[np.float32]]


class LocalCall:
    """`advance` does whatever is due; everything takes the time as an argument."""

    def __init__(
        self, wish: Wish, welcome: control.Welcome, pieces: Sequence[str], now_ns: int
    ) -> None:
        self.state = State.JOINING
        self.trouble = ""
        """Why the call did not go as it should; empty if it did."""
        self.ended = ""
        """The box's word for how it ended."""
        self.microphone: Microphone | None = None
        self.speaker: Speaker | None = None
        """Both None: there is no sound card now."""
        self.said = ""
        """What the model has said since somebody last emptied this."""
        self.session = 0
        self.margin_ns = 0
        """Of the newest frame: how long before its deadline the box had made it."""
        self._wish = wish
        self._asked = False
        self._until_ns = now_ns + (PRIMED_NS if wish.voice or wish.persona else ANSWER_NS)
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._samples = welcome.samples_per_frame
        self._rate_hz = welcome.sample_rate_hz
        self._silence = np.zeros(self._samples, np.float32)
        self._text = PieceText(pieces, welcome.silent_ids)
        self._channel: Channel | None = None
        self._is_missing = False
        """The box's channel was not there."""
        self._playout: Playout[_Reply] | None = None
        self._phase: Phase | None = None
        self._receipts: deque[Receipt] = deque()
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._took = Took()
        self._tick = 0
        """The tick whose frame is handed in next."""
        self._sent = 0
        self._put: dict[int, _Meant] = {}
        self._behind = 0
        self._counts = dict.fromkeys(("overslept", "paid_back", "concealed", "silent"), 0)
        self._hanging_up = False
        self._turned_ns = now_ns
        """When `advance` was here last."""
        self._to_box: list[control.ToBox] = []

    @property
    def is_over(self) -> bool:
        return self.state is State.OVER

    @property
    def take_ns(self) -> int:
        """When the next frame is handed in."""
        return self._grid.start_ns(self._tick) - LEAD_NS

    def wake_ns(self, now_ns: int) -> int:
        """When `advance` is wanted next, at the latest."""
        if self.state is State.JOINING:
            return self._until_ns if self._asked else now_ns
        wake_ns = now_ns + POLL_NS
        if self.state is State.TALKING:
            wake_ns = min(wake_ns, self.take_ns)
        if self._playout is not None and (due_ns := self._playout.next_due_ns) is not None:
            wake_ns = min(wake_ns, due_ns)
        return wake_ns

    def hang_up(self) -> None:
        """End politely: the next frame is the last one. Takes effect in `advance`."""
        self._hanging_up = True

    def figures(self) -> Figures:
        """How it is going."""
        return self._took.figures(self._outcomes, self._counts, self._sent, self.microphone)

    # --- what the box said

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int) -> None:
        """Attach to the session's channel. t0_ns: origin of the grid of the box that said so."""
        self.session = message.session
        self._grid = TickGrid(t0_ns, self._grid.period_ns)
        period_ns = self._grid.period_ns
        self._playout = Playout(message.session, message.generation, period_ns, period_ns)
        try:
            channel = Channel.attach(message.channel)
            self._channel = channel
            if channel.samples != self._samples:
                raise ChannelError(
                    f"{message.channel} carries frames of {channel.samples} samples; "
                    f"the bundle's have {self._samples}"
                )
        except ChannelError as err:
            self._is_missing = isinstance(err, ChannelGone)
            self._leave(now_ns, str(err))
            return
        self._tick = self._grid.tick_at(now_ns + LEAD_NS) + 1
        self.state = State.TALKING

    def refused(self, message: control.Refused, now_ns: int) -> None:
        self.end(now_ns, message.words)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        self.ended = message.why
        wanted = {State.LISTENING: "finished", State.LEAVING: "left"}.get(self.state)
        if self._is_missing and message.why != wanted:
            self.trouble = ""  # the box's word says more
        ended_it = message.detail or f"the box ended the call: {message.why}"
        self.end(now_ns, "" if message.why == wanted else ended_it)

    def lost(self, why: str, now_ns: int) -> None:
        """The box itself is gone."""
        self.end(now_ns, why)

    def end(self, now_ns: int, trouble: str = "") -> None:
        """Settle what is in hand and let go of everything."""
        if self.is_over:
            return
        self.trouble = self.trouble or trouble
        if self._channel is not None:
            self._collect(now_ns)
            self._drop_rest(now_ns)
            self._settle()
            self._channel.close()
            self._channel = None
        self.state = State.OVER

    # --- the clock

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box."""
        if self.state is State.JOINING:
            self._ask(now_ns)
        elif not self.is_over:
            # Playing comes last: a frame may be due in the same instant in which it arrives.
            if self.state is State.TALKING:
                self._hand_in(now_ns)
            self._collect(now_ns)
            self._play_due(now_ns)
            self._settle()
            if self.state is not State.TALKING and now_ns >= self._until_ns:
                self.end(now_ns, f"the box did not end it within {SETTLE_NS // NS_PER_S} s")
        said, self._to_box = self._to_box, []
        return said

    def _ask(self, now_ns: int) -> None:
        if self._hanging_up:
            self._withdraw()
            self.end(now_ns, "hung up before the box answered")
        elif not self._asked:
            self._asked = True
            wish = self._wish
            self._to_box.append(
                control.Join(1, "local", wish.caller, wish.settings, wish.voice, wish.persona)
            )
        elif now_ns >= self._until_ns:
            self._withdraw()
            self.end(now_ns, "the box did not answer; its log says why")

    def _withdraw(self) -> None:
        """The slot is somebody else's at once, not when the box sees this process end."""
        if self._asked:
            self._to_box.append(control.Withdraw(1))

    # --- in

    def _hand_in(self, now_ns: int) -> None:
        while self.state is State.TALKING and self.take_ns <= now_ns:
            tick, start_ns = self._tick, self._grid.start_ns(self._tick)
            self._tick += 1
            pcm, arrived_ns = self._frame(start_ns)
            # The last frame is handed in whenever it can be: it ends the call. What belongs to a
            # tick that is left out is left out too, or it would be lag from then on.
            if now_ns >= start_ns and not self._hanging_up:
                self._counts["overslept"] += 1
            elif self._behind >= PAY_BACK_TICKS and not self._hanging_up:
                self._behind = 0
                self._counts["paid_back"] += 1
            elif pcm is not None or self._hanging_up:
                self._put_frame(tick, self._silence if pcm is None else pcm, arrived_ns, now_ns)

    def _frame(self, start_ns: int) -> tuple[NDArray[np.float32] | None, int]:
        """What the model hears; None: the microphone is late, and the box conceals that."""
        take_ns = start_ns - LEAD_NS
        if self.microphone is None:
            self._counts["silent"] += 1
            return self._silence, take_ns
        has_begun = self.microphone.intake.started
        pcm, arrived_ns = self.microphone.take(take_ns)
        if pcm is None and not has_begun:
            return self._silence, take_ns
        return pcm, arrived_ns

    def _put_frame(self, tick: int, pcm: NDArray[np.float32], arrived_ns: int, now_ns: int) -> None:
        assert self._channel is not None
        header = UplinkHeader(self._sent, LAST if self._hanging_up else 0, arrived_ns)
        if not self._channel.uplink.put(header, pcm):
            return  # the box does not read: it is stopping, or stuck, and will be heard of
        self._put[self._sent] = _Meant(tick, arrived_ns)
        self._put.pop(self._sent - REMEMBERED, None)
        self._took.arrived_to_tick.append(self._grid.start_ns(tick) - arrived_ns)
        self._sent += 1
        if self._hanging_up:
            self.state = State.LISTENING
            self._until_ns = now_ns + SETTLE_NS

    # --- out

    def _collect(self, now_ns: int) -> None:
        """Take what the model made."""
        channel, playout = self._channel, self._playout
        assert playout is not None
        if channel is None:
            return
        pcm = np.empty(self._samples, np.float32)
        while (header := channel.downlink.get(pcm)) is not None:
            ours = header.session == playout.session
            made_ns = header.made_ns - self._grid.start_ns(header.tick)
            if playout.first_ns is None and ours:
                # Ticks come to take longer than the first one; how much longer, `miss` finds out.
                self._phase = Phase(self._grid.period_ns, 2 * made_ns, follows=True)
                due_ns = self._grid.start_ns(header.tick) + self._phase.phase_ns
                playout.buffer_ns = max(0, due_ns - now_ns)
            receipt = playout.arrive(header, (header, pcm), now_ns)
            if receipt is not None:
                self._owe(receipt)
            if ours:
                self.margin_ns = header.deadline_ns - header.made_ns
                self._counts["concealed"] += bool(header.flags & CONCEALED)
                self._took.tick_to_made.append(made_ns)
                self._notice_backlog(header)
            pcm = np.empty(self._samples, np.float32)  # the one before is held until it is played

    def _notice_backlog(self, header: DownlinkHeader) -> None:
        """Frames that wait in the ring on every tick are lag for ever: one is left out."""
        meant = self._put.get(header.heard)
        if meant is not None:
            self._behind = self._behind + 1 if header.tick > meant.tick else 0

    def _play_due(self, now_ns: int) -> None:
        assert self._playout is not None
        # When this process was late itself, waiting longer would be lag for nothing.
        if now_ns - self._turned_ns < OVERSLEPT_NS:
            self._wait_for_next(now_ns)
        self._turned_ns = now_ns
        played, receipts = self._playout.due(now_ns)
        runs = self.speaker is not None and self.speaker.runs(now_ns)
        # Of frames whose time passed unseen, none is heard but the one that is due now.
        heard = {
            frame.frame_index
            for frame in played
            if runs and now_ns - frame.playout_ns < self._grid.period_ns
        }
        for receipt in receipts:
            missed = receipt.frame_index not in heard
            if missed and receipt.outcome in (Outcome.DELIVERED, Outcome.LATE):
                receipt = receipt._replace(outcome=Outcome.DISCARDED)
            self._owe(receipt)
        for frame in played:
            self._play(frame, now_ns, frame.frame_index in heard)

    def _wait_for_next(self, now_ns: int) -> None:
        """The frame that is due is not in hand, or came after its time: all are played later."""
        playout, phase = self._playout, self._phase
        assert playout is not None
        due_ns = playout.next_due_ns
        if due_ns is None or due_ns > now_ns or phase is None:
            return
        came_ns = playout.next_arrived_ns
        late_ns = (now_ns + POLL_NS if came_ns is None else came_ns) - due_ns
        if late_ns > 0 and (shift_ns := phase.miss(late_ns)) > 0:
            playout.postpone(shift_ns)

    def _play(self, played: Played[_Reply], now_ns: int, heard: bool) -> None:
        speaker, reply = self.speaker, played.frame
        earlier_ns = 0
        if reply is not None:
            header = reply[0]
            assert self._phase is not None
            assert self._playout is not None
            if earlier_ns := self._phase.sent(now_ns - header.made_ns):
                self._playout.postpone(-earlier_ns)
        if speaker is None or not heard:
            return
        speaker.play(None if reply is None else reply[1], now_ns, earlier_ns)
        if reply is None:
            return
        self.said += self._text.hear(header.text)
        meant = self._put.get(header.heard)
        self._took.played(header, now_ns, meant.arrived_ns if meant else None, speaker)

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

    # --- how it ends

    def leave(self, now_ns: int, trouble: str) -> None:
        """Hang up at once, without a last frame."""
        if self.state in (State.TALKING, State.LISTENING):
            self._leave(now_ns, trouble)

    def _leave(self, now_ns: int, trouble: str) -> None:
        self.trouble = self.trouble or trouble
        self.state = State.LEAVING
        self._until_ns = now_ns + SETTLE_NS
        self._drop_rest(now_ns)
        self._to_box.append(control.Leave(self.session, trouble[: control.LONGEST_WHY]))

    def _drop_rest(self, now_ns: int) -> None:
        """Nothing more will be heard: receipts for what is in hand."""
        assert self._playout is not None
        for receipt in self._playout.hang_up(now_ns):
            self._owe(receipt)
