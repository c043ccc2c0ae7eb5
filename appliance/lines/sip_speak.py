"""What a telephone caller hears of the model: which frame when, and its receipt.

Decides when a frame is handed to the stack, and what its receipt says: as soon as it is there, for
the sender takes 20 ms at a time from what waits, however unevenly that came. `transmit` says how
much may wait in it; `playout` keeps the timeline, and `web_pace` its phase, by which a frame that
has not come is given up. A frame that was made in time but handed over after the sender had run
dry is receipted as late: the caller has heard a gap before it. While the caller has us on hold,
frames are discarded: nobody hears them.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import DownlinkHeader, Outcome, Receipt
from appliance.lines.playout import Played, Playout
from appliance.lines.sip_figures import Took
from appliance.lines.sip_hear import HandIn
from appliance.lines.sip_recorder import Tape
from appliance.lines.sip_stack import Media
from appliance.lines.speex import Stretches, stretcher
from appliance.lines.transmit import Lead
from appliance.lines.web_pace import Phase, TickTimes


@dataclass(frozen=True, slots=True)
class _Reply:
    """One frame of the model in hand."""

    header: DownlinkHeader
    pcm: NDArray[np.float32]


class Speaking:
    """One call's way out. Everything takes the time as an argument."""

    def __init__(
        self,
        session: int,
        generation: int,
        grid: TickGrid,
        rate_hz: int,
        channel: Channel,
        media: Media,
        lead_ns: int,
        times: TickTimes,
        took: Took,
        hand_in: HandIn,
        tape: Tape | None = None,
    ) -> None:
        """times: what ticks took, shared by all calls of a box. took: to be added to.

        hand_in: shared, too: whether there is time to stretch. tape: hears what the caller hears.
        """
        self.phase: Phase | None = None
        self.lead = Lead(lead_ns)
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.lost_samples = 0
        """That the stack had no room for, at the rate of the call's audio."""
        self.is_held = False
        self._grid = grid
        self._rate_hz = rate_hz
        self._channel = channel
        self._media = media
        self._times = times
        self._took = took
        self._hand_in = hand_in
        self._tape = tape
        self._playout: Playout[_Reply] = Playout(
            session, generation, grid.period_ns, grid.period_ns
        )
        self._receipts: deque[Receipt] = deque()
        self._out: tuple[int, Stretches] | None = None
        """Rate of the call's audio, and what brings the model's to it."""
        self._dry_ns = 0
        """When the sender will have sent all that it was handed."""

    def has_work(self, now_ns: int) -> bool:
        """A frame is in hand, or should be."""
        due_ns = self._playout.next_due_ns
        return due_ns is not None and (
            due_ns <= now_ns or self._playout.next_arrived_ns is not None
        )

    def collect(self, now_ns: int) -> list[DownlinkHeader]:
        """Take what the model made; the headers of this session's frames."""
        ring, playout = self._channel.downlink, self._playout
        taken: list[DownlinkHeader] = []
        while ring.waiting:
            pcm = np.empty(self._channel.samples, np.float32)
            header = ring.get(pcm)
            if header is None:
                break
            if header.session == playout.session:
                taken.append(header)
                start_ns = self._grid.start_ns(header.tick)
                self._times.saw(header.made_ns - start_ns)
                self._took.tick_to_made.append(header.made_ns - start_ns)
                if playout.first_ns is None:
                    # On the box's grid, wherever the first frame happened to arrive.
                    # A sender follows: what is handed over earlier waits in it, and is worked off.
                    expected_ns = self._times.expected_ns
                    self.phase = Phase(self._grid.period_ns, expected_ns, follows=True)
                    playout.buffer_ns = start_ns + self.phase.phase_ns - now_ns
            receipt = playout.arrive(header, _Reply(header, pcm), now_ns)
            if receipt is not None:
                self._owe(receipt)
        return taken

    def send(self, now_ns: int) -> list[tuple[DownlinkHeader, int]]:
        """Hand over what is in hand; the headers of the model's frames, and how much waited before.

        In place of a frame that is not, once it is due: silence.
        """
        playout, sent = self._playout, []
        while self.has_work(now_ns):
            due_ns, arrived_ns = playout.next_due_ns, playout.next_arrived_ns
            assert due_ns is not None
            if self.phase is not None and (arrived_ns is None or arrived_ns > due_ns):
                # Not in hand in time: the sender still has something, so wait for what it takes.
                late_ns = (now_ns if arrived_ns is None else arrived_ns) - due_ns
                shift_ns = self.phase.miss(late_ns + NS_PER_MS)
                if shift_ns > 0:
                    playout.postpone(shift_ns)
                    continue
            played, receipts = playout.due(min(due_ns, now_ns), at_once=True)
            heard = [self._hand_over(frame, now_ns) for frame in played]
            for frame, (_, waited_ns) in zip(played, heard, strict=True):
                if frame.frame is not None and waited_ns >= 0:
                    sent.append((frame.frame.header, waited_ns))
            if self.phase is not None and arrived_ns is not None and arrived_ns <= due_ns:
                playout.postpone(-self.phase.sent(due_ns - arrived_ns))
            for receipt in receipts:
                if receipt.outcome != Outcome.DISCARDED:
                    outcome, _ = heard.pop(0)
                    if receipt.outcome != outcome:
                        receipt = receipt._replace(outcome=outcome)
                self._owe(receipt)
        return sent

    def hang_up(self, now_ns: int) -> None:
        """Nothing more is heard."""
        for receipt in self._playout.hang_up(now_ns):
            self._owe(receipt)

    def settle(self) -> None:
        """Hand in the receipts the ring has room for; the rest waits, none is dropped."""
        while self._receipts and self._channel.receipts.put(self._receipts[0]):
            self._receipts.popleft()

    def _hand_over(self, frame: Played[_Reply], now_ns: int) -> tuple[Outcome, int]:
        """One frame, or silence in its place: what became of it, what waited (-1: not sent)."""
        reply = frame.frame
        form = self._media.format()
        if form is None or self.is_held:
            self.lead.restart()
            return (frame.outcome if reply is None else Outcome.DISCARDED), -1
        rate_hz = form.out_hz
        if self._out is None or self._out[0] != rate_hz:
            self._out = (rate_hz, stretcher(self._rate_hz, rate_hz))
        queued_ns = form.queued_samples * NS_PER_S // rate_hz
        if reply is None:
            # What the sender has sent of silence since it ran dry is a part of the frame's time.
            silent_ns = max(0, self._grid.period_ns - max(0, now_ns - self._dry_ns))
            self._dry_ns += self._grid.period_ns
            zeros = np.zeros(silent_ns * self._rate_hz // NS_PER_S, np.float32)
            silence = _sixteen_bits(self._out[1].push(zeros, 0.0))
            self.lost_samples += silence.size - self._media.write(silence)
            return frame.outcome, -1
        plan = self.lead.hand_over(queued_ns)
        ppm = plan.ppm if self._hand_in.may_stretch else 0.0
        audio = self._out[1].push(_finite(reply.pcm), ppm)
        if plan.drop_ns:
            audio = audio[: max(0, audio.size - plan.drop_ns * rate_hz // NS_PER_S)]
        whole = _sixteen_bits(audio)
        if plan.pad_ns:
            pad = np.zeros(plan.pad_ns * rate_hz // NS_PER_S, np.int16)
            whole = np.concatenate([pad, whole])
        self.lost_samples += whole.size - self._media.write(whole)
        self._dry_ns = now_ns + queued_ns + whole.size * NS_PER_S // rate_hz
        self._took.made_to_queued.append(now_ns - reply.header.made_ns)
        waited_ns = queued_ns + plan.pad_ns
        if self._tape is not None:
            self._tape.heard(reply.pcm, now_ns + waited_ns)
        self._took.queued.append(waited_ns)
        return (Outcome.LATE if plan.is_late else frame.outcome), waited_ns

    def _owe(self, receipt: Receipt) -> None:
        self.outcomes[Outcome(receipt.outcome)] += 1
        self._receipts.append(receipt)


def _finite(pcm: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is no number becomes silence; a model can go wrong."""
    if math.isfinite(np.vdot(pcm, pcm)):  # which warns of nothing, unlike @
        return pcm
    return np.nan_to_num(pcm, nan=0.0, posinf=1.0, neginf=-1.0)


def _sixteen_bits(audio: NDArray[np.float32]) -> NDArray[np.int16]:
    scaled = audio * np.float32(32_767)
    np.rint(scaled, out=scaled)
    np.minimum(scaled, np.float32(32_767), out=scaled)
    np.maximum(scaled, np.float32(-32_768), out=scaled)
    return scaled.astype(np.int16)
