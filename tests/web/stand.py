"""The demo's bundle behind a real box and a real line, each in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.clock import NS_PER_S, MonotonicClock
from appliance.control import BoxGone
from appliance.status import ask
from tests.small import SMALL

ROOT = Path(__file__).resolve().parents[2]
CLOCK = MonotonicClock()
START_S = 60
OUT = ROOT / "out" / "web"
"""Where pictures of pages are left to be looked at."""


def _command(*words: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "duplexbox", "appliance", *words],
            cwd=ROOT,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for _ in range(2):  # the second one does not wait for calls
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
    process.wait(30)


@dataclass
class Stand:
    """A box that may be stopped and started, and a line that stays."""

    folder: Path
    slots: int
    url: str = ""
    box: "subprocess.Popen[bytes] | None" = None

    @property
    def socket(self) -> Path:
        return self.folder / "box.sock"

    def start_box(self) -> None:
        config = self.folder / "box.toml"
        config.write_text(
            f'[engine]\nbundle = "{SMALL}"\nslots = {self.slots}\n'
            f'[control]\nsocket = "{self.socket}"\n'
            f'[ledger]\nfolder = "{self.folder / "calls"}"\n'
            f'[persona]\nsnapshots = "{self.folder / "personas"}"\n'
            "[admission]\nmin_margin_ms = 0\ncalibrate_s = 0\n"
        )
        self.box = _command("serve", "--config", str(config), log=self.folder / "box.log")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        until_ns = CLOCK.now_ns() + START_S * NS_PER_S
        while CLOCK.now_ns() < until_ns:
            with contextlib.suppress(BoxGone):
                if ask(self.socket).ready:
                    return
            CLOCK.sleep_until(CLOCK.now_ns() + NS_PER_S // 10)
        raise AssertionError((self.folder / "box.log").read_text())

    def stop_box(self) -> None:
        assert self.box is not None
        _stop(self.box)

    def log(self) -> str:
        return (self.folder / "line.log").read_text()


@contextlib.contextmanager
def stand(slots: int = 4, *options: str) -> Iterator[Stand]:
    """options: of `duplexbox appliance websocket`."""
    with tempfile.TemporaryDirectory(prefix="dbx-web-") as name:
        made = Stand(Path(name), slots)
        made.start_box()
        log = made.folder / "line.log"
        words = ("websocket", "--socket", str(made.socket), "--listen", "127.0.0.1:0", *options)
        line = _command(*words, log=log)
        try:
            until_ns = CLOCK.now_ns() + START_S * NS_PER_S
            while not made.url and CLOCK.now_ns() < until_ns:
                CLOCK.sleep_until(CLOCK.now_ns() + NS_PER_S // 10)
                for said in made.log().splitlines():
                    if " answers at http" in said:
                        made.url = said.rpartition(" ")[2].rstrip("/")
            assert made.url, made.log()
            yield made
        finally:
            _stop(line)
            made.stop_box()
