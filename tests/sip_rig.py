"""What tests of the telephone line with real peers share: boxes, and how speech is compared."""

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.appliance.lines.test_sip import ROOT
from tests.fakes_line import FakeBox, FakeSession, Trouble
from tests.sip_peer import now_s, sleep


class HearingBox(FakeBox):
    """Keeps what its model heard."""

    def __init__(self, folder: Path, trouble: Trouble | None = None) -> None:
        super().__init__(folder, trouble)
        self.heard: dict[int, list[NDArray[np.float32]]] = {}

    def _step(self, session: FakeSession, tick: int) -> None:
        before = session.frame_index
        super()._step(session, tick)
        if session.frame_index > before:
            self.heard.setdefault(session.number, []).append(session.before)


def snr_db(
    said: NDArray[np.float32], heard: NDArray[np.float32], rate_hz: int
) -> tuple[float, float]:
    """Of the best half second, and the delay there in ms; through the filter that fits best."""
    best = (-np.inf, 0.0)
    length, taps = rate_hz // 2, 32
    for start in range(rate_hz, said.size - 2 * rate_hz, rate_hz // 2):
        middle = said[start : start + length].astype(np.float64)
        if np.sqrt(np.mean(middle**2)) < 0.01:
            continue
        where = heard[start : start + length + rate_hz].astype(np.float64)
        if where.size < length:
            continue
        size = 1 << (where.size + length).bit_length()
        likeness = np.fft.irfft(np.fft.rfft(where, size) * np.conj(np.fft.rfft(middle, size)), size)
        at = int(np.argmax(likeness[: where.size - length + 1]))
        found = where[at : at + length]
        rows = [said[start - k : start - k + length] for k in range(-taps, taps + 1)]
        filters = np.stack(rows, 1).astype(np.float64)
        fitted = filters @ np.linalg.lstsq(filters, found, rcond=None)[0]
        rest = found - fitted
        quality = 10 * np.log10((fitted @ fitted) / (rest @ rest + 1e-12))
        best = max(best, (float(quality), 1000 * at / rate_hz))
    return best


def print_figures(name: str, **figures: object) -> None:
    """For whoever reads the run: `pytest -s`."""
    sys.stderr.write(f"\n{name}: {figures}\n")


@contextmanager
def stub_box(folder: Path, slots: int) -> Iterator[Path]:
    """A real box with an echo for a model; its socket."""
    with (folder / "box.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stub_box", str(folder), str(slots)], cwd=ROOT, stderr=log
        )
    try:
        until = now_s() + 30
        while b"ready" not in (folder / "box.log").read_bytes():
            assert process.poll() is None
            assert now_s() < until
            sleep(0.05)
        yield folder / "box.sock"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@dataclasses.dataclass(frozen=True)
class Used:
    """What a process has."""

    cpu_s: float
    rss_kb: int
    descriptors: int


def used(pid: int) -> Used:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    rss = status.partition("VmRSS:")[2].split()[0]
    open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Used((int(fields[11]) + int(fields[12])) / 100, int(rss), open_now)
