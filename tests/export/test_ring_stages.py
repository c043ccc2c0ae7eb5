"""A bundle cut at attention is the same model: on the CPU, in `verify`, and in what it refuses."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from engines.bundle import Bundle, Manifest
from engines.bundle_faults import faults
from engines.ort_executor import OrtExecutor
from export import build, tiny, verify
from export.ring_stages import CannotCut
from export.source import from_seed
from export.stages import graphs_of
from export.tiny import MICRO
from export.to_onnx import Weights, graph_bytes
from export.traces import Traces
from tests.export.calls import GREEDY, SEED, heard_among, speech

pytestmark = pytest.mark.torch

TICKS = 75
JOINS = {0: 0, 5: 1, 11: 2}
SAMPLES = MICRO.mimi.samples_per_frame
LAYERS = MICRO.lm.layers + 2 * MICRO.mimi.layers


def _depth_weights(made: Bundle) -> dict[str, bytes]:
    """By role, as its kernel reads them."""
    (kernel,) = (s.kernel for s in made.manifest.stages if s.name == "depth")
    assert kernel is not None
    return {
        role: made.file(weight.file).read_bytes()[weight.offset :][: weight.nbytes]
        for role, weight in kernel.weights.items()
    }


def test_every_attention_is_a_stage_of_its_own_and_layers_alike_share_a_twin(
    micro_bundle: Bundle, ring_bundle: Bundle
) -> None:
    stages = ring_bundle.manifest.stages
    rings = [stage for stage in stages if stage.ring is not None]
    assert len(rings) == LAYERS
    assert len({stage.ring.twin for stage in rings if stage.ring}) == 2
    names = [stage.name for stage in stages if stage.name.startswith("temporal")]
    assert names == [
        "temporal_00",
        "temporal_00_attention",
        "temporal_01",
        "temporal_01_attention",
        "temporal_02",
    ]
    whole, cut = (
        {name: spec for name, spec in made.manifest.files.items() if "weights/" in name}
        for made in (micro_bundle, ring_bundle)
    )
    lm = "stages/weights/lm.bin"
    assert {n: f for n, f in whole.items() if n != lm} == {n: f for n, f in cut.items() if n != lm}
    # The kernels of its pieces read norms, which graphs have inline, and nothing else beside.
    norms = (2 * MICRO.lm.layers + 1) * MICRO.lm.dimension * 4
    assert cut[lm].bytes - whole[lm].bytes == norms
    assert _depth_weights(micro_bundle) == _depth_weights(ring_bundle)
    in_place = {region.name for region in ring_bundle.manifest.regions if region.in_place}
    assert {tensor.name for stage in rings for tensor in stage.inputs[2:]} == in_place
    for stage in stages:
        if stage.graph:
            model = onnx.load(ring_bundle.file(stage.graph), load_external_data=False)
            written = {node.op_type for node in model.graph.node}
            assert "TensorScatter" not in written, stage.name
            assert ("Attention" in written) == (stage.name == "depth"), stage.name


def test_a_cut_model_says_what_the_whole_one_says_through_many_wraps(
    micro_bundle: Bundle, ring_bundle: Bundle
) -> None:
    whole, cut = OrtExecutor(micro_bundle, 3), OrtExecutor(ring_bundle, 3)
    pcm = speech(5, TICKS, 3, SAMPLES).numpy()
    youngest = TICKS - max(JOINS)
    assert youngest > 3 * MICRO.lm.context
    assert 2 * youngest > 3 * MICRO.mimi.context
    batch, furthest, words = 0, 0.0, set()
    for tick in range(TICKS):
        for executor in (whole, cut):
            if tick in JOINS:
                executor.join(JOINS[tick], GREEDY)
                batch = JOINS[tick] + 1
            executor.audio_in[:batch] = pcm[tick, :batch]
            executor.step(batch)
        for name in ("user_codes", "codes", "valid", "text"):
            ours, theirs = cut.wire(name)[:batch], whole.wire(name)[:batch]
            np.testing.assert_array_equal(ours, theirs, f"{name} at {tick}")
        away = np.abs(cut.audio_out[:batch] - whole.audio_out[:batch])
        furthest = max(furthest, float(away.max()))
        words |= set(cut.text[:batch].tolist())
    assert furthest < 1e-4
    assert len(words) > MICRO.lm.text_card // 3


def test_who_joins_and_leaves_changes_no_bit_of_the_others(ring_bundle: Bundle) -> None:
    pcm = speech(6, 50, 3, SAMPLES).numpy()
    alone = heard_among(ring_bundle, pcm, neighbours=False)
    assert heard_among(ring_bundle, pcm, neighbours=True) == alone
    assert len(set(alone)) == len(alone)


def test_rings_stay_where_they_are(ring_bundle: Bundle) -> None:
    executor = OrtExecutor(ring_bundle, 2)
    rings = [region.name for region in ring_bundle.manifest.regions if region.in_place]
    before = {name: executor.region(name).ctypes.data for name in rings}
    pcm = speech(8, 3, 2, SAMPLES).numpy()
    for frame in pcm:
        executor.audio_in[:] = frame
        executor.step(2)
    for name in rings:
        assert executor.region(name).ctypes.data == before[name]
        held = np.abs(executor.region(name)[0, 0]).sum(axis=-1)
        assert (held > 0).sum() == (3 if name.startswith("temporal") else 6 - 2 * ("dec" in name))


def test_a_cut_bundle_is_verified_stage_by_stage(ring_bundle: Bundle) -> None:
    found = list(verify.findings(ring_bundle, from_seed("micro", SEED)))
    assert not any(finding.is_failure for finding in found), found
    alone = [f.sentence for f in found if "_attention: 3 tensors" in f.sentence]
    assert len(alone) == LAYERS


def test_a_bfloat16_cut_is_verified_through_its_twins_and_a_wrong_twin_is_found(
    tmp_path: Path,
) -> None:
    narrow = build.build_seeded(
        "micro", tmp_path / "b", seed=SEED, largest_batch=2, dtype="bfloat16", attention="ring"
    )
    said = [finding.sentence for finding in verify.findings(narrow) if finding.is_failure]
    assert said == []
    stage = next(s for s in narrow.manifest.stages if s.name == "temporal_01_attention")
    assert stage.ring is not None
    path = narrow.file(stage.ring.twin)
    model = onnx.load(path)
    (rotation, *_) = (node for node in model.graph.node if node.op_type == "RotaryEmbedding")
    next(a for a in rotation.attribute if a.name == "interleaved").i = 0
    onnx.save(model, path)
    first = next(found.sentence for found in verify.findings(narrow) if found.is_failure)
    assert first.startswith("stage temporal_00_attention: output ")


def test_what_the_kernel_cannot_do_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CannotCut, match=r"not in float16\. Choose --dtype bfloat16, or --att"):
        build.build_seeded("micro", tmp_path / "a", dtype="float16", attention="ring")
    source = from_seed("micro", 0, pinned=3)
    with pytest.raises(CannotCut, match=r"--pin-persona 3: .* Leave it out, or choose --att"):
        build.build(source, tmp_path / "b", largest_batch=1, attention="ring")
    assert list(tmp_path.iterdir()) == []


def _first_ring(raw: dict[str, Any]) -> dict[str, Any]:
    stage: dict[str, Any] = next(s for s in raw["stages"] if s["name"] == "temporal_00_attention")
    return stage


def _region(raw: dict[str, Any], name: str) -> dict[str, Any]:
    region: dict[str, Any] = next(r for r in raw["regions"] if r["name"] == name)
    return region


BAD: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda raw: _first_ring(raw).update(ring=None), r"\.ring: a ring_attention has one"),
    (lambda raw: raw["stages"][0].update(ring=_first_ring(raw)["ring"]), "no other stage does"),
    (lambda raw: _first_ring(raw)["ring"].update(twin="gone"), "gone is not among"),
    (lambda raw: _first_ring(raw)["ring"].update(kv_heads=3), "2 query heads on 3 KV heads"),
    (lambda raw: _first_ring(raw)["ring"].update(head_dim=8), r"of shape \[B, 48\]"),
    (lambda raw: _first_ring(raw)["ring"].update(retain=9), r"must be \[1, 9, 32\]"),
    (lambda raw: _first_ring(raw)["ring"].update(rows=2), "must count 2 rows per tick"),
    (lambda raw: _first_ring(raw).update(inputs=()), "takes qkv, position, ring.k, ring.v and"),
    (
        lambda raw: _region(raw, "temporal.layers.0.k").update(in_place=False),
        "updated in place, with no row pinned",
    ),
    (
        lambda raw: _region(raw, "temporal.layers.0.k")["clock"].update(pinned=2),
        "updated in place, with no row pinned",
    ),
]


@pytest.mark.parametrize(("change", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_a_ring_stage_that_contradicts_its_regions_is_a_fault(
    ring_bundle: Bundle, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    raw = msgspec.to_builtins(ring_bundle.manifest)
    assert list(faults(msgspec.convert(raw, Manifest))) == []
    change(raw)
    found = list(faults(msgspec.convert(raw, Manifest)))
    assert any(re.search(expected, fault) for fault in found), found


def test_layers_alike_are_traced_once_and_written_as_if_each_had_been(tmp_path: Path) -> None:
    config = replace(MICRO, mimi=replace(MICRO.mimi, layers=3), lm=replace(MICRO.lm, layers=4))
    graphs = graphs_of(config, *tiny.seeded(config, SEED), attention="ring")
    between = ["temporal_01", "temporal_02", "temporal_03", "mimi_encode_01", "mimi_encode_02"]
    traces, shared, alone = Traces(), Weights(tmp_path), Weights(tmp_path)
    traced = []
    for graph in (graph for graph in graphs if graph.name in between):
        if graph not in traces:
            traced.append(graph.name)
        assert graph_bytes(graph, shared, traces) == graph_bytes(graph, alone), graph.name
    assert traced == ["mimi_encode_01", "temporal_01"]
    for file in alone.files:
        assert b"".join(shared.chunks(file)) == b"".join(alone.chunks(file)), file
    assert shared.files == alone.files
    assert len({name.split(".self_attn")[0] for name in shared.places}) > len(between)
