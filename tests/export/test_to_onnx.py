"""Writing one graph: what cannot be written says so, and precision is kept where it must be."""

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from export import tiny
from export.models.lm import LanguageModel
from export.models.streaming import State
from export.stages import StageGraph, graphs_of, tensor
from export.tiny import MICRO
from export.to_onnx import NotLowered, Weights, raw_bytes, write_graph

pytestmark = pytest.mark.torch


class Small(StageGraph):
    """y = f(x @ w): a stage for one question."""

    def __init__(self) -> None:
        super().__init__("small", [tensor("x", "float32", 4)], [tensor("y", "float32", 4)])
        self.wide = torch.nn.Parameter(torch.arange(4096.0).reshape(1024, 4))

    def run(self, named: State) -> State:
        return {"y": self.answer(named["x"])}

    def answer(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class Sliced(Small):
    def answer(self, x: Tensor) -> Tensor:
        rows = self.wide.narrow(0, 256, 128)
        scale = self.wide.narrow(0, 8, 1).view(-1) * 2
        return x * rows.sum(0) + scale


def test_an_operator_without_a_lowering_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotLowered, match=r"stage small uses aten\.erf\.default"):
        write_graph(Small(), Weights(tmp_path))


def test_what_depends_on_no_input_is_worked_out_and_not_in_the_graph(tmp_path: Path) -> None:
    weights = Weights(tmp_path)
    path = write_graph(Sliced(), weights)
    weights.write()
    model = onnx.load(path)
    assert [node.op_type for node in model.graph.node] == ["Mul", "Add"]
    values = [onnx.numpy_helper.to_array(x).tolist() for x in model.graph.initializer]
    wide = torch.arange(4096.0).reshape(1024, 4)
    assert values == [wide[256:384].sum(0).tolist(), (2 * wide[8]).tolist()]


def test_wide_weights_start_on_a_page_and_lie_where_they_are_said_to(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    tensors = {f"part.{i}": torch.randn(n, generator=draw) for i, n in enumerate((300, 1 << 18, 7))}
    weights = Weights(tmp_path)
    places = {name: weights.place(name, x) for name, x in tensors.items()}
    assert weights.place("part.0", tensors["part.0"]) is places["part.0"]
    weights.write()
    raw = (tmp_path / "weights/part.bin").read_bytes()
    assert weights.files == {"weights/part.bin": len(raw)}
    for name, placed in places.items():
        assert placed.file == "weights/part.bin"
        assert raw[placed.offset : placed.offset + placed.length] == raw_bytes(tensors[name])
        assert placed.offset % 64 == 0
    assert places["part.1"].offset % 4096 == 0


def test_a_large_model_has_several_files_of_weights_and_no_weight_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.to_onnx.FILE_BYTES", 4096)
    tensors = {f"part.{i}": torch.full((n,), float(i)) for i, n in enumerate((700, 300, 900, 2000))}
    weights = Weights(tmp_path)
    places = {name: weights.place(name, x) for name, x in tensors.items()}
    weights.write()
    assert [placed.file for placed in places.values()] == [
        "weights/part.bin",
        "weights/part.bin",
        "weights/part.1.bin",
        "weights/part.2.bin",
    ]
    for name, placed in places.items():
        raw = (tmp_path / placed.file).read_bytes()
        assert raw[placed.offset : placed.offset + placed.length] == raw_bytes(tensors[name])


def test_a_bfloat16_language_model_keeps_norms_and_angles_in_float32(tmp_path: Path) -> None:
    mimi, wide = tiny.seeded(MICRO, 1)
    lm = LanguageModel(MICRO.lm, ring_dtype="bfloat16")
    lm.load_state_dict(wide.state_dict())
    lm.to(torch.bfloat16)
    _, temporal, _, _ = graphs_of(MICRO, mimi, lm, hidden="bfloat16")
    weights = Weights(tmp_path)
    path = write_graph(temporal, weights)
    weights.write()
    onnx.checker.check_model(str(path), full_check=True)  # a mixed-up dtype fails here
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    dtypes = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    found = {
        (node.op_type, dtypes[node.output[0]])
        for node in model.graph.node
        if node.op_type in ("RMSNormalization", "RotaryEmbedding", "Cos", "Gemm", "Attention")
    }
    wide_ops = {("RMSNormalization", 1), ("RotaryEmbedding", 1), ("Cos", 1)}
    assert found == wide_ops | {("Gemm", 16), ("Attention", 16)}
    rings = Counter(x.type.tensor_type.elem_type for x in model.graph.input if ".layers." in x.name)
    assert rings == {16: 2 * MICRO.lm.layers}
