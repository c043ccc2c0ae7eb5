"""Golden data at start-up: what is right passes, what is wrong is named. On a fake driver.

A wrong result is injected where a wrong kernel or plan would put it: into the memory that a stage
has just written. `test_ring_cuda` asks the same of rings, kernels and plans.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from appliance.config import EngineConfig
from appliance.engine import open_engine
from engines import answers, bundle, cli, cuda, cuda_executor, parity
from engines.answers import ParityFailed, packed, unpacked
from engines.bundle import NEXT, Bundle, BundleError
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.kernels import lm_reference
from engines.program import Bound, plan_program
from tests.engines import fake_driver, toy
from tests.engines.fake_driver import FakeDriver
from tests.small import SMALL

EAGER = CudaOptions(graphs=False)


@pytest.fixture(scope="module")
def demo() -> Bundle:
    return bundle.read(SMALL, hashes=False)


@pytest.fixture(scope="module")
def executor(demo: Bundle) -> Iterator[CudaExecutor]:
    """One for all: every check leaves its slots as it found them."""
    with pytest.MonkeyPatch.context() as patch:
        driver = fake_driver.install(patch)
        executor = CudaExecutor(demo, 3, EAGER)
        yield executor
        executor.close()
        assert driver.held == {}


def heard(executor: CudaExecutor) -> bytes:
    rng, out = np.random.default_rng(0), b""
    for _ in range(3):
        executor.audio_in[:3] = rng.standard_normal(executor.audio_in.shape)
        executor.step(3)
        out += executor.audio_out[:3].tobytes() + executor.text[:3].tobytes()
    return out


def test_all_stages_and_the_call_are_asked_and_calls_begin_as_if_nobody_had(
    executor: CudaExecutor, demo: Bundle
) -> None:
    fresh = CudaExecutor(demo, 3, CudaOptions(graphs=False, exclusive=False))
    expected = heard(fresh)
    fresh.close()
    found = parity.check(executor)
    assert (found.stages, found.full, found.ticks, found.same_ticks) == (4, 4, 32, 32)
    assert found.furthest < 0.1
    assert str(found).startswith("4 stages answer as recorded, 4 at every age, furthest ")
    assert str(found).endswith("words of 32 of 32 ticks are equal")
    assert heard(executor) == expected


def injured(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], None]
) -> None:
    """Let ``change`` follow on stage ``name``."""
    whole = executor.stage

    def stage(wanted: str, batch: int) -> Callable[[], None]:
        run = whole(wanted, batch)

        def both() -> None:
            run()
            if wanted == name:
                executor.stream.synchronize()
                change()

        return both

    monkeypatch.setattr(executor, "stage", stage)


def output(executor: CudaExecutor, stage: str, name: str) -> Bound:
    steps = plan_program(executor.bundle.manifest).steps[0]
    return next(
        b for s in steps if s.stage.name == stage for b in s.outputs if b.tensor.name == name
    )


def added(executor: CudaExecutor, stage: str, name: str, row: int, more: float) -> None:
    """Add to the first element of session ``row``, of a ring to the first of its row 0."""
    bound = output(executor, stage, name)
    region = name.removesuffix(NEXT)
    manifest = executor.bundle.manifest
    in_place = any(r.name == region and r.in_place for r in manifest.regions)
    at = (
        next(executor.state.row_spans(region, row, 0, 1))[0]
        if in_place
        else executor.state.address(bound.buffer, row)
    )
    kind = np.dtype({"int64": "<i8", "float32": "<f4", "bool": "?"}[bound.tensor.dtype])
    value = np.frombuffer(cuda.read_device(at, kind.itemsize), kind)
    cuda.write_device(at, (value + kind.type(more)).astype(kind).tobytes())


@pytest.mark.parametrize(
    ("stage", "name", "row", "more", "words"),
    [
        ("temporal", "hidden", 2, 0.1, "output hidden is off by 0.1 at frame 628, where"),
        ("temporal", "text_logits", 0, float("nan"), "text_logits is off by nan at frame 0, where"),
        ("temporal", "lm.offset.next", 1, 1, "has 1 of 3 values wrong at frame 124; none may"),
        ("temporal", "lm.tokens.next", 1, 1, "has 1 of 153 values wrong at frame 124; none may"),
        ("temporal", "temporal.layers.2.k.next", 0, 0.5, "k.next is off by 0.5 at frame 0, where"),
        ("mimi_decode", "pcm_out", 1, -0.2, "output pcm_out is off by 0.2 at frame 124"),
        ("mimi_encode", "mimi.downsample.previous.next", 1, 0.01, "is off by 0.01 at frame 124"),
        ("depth", "valid", 0, 1, "has 1 of 3 values wrong at frame 0; none may"),
    ],
)
def test_the_stage_and_output_that_differ_are_named_with_numbers_and_remedy(
    executor: CudaExecutor,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    name: str,
    row: int,
    more: float,
    words: str,
) -> None:
    injured(executor, monkeypatch, stage, lambda: added(executor, stage, name, row, more))
    with pytest.raises(ParityFailed) as caught:
        parity.check(executor)
    said = str(caught.value)
    assert said.startswith(f"stage {stage} does not answer on Fake GPU through ONNX Runtime CUDA")
    assert words in said
    assert f"duplexbox export verify {SMALL}" in said
    assert said.endswith("To start all the same: [engine] check_golden = false")


def test_a_rounding_error_is_none_and_is_told(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    injured(
        executor, monkeypatch, "temporal", lambda: added(executor, "temporal", "hidden", 0, 2e-3)
    )
    found = parity.check(executor)
    assert 0.1 < found.furthest < 1
    assert found.where == "temporal: hidden"


def test_tokens_of_another_model_are_found_though_some_may_differ(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = executor.wire_address("codes")

    def other(count: int) -> Callable[[], None]:
        def change() -> None:
            codes = np.frombuffer(cuda.read_device(place, 3 * 8 * 8), np.int64).copy()
            codes[:count] += 1
            cuda.write_device(place, codes.tobytes())

        return change

    with monkeypatch.context() as patch:
        injured(executor, patch, "depth", other(2))
        assert parity.check(executor).stages == 4
    injured(executor, monkeypatch, "depth", other(24))
    with pytest.raises(ParityFailed, match=r"codes has 24 of 24 choices wrong .*; 2 may"):
        parity.check(executor)


def test_a_tick_that_is_put_together_wrongly_is_found_by_the_call(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = executor.step

    def wrong(batch: int) -> None:
        step(batch)
        added(executor, "mimi_encode", "user_codes", 0, 1)

    monkeypatch.setattr(executor, "step", wrong)
    with pytest.raises(ParityFailed, match=r"1 of 8 user_codes differ at tick 0; .* --eager"):
        parity.check(executor)


def test_what_is_drawn_has_a_limit_and_the_young_are_asked_beyond_it(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity._Budget, "__init__", lambda self: setattr(self, "values", 40_000))
    found = parity.check(executor)
    assert (found.stages, found.full) == (4, 1), "depth draws nothing"


def test_one_slot_is_enough(demo: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(demo, 1, EAGER)
    found = parity.check(executor)
    assert (found.stages, found.full, found.same_ticks) == (4, 0, 32)
    executor.close()


def test_golden_data_that_is_damaged_is_the_bundles_fault(
    demo: Bundle, driver: FakeDriver, tmp_path: Path
) -> None:
    shutil.copytree(SMALL, tmp_path / "demo")
    executor = CudaExecutor(bundle.read(tmp_path / "demo", hashes=False), 1, EAGER)
    path = tmp_path / "demo/golden/temporal.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"temporal.safetensors: cut short.*Copy the bundle"):
        parity.check(executor)
    executor.close()


def test_rows_of_narrow_floats_are_rounded_as_the_kernels_round() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for dtype in ("bfloat16", "float16", "float32"):
        stored = packed(values, dtype)
        np.testing.assert_array_equal(stored, lm_reference.store(dtype, values))
        np.testing.assert_array_equal(unpacked(stored), lm_reference.values(stored))


@pytest.fixture
def box(demo: Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConfig]:
    """A box on the fake GPU, whose driver captures nothing."""
    driver = fake_driver.install(monkeypatch, real_opening=True)
    monkeypatch.setattr(cuda_executor.CudaExecutor, "_prepare", lambda *_: None)
    monkeypatch.setattr(cuda_executor.CudaExecutor, "step", lambda *_: None)
    yield EngineConfig(SMALL, slots=3, executor="cuda", kernels=SMALL)
    assert driver.held == {}


def test_a_box_says_what_was_compared_or_that_nothing_was(
    demo: Bundle, box: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    silent = msgspec.structs.replace(demo.manifest, golden_call="")
    quiet = Bundle(demo.path, silent)
    with caplog.at_level(logging.INFO):
        open_engine(quiet, box).executor.close()
        open_engine(quiet, msgspec.structs.replace(box, check_golden=False)).executor.close()
        open_engine(
            Bundle(demo.path, msgspec.structs.replace(silent, golden=())), box
        ).executor.close()
    assert "golden data: 4 stages answer as recorded, 4 at every age" in caplog.text
    assert "golden data: not compared, because [engine] check_golden = false" in caplog.text
    assert "golden data: the bundle carries no golden data" in caplog.text


def test_a_box_whose_gpu_computes_something_else_does_not_open(
    demo: Bundle, box: EngineConfig
) -> None:
    """The call's ticks leave nothing behind here, which is as wrong as can be."""
    with pytest.raises(ParityFailed, match=r"the recorded call of .* goes otherwise on Fake GPU"):
        open_engine(demo, box)


def test_the_command_says_what_was_found_and_fails_where_it_differs(
    demo: Bundle,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda_executor.CudaExecutor, "_prepare", lambda *_: None)
    monkeypatch.setattr(parity, "_check_call", lambda *_: None)  # it replays graphs
    assert cli.main(["check", str(SMALL), "--no-hashes"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Fake GPU through ONNX Runtime CUDA: 4 stages answer as recorded, 4 at")
    monkeypatch.setitem(answers.TOLERANCE, "float32", 1e-15)
    assert cli.main(["check", str(SMALL), "--no-hashes"]) == 1
    assert "stage mimi_encode does not answer on Fake GPU" in capsys.readouterr().err
    assert driver.held == {}


def test_a_bundle_without_golden_data_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = toy.write_toy(tmp_path / "toy").path
    assert cli.main(["check", str(path)]) == 1
    assert "carries no golden data: nothing to compare with" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_answers_what_was_recorded(demo: Bundle) -> None:
    executor = CudaExecutor(demo, 3)
    found = parity.check(executor)
    executor.close()
    assert (found.full, found.same_ticks) == (4, 32), str(found)
