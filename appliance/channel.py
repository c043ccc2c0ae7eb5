"""One session's three rings in one segment of shared memory: made by the box, attached by a line.

Decides where the rings lie in the segment, who may remove it, and that its pages are there before
anybody stores into them. Does not know what a ring holds (`frame_ring`) or how a line learns the
segment's name (`control`).
"""

import mmap
import os
import re
import struct
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Self

from appliance.frame_ring import (
    LINE_BYTES,
    ChannelError,
    ChannelGone,
    DownlinkRing,
    ReceiptRing,
    UplinkRing,
    ring_bytes,
)

MAGIC_CHANNEL = int.from_bytes(b"dbx-ch\0\1", "little")
"""First eight bytes of a segment; the last one is the layout's version."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Entries of each ring of a channel."""

    uplink: int = 16
    """1.28 s of a caller running ahead at 80 ms a frame; the tick skips long before that."""
    downlink: int = 64
    """5.12 s of a line that does not read."""
    receipts: int = 256
    """Up to two per frame (`FILLED`, then `DISCARDED`), and a burst of them at hang-up."""


CHANNEL_FIELDS = struct.Struct("<QQQQQ")  # magic, samples, capacities of the three rings
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class Channel:
    """One session's three rings in one segment of shared memory.

    The box creates and unlinks it; a line attaches and closes. The segment has mode 0600: both
    run as one user. The creator is registered with Python's resource tracker, a small process
    that removes the name even if the box is killed; attaching registers nothing, so a line that
    ends or is killed cannot take the segment away from the box.
    """

    __slots__ = ("_memory", "_segment", "downlink", "name", "receipts", "uplink")

    def __init__(
        self,
        name: str,
        memory: mmap.mmap,
        rings: tuple[UplinkRing, DownlinkRing, ReceiptRing],
        segment: shared_memory.SharedMemory | None,
    ) -> None:
        self.name = name
        self.uplink, self.downlink, self.receipts = rings
        self._memory = memory
        self._segment = segment

    @classmethod
    def create(cls, name: str, samples: int, capacities: Capacities | None = None) -> Self:
        """Make a segment called ``name`` with empty rings for frames of ``samples`` float32.

        Raises `ChannelError` if the name is taken or cannot be one.
        """
        sizes = capacities or Capacities()
        spans = _spans(samples, sizes.uplink, sizes.downlink, sizes.receipts)
        memory, segment = make_segment(name, spans[-1])
        view = memoryview(memory)
        CHANNEL_FIELDS.pack_into(
            view, 0, MAGIC_CHANNEL, samples, sizes.uplink, sizes.downlink, sizes.receipts
        )
        rings = (
            UplinkRing.create(view[spans[0] : spans[1]], sizes.uplink, samples),
            DownlinkRing.create(view[spans[1] : spans[2]], sizes.downlink, samples),
            ReceiptRing.create(view[spans[2] : spans[3]], sizes.receipts),
        )
        view.release()
        return cls(name, memory, rings, segment)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Map the segment ``name`` another process created. Raises `ChannelError`."""
        check_name(name)
        memory = map_segment(name)
        view = memoryview(memory)
        if len(view) < LINE_BYTES:
            raise ChannelError(f"shared memory {name} has {len(view)} bytes; that is no channel")
        magic, samples, uplink, downlink, receipts = CHANNEL_FIELDS.unpack_from(view, 0)
        if magic != MAGIC_CHANNEL:
            raise ChannelError(
                f"shared memory {name} starts with {magic:#018x}, not {MAGIC_CHANNEL:#018x}: "
                "box and line are of different versions; restart both"
            )
        spans = _spans(samples, uplink, downlink, receipts)
        if len(view) < spans[-1]:
            raise ChannelError(
                f"shared memory {name} has {len(view)} bytes; its header asks for {spans[-1]}"
            )
        rings = (
            UplinkRing.attach(view[spans[0] : spans[1]]),
            DownlinkRing.attach(view[spans[1] : spans[2]]),
            ReceiptRing.attach(view[spans[2] : spans[3]]),
        )
        view.release()
        return cls(name, memory, rings, None)

    @property
    def samples(self) -> int:
        """Samples of one frame."""
        return self.uplink.samples

    def close(self) -> None:
        """Unmap. The rings must not be used afterwards. Closing twice is allowed."""
        if self._memory.closed:
            return
        for ring in (self.uplink, self.downlink, self.receipts):
            ring.release()
        self._memory.close()

    def unlink(self) -> None:
        """Creator only: remove the name. Whoever has it mapped keeps the memory. Idempotent."""
        assert self._segment is not None, f"{self.name} was attached, not created, here"
        try:
            self._segment.unlink()
        except FileNotFoundError:
            return  # somebody removed it by hand, or this is the second call


def _spans(samples: int, uplink: int, downlink: int, receipts: int) -> tuple[int, int, int, int]:
    """Byte offsets of the three rings, and the end of the last."""
    first = LINE_BYTES
    second = first + ring_bytes(uplink, samples)
    third = second + ring_bytes(downlink, samples)
    return first, second, third, third + ring_bytes(receipts, 0)


def make_segment(name: str, size: int) -> tuple[mmap.mmap, shared_memory.SharedMemory]:
    """A new segment of ``size`` bytes, its pages set aside: mapped, and what unlinks it.

    Raises `ChannelError` if the name is taken or cannot be one, or there is no room.
    """
    check_name(name)
    try:
        segment = shared_memory.SharedMemory(name, create=True, size=size)
    except FileExistsError:
        raise ChannelError(
            f"shared memory {name} exists already: another box, or one that was killed. "
            f"Stop it, then remove it: rm /dev/shm/{name}"
        ) from None
    # The object keeps the name registered; the mapping is made as a line makes it, because
    # SharedMemory's own complains when views of it outlive it.
    segment.close()
    try:
        claim(name, size)
    except OSError as err:
        segment.unlink()
        raise ChannelError(
            f"/dev/shm has no room for {size} bytes: {err.strerror}. Make it larger: "
            "mount -o remount,size=1G /dev/shm (in a container: --shm-size)"
        ) from None
    return map_segment(name), segment


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ChannelError(f"{name!r} cannot be the name of a shared memory segment")


def claim(name: str, size: int) -> None:
    """Make the kernel set the pages aside now. Raises `OSError` when there are not enough.

    A segment's size alone is only a promise: on a full /dev/shm the first store into a page that
    cannot be had is a SIGBUS, which would end the box and every call in it.
    """
    fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def map_segment(name: str) -> mmap.mmap:
    """Map all of /dev/shm/``name``, which is where shm_open looks on Linux, every page at once.

    A page that is mapped when it is first touched costs a microsecond or more, and the tick would
    touch three of each caller in each of a channel's first ticks.

    Not SharedMemory(name): before Python 3.13 that registers with the resource tracker of the
    attaching process, which then unlinks the segment when that process ends.
    """
    try:
        fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as err:
        gone = isinstance(err, FileNotFoundError)
        raise (ChannelGone if gone else ChannelError)(
            f"shared memory {name} cannot be opened: {err.strerror}. The box has ended the "
            "session, or line and box do not run as the same user"
        ) from None
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise ChannelError(f"shared memory {name} is empty; that is no channel")
        return mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
