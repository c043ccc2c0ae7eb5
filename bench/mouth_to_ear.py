"""From mouth to ear through the local line: measured with clicks, and part by part.

    python -m bench.mouth_to_ear                  a sound card made of a thread, which adds nothing
    python -m bench.mouth_to_ear --pulse          through a PulseAudio server of its own

A box runs the demo's model in full, so that ticks take what they take; only what it says is
replaced by what it heard. Its line is `duplexbox appliance talk` in a process of its own, with
echo cancellation and noise suppression. Clicks go into the microphone and are looked for in what
the loudspeaker is given, on one and the same sample clock. What is measured less one frame, which
the model has to wait for, is the delay that everything else adds.

Needs the `lines` extra; for --pulse: apt-get install pulseaudio pulseaudio-utils
libportaudio2 libasound2-plugins.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.box import Box
from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.config import ClockConfig, Config, ControlConfig, EngineConfig, LedgerConfig
from appliance.line_process import LineProcess
from appliance.lines import local
from engines import bundle as bundles
from engines.executor import Ages, Executor
from engines.ort_executor import OrtExecutor
from tests import small
from tests.local_cards import ThreadCard, ThreadSound
from tests.pulse import Pulse

RATE_HZ = 48_000
APART_S = 1.93
"""Between clicks: no multiple of a frame, so that they fall anywhere in one."""

CLICK_S = 0.004


class EchoThrough:
    """The model at work, but it says what it heard."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.bundle, self.slots = inner.bundle, inner.slots
        self.audio_in, self.audio_out = inner.audio_in, inner.audio_out
        self.text, self.valid = inner.text, inner.valid

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        self._inner.join(slot, settings)

    def move(self, source: int, target: int) -> None:
        self._inner.move(source, target)

    def age(self, slot: int, ticks: int) -> None:
        assert isinstance(self._inner, Ages)
        self._inner.age(slot, ticks)

    def step(self, batch: int) -> None:
        self._inner.step(batch)
        self.audio_out[:batch] = self.audio_in[:batch]
        self.valid[:batch] = True

    def close(self) -> None:
        self._inner.close()


def click() -> NDArray[np.float32]:
    """Four periods of 1 kHz."""
    phase = np.arange(round(CLICK_S * RATE_HZ)) / RATE_HZ
    return (0.7 * np.sin(2 * np.pi * 1000 * phase)).astype(np.float32)


def clicks(seconds: float) -> NDArray[np.float32]:
    """What the microphone hears."""
    pcm = np.zeros(round(seconds * RATE_HZ), np.float32)
    at = 2 * RATE_HZ
    while at + RATE_HZ < pcm.size:
        pcm[at : at + click().size] = click()
        at += round(APART_S * RATE_HZ)
    return pcm


def delays_ms(mouth: NDArray[np.float32], ear: NDArray[np.float32]) -> list[float]:
    """From each click in ``mouth`` to the same one in ``ear``."""
    template, found = click(), []
    at = 0
    while at < mouth.size - RATE_HZ:
        loud = np.flatnonzero(np.abs(mouth[at:]) > 0.2)
        if not loud.size:
            break
        # By the same means on both sides, so that what the means add cancels out.
        start = at + int(loud[0])
        said = _find(mouth[max(0, start - 480) : start + 960], template) + max(0, start - 480)
        heard = _find(ear[start : start + RATE_HZ], template) + start
        if np.abs(ear[heard : heard + template.size]).max() > 0.05:
            found.append((heard - said) * 1000 / RATE_HZ)
        at = start + RATE_HZ
    return found


def _find(pcm: NDArray[np.float32], template: NDArray[np.float32]) -> int:
    return int(np.argmax(np.abs(np.correlate(pcm, template, "valid"))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mouth_to_ear", description=__doc__)
    parser.add_argument("--pulse", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--line", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.line:
        return _line(args.line, args.out, args.seconds)
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        return _measure(Path(folder), args.seconds, args.pulse)


def _line(socket: Path, out: Path, seconds: float) -> int:
    """The line's process, with a card made of a thread."""
    parser = argparse.ArgumentParser()
    local.add_arguments(parser)
    card = ThreadCard(clicks(seconds + 5))
    threading.Timer(seconds - 1, lambda: os.kill(os.getpid(), 15)).start()
    code = local.run_line(
        parser.parse_args(["--socket", str(socket)]), ThreadSound(card), MonotonicClock()
    )
    np.savez(out, mouth=card.heard, ear=card.played)
    return code


def _measure(folder: Path, seconds: float, pulse: bool) -> int:
    bundle = bundles.read(small.built())
    config = Config(
        engine=EngineConfig(bundle.path, slots=1),
        clock=ClockConfig(drain_s=2),
        control=ControlConfig(folder / "control.sock"),
        ledger=LedgerConfig(folder / "ledger"),
    )
    executor = EchoThrough(OrtExecutor(bundle, 1))
    box = Box(config, executor, MonotonicClock(), memory_bytes=2**30)
    period_ms = bundle.manifest.timing.period_ns / NS_PER_MS
    log = folder / "line.log"
    with contextlib.ExitStack() as stack:
        if pulse:
            server = stack.enter_context(Pulse(folder / "pulse"))
            os.environ.update(server.environment)
            command = [
                *(sys.executable, "-m", "duplexbox", "appliance", "talk"),
                *("--socket", str(config.control.socket)),
                *("--microphone", "vmic", "--speaker", "vspk"),
            ]
            line = LineProcess(box, command, log, lambda *_: None)
            world = stack.enter_context(_clicks(server, folder, seconds, line))
        else:
            world = folder / "world.npz"
            command = [
                *(sys.executable, "-m", "bench.mouth_to_ear", "--line"),
                *(str(config.control.socket), "--out", str(world), "--seconds", str(seconds)),
            ]
            line = LineProcess(box, command, log, lambda *_: None)
        line.start()
        try:
            box.run()
        finally:
            line.stop()
    sys.stdout.write(log.read_text())
    mouth, ear = _read(world)
    found = delays_ms(mouth, ear)
    if not found:
        sys.stdout.write("no click came through\n")
        return 1
    beyond = np.array(found) - period_ms
    p50, p99, most = np.percentile(beyond, [50, 99, 100])
    where = "PulseAudio's null sinks" if pulse else "a card made of a thread, which adds nothing"
    sys.stdout.write(
        f"measured with {len(found)} clicks through {where}, beyond one frame of {period_ms:g} ms: "
        f"p50 {p50:.1f}, p99 {p99:.1f}, max {most:.1f} ms\n"
    )
    sys.stdout.write(json.dumps([round(delay, 1) for delay in found]) + "\n")
    return 0 if p99 <= 200 else 1


@contextlib.contextmanager
def _clicks(server: Pulse, folder: Path, seconds: float, line: LineProcess) -> Iterator[Path]:
    """Clicks into the microphone's sink; mouth and ear recorded as two channels of one sink."""
    every = np.zeros(round(APART_S * RATE_HZ), np.float32)
    every[: click().size] = click()
    pcm = np.tile(every, math.ceil(seconds / APART_S))
    (folder / "clicks.raw").write_bytes((pcm * 32_767).astype(np.int16).tobytes())
    how = ["--rate=48000", "--format=s16le", "--raw", "--latency-msec=20"]
    world = folder / "world.raw"
    with (
        world.open("wb") as out,
        server.run("parec", "--device=world.monitor", "--channels=2", *how, stdout=out) as ear,
        server.run(
            "paplay", "--device=mouth", "--channels=1", *how, str(folder / "clicks.raw")
        ) as mouth,
    ):
        threading.Thread(target=_hang_up_after, args=(mouth, line), daemon=True).start()
        yield world
        ear.terminate()


def _hang_up_after(mouth: "subprocess.Popen[bytes]", line: LineProcess) -> None:
    mouth.wait()
    line.hang_up()


def _read(world: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if world.suffix == ".npz":
        with np.load(world) as kept:
            return kept["mouth"], kept["ear"]
    samples = np.frombuffer(world.read_bytes(), np.int16)
    both = samples[: samples.size // 2 * 2].reshape(-1, 2).astype(np.float32) / np.float32(32_768)
    return both[:, 0].copy(), both[:, 1].copy()


if __name__ == "__main__":
    sys.exit(main())
