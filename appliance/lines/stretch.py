"""Samples of a client at the model's rate, a little more or fewer of them than came.

The shell around soxr's variable-rate filter: `jitter` says how much, by ppm, and this does it
without a click, since the filter changes its step and not its state. It holds back 10 ms at equal
rates, which a test measures.
"""

import numpy as np
import soxr
from numpy.typing import NDArray

SLEW_S = 0.02
"""A new ratio is reached evenly within this."""


class Stretcher:
    """One stream of mono float32. Not for sharing between streams."""

    def __init__(self, rate_in_hz: int, rate_out_hz: int) -> None:
        self._in_hz = rate_in_hz
        self._out_hz = rate_out_hz
        self._ppm = 0.0
        self._has_begun = False
        self._stream = soxr.ResampleStream(rate_in_hz, rate_out_hz, 1, "float32", "HQ", vr=True)

    def push(self, pcm: NDArray[np.float32], ppm: float) -> NDArray[np.float32]:
        """The next (n,) float32; returns the (m,) that are ready. ppm: how many more to make."""
        if ppm != self._ppm:
            self._ppm = ppm
            # A slew that is asked for before the first sample is forgotten (soxr 1.1.0).
            slew = round(self._in_hz * SLEW_S) if self._has_begun else 0
            self._stream.set_io_ratio(self._in_hz, self._out_hz * (1 + ppm / 1e6), slew)
        self._has_begun = True
        out: NDArray[np.float32] = self._stream.resample_chunk(np.ascontiguousarray(pcm))
        return out
