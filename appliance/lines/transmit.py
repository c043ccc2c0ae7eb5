"""How much of the model's audio waits in a telephone call's sender. Pure.

The sender (a SIP stack's own thread) takes 20 ms at a time and sends silence when there is
nothing. What waits when a frame is handed over is the *lead*: what this process may be late by
without anybody hearing it, and delay for the whole call. So it starts at `lead_ns`, grows by
itself when a frame came late (the gap has been heard, and what follows is later by it), and is
worked off by stretching once it is more than is wanted. Before it is gone it is stretched the other
way: the more calls are on, the later the last of them is handed its frames, and nobody should hear
that more have come. When frames have begun to come later for
good (ticks take longer) nothing grows by itself, and
every frame would find the sender dry: so the second time within a second the lead is laid again. It
never exceeds `MOST_NS`: then the frame is shortened. Nothing is ever flushed because the caller
speaks: the model decides when to stop.
"""

from collections import deque
from dataclasses import dataclass

from appliance.clock import NS_PER_MS

MOST_NS = 100 * NS_PER_MS
"""What may wait when a frame is handed over."""

SLACK_NS = 12 * NS_PER_MS
"""What may wait beyond the lead before it is worked off: half of a packet, which is taken out as a
whole, and the sender's own jitter."""

CALM_FRAMES = 36
"""Frames (three seconds) for all of which it must have been so."""

LOOKED_AT = 12
"""A second: a sender that runs dry twice within it will do so at every frame."""

WORK_OFF_PPM, GROW_PPM = -10_000.0, 10_000.0
"""A hundredth shorter or longer: 0.8 ms a frame."""

LOW_NS = 21 * NS_PER_MS
"""With less than that waiting a frame is made longer: the sender takes 20 ms at once, and of less
than that nothing is left when the next frame comes one take later."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What to do with the frame that is handed over now."""

    pad_ns: int = 0
    """Silence to send before it."""
    drop_ns: int = 0
    """Of its end, not to be sent."""
    ppm: float = 0.0
    """How much longer to make it."""
    is_late: bool = False
    """The sender had run dry: the caller has heard a gap."""


class Lead:
    """What waits in one call's sender."""

    def __init__(self, lead_ns: int) -> None:
        self.lead_ns = min(lead_ns, MOST_NS)
        self.underruns = 0
        self.dropped_ns = 0
        self._flowing = False
        self._queued: deque[int] = deque(maxlen=CALM_FRAMES)
        self._since_dry = LOOKED_AT
        """Frames since the sender had last run dry."""

    def restart(self) -> None:
        """Nothing has been handed over for a while on purpose: begin anew."""
        self._flowing = False
        self._queued.clear()
        self._since_dry = LOOKED_AT

    def hand_over(self, queued_ns: int) -> Handover:
        """A frame is about to be queued. queued_ns: what still waits."""
        if not self._flowing:
            self._flowing = True
            return Handover(pad_ns=max(0, self.lead_ns - queued_ns))
        if queued_ns > MOST_NS:
            drop_ns = queued_ns - MOST_NS
            self.dropped_ns += drop_ns
            self._queued.clear()
            return Handover(drop_ns=drop_ns)
        is_late = queued_ns <= 0
        self.underruns += is_late
        again = is_late and self._since_dry < LOOKED_AT
        self._since_dry = 0 if is_late else self._since_dry + 1
        if again:
            self._since_dry = LOOKED_AT
            self._queued.clear()
            return Handover(pad_ns=self.lead_ns, is_late=True)
        self._queued.append(queued_ns)
        too_much = len(self._queued) == CALM_FRAMES and min(self._queued) > self.lead_ns + SLACK_NS
        is_low = 0 < queued_ns < LOW_NS
        ppm = WORK_OFF_PPM if too_much else GROW_PPM if is_low else 0.0
        return Handover(ppm=ppm, is_late=is_late)
