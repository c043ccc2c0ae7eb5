"""A caller's WAV file as frames of the model's rate, each known to be the last or not.

Decides how a file that is no whole number of frames ends: the last frame is padded with silence,
and `padding_samples` says by how much. Does not know when a frame is due (`call`).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.lines.resample import Quality, Resampler
from appliance.lines.wav import WavReader


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """One frame of a caller. pcm: (S,) float32."""

    pcm: NDArray[np.float32]
    is_last: bool


class Source(Protocol):
    """Where a call's frames come from."""

    @property
    def padding_samples(self) -> int:
        """Silence at the end of the last frame, once that has been handed out."""

    def next(self) -> SourceFrame:
        """The next frame; never called again after the last."""


class WavSource:
    """Frames of a WAV file, resampled; at least one, since no reader has 0 samples.

    Reads one frame ahead, so that a frame is ready when it is due and known to be the last.
    """

    def __init__(self, reader: WavReader, rate_hz: int, samples_per_frame: int) -> None:
        self.reader = reader
        self.padding_samples = 0
        self._samples = samples_per_frame
        # A file can be read ahead, so the delay of the exact filter costs nothing.
        self._resampler = Resampler(reader.rate_hz, rate_hz, Quality.EXACT)
        self._chunk_samples = -(-reader.rate_hz * samples_per_frame // rate_hz)
        self._ready: list[NDArray[np.float32]] = []
        self._ready_samples = 0
        self._at_end = False
        self._ahead = self._read_frame()

    @property
    def samples_in(self) -> int:
        """Samples read from the file so far, at its rate."""
        return self._resampler.samples_in

    def next(self) -> SourceFrame:
        """The next frame. Raises `WavError` if the file cannot be read on."""
        pcm = self._ahead
        assert pcm is not None, "asked for a frame after the last"
        self._ahead = self._read_frame()
        return SourceFrame(pcm, self._ahead is None)

    def _read_frame(self) -> NDArray[np.float32] | None:
        while self._ready_samples < self._samples and not self._at_end:
            chunk = self.reader.read(self._chunk_samples)
            out = self._resampler.push(chunk) if chunk.size else self._resampler.flush()
            self._at_end = not chunk.size
            self._ready.append(out)
            self._ready_samples += out.shape[0]
        if not self._ready_samples:
            return None
        whole = np.concatenate(self._ready)
        pcm = np.zeros(self._samples, np.float32)
        taken = whole[: self._samples]
        pcm[: taken.shape[0]] = taken
        self.padding_samples = self._samples - taken.shape[0]
        self._ready = [whole[taken.shape[0] :]]
        self._ready_samples = whole.shape[0] - taken.shape[0]
        return pcm
