"""How one websocket caller's audio is written down: Ogg/Opus as Moshi's clients do, or samples.

Which of them is settled by the websocket's subprotocol, once, at the upgrade:

    none              Moshi's clients: Ogg/Opus, and nothing they do not know
    duplexbox.opus    the same audio; the caller is also told how its call is going
    duplexbox.pcm     16-bit little-endian mono at 24 kHz, any number of samples a message

Decides what of a stranger's bytes may be decoded, and how much audio it claims to be. Does not
know pacing, limits or the call (`web_call`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.lines.ogg import OPUS_RATE_HZ, PageSplitter
from appliance.lines.opus import RATE_HZ, OpusIn, OpusOut

OPUS, PCM = "duplexbox.opus", "duplexbox.pcm"
SUBPROTOCOLS = (OPUS, PCM)
"""In the order of our preference; a client names those it speaks."""

PAGE_SAMPLES = RATE_HZ // 25
"""40 ms: the Ogg page that published servers send."""

FULL_SCALE = 32_767


@dataclass(frozen=True, slots=True)
class Part:
    """Audio of a client that has not been decoded yet."""

    raw: bytes
    samples: int
    """What it claims to hold, at 48 kHz."""


class Voice(Protocol):
    """One caller's audio, both ways. What is encoded is at `RATE_HZ`."""

    rate_hz: int
    """Of what `decode` returns."""

    @property
    def junk_bytes(self) -> int:
        """Bytes that were no audio."""
        ...

    @property
    def dropped(self) -> int:
        """Pages that could not be used."""
        ...

    def unpack(self, data: bytes) -> list[Part]:
        """What a message holds. Raises `ogg.OggError` for audio that no decoder here can take."""
        ...

    def decode(self, part: Part) -> NDArray[np.float32]:
        """(n,) float32; empty when it could not be decoded."""
        ...

    def encode(self, pcm: NDArray[np.float32]) -> bytes:
        """The model's next (n,) float32 as one message's payload; what is left over waits."""
        ...


class OggVoice:
    """Ogg pages of Opus, headers before the first audio."""

    def __init__(self, rate_hz: int = OPUS_RATE_HZ) -> None:
        """rate_hz: what to decode to. From twice the rate a resampler holds back half as long."""
        self.rate_hz = rate_hz
        self._splitter = PageSplitter()
        self._in = OpusIn(rate_hz)
        self._out = OpusOut()
        self._unsent = np.zeros(0, np.float32)

    @property
    def junk_bytes(self) -> int:
        return self._splitter.junk_bytes

    @property
    def dropped(self) -> int:
        return self._splitter.dropped_pages

    def unpack(self, data: bytes) -> list[Part]:
        return [Part(page.raw, page.samples) for page in self._splitter.push(data)]

    def decode(self, part: Part) -> NDArray[np.float32]:
        return self._in.decode(part.raw)

    def encode(self, pcm: NDArray[np.float32]) -> bytes:
        whole = np.concatenate([self._unsent, pcm])
        ready = whole.size // PAGE_SAMPLES * PAGE_SAMPLES
        self._unsent = whole[ready:]
        return b"".join(
            self._out.encode(np.clip(whole[at : at + PAGE_SAMPLES], -1.0, 1.0))
            for at in range(0, ready, PAGE_SAMPLES)
        )


class PcmVoice:
    """Samples as they are. 48 kB/s each way, and nothing that takes time."""

    def __init__(self, rate_hz: int = RATE_HZ) -> None:
        """rate_hz: the only one there is."""
        assert rate_hz == RATE_HZ, rate_hz
        self.rate_hz = rate_hz
        self.junk_bytes = 0
        self.dropped = 0

    def unpack(self, data: bytes) -> list[Part]:
        if len(data) % 2:
            self.junk_bytes += len(data)
            self.dropped += 1
            return []
        return [Part(data, len(data) // 2 * (OPUS_RATE_HZ // RATE_HZ))] if data else []

    def decode(self, part: Part) -> NDArray[np.float32]:
        return np.frombuffer(part.raw, "<i2").astype(np.float32) / np.float32(FULL_SCALE + 1)

    def encode(self, pcm: NDArray[np.float32]) -> bytes:
        return np.rint(np.clip(pcm, -1.0, 1.0) * FULL_SCALE).astype("<i2").tobytes()


VOICES: Mapping[str, type[OggVoice] | type[PcmVoice]] = {
    "": OggVoice,
    OPUS: OggVoice,
    PCM: PcmVoice,
}
"""By subprotocol; none is the empty string."""
