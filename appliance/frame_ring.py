"""Rings in shared memory between one line and the tick: three of them per session.

Decides what an entry holds, when it may be read, and what a full ring does. Does not know where
the memory comes from (`channel`), who pays for a lost frame (`tick_loop`), or when a frame is due
(`clock`, `lines/playout`).

    line ── uplink ───▶ box    the caller's frames           one writer, one reader each
    line ◀─ downlink ── box    the model's frames
    line ── receipts ─▶ box    what became of every frame of the downlink

A ring is a header of three 64-byte lines (what it is; `written`, stored by the writer only;
`read`, stored by the reader only) and `capacity` entries. Both counters are u64, only grow, and
never wrap; entry ``n`` lies at ``n % capacity``. An entry is a 64-byte header and S float32.

Overflow: `put` on a full ring returns False and changes nothing; the writer decides and counts.
Nothing blocks and there is no lock. The payload is stored before the counter that publishes it.
On x86-64 stores become visible in program order, which is all this needs. On aarch64 nothing
here forces that order: not verified there, do not rely on it.

The other process is not trusted with ours. Each side keeps its own counter privately and only
publishes it; of the peer's counter it believes nothing but a distance within the capacity, and
counts anything else in `faults`. So a peer that scribbles garbles its own call's audio and numbers
and raises nothing here. PCM is passed on as it lies, NaN included. A peer of the same user
could still shrink the segment, which would kill us: line processes are our own code.
"""

import enum
import struct
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
"""Counters and entries sit on their own cache lines, so that the two sides do not fight."""

RING_HEADER_BYTES = 3 * LINE_BYTES
MAGIC_UPLINK = int.from_bytes(b"dbx-up\0\1", "little")
MAGIC_DOWNLINK = int.from_bytes(b"dbx-dn\0\1", "little")
MAGIC_RESULTS = int.from_bytes(b"dbx-rs\0\1", "little")
MAGIC_RECEIPTS = int.from_bytes(b"dbx-rc\0\1", "little")
"""First eight bytes of what they name; the last byte is the layout's version."""

LAST = 1
"""Uplink flag: the caller's last frame. The session steps on it and then no more."""

GENERATED = 1
"""Downlink flag: the model made this frame. Always set on frames the box sends."""
WARMING = 2
"""Downlink flag: the model's delays are still filling; the PCM is silence."""
CONCEALED = 4
"""Downlink flag: the model was fed silence because the caller's frame was missing."""
FINAL = 8
"""Downlink flag: the session's last frame; nothing is due after it."""


class ChannelError(RuntimeError):
    """A segment is missing or is not a channel; the other process's fault, or it has gone."""


class ChannelGone(ChannelError):
    """There is no such segment: most likely the box has ended the session already."""


class Outcome(enum.IntEnum):
    """What became of one frame of the downlink, as its receipt says."""

    DELIVERED = 1
    """In hand at its playout time, and it came before its deadline."""
    LATE = 2
    """In hand at its playout time, though it came after its deadline."""
    FILLED = 3
    """Nothing in hand at its playout time: the caller heard silence instead."""
    DISCARDED = 4
    """Never heard: it came after its playout time, was foreign, or the caller had hung up."""


class UplinkHeader(NamedTuple):
    """One frame of the caller."""

    frame_index: int
    """The line's own frame counter, from 0. i64."""
    flags: int
    """`LAST` or 0. u32."""
    captured_ns: int
    """When the frame's last sample was in hand. i64, CLOCK_MONOTONIC."""


class DownlinkHeader(NamedTuple):
    """One frame of the model."""

    session: int
    """u64."""
    generation: int
    """The slot's stamp while this was made. u32."""
    frame_index: int
    """Per session, from 0, without gaps. i64."""
    tick: int
    """i64."""
    deadline_ns: int
    """i64."""
    made_ns: int
    """When the box put it here. i64."""
    text: int = -1
    """The token spoken beside the audio; -1 for none. i32."""
    flags: int = GENERATED
    """`GENERATED`, `WARMING`, `CONCEALED`, `FINAL`, ored. u32."""
    heard: int = -1
    """`UplinkHeader.frame_index` of the frame this step listened to; -1 when concealed. i64."""


class Receipt(NamedTuple):
    """What the line did with one frame."""

    session: int
    """u64."""
    generation: int
    """u32."""
    frame_index: int
    """i64."""
    outcome: int
    """`Outcome`. u8: check it, a peer wrote it."""
    at_ns: int
    """When the outcome was decided. i64."""
    buffer_ns: int
    """Playout buffer left: playout time − arrival; negative if the frame came too late. i64."""


UPLINK_FIELDS = struct.Struct("<qIq")
DOWNLINK_FIELDS = struct.Struct("<QIqqqqiIq")


class Result(NamedTuple):
    """What a model beside the voice made of one period or one input; see `contracts.Outcome`."""

    model: int
    """Which of the box's models, in the order of its config. u8."""
    number: int
    """Period (hard) or input (the others), counted from the call's first frame. i64."""
    outcome: int
    """`contracts.Outcome`. u8: check it, a peer wrote it."""
    value: float
    """What was handed on; NaN when nothing was. f64."""
    margin_ns: int
    """Due minus in hand; negative when it was late; 0 when nothing was run. i64."""
    age_ns: int
    """From the input to the result in hand; 0 when nothing was run. i64."""


RECEIPT_FIELDS = struct.Struct("<QIqBqq")
RESULT_FIELDS = struct.Struct("<BqBdqq")
RING_FIELDS = struct.Struct("<QQQQ")  # magic, capacity, samples, bytes of one entry


def entry_bytes(samples: int) -> int:
    """Bytes of one entry: a 64-byte header and ``samples`` float32, in whole cache lines."""
    return LINE_BYTES + -(-samples * 4 // LINE_BYTES) * LINE_BYTES


def ring_bytes(capacity: int, samples: int) -> int:
    """Bytes of a ring of ``capacity`` entries of ``samples`` float32."""
    return RING_HEADER_BYTES + capacity * entry_bytes(samples)


class _Cursor:
    """The two counters of one ring, and the entry each side may touch next.

    Used by one side only. Its own counter lives in a plain attribute; shared memory merely
    shows it to the peer.
    """

    __slots__ = ("capacity", "faults", "read", "shared", "written")

    def __init__(self, buffer: memoryview, capacity: int) -> None:
        # One aligned 8-byte store per assignment, which is what makes publishing atomic.
        self.shared = buffer[:RING_HEADER_BYTES].cast("Q")
        self.capacity = capacity
        self.written: int = self.shared[8]
        self.read: int = self.shared[16]
        self.faults = 0

    def free_entry(self) -> int:
        """Where the writer may store; -1 if the ring is full."""
        used = self.written - self.shared[16]
        if 0 <= used < self.capacity:
            return self.written % self.capacity
        if used != self.capacity:
            self.faults += 1
        return -1

    def publish(self) -> None:
        self.written += 1
        self.shared[8] = self.written

    def waiting(self) -> int:
        """Entries the reader may take; 0 when the writer's counter cannot be true."""
        waiting: int = self.shared[8] - self.read
        if 0 <= waiting <= self.capacity:
            return waiting
        self.faults += 1
        return 0

    def consume(self, entries: int = 1) -> None:
        self.read += entries
        self.shared[16] = self.read


class _Ring:
    """What uplink, downlink and receipts have in common: a place in memory and a cursor."""

    __slots__ = ("_buffer", "_cursor", "_offsets", "_rows", "capacity", "samples")

    MAGIC = 0

    def __init__(self, buffer: memoryview, capacity: int, samples: int) -> None:
        size = entry_bytes(samples)
        self._buffer = buffer
        self.capacity = capacity
        self.samples = samples
        self._cursor = _Cursor(buffer, capacity)
        starts = [RING_HEADER_BYTES + entry * size for entry in range(capacity)]
        self._offsets = starts
        # Row views are made once: slicing a 2-D array per frame costs as much as the copy.
        self._rows: list[NDArray[np.float32]] = [
            np.frombuffer(buffer, np.float32, samples, start + LINE_BYTES) for start in starts
        ]

    @classmethod
    def create(cls, buffer: memoryview, capacity: int, samples: int = 0) -> Self:
        """Lay an empty ring into ``buffer``, at least `ring_bytes` long, 64-byte aligned."""
        need = ring_bytes(capacity, samples)
        if capacity < 1 or samples < 0 or len(buffer) < need:
            raise ValueError(
                f"a ring of {capacity} entries of {samples} samples needs a capacity of at least 1 "
                f"and {need} bytes; the buffer has {len(buffer)}"
            )
        buffer[:RING_HEADER_BYTES] = bytes(RING_HEADER_BYTES)
        RING_FIELDS.pack_into(buffer, 0, cls.MAGIC, capacity, samples, entry_bytes(samples))
        return cls(buffer, capacity, samples)

    @classmethod
    def attach(cls, buffer: memoryview) -> Self:
        """Use the ring another process laid into ``buffer``. Raises `ChannelError`."""
        if len(buffer) < RING_HEADER_BYTES:
            raise ChannelError(f"{len(buffer)} bytes are too few for a ring's header")
        magic, capacity, samples, size = RING_FIELDS.unpack_from(buffer, 0)
        if magic != cls.MAGIC:
            raise ChannelError(f"{cls.__name__} starts with {magic:#018x}, not {cls.MAGIC:#018x}")
        if not 1 <= capacity <= len(buffer) or not 0 <= samples <= len(buffer):
            raise ChannelError(f"{cls.__name__} says {capacity} entries of {samples} samples")
        if size != entry_bytes(samples) or len(buffer) < ring_bytes(capacity, samples):
            raise ChannelError(
                f"{cls.__name__} says {capacity} entries of {samples} samples in {size} bytes each;"
                f" that does not fit its {len(buffer)} bytes"
            )
        return cls(buffer, capacity, samples)

    @property
    def waiting(self) -> int:
        """Entries the reader may take now. 0..capacity, whatever the peer wrote."""
        return self._cursor.waiting()

    @property
    def faults(self) -> int:
        """How often the peer's counter could not be true. Stays 0 with a healthy peer."""
        return self._cursor.faults

    def skip(self, entries: int) -> int:
        """Reader: drop up to ``entries`` of the oldest waiting; return how many were dropped."""
        dropped = max(0, min(entries, self._cursor.waiting()))
        if dropped:
            self._cursor.consume(dropped)
        return dropped

    def release(self) -> None:
        """Let go of the memory; the ring must not be used afterwards."""
        self._rows.clear()
        self._cursor.shared.release()
        self._buffer.release()


class UplinkRing(_Ring):
    """The caller's frames, line -> box."""

    __slots__ = ()
    MAGIC = MAGIC_UPLINK

    def put(self, header: UplinkHeader, pcm: NDArray[np.float32]) -> bool:
        """Copy one frame in and publish it. False, and nothing happened, if the ring is full.

        pcm: (S,) float32.
        """
        entry = self._cursor.free_entry()
        if entry < 0:
            return False
        UPLINK_FIELDS.pack_into(self._buffer, self._offsets[entry], *header)
        self._rows[entry][:] = pcm
        self._cursor.publish()
        return True

    def get(self, pcm: NDArray[np.float32]) -> UplinkHeader | None:
        """Copy the oldest frame into ``pcm``, (S,) float32, and free its entry. None if empty."""
        cursor = self._cursor
        if not cursor.waiting():
            return None
        entry = cursor.read % cursor.capacity
        header = UplinkHeader._make(UPLINK_FIELDS.unpack_from(self._buffer, self._offsets[entry]))
        pcm[:] = self._rows[entry]
        cursor.read += 1
        cursor.shared[16] = cursor.read
        return header


class DownlinkRing(_Ring):
    """The model's frames, box -> line."""

    __slots__ = ()
    MAGIC = MAGIC_DOWNLINK

    def put(self, header: DownlinkHeader, pcm: NDArray[np.float32]) -> bool:
        """Copy one frame in and publish it. False, and nothing happened, if the ring is full.

        pcm: (S,) float32.
        """
        cursor = self._cursor
        entry = cursor.free_entry()
        if entry < 0:
            return False
        DOWNLINK_FIELDS.pack_into(self._buffer, self._offsets[entry], *header)
        self._rows[entry][:] = pcm
        cursor.written += 1
        cursor.shared[8] = cursor.written
        return True

    def get(self, pcm: NDArray[np.float32]) -> DownlinkHeader | None:
        """Copy the oldest frame into ``pcm``, (S,) float32, and free its entry. None if empty."""
        if not self._cursor.waiting():
            return None
        entry = self._cursor.read % self.capacity
        header = DownlinkHeader(*DOWNLINK_FIELDS.unpack_from(self._buffer, self._offsets[entry]))
        pcm[:] = self._rows[entry]
        self._cursor.consume()
        return header


class ReceiptRing(_Ring):
    """What became of the model's frames, line -> box. Entries carry no PCM."""

    __slots__ = ()
    MAGIC = MAGIC_RECEIPTS

    def put(self, receipt: Receipt) -> bool:
        """Publish one receipt. False, and nothing happened, if the ring is full."""
        entry = self._cursor.free_entry()
        if entry < 0:
            return False
        RECEIPT_FIELDS.pack_into(self._buffer, self._offsets[entry], *receipt)
        self._cursor.publish()
        return True

    def get(self) -> Receipt | None:
        """Take the oldest receipt. None if empty."""
        if not self._cursor.waiting():
            return None
        entry = self._cursor.read % self.capacity
        receipt = Receipt(*RECEIPT_FIELDS.unpack_from(self._buffer, self._offsets[entry]))
        self._cursor.consume()
        return receipt


class ResultRing(_Ring):
    """What models beside the voice made of a caller's audio, their process -> box. No PCM."""

    __slots__ = ()
    MAGIC = MAGIC_RESULTS

    def put(self, result: Result) -> bool:
        """Publish one result. False, and nothing happened, if the ring is full."""
        entry = self._cursor.free_entry()
        if entry < 0:
            return False
        RESULT_FIELDS.pack_into(self._buffer, self._offsets[entry], *result)
        self._cursor.publish()
        return True

    def get(self) -> Result | None:
        """Take the oldest result. None if empty."""
        if not self._cursor.waiting():
            return None
        entry = self._cursor.read % self.capacity
        result = Result(*RESULT_FIELDS.unpack_from(self._buffer, self._offsets[entry]))
        self._cursor.consume()
        return result
