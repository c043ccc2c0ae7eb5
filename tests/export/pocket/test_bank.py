"""A bank that was cut short is a bank, and goes on where it stopped."""

from pathlib import Path

import numpy as np
import pytest

from export.pocket import bank, voices
from export.pocket.bank import Cast
from export.pocket.voices import Spoken, Voice
from export.pocket.world import DIGITS, Group, Kind


class Studio:
    """Voices without their programs, and who spoke, in order."""

    def __init__(self, *names: str) -> None:
        made = [Voice(name, "none", ()) for name in names]
        self.cast = Cast(Voice("desk", "none", ()), made, self.speak)
        self.spoke: list[str] = []

    def speak(self, voice: Voice, text: str) -> Spoken:
        if not self.spoke or self.spoke[-1] != voice.name:
            self.spoke.append(voice.name)
        return Spoken(np.full(480, 0.1, np.float32))


def quiet(sentence: str) -> None:
    pass


def test_a_bank_that_is_cut_short_is_a_bank_and_goes_on(tmp_path: Path) -> None:
    def cut(sentence: str) -> None:
        if sentence.startswith("two:"):
            raise KeyboardInterrupt

    whole = bank.make(tmp_path / "whole", 0, Studio("one", "two").cast, True, quiet)
    assert whole.callers == ("one", "two")
    first, then = Studio("one", "two"), Studio("one", "two")
    with pytest.raises(KeyboardInterrupt):
        bank.make(tmp_path / "cut", 0, first.cast, True, cut)
    assert bank.read(tmp_path / "cut").index.callers == ("one",)
    assert bank.make(tmp_path / "cut", 0, then.cast, True, quiet) == whole
    assert then.spoke == ["two"]


def test_a_larger_cast_keeps_who_is_in_the_same_place(tmp_path: Path) -> None:
    bank.make(tmp_path, 0, Studio("one").cast, True, quiet)
    larger = Studio("one", "two", "three")

    def cut(sentence: str) -> None:
        if sentence.startswith("three:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.make(tmp_path, 0, larger.cast, True, cut)
    assert larger.spoke == ["two", "three"]
    assert bank.read(tmp_path).index.callers == ("one", "two")
    other = Studio("one", "new")
    assert bank.make(tmp_path, 0, other.cast, True, quiet).callers == ("one", "new")
    assert other.spoke == ["new"]


def test_everybody_says_every_digit_in_both_ways(tmp_path: Path) -> None:
    bank.make(tmp_path, 0, Studio("one").cast, True, quiet)
    read = bank.read(tmp_path)
    digits = {(c.text, c.form) for c in read.of("one") if c.kind == Kind.DIGIT}
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
