"""The CUDA executor against the CPU's: on a fake driver everywhere, on a GPU where there is one."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from engines import cuda
from engines.bundle import Bundle, BundleError
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.executor import Executor, SettingError
from engines.gpu import NotReady
from engines.ort_executor import OrtExecutor
from tests.engines import fake_driver, fake_graphs, toy
from tests.engines.conftest import PAGED_ROWS
from tests.engines.fake_driver import FakeDevice, FakeDriver

EAGER = CudaOptions(graphs=False)


def run_calls(executor: Executor, ticks: int) -> list[bytes]:
    """Three sessions that join, move and leave; everything they heard, in order."""
    rng = np.random.default_rng(5)
    heard: list[bytes] = []
    batch = 0
    for tick in range(ticks):
        if tick in (0, 2, 5, 400):
            executor.join(batch, {"sampling.gain": 0.5, "sampling.seed": tick})
            batch += 1
        if tick == 300:
            executor.move(batch - 1, 0)
            batch -= 1
        executor.audio_in[:batch] = rng.normal(size=(batch, toy.SAMPLES))
        executor.step(batch)
        heard.append(executor.audio_out[:batch].tobytes())
        heard.append(executor.text[:batch].tobytes() + executor.valid[:batch].tobytes())
    return heard


@pytest.mark.parametrize("graphs", [False, True])
def test_calls_sound_as_on_the_cpu_bit_for_bit(
    toy_bundle: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    fake_graphs.install(monkeypatch)
    expected = run_calls(OrtExecutor(toy_bundle, 4), 1300)
    executor = CudaExecutor(toy_bundle, 4, CudaOptions(graphs=graphs))
    assert run_calls(executor, 1300) == expected
    assert executor.arena.counts.late == 0
    executor.close()
    assert driver.held == {}
    assert driver.pages == 0


def test_an_executor_that_was_opened_has_nothing_under_way(
    toy_bundle: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what a library does to its weights, on a stream of its own, when it runs first."""
    opened, library = CudaExecutor._open_stages, cuda.Stream()
    loaded: list[bool] = []

    def load(executor: CudaExecutor) -> None:
        opened(executor)
        fake_driver.later(library, lambda: loaded.append(True))

    def watched(executor: CudaExecutor, batch: int) -> None:
        assert loaded == [True]

    monkeypatch.setattr(CudaExecutor, "_open_stages", load)
    monkeypatch.setattr(CudaExecutor, "_prepare", watched)
    executor = CudaExecutor(toy_bundle, 2, EAGER)
    assert driver.streams.is_idle
    executor.close()


def test_a_timed_tick_is_a_tick(toy_bundle: Bundle, driver: FakeDriver) -> None:
    heard = []
    for timed in (False, True):
        executor = CudaExecutor(toy_bundle, 2, EAGER)
        executor.audio_in[0] = 0.25
        executor.join(0, {})
        spent = np.zeros(len(executor.stage_names()), np.int64)
        if timed:
            executor.step_timed(1, itertools.count(1).__next__, spent)
        else:
            executor.step(1)
        assert timed == bool(spent.all())
        heard.append(executor.audio_out[0].tobytes())
        executor.close()
    assert heard[0] == heard[1] != bytes(len(heard[0]))


def test_only_live_rows_move_on(toy_bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    for slot in range(3):
        executor.join(slot, {})
    executor.step(2)
    assert [int(executor.region("frames", slot)) for slot in range(3)] == [1, 1, 0]
    executor.step(0)
    assert [int(executor.region("frames", slot)) for slot in range(3)] == [1, 1, 0]
    executor.join(1, {})
    assert [int(executor.region("frames", slot)) for slot in range(3)] == [1, 0, 0]
    executor.close()


def test_batches_can_be_tried_out_with_nobody_there(toy_bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    for batch in (1, 4, 2, 3, 3):
        executor.step(batch)
    assert [int(executor.region("frames", slot)) for slot in range(4)] == [5, 4, 2, 1]
    executor.close()


def test_the_thread_that_ticks_need_not_be_the_one_that_loaded(
    toy_bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(toy_bundle, 2, EAGER)
    device = executor.device
    assert isinstance(device, FakeDevice)
    executor.step(1)
    assert device.threads == [threading.get_ident()]
    other = threading.Thread(target=run_calls, args=(executor, 2))
    other.start()
    other.join()
    executor.close()
    assert device.threads == [threading.get_ident(), other.ident, threading.get_ident()]


def test_a_session_can_be_made_to_look_old(toy_bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(toy_bundle, 2, EAGER)
    executor.age(0, 700)
    assert int(executor.region("frames", 0)) == 700
    ring = executor.region("hear.ring", 0).view(np.uint8)
    assert ring.size == 700 * 8
    assert (ring == 0x3C).all()
    executor.step(1)
    assert int(executor.region("frames", 0)) == 701
    assert np.isfinite(executor.audio_out[0]).all()
    executor.close()


def test_memory_is_reported_and_follows_the_calls(toy_bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    executor.join(0, {})
    for _ in range(3):
        executor.step(1)
    young = executor.memory()
    assert young.reserved == 4 * PAGED_ROWS * 8
    counts = executor.arena.counts
    assert counts.mapped - counts.unmapped == 2  # its own first page, and the next joiner's
    for _ in range(PAGED_ROWS):
        executor.step(1)
    assert counts.mapped - counts.unmapped == 3
    old = executor.memory()
    assert old.committed <= old.reserved
    assert old.full == executor.layout.whole_bytes + old.reserved
    executor.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_tick_that_is_over_gives_back_no_second_page(
    toy_bundle: Bundle, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    executor.arena.pace = 4
    for slot in range(4):
        executor.age(slot, PAGED_ROWS)
    executor.step(4)
    if is_over:
        monkeypatch.setattr(cuda.Stream, "is_idle", lambda _: True)
    counts = executor.arena.counts
    before = counts.unmapped
    executor.step(1)
    given = counts.unmapped - before
    assert given == 1 if is_over else given > 1
    executor.close()


def test_settings_are_checked_before_anything_changes(
    toy_bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(toy_bundle, 2, EAGER)
    executor.join(0, {})
    executor.step(1)
    with pytest.raises(SettingError, match="outside"):
        executor.join(0, {"sampling.gain": 9})
    assert int(executor.region("frames", 0)) == 1
    executor.close()


def test_more_slots_than_fit_are_refused_with_the_numbers(
    toy_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver.install(monkeypatch, total_bytes=7 * fake_driver.PAGE)
    with pytest.raises(NotReady, match=r"4 slots need .* GB on Fake GPU.*Run at most 3 slots"):
        CudaExecutor(toy_bundle, 4, EAGER)


def test_a_second_box_on_the_gpu_is_refused(toy_bundle: Bundle, driver: FakeDriver) -> None:
    executor = CudaExecutor(toy_bundle, 2, EAGER)
    with pytest.raises(NotReady, match=r"process \d+ already runs a box on Fake GPU"):
        CudaExecutor(toy_bundle, 2, EAGER)
    executor.close()
    CudaExecutor(toy_bundle, 2, EAGER).close()


def test_more_slots_than_profiles(toy_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"9 slots .* 1\.\.4.*--batches 1-9"):
        CudaExecutor(toy_bundle, 9)


def test_a_machine_without_cuda_says_so(toy_bundle: Bundle, tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has the GPU build of ONNX Runtime")
    with pytest.raises(NotReady, match=r"has no CUDAExecutionProvider\. Install the GPU build"):
        CudaExecutor(toy_bundle, 1)
