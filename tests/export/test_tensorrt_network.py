"""The network is held to the bundle: each check is shown a network that breaks it."""

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from onnx import helper

from engines import bundle, plans
from engines.bundle import Dtype, StageSpec, TensorSpec
from export import tensorrt_network as network
from export.tensorrt_graph import DTYPES, prepare
from export.tensorrt_network import Log, NetworkDiffers, NotBuilt, NotParsed, Wanted
from tests.small import SMALL

trt = pytest.importorskip("tensorrt_rtx")

ONNX_DTYPES = {name: number for number, name in DTYPES.items()}


def wanted_of(name: str) -> Wanted:
    manifest = bundle.read(SMALL, hashes=False).manifest
    stage = next(stage for stage in manifest.stages if stage.name == name)
    rings = {region.name for region in manifest.regions if region.in_place}
    return Wanted(
        SMALL,
        stage,
        frozenset(rings & {spec.name for spec in stage.inputs}),
        prepare(SMALL, stage.graph, "inputs"),
        plans.exact(3),
        "8.9",
    )


class Bench:
    """A parsed stage with its settings; keeps alive what TensorRT only borrows."""

    def __init__(self, wanted: Wanted, restore: bool = True) -> None:
        self.wanted, self.log = wanted, Log(trt)
        with network.nothing_collected():
            self.builder = trt.Builder(self.log.sink)
            self.network = network.parse(trt, self.builder, self.log, wanted)
            if restore:
                found = network.attentions_of(trt, self.network)
                network.restore_lengths(trt, self.network, found, wanted.prepared)
            self.settings = network.configure(trt, self.builder, self.network, wanted)

    def faults(self, **change: Any) -> list[str]:
        wanted = replace(self.wanted, **change)
        return list(network.network_faults(trt, self.network, self.settings, wanted))


@pytest.fixture(scope="module")
def temporal() -> Bench:
    return Bench(wanted_of("temporal"))


@pytest.mark.parametrize("name", ["mimi_encode", "temporal", "depth", "mimi_decode"])
def test_every_stage_gives_the_network_the_bundle_describes(name: str) -> None:
    assert Bench(wanted_of(name)).faults() == []


def test_the_parser_drops_the_lengths_and_the_check_sees_it() -> None:
    """When this fails because nothing is dropped any more, the remedy can go."""
    parsed = Bench(wanted_of("temporal"), restore=False)
    assert parsed.faults() == [
        f"attention attention_{n} does not read its valid lengths from min_1" for n in (1, 2, 3)
    ]


def test_lengths_from_another_tensor_are_no_lengths(temporal: Bench) -> None:
    lengths = dict.fromkeys(temporal.wanted.prepared.lengths, "lm.offset")
    prepared = replace(temporal.wanted.prepared, lengths=lengths)
    assert len(temporal.faults(prepared=prepared)) == 3


def test_an_attention_that_is_not_in_the_network_is_missed(temporal: Bench) -> None:
    prepared = replace(
        temporal.wanted.prepared, attentions=temporal.wanted.prepared.attentions | {"attention_9"}
    )
    assert temporal.faults(prepared=prepared) == ["3 attentions instead of 4"]


def with_stage(temporal: Bench, side: str, index: int, **change: Any) -> list[str]:
    tensors = list(getattr(temporal.wanted.stage, side))
    tensors[index] = msgspec.structs.replace(tensors[index], **change)
    stage = msgspec.structs.replace(temporal.wanted.stage, **{side: tuple(tensors)})
    return temporal.faults(stage=stage)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_names_dtypes_and_shapes_are_compared(temporal: Bench, side: str) -> None:
    (fault,) = with_stage(temporal, side, 1, name="nobody")
    assert "['nobody'] unknown" not in fault
    assert "['nobody'] missing" in fault
    (fault,) = with_stage(temporal, side, 0, dtype="float16")
    assert "should be float16" in fault
    (fault,) = with_stage(temporal, side, 0, shape=("B", 5))
    assert "should have (-1, 5)" in fault


def test_the_order_of_inputs_is_compared(temporal: Bench) -> None:
    first, second, *rest = temporal.wanted.stage.inputs
    stage = msgspec.structs.replace(temporal.wanted.stage, inputs=(second, first, *rest))
    (fault,) = temporal.faults(stage=stage)
    assert "their order changed" in fault


def test_profiles_are_compared_size_by_size(temporal: Bench) -> None:
    assert temporal.faults(profiles=plans.exact(4)) == ["3 profiles instead of 4"]
    two = plans.Profile(2, 2, 3)
    faults = temporal.faults(profiles=(*plans.exact(1), two, plans.exact(3)[2]))
    assert len(faults) == len(temporal.wanted.stage.inputs)
    assert all(re.search(r"should be \[\(2,.*\(2,.*\(3,", fault) for fault in faults)


def test_rings_in_place_are_those_of_the_bundle(temporal: Bench) -> None:
    assert len(temporal.wanted.rings) == 6
    (fault,) = temporal.faults(rings=temporal.wanted.rings | {"lm.tokens"})
    assert "should update ['lm.tokens', 'temporal.layers.0.k'" in fault


def test_tf32_left_on_is_a_fault() -> None:
    parsed = Bench(wanted_of("mimi_encode"))
    parsed.settings.config.set_flag(trt.BuilderFlag.TF32)
    assert parsed.faults() == ["TF32 is on"]


def graph(folder: Path, nodes: list[onnx.NodeProto], stage: StageSpec) -> Wanted:
    """A stage of one's own: ``nodes`` from its inputs to its outputs."""

    def described(specs: tuple[TensorSpec, ...]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(spec.name, ONNX_DTYPES[spec.dtype], list(spec.shape))
            for spec in specs
        ]

    made = helper.make_graph(nodes, stage.name, described(stage.inputs), described(stage.outputs))
    (folder / "stages").mkdir()
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, folder / stage.graph)
    prepared = prepare(folder, stage.graph, "inputs")
    return Wanted(folder, stage, frozenset(), prepared, plans.exact(2), "8.9")


def test_an_operator_the_parser_lacks_is_named_with_its_node(tmp_path: Path) -> None:
    spec = TensorSpec("x", "float32", ("B", 3, 3))
    stage = StageSpec(
        "odd", (spec,), (TensorSpec("y", "float32", ("B",)),), graph="stages/odd.onnx"
    )
    wanted = graph(tmp_path, [helper.make_node("Det", ["x"], ["y"])], stage)
    with pytest.raises(NotParsed) as caught:
        network.build(trt, wanted, lambda *_: None)
    said = str(caught.value)
    assert "stage odd: tensorrt_rtx 1.7.1.116 cannot parse Det (node y)" in said
    assert "export/lowering.py" in said


def attend(folder: Path, head: int, dtype: Dtype) -> Wanted:
    """Two query rows of 2 heads of ``head`` over 40 keys, masked like the codec's."""
    wide = 2 * head
    shapes = {"q": 2, "k": 40, "v": 40}
    inputs = (
        *(TensorSpec(name, dtype, ("B", rows, wide)) for name, rows in shapes.items()),
        TensorSpec("mask", "bool", ("B", 1, 2, 40)),
    )
    outputs = (TensorSpec("y", dtype, ("B", 2, wide)),)
    stage = StageSpec("attend", inputs, outputs, graph="stages/attend.onnx")
    names = [spec.name for spec in inputs]
    return graph(
        folder,
        [helper.make_node("Attention", names, ["y"], q_num_heads=2, kv_num_heads=2)],
        stage,
    )


@pytest.mark.parametrize(
    ("head", "dtype", "attention"),
    [
        (64, "bfloat16", "strict"),
        (64, "float16", "strict"),
        (64, "float32", "decomposable"),
        # Nothing fused takes this head: the build is repeated, and the plan says so.
        (7, "float16", "decomposable"),
    ],
)
def test_attention_may_be_decomposed_only_where_it_must(
    tmp_path: Path, head: int, dtype: Dtype, attention: str
) -> None:
    seen: list[tuple[str, int, int]] = []
    built = network.build(trt, attend(tmp_path, head, dtype), lambda *now: seen.append(now))
    assert built.attention == attention
    assert built.plan.nbytes > 1000
    assert ("Building engine", 0, 6) in seen
    assert all(0 <= step <= max(steps, step) for _, step, steps in seen)


@pytest.mark.parametrize(
    ("heads", "head", "smallest", "words"),
    [
        (2, 8, 1, "attention of 2 heads for 1 session"),
        (1, 8, 3, "attention of 1 head for 3 sessions"),
        (4, 12, 1, "attention of heads of 12"),
        (2, 8, 2, ""),
        (4, 8, 1, ""),
    ],
)
def test_attention_too_narrow_for_any_kernel_is_refused_with_what_would_do(
    tmp_path: Path, heads: int, head: int, smallest: int, words: str
) -> None:
    """One query a session over 8 keys, as the depth transformer's. Fails here on the day that
    another TensorRT builds them: then the sentence can go."""
    wide = heads * head
    inputs = tuple(
        TensorSpec(name, "float32", ("B", rows, wide))
        for name, rows in {"q": 1, "k": 8, "v": 8}.items()
    )
    outputs = (TensorSpec("y", "float32", ("B", 1, wide)),)
    stage = StageSpec("attend", inputs, outputs, graph="stages/attend.onnx")
    node = helper.make_node(
        "Attention", ["q", "k", "v"], ["y"], q_num_heads=heads, kv_num_heads=heads
    )
    only = (plans.Profile(smallest, smallest, smallest),)
    wanted = replace(graph(tmp_path, [node], stage), profiles=only)
    if not words:
        assert network.build(trt, wanted, lambda *_: None).plan.nbytes > 1000
        return
    with pytest.raises(NotBuilt) as caught:
        network.build(trt, wanted, lambda *_: None)
    assert words in str(caught.value)
    assert "4 heads or more, each a multiple of 8 wide" in str(caught.value)


def test_a_compute_capability_the_builder_lacks_is_refused(tmp_path: Path) -> None:
    wanted = replace(attend(tmp_path, 64, "float32"), compute_capability="9.0")
    with pytest.raises(NotBuilt, match=r"has no compute capability 9\.0.*--target list"):
        network.build(trt, wanted, lambda *_: None)


def test_a_network_that_differs_is_not_built(tmp_path: Path) -> None:
    wanted = attend(tmp_path, 64, "float32")
    stage = msgspec.structs.replace(wanted.stage, outputs=(TensorSpec("z", "float32", ("B", 2)),))
    with pytest.raises(NetworkDiffers, match=r"stage attend: .*\['z'\] missing, \['y'\] unknown"):
        network.build(trt, replace(wanted, stage=stage), lambda *_: None)


def test_no_dead_builder_is_found_while_another_is_made() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    dead = weakref.ref(Cycle())
    with pytest.raises(KeyError), network.nothing_collected():  # noqa: PT012 - what holds inside
        assert dead() is None
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
