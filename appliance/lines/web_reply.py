"""The way out of one websocket call: the model's frames from the ring to messages for the client.

Decides nothing about lateness (`playout`) or when frames leave (`web_pace`); it ties the two to
the ring and the codec. It reads the channel's downlink and writes its receipts, and touches
nothing else. Does not know the box, the client's own audio, or how a call ends (`web_call`).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.channel import Channel
from appliance.clock import NS_PER_MS, TickGrid
from appliance.frame_ring import CONCEALED, DownlinkHeader, Outcome, Receipt
from appliance.lines import wire
from appliance.lines.opus import RATE_HZ
from appliance.lines.playout import Played, Playout
from appliance.lines.resample import Quality, Resampler
from appliance.lines.transcript import PieceText
from appliance.lines.web_figures import Pulse, Took
from appliance.lines.web_pace import Phase, TickTimes
from appliance.lines.web_voice import Voice

POLL_NS = 2 * NS_PER_MS
"""How often a live call looks for frames of the model."""


@dataclass(frozen=True, slots=True)
class Meant:
    """What is remembered of a frame that was handed in."""

    tick: int
    """The tick it was meant for."""
    arrived_ns: int
    """When its last sample came."""


@dataclass(slots=True)
class _Reply:
    """One frame of the model in hand."""

    header: DownlinkHeader
    pcm: NDArray[np.float32]
    message: bytes | None = None
    """Encoded, if that has been done."""


class Replies:
    """What one session's model says, until it has been sent."""

    def __init__(
        self,
        channel: Channel,
        stamp: tuple[int, int],
        grid: TickGrid,
        rate_hz: int,
        voice: Voice,
        text: PieceText,
        times: TickTimes,
        pulse: Pulse | None,
    ) -> None:
        """stamp: session and generation. pulse: None for clients that are not told."""
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.took = Took()
        self._channel = channel
        self._grid = grid
        self._samples = channel.samples
        self._voice = voice
        self._text = text
        self._times = times
        self._pulse = pulse
        self._to_client = Resampler(rate_hz, RATE_HZ, Quality.LIVE)
        self._playout: Playout[_Reply] = Playout(*stamp, grid.period_ns, grid.period_ns)
        # A page of ours steers a buffer of its own by when frames come, so they go as they are
        # made; what both held back would add up. The published ones would stutter.
        self._at_once = pulse is not None
        expected_ns = grid.period_ns if self._at_once else times.expected_ns
        self._phase = Phase(grid.period_ns, expected_ns, follows=False)
        self._first_tick = 0
        self._receipts: deque[Receipt] = deque()
        self._encoded = 0
        """The frame_index whose turn it is to be encoded."""
        self._replies: dict[int, _Reply] = {}

    @property
    def next_due_ns(self) -> int | None:
        """When `send` will have something."""
        return self._playout.next_due_ns

    @property
    def phase_ms(self) -> float:
        """How long after a tick's start its frame leaves."""
        return self._phase.phase_ns / NS_PER_MS

    def collect(self, now_ns: int) -> list[DownlinkHeader]:
        """Take what the model made; what of it is this session's."""
        playout, mine = self._playout, []
        pcm = np.empty(self._samples, np.float32)
        while (header := self._channel.downlink.get(pcm)) is not None:
            ours = header.session == playout.session
            if playout.first_ns is None and ours:
                # On the box's grid, wherever the first frame happened to arrive.
                leaves_ns = self._grid.start_ns(header.tick) + self._phase.phase_ns
                playout.buffer_ns = max(0, leaves_ns - now_ns)
                self._first_tick = header.tick - header.frame_index
            reply = _Reply(header, pcm)
            receipt = playout.arrive(header, reply, now_ns)
            if receipt is not None:
                self._owe(receipt)
            else:
                self._replies[header.frame_index] = reply
            if ours:
                made_ns = header.made_ns - self._grid.start_ns(header.tick)
                self.took.tick_to_made.append(made_ns)
                self._times.saw(made_ns)
                mine.append(header)
            pcm = np.empty(self._samples, np.float32)  # the one before is held until it is played
        return mine

    def send(self, now_ns: int, handed_in: Mapping[int, Meant]) -> list[bytes]:
        """Messages whose time has come. Call `collect` with the same time first."""
        self._wait_for_next(now_ns)
        played, receipts = self._playout.due(now_ns, at_once=self._at_once)
        for receipt in receipts:
            self._owe(receipt)
        return [m for frame in played for m in self._messages(frame, now_ns, handed_in)]

    def encode_next(self) -> None:
        """Off the clock: the next frame of the stream, if it is in hand."""
        reply = self._replies.get(self._encoded)
        if reply is not None:
            reply.message = self._encode(reply.pcm)
            self._encoded += 1

    def hang_up(self, now_ns: int) -> None:
        """The client hears nothing more; frames that still come are receipted as they do."""
        for receipt in self._playout.hang_up(now_ns):
            self._owe(receipt)
        self._replies.clear()

    def settle(self) -> None:
        """Hand in the receipts the ring has room for; the rest waits, none is dropped."""
        while self._receipts and self._channel.receipts.put(self._receipts[0]):
            self._receipts.popleft()

    def _wait_for_next(self, now_ns: int) -> None:
        """The frame that is due is not in hand, or came after its time: all leave later."""
        playout = self._playout
        due_ns = playout.next_due_ns
        if due_ns is None or due_ns > now_ns:
            return
        came_ns = playout.next_arrived_ns
        late_ns = (now_ns + POLL_NS if came_ns is None else came_ns) - due_ns
        if late_ns <= 0:
            return
        if (shift_ns := self._phase.miss(late_ns)) > 0:
            playout.postpone(shift_ns)

    def _messages(
        self, frame: Played[_Reply], now_ns: int, handed_in: Mapping[int, Meant]
    ) -> list[bytes]:
        """One frame, or silence in its place; then what is said in it."""
        self._replies.pop(frame.frame_index, None)
        reply = frame.frame
        if reply is None or reply.message is None:
            pcm = np.zeros(self._samples, np.float32) if reply is None else reply.pcm
            message = self._encode(pcm)
            self._encoded = frame.frame_index + 1
        else:
            message = reply.message
        messages = [wire.audio(message)] if message else []
        if reply is None:
            if self._pulse is not None:
                self._pulse.missed()
            return messages
        header, meant = reply.header, handed_in.get(reply.header.heard)
        self.took.made_to_sent.append(now_ns - header.made_ns)
        if meant is not None:
            self.took.arrived_to_sent.append(now_ns - meant.arrived_ns)
        if words := self._text.hear(header.text):
            messages.append(wire.text(words))
        if self._pulse is not None:
            self._pulse.frame(
                margin_ns=header.deadline_ns - header.made_ns,
                way_ns=now_ns - meant.arrived_ns if meant is not None else None,
                lag=header.tick - meant.tick if meant is not None else 0,
                concealed=bool(header.flags & CONCEALED),
            )
        return messages

    def _encode(self, pcm: NDArray[np.float32]) -> bytes:
        """A frame of the model's rate, as the client takes it. Frames must come in their order."""
        if not np.isfinite(pcm).all():
            pcm = np.nan_to_num(pcm, nan=0.0, posinf=1.0, neginf=-1.0)
        return self._voice.encode(self._to_client.push(pcm))

    def _owe(self, receipt: Receipt) -> None:
        self.outcomes[Outcome(receipt.outcome)] += 1
        self._receipts.append(receipt)
