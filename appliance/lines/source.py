"""A caller's WAV file as frames of the model's rate, each known to be the last or not.

Decides how a file that is no whole number of frames ends: the last frame is padded with silence,
and `padding_samples` says by how much. Does not know when a frame is due (`call`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.lines.resample import Quality, Resampler
from appliance.lines.wav import WavError, WavReader


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """One frame of a caller. pcm: (S,) float32."""

    pcm: NDArray[np.float32]
    is_last: bool


class WavSource:
    """Frames of a WAV file, resampled; at least one.

    Reads one frame ahead, so that a frame is known to be the last, and a second one on `prepare`,
    so that neither disk nor resampler stands between a frame and its time.
    """

    def __init__(self, reader: WavReader, rate_hz: int, samples_per_frame: int) -> None:
        """Reads the first frames. Raises `WavError` if too little comes out for one."""
        self.reader = reader
        self.trouble = ""
        """Why the file ended before its end; empty if it did not."""
        self.padding_samples = 0
        self._samples = samples_per_frame
        # A file can be read ahead, so the delay of the exact filter costs nothing.
        self._resampler = Resampler(reader.rate_hz, rate_hz, Quality.EXACT)
        self._chunk_samples = -(-reader.rate_hz * samples_per_frame // rate_hz)
        self._ready: list[NDArray[np.float32]] = []
        self._ready_samples = 0
        self._at_end = False
        self._ahead = self._read_frame()
        if self._ahead is None:
            raise WavError(
                self.trouble
                or f"{reader.path} has {reader.samples} samples at {reader.rate_hz} Hz, too few to "
                f"become one; hand in a WAV file with audio in it"
            )
        self._after: NDArray[np.float32] | None = None
        self._is_prepared = False
        self.prepare()

    @property
    def samples_in(self) -> int:
        """Samples read from the file so far, at its rate."""
        return self._resampler.samples_in

    def next(self) -> SourceFrame:
        """The next frame, at once if it was prepared; never called again after the last."""
        self.prepare()
        pcm = self._ahead
        assert pcm is not None, "asked for a frame after the last"
        self._ahead = self._after
        self._is_prepared = False
        return SourceFrame(pcm, self._ahead is None)

    def prepare(self) -> None:
        """Read what the next `next` needs, off the clock."""
        if not self._is_prepared:
            self._after = self._read_frame()
            self._is_prepared = True

    def _read_frame(self) -> NDArray[np.float32] | None:
        while self._ready_samples < self._samples and not self._at_end:
            try:
                chunk = self.reader.read(self._chunk_samples)
            except WavError as err:
                # Half a call is still a call; `trouble` says why it was short.
                self.trouble = str(err)
                chunk = np.zeros(0, np.float32)
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
