"""Tensors in a file: the safetensors layout, read and written with numpy alone.

    8 bytes    length of the head, little-endian
    head       JSON: name -> dtype, shape, [begin, end) in the data; "__metadata__" -> strings
    data       the tensors, one after the other, nothing between them

Serving reads voices and snapshots, and must not load a library for that, still less one that can
build objects: what comes out of here is arrays of the dtypes a bundle knows, and strings. The data
must be covered exactly, in order, so there is one way to write a file and no place to hide
anything. numpy has no bfloat16 or float8: their bits travel in unsigned integers.

Not here: what the tensors mean, where files lie.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from engines.bundle import ITEMSIZE, Dtype

CODES: dict[str, Dtype] = {
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
"""How safetensors calls the dtypes of a bundle."""

CODE_OF = {dtype: code for code, dtype in CODES.items()}
STORED: dict[Dtype, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float8e4m3": np.dtype("u1"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}

HEAD_LIMIT_BYTES = 1 << 20
"""A head names a few hundred tensors; a longer one is not ours."""


class TensorFileError(ValueError):
    """The bytes are not such a file, or not whole; the message says what is wrong with them."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor: its dtype as a bundle calls it, and its elements as numpy can hold them."""

    dtype: Dtype
    array: NDArray[Any]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a file, piece by piece; tensors lie in the order given."""
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        assert tensor.array.dtype == STORED[tensor.dtype], (name, tensor.array.dtype)
        end = at + tensor.array.nbytes
        head[name] = _Entry(CODE_OF[tensor.dtype], list(tensor.array.shape), (at, end))
        at = end
    raw = msgspec.json.encode(head)
    raw += b" " * (-len(raw) % 8)
    yield memoryview(struct.pack("<Q", len(raw)) + raw)
    for tensor in tensors.values():
        if tensor.array.nbytes:
            yield np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def decode(raw: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (views of ``raw``, read-only if it is) and metadata. Raises `TensorFileError`."""
    if len(raw) < 8:
        raise TensorFileError(f"{len(raw)} bytes are no head")
    (length,) = struct.unpack_from("<Q", raw)
    if not 2 <= length <= min(HEAD_LIMIT_BYTES, len(raw) - 8):
        raise TensorFileError(f"a head of {length} bytes does not fit in {len(raw)}")
    try:
        tree = msgspec.json.decode(raw[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(tree.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in tree.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise TensorFileError(f"the head is damaged: {err}") from None
    data, at = raw[8 + length :], 0
    tensors: dict[str, Tensor] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = CODES.get(entry.dtype)
        if dtype is None:
            raise TensorFileError(f"{name}: dtype {entry.dtype} is not one of {', '.join(CODES)}")
        begin, end = entry.data_offsets
        if begin != at or end - begin != math.prod(entry.shape) * ITEMSIZE[dtype]:
            raise TensorFileError(f"{name}: bytes {begin} to {end} are not its elements")
        if end > len(data):
            raise TensorFileError(f"cut short: {name} ends at byte {end} of {len(data)}")
        try:
            array = np.frombuffer(data[begin:end], STORED[dtype]).reshape(entry.shape)
        except ValueError as err:  # nothing, of more axes or longer ones than numpy can count
            raise TensorFileError(f"{name}: shape {entry.shape[:9]}: {err}") from None
        tensors[name] = Tensor(dtype, array)
        at = end
    if at != len(data):
        raise TensorFileError(f"{len(data) - at} bytes belong to no tensor")
    return tensors, metadata
