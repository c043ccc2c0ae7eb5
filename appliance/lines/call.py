"""One call of a file line: what it says when, what it does with what comes back, how it ends.

Decides a call's life from the line's side. It is told the time and what the box said, and touches
nothing but its channel and its recording. Does not know the control socket, other calls or the
command line (`file`), and leaves the fate of each frame to `playout`.

    WAITING -- its time has come: Join --> JOINING -- Admitted --> TALKING -- LAST put --> LISTENING
                                              |                       |  hang up: Leave       |
                                            Refused                   |                  Gone |
                                              v                       v                       v
                                            OVER  <------- Gone ---  LEAVING               OVER

Frame n is handed in at ``first + n · period``, `LEAD_NS` before a tick starts, whatever time the
line woke up at: a line that overslept puts the frames it owes at once, as a network would.
"""

import enum
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import (
    CONCEALED,
    LAST,
    WARMING,
    ChannelError,
    ChannelGone,
    DownlinkHeader,
    Outcome,
    Receipt,
    UplinkHeader,
)
from appliance.journal import SUFFIX, Head, JournalError, JournalWriter
from appliance.lines.call_report import CallReport, span_ms
from appliance.lines.playout import Playout
from appliance.lines.recording import Recording
from appliance.lines.source import WavSource
from appliance.lines.transcript import Transcript
from appliance.lines.wav import WavError, WavReader

LEAD_NS = 20 * NS_PER_MS
"""How long before a tick its frame is handed in: far beyond what a sleeping process is late by
(some ms on a busy machine), far below the period, since the caller waits for it."""

POLL_NS = 2 * NS_PER_MS
"""How often a live call looks for frames of the model: the most by which arrivals are late. The
tick thread signals nobody, because that would be a system call per session and tick."""

ANSWER_NS = 10 * NS_PER_S
"""How long the box may take to answer a Join."""

PRIMED_NS = 600 * NS_PER_S
"""And if it has to feed a persona first: no less than a box's longest [persona] within_s."""

SETTLE_NS = 10 * NS_PER_S
"""How long the box may take to say Gone once the call has nothing more to say."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What one caller is going to do."""

    wav: Path
    stem: str
    """What the call's files are called, without an ending."""
    start_ns: int
    """When to ask for admission."""
    hang_up_after_ns: int | None = None
    """Speak no longer than this; the frame it falls into is the last."""
    abrupt: bool = False
    """Hang up without a last frame, as if the handset were thrown."""
    settings: dict[str, float] = field(default_factory=dict)
    persona: str = ""
    """Who the model is to be, in words."""
    voice: str = ""
    """One of the bundle's voices, by name."""
    journal: bool = False
    """Keep what is needed to replay the call; it holds what was said."""


class State(enum.Enum):
    """Where a call is in its life; see the picture above."""

    WAITING = "waiting"
    JOINING = "joining"
    TALKING = "talking"
    LISTENING = "listening"
    LEAVING = "leaving"
    OVER = "over"


class Call:
    """One caller. `advance` does whatever is due; everything takes the time as an argument."""

    def __init__(
        self,
        number: int,
        plan: CallPlan,
        reader: WavReader,
        out: Path,
        welcome: control.Welcome,
        pieces: list[str],
    ) -> None:
        """number: of the call within its line; the `request` of its Join. Raises `WavError`."""
        self.number = number
        self.plan = plan
        self.state = State.WAITING
        self.trouble = ""
        """Why the call did not go as it should; empty if it did."""
        self._grid = TickGrid(welcome.t0_ns, welcome.period_ns)
        self._out = out
        self._model = welcome.model
        self._reader = reader
        self._rate_hz = welcome.sample_rate_hz
        self._samples = welcome.samples_per_frame
        self._source = WavSource(reader, self._rate_hz, self._samples)
        self._transcript = Transcript(pieces, welcome.silent_ids)
        self._recording: Recording | None = None
        self._journal: JournalWriter | None = None
        self._channel: Channel | None = None
        self._playout: Playout[tuple[DownlinkHeader, NDArray[np.float32]]] | None = None
        self._receipts: deque[Receipt] = deque()
        self._until_ns = 0
        self._answer_ns = ANSWER_NS
        self._first_ns = 0
        self._sent = 0
        self._last: tuple[UplinkHeader, NDArray[np.float32]] | None = None
        """The last frame, as long as the box has had no room for it."""
        self._cut_short = False
        self._hanging_up = False
        self._withdrawn = False
        self._overflows = 0
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._flags = {CONCEALED: 0, WARMING: 0}
        self._in_hand_ns: list[int] = []
        self._ended = "never began"
        self._missing = ""
        """What was wrong when the box's channel was not there."""

    @property
    def session(self) -> int:
        """The box's number of this call; 0 before it was admitted."""
        return 0 if self._playout is None else self._playout.session

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
        if self.state is State.TALKING:
            wake_ns = min(wake_ns, self._due_ns(self._sent))
        if self._playout is not None and (due_ns := self._playout.next_due_ns) is not None:
            wake_ns = min(wake_ns, due_ns)
        return wake_ns

    def advance(self, now_ns: int) -> list[control.ToBox]:
        """Do what is due by ``now_ns``; return what is to be said to the box."""
        if self.state is State.OVER:
            return []
        if self.state is State.WAITING:
            if self._hanging_up:
                self.end(now_ns, "hung up before calling")
            if self._hanging_up or now_ns < self.plan.start_ns:
                return []
            self.state = State.JOINING
            self._answer_ns = PRIMED_NS if self.plan.persona or self.plan.voice else ANSWER_NS
            self._until_ns = now_ns + self._answer_ns
            caller = _words(self.plan.wav.name)[: control.LONGEST_CALLER]
            return [
                control.Join(
                    self.number,
                    "file",
                    caller,
                    self.plan.settings,
                    self.plan.voice,
                    self.plan.persona,
                )
            ]
        if self.state is State.JOINING:
            if self._hanging_up and not self._withdrawn:
                self._withdrawn = True
                return [control.Withdraw(self.number)]
            if now_ns >= self._until_ns:
                self.end(now_ns, f"the box did not answer for {self._answer_ns // NS_PER_S} s")
            return []
        try:
            messages = self._talk(now_ns)
            if self._channel is not None:
                self._listen(now_ns)
            if self.state is State.TALKING:
                self._source.prepare()
        except WavError as err:
            messages = self._leave(now_ns, str(err))
        if self.state in (State.LISTENING, State.LEAVING) and now_ns >= self._until_ns:
            late = f"the box did not end it within {SETTLE_NS // NS_PER_S} s"
            self.end(now_ns, self._missing or late)
        return messages

    def hang_up(self) -> None:
        """End politely: the next frame is the last one. Takes effect in `advance`."""
        self._hanging_up = True

    # --- what the box said

    def admitted(
        self, message: control.Admitted, now_ns: int, t0_ns: int | None = None
    ) -> list[control.ToBox]:
        """Attach to the session's channel and choose the grid of this call's frames.

        t0_ns: origin of the grid of the box that said yes, if there are several.
        """
        if self.state is not State.JOINING:
            return [control.Leave(message.session, "admitted too late")]
        if t0_ns is not None:
            self._grid = TickGrid(t0_ns, self._grid.period_ns)
        self._playout = Playout(
            message.session, message.generation, self._grid.period_ns, self._grid.period_ns
        )
        try:
            channel = Channel.attach(message.channel)
            self._channel = channel
            if channel.samples != self._samples:
                raise ChannelError(
                    f"{message.channel} carries frames of {channel.samples} samples; "
                    f"the bundle's have {self._samples}"
                )
            self._recording = Recording(self._out, self.plan.stem, self._rate_hz)
            if self.plan.journal:
                self._journal = self._open_journal(message)
        except ChannelGone as err:  # whose word is on its way knows why
            self._missing = str(err)
            self.state = State.LEAVING
            self._until_ns = now_ns + SETTLE_NS
            return [control.Leave(message.session, "the channel is gone")]
        except (ChannelError, WavError, JournalError) as err:
            self.end(now_ns, str(err))
            return [control.Leave(message.session, "the line failed")]
        tick = self._grid.tick_at(now_ns + LEAD_NS) + 1
        self._first_ns = self._grid.start_ns(tick) - LEAD_NS
        self.state = State.TALKING
        return []

    def refused(self, message: control.Refused, now_ns: int) -> None:
        if self._withdrawn:
            self.end(now_ns, "hung up before it was answered")
        self.end(now_ns, message.words)

    def was_reset(self, message: control.WasReset) -> None:
        """The model has begun anew; the call goes on."""
        if self._journal is not None:
            self._journal.restarted(message.frame_index, message.prompt)

    def gone(self, message: control.Gone, now_ns: int) -> None:
        """The box has ended the session, because we wanted it to or not."""
        if self.is_over:
            return
        self._ended = message.why
        wanted = {State.LISTENING: "finished", State.LEAVING: "left"}.get(self.state)
        # "left" is our own wish; of a missing channel the box then knows nothing.
        ended_it = message.detail or f"the box ended it: {message.why}"
        self.end(now_ns, self._missing if message.why == wanted else ended_it)

    def end(self, now_ns: int, trouble: str = "") -> None:
        """Settle what is in hand, close everything, write down what there is to write."""
        if self.is_over:
            return
        self.trouble = self.trouble or trouble
        if self._channel is not None and self._recording is not None:
            try:
                self._listen(now_ns)
            except WavError as err:
                self.trouble = self.trouble or str(err)
            self._drop_rest(now_ns)
        self.state = State.OVER
        if self._recording is not None:
            whole = self._playout is not None and self._playout.final_index is not None
            padding = self._source.padding_samples if whole and not self._cut_short else 0
            try:
                self._recording.close(padding)
                self._write_texts()
            except WavError as err:
                self.trouble = self.trouble or str(err)
        if self._journal is not None:
            self._journal.close()
            self.trouble = self.trouble or self._journal.trouble
        if self._channel is not None:
            self._channel.close()
        self._reader.close()

    def report(self) -> CallReport:
        """How it went so far."""
        recording, playout = self._recording, self._playout
        heard = (Outcome.DELIVERED, Outcome.LATE, Outcome.FILLED)
        round_trip_ns = None
        if playout is not None and playout.first_ns is not None:
            round_trip_ns = playout.first_ns - (self._first_ns - self._grid.period_ns)
        return CallReport(
            wav=_words(str(self.plan.wav)),
            session=self.session,
            generation=0 if playout is None else playout.generation,
            ended=self.trouble or self._ended,
            settings=self.plan.settings,
            rate_in_hz=self._reader.rate_hz,
            samples_in=self._source.samples_in,
            bad_samples_in=self._reader.bad_samples,
            frames_sent=self._sent,
            uplink_overflows=self._overflows,
            frames_heard=sum(self._outcomes[outcome] for outcome in heard),
            delivered=self._outcomes[Outcome.DELIVERED],
            late=self._outcomes[Outcome.LATE],
            filled=self._outcomes[Outcome.FILLED],
            discarded=self._outcomes[Outcome.DISCARDED],
            concealed=self._flags[CONCEALED],
            warming=self._flags[WARMING],
            strays=0 if playout is None else playout.strays,
            receipts_unsent=len(self._receipts),
            reply_samples=0 if recording is None else recording.reply_samples,
            clipped_samples=0 if recording is None else recording.clipped_samples,
            unknown_tokens=self._transcript.unknown_ids,
            round_trip_ms=None if round_trip_ns is None else round_trip_ns / NS_PER_MS,
            captured_to_in_hand_ms=span_ms(self._in_hand_ns),
        )

    # --- the two directions

    def _open_journal(self, message: control.Admitted) -> JournalWriter:
        head = Head(
            session=message.session,
            generation=message.generation,
            t0_ns=self._grid.t0_ns,
            model=self._model,
            samples=self._samples,
            rate_hz=self._rate_hz,
            settings=self.plan.settings,
            prompt=message.prompt,
        )
        return JournalWriter(self._out / f"{self.plan.stem}{SUFFIX}", head)

    def _due_ns(self, frame_index: int) -> int:
        return self._first_ns + frame_index * self._grid.period_ns

    def _talk(self, now_ns: int) -> list[control.ToBox]:
        """Hand in every frame that is due."""
        while self.state is State.TALKING and self._due_ns(self._sent) <= now_ns:
            if self._is_time_up() and self.plan.abrupt and not self._hanging_up:
                return self._leave(now_ns, "")
            self._put(now_ns)
        # Offer the last frame until it is taken: without it the session would never end.
        if self._last is not None and self._channel is not None:
            accepted = self._channel.uplink.put(*self._last)
            if accepted and self._journal is not None:
                self._journal.said(*self._last)
            self._last = None if accepted else self._last
        return []

    def _is_time_up(self) -> bool:
        """The frame that is due now is the last one the plan allows for, or beyond it."""
        limit_ns = self.plan.hang_up_after_ns
        return limit_ns is not None and (self._sent + 1) * self._grid.period_ns >= limit_ns

    def _put(self, now_ns: int) -> None:
        assert self._channel is not None
        assert self._recording is not None
        due_ns = self._due_ns(self._sent)
        ends = self._hanging_up or self._is_time_up()
        frame = self._source.next()
        is_last = ends or frame.is_last
        header = UplinkHeader(self._sent, LAST if is_last else 0, due_ns)
        accepted = self._channel.uplink.put(header, frame.pcm)
        self._sent += 1
        # The clock is served; the disk may take its time.
        if accepted and self._journal is not None:
            self._journal.said(header, frame.pcm)
        self._recording.said(frame.pcm, due_ns - self._grid.period_ns)
        if is_last:
            self.trouble = self._source.trouble
            self._cut_short = not frame.is_last
            self.state = State.LISTENING
            self._until_ns = now_ns + SETTLE_NS
            self._last = None if accepted else (header, frame.pcm)
        elif not accepted:
            self._overflows += 1

    def _listen(self, now_ns: int) -> None:
        """Take what the model made, play what is due, and say what became of it."""
        channel, playout, recording = self._channel, self._playout, self._recording
        assert channel is not None
        assert playout is not None
        assert recording is not None
        pcm = np.empty(self._samples, np.float32)
        while (header := channel.downlink.get(pcm)) is not None:
            if self._journal is not None and header.session == playout.session:
                self._journal.heard(header, pcm)
            receipt = playout.arrive(header, (header, pcm), now_ns)
            if receipt is not None:
                self._owe(receipt)
            if header.session == playout.session and 0 <= header.heard < self._sent:
                self._in_hand_ns.append(now_ns - self._due_ns(header.heard))
            pcm = np.empty(self._samples, np.float32)  # the one before is held until it is played
        played, receipts = playout.due(now_ns)
        for receipt in receipts:
            self._owe(receipt)
        for frame in played:
            if frame.frame is None:
                recording.heard(np.zeros(self._samples, np.float32), frame.playout_ns)
                continue
            header, pcm = frame.frame
            recording.heard(pcm, frame.playout_ns)
            self._transcript.hear(frame.frame_index, header.text)
            for flag in self._flags:
                self._flags[flag] += bool(header.flags & flag)
        self._settle()

    def _owe(self, receipt: Receipt) -> None:
        self._outcomes[Outcome(receipt.outcome)] += 1
        self._receipts.append(receipt)

    def _settle(self) -> None:
        """Hand in the receipts the ring has room for; the rest waits, none is dropped."""
        assert self._channel is not None
        while self._receipts and self._channel.receipts.put(self._receipts[0]):
            self._receipts.popleft()

    def _leave(self, now_ns: int, trouble: str) -> list[control.ToBox]:
        """Hang up without a last frame."""
        assert self._playout is not None
        self.trouble = self.trouble or trouble
        self._cut_short = True
        self._last = None
        self.state = State.LEAVING
        self._until_ns = now_ns + SETTLE_NS
        self._drop_rest(now_ns)
        why = (trouble or "hung up")[: control.LONGEST_WHY]
        return [control.Leave(self._playout.session, why)]

    def _drop_rest(self, now_ns: int) -> None:
        """Nothing more will be heard: receipts for what is in hand."""
        assert self._playout is not None
        for receipt in self._playout.hang_up(now_ns):
            self._owe(receipt)
        self._settle()

    def _write_texts(self) -> None:
        lines = self._transcript.lines(self._grid.period_ns)
        text = "".join(f"{line}\n" for line in lines)
        report = msgspec.json.format(msgspec.json.encode(self.report()), indent=2)
        for ending, content in ((".txt", text.encode()), (".json", report + b"\n")):
            path = self._out / f"{self.plan.stem}{ending}"
            try:
                path.write_bytes(content)
            except OSError as err:
                raise WavError(f"{path} cannot be written: {err.strerror}") from None


def _words(name: str) -> str:
    """A file's name as text: its bytes need not be UTF-8, and what is sent and written must."""
    return os.fsencode(name).decode("utf-8", "replace")
