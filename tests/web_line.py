"""The websocket line in a process of its own, and the boxes it stands beside: fixtures.

`box` is a real one with two slots, whose `line` callers come through; `echo` is a fake that lets
everybody in, however busy the machine is, and looks at every frame's fate when a test is over.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from tests.appliance.test_box import ROOT, Running
from tests.fakes_line import FakeBox

SPEECH = ROOT / "appliance" / "demo" / "caller_router.wav"
RATE_HZ = 24_000


class Line:
    """The line's process."""

    def __init__(self, socket: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.web_rig", str(socket), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._logged: str | None = None
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"ws://127.0.0.1:{self.port}/api/chat"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> str:
        """End it politely; what it logged. A second time is nothing."""
        if self._logged is None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            _, self._logged = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, self._logged
        return self._logged


@pytest.fixture
def box(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    with Running(tmp_path, socket_path, lambda batch: None, first_frame_s=3) as running:
        yield running
    assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*"))


@pytest.fixture
def line(box: Running) -> Iterator[Line]:
    with Line(box.config.control.socket, "--most-per-address", "64") as line:
        yield line


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[FakeBox]:
    """A box that lets everybody in, however busy this machine is."""
    with FakeBox(tmp_path) as box:
        yield box
    for session in box.sessions:
        assert session.unaccounted() == {}
        assert session.gone == "left"


@pytest.fixture
def echo_line(echo: FakeBox) -> Iterator[Line]:
    with Line(echo.path, "--most-per-address", "64") as line:
        yield line


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    pcm, rate_hz = soundfile.read(SPEECH, dtype="float32")
    at = np.arange(0, 6 * rate_hz, rate_hz / RATE_HZ)
    return np.asarray(np.interp(at, np.arange(len(pcm)), pcm), np.float32)


@contextlib.contextmanager
def real_time(*processes: int) -> Iterator[None]:
    """All threads of these processes before those of other programs, where that may be had."""
    threads = [int(t.name) for p in processes for t in Path(f"/proc/{p}/task").iterdir()]

    def schedule(policy: int, priority: int) -> None:
        for thread in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 3)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)
