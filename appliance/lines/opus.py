"""Opus in Ogg, both ways, at the 24 kHz of Moshi's clients.

The library is sphn, because both published servers and the Python client use it: what it writes
is what their clients were made for (a page per 40 ms, serial 42, headers before the first audio),
and it carries its own libopus. PyAV would do, with all of FFmpeg; opuslib needs a libopus of the
system and knows no Ogg. What sphn lacks, `ogg`
does before it: a reader that was given anything but pages stays broken.

Codec delay, measured by a click through both: 6.5 ms, libopus's lookahead.
"""

import numpy as np
import sphn
from numpy.typing import NDArray

RATE_HZ = 24_000
"""client.py and server.py in kyutai-labs/moshi; the web client's decoder is fixed to it, too."""


class OpusIn:
    """One caller's stream. Takes whole pages (`ogg.Page.raw`)."""

    def __init__(self, rate_hz: int = RATE_HZ) -> None:
        """rate_hz: what to decode to; one of Opus's own."""
        self.failures = 0
        """Pages the library refused."""
        self._rate_hz = rate_hz
        self._reader = sphn.OpusStreamReader(rate_hz)

    def decode(self, page: bytes) -> NDArray[np.float32]:
        """(n,) float32; empty when the page could not be decoded."""
        try:
            pcm: NDArray[np.float32] = self._reader.append_bytes(page)
        except ValueError:
            self.failures += 1
            self._reader = sphn.OpusStreamReader(self._rate_hz)
            return np.zeros(0, np.float32)
        return pcm


class OpusOut:
    """One caller's replies as Ogg pages. The first ones returned begin with the headers."""

    def __init__(self) -> None:
        self._writer = sphn.OpusStreamWriter(RATE_HZ)

    def encode(self, pcm: NDArray[np.float32]) -> bytes:
        """pcm: (1920,) float32 at 24 kHz. Returns whole pages: 80 ms at once."""
        pages: bytes = self._writer.append_pcm(np.ascontiguousarray(pcm, np.float32))
        return pages
