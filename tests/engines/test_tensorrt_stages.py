"""The TensorRT executor on a fake driver and a fake run-time, which is held to the real one."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from appliance.config import EngineConfig
from appliance.engine import open_engine
from engines import bundle, cli, cuda_executor, gpu, plans, tensorrt_stages
from engines.bundle import Bundle
from engines.cuda_executor import CudaOptions
from engines.machine import look
from engines.ort_executor import OrtExecutor
from engines.plans import Machine, Plans, PlansError
from engines.tensorrt_executor import TensorrtExecutor
from engines.tensorrt_stages import PlanFailed
from tests.engines import fake_driver, fake_tensorrt, toy
from tests.engines.fake_driver import FakeDriver
from tests.engines.fake_plans import LARGEST, WEIGHTS_FILE, add_weight, write_plans
from tests.engines.test_cuda_executor import run_calls

EAGER = CudaOptions(graphs=False)
LEAN = look().version_of("tensorrt_lean")


@pytest.fixture
def opened(tmp_path: Path) -> Bundle:
    folder = tmp_path / "toy"
    toy.write_toy(folder)
    add_weight(folder)
    draft = toy.manifest()
    names = (*draft.files, WEIGHTS_FILE)
    files = {name: bundle.describe_file(folder / name) for name in names}
    return bundle.write(folder, msgspec.structs.replace(draft, files=files))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A machine with the fake GPU, the fake run-time, and no ONNX Runtime for CUDA."""
    driver = fake_driver.install(monkeypatch)

    def refuse(ordinal: int) -> object:
        raise AssertionError("asked for ONNX Runtime's CUDA provider")

    monkeypatch.setattr(gpu, "open_gpu", lambda _: fake_driver.FakeDevice(driver))
    monkeypatch.setattr(cuda_executor, "open_device", refuse)
    monkeypatch.setattr(tensorrt_stages, "load_module", lambda flavour: fake_tensorrt)
    yield driver
    assert driver.held == {}


def test_calls_sound_as_on_the_cpu_bit_for_bit(opened: Bundle, driver: FakeDriver) -> None:
    """Profiles, addresses, weights and rings: any of them wrong is a wrong sound."""
    write_plans(opened)
    expected = run_calls(OrtExecutor(opened, LARGEST), 600)
    executor = TensorrtExecutor(opened, LARGEST, EAGER)
    assert run_calls(executor, 600) == expected
    assert len(set(expected)) > 300
    executor.close()


def test_scratch_is_shared_and_the_largest_any_profile_needs(
    opened: Bundle, driver: FakeDriver
) -> None:
    write_plans(opened)
    executor = TensorrtExecutor(opened, 2, EAGER)
    assert executor._stages.scratch_bytes == LARGEST * fake_tensorrt.SCRATCH_BYTES
    assert executor._stages.weights_bytes == 16
    assert executor.runs_on == f"{fake_tensorrt.__name__} {fake_tensorrt.__version__}"
    base = super(TensorrtExecutor, executor).memory().whole
    assert executor.memory().whole == base + LARGEST * fake_tensorrt.SCRATCH_BYTES
    executor.close()


def test_what_was_compiled_is_kept_beside_its_plan_and_used_again(
    opened: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = write_plans(opened)
    folder = opened.path / "plans/sm_90"
    (folder / "hear-0123456789ab.cache").write_bytes(b"of a plan that is gone")
    TensorrtExecutor(opened, 2, EAGER).close()
    kept = {f"{p.stage}-{p.sha256[:12]}.cache" for p in recorded.plans}
    assert {path.name for path in folder.glob("*.cache")} == kept
    assert all((folder / name).read_bytes() == fake_tensorrt.COMPILED for name in kept)
    seen: list[bytes] = []

    def deserialize(cache: object, blob: bytes) -> bool:
        seen.append(blob)
        return True

    monkeypatch.setattr(fake_tensorrt.IRuntimeCache, "deserialize", deserialize)
    TensorrtExecutor(opened, 2, EAGER).close()
    assert seen == [fake_tensorrt.COMPILED] * 2


def test_a_folder_that_cannot_be_written_only_costs_the_next_start(
    opened: Bundle,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_plans(opened)

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level("INFO"):
        TensorrtExecutor(opened, 2, EAGER).close()
    assert "compiled kernels not kept" in caplog.text


def refused(opened: Bundle, slots: int = LARGEST) -> str:
    with pytest.raises((PlansError, PlanFailed)) as caught:
        TensorrtExecutor(opened, slots, EAGER)
    return str(caught.value)


def test_no_plans_for_this_gpu_names_those_there_are_and_the_command(
    opened: Bundle, driver: FakeDriver
) -> None:
    recorded = write_plans(opened)
    (opened.path / "plans/sm_90").rename(opened.path / "plans/sm_89")
    said = refused(opened)
    assert "has no plans for Fake GPU (sm_90); it has: sm_89" in said
    assert said.endswith(f"build {opened.path} --target sm_90 --batches 1-4")
    assert recorded.target == "sm_90"


def replaced(**change: Any) -> Callable[[Plans], Plans]:
    return lambda recorded: msgspec.structs.replace(recorded, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced(compute_capability="8.9"), "this box has Fake GPU (sm_90)"),
        (replaced(version="1.6.0.1"), "tensorrt_rtx 1.7.1.116, which cannot open them"),
        (
            replaced(flavour="tensorrt"),
            f"this machine has tensorrt {LEAN}, which cannot open them",
        ),
        (replaced(platform="linux-aarch64"), "built for linux-aarch64"),
        (replaced(checkpoint_sha256="9" * 64), "were built from checkpoint 999999999999…"),
        (
            lambda recorded: msgspec.structs.replace(recorded, plans=recorded.plans[:1]),
            "no plan of stage speak",
        ),
    ],
)
def test_foreign_plans_are_refused_before_the_run_time_sees_them(
    opened: Bundle,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Plans], Plans],
    words: str,
) -> None:
    def load(flavour: str) -> ModuleType:
        raise AssertionError("the run-time was loaded")

    monkeypatch.setattr(tensorrt_stages, "load_module", load)
    write_plans(opened, change)
    assert words in refused(opened)


def test_fewer_profiles_than_slots_are_refused(opened: Bundle, driver: FakeDriver) -> None:
    def fewer(recorded: Plans) -> Plans:
        few = [msgspec.structs.replace(p, profiles=plans.exact(2)) for p in recorded.plans]
        return msgspec.structs.replace(recorded, plans=tuple(few))

    write_plans(opened, fewer)
    said = refused(opened)
    assert "takes batches of exactly 1..2 and 4 sessions are wanted" in said
    assert "--batches 1-4" in said


def test_a_damaged_plan_is_refused_by_its_hash(opened: Bundle, driver: FakeDriver) -> None:
    write_plans(opened)
    path = opened.path / "plans/sm_90/hear.plan"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert "hear.plan was changed after it was built" in refused(opened)
    path.write_bytes(raw[:100])
    assert "hear.plan has 100 bytes and should have" in refused(opened)


def with_file(stage: str, edit: Callable[[dict[str, Any]], None]) -> Callable[[Bundle], None]:
    """A plan whose file is not what plans.json describes, although its hash is right."""

    def write(opened: Bundle) -> None:
        recorded = write_plans(opened)
        folder = opened.path / "plans/sm_90"
        path = folder / f"{stage}.plan"
        tree = json.loads(path.read_text())
        edit(tree)
        path.write_text(json.dumps(tree))
        spec = bundle.describe_file(path)
        changed = [
            msgspec.structs.replace(p, sha256=spec.sha256, bytes=spec.bytes)
            if p.stage == stage
            else p
            for p in recorded.plans
        ]
        plans.write(folder, msgspec.structs.replace(recorded, plans=tuple(changed)))

    return write


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tree: tree.pop("model"), "cannot open the plan of stage hear"),
        (lambda tree: tree["outputs"].pop("heard"), "output heard is missing"),
        (
            lambda tree: tree["inputs"].update(stranger=["FLOAT", [1]]),
            "stranger is no tensor of it",
        ),
        (lambda tree: tree["inputs"].update(frames=["INT32", [-1]]), "should be int64"),
        (lambda tree: tree["inputs"].update(pcm=["FLOAT", [-1, 1, 5]]), "pcm is (-1, 1, 5), not"),
        (lambda tree: tree["profiles"].pop(), "3 profiles, not 4"),
        (lambda tree: tree["aliases"].clear(), "hear.ring is not updated in place"),
    ],
)
def test_an_engine_that_is_not_the_recorded_plan_is_refused(
    opened: Bundle, driver: FakeDriver, edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    with_file("hear", edit)(opened)
    said = refused(opened)
    assert words in said
    assert f"duplexbox export build {opened.path} --target sm_90" in said


def test_a_context_that_cannot_be_captured_is_named_with_its_batch(
    opened: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plans(opened)
    never = lambda *_: False  # noqa: E731
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, "is_stream_capturable", never)
    said = refused(opened)
    assert "stage hear at batch 1 cannot be captured into a CUDA graph" in said
    assert said.endswith('Run it without plans: --executor cuda, or [engine] executor = "cuda"')


@pytest.mark.parametrize(
    "method", ["set_optimization_profile_async", "set_input_shape", "set_tensor_address"]
)
def test_every_answer_of_the_run_time_is_looked_at(
    opened: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    write_plans(opened)
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, method, lambda *_: False)
    assert "stage hear" in refused(opened)


def test_an_enqueue_that_fails_is_an_error_with_the_run_times_words(
    opened: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plans(opened)
    monkeypatch.setattr(fake_tensorrt, "SCRATCH_BYTES", 1 << 12)
    executor = TensorrtExecutor(opened, 1, EAGER)
    monkeypatch.setattr(fake_tensorrt, "SCRATCH_BYTES", 1 << 20)
    with pytest.raises(PlanFailed, match=r"stage hear failed at batch 1: enqueueV3: .* needed"):
        executor.step(1)
    executor.close()


def test_a_box_that_is_told_to_serves_by_plans_or_says_why_not(
    opened: Bundle, driver: FakeDriver
) -> None:
    config = EngineConfig(opened.path, slots=1, executor="tensorrt", kernels=opened.path)
    with pytest.raises(bundle.BundleError, match=r"has no plans for Fake GPU .*--target sm_90"):
        open_engine(opened, config)
    write_plans(opened)
    with pytest.MonkeyPatch.context() as context:  # the fake driver captures nothing
        context.setattr(TensorrtExecutor, "_prepare", lambda *_: None)
        engine = open_engine(opened, config)
    assert isinstance(engine.executor, TensorrtExecutor)
    assert engine.name == f"{fake_tensorrt.__name__} {fake_tensorrt.__version__}"
    engine.executor.close()


def test_the_bench_times_plans_like_any_other_executor(
    opened: Bundle,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_plans(opened)
    monkeypatch.setattr(gpu, "copy_rate", lambda: 4e6)
    words = f"{opened.path} --executor tensorrt --eager --batches 1,2 --ticks 3".split()
    assert cli.main(["bench", *words]) == 0
    said = capsys.readouterr().out
    assert said.count("speak ") == said.count("tick ") == 2
    name = f"{fake_tensorrt.__name__} {fake_tensorrt.__version__}"
    assert f"on Fake GPU, {name}, eager, copies at 4.00 TB/s" in said
    assert cli.main(["bench", *words, "--beside-kernels"]) == 0
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", str(opened.path), "--beside-kernels"])
    assert "--beside-kernels goes with --executor tensorrt" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_so(opened: Bundle) -> None:
    with pytest.raises(PlansError, match=r"this machine has no NVIDIA GPU.*--executor cpu"):
        tensorrt_stages.open_plans(opened, Machine("linux-x86_64"), 1)


def test_a_missing_run_time_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plans.RUN_TIMES, "tensorrt_rtx", ("no_such_run_time",))
    with pytest.raises(PlansError, match=r"not installed or does not load.*pip install"):
        tensorrt_stages.load_module("tensorrt_rtx")
