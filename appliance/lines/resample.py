"""A streaming resampler between a line's rate and the model's: sample-exact, chunk by chunk.

Decides how much audio comes out of how much went in (in all, exactly `output_samples`) and how
long the filter may hold samples back. Does not know frames, pacing or clock drift.

Output sample k always lies at input time k · rate_in / rate_out: the filter's delay is not in the
audio, it is how far behind its input the output runs. soxr's default holds back by far too much
for a live call and in bursts, so a line that is waited for uses `live`; a file, which can be read
ahead, uses `exact`. Most ever held back, in output samples (ms), fed 10 ms at a time, as
`most_held_samples` measures and a test compares:

                    8->24 k      16->24 k    44.1->24 k   48->24 k    24->8 k     24->48 k
    Quality.LIVE    720 (30)     360 (15)    131 (5.5)    120 (5)     200 (25)    480 (10)
    Quality.EXACT   1752 (73)    878 (37)    920 (38)     920 (38)    584 (73)    1840 (38)

The same samples come out, bit for bit, however the input is cut.
"""

import enum
from fractions import Fraction

import numpy as np
import soxr
from numpy.typing import NDArray

LOWEST_HZ, HIGHEST_HZ = 4_000, 384_000
"""Rates a line may have. Below, no speech is left; above, nothing is known to exist."""


class Quality(enum.Enum):
    """What the resampler is tuned for."""

    LIVE = "live"
    """soxr's variable-rate filter: little is held back; an impulse lands within 3 samples."""
    EXACT = "exact"
    """soxr's HQ filter: linear phase, an impulse lands on its sample; holds back up to 73 ms."""


class RateError(ValueError):
    """A rate no line has; the peer's or the operator's fault."""


def output_samples(input_samples: int, rate_in_hz: int, rate_out_hz: int) -> int:
    """Samples at ``rate_out_hz`` that ``input_samples`` become: rounded, half upwards."""
    return (2 * input_samples * rate_out_hz + rate_in_hz) // (2 * rate_in_hz)


class Resampler:
    """One stream of mono float32 from one rate to another. Not for sharing between streams."""

    def __init__(self, rate_in_hz: int, rate_out_hz: int, quality: Quality = Quality.LIVE) -> None:
        """Raises `RateError` outside 4..384 kHz."""
        for rate in (rate_in_hz, rate_out_hz):
            if not LOWEST_HZ <= rate <= HIGHEST_HZ:
                raise RateError(
                    f"a sample rate of {rate} Hz is outside {LOWEST_HZ}..{HIGHEST_HZ} Hz"
                )
        self.rate_in_hz = rate_in_hz
        self.rate_out_hz = rate_out_hz
        self.samples_in = 0
        self.samples_out = 0
        self._stream: soxr.ResampleStream | None = None
        if rate_in_hz != rate_out_hz:
            self._stream = soxr.ResampleStream(
                rate_in_hz, rate_out_hz, 1, "float32", "HQ", vr=quality is Quality.LIVE
            )

    @property
    def held_samples(self) -> Fraction:
        """Output samples that the input so far amounts to and that have not come out yet."""
        return Fraction(self.samples_in * self.rate_out_hz, self.rate_in_hz) - self.samples_out

    def push(self, pcm: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take the next (n,) float32 of input; return the (m,) float32 that are ready. m may be 0.

        The result is the caller's to keep, but may be ``pcm`` itself when the rates are equal.
        """
        return self._run(pcm, last=False)

    def flush(self) -> NDArray[np.float32]:
        """End the stream: return the rest, so that all of it is exactly `output_samples` long.

        The stream must not be used afterwards.
        """
        rest = self._run(np.zeros(0, np.float32), last=True)
        over = self.samples_out - output_samples(self.samples_in, self.rate_in_hz, self.rate_out_hz)
        # soxr's HQ filter rounds as we do wherever we looked; its variable-rate one ends up to one
        # sample early or late. A missing last sample becomes a zero.
        if over > 0:
            rest = rest[: max(0, rest.shape[0] - over)]
        elif over < 0:
            rest = np.concatenate([rest, np.zeros(-over, np.float32)])
        self.samples_out -= over
        return rest

    def _run(self, pcm: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        self.samples_in += pcm.shape[0]
        ready: NDArray[np.float32] = pcm
        if self._stream is not None:
            ready = self._stream.resample_chunk(np.ascontiguousarray(pcm), last=last)
        self.samples_out += ready.shape[0]
        return ready


def most_held_samples(
    rate_in_hz: int, rate_out_hz: int, quality: Quality, chunk_samples: int
) -> Fraction:
    """Measure the most output samples ever held back when fed ``chunk_samples`` at a time.

    Runs one second of silence through a fresh resampler; the signal does not matter.
    """
    resampler = Resampler(rate_in_hz, rate_out_hz, quality)
    chunk = np.zeros(chunk_samples, np.float32)
    most = Fraction(0)
    while resampler.samples_in < rate_in_hz:
        resampler.push(chunk)
        most = max(most, resampler.held_samples)
    return most
