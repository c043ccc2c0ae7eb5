"""What a telephone caller hears before the model hears the caller, such as that calls are recorded.

Decides how much of it waits in the sender: little, as of the model's audio, so that the moment
when it has been heard is known. The session goes live after that, so `LONGEST_S` must be less than
the box's [clock] first_frame_s.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.resample import Quality, Resampler
from appliance.lines.sip_stack import Media
from appliance.lines.wav import WavError, WavReader

LONGEST_S = 8

AHEAD_NS = 100 * NS_PER_MS
"""What of it waits in the sender."""


def read(path: Path) -> tuple[NDArray[np.float32], int]:
    """Of a WAV file: (n,) float32, and its rate. Raises `WavError`."""
    reader = WavReader(path)
    try:
        if reader.samples > LONGEST_S * reader.rate_hz:
            seconds = reader.samples / reader.rate_hz
            raise WavError(
                f"{path} lasts {seconds:.1f} s; an announcement may last {LONGEST_S} s, since the "
                "box waits for a caller's first frame no longer than [clock] first_frame_s"
            )
        return reader.read(reader.samples), reader.rate_hz
    finally:
        reader.close()


class Announcing:
    """One call's announcement."""

    def __init__(self, pcm: NDArray[np.float32], rate_hz: int) -> None:
        """pcm: (n,) float32 at ``rate_hz``."""
        self.is_over = False
        self._pcm, self._rate_hz = pcm, rate_hz
        self._ready: NDArray[np.int16] | None = None
        """What is left of it, at the rate of the call's audio."""
        self._out_hz = 0

    def turn(self, media: Media) -> None:
        """Give the sender what it needs by now. A codec that changes meanwhile begins it again."""
        form = media.format()
        if form is None or self.is_over:
            return
        if self._ready is None or form.out_hz != self._out_hz:
            self._out_hz = form.out_hz
            self._ready = _at_rate(self._pcm, self._rate_hz, form.out_hz)
        room = AHEAD_NS * form.out_hz // NS_PER_S - form.queued_samples
        if self._ready.size and room > 0:
            taken = media.write(self._ready[:room])
            self._ready = self._ready[taken:]
        self.is_over = not self._ready.size and form.queued_samples <= 0


def _at_rate(pcm: NDArray[np.float32], rate_hz: int, out_hz: int) -> NDArray[np.int16]:
    resampler = Resampler(rate_hz, out_hz, Quality.EXACT)
    whole = np.concatenate([resampler.push(pcm), resampler.flush()])
    scaled: NDArray[np.float32] = np.clip(np.rint(whole * 32_767), -32_768, 32_767)
    return scaled.astype(np.int16)
