"""The tensor file: what goes in comes out, safetensors reads the same, and damage is named."""

import json
import struct

import numpy as np
import pytest

from engines import tensor_file
from engines.bundle import ITEMSIZE
from engines.tensor_file import CODE_OF, STORED, Tensor, TensorFileError


def tensors() -> dict[str, Tensor]:
    draw = np.random.default_rng(1)
    return {
        dtype: Tensor(dtype, draw.integers(0, 2, (3, 2)).astype(STORED[dtype])) for dtype in STORED
    } | {"nothing": Tensor("float32", np.zeros((0, 4), np.float32))}


def test_every_dtype_comes_back() -> None:
    raw = b"".join(tensor_file.encode(tensors(), {"a": "b"}))
    found, metadata = tensor_file.decode(memoryview(raw))
    assert metadata == {"a": "b"}
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name].array, tensor.array)
    assert STORED.keys() == ITEMSIZE.keys() == CODE_OF.keys()


def test_it_is_what_safetensors_writes_and_reads() -> None:
    library = pytest.importorskip("safetensors.numpy", reason="needs the export extra")
    plain = {n: t for n, t in tensors().items() if n not in ("bfloat16", "float8e4m3")}
    raw = b"".join(tensor_file.encode(plain, {}))
    for name, array in library.load(raw).items():
        np.testing.assert_array_equal(array, plain[name].array)
    found, _ = tensor_file.decode(memoryview(library.save({n: t.array for n, t in plain.items()})))
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in plain.items()}


def head(**entries: object) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NOTHING = ENTRY | {"data_offsets": [0, 0]}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes are no head"),
        (struct.pack("<Q", 2**60) + b"{}", "does not fit"),
        (struct.pack("<Q", 4) + b"{{}}", "head is damaged"),
        (head(a=ENTRY) + bytes(7), "cut short: a ends at byte 8 of 7"),
        (head(a=ENTRY) + bytes(9), "1 bytes belong to no tensor"),
        (head(a=ENTRY | {"dtype": "F64"}) + bytes(8), "a: dtype F64 is not one of"),
        (head(a=ENTRY | {"shape": [3]}) + bytes(8), "a: bytes 0 to 8 are not its elements"),
        (head(a=ENTRY | {"data_offsets": [4, 12]}) + bytes(12), "bytes 4 to 12 are not"),
        (head(a=ENTRY, b=ENTRY) + bytes(8), "b: bytes 0 to 8 are not"),
        (head(a=ENTRY | {"shape": [-2]}) + bytes(8), "head is damaged"),
        (head(a=ENTRY | {"more": 1}) + bytes(8), "head is damaged"),
        (head(a=ENTRY, __metadata__={"k": 1}) + bytes(8), "head is damaged"),
        (head(a=NOTHING | {"shape": [0, 2**63]}), "a: shape .*Maximum allowed dimension"),
        (head(a=NOTHING | {"shape": [0] * 70}), "a: shape .*dimension"),
        (struct.pack("<Q", 100_005) + b'{"a":' + b"[" * 100_000, "head is damaged: .*recursion"),
    ],
)
def test_damage_is_named(raw: bytes, says: str) -> None:
    with pytest.raises(TensorFileError, match=says):
        tensor_file.decode(memoryview(raw))
