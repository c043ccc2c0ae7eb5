"""A verdict is about what was heard and when."""

import numpy as np
import pytest

from export.pocket import trials
from export.pocket.script import FRAME, RATE_HZ
from export.pocket.trials import FRAME_S, Sound, Trial
from export.pocket.world import IDS, PADDING
from tests.export.pocket import hums

FRAMES = 130


def asked(kind: str) -> Trial:
    return next(t for t in trials.trials(hums.stage(), 3, 3, FRAMES) if t.kind == kind)


def spoken(*spans: tuple[float, float]) -> Sound:
    """Sound heard from and to these seconds, one frame after the model was given its frame."""
    sound = np.zeros(FRAMES * FRAME, np.float32)
    for begins, ends in spans:
        sound[round((begins - FRAME_S) * RATE_HZ) : round((ends - FRAME_S) * RATE_HZ)] = 0.1
    return sound


def written(at_s: float, *words: str) -> list[int]:
    text = [PADDING] * FRAMES
    for n, word in enumerate(words):
        text[int(at_s / FRAME_S) + n] = IDS[word]
    return text


def test_a_number_read_back_is_right_and_its_gap_is_measured() -> None:
    trial = asked("number")
    at = trial.ends_s + 0.4
    sound = spoken((0.5, 2.8), (at, at + 2))
    right = trials.judge(trial, sound, written(at, *trial.said, "is", "that", "right"))
    assert right.right is True
    assert right.gap_s is not None
    assert abs(right.gap_s - 0.4) < 0.02
    wrong = trials.judge(trial, sound, written(at, *trial.said, "one"))
    assert wrong.right is False
    early = trials.judge(trial, sound, written(trial.ends_s - 1, *trial.said))
    assert early.right is False


def test_silence_is_no_answer() -> None:
    trial = asked("number")
    verdict = trials.judge(trial, spoken((0.5, 2.8)), [PADDING] * FRAMES)
    assert verdict.gap_s is None
    assert verdict.right is False
    found = trials.summary([(trial, verdict)])
    assert found["answered"] == 0


def test_a_stop_is_timed_from_the_interruption() -> None:
    trial = asked("stop")
    at = trial.interrupts_s
    verdict = trials.judge(
        trial, spoken((at - 1, at + 0.31), (at + 1, at + 1.5)), written(at, "okay")
    )
    assert verdict.stop_s is not None
    assert abs(verdict.stop_s - 0.31) < 0.02
    silent = trials.judge(trial, spoken((at + 1, at + 1.5)), written(at, "okay"))
    assert silent.stop_s is None


def test_a_caller_who_listens_is_no_interruption() -> None:
    trial = asked("listener")
    at = trial.interrupts_s
    sound = spoken((at - 1, at + 1))
    went_on = trials.judge(trial, sound, written(at - 0.5, *trial.said, "is", "that", "right"))
    assert went_on.went_on is True
    fell_silent = trials.judge(trial, spoken((at - 1, at + 0.2)), written(at - 0.5, *trial.said))
    assert fell_silent.went_on is False
    found = trials.summary([(trial, went_on), (trial, fell_silent)])
    assert found["went on over mm-hmm"] == 0.5


def test_words_in_a_pause_count_and_a_hum_does_not() -> None:
    trial = asked("pause")
    begins, ends = trial.pauses[0]
    middle = (begins + ends) / 2
    sound = spoken((middle, middle + 0.3))
    spoke = trials.judge(trial, sound, written(middle, "sorry"))
    assert spoke.spoke_in_pause is True
    late = trials.judge(trial, sound, written(trial.ends_s - 0.1, "sorry"))
    assert late.spoke_in_pause is True
    hummed = trials.judge(trial, sound, written(middle, "mm-hmm"))
    assert hummed.spoke_in_pause is False
    assert hummed.hummed


def test_voices_take_turns_and_a_seed_is_a_set_of_trials() -> None:
    stage = hums.stage()
    first, again = trials.trials(stage, 7, 4), trials.trials(stage, 7, 4)
    assert [t.said for t in first] == [t.said for t in again]
    assert {t.voice for t in first} == set(stage.voices)
    assert {t.kind for t in first} == set(trials.KINDS)
    assert [len(t.said) for t in first if t.kind == "number"] == [1, 2, 3, 4]


def test_what_comes_later_is_heard_later() -> None:
    """A line says how much: gaps and stops are its caller's, not the model's."""
    trial = asked("number")
    sound, text = spoken((trial.ends_s + 0.4, trial.ends_s + 2)), written(trial.ends_s + 0.4, "one")
    soon = trials.judge(trial, sound, text)
    late = trials.judge(trial, sound, text, FRAME_S + 0.1)
    assert soon.gap_s is not None
    assert late.gap_s == pytest.approx(soon.gap_s + 0.1)
    ((at, word),) = trials.timed(text, 0.5)
    assert word == "one"
    assert at == pytest.approx(int((trial.ends_s + 0.4) / FRAME_S) * FRAME_S + 0.5)
