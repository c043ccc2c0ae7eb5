"""How two clocks are kept together: a sound card's and the box's. Pure.

A buffer between the two fills when the one that writes is faster. `Drift` is told once per frame
how much too much is held and answers by how many ppm more samples are to be made of the same
audio: a proportional part, which brings a buffer back after a stall, and an integral part, which
becomes the difference of the clocks, so that the buffer stays where it should and not beside it.

What is measured jitters by some ms (callbacks come in blocks, the line looks every few ms), and
whatever reaches the ratio is heard as a wobble at the rate of frames. So it is smoothed first, and
the loop is slow: critically damped, with a time constant of 40 s. A card that is 200 ppm off
moves the buffer by 3 ms before the integral has caught up; cards have been seen 450 ppm off.

    d(held)/dt = clocks' difference - ppm      ppm = P · error + I · ∫ error dt      I = P² / 4
"""

from appliance.clock import NS_PER_MS, NS_PER_S

PPM_PER_MS = 50.0
"""Proportional part: 0.05 ms/s per ms, so an error that no drift keeps alive halves in 14 s."""

PPM_PER_MS_S = PPM_PER_MS**2 / 4 / 1000
"""Integral part, per second: the largest that does not overshoot."""

SMOOTH_S = 2.0
"""Time constant of the smoothing: 25 frames of 80 ms."""

INTEGRATED_MS = 10.0
"""An error beyond this is a stall, not a clock: it is worked off, and the integral waits."""

MOST_DRIFT_PPM = 1_000.0
"""What two clocks may differ by: twice what has been seen."""

MOST_PPM = 5_000.0
"""A twelfth of a semitone, for the seconds after a stall."""


class Drift:
    """One direction's controller."""

    def __init__(self, period_ns: int) -> None:
        """period_ns: between two calls of `steer`."""
        self._period_s = period_ns / NS_PER_S
        self._smooth = min(1.0, self._period_s / SMOOTH_S)
        self._error_ms = 0.0
        self.drift_ppm = 0.0
        """The integral: by how much more has to be made in the long run."""
        self.ppm = 0.0
        """How many more samples are to be made of the same audio; negative: fewer."""

    def steer(self, surplus_ns: int) -> float:
        """What is held beyond what should be; returns `ppm`, a whole number."""
        self._error_ms += self._smooth * (surplus_ns / NS_PER_MS - self._error_ms)
        if abs(self._error_ms) < INTEGRATED_MS:
            step = PPM_PER_MS_S * self._error_ms * self._period_s
            self.drift_ppm = _within(self.drift_ppm - step, MOST_DRIFT_PPM)
        wanted = self.drift_ppm - PPM_PER_MS * self._error_ms
        self.ppm = float(round(_within(wanted, MOST_PPM)))
        return self.ppm

    def forget_error(self) -> None:
        """The buffer was set by hand: what was measured before says nothing. The drift stays."""
        self._error_ms = 0.0


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))
