"""A copy of what one caller says, for models beside the voice, and what they make of it.

    box ── audio ──▶ their process      frames the voice heard, written by the tick thread
    box ◀─ results ─ their process      read by the ledger's thread

Two rings of `frame_ring` in a segment of `channel`. A full audio ring drops frames and a full
result ring results: the voice waits for nobody, and what is missing shows in the numbers.
"""

import mmap
import struct
from multiprocessing import shared_memory
from typing import Self

from appliance.channel import check_name, make_segment, map_segment
from appliance.frame_ring import LINE_BYTES, ChannelError, ResultRing, UplinkRing, ring_bytes

MAGIC_TAP = int.from_bytes(b"dbx-tp\0\1", "little")
TAP_FIELDS = struct.Struct("<QQQQ")  # magic, samples, capacities of the two rings

AUDIO = 16
"""Frames that may wait: 1.28 s, longer than their process takes to be started again."""
RESULTS = 512
"""Results that may wait: some seconds of several models, and the ledger looks 50 times a second."""


class Tap:
    """One session's tap. The box creates and unlinks it; their process attaches and closes."""

    __slots__ = ("_memory", "_segment", "audio", "name", "results")

    def __init__(
        self,
        name: str,
        memory: mmap.mmap,
        audio: UplinkRing,
        results: ResultRing,
        segment: shared_memory.SharedMemory | None,
    ) -> None:
        self.name = name
        self.audio = audio
        self.results = results
        self._memory = memory
        self._segment = segment

    @classmethod
    def create(cls, name: str, samples: int) -> Self:
        """For frames of ``samples`` float32. Raises `ChannelError`, as `channel` does."""
        middle, end = _spans(samples, AUDIO, RESULTS)
        memory, segment = make_segment(name, end)
        view = memoryview(memory)
        TAP_FIELDS.pack_into(view, 0, MAGIC_TAP, samples, AUDIO, RESULTS)
        audio = UplinkRing.create(view[LINE_BYTES:middle], AUDIO, samples)
        results = ResultRing.create(view[middle:end], RESULTS)
        view.release()
        return cls(name, memory, audio, results, segment)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Map the segment ``name`` that the box created. Raises `ChannelError`."""
        check_name(name)
        memory = map_segment(name)
        view = memoryview(memory)
        if len(view) < LINE_BYTES:
            raise ChannelError(f"shared memory {name} has {len(view)} bytes; that is no tap")
        magic, samples, frames, results = TAP_FIELDS.unpack_from(view, 0)
        middle, end = _spans(samples, frames, results)
        if magic != MAGIC_TAP or len(view) < end:
            raise ChannelError(f"shared memory {name} is no tap of this version")
        rings = UplinkRing.attach(view[LINE_BYTES:middle]), ResultRing.attach(view[middle:end])
        view.release()
        return cls(name, memory, *rings, None)

    def close(self) -> None:
        """Unmap. The rings must not be used afterwards. Closing twice is allowed."""
        if not self._memory.closed:
            self.audio.release()
            self.results.release()
            self._memory.close()

    def unlink(self) -> None:
        """Creator only: remove the name. Idempotent."""
        assert self._segment is not None, f"{self.name} was attached, not created, here"
        try:
            self._segment.unlink()
        except FileNotFoundError:
            return


def _spans(samples: int, frames: int, results: int) -> tuple[int, int]:
    middle = LINE_BYTES + ring_bytes(frames, samples)
    return middle, middle + ring_bytes(results, 0)
