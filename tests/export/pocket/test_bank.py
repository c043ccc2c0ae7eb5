"""A bank that was cut short is a bank, and goes on where it stopped."""

from pathlib import Path

import numpy as np
import pytest

from export.pocket import bank, voices
from export.pocket.world import DIGITS, Group, Kind


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four voices without their programs; what they said, voice by voice."""
    found: list[str] = []
    names = ("one", "two", "three", "held")

    def callers(seed: int) -> list[voices.Voice]:
        groups = (Group.TRAINING,) * 3 + (Group.HELD_OUT,)
        return [voices.Voice(n, "none", (), g) for n, g in zip(names, groups, strict=True)]

    def speak(voice: voices.Voice, text: str, seed: int = 0) -> voices.Spoken:
        if not found or found[-1] != voice.name:
            found.append(voice.name)
        return voices.Spoken(np.full(480, 0.1, np.float32))

    monkeypatch.setattr(voices, "callers", callers)
    monkeypatch.setattr(voices, "speak", speak)
    return found


def test_a_bank_goes_on_where_it_was_cut_short(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(sentence: str) -> None:
        if sentence.startswith("one:"):
            raise KeyboardInterrupt

    whole = bank.make(tmp_path / "whole", 0, Group.TRAINING, lambda _: None)
    assert whole.callers == ("one", "two", "three")
    said.clear()
    with pytest.raises(KeyboardInterrupt):
        bank.make(tmp_path / "cut", 0, Group.TRAINING, cut)
    assert said == ["desk", "one"]
    short = bank.read(tmp_path / "cut")
    assert short.index.callers == ()
    said.clear()
    again = bank.make(tmp_path / "cut", 0, Group.TRAINING, lambda _: None)
    assert said == ["one", "two", "three"]
    assert again == whole
    assert bank.make(tmp_path / "cut", 0, Group.TRAINING, lambda _: None) == whole
    assert said == ["one", "two", "three"]


def test_a_bank_is_of_its_group_and_everybody_says_every_digit(
    tmp_path: Path, said: list[str]
) -> None:
    bank.make(tmp_path, 0, Group.HELD_OUT, lambda _: None)
    read = bank.read(tmp_path)
    assert read.index.callers == ("held",)
    digits = {(c.text, c.form) for c in read.of("held") if c.kind == Kind.DIGIT}
    assert digits == {(digit, form) for digit in DIGITS for form in (bank.WITHIN, bank.AT_END)}
    last = read.index.chunks[-1]
    assert last.start + last.samples <= len(read.sound)


def test_no_voice_is_in_two_groups() -> None:
    """By the recordings or the variant it is made from, mixtures included."""
    made_of: dict[str, set[Group]] = {}
    for voice in voices.callers(0):
        parts = {
            "espeak": [voice.name],
            "flite": [f"flite {voice.settings[0]}"],
            "piper": ["piper"],
            "kokoro": [f"kokoro {speaker}" for speaker in voice.settings[1:]],
        }[voice.program]
        for part in parts:
            made_of.setdefault(part, set()).add(voice.group)
    assert {len(groups) for groups in made_of.values()} == {1}
    assert len({voice.name for voice in voices.callers(0)}) == len(voices.callers(0))
