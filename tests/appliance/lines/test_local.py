"""`duplexbox appliance talk`: what it says when it cannot, and one call with a card of threads."""

import argparse
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from appliance import box as boxes
from appliance import cli, ledger, report
from appliance.box import Box
from appliance.clock import MonotonicClock
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from appliance.lines import local
from appliance.lines.local_screen import FLOOR_DB, Screen, View, bar, meter
from tests.fakes import FakeExecutor, make_bundle
from tests.local_cards import CARD_HZ, ThreadCard, ThreadSound, tone

pytestmark = pytest.mark.clock


def make_box(folder: Path, config: Config) -> Box:
    executor = FakeExecutor(make_bundle(folder / "bundle"), 1, lambda batch: None)
    return Box(config, executor, MonotonicClock(), 2**30)


def make_config(folder: Path, socket: Path) -> Config:
    return Config(
        engine=EngineConfig(folder / "bundle"),
        clock=ClockConfig(drain_s=0, settle_s=1, realtime_priority=0),
        control=ControlConfig(socket),
        ledger=LedgerConfig(folder / "calls"),
        admission=AdmissionConfig(calibrate_s=0, min_margin_ms=0),
    )


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The socket of a box that echoes; its ledger is tmp_path / calls."""
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        socket = Path(folder) / "control.sock"
        box = make_box(tmp_path, make_config(tmp_path, socket))
        thread = threading.Thread(target=box.run, daemon=True)
        thread.start()
        for _ in range(2000):
            if box.switchboard.ready:
                break
            threading.Event().wait(0.01)
        yield socket
        box.drain()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line asks for it, and must not get it for the tests."""
    monkeypatch.setattr("appliance.lines.niceness.ask_for", lambda: "")


def arguments(*text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    local.add_arguments(parser)
    return parser.parse_args(text)


def played(card: ThreadCard, seconds: float) -> bool:
    """Whether so much of the tone has come out of its loudspeaker; 10 s are too long."""
    never = threading.Event()
    for _ in range(1000):
        if (np.abs(card.played) > 0.1).sum() > seconds * CARD_HZ / 2:
            return True
        never.wait(0.01)
    return False


@pytest.mark.slow
def test_a_card_that_goes_away_once_and_a_call_that_is_hung_up(
    running: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = ThreadCard(tone(440)(0, 10 * CARD_HZ))
    second = ThreadCard(tone(440)(0, 10 * CARD_HZ))

    seen = []

    def unplug_and_hang_up() -> None:
        seen.append(played(first, 1))
        first.active = False
        seen.append(played(second, 1))
        if not ended.is_set():  # it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Event()
    other = threading.Thread(target=unplug_and_hang_up)
    other.start()
    code = local.run_line(
        arguments("--socket", str(running), "--no-noise-suppression", "--no-echo-cancellation"),
        ThreadSound(first, second),
        MonotonicClock(),
    )
    ended.set()
    other.join()
    assert seen == [True, True]
    said = capfd.readouterr().out
    assert code == 130, said
    assert "the sound card has gone" in said
    assert "the sound card is back" in said
    assert "beyond the model's one frame" in said
    # The box echoes: what the microphone heard came out of both loudspeakers.
    for card in (first, second):
        loudest = np.abs(card.played).max()
        assert 0.2 < loudest < 0.4
    summary = report.summarise(ledger.read_folder(tmp_path / "calls"))
    (session,) = summary.sessions
    assert summary.unexplained == 0
    assert summary.failed == 0
    assert session.due >= 20


def test_a_call_waits_for_its_card_only_so_long(
    running: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card = ThreadCard(tone(440)(0, 10 * CARD_HZ))

    def unplug() -> None:
        played(card, 0.3)
        card.active = False

    threading.Thread(target=unplug, daemon=True).start()
    flags = ("--wait-for-card", "0.5", "--no-echo-cancellation", "--no-noise-suppression")
    code = local.run_line(
        arguments("--socket", str(running), *flags), ThreadSound(card), MonotonicClock()
    )
    assert code == 1
    assert "the sound card did not come back" in capfd.readouterr().out


def test_without_a_box_the_command_that_starts_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments("--socket", str(tmp_path / "none.sock"))
    assert local.run_line(args, ThreadSound(), MonotonicClock()) == 1
    assert "duplexbox appliance serve" in capsys.readouterr().err


def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        PortAudioError=ValueError,
        query_hostapis=list,
        query_devices=lambda device=None, kind="": {"index": -1} if kind else [],
    )
    monkeypatch.setitem(sys.modules, "sounddevice", library)


def test_without_a_sound_device_there_is_a_sentence_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_devices(monkeypatch)
    assert cli.main(["talk"]) == 2
    assert "there is no sound device" in capsys.readouterr().err
    assert cli.main(["talk", "--devices"]) == 0
    assert "pulseaudio --start" in capsys.readouterr().out


def test_without_portaudio_there_is_a_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert cli.main(["talk"]) == 2
    assert "apt-get install libportaudio2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--set", "x"], "--set x: expected NAME=NUMBER"),
        (["--latency-ms", "0"], "expected 1 to 500"),
        (["--wait-for-card", "nan"], "expected 0 to 86400"),
        (["--persona", "x" * 9000], "--persona has 9000 characters"),
        (["--voice", "x" * 90], "longer than any voice"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["talk", *wrong]) == 2
    assert said in capsys.readouterr().err


def test_the_lines_own_command_says_all_that_was_asked_for() -> None:
    asked = arguments(
        *("--microphone=-odd name", "--speaker=x", "--muted", "--no-echo-cancellation"),
        *("--persona=You are Ann.", "--voice=alto", "--set=a.b=1", "--set=c=-2"),
    )
    command = local._line_command(asked, Path("/tmp/a.sock"))
    again = vars(arguments(*command[command.index("talk") + 1 :]))
    assert again.pop("socket") == Path("/tmp/a.sock")
    for name, value in again.items():
        assert value == getattr(asked, name), name


@pytest.mark.slow
def test_the_box_of_talk_ends_with_its_line_and_hands_on_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boxes, "open_box", lambda config: make_box(tmp_path, config))
    monkeypatch.setattr(
        local, "_line_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    assert local._run_box(arguments("--out", str(tmp_path / "out"))) == 3
    assert "gets ready" in capsys.readouterr().out


def view(**changed: object) -> View:
    base = {
        "microphone_db": -6.0,
        "speaker_db": -100.0,
        "muted": False,
        "margin_ms": 74.6,
        "drift_ppm": 12.0,
    }
    return View(**{**base, **changed})  # type: ignore[arg-type]


def test_the_meter_shows_levels_and_who_is_muted() -> None:
    line = meter(view(), 200)
    assert "you [###########.]  -6 dB" in line
    assert "model [............] -99 dB" in line
    assert "margin  75 ms" in line
    assert "+12 ppm" in line
    assert "muted" in meter(view(muted=True), 200)
    assert meter(view(trouble="the sound card has gone"), 200) == "  the sound card has gone"
    assert len(meter(view(), 30)) == 30
    assert bar(FLOOR_DB - 5) == "............"
    assert bar(3.0) == "############"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_words_fill_lines_and_the_meter_stays_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    terminal = Terminal()
    screen = Screen(terminal)
    screen.show(view())
    screen.words(" hello there")
    screen.words(" how are you today my friend")
    screen.pause()
    screen.pause()
    shown = terminal.getvalue()
    assert "  hello there how are you\n" in shown
    assert "  today my friend\n" in shown
    assert shown.rstrip("\x1b[K").endswith(meter(view(), 29))


def test_without_a_terminal_only_what_changes_is_said() -> None:
    out = io.StringIO()
    screen = Screen(out)
    with screen.open():
        screen.show(view())
        assert screen.keys() == ""
        screen.say("you are through")
    assert out.getvalue() == "you are through\n"
