"""The committed model: it greets on its own, keeps to its budget, and can be trained on from."""

from pathlib import Path

import numpy as np
import torch

from appliance.demonstration import POCKET as FOLDER
from engines import bundle
from engines.ort_executor import OrtExecutor
from export.models.streaming import fresh_state
from export.pocket import finished, revival
from export.pocket.world import VOCABULARY

MOST_BYTES = 13_000_000
MOST_VALUES = 6_000_000


def test_it_keeps_to_its_budget_and_says_what_it_is() -> None:
    opened = bundle.read(FOLDER)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES
    assert opened.manifest.model.parameters <= MOST_VALUES
    assert opened.manifest.model.trained
    assert "synthetic" in opened.manifest.model.notice


def test_it_greets_whoever_calls_in_words_and_in_sound() -> None:
    executor = OrtExecutor(bundle.read(FOLDER), 1)
    executor.join(0, {"sampling.seed": 3})
    words, loud = [], 0.0
    for _ in range(45):
        executor.audio_in[0] = 0
        executor.step(1)
        if executor.valid[0]:
            words.append(VOCABULARY[int(executor.text[0])].removeprefix("▁"))
            loud = max(loud, float(np.sqrt((executor.audio_out[0] ** 2).mean())))
    executor.close()
    assert " ".join(w for w in words if w).startswith("hello front desk")
    assert loud > 0.03


def test_its_weights_become_a_checkpoint_again(tmp_path: Path) -> None:
    revival.revive(FOLDER, tmp_path, labels=50)
    mimi, _ = finished.modules(tmp_path)
    executor = OrtExecutor(bundle.read(FOLDER), 1)
    executor.join(0, {})
    sound = 0.1 * np.random.default_rng(0).standard_normal((3, 1920)).astype(np.float32)
    state = fresh_state(mimi.regions(), 1)
    for frame in sound:
        executor.audio_in[0] = frame
        executor.step(1)
        codes, new = mimi.encode(torch.from_numpy(frame).view(1, 1, -1), state)
        state |= new
        assert (executor.wire("user_codes")[0] == codes[0].numpy()).all()
    executor.close()
