"""A prompt is fed by a graph of its own into rings that ticks then take up, cut or not."""

import logging
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance.config import EngineConfig
from appliance.engine import open_primer
from engines import gpu, parity, tensorrt_stages
from engines.answers import ParityFailed
from engines.bundle import Bundle, StageSpec
from engines.cuda import DevicePtr
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaPrimer
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtPrimer, PromptGraphs
from engines.plans import WeightInput
from engines.prefill import chunk_rows, make_prompt
from engines.tensorrt_executor import TensorrtExecutor
from export import build, tiny
from export.tiny import PERSONA_MICRO
from tests.engines import fake_driver, fake_tensorrt
from tests.engines.fake_driver import FakeDriver
from tests.engines.fake_plans import write_plans
from tests.export.calls import GREEDY, SEED, speech
from tests.export.persona import frames_of
from tests.export.test_prompt_graphs import feed, prompt_of

pytestmark = pytest.mark.torch

TICKS = 60
EAGER = CudaOptions(graphs=False)
WIDE = replace(
    PERSONA_MICRO,
    mimi=replace(PERSONA_MICRO.mimi, dimension=64, heads=1, layers=1),
    lm=replace(PERSONA_MICRO.lm, dimension=128, heads=2, depth_layers=1),
)
"""Heads of 64, as the kernel wants them; no more layers than a prompt has to do with."""


def test_a_cut_bundle_takes_up_a_prompt_as_the_whole_one_does(
    persona_bundle: Bundle, persona_ring_bundle: Bundle
) -> None:
    pcm = speech(5, TICKS, 1, PERSONA_MICRO.mimi.samples_per_frame).numpy()
    assert PERSONA_MICRO.lm.context < TICKS

    def listen(made: Bundle) -> list[np.ndarray]:
        executor, prompt = OrtExecutor(made, 2), prompt_of(made)
        primer = OrtPrimer(executor)
        feed(primer, 1, prompt, 16)
        primer.settle(1, 0, GREEDY, primer.open(1, prompt, GREEDY))
        heard = []
        for frame in pcm:
            executor.audio_in[:1] = frame
            executor.step(1)
            heard.append(np.array([*executor.text[:1], *executor.wire("codes")[0]]))
        return heard

    whole = listen(persona_bundle)
    for tick, (ours, theirs) in enumerate(zip(listen(persona_ring_bundle), whole, strict=True)):
        np.testing.assert_array_equal(ours, theirs, f"at {tick}")
    assert len({tuple(frame) for frame in whole}) > TICKS // 2


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MODELS, "personaplex-micro", WIDE)
        folder = tmp_path_factory.mktemp("persona") / "cut"
        return build.build_seeded(
            "personaplex-micro", folder, seed=SEED, largest_batch=4, attention="ring"
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return fake_driver.install(monkeypatch)


@pytest.fixture
def planned(cut: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """With plans for the fake GPU, of a prompt's stages too."""
    if not (cut.path / "plans").exists():
        write_plans(cut)
    monkeypatch.setattr(gpu, "open_gpu", lambda _: fake_driver.FakeDevice(driver))
    monkeypatch.setattr(tensorrt_stages, "load_module", lambda _: fake_tensorrt)
    return cut


def test_a_prompt_fed_on_a_gpu_is_taken_up_as_on_the_cpu(
    planned: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By graphs, by plans, and by plans beside kernels; chunks of 25 are more than a plan takes."""
    pcm = speech(5, TICKS, 2, WIDE.mimi.samples_per_frame).numpy()
    prompt = make_prompt(
        planned.manifest.prompt or pytest.fail("no prompt"),
        frames_of(WIDE.lm, 40).numpy(),
        np.random.default_rng(3).normal(size=(3, WIDE.lm.dimension)).astype(np.float32),
    )

    def listen(
        executor: OrtExecutor | CudaExecutor, most: int, ticks: int = TICKS
    ) -> list[np.ndarray]:
        """Session 0 talks while two others are fed, in turns; one of them is then seated."""
        primer = executor.primer()
        executor.join(0, GREEDY)
        heard, fed = [], {3: 0, 2: 0}
        for slot in fed:
            primer.clear(slot)
        for tick, frame in enumerate(pcm[:ticks]):
            batch = 1
            slot = 3 - tick % 2
            left = prompt.shared_rows - fed[slot]
            if tick < 20 and left:
                rows = chunk_rows(fed[slot], left, most, primer.retain)
                primer.feed(slot, prompt, fed[slot], rows)
                fed[slot] += rows
            if tick == 20:
                primer.settle(3, 1, GREEDY, primer.open(3, prompt, GREEDY))
            if tick == 21:  # its pages go while the device is at work on the tick
                primer.feed(2, prompt, prompt.shared_rows, 1)
                primer.leave(2)
            batch += tick >= 20
            executor.audio_in[:batch] = frame[:batch]
            executor.step(batch)
            heard.append(executor.text[:batch].copy())
        return heard

    expected = listen(OrtExecutor(planned, 4), 7)
    assert len({int(frame[-1]) for frame in expected[20:]}) > 5
    loaded: list[str] = []
    load = CudaExecutor.load

    def watched(self: CudaExecutor, stage: StageSpec) -> Any:
        loaded.append(stage.name)
        return load(self, stage)

    monkeypatch.setattr(CudaExecutor, "load", watched)
    for kernels in (None, False, True):
        executor = (
            CudaExecutor(planned, 4, EAGER)
            if kernels is None
            else TensorrtExecutor(planned, 4, EAGER, beside_kernels=kernels)
        )
        assert executor.layout.has_places
        ticks = TICKS if kernels is None else 32
        found = listen(executor, 7 if kernels is None else 25, ticks)
        for tick, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
            np.testing.assert_array_equal(ours, theirs, f"at {tick}")
        assert len(found) == ticks
        assert executor.arena.age(1) == 40 + ticks - 20
        executor.close()
        assert driver.held == {}
        if kernels is None:
            assert {"temporal_prefill", "opening"} <= set(loaded)
            loaded.clear()
    assert loaded == [], "a box with plans loads no graph"


def test_golden_data_of_a_prompt_is_answered_and_what_differs_is_named(
    planned: Bundle,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = EngineConfig(planned.path)
    for kind in (CudaExecutor, TensorrtExecutor):
        executor = kind(planned, 2, EAGER)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            open_primer(executor, msgspec.structs.replace(asked, check_golden=False))
            assert caplog.text == ""
            primer = open_primer(executor, asked)
        assert "golden data of prompts: 2 stages answer as recorded, 2 at every" in caplog.text
        assert isinstance(primer, CudaPrimer)
        if isinstance(executor, TensorrtExecutor):
            strategies = fake_tensorrt.DynamicShapesKernelSpecializationStrategy
            chosen = {
                name: config.dynamic_shapes_kernel_specialization_strategy
                for name, config in executor._stages._configs.items()
            }
            for_all = {chosen.pop(name) for name in ("temporal_prefill", "opening")}
            assert for_all == {strategies.NONE}, "a new length of prompt must compile nothing"
            assert set(chosen.values()) == {strategies.EAGER}
        found = parity.check_prompt(executor, primer)
        assert (found.stages, found.full) == (2, 2)
        assert found.tensors == 3 + 2 * WIDE.lm.layers
        run = PromptGraphs.answer

        def wrong(self: Any, stage: StageSpec, given: Any, run: Any = run) -> dict[str, Any]:
            made: dict[str, Any] = run(self, stage, given)
            return {n: x + (1 if x.dtype == np.int64 else 0.5) for n, x in made.items()}

        with monkeypatch.context() as patch:
            patch.setattr(PromptGraphs, "answer", wrong)
            with pytest.raises(ParityFailed, match=r"stage temporal_prefill does .* hidden is"):
                parity.check_prompt(executor, primer)
        executor.close()
    assert driver.held == {}


def test_plans_of_a_prompt_bring_no_weights_that_the_tick_has(planned: Bundle) -> None:
    """Where two graphs take a matrix from one place of the bundle, it is on the device once."""
    file = next(name for name in planned.manifest.files if "weights/" in name)
    shared = WeightInput("shared", "float32", (4, 4), file, 64, 64)
    own = WeightInput("own", "float32", (4, 4), file, 0, 64)
    executor = TensorrtExecutor(planned, 2, EAGER)
    stages = executor._stages
    recorded = stages._opened.plans
    prefill = recorded.plan("temporal_prefill")
    assert prefill is not None
    called = msgspec.structs.replace(shared, name="called_otherwise")
    others = [
        msgspec.structs.replace(plan, weights=(called, own)) if plan == prefill else plan
        for plan in recorded.plans
    ]
    stages._opened = replace(
        stages._opened, plans=msgspec.structs.replace(recorded, plans=tuple(others))
    )
    prompt = planned.manifest.prompt or pytest.fail("no prompt")
    assert stages.room_for((prompt.prefill,)) == 128
    stages._weights[tensorrt_stages._place(shared)] = DevicePtr(1 << 20)
    assert stages.room_for((prompt.prefill,)) == 64
    executor.close()
