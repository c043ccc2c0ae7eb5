"""A bundle cut at attention on a GPU, kernels of ours in its stages' place where it names some.

`make test-gpu`. Small and float32, so that greedy words must be the CPU's, whatever computes.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import ring_tick
from engines import snapshot
from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaParking
from engines.executor import Executor
from engines.ort_executor import OrtExecutor
from engines.snapshot import Age
from export import build, tiny
from export.source import from_modules
from tests.export.calls import GREEDY, speech
from tests.export.test_ring_cuda import CONFIG, SEED, calls

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

LONG = replace(CONFIG, lm=replace(CONFIG.lm, context=300))
"""A ring of several pieces."""
TICKS = 700
SAMPLES = LONG.mimi.samples_per_frame


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    mimi, lm = tiny.seeded(LONG, SEED)
    source = from_modules(LONG, mimi, lm, pieces=tiny.pieces(LONG))
    folder = tmp_path_factory.mktemp("bundles") / "long"
    return build.build(source, folder, largest_batch=8, attention="ring")


@pytest.fixture
def options(tmp_path_factory: pytest.TempPathFactory) -> CudaOptions:
    return CudaOptions(kernels=tmp_path_factory.getbasetemp() / "kernels", poison=255)


def listen(executor: Executor, ticks: int = TICKS) -> list[bytes]:
    """Four sessions come, one goes and its place is taken again; all that was said."""
    pcm = speech(5, ticks, 4, SAMPLES).numpy()
    heard, batch = [], 0
    for tick in range(ticks):
        if tick in (0, 3, 40, 330):
            executor.join(batch, GREEDY)
            batch += 1
        if tick == 320:
            executor.move(batch - 1, 0)
            batch -= 1
        executor.audio_in[:batch] = pcm[tick, :batch]
        executor.step(batch)
        heard.append(executor.text[:batch].tobytes() + executor.audio_out[:batch].tobytes())
    return heard


@pytest.mark.parametrize("kernel_stages", [True, False])
def test_words_are_the_cpus(long: Bundle, options: CudaOptions, kernel_stages: bool) -> None:
    expected, _ = calls(OrtExecutor(long, 3))
    executor = CudaExecutor(long, 3, replace(options, kernel_stages=kernel_stages))
    assert executor.layout.has_places
    words, _ = calls(executor)
    executor.close()
    for tick, (ours, theirs) in enumerate(zip(words, expected, strict=True)):
        np.testing.assert_array_equal(ours, theirs, f"at {tick}")


def test_replay_rerun_eager_and_static_give_the_same_bits(
    long: Bundle, options: CudaOptions
) -> None:
    executor = CudaExecutor(long, 4, options)
    first = listen(executor)
    assert listen(executor) == first
    assert executor.arena.counts.late == 0
    executor.close()
    for other in (replace(options, graphs=False), replace(options, on_demand=False)):
        executor = CudaExecutor(long, 4, other)
        assert listen(executor) == first
        executor.close()


def test_every_attention_answers_alike_in_every_batch(
    long: Bundle, options: CudaOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_tick, "BATCHES", (1, 3, 8))
    executor = CudaExecutor(long, 8, replace(options, batches=(8,)))
    assert ring_tick.odd_attentions(executor) == 0
    executor.close()


def test_a_session_saved_on_one_box_goes_on_in_another_slot_of_another(
    long: Bundle, options: CudaOptions, tmp_path: Path
) -> None:
    manifest, pcm = long.manifest, speech(6, 400, 1, SAMPLES).numpy()
    executor = CudaExecutor(long, 2, options)
    executor.join(0, GREEDY)
    for frame in pcm[:350]:
        executor.audio_in[:1] = frame
        executor.step(1)
    age = Age(snapshot.NONE, 0, 350, whole=True)
    saved = snapshot.save(CudaParking(executor), manifest, 0, age)
    expected = []
    for frame in pcm[350:]:
        executor.audio_in[:1] = frame
        executor.step(1)
        expected.append(executor.audio_out[0].tobytes())
    executor.close()
    path = tmp_path / "one.snap"
    snapshot.write(path, manifest, saved)
    other = CudaExecutor(long, 4, options)
    other.join(0, GREEDY)
    other.step(1)
    snapshot.restore(CudaParking(other), manifest, snapshot.read(path, manifest, age), 3)
    CudaParking(other).settle(3, 0, {}, saved.values)  # it takes the place of the one there
    for frame, said in zip(pcm[350:], expected, strict=True):
        other.audio_in[:1] = frame
        other.step(1)
        assert other.audio_out[0].tobytes() == said
    other.close()
