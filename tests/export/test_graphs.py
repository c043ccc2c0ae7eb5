"""The written graphs: what is in them, and that ONNX Runtime computes what torch does."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from engines import bundle
from engines.bundle import Bundle
from engines.clocks import ClockKind
from engines.noise import gumbel
from engines.ort_executor import OrtExecutor
from export import build
from export.journal import FolderTaken
from export.source import from_seed
from export.tiny import MICRO
from tests.export.calls import GREEDY, SEED, TorchCalls, heard_among, speech
from tests.small import SMALL

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TICKS = 100
SAMPLES = MICRO.mimi.samples_per_frame
EXTERNAL = onnx.TensorProto.EXTERNAL


@pytest.fixture(scope="module")
def models(micro_bundle: Bundle) -> dict[str, onnx.ModelProto]:
    graphs = [stage.graph for stage in micro_bundle.manifest.stages if stage.graph]
    return {name: onnx.load(micro_bundle.file(name), load_external_data=False) for name in graphs}


def test_graphs_pass_the_checker_and_hold_standard_operators_only(
    micro_bundle: Bundle, models: dict[str, onnx.ModelProto]
) -> None:
    assert len(models) == 4
    for name, model in models.items():
        onnx.checker.check_model(str(micro_bundle.file(name)), full_check=True)
        assert model.ir_version == 11
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
        assert {node.domain for node in model.graph.node} == {""}
        assert len(model.functions) == 0


def test_graphs_name_the_checkpoint_and_nothing_of_the_machine(
    micro_bundle: Bundle, models: dict[str, onnx.ModelProto]
) -> None:
    for name, model in models.items():
        raw = micro_bundle.file(name).read_bytes()
        assert not re.search(rb"/(home|work|tmp|root|usr)/|\.py\b|torch", raw), name
        assert len(model.metadata_props) == 0
        assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
    temporal = models["stages/temporal.onnx"]
    names = {tensor.name for tensor in temporal.graph.initializer}
    assert "lm.transformer.layers.0.self_attn.in_proj_weight" in names
    depth = {tensor.name for tensor in models["stages/depth.onnx"].graph.initializer}
    assert {f"lm.depformer.layers.0.self_attn.in_proj_weight.{s}" for s in range(8)} <= depth


def test_a_weight_two_stages_use_lies_in_one_place(models: dict[str, onnx.ModelProto]) -> None:
    places: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    users: dict[str, int] = defaultdict(int)
    for model in models.values():
        for tensor in model.graph.initializer:
            if tensor.data_location == EXTERNAL:
                places[tensor.name].add(tuple(entry.value for entry in tensor.external_data))
                users[tensor.name] += 1
    assert all(len(found) == 1 for found in places.values())
    assert {name for name, count in users.items() if count == 2} == {
        "mimi.quantizer.rvq_first.vq.layers.0._codebook.embedding",
        *(f"mimi.quantizer.rvq_rest.vq.layers.{i}._codebook.embedding" for i in range(7)),
    }


def test_rings_updated_in_place_are_read_by_the_scatter_alone(
    micro_bundle: Bundle, models: dict[str, onnx.ModelProto]
) -> None:
    rings = {region.name for region in micro_bundle.manifest.regions if region.in_place}
    layers = 2 * MICRO.mimi.layers + MICRO.lm.layers
    assert len(rings) == 2 * layers
    readers = defaultdict(list)
    for model in models.values():
        for node in model.graph.node:
            for name in rings.intersection(node.input):
                readers[name].append((node.op_type, list(node.input).index(name)))
    assert dict(readers) == {name: [("TensorScatter", 0)] for name in rings}


def test_the_same_seed_gives_the_same_bytes_in_another_process(
    micro_bundle: Bundle, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "duplexbox", "export", "build", "micro", "--seed", str(SEED)]
    command += ["--batches", "1-4", "-o", str(tmp_path / "again")]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert bundle.read(tmp_path / "again").manifest == micro_bundle.manifest
    other = from_seed("micro", SEED + 1).checkpoint_sha256()
    assert other != micro_bundle.manifest.model.checkpoint_sha256


def test_only_a_bundle_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("precious")
    with pytest.raises(FolderTaken, match=f"{tmp_path} exists and is not a bundle"):
        build.build_seeded("micro", tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "precious"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_onnx_runtime_equals_torch_for_sessions_of_different_ages(
    micro_bundle: Bundle, sampled: bool
) -> None:
    calls = TorchCalls(MICRO, SEED)
    executor = OrtExecutor(micro_bundle, 3)
    joins = {0: 0, 9: 1, 40: 2}
    assert 3 * MICRO.lm.context < TICKS - 40
    assert 3 * MICRO.mimi.context < 2 * (TICKS - 40)
    pcm = speech(5, TICKS, 3, SAMPLES)
    noise = np.zeros((3, *executor.wire("noise").shape[1:]), np.float32)
    ages = np.zeros(3, np.int64)
    words: set[int] = set()
    batch, furthest, loud = 0, 0.0, 0.0
    for tick in range(TICKS):
        if tick in joins:
            slot = joins[tick]
            settings = {"sampling.seed": float(10 + slot)} | ({} if sampled else GREEDY)
            calls.join(slot, settings)
            executor.join(slot, settings)
            batch = slot + 1
        executor.audio_in[:batch] = pcm[tick, :batch].numpy()
        executor.step(batch)
        gumbel(np.array([10, 11, 12]), ages, noise)
        expected = calls.step(pcm[tick, :batch], torch.from_numpy(noise[:batch]))
        for name in ("user_codes", "codes", "valid", "text"):
            found = executor.wire(name)[:batch]
            np.testing.assert_array_equal(found, expected[name].numpy(), f"{name} at {tick}")
        away = np.abs(executor.audio_out[:batch] - expected["pcm_out"][:, 0].numpy())
        furthest, loud = (
            max(furthest, float(away.max())),
            max(loud, float(expected["pcm_out"].std())),
        )
        words |= set(executor.text[:batch].tolist())
        ages[:batch] += 1
    assert furthest < 1e-4
    assert loud > 0.01
    assert len(words) > MICRO.lm.text_card // 2


def test_who_joins_and_leaves_changes_no_bit_of_the_others(micro_bundle: Bundle) -> None:
    pcm = speech(6, 60, 3, SAMPLES).numpy()
    alone = heard_among(micro_bundle, pcm, neighbours=False)
    assert heard_among(micro_bundle, pcm, neighbours=True) == alone
    assert len(set(alone)) == len(alone)


def test_a_reused_slot_inherits_nothing_not_even_nan(micro_bundle: Bundle) -> None:
    pcm = speech(7, 30, 1, SAMPLES).numpy()

    def listen(executor: OrtExecutor) -> list[bytes]:
        executor.join(0, {"sampling.seed": 4})
        heard = []
        for frame in pcm:
            executor.audio_in[:1] = frame
            executor.step(1)
            heard.append(executor.audio_out[0].tobytes())
        return heard

    clean, poisoned = OrtExecutor(micro_bundle, 1), OrtExecutor(micro_bundle, 1)
    for _ in range(2):
        for region in micro_bundle.manifest.regions:
            if region.dtype == "float32" and region.clock.kind is not ClockKind.CONSTANT:
                poisoned.region(region.name)[:] = np.nan
        poisoned.step(1)
        assert np.isnan(poisoned.wire("hidden")).all()
    assert listen(poisoned) == listen(clean)


def test_counters_move_as_their_native_clocks_say(micro_bundle: Bundle) -> None:
    executor = OrtExecutor(micro_bundle, 1)
    counters = {
        region.name: region.clock
        for region in micro_bundle.manifest.regions
        if region.clock.kind is ClockKind.COUNTER
    }
    assert sorted(counters) == [
        "lm.offset",
        "mimi.decoder_transformer.offset",
        "mimi.encoder_transformer.offset",
    ]
    ticks = 7
    for _ in range(ticks):
        executor.step(1)
    # The decoder hears nothing of the first tick: the acoustic codebooks run one behind.
    quiet = {"mimi.decoder_transformer.offset": MICRO.lm.max_delay}
    for name, clock in counters.items():
        assert executor.region(name)[0] == clock.position(ticks - quiet.get(name, 0)), name


def test_rings_are_written_where_their_native_clocks_say(micro_bundle: Bundle) -> None:
    rings = [region for region in micro_bundle.manifest.regions if region.in_place]
    executor = OrtExecutor(micro_bundle, 1)
    pcm = speech(8, 45, 1, SAMPLES).numpy()
    for tick in range(45):
        before = {region.name: executor.region(region.name).copy() for region in rings}
        executor.audio_in[:1] = pcm[tick]
        executor.step(1)
        for region in rings:
            changed = (executor.region(region.name) != before[region.name])[0, 0].any(axis=-1)
            late = MICRO.lm.max_delay if ".decoder_" in region.name else 0
            rows = int(region.clock.rows_per_tick)
            first = max(region.clock.position(tick - late), 0)
            expected = {region.clock.row_of(first + row) for row in range(rows)}
            assert set(np.flatnonzero(changed)) == expected, (region.name, tick)


def test_the_small_model_is_small_and_lively() -> None:
    small = bundle.read(SMALL)
    assert sum(file.bytes for file in small.manifest.files.values()) < 4_000_000
    assert small.manifest.model.parameters < 900_000
    assert len(small.pieces()) == 64
    executor = OrtExecutor(small, 2)
    said, loudness = [], []
    for frame in speech(9, 60, 2, SAMPLES).numpy():
        executor.audio_in[:] = frame
        executor.step(2)
        said.append(executor.wire("codes").copy())
        loudness.append(float(executor.audio_out.std()))
        assert np.abs(executor.audio_out).max() < 1
    assert loudness[0] == 0
    assert min(loudness[1:]) > 0.01
    assert min(len(set(column)) for column in np.concatenate(said).T) > 30
