"""A real box whose model echoes, and a real websocket line, each in a process of its own.

    python -m bench.echo_box box FOLDER --slots 8 --step-ms 15        a box, its socket in FOLDER
    python -m bench.echo_box line FOLDER                              its line; prints its port

What is said comes back one frame later, as soon as any model could answer; so what else it takes
is the box's and the line's own. Used by benches and soak tests.
"""

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance import control, status
from appliance.box import Box
from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from appliance.lines.boxes import Boxes
from appliance.lines.niceness import ask_for
from appliance.lines.web_server import Options, WebServer
from appliance.lines.web_site import open_site
from appliance.lines.wire import Model
from engines.bundle import (
    FORMAT,
    AudioPorts,
    Bundle,
    Manifest,
    ModelInfo,
    RegionSpec,
    TextPorts,
    Timing,
    describe_file,
)
from engines.clocks import ClockKind, NativeClock

RATE_HZ, SAMPLES, PERIOD_MS = 24_000, 1_920, 80
CLOCK = MonotonicClock()
ROOT = Path(__file__).resolve().parent.parent


class Echo:
    """Frame k out is frame k-1 in; every step takes ``step_ms`` and a little more now and then."""

    def __init__(self, bundle: Bundle, slots: int, step_ms: float) -> None:
        self.bundle, self.slots = bundle, slots
        self.audio_in: NDArray[np.float32] = np.zeros((slots, SAMPLES), np.float32)
        self.audio_out: NDArray[np.float32] = np.zeros((slots, SAMPLES), np.float32)
        self.text: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.valid: NDArray[np.bool_] = np.ones(slots, np.bool_)
        self._before = np.zeros((slots, SAMPLES), np.float32)
        self._step_ms = step_ms
        self._rng = np.random.default_rng(1)

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        self._before[slot] = 0

    def move(self, source: int, target: int) -> None:
        self._before[target] = self._before[source]

    def step(self, batch: int) -> None:
        took_ms = self._step_ms * (1 + 0.1 * self._rng.exponential())
        CLOCK.sleep_until(CLOCK.now_ns() + int(took_ms * NS_PER_MS))
        self.audio_out[:batch] = self._before[:batch]
        self._before[:batch] = self.audio_in[:batch]

    def close(self) -> None:
        pass


def echo_bundle(folder: Path, slots: int) -> Bundle:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pieces.json").write_text('["", "a"]')
    state = RegionSpec("gain", "float32", (), NativeClock(ClockKind.CONSTANT), fill=1)
    manifest = Manifest(
        format=FORMAT,
        model=ModelInfo("echo", 0, "0" * 64, trained=False, notice=""),
        timing=Timing(PERIOD_MS * NS_PER_MS, RATE_HZ, SAMPLES),
        largest_batch=slots,
        regions=(state,),
        stages=(),
        audio=AudioPorts("audio", "reply"),
        text=TextPorts("text", "pieces.json", (0,)),
        files={"pieces.json": describe_file(folder / "pieces.json")},
    )
    return Bundle(folder, manifest)


def run_box(folder: Path, slots: int, step_ms: float) -> None:
    bundle = echo_bundle(folder / "bundle", slots)
    config = Config(
        engine=EngineConfig(bundle.path),
        clock=ClockConfig(drain_s=0, settle_s=1, first_frame_s=3),
        control=ControlConfig(folder / "box.sock"),
        ledger=LedgerConfig(folder / "calls"),
        admission=AdmissionConfig(calibrate_s=1, min_margin_ms=0),
    )
    box = Box(config, Echo(bundle, slots, step_ms), CLOCK, 2**30)
    signal.signal(signal.SIGTERM, lambda *_: box.drain())
    box.run()


async def run_line(folder: Path) -> None:
    ask_for()
    path = folder / "box.sock"

    def facts(_: control.Welcome) -> tuple[Model, list[str]]:
        return Model({}), ["", "a"]

    options = Options(path, most_per_address=256)
    server = WebServer(options, Boxes.connect(path, CLOCK), CLOCK, facts)
    runner = await open_site(server.app(), "127.0.0.1", 0, CLOCK)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await server.run()
    await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Stand:
    """Both processes."""

    folder: Path
    port: int
    box: int
    """Process id."""
    line: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/api/chat"

    @property
    def ledger(self) -> Path:
        return self.folder / "calls"

    def ask(self) -> control.Report:
        """How the box is."""
        return status.ask(self.folder / "box.sock")


@contextlib.contextmanager
def stand(slots: int = 8, step_ms: float = 15.0) -> Iterator[Stand]:
    """Both, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="dbx-echo-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)

        def start(role: str, stdout: int | None, stderr: int | None) -> "subprocess.Popen[str]":
            words = [sys.executable, "-m", "bench.echo_box", role, name]
            words += ["--slots", str(slots), "--step-ms", str(step_ms)]
            process = subprocess.Popen(words, cwd=ROOT, text=True, stdout=stdout, stderr=stderr)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        box = start("box", None, subprocess.DEVNULL)
        never_ns = CLOCK.now_ns() + 30_000 * NS_PER_MS
        while CLOCK.now_ns() < never_ns:
            with contextlib.suppress(control.BoxGone):
                if status.ask(folder / "box.sock").ready:
                    break
            CLOCK.sleep_until(CLOCK.now_ns() + 100 * NS_PER_MS)
        line = start("line", subprocess.PIPE, None)
        assert line.stdout is not None
        stack.enter_context(line.stdout)
        yield Stand(folder, int(line.stdout.readline()), box.pid, line.pid)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.echo_box")
    parser.add_argument("role", choices=("box", "line"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=15.0)
    args = parser.parse_args()
    if args.role == "box":
        run_box(args.folder, args.slots, args.step_ms)
    else:
        asyncio.run(run_line(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
