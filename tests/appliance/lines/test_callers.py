"""Who calls when, and with which troubles."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_S
from appliance.lines.callers import (
    CallersError,
    Conditions,
    add_arguments,
    conditions_of,
    plan_callers,
    read_speech,
    run_callers,
)


@given(count=st.integers(1, 40), stagger=st.floats(0, 5), talk=st.floats(1, 100))
def test_callers_begin_one_after_the_other_and_end_together(
    count: int, stagger: float, talk: float
) -> None:
    plans = plan_callers(Conditions(count, talk, stagger, extra=1), 10**9, 50)
    regular, extra = plans[:count], plans[count]
    starts = [plan.start_ns for plan in regular]
    assert starts == sorted(starts)
    ends = {round((plan.start_ns + plan.talk_ns) / 1e6) for plan in regular}
    assert max(ends) - min(ends) <= 1  # to the millisecond
    assert min(plan.talk_ns for plan in regular) == pytest.approx(talk * NS_PER_S, rel=1e-6)
    # The extra one asks when all are live.
    assert starts[-1] < extra.start_ns < regular[0].start_ns + regular[0].talk_ns


def test_clocks_are_spread_over_the_whole_of_the_skew() -> None:
    plans = plan_callers(Conditions(5, 1, 1, skew_ppm=200), 0, 50)
    assert [plan.network.skew_ppm for plan in plans] == [-200, -100, 0, 100, 200]
    assert [p.network.skew_ppm for p in plan_callers(Conditions(2, 1, 1), 0, 50)] == [-200, 200]


def test_the_same_seed_gives_the_same_callers_and_another_seed_others() -> None:
    plans = [plan_callers(Conditions(4, 1, 1, seed=seed), 0, 50) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_speech_of_any_rate_becomes_whole_frames(tmp_path: Path) -> None:
    for name, rate, seconds in (("a", 8_000, 0.5), ("b", 24_000, 0.25)):
        soundfile.write(tmp_path / f"{name}.wav", np.full(round(rate * seconds), 0.5), rate)
    speech = read_speech([tmp_path / "a.wav", tmp_path / "b.wav"], 24_000, 1920)
    assert speech.shape == (10, 1920)  # 0.75 s are 9.4 frames
    assert speech[7].min() > 0.4
    assert speech[9, -1] == 0


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["x.wav", "--socket", "none.sock", *words])


@pytest.mark.parametrize(
    ("option", "value"),
    [("--count", "0"), ("--talk", "nan"), ("--loss", "1.5"), ("--jitter-ms", "-1")],
)
def test_what_cannot_be_is_refused_with_its_name(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CallersError, match=option):
        conditions_of(parsed(f"{option}={value}"))
    assert run_callers(parsed(f"{option}={value}")) == 2
    assert option in capsys.readouterr().err


def test_no_box_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_callers(parsed()) == 1
    assert "no box answers at none.sock" in capsys.readouterr().err
