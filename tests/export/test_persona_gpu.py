"""A persona's prompt fed on a real GPU: by the library's graph, into rings of every kind.

Float32 gives the CPU's words. Rings of 8 bits go with a model in bfloat16, whose words nobody
promises: there the rows that a prompt leaves must be the CPU's, but for codes at an edge, and two
runs must be the same bit for bit. `make test-gpu`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.bundle import Bundle, Dtype
from engines.cuda_executor import CudaExecutor
from engines.ort_executor import OrtExecutor
from engines.prefill import Prompt, chunk_rows, make_prompt
from export import build, tiny
from export.cache_report import Calibration
from export.source import from_modules
from export.tiny import PERSONA_MICRO
from tests.export.calls import GREEDY, SEED, speech
from tests.export.persona import frames_of

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

CONFIG = replace(
    PERSONA_MICRO,
    name="personaplex-nano-wide",
    mimi=replace(PERSONA_MICRO.mimi, dimension=64, heads=1, layers=1),
    lm=replace(PERSONA_MICRO.lm, dimension=128, heads=2, context=64, depth_layers=1),
)
"""Heads of 64, as the kernel wants them."""

FRAMES, TICKS = 40, 60
EDGES = 0.01
"""Of the codes: more than ever lay so near an edge that another order of sums crosses it."""


def made(folder: Path, dtype: Dtype | None) -> tuple[Bundle, Prompt]:
    """dtype: of 8-bit rings; None: all of it in float32."""
    mimi, lm = tiny.seeded(CONFIG, SEED)
    source = from_modules(
        CONFIG, mimi, lm, None if dtype is None else "bfloat16", pieces=tiny.pieces(CONFIG)
    )
    calibration = None if dtype is None else Calibration(dtype, (), FRAMES)
    bundle = build.build(source, folder, largest_batch=4, attention="ring", calibration=calibration)
    assert bundle.manifest.prompt is not None
    voice = np.random.default_rng(3).normal(size=(3, CONFIG.lm.dimension)).astype(np.float32)
    embedded = voice if dtype is None else (voice.view(np.uint32) >> 16).astype(np.uint16)
    return bundle, make_prompt(
        bundle.manifest.prompt, frames_of(CONFIG.lm, FRAMES).numpy(), embedded
    )


def listen(
    executor: OrtExecutor | CudaExecutor, prompt: Prompt, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a session says after its prompt was fed beside another's ticks; and its first keys."""
    pcm = speech(5, TICKS, 2, CONFIG.mimi.samples_per_frame).numpy()
    primer = executor.primer()
    executor.join(0, GREEDY)
    primer.clear(3)
    fed, heard, keys = 0, [], np.zeros(0)
    for tick, frame in enumerate(pcm):
        left = prompt.shared_rows - fed
        if tick < TICKS // 2 and left:
            rows = chunk_rows(fed, left, most, primer.retain)
            primer.feed(3, prompt, fed, rows)
            fed += rows
        if tick == TICKS // 2:
            assert not left
            keys = primer.read(3, "temporal.layers.0.k", 0, prompt.shared_rows)
            primer.settle(3, 1, GREEDY, primer.open(3, prompt, GREEDY))
        batch = 2 if tick >= TICKS // 2 else 1
        executor.audio_in[:batch] = frame[:batch]
        executor.step(batch)
        if batch == 2:
            heard.append(int(executor.text[1]))
    executor.close()
    return np.array(heard), keys


def test_a_prompt_fed_on_a_gpu_is_taken_up_as_on_the_cpu(tmp_path: Path) -> None:
    bundle, prompt = made(tmp_path / "bundle", None)
    expected, _ = listen(OrtExecutor(bundle, 4), prompt, 7)
    found, _ = listen(CudaExecutor(bundle, 4), prompt, 7)
    np.testing.assert_array_equal(found, expected)
    assert len(set(expected.tolist())) > 3


@pytest.mark.parametrize("dtype", ["int8", "float8e4m3"])
def test_a_prompt_fed_into_8_bit_rings_leaves_the_cpus_codes(tmp_path: Path, dtype: Dtype) -> None:
    bundle, prompt = made(tmp_path / "bundle", dtype)
    _, expected = listen(OrtExecutor(bundle, 4), prompt, 7)
    first, again = (listen(CudaExecutor(bundle, 4), prompt, 7) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert (first[1] != expected).mean() <= EDGES
