"""A prompt is fed by a graph of its own into rings that ticks then take up, cut or not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtPrimer
from engines.prefill import chunk_rows, make_prompt
from export import build, tiny
from export.tiny import PERSONA_MICRO
from tests.engines import fake_driver
from tests.export.calls import GREEDY, SEED, speech
from tests.export.persona import frames_of
from tests.export.test_prompt_graphs import feed, prompt_of

pytestmark = pytest.mark.torch

TICKS = 60
WIDE = replace(
    PERSONA_MICRO,
    mimi=replace(PERSONA_MICRO.mimi, dimension=64, heads=1),
    lm=replace(PERSONA_MICRO.lm, dimension=128, heads=2),
)
"""Heads of 64, as the kernel wants them."""


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


def test_a_prompt_fed_on_a_gpu_is_taken_up_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.MODELS, "personaplex-micro", WIDE)
    cut = build.build_seeded(
        "personaplex-micro", tmp_path / "cut", seed=SEED, largest_batch=4, attention="ring"
    )
    pcm = speech(5, TICKS, 2, WIDE.mimi.samples_per_frame).numpy()
    prompt = make_prompt(
        cut.manifest.prompt or pytest.fail("no prompt"),
        frames_of(WIDE.lm, 40).numpy(),
        np.random.default_rng(3).normal(size=(3, WIDE.lm.dimension)).astype(np.float32),
    )

    def listen(executor: OrtExecutor | CudaExecutor) -> list[np.ndarray]:
        """Session 0 talks while two others are fed, in turns; one of them is then seated."""
        primer = executor.primer()
        executor.join(0, GREEDY)
        heard, fed = [], {3: 0, 2: 0}
        for slot in fed:
            primer.clear(slot)
        for tick, frame in enumerate(pcm):
            batch = 1
            slot = 3 - tick % 2
            left = prompt.shared_rows - fed[slot]
            if tick < 20 and left:
                rows = chunk_rows(fed[slot], left, 7, primer.retain)
                primer.feed(slot, prompt, fed[slot], rows)
                fed[slot] += rows
            if tick == 20:
                primer.settle(3, 1, GREEDY, primer.open(3, prompt, GREEDY))
            if tick == 21:
                primer.leave(2)
            batch += tick >= 20
            executor.audio_in[:batch] = frame[:batch]
            executor.step(batch)
            heard.append(executor.text[:batch].copy())
        return heard

    expected = listen(OrtExecutor(cut, 4))
    driver = fake_driver.install(monkeypatch)
    executor = CudaExecutor(cut, 4, CudaOptions(graphs=False))
    assert executor.layout.has_places
    for tick, (ours, theirs) in enumerate(zip(listen(executor), expected, strict=True)):
        np.testing.assert_array_equal(ours, theirs, f"at {tick}")
    assert executor.arena.age(1) == 40 + TICKS - 20
    executor.close()
    assert driver.held == {}
    assert len({int(frame[-1]) for frame in expected[20:]}) > 5
