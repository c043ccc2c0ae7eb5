"""What the sound library's callbacks touch: rings of samples, and what they count.

Decides what is played when nothing is in hand, and remembers what was played, because that is what
an echo canceller needs. Does not know frames, models or which library calls it. Callbacks run in
threads of the library's: they copy into arrays that exist already, take no lock, and write no
word that somebody else writes.

    microphone ──▶ heard  ──▶ line     one writer, one reader each; a counter per side, which only
    loudspeaker ◀── speaker ◀── line   grows, and is stored after the samples that it is about
                └─▶ played ──▶ line    (the interpreter lock orders the stores)

Microphone and loudspeaker are two streams, also where they are one card: PortAudio's duplex stream
stood still for two seconds after one underflow through ALSA's PulseAudio plugin, and was two
seconds behind its microphone from then on.
"""

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_S

HELD_S = 1
"""How much the rings hold: more than a line is late by in a call that could be saved."""

FADE_S = 0.003
"""Where samples run out, the last one decays within a few times this instead of breaking off."""


class SampleRing:
    """Mono float32 samples from one thread to another. Full: what does not fit is not written."""

    def __init__(self, capacity: int) -> None:
        self._samples = np.zeros(capacity, np.float32)
        self.capacity = capacity
        self.written = 0
        """Stored by the writer only."""
        self.read = 0
        """Stored by the reader only."""

    @property
    def waiting(self) -> int:
        return self.written - self.read

    def write(self, pcm: NDArray[np.float32]) -> int:
        """Copy (n,) samples in, as many as there is room for; return how many."""
        size: int = min(pcm.shape[0], self.capacity - self.waiting)
        at = self.written % self.capacity
        first = min(size, self.capacity - at)
        self._samples[at : at + first] = pcm[:first]
        self._samples[: size - first] = pcm[first:size]
        self.written += size
        return size

    def read_into(self, out: NDArray[np.float32]) -> int:
        """Copy the oldest samples to the front of (n,) ``out``; return how many there were."""
        size: int = min(out.shape[0], self.waiting)
        at = self.read % self.capacity
        first = min(size, self.capacity - at)
        out[:first] = self._samples[at : at + first]
        out[first:size] = self._samples[: size - first]
        self.read += size
        return size

    def skip(self, samples: int) -> int:
        """Reader: drop up to ``samples`` of the oldest; return how many."""
        size = max(0, min(samples, self.waiting))
        self.read += size
        return size


class History:
    """The newest samples of a stream, by their number. One writer; readers disturb nobody."""

    def __init__(self, capacity: int) -> None:
        self._samples = np.zeros(capacity, np.float32)
        self.capacity = capacity
        self.written = 0

    def write(self, pcm: NDArray[np.float32]) -> None:
        """(n,) samples, at most half as many as the capacity."""
        size = pcm.shape[0]
        at = self.written % self.capacity
        first = min(size, self.capacity - at)
        self._samples[at : at + first] = pcm[:first]
        self._samples[: size - first] = pcm[first:]
        self.written += size

    def copy(self, start: int, out: NDArray[np.float32]) -> None:
        """Samples ``start``.. into (n,) ``out``; zeros for those that are not here."""
        out[:] = 0.0
        begin = max(start, self.written - self.capacity // 2, 0)
        end = min(start + out.shape[0], self.written)
        if begin >= end:
            return
        at = begin % self.capacity
        first = min(end - begin, self.capacity - at)
        to = begin - start
        out[to : to + first] = self._samples[at : at + first]
        out[to + first : end - start] = self._samples[: end - begin - first]


class Exchange:
    """A card's two ends. `hear` and `play` are the callbacks; the line uses everything else."""

    def __init__(self, rate_hz: int, block: int) -> None:
        """block: samples per callback, the same in both directions."""
        self.rate_hz = rate_hz
        self.block = block
        self.heard = SampleRing(HELD_S * rate_hz)
        self.speaker = SampleRing(HELD_S * rate_hz)
        self.played = History(HELD_S * rate_hz)
        """What the loudspeaker was given."""
        self.heard_ns = 0
        self.played_ns = 0
        """When the callbacks ran last; 0: never."""
        self.dry = 0
        """Blocks that had to be filled, once anything had been played at all."""
        self.lost = 0
        """Blocks of the microphone that nobody fetched."""
        self.library_faults = 0
        """Callbacks that were told of an overflow or underflow between library and device."""
        self.in_latency_ns = 0
        self.out_latency_ns = 0
        """What the library said of the last block: how old its first sample is, and how long from
        now its first sample will be heard."""
        self._last = 0.0
        self._decay = np.exp(-np.arange(block) / (FADE_S * rate_hz)).astype(np.float32)

    @property
    def block_ns(self) -> int:
        return self.block * NS_PER_S // self.rate_hz

    def hear(self, pcm: NDArray[np.float32], now_ns: int) -> None:
        """One block of the microphone, (n,) float32; all of it or nothing is kept."""
        if self.heard.capacity - self.heard.waiting >= pcm.shape[0]:
            self.heard.write(pcm)
        else:
            self.lost += 1
        self.heard_ns = now_ns

    def play(self, pcm: NDArray[np.float32], now_ns: int) -> None:
        """Fill one block for the loudspeaker, (n,) float32; n is at most `block`."""
        size = self.speaker.read_into(pcm)
        if size:
            self._last = float(pcm[size - 1])
        if size < pcm.shape[0]:
            rest = pcm[size:]
            np.multiply(self._decay[: rest.shape[0]], self._last, out=rest)
            self._last = float(rest[-1])
            if self.speaker.read:
                self.dry += 1
        self.played.write(pcm)
        self.played_ns = now_ns
