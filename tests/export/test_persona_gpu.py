"""A persona's prompt fed on a real GPU: by the library's graph, into rings of every kind.

Float32 gives the CPU's words. On a GPU rings of 8 bits go with a model in bfloat16, which no CPU
runs: there the rows that a prompt leaves must be near those of the same model in float32, and two
runs must be the same bit for bit. `make test-gpu`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

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
ALIKE = 0.99
"""Correlation of what codes stand for: bfloat16 moves a value by 0.4 %, a code is 1 to 6 % wide."""


def made(folder: Path, dtype: Dtype | None, *, half: bool = False) -> tuple[Bundle, Prompt]:
    """dtype: of 8-bit rings, or None. half: the language model in bfloat16."""
    mimi, lm = tiny.seeded(CONFIG, SEED)
    source = from_modules(
        CONFIG, mimi, lm, "bfloat16" if half else None, pieces=tiny.pieces(CONFIG)
    )
    calibration = None if dtype is None else Calibration(dtype, (), FRAMES)
    bundle = build.build(source, folder, largest_batch=4, attention="ring", calibration=calibration)
    assert bundle.manifest.prompt is not None
    voice = np.random.default_rng(3).normal(size=(3, CONFIG.lm.dimension)).astype(np.float32)
    embedded = (voice.view(np.uint32) >> 16).astype(np.uint16) if half else voice
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
def test_a_prompt_fed_into_8_bit_rings_leaves_what_the_cpu_would(
    tmp_path: Path, dtype: Dtype
) -> None:
    on_cpu, prompt = made(tmp_path / "cpu", dtype)
    _, expected = listen(OrtExecutor(on_cpu, 4), prompt, 7)
    bundle, prompt = made(tmp_path / "gpu", dtype, half=True)
    first, again = (listen(CudaExecutor(bundle, 4), prompt, 7) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    values = [decoded(codes, dtype).reshape(-1) for codes in (first[1], expected)]
    assert np.corrcoef(values)[0, 1] > ALIKE


def decoded(codes: np.ndarray, dtype: Dtype) -> np.ndarray:
    """What codes stand for, as multiples of their head's scale."""
    if dtype == "int8":
        return codes.astype(np.float32)
    bits = torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)
    found: np.ndarray = bits.float().numpy()
    return found
