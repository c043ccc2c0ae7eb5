"""Drawn speakers: the same for the same seed, unlike each other where espeak-ng's are alike."""

import numpy as np

from export.pocket import voices
from export.pocket.variants import FORMANTS, LENGTH, PITCH_HZ, drawn
from export.pocket.world import Group


def places(text: str) -> list[float]:
    """Of the formants, in percent."""
    return [float(line.split()[2]) for line in text.splitlines() if line.startswith("formant")]


def test_a_seed_is_a_speaker() -> None:
    assert drawn("drawn3") == drawn("drawn3")
    assert drawn("drawn3") != drawn("drawn4")


def test_throats_differ_in_length_and_not_by_pitch_alone() -> None:
    texts = [drawn(name) for name in voices.DRAWN]
    assert all(len(places(text)) == FORMANTS for text in texts)
    lengths = np.array([np.mean(places(text)) for text in texts])
    assert LENGTH[0] * 100 - 8 < lengths.min() < 95 < 108 < lengths.max() < LENGTH[1] * 100 + 8
    low = np.array([float(text.split("pitch ")[1].split()[0]) for text in texts])
    assert PITCH_HZ[0] <= low.min() < 90
    assert 200 < low.max() <= PITCH_HZ[1]
    assert 0.2 < np.corrcoef(lengths, low)[0, 1] < 0.9


def test_nobody_is_in_two_groups() -> None:
    every = voices.callers(0)
    assert len({voice.name for voice in every}) == len(every)
    assert len({(voice.program, voice.settings) for voice in every}) == len(every)
    trained = {v.name.removeprefix("espeak-") for v in every if v.group is Group.TRAINING}
    assert set(voices.DRAWN) <= trained
    assert not trained & (voices.HELD_VARIANTS | set(voices.TUNING_VARIANTS))
