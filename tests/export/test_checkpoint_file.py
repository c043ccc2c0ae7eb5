"""The safetensors reader: what the library wrote is read, what is damaged is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from export.checkpoint_file import CheckpointError, TensorFile, header_bytes, parse_header, read

pytestmark = pytest.mark.torch

HELD = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.tensor([1.5, -2.0]),
    "c": torch.arange(5, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(7.0),
}
WHOLE = save(HELD, {"format": "pt"})


def refusal(raw: bytes, folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path}", "FILE")


def with_header(entries: Mapping[str, object], data: bytes = b"\0" * 16) -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(first: int, last: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    file = TensorFile(path)
    assert set(file.tensors) == set(HELD)
    assert file.metadata == {"format": "pt"}
    for name, tensor in HELD.items():
        assert file.tensor(name).dtype == tensor.dtype
        assert torch.equal(file.tensor(name), tensor)


def test_a_source_says_where_the_bytes_lie(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    source = TensorFile(path).tensors["b"]
    there = WHOLE[source.offset : source.offset + source.length]
    assert there == HELD["b"].numpy().tobytes()
    assert (source.dtype, source.shape) == ("float32", (2,))


def test_leading_rows_are_a_prefix_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    assert torch.equal(read(TensorFile(path).tensors["a"].leading(1)), HELD["a"][:1])


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    TensorFile(path).tensor("b").zero_()
    assert path.read_bytes() == WHOLE


def test_a_tensor_at_an_odd_place_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {"x": entry(0, 1, [1], "U8"), "y": entry(1, 9, [2])}
    path.write_bytes(with_header(header, b"\7" + HELD["b"].numpy().tobytes()))
    assert torch.equal(TensorFile(path).tensor("y"), HELD["b"])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "FILE is 0 bytes, too short"),
        (WHOLE[:5], "FILE is 5 bytes, too short"),
        (WHOLE[:40], "but has 40 in all: it is cut off"),
        (WHOLE[:-3], "3 are missing"),
        (WHOLE + b"xx", "2 bytes after its last tensor"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1,099,511,627,776 bytes"),
        ((90_000_000).to_bytes(8, "little") + b"{}", "a header of 90,000,000 bytes but has 10"),
        (b"GGUF\3\0\0\0\0\0\0\0", "a GGUF file"),
        (b"PK\x03\x04\0\0\x08\x08archive/data.pkl", "never unpickled"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ((2).to_bytes(8, "little") + b"[]", "a damaged header"),
        ((3).to_bytes(8, "little") + b'{"a', "a damaged header"),
        ((40_000).to_bytes(8, "little") + b'{"a":' + b"[" * 39_995, "a damaged header"),
        (with_header({"a": {"dtype": "F32", "shape": [4]}}), "data_offsets"),
        (with_header({"a": entry(0, 16, [4], "F4_E2M1")}), "which duplexbox does not read"),
        (with_header({"a": entry(0, 16, [5])}), "takes 20 bytes, its offsets say 0 to 16"),
        (with_header({"a": entry(0, 16, [-4])}), "a damaged header"),
        (with_header({"a": entry(-4, 12, [4])}), "a damaged header"),
        (with_header({"a": entry(0, 12, [3]), "b": entry(8, 16, [2])}), "b overlaps a by 4 bytes"),
        (with_header({"a": entry(0, 4, [1]), "b": entry(8, 16, [2])}), "4 bytes between a and b"),
        (with_header({"a": entry(0, 1 << 70, [1 << 68])}), "are missing"),
    ],
)
def test_a_damaged_file_is_refused(raw: bytes, says: str, tmp_path: Path) -> None:
    assert says in refusal(raw, tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TensorFile(tmp_path / "model.safetensors")


def parse(raw: bytes) -> bool:
    """Read a whole file from memory, the way `TensorFile` does; False if it is refused."""
    path = Path("model.safetensors")
    try:
        length = header_bytes(path, raw[:8], len(raw))
        header = parse_header(path, raw[8 : 8 + length], len(raw))
    except CheckpointError:
        return False
    held = sum(source.length for source in header.tensors.values())
    assert 8 + length + held == len(raw)
    return True


@settings(deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_refused(cut: int) -> None:
    assert parse(WHOLE)
    assert not parse(WHOLE[:cut])


@settings(deadline=None)
@given(at=st.integers(0, len(WHOLE) - 1), put=st.binary(min_size=1, max_size=8))
def test_a_corrupted_file_is_refused_or_its_header_still_covers_it(at: int, put: bytes) -> None:
    parse(WHOLE[:at] + put + WHOLE[at + len(put) :])


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=20))
def test_arbitrary_bytes_are_refused_or_are_a_header(noise: bytes, data: bytes) -> None:
    parse(len(noise).to_bytes(8, "little") + noise + data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
almost_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=4), almost_entries | json_values, max_size=3))
def test_a_header_that_is_almost_right_is_refused_or_covers_the_file(
    entries: dict[str, object],
) -> None:
    parse(with_header(entries))
