"""Mouth to ear over the telephone line: clicks through real sockets, the real stack and a real box.

    python -m bench.sip_mouth_to_ear [--calls 8] [--seconds 60] [--step-ms 15]

The box's executor echoes one frame later, as a model answers at the earliest (`echo_box`); the line
is `duplexbox appliance sip` in a process of its own; the telephones speak G.711 in packets of 20 ms
on the loopback. A click counts as said when a telephone's microphone would have had it, up to a
packet before it is sent, and as heard `EAR_MS` after its packet came: the buffer of a telephone
that knows no jitter. Printed is how much later than it was said, beyond the model's one frame, and
where the time goes. Networks and sound cards are not in it. Exits with 1 when it is later than the
goal.
"""

import argparse
import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance import control, status
from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.lines.niceness import ask_for
from appliance.lines.sip_records import Row
from bench.echo_box import PERIOD_MS, ROOT
from tests.appliance.lines.test_sip import line
from tests.sip_peer import PACKET_SAMPLES, RATE_HZ, Phone, ulaw_decode, ulaw_encode

CLOCK = MonotonicClock()
GOAL_MS = 300.0
"""At p99, beyond the model's frame."""
PACKET_MS = 1000 * PACKET_SAMPLES / RATE_HZ
EAR_MS = PACKET_MS

APART_MS = 970.0
"""Between clicks: no multiple of a frame or packet, so that they fall anywhere in one."""
CLICK = (20_000 * np.sin(2 * np.pi * 1000 * np.arange(32) / RATE_HZ)).astype(np.int16)
LOUD = 4_000
"""Half a click on the way through a codec and two resamplers is still louder."""

TROUBLES = ("overslept", "paid_back", "not_taken", "filled", "late", "underruns")


@dataclass
class Talker:
    """One telephone: what it says and when, what it hears and when."""

    phone: Phone
    said: NDArray[np.int16]
    clicks: list[int]
    """Where in it they begin."""
    first_ms: float = 0.0
    """When its first packet is due; the microphone began a packet earlier."""
    sent: int = 0
    heard: list[tuple[float, bytes]] = field(default_factory=list)

    def due_ms(self) -> float:
        return self.first_ms + self.sent * PACKET_MS

    def send(self) -> None:
        at = self.sent * PACKET_SAMPLES
        payload = ulaw_encode(self.said[at : at + PACKET_SAMPLES])
        self.phone.rtp.sendto(self.phone.packet(payload, step=PACKET_SAMPLES), self.phone.media)
        self.sent += 1

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw = self.phone.rtp.recv(2_048)
                if raw[1] & 0x7F == 0:
                    self.heard.append((CLOCK.now_ns() / NS_PER_MS, raw[12:]))

    def delays_ms(self) -> tuple[list[float], int]:
        """Of each click, and how many were not heard."""
        pcm = ulaw_decode(b"".join(payload for _, payload in self.heard)).astype(np.int32)
        came = np.array([at for at, _ in self.heard])
        found: list[float] = []
        lost = 0
        for start in self.clicks:
            mouth_ms = self.first_ms - PACKET_MS + start * 1000 / RATE_HZ
            after = int(np.searchsorted(came, mouth_ms)) * PACKET_SAMPLES
            loud = np.flatnonzero(np.abs(pcm[after : after + RATE_HZ * 9 // 10]) > LOUD)
            if not loud.size:
                lost += 1
                continue
            packet, offset = divmod(after + int(loud[0]), PACKET_SAMPLES)
            found.append(came[packet] + EAR_MS + offset * 1000 / RATE_HZ - mouth_ms)
        return found, lost


def talker(phone: Phone, seconds: float, seed: int) -> Talker:
    """One that says clicks, for so long."""
    pcm = np.zeros(round(seconds * RATE_HZ), np.int16)
    apart = round(APART_MS * RATE_HZ / 1000)
    starts = list(range(RATE_HZ * 2 + seed * 123, pcm.size - RATE_HZ * 3 // 2, apart))
    for at in starts:
        pcm[at : at + CLICK.size] = CLICK
    return Talker(phone, pcm, starts)


def talk(talkers: list[Talker]) -> None:
    """All at once, until each has said everything."""
    waiting = selectors.DefaultSelector()
    for one in talkers:
        waiting.register(one.phone.rtp, selectors.EVENT_READ, one)
    start_ms = CLOCK.now_ns() / NS_PER_MS + 100
    for number, one in enumerate(talkers):
        one.first_ms = start_ms + number * PACKET_MS / len(talkers)
    packets = talkers[0].said.size // PACKET_SAMPLES
    while min(one.sent for one in talkers) < packets:
        now_ms = CLOCK.now_ns() / NS_PER_MS
        for one in talkers:
            if one.due_ms() <= now_ms and one.sent < packets:
                one.send()
        wake_ms = min(one.due_ms() for one in talkers)
        for key, _ in waiting.select(max(0.0, wake_ms - CLOCK.now_ns() / NS_PER_MS) / 1000):
            key.data.hear()


@contextlib.contextmanager
def echo_box(folder: Path, slots: int, step_ms: float) -> Iterator[Path]:
    """Its socket."""
    words = [sys.executable, "-m", "bench.echo_box", "box", str(folder)]
    words += ["--slots", str(slots), "--step-ms", str(step_ms)]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(control.BoxGone):
                if status.ask(folder / "box.sock").ready:
                    break
            assert process.poll() is None, "the box does not start"
            CLOCK.sleep_until(CLOCK.now_ns() + 100 * NS_PER_MS)
        yield folder / "box.sock"
    finally:
        process.terminate()
        process.wait(30)


def measure(args: argparse.Namespace) -> tuple[list[float], int, list[Row]]:
    """Delays of all clicks, how many were not heard, and what the line says of its calls."""
    talkers: list[Talker] = []
    with tempfile.TemporaryDirectory(prefix="dbx-sip-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        extra = f"calls_per_s = 1000\nlead_ms = {args.lead_ms}"
        socket = stack.enter_context(echo_box(folder, args.calls, args.step_ms))
        running = stack.enter_context(line(folder, socket, extra))
        ask_for()  # a telephone has nothing else to do
        for seed in range(args.calls):
            phone = stack.enter_context(Phone("bot", running.port))
            phone.dial()
            talkers.append(talker(phone, args.seconds, seed))
        talk(talkers)
        for one in talkers:
            one.phone.hang_up()
        while not all(row.ended for row in running.rows()):
            CLOCK.sleep_until(CLOCK.now_ns() + 50 * NS_PER_MS)
        rows = running.rows()
    found = [one.delays_ms() for one in talkers]
    return [ms for delays, _ in found for ms in delays], sum(lost for _, lost in found), rows


def parts_ms(figures: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Where the time goes, as far as the line knows: median, and 99th percentile of the worst call.

    What it cannot see, the stack's jitter buffer and its way to us, is the rest.
    """

    def part(of: str) -> tuple[float, float]:
        had = [one[of] for one in figures if one[of]]
        return float(np.median([p["p50_ms"] for p in had])), max(p["p99_ms"] for p in had)

    def always(ms: float) -> tuple[float, float]:
        return ms, ms

    return {
        "the telephone collects a packet": always(PACKET_MS),
        "arrival to tick: the receive buffer, lead": part("arrived_to_tick"),
        "the frame itself": always(float(PERIOD_MS)),
        "the tick": part("tick_to_made"),
        "made to queued: until its time comes": part("made_to_queued"),
        "queued before it: the sender's lead": part("queued"),
        "a packet of the sender's": always(PACKET_MS / 2),
        "the telephone's buffer": always(EAR_MS),
    }


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench.sip_mouth_to_ear", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--calls", type=int, default=8, help="at once")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=15.0, help="a step of the echo takes this")
    parser.add_argument("--lead-ms", type=int, default=30, help="the line's own setting")
    args = parser.parse_args()
    delays, lost, rows = measure(args)
    beyond = np.array(delays) - PERIOD_MS
    p50, p99, most = np.percentile(beyond, [50, 99, 100]).tolist()
    say = sys.stdout.write
    load = os.getloadavg()[0]
    say(f"{args.calls} calls, {beyond.size} clicks, {lost} not heard; load {load:.1f}\n")
    say(f"beyond the model's frame   p50 {p50:.0f} ms   p99 {p99:.0f} ms   max {most:.0f} ms\n")
    figures = [json.loads(row.figures) for row in rows]
    say("  {:<54} {:>6} {:>8}\n".format("", "p50", "p99 ms"))
    parts = parts_ms(figures)
    for what, (middle, late) in parts.items():
        say(f"  {what:<54} {middle:6.1f} {late:8.1f}\n")
    rest = p50 - sum(middle for middle, _ in parts.values())
    say(f"  {'the rest: the jitter buffer, and looking for audio':<54} {rest:6.1f}\n")
    counts = {what: sum(one[what] for one in figures) for what in TROUBLES}
    say(f"  frames: {', '.join(f'{what} {count}' for what, count in counts.items())}\n")
    return 0 if p99 <= GOAL_MS and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
