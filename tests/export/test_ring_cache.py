"""A bundle with 8-bit rings: calls, prompts, golden data, and what it costs to have them."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch

from engines import ring_stage, snapshot
from engines.bundle import Bundle, BundleError, Dtype
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtParking, OrtPrimer
from engines.prefill import Prompt, make_prompt
from engines.snapshot import Age
from export import build, cache_report, golden, tiny, verify
from export.cache_report import Calibration, CannotKeep
from export.caches import Caches, caches_of
from export.models.config import ModelConfig
from export.models.streaming import State, fresh_state
from export.models.tokens import OFFSET, TOKENS
from export.source import Source, from_modules
from export.stages import USER_CODES, StageGraph, all_regions, graphs_of
from export.tiny import PERSONA_MICRO
from tests.export.calls import GREEDY, SEED, heard_among, speech
from tests.export.persona import frames_of
from tests.export.test_prompt_graphs import feed

pytestmark = pytest.mark.torch

CONFIG = replace(
    PERSONA_MICRO,
    name="personaplex-nano",
    mimi=replace(PERSONA_MICRO.mimi, layers=1),
    lm=replace(PERSONA_MICRO.lm, context=24, depth_layers=1),
)
SAMPLES = CONFIG.mimi.samples_per_frame
ROWS = 20
LAYERS = CONFIG.lm.layers
RINGS = [f"temporal.layers.{layer}.{kv}" for layer in range(LAYERS) for kv in "kv"]


def source_of(config: ModelConfig = CONFIG) -> Source:
    mimi, lm = tiny.seeded(config, SEED)
    return from_modules(config, mimi, lm, pieces=tiny.pieces(config))


def built(folder: Path, source: Source, dtype: Dtype, frames: int = 40) -> Bundle:
    calibration = Calibration(dtype, (), frames)
    return build.build(source, folder, largest_batch=3, attention="ring", calibration=calibration)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return built(tmp_path_factory.mktemp("bundles") / "coded", source_of(), "int8")


def test_keys_and_values_of_the_language_model_have_one_byte_each_and_the_codecs_four(
    coded: Bundle,
) -> None:
    rings = {region.name: region.dtype for region in coded.manifest.regions if region.in_place}
    assert {rings[name] for name in RINGS} == {"int8"}
    codec = {name: dtype for name, dtype in rings.items() if name not in RINGS}
    assert set(codec.values()) == {"float32"}
    assert len(codec) == 4
    held = sum(coded.manifest.region(name).whole_bytes for name in RINGS)
    assert held == 2 * LAYERS * CONFIG.lm.context * CONFIG.lm.dimension
    stages = [stage for stage in coded.manifest.stages if stage.ring is not None]
    twins = {stage.ring.twin for stage in stages if stage.ring}
    assert len(twins) == 2
    for twin in twins:
        model = onnx.load(coded.file(twin), load_external_data=False)
        assert {opset.domain for opset in model.opset_import} == {""}
    scales = [ring_stage.read_scales(coded, stage) for stage in stages]
    found = [scale for scale in scales if scale is not None]
    assert [scale.shape for scale in found] == [(2, CONFIG.lm.heads)] * LAYERS
    assert len({scale.tobytes() for scale in found}) == LAYERS


def test_golden_data_holds_every_stage_prompt_and_call_to_torch(coded: Bundle) -> None:
    found = list(verify.findings(coded, source_of()))
    assert not any(finding.is_failure for finding in found), found
    said = [finding.sentence for finding in found]
    assert sum("_attention: 3 tensors" in sentence for sentence in said) == LAYERS + 2
    assert any(sentence.startswith("stage temporal_prefill: ") for sentence in said)
    assert CONFIG.lm.context < golden.CALL_TICKS
    assert said[-1].startswith(f"greedy call: every token of {golden.CALL_TICKS} frames")


def test_golden_rows_lie_off_the_edges_and_a_wrong_scale_is_found(
    coded: Bundle, tmp_path: Path
) -> None:
    spec = next(s for s in coded.manifest.golden if s.stage == "temporal_01_attention")
    held = safetensors.numpy.load_file(coded.file(spec.file))
    graph = next(g for g in coded_graphs(coded) if g.name == spec.stage)
    assert not graph.near_edges(  # type: ignore[operator]
        torch.from_numpy(held["in.temporal_01.qkv"]),
        torch.from_numpy(held["in.lm.offset"]),
        golden.NEAR_EDGE,
    ).any()
    scales = coded.file("cache/scales.bin")
    before = scales.read_bytes()
    wrong = np.frombuffer(before, "<f4").copy()
    wrong[-1] *= 1.02
    try:
        scales.write_bytes(wrong.tobytes())
        failed = [f.sentence for f in verify.findings(coded) if f.is_failure]
        assert failed[0].startswith("stage temporal_01_attention: output ")
        scales.write_bytes(np.zeros_like(wrong).tobytes())
        with pytest.raises(BundleError, match=r"scales of stage temporal_00_attention run from 0"):
            OrtExecutor(coded, 1)
    finally:
        scales.write_bytes(before)


def coded_graphs(made: Bundle, config: ModelConfig = CONFIG) -> tuple[StageGraph, ...]:
    source = source_of(config)
    return graphs_of(config, source.mimi, source.lm, "float32", "ring", caches_of(made))


def test_who_joins_and_leaves_changes_no_bit_of_the_others(coded: Bundle) -> None:
    pcm = speech(6, 40, 3, SAMPLES).numpy()
    alone = heard_among(coded, pcm, neighbours=False)
    assert heard_among(coded, pcm, neighbours=True) == alone
    assert len(set(alone)) == len(alone)


def test_the_executor_says_the_recorded_call(coded: Bundle) -> None:
    recorded = safetensors.numpy.load_file(coded.file(coded.manifest.golden_call))
    executor = OrtExecutor(coded, 1)
    executor.join(0, GREEDY)
    for tick, frame in enumerate(recorded["pcm"]):
        executor.audio_in[0] = frame[0, 0]
        executor.step(1)
        for name in ("user_codes", "codes", "text", "valid"):
            np.testing.assert_array_equal(
                executor.wire(name), recorded[name][tick], f"{name} at {tick}"
            )
    assert executor.region(RINGS[0]).dtype == np.int8
    sizes = np.abs(executor.region(RINGS[0]).astype(int))
    assert sizes.max() > 100
    assert (sizes > 0).mean() > 0.9


def lived(made: Bundle, prompt: Prompt, config: ModelConfig) -> State:
    """A session of the cut model in torch that was told ``prompt`` tick by tick."""
    graphs = [g for g in coded_graphs(made, config) if g.name.startswith("temporal")]
    every = all_regions(coded_graphs(made, config), config)
    state = fresh_state(every, 1)
    own = 1 + config.lm.depth_codebooks
    for at, frame in enumerate(torch.from_numpy(prompt.frames)):
        for stream in range(own):
            row = (at + config.lm.delays[stream]) % config.lm.token_rows
            state[TOKENS][0, stream, row] = frame[stream]
        named = state | {USER_CODES: frame[own:].view(1, -1)}
        with torch.no_grad():
            for graph in graphs:
                named |= graph.run(named)
        state = {name: named[name] for name in state}
    return state


def primed_equals_lived(made: Bundle, config: ModelConfig, rows: int, most: int) -> None:
    """A primed session is the one that lived the same ticks, its snapshot goes on bit for bit."""
    spec, manifest = made.manifest.prompt, made.manifest
    assert spec is not None
    vectors = np.zeros((0, config.lm.dimension), np.float32)
    prompt = make_prompt(spec, frames_of(config.lm, rows).numpy(), vectors)
    executor = OrtExecutor(made, 2)
    primer = OrtPrimer(executor)
    feed(primer, 1, prompt, most)
    primer.settle(1, 0, GREEDY, primer.open(1, prompt, GREEDY))
    state = lived(made, prompt, config)
    odd = 0
    for region in (manifest.region(name) for name in manifest_rings(made)):
        ours = verify._ordered(executor.region(region.name)[0])
        theirs = verify._ordered(state[region.name][0].numpy())
        assert np.abs(ours - theirs).max() <= 1, region.name
        odd += int(np.count_nonzero(ours != theirs))
        assert np.count_nonzero(theirs) > theirs[:, :rows].size // 2, region.name
    assert odd <= 1e-3 * rows * 2 * config.lm.layers * config.lm.dimension
    assert executor.region(OFFSET)[0] == state[OFFSET][0] == rows
    state[TOKENS] = torch.from_numpy(executor.region(TOKENS)[:1].copy())
    for name, value in GREEDY.items():
        state[name].fill_(value)
    age = Age(prompt.key, rows, 0, whole=True)
    kept = snapshot.save(primer, manifest, 0, age)
    pcm = speech(5, 12, 1, config.mimi.samples_per_frame).numpy()
    said = [tick(executor, 0, frame) for frame in pcm]
    other = OrtExecutor(made, 2)
    snapshot.restore(OrtParking(other), manifest, kept, 1)
    assert [tick(other, 1, frame) for frame in pcm] == said
    third = OrtExecutor(made, 1)
    for region in manifest.regions:
        third.region(region.name)[0] = state[region.name][0].numpy()
    assert [tick(third, 0, frame)[1:] for frame in pcm] == [words[1:] for words in said]
    assert len(set(said)) == len(said)


def manifest_rings(made: Bundle) -> list[str]:
    return [r.name for r in made.manifest.regions if r.in_place and r.name.startswith("temporal")]


def tick(executor: OrtExecutor, slot: int, frame: np.ndarray) -> tuple[bytes, int, tuple[int, ...]]:
    executor.audio_in[:] = 0.1
    executor.audio_in[slot] = frame[0]
    executor.step(slot + 1)
    codes = tuple(executor.wire("codes")[slot].tolist())
    return executor.audio_out[slot].tobytes(), int(executor.text[slot]), codes


def test_a_primed_session_is_one_that_lived_the_same_ticks(coded: Bundle) -> None:
    primed_equals_lived(coded, CONFIG, ROWS, most=7)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["int8", "float8e4m3"])
def test_so_it_is_at_the_size_of_personaplex_small(dtype: Dtype, tmp_path: Path) -> None:
    config = tiny.PERSONA_SMALL
    made = built(tmp_path / "b", source_of(config), dtype, 512)
    found = list(verify.findings(made, source_of(config), frames=3 * config.lm.context))
    assert not any(finding.is_failure for finding in found), found
    primed_equals_lived(made, config, 200, most=32)


def test_the_report_says_what_each_kind_of_ring_costs(coded: Bundle) -> None:
    report = cache_report.read(coded)
    assert report is not None
    against = {kind: list(entry["against"]) for kind, entry in report["caches"].items()}
    assert against == {
        "bfloat16": ["float32"],
        "float8e4m3": ["float32", "bfloat16"],
        "int8": ["float32", "bfloat16"],
    }
    rows = {kind: entry["against"]["float32"] for kind, entry in report["caches"].items()}
    far = {kind: row["text"]["logits_relative"] for kind, row in rows.items()}
    assert 0 < far["bfloat16"] < far["int8"] < far["float8e4m3"] < 0.05
    assert rows["int8"]["audio"]["greedy_of"] == 40 * CONFIG.lm.depth_codebooks
    said = "\n".join(cache_report.lines_of(report))
    assert "scales found on 40 frames of noise; this bundle has int8" in said
    assert "of weights from a seed" in said


def test_what_cannot_be_kept_so_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CannotKeep, match=r"--cache int8: .* Add --attention ring"):
        cache_report.plan("int8", "standard", "bfloat16")
    with pytest.raises(CannotKeep, match=r"--cache bf16: the language model is float32"):
        cache_report.plan("bf16", "ring", "float32")
    with pytest.raises(CannotKeep, match=r"--calibrate-on finds scales of 8-bit rings: add"):
        cache_report.plan("bf16", "ring", "bfloat16", tmp_path)
    with pytest.raises(CannotKeep, match=r"holds no \.wav file"):
        cache_report.plan("e4m3", "ring", "bfloat16", tmp_path)
    assert cache_report.plan("bf16", "ring", "bfloat16") is None
    planned = cache_report.plan("e4m3", "ring", "float32")
    assert planned is not None
    assert (planned.dtype, planned.frames >= 500) == ("float8e4m3", True)
    assert len(planned.recordings) == 3


def test_scales_that_are_not_there_are_a_fault(coded: Bundle) -> None:
    from engines.bundle_faults import faults

    def faults_with(**changes: object) -> list[str]:
        stages = [
            msgspec.structs.replace(s, ring=msgspec.structs.replace(s.ring, **changes))
            if s.ring and s.name == "temporal_00_attention"
            else s
            for s in coded.manifest.stages
        ]
        return list(faults(msgspec.structs.replace(coded.manifest, stages=tuple(stages))))

    caches = caches_of(coded)
    assert isinstance(caches, Caches)
    place = caches.place(0)
    assert faults_with() == []
    assert "those of 8 bits have scales" in faults_with(scales=None)[0]
    assert (
        "are not in cache/scales.bin"
        in faults_with(scales=msgspec.structs.replace(place, offset=1 << 20))[0]
    )
    assert (
        "not float32 [2, 2]" in faults_with(scales=msgspec.structs.replace(place, shape=(2, 3)))[0]
    )
