"""What is written down about every frame of every call, and how it is read back.

One file per call: a header (what call, of which model, on which grid), then records of 88 bytes,
appended and never changed. Four kinds share the width:

    TICK      one per due frame, also for ticks that never ran: what was heard, what came of it
    RECEIPT   one or two per frame, from the line: what the caller heard
    SIDE      one per period or input of each model beside the voice: what came of it
    END       one, when the session is gone: how many frames were due, and why it ended

Every record carries session, generation and a CRC-32. A file that was cut short, by a full disk
or a power cut, ends in a torn tail: reading stops at the first record that is incomplete or whose
CRC is wrong, and says how many bytes it dropped. Not here: the thread that writes
(`ledger_writer`), what the numbers add up to (`report`).
"""

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MAGIC = b"dbxcall\x03"
"""First bytes of a call's file; the last one is the format's version."""
READABLE = (MAGIC, b"dbxcall\x02")
"""Version 2 had no records of models beside the voice; otherwise it is the same."""

SUFFIX = ".call"
RECORD_BYTES = 88
CRC_AT = RECORD_BYTES - 4
BUFFER_UNKNOWN = -(2**31)
"""`buffer_us` before any frame of the call was heard. Afterwards it is the time from the frame's
handing over to its playout, negative if that was too late already: carried on from the newest
receipt the box had, since a line's playout moves on by one period per frame. The frame's own
receipt says what it came to in the end."""

HEADER_ALIGN_BYTES = 16


class LedgerError(ValueError):
    """A file is not a call's record; the operator named the wrong one, or its head is damaged."""


class Kind(enum.IntEnum):
    """What a record is about."""

    TICK = 1
    RECEIPT = 2
    END = 3
    SIDE = 4


class Flag(enum.IntFlag):
    """What a tick did for one session."""

    HEARD = 1
    """The model heard a frame of the caller."""
    CONCEALED = 2
    """The model was fed silence because the caller's frame was missing or broken."""
    GENERATED = 4
    """The model made a frame."""
    WARMING = 8
    """The frame is silence because the model's delays are still filling."""
    MISSED = 16
    """The tick never ran: dropped after an overrun. Nothing was heard and nothing made."""
    LATE = 32
    """The frame was finished after its deadline."""
    UNREAD = 64
    """The frame was made and thrown away: the line had not read 64 frames before it."""
    FAULT = 128
    """The session's row was broken on this tick, and the session ended."""
    LAST = 256
    """The caller's last frame was taken on this tick."""
    BAD_INPUT = 512
    """The caller's frame held NaN or infinity; the model was fed silence instead."""
    RESET = 1024
    """The model's state began anew just before this frame; with the call's voice and persona."""
    PRIMING = 2048
    """Nothing was heard and nothing made: a reset session's prompt was being fed again."""


class Settled(enum.IntEnum):
    """What became of a frame. The first four are the line's words (`frame_ring.Outcome`)."""

    DELIVERED = 1
    LATE = 2
    FILLED = 3
    DISCARDED = 4
    LOST = 5
    """Written by the box: the line vanished before it said. The caller may have heard it."""


class Why(enum.IntEnum):
    """How a session ended, in END records."""

    FINISHED = 1
    """The caller's last frame was stepped on and all frames are accounted for."""
    LEFT = 2
    """The caller hung up."""
    TIMEOUT = 3
    """No first frame came, or the line never said what became of the last ones."""
    FAULT = 4
    """The session's row was broken."""
    LOST = 5
    """The line vanished."""
    STOPPED = 6
    """The box was stopped."""
    SHED = 7
    """The box was late and sent its newest session away, so that the others keep time."""
    OPERATOR = 8
    """An operator ended the call."""


def _layout(fields: dict[str, tuple[str, int]]) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [form for form, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": RECORD_BYTES,
        }
    )


_COMMON = {
    "kind": ("u1", 0),
    "generation": ("<u4", 4),
    "session": ("<u8", 8),
    "index": ("<i8", 16),
    "crc": ("<u4", CRC_AT),
}

TICK = _layout(
    {
        **_COMMON,
        "unused": ("u1", 1),  # named, because numpy leaves gaps between fields undefined
        "flags": ("<u2", 2),
        "tick": ("<i8", 24),
        "captured_ns": ("<i8", 32),  # when the caller's frame was complete; 0 if none was heard
        "made_ns": ("<i8", 40),  # when the model's frame was handed over; 0 if it never was
        "margin_ns": ("<i8", 48),  # deadline minus made_ns (or minus now, if it was missed)
        "step_ns": ("<u4", 56),  # the engine's part of the tick
        "text": ("<i4", 60),  # -1: none
        "batch": ("<u2", 64),
        "slot": ("<u2", 66),
        "lag": ("<u2", 68),  # frames waiting once this tick had taken its own
        "skipped": ("<u2", 70),  # frames dropped unheard just before this tick
        "misses": ("<u4", 72),  # run of late or missed frames, this one included
        "buffer_us": ("<i4", 76),  # playout buffer left, or BUFFER_UNKNOWN; see there
        "spare": ("<u4", 80),
    }
)
"""One due frame of one session."""

assert TICK.fields is not None
_PLACES: dict[str, int] = {name: int(place[1]) for name, place in TICK.fields.items()}
TICK_FIELDS = tuple(sorted(_PLACES, key=_PLACES.__getitem__))
"""In order of their places."""

TICK_VALUES = struct.Struct("<BBHIQqqqqqIiHHHHIiII")
"""The same as one packed value: writing a record so takes a third of what numpy takes."""

RECEIPT = _layout(
    {
        **_COMMON,
        "outcome": ("u1", 1),
        "at_ns": ("<i8", 24),  # when it was decided
        "buffer_ns": ("<i8", 32),  # playout time minus arrival
    }
)
"""What became of one frame."""

RECEIPT_VALUES = struct.Struct("<BB2xIQqqq44xI")
"""kind, outcome, generation, session, index, at_ns, buffer_ns, crc: the same, packed."""

SIDE = _layout(
    {
        **_COMMON,  # index: period (hard) or input, counted from the call's first frame
        "outcome": ("u1", 1),  # `contracts.Outcome`
        "model": ("<u2", 2),  # which of `Header.beside`
        "margin_ns": ("<i8", 24),  # due minus in hand; 0 when nothing was run
        "age_ns": ("<i8", 32),  # input to result in hand; 0 when nothing was run
        "value": ("<f8", 40),  # what was handed on; NaN when nothing was
    }
)
"""What became of one period or input of a model beside the voice."""

END = _layout(
    {
        **_COMMON,  # index: frames that were due
        "why": ("u1", 1),
        "at_ns": ("<i8", 24),
        "foreign": ("<u4", 32),  # receipts that carried another stamp or an impossible index
        "records_lost": ("<u4", 36),  # records that found no room on their way here
    }
)
"""The end of the call."""


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model beside the voice and its contract."""

    name: str
    model: str
    contract: str
    """`contracts.Contract`."""
    period_ns: int
    bound_ns: int


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head of a call's file."""

    session: int
    generation: int
    line: str
    caller: str
    settings: dict[str, float]
    bundle: str
    model: str
    checkpoint_sha256: str
    period_ns: int
    t0_ns: int
    """Tick n of this box started at t0_ns + n * period_ns."""
    started: str
    """UTC, for people and for the file's name."""
    voice: str = ""
    persona: str = ""
    """What the model was told to be before it heard its caller."""
    prompt_frames: int = 0
    """How long that was; frames of the call count from 0 after it."""
    beside: tuple[Beside, ...] = ()
    """Models that heard the caller beside the voice, in the order SIDE records number them."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call's file, read back."""

    path: Path
    header: Header
    ticks: NDArray[np.void]
    """(frames,) `TICK`, in the order they were written."""
    receipts: NDArray[np.void]
    """(receipts,) `RECEIPT`."""
    end: np.void | None
    """`END`; None: the call is still on, or the box was killed."""
    dropped_bytes: int
    """Torn tail: bytes at the end that are no whole, sound record."""
    side: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, SIDE))
    """(results,) `SIDE`."""


def file_name(header: Header) -> str:
    """Sorts by start, and is unique as long as two boxes do not share a folder."""
    return f"{header.started}-{header.session:06d}{SUFFIX}"


def encode_header(header: Header) -> bytes:
    """The first bytes of a call's file, in whole lines of 16 bytes."""
    body = msgspec.json.encode(header)
    length = -(-(len(MAGIC) + 4 + len(body)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
    body = body.ljust(length - len(MAGIC) - 4)
    return MAGIC + len(body).to_bytes(4, "little") + body


def seal(records: NDArray[np.void]) -> bytes:
    """Records of any kind as bytes, each with its CRC filled in."""
    raw = bytearray(records.tobytes())
    for start in range(0, len(raw), RECORD_BYTES):
        crc = zlib.crc32(memoryview(raw)[start : start + CRC_AT])
        raw[start + CRC_AT : start + RECORD_BYTES] = crc.to_bytes(4, "little")
    return bytes(raw)


def sealed(packed: bytes) -> bytes:
    """One record that has been packed with a CRC of 0, with its own."""
    body = packed[:CRC_AT]
    return body + zlib.crc32(body).to_bytes(4, "little")


def read_call(path: Path) -> Call:
    """Read one call's file, dropping a torn tail. Raises `LedgerError`."""
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise LedgerError(f"{path}: {err.strerror or err}") from None
    header, start = _decode_header(path, raw)
    sound = start
    view = memoryview(raw)
    while sound + RECORD_BYTES <= len(raw):
        crc = int.from_bytes(view[sound + CRC_AT : sound + RECORD_BYTES], "little")
        if zlib.crc32(view[sound : sound + CRC_AT]) != crc or raw[sound] not in (1, 2, 3, 4):
            break
        sound += RECORD_BYTES
    # Sorted as plain bytes: selecting structured records copies their named fields only.
    rows = np.frombuffer(raw, np.uint8, sound - start, start).reshape(-1, RECORD_BYTES)
    ends = _of_kind(rows, Kind.END, END)
    return Call(
        path=path,
        header=header,
        ticks=_of_kind(rows, Kind.TICK, TICK),
        receipts=_of_kind(rows, Kind.RECEIPT, RECEIPT),
        end=ends[-1] if len(ends) else None,
        dropped_bytes=len(raw) - sound,
        side=_of_kind(rows, Kind.SIDE, SIDE),
    )


def read_folder(folder: Path, unreadable: list[LedgerError] | None = None) -> list[Call]:
    """All calls in ``folder``, oldest first; ``folder`` may also be one call's file.

    unreadable: takes what is wrong with each file that is no call, as a box that is killed may
    leave one without a header; None: the first such file is raised.
    Raises `LedgerError` when there is no call at all, too.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else [folder]
    if not paths:
        raise LedgerError(f"{folder} holds no call (*{SUFFIX}); name the [ledger] folder of a box")
    return read_files(paths, unreadable)


def read_files(paths: Sequence[Path], unreadable: list[LedgerError] | None = None) -> list[Call]:
    """The calls in ``paths``, in order; ``unreadable`` as `read_folder` has it."""
    calls: list[Call] = []
    for path in paths:
        try:
            calls.append(read_call(path))
        except LedgerError as err:
            if unreadable is None or len(paths) == 1:
                raise
            unreadable.append(err)
    return calls


def _of_kind(rows: NDArray[np.uint8], kind: Kind, layout: np.dtype[np.void]) -> NDArray[np.void]:
    records: NDArray[np.void] = rows[rows[:, 0] == kind].view(layout).reshape(-1)
    return records


def _decode_header(path: Path, raw: bytes) -> tuple[Header, int]:
    start = len(MAGIC) + 4
    if not raw.startswith(READABLE):
        if raw.startswith(MAGIC[:-1]) and len(raw) > len(MAGIC):
            raise LedgerError(
                f"{path}: format {raw[len(MAGIC) - 1]}; this program reads {MAGIC[-1]}. "
                f"Read it with the duplexbox that wrote it"
            )
        raise LedgerError(f"{path} is not a call's record: it does not begin with {MAGIC[:-1]!r}")
    end = start + int.from_bytes(raw[len(MAGIC) : start], "little")
    if end > len(raw):
        raise LedgerError(f"{path}: the header was cut short, nothing of the call is left")
    try:
        return msgspec.json.decode(raw[start:end], type=Header), end
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise LedgerError(f"{path}: the header is damaged: {err}") from None


def tick_records(rows: list[dict[str, Any]]) -> NDArray[np.void]:
    """TICK records from plain values; what is left out is 0. For tests and tools."""
    records = np.zeros(len(rows), TICK)
    records["kind"] = Kind.TICK
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return records
