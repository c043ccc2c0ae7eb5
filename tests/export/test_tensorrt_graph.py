"""What happens to a graph before the parser sees it: names, weights as inputs, lengths found."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from engines import bundle, plans
from engines.bundle import Bundle
from engines.plans import WeightsForm
from export import tensorrt_graph, to_onnx
from export.tensorrt_graph import LARGE_BYTES, prepare
from tests.small import SMALL


@pytest.fixture(scope="module")
def demo() -> Bundle:
    return bundle.read(SMALL)


@pytest.mark.parametrize("form", ["inputs", "constants"])
def test_a_small_model_keeps_its_weights_inside(demo: Bundle, form: WeightsForm) -> None:
    for stage in demo.manifest.stages:
        if not stage.graph:
            continue
        prepared = prepare(SMALL, stage.graph, form)
        assert prepared.weights == ()
        assert prepared.constant_files
        assert set(prepared.constant_files) <= set(demo.manifest.files)
        assert prepared.constant_bytes <= sum(
            demo.manifest.files[name].bytes for name in prepared.constant_files
        )
        model = onnx.ModelProto.FromString(prepared.model)
        names = [node.name for node in model.graph.node]
        assert names == [node.output[0] for node in model.graph.node]
        assert [i.name for i in model.graph.input] == [spec.name for spec in stage.inputs]


def test_the_lengths_of_one_row_attention_are_found_and_masks_have_none(demo: Bundle) -> None:
    found = {
        stage.name: prepare(SMALL, stage.graph, "inputs")
        for stage in demo.manifest.stages
        if stage.graph
    }
    layers = sum(name.endswith(".k") for name in (r.name for r in demo.manifest.regions)) - 4
    assert len(found["temporal"].lengths) == len(found["temporal"].attentions) == layers == 3
    assert len(found["mimi_encode"].attentions) == 2
    assert found["mimi_encode"].lengths == {}  # two rows a tick: masked by position instead
    assert len(found["depth"].attentions) == 2 * 7  # the first of 8 steps sees itself alone
    assert found["depth"].lengths == {}


def large_and_small(folder: Path) -> None:
    """stages/s.onnx: one weight of exactly 1 MiB and one a row smaller, in one external file."""
    row = 1024
    tall, short = LARGE_BYTES // (4 * row), LARGE_BYTES // (4 * row) - 1
    tensors, offset = [], 4096
    for name, rows in (("short", short), ("tall", tall)):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[rows, row])
        tensor.data_location = TensorProto.EXTERNAL
        length = rows * row * 4
        for key, value in (("location", "weights/a.bin"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        offset += length
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "tall"], ["y"], transB=1),
            helper.make_node("Gemm", ["x", "short"], ["z"], transB=1),
        ],
        "s",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", row])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", None]) for n in "yz"],
        tensors,
    )
    (folder / "stages").mkdir()
    onnx.save(helper.make_model(graph), folder / "stages/s.onnx")


def test_large_weights_become_inputs_that_say_where_their_bytes_lie(tmp_path: Path) -> None:
    large_and_small(tmp_path)
    prepared = prepare(tmp_path, "stages/s.onnx", "inputs")
    (weight,) = prepared.weights
    assert (weight.name, weight.dtype, weight.shape) == ("tall", "float32", (256, 1024))
    assert (weight.file, weight.bytes) == ("stages/weights/a.bin", LARGE_BYTES)
    assert weight.offset_bytes == 4096 + 255 * 4096
    assert prepared.constant_files == ("stages/weights/a.bin",)
    assert prepared.constant_bytes == 255 * 4096
    model = onnx.ModelProto.FromString(prepared.model)
    assert [i.name for i in model.graph.input] == ["x", "tall"]
    assert [i.name for i in model.graph.initializer] == ["short"]


def test_the_constant_form_leaves_every_weight_where_it_is(tmp_path: Path) -> None:
    large_and_small(tmp_path)
    prepared = prepare(tmp_path, "stages/s.onnx", "constants")
    assert prepared.weights == ()
    assert prepared.constant_bytes == LARGE_BYTES + 255 * 4096
    model = onnx.ModelProto.FromString(prepared.model)
    assert [i.name for i in model.graph.initializer] == ["short", "tall"]


def test_what_counts_as_large_lies_on_a_page_of_its_own() -> None:
    """Otherwise a weight bound to the bundle's memory would not be aligned for the GPU."""
    assert LARGE_BYTES >= to_onnx.WIDE_BYTES


def test_every_dtype_of_a_bundle_can_be_a_weight() -> None:
    assert set(tensorrt_graph.DTYPES.values()) == set(bundle.ITEMSIZE)


@pytest.mark.torch
def test_a_prompts_graphs_take_every_weight_from_where_the_tick_does(
    persona_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a box that feeds prompts by plans has the language model once."""
    monkeypatch.setattr(tensorrt_graph, "LARGE_BYTES", 1)
    places: dict[str, set[tuple[str, int, int]]] = {}
    for stage in plans.graph_stages(persona_bundle.manifest):
        weights = prepare(persona_bundle.path, stage.graph, "inputs").weights
        places[stage.name] = {(w.file, w.offset_bytes, w.bytes) for w in weights}
    prompt = places.pop("temporal_prefill"), places.pop("opening")
    assert min(len(found) for found in prompt) > 5
    assert set().union(*prompt) <= set().union(*places.values())
