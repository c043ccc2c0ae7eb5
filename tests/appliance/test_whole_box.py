"""How old the callers of `bench.whole_box` are made, and that old is what they are then."""

from pathlib import Path

import numpy as np
import pytest

from bench import whole_box
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.ort_executor import OrtExecutor
from tests.engines import fake_driver, toy
from tests.fakes import make_bundle


@pytest.mark.parametrize("sessions", [1, 3, 80])
@pytest.mark.parametrize("ticks", [40, 6750])
def test_windows_are_full_and_wrap_one_after_the_other(
    tmp_path: Path, sessions: int, ticks: int
) -> None:
    manifest = make_bundle(tmp_path).manifest
    full = manifest.ticks_until_full()
    ages = whole_box.staggered(manifest, sessions, ticks, 2.0)
    assert len(ages) == sessions
    assert all(full <= age < 2 * full for age in ages)
    assert all(whole_box._wraps(manifest, age, ticks) for age in ages)
    wraps = sorted(2 * full - age for age in ages)  # ticks into the run
    assert len(set(wraps)) >= min(sessions, ticks, full) // 2
    assert whole_box.staggered(manifest, 2, ticks, 0.0) == [0, 0]


@pytest.mark.parametrize("on_a_gpu", [True, False])
def test_whoever_joins_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool
) -> None:
    bundle = toy.write_toy(tmp_path / "toy")
    ages = [700, 500, 301]
    executor: CudaExecutor | OrtExecutor = OrtExecutor(bundle, 3)
    if on_a_gpu:
        fake_driver.install(monkeypatch)
        executor = CudaExecutor(bundle, 3, CudaOptions(graphs=False))
    executor.join(0, {})
    executor.step(1)
    whole_box.make_old(executor, ages)
    for slot in (0, 1):
        executor.join(slot, {"sampling.gain": 0.5})
        executor.step(slot + 1)
    executor.audio_in[:] = 1.0
    executor.step(2)
    if isinstance(executor, CudaExecutor):
        frames = [int(executor.region("frames", slot)) for slot in range(2)]
        gains = [float(executor.region("sampling.gain", slot)) for slot in range(2)]
    else:
        frames = executor.region("frames")[:2].tolist()
        gains = executor.region("sampling.gain")[:2].tolist()
    assert frames == [703, 502]
    assert gains == [0.5, 0.5]
    assert np.isfinite(executor.audio_out[:2]).all()
    executor.close()
