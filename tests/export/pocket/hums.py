"""A bank without speech: every chunk a tone of its own, for tests of everything but voices."""

import numpy as np

from export.pocket.bank import AT_END, WITHIN, Bank, Chunk, Index, caller_chunks, desk_chunks
from export.pocket.script import RATE_HZ, Stage

CALLERS = ("low", "high")
DESK = "desk"


def stage() -> Stage:
    """Two callers and a desk."""
    chunks, sounds, at = [], [], 0
    for n, voice in enumerate((*CALLERS, DESK)):
        asked = desk_chunks() if voice == DESK else caller_chunks(0, n, True)
        for kind, text, form in asked:
            samples = 2_000 * max(2, len(text.split())) + (300 if form in (WITHIN, AT_END) else 0)
            tone = np.sin(np.arange(samples) * 2 * np.pi * (150 + 90 * n) / RATE_HZ)
            chunks.append(Chunk(voice, kind, text, form, at, samples))
            sounds.append((3_000 * tone).astype(np.int16))
            at += samples
    index = Index(RATE_HZ, 0, CALLERS, DESK, tuple(chunks))
    return Stage(Bank(index, np.concatenate(sounds)))
