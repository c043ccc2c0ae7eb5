"""One safetensors file: its header, checked, and its tensors, mapped one at a time.

A safetensors file is eight bytes of header length, a JSON header (name -> dtype, shape, first and
last byte), then the tensors back to back. Whoever downloads 15 GB sooner or later has a file
that stops early, so everything the header promises is checked against the file's size before
anything is read: lengths follow from shapes, and the tensors cover the data exactly once.

`parse_header` is pure; `TensorFile` is the shell around it. Nothing is unpickled, and no more of
a file is in memory than the tensors somebody holds.

Not here: which tensors a model wants (`checkpoint_layout`), which file to open (`checkpoint`).
"""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engines.bundle import ITEMSIZE, Dtype
from export.mistake import Mistake

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: dict[str, Dtype] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8e4m3",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The format's spelling -> the bundle's; the format has a few more, which no checkpoint uses."""

LENGTH_BYTES = 8
LARGEST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

AGAIN = "Download it again."

MAGIC = {
    b"GGUF": "a GGUF file; duplexbox reads the published PyTorch weights (safetensors)",
    b"PK\x03\x04": "a zip, most likely a torch pickle, which is never unpickled; "
    "use the safetensors file of the same checkpoint",
    b"version https://git-lfs": "a Git LFS pointer, not the weights; fetch them: git lfs pull",
}
"""First bytes of what people mistake for safetensors."""


class CheckpointError(Mistake):
    """A checkpoint that cannot be exported: the operator has the wrong, or a damaged, one."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor, or some of its leading rows, lies: what ONNX external data points at."""

    file: Path
    offset: int
    """From the start of the file, in bytes."""
    length: int
    """In bytes."""
    dtype: Dtype
    shape: tuple[int, ...]

    def leading(self, rows: int) -> "Source":
        """The first ``rows`` of it, which lie first in the file too."""
        assert 0 < rows <= self.shape[0], (rows, self.shape)
        length = self.length // self.shape[0] * rows
        return Source(self.file, self.offset, length, self.dtype, (rows, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds, in the order in which it lies there."""

    tensors: dict[str, Source]
    metadata: dict[str, str]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """A safetensors file on disk. Opening it reads the header only."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the file is not whole, well-formed safetensors."""
        self.path = path
        try:
            self.bytes = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(LENGTH_BYTES)
                self.header_bytes = header_bytes(path, start, self.bytes)
                self.raw_header = file.read(self.header_bytes)
        except OSError as err:
            raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from None
        header = parse_header(path, self.raw_header, self.bytes)
        self.tensors, self.metadata = header.tensors, header.metadata

    def tensor(self, name: str) -> "Tensor":
        """The tensor, mapped from the file: bytes come into memory when they are used.

        Writing to it changes a private copy, never the file.
        """
        return read(self.tensors[name])


def read(source: Source) -> "Tensor":
    """Map what ``source`` describes; the mapping lives as long as the tensor."""
    import torch

    dtype = {"float8e4m3": torch.float8_e4m3fn}.get(source.dtype) or getattr(torch, source.dtype)
    if not source.length:
        return torch.empty(source.shape, dtype=dtype)
    # A mapping per tensor: one of the whole file, private and writable as torch wants it, would
    # be refused on a machine with less memory than the file has bytes.
    start = source.offset - source.offset % mmap.ALLOCATIONGRANULARITY
    inside = source.offset - start
    with source.file.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), inside + source.length, access=mmap.ACCESS_COPY, offset=start
        )
    if source.offset % ITEMSIZE[source.dtype]:
        whole: Tensor = torch.frombuffer(bytearray(mapped[inside:]), dtype=dtype)
    else:
        whole = torch.frombuffer(mapped, dtype=dtype, offset=inside)
    return whole.view(source.shape)


def header_bytes(path: Path, start: bytes, file_bytes: int) -> int:
    """Length of the JSON header, from the first eight bytes of the file."""
    if len(start) < LENGTH_BYTES:
        raise CheckpointError(
            f"{path} is {file_bytes} bytes, too short to be a safetensors file. {AGAIN}"
        )
    for magic, what in MAGIC.items():
        if magic.startswith(start[: len(magic)]):
            raise CheckpointError(f"{path} is {what}.")
    length = int.from_bytes(start, "little")
    if length > LARGEST_HEADER_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {length:,} bytes; safetensors allows "
            f"{LARGEST_HEADER_BYTES:,}, so it is damaged or something else. {AGAIN}"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {length:,} bytes but has {file_bytes:,} in all: it is "
            f"cut off. {AGAIN}"
        )
    return length


def parse_header(path: Path, raw: bytes, file_bytes: int) -> Header:
    """Decode and check a header. Pure; ``path`` is only for messages and sources.

    raw: the JSON bytes; file_bytes: size of the whole file. Raises CheckpointError.
    """
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        about = entries.pop("__metadata__", None)
        metadata = msgspec.json.decode(about, type=dict[str, str]) if about is not None else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise CheckpointError(f"{path} has a damaged header ({err}). {AGAIN}") from None
    begin = LENGTH_BYTES + len(raw)
    tensors = {name: _source(path, name, entry, begin) for name, entry in entries.items()}
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length))
    _check_cover(path, in_order, begin, file_bytes)
    return Header(dict(in_order), metadata)


def _source(path: Path, name: str, raw: msgspec.Raw, begin: int) -> Source:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise CheckpointError(f"{path} has a damaged header: {name}: {err}. {AGAIN}") from None
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {entry.dtype}, which duplexbox does not read. "
            "Use the published bf16 checkpoint."
        )
    dtype = DTYPES[entry.dtype]
    first, last = entry.data_offsets
    expected = math.prod(entry.shape) * ITEMSIZE[dtype]
    if min(entry.shape, default=0) < 0 or first < 0 or last - first != expected:
        raise CheckpointError(
            f"{path} has a damaged header: {name} {list(entry.shape)} of {entry.dtype} takes "
            f"{expected:,} bytes, its offsets say {first:,} to {last:,}. {AGAIN}"
        )
    return Source(path, begin + first, expected, dtype, entry.shape)


def _check_cover(
    path: Path, in_order: list[tuple[str, Source]], begin: int, file_bytes: int
) -> None:
    """Every byte of the data belongs to exactly one tensor, as the format demands."""
    end, before = begin, "the header"
    for name, source in in_order:
        if source.offset < end:
            raise CheckpointError(
                f"{path} has a damaged header: {name} overlaps {before} by "
                f"{end - source.offset:,} bytes. {AGAIN}"
            )
        if source.offset > end:
            raise CheckpointError(
                f"{path} has a damaged header: {source.offset - end:,} bytes between {before} and "
                f"{name} belong to no tensor. {AGAIN}"
            )
        end, before = end + source.length, name
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is cut off: {file_bytes:,} bytes of {end:,}, {end - file_bytes:,} are "
            f"missing. {AGAIN}"
        )
    if end < file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes - end:,} bytes after its last tensor: it is damaged. {AGAIN}"
        )
