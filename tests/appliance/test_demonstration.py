"""The demo with an echo for a model: real processes, the real clock, short recordings.

With an echo one can say what every caller must have got back: silence, then its own voice one
frame later.
"""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile

from appliance import demonstration, report
from appliance.demonstration import Script, run_demo
from appliance.ledger import Settled, Why
from tests.appliance.test_report import DELIVERED, OK, call
from tests.fakes import FakeExecutor, make_bundle
from tests.small import SMALL

pytestmark = pytest.mark.clock

FILLED = Settled.FILLED.value


def recording(path: Path, rate: int, seconds: float) -> Path:
    times = np.arange(round(rate * seconds)) / rate
    soundfile.write(path, 0.25 * np.sin(2 * np.pi * 400 * times), rate, subtype="PCM_16")
    return path


@pytest.mark.slow
def test_the_demo_ends_well_and_leaves_everything_it_promises(tmp_path: Path) -> None:
    script = Script(
        callers=(
            recording(tmp_path / "a.wav", 24_000, 1.6),
            recording(tmp_path / "b.wav", 8_000, 1.2),
        ),
        stagger_s=0.4,
        hangs_up=(1, 0.8),
    )
    executor = FakeExecutor(make_bundle(tmp_path / "bundle"), 3)
    said: list[str] = []
    shown: list[str] = []
    out = tmp_path / "out"
    assert run_demo(executor, script, out, said.append, shown.append) == 0, said
    text = "\n".join(said)
    assert "UNTRAINED" in text
    assert "an echo, for tests" in text
    assert "accounted for" in text
    assert any("sessions 1" in line for line in shown)
    summary = json.loads((out / "summary.json").read_text())
    # 1.6 s are 20 frames, of which the caller stays for 0.8 s; 1.2 s at 8 kHz are 15.
    # A frame that a busy machine brings late is due one tick later, after one of silence.
    assert [s["due"] - s["concealed"] for s in summary["sessions"]] == [10, 15]
    assert all(s["generated"] + s["missed"] == s["due"] for s in summary["sessions"])
    assert summary["unexplained"] == 0
    assert ElementTree.parse(out / "margin.svg").getroot().tag.endswith("svg")
    for name in ("01-a", "02-b"):
        assert (out / f"{name}.reply.wav").is_file()
        assert (out / f"{name}.txt").is_file()
    reply, rate = soundfile.read(out / "02-b.reply.wav", dtype="float32")
    silence = summary["sessions"][1]["concealed"] * 1920
    assert (rate, len(reply)) == (24_000, round(1.2 * 24_000) + silence)
    assert np.abs(reply[:1920]).max() == 0
    if summary["sessions"][1]["on_time"] == 15:
        # The echo of a 400 Hz tone, past the delay: its own level, not noise and not silence.
        assert np.abs(reply[4000:]).max() == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_a_line_that_cannot_call_fails_the_demo(tmp_path: Path) -> None:
    script = Script((tmp_path / "none.wav",), stagger_s=0, hangs_up=(1, 1.0))
    executor = FakeExecutor(make_bundle(tmp_path / "bundle"), 1)
    with pytest.raises(demonstration.DemoFailed, match=r"none\.wav"):
        run_demo(executor, script, tmp_path / "out", lambda line: None, lambda line: None)


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({}, ""),
        ({"exit_code": 1}, "the callers' process ended with 1: see calls.log"),
        ({"exit_code": None}, "the callers' process ended with None: see calls.log"),
        ({"expected": 2}, "1 of 2 calls have a ledger file"),
        ({"why": Why.LOST}, "1 calls failed"),
        ({"due": 4}, "1 frames were lost without a record"),
        ({"outcomes": [(0, DELIVERED), (1, DELIVERED)]}, "1 frames were lost without a record"),
        ({"outcomes": [(0, DELIVERED), (1, FILLED), (2, FILLED)]}, ""),
    ],
)
def test_the_demo_fails_for_each_thing_that_must_not_be(what: dict[str, Any], problem: str) -> None:
    given = {"expected": 1, "exit_code": 0} | what
    expected, exit_code = given.pop("expected"), given.pop("exit_code")
    given.setdefault("outcomes", [(n, DELIVERED) for n in range(3)])
    summary = report.summarise([call([OK] * 3, **given)])
    found = demonstration.shortcomings(summary, expected, exit_code, Path("calls.log"))
    assert found == ([problem] if problem else [])


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_said_before_anybody_calls(
    tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").write_text("")
    executor = FakeExecutor(make_bundle(tmp_path / "bundle"), 1)
    with pytest.raises(demonstration.DemoFailed, match=r"cannot be made a folder: .* --out DIR"):
        run_demo(executor, Script(()), tmp_path / out, lambda line: None, lambda line: None)


def test_the_demos_own_callers_talk_for_more_than_ten_seconds() -> None:
    script = demonstration.script(SMALL)
    assert len(script.callers) == 3
    for path in script.callers:
        assert soundfile.info(path).duration > 10
    who, seconds = script.hangs_up
    assert 10 <= seconds < soundfile.info(script.callers[who - 1]).duration
    assert script.stagger_s == 2


def test_the_front_desk_s_callers_say_numbers_interrupt_and_pause() -> None:
    script = demonstration.script(demonstration.POCKET)
    said = [
        (path.parent / f"{path.stem}{demonstration.SAID}").read_text() for path in script.callers
    ]
    assert len(said) == 3
    assert any("four seven one" in text for text in said)
    assert any("stop" in text for text in said)
    who, seconds = script.hangs_up
    assert 10 <= seconds < soundfile.info(script.callers[who - 1]).duration


def test_both_sides_of_a_call_are_shown_in_the_order_they_spoke() -> None:
    caller = "  3.6 s  my number is four\n  9.2 s  yes\n"
    model = "  0.5 s  hello front desk\n  5.1 s  four is that right\n 12.0 s  goodbye\n"
    assert demonstration.conversation(caller, model) == [
        "    0.5 s   model  hello front desk",
        "    3.6 s  caller  my number is four",
        "    5.1 s   model  four is that right",
        "    9.2 s  caller  yes",
        "   12.0 s   model  goodbye",
    ]
    assert demonstration.conversation("", "") == []
