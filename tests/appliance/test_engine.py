"""What a box runs its bundle on, and what an operator reads when that cannot be."""

import logging
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from appliance.admission import Reason, admit, plan_memory_shed
from appliance.config import AdmissionConfig, EngineConfig
from appliance.engine import driver_version, open_engine
from appliance.foresight import Foresight
from appliance.step_model import StepSamples
from engines import cuda_executor
from engines.bundle import Bundle, BundleError
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaParking
from engines.executor import NoRoom, OnDevice
from engines.gpu import NotReady
from engines.ort_executor import OrtExecutor
from tests.appliance.test_tick_loop import Desk
from tests.engines import fake_driver, toy
from tests.engines.fake_driver import PAGE, FakeDriver

ROWS = 1024
"""Of the toy's ring: 8 KiB a session, two pages of the fake driver."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "RETAIN", ROWS)
        text = toy.HEAR.replace(",5,2]", f",{ROWS},2]").replace("{5}", f"{{{ROWS}}}")
        patch.setattr(toy, "HEAR", text)
        return toy.write_toy(tmp_path_factory.mktemp("bundle") / "toy")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with two GPUs, no graphs, and enough memory."""
    return machine(monkeypatch)


def machine(monkeypatch: pytest.MonkeyPatch, pages: int = 4096) -> FakeDriver:
    driver = fake_driver.install(monkeypatch, pages * PAGE, real_opening=True)
    monkeypatch.setattr(
        cuda_executor.CudaOptions.__init__,
        "__defaults__",
        tuple(
            False if name == "graphs" else value
            for name, value in zip(
                CudaOptions.__dataclass_fields__,
                CudaOptions.__init__.__defaults__ or (),
                strict=True,
            )
        ),
    )
    return driver


def config(bundle: Bundle, executor: str = "auto", **fields: int) -> EngineConfig:
    return EngineConfig(bundle.path, executor=executor, **fields)  # type: ignore[arg-type]


def test_a_machine_without_a_gpu_serves_on_its_cpu_and_says_why(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        opened = open_engine(bundle, config(bundle))
    assert isinstance(opened.executor, OrtExecutor)
    assert (opened.gpu, opened.driver, opened.executor.slots) == ("none", "none", 4)
    assert "CPU, one thread" in opened.name
    assert "the CPU, because: onnxruntime" in caplog.text
    assert not isinstance(opened.executor, OnDevice)
    with pytest.raises(NotReady, match=r"has no CUDAExecutionProvider\. Install the GPU build"):
        open_engine(bundle, config(bundle, "cuda"))


def test_a_machine_with_a_gpu_serves_on_it(
    bundle: Bundle, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        opened = open_engine(bundle, config(bundle, gpu=1, slots=3))
    executor = opened.executor
    assert isinstance(executor, CudaExecutor)
    assert (opened.gpu, executor.slots, executor.options.ordinal) == ("Fake GPU 1", 3, 1)
    assert "on Fake GPU 1, gpu=1 slots=3" in caplog.text
    assert isinstance(executor, OnDevice)
    assert opened.memory_bytes == executor.memory().for_sessions > 3 * executor.memory().session
    executor.close()
    cpu = open_engine(bundle, config(bundle, "cpu"))
    assert isinstance(cpu.executor, OrtExecutor)


@pytest.mark.parametrize("executor", ["auto", "cuda"])
def test_a_gpu_that_another_box_holds_is_an_error_not_a_slow_box(
    bundle: Bundle, driver: FakeDriver, executor: str
) -> None:
    first = open_engine(bundle, config(bundle))
    with pytest.raises(NotReady, match=r"process \d+ already runs a box on Fake GPU 0.*\(kill"):
        open_engine(bundle, config(bundle, executor))
    open_engine(bundle, config(bundle, gpu=1)).executor.close()
    first.executor.close()


def test_what_is_wrong_is_said_with_the_numbers_and_the_remedy(
    bundle: Bundle, driver: FakeDriver
) -> None:
    with pytest.raises(NotReady, match=r"GPU 7 cannot be used: .*INVALID_DEVICE.*nvidia-smi"):
        open_engine(bundle, config(bundle, "cuda", gpu=7))
    driver.version = 12040
    with pytest.raises(NotReady, match=r"speaks CUDA 12\.4 and 13\.0 is needed.*580"):
        open_engine(bundle, config(bundle, "cuda"))
    driver.version = 13000
    with pytest.raises(BundleError, match=r"9 slots .* 1\.\.4.*--batches 1-9"):
        open_engine(bundle, config(bundle, slots=9))
    driver.foreign_bytes = driver.total_bytes - 7 * PAGE
    with pytest.raises(NotReady, match=r"4 slots need .* GB on Fake GPU 0.*Run at most 3 slots"):
        open_engine(bundle, config(bundle, "cuda", slots=4))
    assert isinstance(open_engine(bundle, config(bundle, slots=4)).executor, OrtExecutor)
    assert driver.held == {}


def test_as_many_slots_as_fit_where_none_are_asked_for(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, pages=7)
    with caplog.at_level(logging.INFO):
        opened = open_engine(bundle, config(bundle, "cuda"))
    assert opened.executor.slots == 3
    assert "engine: 3 slots, because: 4 slots need" in caplog.text
    opened.executor.close()


def test_memory_that_somebody_else_takes_is_refused_before_it_is_missing(
    bundle: Bundle, driver: FakeDriver, tmp_path: Path
) -> None:
    executor = CudaExecutor(bundle, 4, CudaOptions(graphs=False))
    desk = Desk(tmp_path)
    foresight = Foresight(
        desk.loop, bundle.manifest, AdmissionConfig(), 4, 1 << 40, 1, StepSamples(), executor
    )
    foresight.look_at_time = False
    assert foresight.headroom(0, True, False).free == 4
    use = executor.memory()
    assert use.session == 2 * PAGE
    driver.foreign_bytes = driver.free_bytes + use.committed - 5 * PAGE  # it takes all but five
    room = foresight.headroom(2, True, False)
    assert room.fit_memory == 2
    refusal = admit(room, bundle.manifest, {})
    assert refusal is not None
    assert refusal.reason is Reason.MEMORY
    assert f"3 sessions would own {6 * PAGE} bytes" in refusal.detail
    assert f"the limit is {5 * PAGE}" in refusal.detail
    desk.close()
    executor.close()


def test_a_session_for_which_there_is_no_memory_is_alone_in_its_trouble(
    bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(bundle, 4, CudaOptions(graphs=False))
    executor.join(0, {})
    executor.step(1)
    for _ in range(5):
        executor.step(1)
    executor.join(1, {})  # a prepared slot needs no memory
    executor.step(2)
    while executor.state.range._stock:  # let spare pages go, as `close` would
        driver.cuMemRelease(executor.state.range._stock.pop())
    driver.foreign_bytes = driver.free_bytes
    for _ in range(3):
        executor.step(2)
    executor.join(3, {})  # takes what was kept ready in slot 2
    with pytest.raises(NoRoom, match="no memory for a session in slot 2"):
        executor.join(2, {})
    executor.step(2)
    assert int(executor.region("frames", 0)) == 11
    driver.foreign_bytes = 0
    executor.join(2, {})
    executor.step(3)
    assert int(executor.region("frames", 2)) == 1
    executor.close()


def test_a_prompt_for_which_there_is_no_memory_costs_nobody_else_a_frame(
    bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(bundle, 4, CudaOptions(graphs=False))
    executor.join(0, {})
    executor.step(1)
    parking = CudaParking(executor)
    parking.clear(3)
    executor.step(1)
    while executor.state.range._stock:
        driver.cuMemRelease(executor.state.range._stock.pop())
    driver.foreign_bytes = driver.free_bytes
    parking.write(3, "hear.ring", 0, np.ones((1, 400, toy.WIDTH), np.float32))  # its first page
    with pytest.raises(NoRoom, match="no memory for a session in slot 1"):
        parking.settle(3, 1, {}, {"frames": np.array(900)})
    parking.leave(3)
    parking.clear(3)
    rows = np.ones((1, 900, toy.WIDTH), np.float32)
    parking.write(3, "hear.ring", 0, rows)  # into what the one before gave back
    with pytest.raises(NoRoom, match="no memory for a prompt in slot 2"):
        parking.clear(2)
    for _ in range(5):
        executor.step(1)
    assert int(executor.region("frames", 0)) == 7
    executor.close()


def test_the_newest_is_sent_away_when_memory_runs_out_under_the_others(
    bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(bundle, 4, CudaOptions(graphs=False))
    for slot in range(3):
        executor.join(slot, {})
    executor.step(3)
    while not executor.memory().short_in_ticks:
        driver.foreign_bytes += driver.free_bytes
        executor.state.range._stock.clear()
        executor.step(3)
        assert executor.arena.tick < ROWS
    short = executor.memory().short_in_ticks
    assert short is not None
    assert 0 < short <= executor.arena.ahead_ticks
    assert plan_memory_shed(17, 1000, [4, 9, 7]) is None
    assert plan_memory_shed(16, 3, [4, 9, 7]) is None
    assert plan_memory_shed(16, 1000, [4, 9, 7]) == 9
    assert plan_memory_shed(0, 1000, [4]) is None
    batch = 2  # it went: its pages are the others'
    for _ in range(2 * short + 64):
        executor.step(batch)
    assert executor.arena.counts.late == 0
    executor.close()


def test_other_threads_see_what_was_seen_last(bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(bundle, 2, CudaOptions(graphs=False))
    before = executor.memory()
    driver.foreign_bytes = 100 * PAGE
    seen = deque[int]()
    other = threading.Thread(target=lambda: seen.append(executor.memory().device_used))
    other.start()
    other.join()
    assert seen.pop() == before.device_used
    for _ in range(cuda_executor.LOOK_TICKS):
        executor.step(1)
    assert executor._free_bytes == driver.free_bytes
    assert executor.memory().device_used >= before.device_used + 100 * PAGE
    executor.close()


def test_the_driver_has_a_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    )
    assert driver_version(path) == "580.159.04"
    assert driver_version(tmp_path / "none") == "unknown"
