"""Scripted calls keep the rules the model is to learn from them."""

import numpy as np
import pytest

from export.pocket import script
from export.pocket.script import DESK, FRAME, RATE_HZ, Call, Stage
from export.pocket.world import DIGITS, IDS, PADDING, VOCABULARY
from tests.export.pocket import hums

SECONDS = 40
FRAMES = SECONDS * RATE_HZ // FRAME


@pytest.fixture(scope="module")
def stage() -> Stage:
    return hums.stage()


@pytest.fixture(scope="module")
def calls(stage: Stage) -> list[Call]:
    return [script.written(stage, f"test {n}", FRAMES) for n in range(60)]


def test_a_seed_is_a_call(stage: Stage) -> None:
    first, again = (script.written(stage, "same", FRAMES) for _ in range(2))
    other = script.written(stage, "another", FRAMES)
    assert first.events == again.events
    assert (first.text == again.text).all()
    assert first.events != other.events


def test_a_number_is_read_back_by_the_desk_unless_it_is_interrupted(calls: list[Call]) -> None:
    followed = 0
    for call in calls:
        for turn, reply in zip(call.turns, call.turns[1:], strict=False):
            if turn[0] == "caller digit" and reply[0] == "desk":
                assert reply[3] == f"{turn[3]} Is that right?"
                followed += 1
    assert followed > 50


def test_the_desk_waits_before_it_answers_and_not_for_long(calls: list[Call]) -> None:
    gaps = {"digit": [], "other": []}  # type: ignore[var-annotated]
    for call in calls:
        for turn, reply in zip(call.turns, call.turns[1:], strict=False):
            if turn[0].startswith("caller") and reply[0] == "desk":
                kind = "digit" if turn[0] == "caller digit" else "other"
                gaps[kind].append(reply[1] - turn[2])
    assert 0.31 < np.median(gaps["digit"]) < 0.37
    assert 0.18 < np.median(gaps["other"]) < 0.26
    assert min(gaps["digit"] + gaps["other"]) > 0.1


def test_pauses_inside_numbers_are_shorter_than_the_desk_waits_after_them() -> None:
    """Some voices say a number's last digit as they say the others."""
    assert script.PAUSE_IN_NUMBER_S[1] + script.SPREAD_S < script.ANSWER_NUMBER_S


def test_callers_go_on_over_the_desk_s_hum_and_after_it(calls: list[Call]) -> None:
    """The desk hums before it can know how long a pause will be."""
    over, after = 0, 0
    for call in calls:
        for turn, pause in zip(call.turns, call.turns[1:], strict=False):
            if turn[0] == "hum":
                assert pause[0] == "pause"
                over += turn[2] > pause[2]
                after += turn[2] <= pause[2]
    assert over  # few: these callers' hums are short
    assert after > 30


def test_the_desk_is_silent_a_quarter_of_a_second_after_an_interruption(calls: list[Call]) -> None:
    seen = 0
    for call in calls:
        for what, at_s, _, _ in call.turns:
            if what != "interruption":
                continue
            seen += 1
            limit = (at_s + script.REACTION_S[1]) * RATE_HZ + 1
            going = [
                e
                for e in call.events
                if e.channel == DESK and e.at < at_s * RATE_HZ and e.at + e.samples > limit
            ]
            assert not going, (at_s, going)
    assert seen > 30


def test_the_desk_s_words_stand_in_the_frames_they_are_spoken_in(calls: list[Call]) -> None:
    for call in calls[:20]:
        words = np.flatnonzero(call.text[:-1] != PADDING)  # the last may only begin
        spoken = call.labels[DESK] > 0
        near = np.convolve(spoken, np.ones(9), "same") > 0
        assert near[words].all()
        assert {VOCABULARY[t] for t in call.text} <= set(VOCABULARY)


def test_every_word_of_the_desk_has_an_id() -> None:
    assert all(digit in IDS for digit in DIGITS)
    assert len(set(IDS.values())) == len(IDS)
    assert min(IDS.values()) == 4
