"""The state of a session outside its slot: what it is made of, and as a file.

Two kinds. A *prompt's* snapshot is the rings after all rows of a prompt but the last: the same for
every session that begins with it, so it is computed once and kept. A *session's* is everything,
taken between two ticks; restored into any slot of any box with the same bundle, the call goes on
bit for bit. How many rows of a ring are worth keeping follows from its native clock and the
session's age; rows beyond are empty and not stored.

    "dbxsnap" 1    8 bytes
    sha256         32 bytes, over all that follows
    tensors        `tensor_file`; metadata says of which bundle, prompt and age

A snapshot is foreign unless bundle, prompt, age and every tensor's shape are exactly what is
expected: refused with a reason, never repaired. Not here: where files lie and which are kept (the
appliance), moving rows in and out of slots in time (ditto; `pieces` says in which portions).
"""

import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines import tensor_file
from engines.bundle import Dtype, Manifest, RegionSpec, identity
from engines.clocks import ClockKind
from engines.prefill import Parking, Prompt
from engines.tensor_file import STORED, Tensor, TensorFileError

MAGIC = b"dbxsnap\x01"
"""The last byte is the format's version."""
SUFFIX = ".snap"
PART = ".part"
DIGEST_BYTES = 32
FED = "fed"
"""Metadata that a reader cannot know before: see `Snapshot.fed`."""
NONE = ""
"""Key of a session that began without a prompt."""


class SnapshotError(ValueError):
    """The file is not the snapshot that was asked for: damaged, or of something else."""


@dataclass(frozen=True, slots=True)
class Age:
    """How far a session has come: rows of its prompt that were fed, and ticks since."""

    prompt_key: str
    prompt_rows: int
    ticks: int
    whole: bool
    """All regions, to go on from; False: only the rings a prompt fills, with no tick yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Regions of one session by name: the valid rows of in-place rings, all of the others."""

    age: Age
    rings: dict[str, NDArray[Any]]
    values: dict[str, NDArray[Any]]
    fed: tuple[int, ...] = ()
    """A prompt's: how many of its rows were fed at once, in order, since bits depend on it."""

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (*self.rings.values(), *self.values.values()))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one ring, as much as is moved at once."""

    region: str
    first: int
    rows: int


def prompt_age(prompt: Prompt) -> Age:
    """The age at which every session with ``prompt`` is the same."""
    return Age(prompt.key, prompt.shared_rows, 0, whole=False)


def contents(manifest: Manifest, age: Age) -> dict[str, tuple[RegionSpec, tuple[int, ...]]]:
    """What a snapshot of a session of ``age`` holds: region and the shape that is kept of it."""
    prompted = set()
    if manifest.prompt is not None:
        prompted = {tensor.name for tensor in manifest.prompt.prefill.inputs}
    found = {}
    for region in manifest.regions:
        if not age.whole and region.name not in prompted:
            continue
        ticks = age.ticks + (age.prompt_rows if region.name in prompted else 0)
        shape, axis = list(region.shape), region.clock.axis
        if region.in_place:
            shape[axis] = region.clock.valid_rows(ticks)
        if region.clock.kind is not ClockKind.SCRATCH:
            found[region.name] = (region, tuple(shape))
    return found


def pieces(manifest: Manifest, age: Age, piece_bytes: int) -> Iterator[Piece]:
    """The rings of such a snapshot in portions of about ``piece_bytes``, at least a row each."""
    for name, (region, shape) in contents(manifest, age).items():
        if not region.in_place:
            continue
        rows = shape[region.clock.axis]
        row_bytes = region.whole_bytes // region.clock.retain
        step = max(1, piece_bytes // row_bytes)
        for first in range(0, rows, step):
            yield Piece(name, first, min(step, rows - first))


def empty_snapshot(manifest: Manifest, age: Age, fed: tuple[int, ...] = ()) -> Snapshot:
    """Room for a snapshot; rings and values are to be filled in. fed: see `Snapshot.fed`."""
    rings: dict[str, NDArray[Any]] = {}
    values: dict[str, NDArray[Any]] = {}
    for name, (region, shape) in contents(manifest, age).items():
        (rings if region.in_place else values)[name] = np.empty(shape, STORED[region.dtype])
    return Snapshot(age, rings, values, fed)


def take_piece(
    parking: Parking, slot: int, region: RegionSpec, snapshot: Snapshot, piece: Piece
) -> None:
    """Copy one piece from a slot into the snapshot."""
    rows = parking.read(slot, piece.region, piece.first, piece.rows)
    snapshot.rings[piece.region][span(region, piece)] = rows


def put_piece(
    parking: Parking, slot: int, region: RegionSpec, snapshot: Snapshot, piece: Piece
) -> None:
    """Copy one piece from the snapshot into a slot that was cleared."""
    parking.write(
        slot, piece.region, piece.first, snapshot.rings[piece.region][span(region, piece)]
    )


def save(
    parking: Parking, manifest: Manifest, slot: int, age: Age, fed: tuple[int, ...] = ()
) -> Snapshot:
    """All of it at once, between two ticks. fed: see `Snapshot.fed`."""
    snapshot = empty_snapshot(manifest, age, fed)
    for piece in pieces(manifest, age, 1 << 62):
        take_piece(parking, slot, manifest.region(piece.region), snapshot, piece)
    for name in snapshot.values:
        snapshot.values[name][...] = parking.read(slot, name)
    return snapshot


def restore(parking: Parking, manifest: Manifest, snapshot: Snapshot, slot: int) -> None:
    """Make ``slot`` the session of a whole ``snapshot``: the next tick that steps it goes on."""
    assert snapshot.age.whole, snapshot.age
    parking.clear(slot)
    for piece in pieces(manifest, snapshot.age, 1 << 62):
        put_piece(parking, slot, manifest.region(piece.region), snapshot, piece)
    parking.settle(slot, slot, {}, snapshot.values)


def span(region: RegionSpec, piece: Piece) -> tuple[slice, ...]:
    """Where a piece lies in a region's rows."""
    whole = (slice(None),) * region.clock.axis
    return (*whole, slice(piece.first, piece.first + piece.rows))


def file_name(manifest: Manifest, age: Age) -> str:
    """What a snapshot's file is called: a hash over all that it depends on."""
    return hashlib.sha256(repr(sorted(_metadata(manifest, age).items())).encode()).hexdigest()[
        :40
    ] + (SUFFIX)


def write(path: Path, manifest: Manifest, snapshot: Snapshot) -> None:
    """Write ``path`` whole or not at all, readable to this user alone. Raises OSError."""
    dtypes = {region.name: region.dtype for region in manifest.regions}
    tensors = {
        name: Tensor(dtypes[name], array)
        for name, array in (*snapshot.rings.items(), *snapshot.values.items())
    }
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    digest = hashlib.sha256()
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed: it is ours
            file.write(MAGIC + bytes(DIGEST_BYTES))
            metadata = _metadata(manifest, snapshot.age) | {FED: ",".join(map(str, snapshot.fed))}
            for chunk in tensor_file.encode(tensors, metadata):
                digest.update(chunk)
                file.write(chunk)
            file.seek(len(MAGIC))
            file.write(digest.digest())
            file.flush()
            part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def remove_abandoned(folder: Path) -> None:
    """Remove what a process that was killed left half written; another's work is locked."""
    for part in folder.glob(f"*{SUFFIX}.*{PART}"):
        try:
            with part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink(missing_ok=True)
        except OSError:
            continue  # locked, gone, or not ours to read


def read(path: Path, manifest: Manifest, age: Age) -> Snapshot:
    """The snapshot of ``age`` in ``path``. Raises `SnapshotError`, FileNotFoundError, OSError."""
    wanted = contents(manifest, age)
    most = tensor_file.HEAD_LIMIT_BYTES + sum(
        int(np.prod(shape)) * region.itemsize for region, shape in wanted.values()
    )
    found_there = path.stat()
    if not stat.S_ISREG(found_there.st_mode):
        raise SnapshotError("it is no file")  # a pipe would make the box wait for its writer
    size = found_there.st_size
    if size > most:
        raise SnapshotError(f"{size} bytes, and what is wanted has at most {most}")
    raw = memoryview(path.read_bytes())
    head = len(MAGIC) + DIGEST_BYTES
    if raw[: len(MAGIC)] != MAGIC:
        raise SnapshotError("it does not begin like a snapshot of this version")
    if hashlib.sha256(raw[head:]).digest() != raw[len(MAGIC) : head]:
        raise SnapshotError(f"its sha256 is not the one it carries ({size} bytes)")
    try:
        tensors, metadata = tensor_file.decode(raw[head:])
    except TensorFileError as err:
        raise SnapshotError(str(err)) from None
    for key, value in _metadata(manifest, age).items():
        if metadata.get(key) != value:
            raise SnapshotError(f"its {key} is {metadata.get(key)!r}, and {value!r} is wanted")
    found = {name: (t.dtype, t.array.shape) for name, t in tensors.items()}
    expected: dict[str, tuple[Dtype, tuple[int, ...]]] = {
        name: (region.dtype, shape) for name, (region, shape) in wanted.items()
    }
    if found != expected:
        odd = sorted(n for n in found.keys() | expected if found.get(n) != expected.get(n))
        raise SnapshotError(
            f"{odd[0]} is {found.get(odd[0])}, and {expected.get(odd[0])} is wanted"
        )
    arrays: Mapping[str, NDArray[Any]] = {name: t.array for name, t in tensors.items()}
    return Snapshot(
        age,
        {name: a for name, a in arrays.items() if wanted[name][0].in_place},
        {name: a for name, a in arrays.items() if not wanted[name][0].in_place},
        _fed(metadata.get(FED, ""), age),
    )


def _fed(text: str, age: Age) -> tuple[int, ...]:
    """Raises `SnapshotError` when a prompt's rows are not accounted for."""
    words = text.split(",") if text else []
    rows = [int(word) if word.isdecimal() and len(word) < 10 else 0 for word in words]
    if 0 in rows or (rows and sum(rows) != age.prompt_rows) or (not rows and not age.whole):
        raise SnapshotError(f"it does not say how its {age.prompt_rows} rows were fed")
    return tuple(rows)


def _metadata(manifest: Manifest, age: Age) -> dict[str, str]:
    return {
        "bundle": identity(manifest),
        "prompt": age.prompt_key,
        "prompt_rows": str(age.prompt_rows),
        "ticks": str(age.ticks),
        "whole": str(age.whole),
    }
