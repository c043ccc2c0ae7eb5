"""What one caller says, cut into the chunks one model beside the voice wants, in time.

Frames come once per tick of the voice, in bursts as far as a model with a shorter period is
concerned. Chunk k covers that period of the caller's audio, counted from the call's first frame; it
is released at the start of period k of a grid that lies one frame behind the first frame's coming,
which is when even the last chunk of a frame is sure to be there. A frame that never came leaves
out the chunks it would have been part of: their numbers are missing, and the contract decides what
that means. Pure: times are arguments. Does not run anything (`side_loop`).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from appliance.clock import TickGrid
from appliance.lines.resample import Quality, Resampler
from appliance.side_loop import Input


class SideStream:
    """One caller's audio for one model."""

    def __init__(
        self, rate_hz: int, frame_samples: int, frame_ns: int, model_hz: int, chunk_samples: int
    ) -> None:
        """rate_hz, frame_samples, frame_ns: of the voice; the others: of the model."""
        self.grid: TickGrid | None = None
        """Period k is chunk k's; None before the first frame came."""
        self.first = 0
        """The first chunk all of whose audio is after the first frame's beginning."""
        self._frame_samples = frame_samples
        self._frame_ns = frame_ns
        self._model_hz = model_hz
        self._chunk = chunk_samples
        self._period_ns = chunk_samples * 1_000_000_000 // model_hz
        self._resampler = Resampler(rate_hz, model_hz, Quality.LIVE)
        self._next_frame = 0
        self._next_chunk = 0
        self._rest: NDArray[np.float32] = np.zeros(0, np.float32)
        self._holes: deque[tuple[int, int]] = deque()
        """First and last chunk of each stretch that has no audio."""
        self._ready: deque[tuple[int, NDArray[np.float32]]] = deque()

    def push(self, frame_index: int, pcm: NDArray[np.float32], now_ns: int) -> None:
        """The caller's frame ``frame_index`` came; (S,) float32, not kept."""
        if self.grid is None:
            begin_ns = now_ns - frame_index * self._frame_ns
            self.grid = TickGrid(begin_ns + self._frame_ns, self._period_ns)
            # What was before the first frame we saw is none of ours; it is silence and left out.
            self.first = -(-frame_index * self._frame_ns // self._period_ns)
            start = frame_index * self._frame_ns * self._model_hz // 1_000_000_000
            self._next_chunk = start // self._chunk
            self._rest = np.zeros(start - self._next_chunk * self._chunk, np.float32)
            self._next_frame = frame_index
        if frame_index < self._next_frame:
            return  # a writer that goes back is none of ours
        missing = frame_index - self._next_frame
        if missing:
            first_ns, last_ns = self._next_frame * self._frame_ns, frame_index * self._frame_ns - 1
            self._holes.append((first_ns // self._period_ns, last_ns // self._period_ns))
            self._take(np.zeros(missing * self._frame_samples, np.float32))
        self._take(pcm)
        self._next_frame = frame_index + 1

    def due(self, now_ns: int) -> list[Input]:
        """Chunks whose period has begun, oldest first."""
        found: list[Input] = []
        while self._ready and self.grid is not None:
            number, pcm = self._ready[0]
            start_ns = self.grid.start_ns(number)
            if start_ns > now_ns:
                break
            self._ready.popleft()
            found.append(Input(number, start_ns, pcm))
        return found

    def wake_ns(self, never_ns: int) -> int:
        """When the next chunk that is there is due; ``never_ns`` when there is none."""
        if not self._ready or self.grid is None:
            return never_ns
        return self.grid.start_ns(self._ready[0][0])

    def _take(self, pcm: NDArray[np.float32]) -> None:
        audio = np.concatenate([self._rest, self._resampler.push(pcm)])
        whole = len(audio) // self._chunk
        for n in range(whole):
            number = self._next_chunk + n
            while self._holes and self._holes[0][1] < number:
                self._holes.popleft()
            is_hole = bool(self._holes) and self._holes[0][0] <= number
            if number >= self.first and not is_hole:
                chunk = audio[n * self._chunk : (n + 1) * self._chunk]
                self._ready.append((number, chunk.copy()))
        self._next_chunk += whole
        self._rest = audio[whole * self._chunk :]
