"""Sessions taken out of a GPU's slots and put back: on a fake driver, against the CPU's."""

import numpy as np
import pytest

from engines import snapshot
from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaParking
from engines.executor import Executor, SettingError
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtParking
from engines.snapshot import Age
from tests.engines import toy
from tests.engines.fake_driver import FakeDriver

EAGER = CudaOptions(graphs=False)


def hear(executor: Executor, batch: int, tick: int) -> None:
    draw = np.random.default_rng(tick)
    executor.audio_in[:batch] = draw.standard_normal((batch, toy.SAMPLES))
    executor.step(batch)


@pytest.mark.parametrize("ticks", [3, 700, 1400])
def test_a_session_of_the_cpu_goes_on_bit_for_bit_on_the_gpu(
    toy_bundle: Bundle, driver: FakeDriver, ticks: int
) -> None:
    manifest, cpu = toy_bundle.manifest, OrtExecutor(toy_bundle, 4)
    cpu.join(0, {"sampling.gain": 1.5, "sampling.seed": 9})
    for tick in range(ticks):
        hear(cpu, 1, tick)
    age = Age(snapshot.NONE, 0, ticks, whole=True)
    saved = snapshot.save(OrtParking(cpu), manifest, 0, age)
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    for slot in range(2):
        executor.join(slot, {})
    hear(executor, 2, 0)
    parking = CudaParking(executor)
    parking.clear(3)
    for piece in snapshot.pieces(manifest, age, 4096):
        hear(executor, 2, 0)  # the others' ticks go on
        snapshot.put_piece(parking, 3, manifest.region(piece.region), saved, piece)
    parking.settle(3, 2, {}, saved.values)
    assert executor.arena.age(2) == ticks
    taken = snapshot.save(parking, manifest, 2, age)  # no tick has settled anything
    for name, array in (*saved.rings.items(), *saved.values.items()):
        np.testing.assert_array_equal((taken.rings | taken.values)[name], array, name)
    for tick in range(40):
        draw = np.random.default_rng(1000 + tick)
        frame = draw.standard_normal(toy.SAMPLES)
        cpu.audio_in[0] = executor.audio_in[2] = frame
        executor.audio_in[:2] = 0.5
        cpu.step(1)
        executor.step(3)
        assert executor.audio_out[2].tobytes() == cpu.audio_out[0].tobytes(), tick
        assert executor.text[2] == cpu.text[0]
    assert executor.arena.counts.late == 0
    again = snapshot.save(parking, manifest, 2, Age(snapshot.NONE, 0, ticks + 40, whole=True))
    twin = snapshot.save(
        OrtParking(cpu), manifest, 0, Age(snapshot.NONE, 0, ticks + 40, whole=True)
    )
    for name, array in (*twin.rings.items(), *twin.values.items()):
        mine = (again.rings | again.values)[name]
        assert mine.tobytes() == array.tobytes(), name
    executor.close()
    assert driver.held == {}
    assert driver.pages == 0


def test_a_setting_that_cannot_be_leaves_the_slot_as_it_was(
    toy_bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(toy_bundle, 3, EAGER)
    executor.join(0, {})
    hear(executor, 1, 0)
    parking = CudaParking(executor)
    parking.clear(2)
    with pytest.raises(SettingError, match="outside"):
        parking.settle(2, 1, {"sampling.gain": 9}, {})
    parking.leave(2)
    hear(executor, 1, 1)
    assert int(executor.region("frames", 0)) == 2
    executor.close()


def test_pages_of_a_prompt_nobody_waits_for_are_given_back(
    toy_bundle: Bundle, driver: FakeDriver
) -> None:
    executor = CudaExecutor(toy_bundle, 4, EAGER)
    executor.join(0, {})
    for tick in range(20):
        hear(executor, 1, tick)
    counts = executor.arena.counts
    before = counts.mapped - counts.unmapped
    parking = CudaParking(executor)
    parking.clear(3)
    parking.write(3, "hear.ring", 0, np.ones((1, 900, toy.WIDTH), np.float32))
    hear(executor, 1, 0)
    held = counts.mapped - counts.unmapped
    parking.leave(3)
    for tick in range(20):
        hear(executor, 1, tick)
    assert (held - before, counts.mapped - counts.unmapped) == (2, before)
    executor.close()
