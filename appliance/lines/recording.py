"""What one call leaves behind: the reply, and the conversation as the caller heard it.

Decides where in a recording a sample belongs. Does not know which frames there were (`call`,
`sip_call`) or how a WAV file is written (`wav`).

    <stem>.reply.wav         mono, what the model said, from its first frame on
    <stem>.conversation.wav  left the caller, right the model, on the caller's own timeline:
                             the model's frames lie where they were heard, round trip and all

Both grow while the call lasts, and are valid if it is cut off.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.lines.wav import WavWriter

NS_PER_S = 1_000_000_000

WINDOW_S = 8
"""How far the two sides of a conversation may lie apart before the slower one is taken for silent.
The round trip is a few frames; this long, the model has stopped."""


class Conversation:
    """One WAV file: left the caller, right the model. Raises `WavError` when it cannot be written.

    Written about a second at a time: a call a frame is much to move for as little.
    """

    def __init__(self, path: Path, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._file = WavWriter(path, rate_hz, 2)
        self._origin_ns: int | None = None
        # Samples not written yet; row 0 is sample `_start` of the conversation.
        self._window = np.zeros((WINDOW_S * rate_hz, 2), np.float32)
        self._start = 0
        self._ends = [0, 0]

    @property
    def samples(self) -> int:
        """Of the longer side, so far."""
        return max(self._ends)

    def said(self, pcm: NDArray[np.float32], began_ns: int) -> None:
        """The caller's next (n,) float32. began_ns: when the first of it was spoken."""
        if self._origin_ns is None:
            self._origin_ns = began_ns
        self._place(0, self._ends[0], pcm)

    def heard(self, pcm: NDArray[np.float32], playout_ns: int) -> None:
        """The caller heard (n,) float32 from ``playout_ns`` on; not before it `said` something."""
        assert self._origin_ns is not None, "a reply to nobody"
        at = round((playout_ns - self._origin_ns) * self._rate_hz / NS_PER_S)
        # Rounding two neighbours may leave a hole or an overlap of one sample; frames abut.
        if abs(at - self._ends[1]) <= 1:
            at = self._ends[1]
        self._place(1, at, pcm)

    def close(self) -> None:
        """Write the rest and finish the file."""
        try:
            self._write_until(max(self._ends))
        finally:
            self._file.close()

    def _place(self, side: int, at: int, pcm: NDArray[np.float32]) -> None:
        end = at + pcm.shape[0]
        if end - self._start > self._window.shape[0]:
            self._write_until(end - self._window.shape[0] + self._rate_hz)
        elif min(self._ends) - self._start >= self._rate_hz:
            self._write_until(min(self._ends))
        first = at - self._start
        if first < 0:  # later than the window is long: the silence has been written already
            pcm = pcm[-first:]
            first = 0
        self._window[first : first + pcm.shape[0], side] = pcm
        self._ends[side] = max(self._ends[side], end)

    def _write_until(self, sample: int) -> None:
        while (ready := min(sample - self._start, self._window.shape[0])) > 0:
            self._file.write(self._window[:ready])
            kept = self._window.shape[0] - ready
            self._window[:kept] = self._window[ready:].copy()
            self._window[kept:] = 0
            self._start += ready


class Recording:
    """The two WAV files of one call. Raises `WavError` when they cannot be written."""

    def __init__(self, folder: Path, stem: str, rate_hz: int) -> None:
        self._reply = WavWriter(folder / f"{stem}.reply.wav", rate_hz)
        try:
            self._conversation = Conversation(folder / f"{stem}.conversation.wav", rate_hz)
        except BaseException:
            self._reply.close()
            raise
        self._last: NDArray[np.float32] | None = None

    @property
    def reply_samples(self) -> int:
        """Length of the reply so far; after `close`, of the file."""
        return self._reply.samples + (0 if self._last is None else self._last.shape[0])

    @property
    def clipped_samples(self) -> int:
        """Samples of the reply beyond full scale."""
        return self._reply.clipped_samples

    def said(self, pcm: NDArray[np.float32], began_ns: int) -> None:
        """As `Conversation.said`."""
        self._conversation.said(pcm, began_ns)

    def heard(self, pcm: NDArray[np.float32], playout_ns: int) -> None:
        """As `Conversation.heard`; also the reply's next."""
        self._conversation.heard(pcm, playout_ns)
        if self._last is not None:
            self._reply.write(self._last)
        self._last = pcm

    def close(self, padding_samples: int = 0) -> None:
        """Finish both files. padding_samples: how much of the last frame was not the caller's."""
        try:
            if self._last is not None:
                self._reply.write(self._last[: self._last.shape[0] - padding_samples])
                self._last = None
        finally:
            try:
                self._reply.close()
            finally:
                self._conversation.close()
