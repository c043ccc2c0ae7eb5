"""A prompt is fed by a graph of its own into rings that ticks then take up, cut or not."""

from pathlib import Path

import numpy as np
import pytest

from engines.bundle import Bundle
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtPrimer
from export import build
from export.tiny import PERSONA_MICRO
from tests.export.calls import GREEDY, SEED, speech
from tests.export.test_prompt_graphs import feed, prompt_of

pytestmark = pytest.mark.torch

TICKS = 60


def test_a_cut_bundle_takes_up_a_prompt_as_the_whole_one_does(
    persona_bundle: Bundle, tmp_path: Path
) -> None:
    cut = build.build_seeded(
        "personaplex-micro", tmp_path / "cut", seed=SEED, largest_batch=2, attention="ring"
    )
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
    for tick, (ours, theirs) in enumerate(zip(listen(cut), whole, strict=True)):
        np.testing.assert_array_equal(ours, theirs, f"at {tick}")
    assert len({tuple(frame) for frame in whole}) > TICKS // 2
