"""A cut bundle through `CudaExecutor` on a fake driver: addresses, strides, pages, join and leave.

The kernel's place is taken by its numpy reference, which reads and writes the very addresses and
strides a GPU would be given; so a wire that leads elsewhere, a ring of another layout or scratch
that overlaps state is seen here. What the kernel computes is tested beside it, on a GPU.
"""

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from bench import ring_tick
from engines import (
    bundle,
    cuda,
    gpu,
    kernel_stages,
    parity,
    plans,
    ring_launch,
    tensorrt_stages,
)
from engines.answers import ParityFailed
from engines.bundle import Bundle, BundleError
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.executor import Executor
from engines.kernels.ring_attention import CacheType
from engines.ort_executor import OrtExecutor
from engines.program import Buffer
from engines.tensorrt_executor import TensorrtExecutor
from export import build, tiny
from export.source import from_modules
from export.tiny import MICRO
from tests.engines import fake_codec, fake_driver, fake_graphs, fake_tensorrt
from tests.engines.fake_driver import FakeDriver
from tests.engines.fake_plans import write_plans
from tests.export import test_kernel_golden
from tests.export.calls import GREEDY, speech

pytestmark = pytest.mark.torch

CONFIG = replace(
    MICRO,
    name="micro-wide",
    mimi=replace(MICRO.mimi, filters=8, dimension=64, heads=1),
    lm=replace(MICRO.lm, dimension=128, heads=2, context=16),
)
"""Heads of 64 and widths of fours, as the kernels want them; rings of several pages of the fake
driver."""
SEED = 3
"""With it no choice of this call is nearer than float32 can tell apart."""
EAGER = CudaOptions(graphs=False)
TICKS = 58
SAMPLES = CONFIG.mimi.samples_per_frame


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    mimi, lm = tiny.seeded(CONFIG, SEED)
    source = from_modules(CONFIG, mimi, lm, pieces=tiny.pieces(CONFIG))
    folder = tmp_path_factory.mktemp("bundles") / "wide"
    return build.build(source, folder, largest_batch=4, attention="ring")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = fake_driver.install(monkeypatch)
    kinds = kernel_stages.kinds() | fake_codec.KINDS
    monkeypatch.setattr(kernel_stages, "kinds", lambda: kinds)
    return driver


def calls(executor: Executor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three sessions join, one moves into the hole of another: words and sound of every tick."""
    pcm = speech(5, TICKS, 3, SAMPLES).numpy()
    words, sound, batch = [], [], 0
    for tick in range(TICKS):
        if tick in (0, 3, 7):
            executor.join(batch, GREEDY)
            batch += 1
        if tick == 40:
            executor.move(2, 0)
            batch = 2
        executor.audio_in[:batch] = pcm[tick, :batch]
        executor.step(batch)
        words.append(executor.text[:batch].copy())
        sound.append(executor.audio_out[:batch].copy())
    return words, sound


def test_a_cut_bundle_says_on_a_gpu_what_it_says_on_the_cpu(
    wide: Bundle, driver: FakeDriver
) -> None:
    expected_words, expected_sound = calls(OrtExecutor(wide, 3))
    executor = CudaExecutor(wide, 3, EAGER)
    grown = {name for family in executor.layout.families for name in family.names}
    assert {"temporal.layers.0.k", "mimi.decoder_transformer.layers.1.v"} <= grown
    words, sound = calls(executor)
    assert executor.arena.counts.late == 0
    executor.close()
    assert driver.held == {}
    assert 3 * CONFIG.lm.context <= TICKS - 7
    for tick in range(TICKS):
        np.testing.assert_array_equal(words[tick], expected_words[tick], f"at {tick}")
        assert np.abs(sound[tick] - expected_sound[tick]).max() < 1e-4, tick
    assert len(set(np.concatenate(words).tolist())) > CONFIG.lm.text_card // 3


def test_neighbours_change_no_bit_and_idle_slots_are_left_alone(
    wide: Bundle, driver: FakeDriver
) -> None:
    pcm = speech(6, 12, 2, SAMPLES).numpy()

    def listen(neighbours: int) -> bytes:
        executor = CudaExecutor(wide, 3, EAGER)
        for slot in range(1 + neighbours):
            executor.join(slot, GREEDY)
        for frame in pcm:
            executor.audio_in[: 1 + neighbours] = frame[: 1 + neighbours]
            executor.step(1 + neighbours)
        rings = executor.region("temporal.layers.1.k", 0).tobytes()
        idle = executor.region("mimi.encoder_transformer.offset", 2)
        executor.close()
        assert int(idle) == 0
        return rings

    assert listen(1) == listen(0)


def test_the_first_run_on_a_gpu_asks_every_attention_alone(
    wide: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_tick, "BATCHES", (1, 2, 3))
    monkeypatch.setattr(ring_tick, "REPEATS", 2)
    executor = CudaExecutor(wide, 3, EAGER)
    for slot in range(3):
        executor.join(slot, {})
        executor.age(slot, 1 + 30 * slot)
    executor.step(3)
    executor.arena.map_all_due()
    stages = [stage for stage in wide.manifest.stages if stage.ring]
    assert all(ring_tick.depends_on_nothing_else(executor, stage) for stage in stages)
    rows = executor.layout.whole[Buffer("temporal_00.qkv", 0)].row_bytes
    before = ring_tick.wire(executor, "temporal_00.attended")
    fake_driver.bytes_at(executor.wire_address("temporal_00.qkv"), rows // 3)[:] = 0x3D
    executor.stage("temporal_00_attention", 1)()
    executor.stream.synchronize()
    assert ring_tick.wire(executor, "temporal_00.attended") != before
    executor.close()


def short_calls(executor: Executor) -> list[bytes]:
    """Three sessions join and one moves, in fewer ticks than `calls`; every ring wraps."""
    pcm = speech(7, 20, 3, SAMPLES).numpy()
    heard, batch = [], 0
    for tick in range(20):
        if tick in (0, 1, 3):
            executor.join(batch, GREEDY)
            batch += 1
        if tick == 17:
            executor.move(2, 0)
            batch = 2
        executor.audio_in[:batch] = pcm[tick, :batch]
        executor.step(batch)
        heard.append(executor.text[:batch].tobytes() + executor.audio_out[:batch].tobytes())
    return heard


@pytest.fixture
def planned(
    wide: Bundle, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bundle:
    """The bundle with plans that the fake run-time opens on the fake GPU."""
    opened = bundle.read(shutil.copytree(wide.path, tmp_path / "cut"))
    write_plans(opened)
    monkeypatch.setattr(gpu, "open_gpu", lambda _: fake_driver.FakeDevice(driver))
    monkeypatch.setattr(tensorrt_stages, "load_module", lambda _: fake_tensorrt)
    return opened


def test_plans_and_the_ring_stage_take_turns_in_one_graph_per_exact_batch(
    planned: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphless = CudaExecutor(planned, 3, CudaOptions(graphs=False, kernel_stages=False))
    expected = short_calls(graphless)
    graphless.close()
    graphs = fake_graphs.install(monkeypatch)
    executor = TensorrtExecutor(planned, 3)
    kinds = {"": "plan", "gumbel_noise": "noise", "ring_attention": "ring"}
    stages = [kinds[stage.builtin] for stage in planned.manifest.stages]
    assert stages.count("ring") == CONFIG.lm.layers + 2 * CONFIG.mimi.layers
    assert len(graphs) == 3
    for batch, graph in enumerate(graphs, start=1):
        ends = ["state", "copy_out", "copy_out", "copy_out"]
        assert [work.kind for work in graph.work] == ["copy_in", *stages, *ends]
        for work, step in zip(graph.work[1:], executor._program.steps[0], strict=False):
            bound = (*step.inputs, *step.outputs)
            where = {b.tensor.name: int(executor._address(b.buffer)) for b in bound}
            if work.kind == "plan":
                assert work.profile == batch - 1, step.stage.name
                assert work.tensors == where, step.stage.name
            if work.kind == "ring":
                ends_of = (step.inputs[0].tensor.name, step.outputs[0].tensor.name)
                assert [work.tensors["qkv"], work.tensors["attended"]] == [
                    where[name] for name in ends_of
                ]

    def refuse(*_: object) -> None:
        raise AssertionError("bound again after start-up")

    monkeypatch.setattr(fake_tensorrt.IExecutionContext, "set_tensor_address", refuse)
    monkeypatch.setattr(fake_tensorrt.ICudaEngine, "create_execution_context", refuse)
    assert short_calls(executor) == expected
    assert len(set(expected)) == len(expected)
    assert [graph.replays for graph in graphs] == [1, 2 + 3, 14]
    executor.close()
    assert driver.held == {}


def test_golden_data_is_answered_by_rings_kernels_graphs_and_plans(
    planned: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "CALL_TICKS", 8)
    asked = len(planned.manifest.golden)
    assert asked == len(planned.manifest.stages) - 1, "all but noise"
    graphs_alone = replace(EAGER, kernel_stages=False)
    for kind, options in (
        (CudaExecutor, EAGER),
        (CudaExecutor, graphs_alone),
        (TensorrtExecutor, EAGER),
    ):
        executor = kind(planned, 3, options)
        found = parity.check(executor)
        assert (found.stages, found.full, found.same_ticks) == (asked, asked, found.ticks)
        assert found.ticks == 8
        executor.close()
    assert driver.held == {}


def test_a_plan_of_other_weights_is_found_before_any_call(planned: Bundle) -> None:
    """Its hash, its tensors, its target: all of them right."""
    folder = planned.path / "plans/sm_90"
    tree = json.loads((folder / "depth.plan").read_text())
    model = onnx.load_from_string(base64.b64decode(tree["model"]))
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight)[::-1]
    weight.CopyFrom(onnx.numpy_helper.from_array(values.copy(), weight.name))
    tree["model"] = base64.b64encode(model.SerializeToString()).decode()
    (folder / "depth.plan").write_text(json.dumps(tree))
    spec = bundle.describe_file(folder / "depth.plan")
    recorded = plans.read(folder)
    changed = [
        msgspec.structs.replace(plan, sha256=spec.sha256, bytes=spec.bytes)
        if plan.stage == "depth"
        else plan
        for plan in recorded.plans
    ]
    plans.write(folder, msgspec.structs.replace(recorded, plans=tuple(changed)))
    executor = TensorrtExecutor(planned, 3, EAGER)
    with pytest.raises(ParityFailed) as caught:
        parity.check(executor)
    said = str(caught.value)
    assert said.startswith("stage depth does not answer on Fake GPU through tests.engines.fake")
    assert f"Build the plans again: duplexbox export build {planned.path} --target sm_90" in said
    executor.close()


@pytest.mark.gpu
def test_a_gpu_answers_golden_data_by_kernels_and_by_graphs(wide: Bundle) -> None:
    for options in (CudaOptions(), CudaOptions(kernel_stages=False)):
        executor = CudaExecutor(wide, 3, options)
        found = parity.check(executor)
        executor.close()
        assert found.full == len(wide.manifest.golden)
        assert found.same_ticks == found.ticks == 32, str(found)


def test_every_launch_is_told_what_the_layout_says(wide: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(wide, 4, EAGER)
    steps = {step.stage.name: step for step in executor._program.steps[0]}
    step = steps["temporal_01_attention"]
    params = executor._rings.params(step, 3, executor._address, executor.layout.ring_rows)
    wires = {bound.tensor.name: executor._address(bound.buffer) for bound in step.inputs}
    qkv = wires["temporal_01.qkv"]
    width, features = 3 * 128, 128
    assert (params.q, params.k_new, params.v_new) == (
        qkv,
        qkv + features * 4,
        qkv + 2 * features * 4,
    )
    assert (params.q_stride, params.k_stride, params.v_stride) == (width,) * 3
    rows = executor.layout.ring_rows("temporal.layers.1.k")
    assert rows is not None
    assert params.k_cache == executor.state.range.base + rows.first
    assert params.row_stride_bytes == 128 * 4
    assert params.slot_stride_bytes == 4 * 16 * 128 * 4  # all rings of a place, page by page
    assert (params.batch, params.capacity, params.kv_heads) == (3, 16, 2)
    assert not params.page_table
    slots = fake_driver.bytes_at(params.slots, 16).view(np.int32)
    assert slots.tolist() == [0, 1, 2, 3]
    codec = ring_launch.shape_of(steps["mimi_decode_00_attention"].stage)
    assert (codec.cache, codec.rows_per_step, codec.capacity) == (CacheType.FLOAT32, 2, 20)
    executor.close()


def test_a_head_the_kernel_does_not_serve_is_refused_at_start_up(
    ring_bundle: Bundle, driver: FakeDriver
) -> None:
    with pytest.raises(BundleError, match=r"mimi_encode_00_attention: head dim is 8; .*standard"):
        CudaExecutor(ring_bundle, 1, EAGER)
    assert driver.held == {}


def test_rings_of_another_dtype_are_refused(wide: Bundle) -> None:
    stage = next(s for s in wide.manifest.stages if s.name == "temporal_00_attention")
    narrow = tuple(
        msgspec.structs.replace(t, dtype="int8") if t.name.startswith("temporal.") else t
        for t in stage.inputs
    )
    with pytest.raises(BundleError, match="rows of float32 with rings of int8; the kernel takes"):
        ring_launch.shape_of(msgspec.structs.replace(stage, inputs=narrow))


def test_frequencies_are_those_of_the_models() -> None:
    import torch

    from export.models.transformer import Rope

    position = torch.tensor([1])
    cosine, _ = Rope(128)(position, 1)
    ours = ring_launch.rope_frequency(128, 10_000.0)
    np.testing.assert_allclose(np.cos(ours), cosine[0, 0].numpy(), atol=1e-6)


def test_the_codecs_launches_answer_what_was_recorded(
    wide: Bundle, driver: FakeDriver, tmp_path: Path
) -> None:
    device: Any = fake_driver.FakeDevice(driver)
    test_kernel_golden.check(wide, device, cuda.Stream(), tmp_path, fake_codec.KINDS)
    assert driver.held == {}


@pytest.mark.gpu
def test_the_codecs_kernels_answer_what_was_recorded(wide: Bundle, tmp_path: Path) -> None:
    """Matrices turned on the device and all."""
    device = cuda.Device()
    stream = cuda.Stream()
    test_kernel_golden.check(wide, device, stream, tmp_path, fake_codec.KINDS)
    stream.close()
    device.close()


def test_the_written_bundle_can_be_read_again(wide: Bundle, tmp_path: Path) -> None:
    assert bundle.read(wide.path) == wide
