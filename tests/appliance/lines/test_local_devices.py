"""`duplexbox appliance talk` whole: the real sound library, a real sound server without hardware.

Run by `make test-sound`, which needs what `tests/pulse.py` names; a machine without it fails here
and is told the command. Real time; what is asserted does not depend on how fast the machine is.
"""

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance import ledger, report
from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from tests.pulse import Pulse

pytestmark = pytest.mark.sound
DEMO = Path(__file__).parents[3] / "appliance" / "demo"


@pytest.fixture
def server() -> Iterator[Pulse]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder, Pulse(Path(folder) / "p") as server:
        yield server


class Talk:
    """The command, in a terminal of its own."""

    def __init__(self, server: Pulse, out: Path, *flags: str) -> None:
        self._terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "duplexbox", "appliance", "talk"),
                *("--microphone", "vmic", "--speaker", "vspk", "--out", str(out), *flags),
            ],
            env={**os.environ, **server.environment, "COLUMNS": "120"},
            stdin=end,
            stdout=end,
            stderr=end,
        )
        os.close(end)
        self.said = ""
        self._clock = MonotonicClock()

    def wait_for(self, words: str, seconds: float = 60) -> None:
        """Read the terminal until ``words`` are in it."""
        from_here = len(self.said)
        until_ns = self._clock.now_ns() + round(seconds * NS_PER_S)
        while words not in self.said[from_here:]:
            assert self._clock.now_ns() < until_ns, self.said
            assert self.process.poll() is None, self.said
            self._read()

    def watch(self, seconds: float) -> None:
        until_ns = self._clock.now_ns() + round(seconds * NS_PER_S)
        while self._clock.now_ns() < until_ns:
            self._read()

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def end(self) -> int:
        until_ns = self._clock.now_ns() + 20 * NS_PER_S
        while self.process.poll() is None and self._clock.now_ns() < until_ns:
            self._read()
        self._read()
        code = self.process.wait(1)
        os.close(self._terminal)
        return code

    def _read(self) -> None:
        if not select.select([self._terminal], [], [], 0.05)[0]:
            return
        try:
            self.said += os.read(self._terminal, 65_536).decode("utf-8", "replace")
        except OSError:  # nobody has the other end open any more
            self._clock.sleep_until(self._clock.now_ns() + 10 * NS_PER_MS)


def summary_of(out: Path) -> report.Summary:
    summary = report.summarise(ledger.read_folder(out / "ledger"))
    assert summary.unexplained == 0
    assert len(summary.sessions) == 1
    return summary


def test_somebody_talks_is_heard_mutes_and_hangs_up(server: Pulse, tmp_path: Path) -> None:
    ear = tmp_path / "ear.raw"
    with (
        ear.open("wb") as out,
        server.run(
            *("parec", "--device=world.monitor", "--channels=2", "--rate=48000"),
            *("--format=s16le", "--raw"),
            stdout=out,
        ),
    ):
        talk = Talk(server, tmp_path / "out")
        talk.wait_for("you are through")
        with server.run("paplay", "--device=mouth", str(DEMO / "caller_delivery.wav")):
            talk.watch(6)
            talk.type(" ")
            talk.wait_for("muted")
            talk.type("q")
            assert talk.end() == 0, talk.said
    assert "you [#" in talk.said, "the meter never moved"
    assert "Traceback" not in talk.said
    assert "ALSA" not in talk.said
    summary_of(tmp_path / "out")
    heard = np.frombuffer(ear.read_bytes(), np.int16).reshape(-1, 2)
    assert np.abs(heard[:, 1].astype(np.int32)).max() > 500, "nothing came out"


def test_a_sound_server_that_dies_and_comes_back_costs_neither_the_call_nor_the_box(
    server: Pulse, tmp_path: Path
) -> None:
    talk = Talk(server, tmp_path / "out")
    talk.wait_for("you are through")
    talk.watch(3)
    server.stop()
    talk.wait_for("the sound card has gone")
    server.start()
    talk.wait_for("the sound card is back")
    talk.watch(4)
    talk.process.send_signal(signal.SIGINT)
    assert talk.end() == 130, talk.said
    assert "the sound card went away" in talk.said
    (session,) = summary_of(tmp_path / "out").sessions
    assert session.discarded > 10
    assert session.due > 80


def test_a_sound_server_that_stays_away_ends_the_call(server: Pulse, tmp_path: Path) -> None:
    talk = Talk(server, tmp_path / "out", "--wait-for-card", "3")
    talk.wait_for("you are through")
    server.stop()
    talk.wait_for("the sound card has gone")
    assert talk.end() == 1
    assert "did not come back" in talk.said
    summary_of(tmp_path / "out")


def test_the_devices_are_listed(server: Pulse) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "duplexbox", "appliance", "talk", "--devices"],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "vmic (ALSA)" in listed.stdout
    assert "vspk (ALSA)" in listed.stdout
