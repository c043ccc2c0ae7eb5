"""What a line keeps of one call so that it can be replayed: the frames it put, and what came back.

Off by default, since it holds what was said. It is kept by the line, outside the process that runs
the engine, and is one half of a call's evidence; the other half is the ledger's file, which says
what the box decided on every tick. Together they are all a call depends on (`replay`).

    head      magic, length, JSON: which call, of which model, with which settings
    SAID      a frame the box took: index, flags, captured_ns, float32[S]
    HEARD     a frame the box made: index, tick, flags, text, heard, and the CRC-32 of its PCM
    RESTART   the model began anew before a frame: index, and JSON: the prompt it began with

Entries are appended as they happen and each has a CRC-32; a torn tail is dropped on reading. What
came back is kept as a checksum: a replay makes the audio again.
"""

import enum
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance.control import Prompted
from appliance.frame_ring import DownlinkHeader, UplinkHeader

MAGIC = b"dbxjourn\x02"
SUFFIX = ".journal"


class JournalError(ValueError):
    """A file is no journal, cannot be written, or belongs to another call; the operator's."""


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which call it is: the stamps of the ledger's header."""

    session: int
    generation: int
    t0_ns: int
    """Of the box's grid: tells two boxes' session 7 apart."""
    model: str
    samples: int
    rate_hz: int
    settings: dict[str, float]
    prompt: Prompted | None = None
    """What it began with, as it was fed; the words are in the ledger's file."""


class Kind(enum.IntEnum):
    """What an entry is about."""

    SAID = 1
    HEARD = 2
    RESTART = 3


SAID = struct.Struct("<BqIq")
HEARD = struct.Struct("<BqqIiqI")
RESTART = struct.Struct("<BqI")  # then so many bytes of JSON
CRC = struct.Struct("<I")


class JournalWriter:
    """One call's journal, open for appending. The line's thread uses it; buffered."""

    def __init__(self, path: Path, head: Head) -> None:
        """Raises `JournalError`."""
        body = msgspec.json.encode(head)
        try:
            self._file: BinaryIO = path.open("wb")
            self._file.write(MAGIC + CRC.pack(len(body)) + body)
        except OSError as err:
            raise JournalError(f"{path} cannot be written: {err.strerror}") from None
        self.path = path
        self.trouble = ""
        """Why nothing more is written; empty if all is well. The call goes on without it."""

    def said(self, header: UplinkHeader, pcm: NDArray[np.float32]) -> None:
        """A frame the box has taken."""
        fields = SAID.pack(Kind.SAID, header.frame_index, header.flags, header.captured_ns)
        self._write(fields + pcm.astype("<f4", copy=False).tobytes())

    def heard(self, header: DownlinkHeader, pcm: NDArray[np.float32]) -> None:
        """A frame the box has made."""
        self._write(
            HEARD.pack(
                Kind.HEARD,
                header.frame_index,
                header.tick,
                header.flags,
                header.text,
                header.heard,
                checksum(pcm),
            )
        )

    def restarted(self, index: int, prompt: Prompted | None) -> None:
        """The model began anew before frame ``index``."""
        body = msgspec.json.encode(prompt)
        self._write(RESTART.pack(Kind.RESTART, index, len(body)) + body)

    def close(self) -> None:
        """Write what is buffered. Closing twice is allowed."""
        try:
            self._file.close()
        except OSError as err:
            self._give_up(err)

    def _write(self, entry: bytes) -> None:
        if self.trouble or self._file.closed:
            return
        try:
            self._file.write(entry + CRC.pack(zlib.crc32(entry)))
        except OSError as err:
            self._give_up(err)

    def _give_up(self, err: OSError) -> None:
        self.trouble = self.trouble or f"{self.path} cannot be written: {err.strerror}"


@dataclass(frozen=True, slots=True)
class Said:
    """A frame the caller said. pcm: (S,) float32."""

    index: int
    flags: int
    pcm: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Heard:
    """A frame the model made."""

    index: int
    tick: int
    flags: int
    text: int
    heard: int
    """Index of the `Said` it listened to; -1: silence."""
    checksum: int


@dataclass(slots=True)
class Journal:
    """A journal, read back."""

    path: Path
    head: Head
    said: list[Said] = field(default_factory=list)
    """In the order the box took them."""
    heard: dict[int, Heard] = field(default_factory=dict)
    restarts: dict[int, Prompted | None] = field(default_factory=dict)
    """By the frame before which the model began anew."""
    """By frame index."""
    dropped_bytes: int = 0


def checksum(pcm: NDArray[np.float32]) -> int:
    """CRC-32 of the samples as little-endian float32: equal means equal to the last bit."""
    return zlib.crc32(pcm.astype("<f4", copy=False).tobytes())


def read(path: Path) -> Journal:
    """Read a journal, dropping a torn tail. Raises `JournalError`."""
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise JournalError(f"{path} cannot be read: {err.strerror}") from None
    start = len(MAGIC) + CRC.size
    if len(raw) < start or not raw.startswith(MAGIC):
        raise JournalError(
            f"{path} is not a journal of this version. A line writes one with: "
            f"duplexbox appliance call --journal"
        )
    end = start + int(CRC.unpack_from(raw, len(MAGIC))[0])
    try:
        head = msgspec.json.decode(raw[start:end], type=Head)
    except msgspec.DecodeError as err:
        raise JournalError(f"{path}: the head is damaged: {err}") from None
    journal = Journal(path, head)
    view = memoryview(raw)
    at = end
    while at < len(raw):
        size = _entry_bytes(view[at:], head.samples)
        if size is None or at + size > len(raw):
            break
        entry = view[at : at + size - CRC.size]
        if zlib.crc32(entry) != CRC.unpack_from(raw, at + size - CRC.size)[0]:
            break
        _add(journal, entry)
        at += size
    journal.dropped_bytes = len(raw) - at
    return journal


def _entry_bytes(entry: memoryview, samples: int) -> int | None:
    kind = entry[0]
    if kind == Kind.SAID:
        return SAID.size + 4 * samples + CRC.size
    if kind == Kind.RESTART and len(entry) >= RESTART.size:
        return RESTART.size + int(RESTART.unpack_from(entry)[2]) + CRC.size
    return HEARD.size + CRC.size if kind == Kind.HEARD else None


def _add(journal: Journal, entry: memoryview) -> None:
    if entry[0] == Kind.SAID:
        _, index, flags, _ = SAID.unpack_from(entry)
        pcm = np.frombuffer(entry, "<f4", journal.head.samples, SAID.size).astype(np.float32)
        journal.said.append(Said(index, flags, pcm))
        return
    if entry[0] == Kind.RESTART:
        _, index, _ = RESTART.unpack_from(entry)
        journal.restarts[index] = msgspec.json.decode(entry[RESTART.size :], type=Prompted | None)
        return
    _, index, tick, flags, text, heard, crc = HEARD.unpack_from(entry)
    journal.heard[index] = Heard(index, tick, flags, text, heard, crc)
