"""Mouth to ear over the websocket line: clicks through the whole path on loopback, part by part.

    python -m bench.web_mouth_to_ear [--calls 8] [--seconds 20] [--step-ms 15] [--client NAME ...]

The box is the real one, with an executor that echoes one frame later, as a model answers at the
earliest; the line is the real one in a process of its own; clients send and play as

    page-opus, page-pcm   our page: 20 or 10 ms at once, and its playout buffer (worklet.js);
                          page-opus needs the distribution's libopus (apt-get install libopus0)
    moshi-web             the published page: 40 ms pages, its buffer of 80 + 10 ms
    moshi-client          moshi.client: 80 ms blocks; plays what came, at its next block

Every click is found again in what its client plays. Printed is how much later than it was said,
beyond the one frame that the echo takes, and where the time goes. Sound cards and browsers are not
in it (10 to 40 ms for both ways is usual), and neither are networks.
"""

import argparse
import asyncio
import contextlib
import ctypes
import ctypes.util
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sphn
from aiohttp import ClientSession, web
from numpy.typing import NDArray

from appliance import control
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
from appliance.lines.web_server import Options, WebServer
from appliance.lines.web_voice import OPUS, PCM, VOICES
from appliance.lines.websocket import NICENESS
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
CLICK_GAPS_S = (0.61, 0.73, 0.87)
LONGEST_MS = 600.0
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


def echo_bundle(folder: Path) -> Bundle:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pieces.json").write_text('["", "a"]')
    state = RegionSpec("gain", "float32", (), NativeClock(ClockKind.CONSTANT), fill=1)
    manifest = Manifest(
        format=FORMAT,
        model=ModelInfo("echo", 0, "0" * 64, trained=False, notice=""),
        timing=Timing(PERIOD_MS * NS_PER_MS, RATE_HZ, SAMPLES),
        largest_batch=8,
        regions=(state,),
        stages=(),
        audio=AudioPorts("audio", "reply"),
        text=TextPorts("text", "pieces.json", (0,)),
        files={"pieces.json": describe_file(folder / "pieces.json")},
    )
    return Bundle(folder, manifest)


def run_box(folder: Path, step_ms: float) -> None:
    bundle = echo_bundle(folder / "bundle")
    config = Config(
        engine=EngineConfig(bundle.path),
        clock=ClockConfig(drain_s=0, settle_s=1),
        control=ControlConfig(folder / "box.sock"),
        ledger=LedgerConfig(folder / "calls"),
        admission=AdmissionConfig(calibrate_s=1, min_margin_ms=0),
    )
    box = Box(config, Echo(bundle, 8, step_ms), CLOCK, 2**30)
    signal.signal(signal.SIGTERM, lambda *_: box.drain())
    box.run()


async def run_line(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    path = folder / "box.sock"

    def facts(_: control.Welcome) -> tuple[Model, list[str]]:
        return Model({}), ["", "a"]

    server = WebServer(Options(path, most_per_address=64), Boxes.connect(path, CLOCK), CLOCK, facts)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await server.run()
    await runner.cleanup()


# --- clients


class PageOpus:
    """20 ms packets, each in an Ogg page of its own, as ogg.js writes them; sphn's are 40 ms."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("opus")
        if name is None:
            raise SystemExit("libopus is not installed: apt-get install libopus0")
        self._library = ctypes.CDLL(name)
        self._library.opus_encoder_create.restype = ctypes.c_void_p
        error = ctypes.c_int()
        made = self._library.opus_encoder_create(RATE_HZ, 1, 2048, ctypes.byref(error))  # VOIP
        self._encoder = ctypes.c_void_p(made)
        self._sequence = 0
        self._granule = 0

    def append_pcm(self, pcm: NDArray[np.float32]) -> bytes:
        head = b""
        if not self._sequence:
            head = self._page(b"OpusHead" + struct.pack("<BBHIhB", 1, 1, 312, RATE_HZ, 0, 0))
            head += self._page(b"OpusTags" + struct.pack("<II", 0, 0))
        self._granule += 2 * pcm.size
        samples = np.ascontiguousarray(pcm, np.float32)
        packet = ctypes.create_string_buffer(1500)
        size = self._library.opus_encode_float(
            self._encoder,
            samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            ctypes.c_int(pcm.size),
            packet,
            ctypes.c_int(1500),
        )
        return head + self._page(packet.raw[:size])

    def _page(self, packet: bytes) -> bytes:
        flags = 0 if self._sequence else 2
        lacing = bytes([255] * (len(packet) // 255) + [len(packet) % 255])
        fields = (b"OggS", 0, flags, self._granule, 7, self._sequence, 0, len(lacing))
        page = bytearray(struct.pack("<4sBBqIIIB", *fields) + lacing + packet)
        crc = 0
        for byte in page:
            crc ^= byte << 24
            for _ in range(8):
                crc = ((crc << 1) ^ (0x04C11DB7 if crc & 1 << 31 else 0)) & 0xFFFFFFFF
        struct.pack_into("<I", page, 22, crc)
        self._sequence += 1
        return bytes(page)


class Player:
    """When each sample that came is heard, in ms of the clock. Decides as a client does."""

    def __init__(self) -> None:
        self.heard_ms: list[NDArray[np.float64]] = []
        self.waits_ms: list[float] = []
        """From the arrival of a message until the first of its samples is heard."""
        self.dry = 0

    def plays_from(self, samples: int, now_ms: float) -> float:
        """When the first of ``samples``, which came now, is heard."""
        raise NotImplementedError

    def arrive(self, samples: int, now_ms: float, is_first: bool) -> None:
        """is_first: of its message."""
        from_ms = self.plays_from(samples, now_ms)
        if is_first:
            self.waits_ms.append(from_ms - now_ms)
        self.heard_ms.append(from_ms + np.arange(samples) * 1000 / RATE_HZ)


class OurPage(Player):
    """worklet.js: begins with `spare` ms in hand, and steers what is left to it."""

    def __init__(self) -> None:
        super().__init__()
        self._spare_ms = 15.0
        self._until_ms = 0.0
        """When all that came will have been played."""
        self._lefts: list[float] = []
        self._pull = self._came_ms = 0.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        gone_ms = self._pull * (now_ms - self._came_ms)
        self._came_ms = now_ms
        self._until_ms -= gone_ms if self._until_ms else 0.0
        left_ms = self._until_ms - now_ms
        if self._until_ms and left_ms < 0:
            self.dry += 1
            self._spare_ms = min(120.0, self._spare_ms + 10)
            self._until_ms = self._pull = 0.0
            self._lefts.clear()
        if not self._until_ms:
            self._until_ms = now_ms + self._spare_ms
        else:
            self._lefts = [*(left - gone_ms for left in self._lefts[-63:]), left_ms]
            error_ms = min(self._lefts) - self._spare_ms
            self._pull = float(np.clip(error_ms * 0.0004, -0.006, 0.006))
        from_ms = self._until_ms
        self._until_ms += samples * 1000 / RATE_HZ
        return from_ms


class MoshiWeb(Player):
    """audio-processor.ts of the published page: 80 ms and 10 more, then drops beyond 100."""

    def __init__(self) -> None:
        super().__init__()
        self._until_ms = 0.0
        self._held_ms = 0.0
        self._partial_ms, self._slack_ms = 10.0, 10.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        if self._until_ms and self._until_ms < now_ms:
            self.dry += 1
            self._partial_ms = min(80.0, self._partial_ms + 5)
            self._until_ms = 0.0
        if not self._until_ms:
            # It begins 10 ms after 80 are there: the two pages of a message come together.
            self._until_ms = now_ms + self._partial_ms
        from_ms = self._until_ms
        self._until_ms += samples * 1000 / RATE_HZ
        most_ms = 80 + self._partial_ms + self._slack_ms
        if self._until_ms - now_ms >= most_ms:
            drop_ms = self._until_ms - now_ms - 80 - self._partial_ms
            self._slack_ms = min(80.0, self._slack_ms + 5)
            from_ms -= drop_ms
            self._until_ms -= drop_ms
        return from_ms


class MoshiClient(Player):
    """client.py: a queue of 80 ms blocks, one taken at each callback of the sound card."""

    def __init__(self) -> None:
        super().__init__()
        self._next_ms = 0.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        if not self._next_ms:
            self._next_ms = now_ms + 40.0  # the card's callbacks lie anywhere; on average half way
        while self._next_ms < now_ms:
            self._next_ms += PERIOD_MS
            self.dry += 1
        from_ms = self._next_ms
        self._next_ms += samples * 1000 / RATE_HZ
        return from_ms


@dataclass(frozen=True)
class Kind:
    block: int
    """Samples sent at once."""
    subprotocol: str
    player: Callable[[], Player]
    early: bool = False
    """Speaks before the handshake."""


KINDS = {
    "page-opus": Kind(480, OPUS, OurPage),
    "page-pcm": Kind(240, PCM, OurPage),
    "moshi-web": Kind(960, "", MoshiWeb),
    "moshi-client": Kind(1920, "", MoshiClient, early=True),
}


@dataclass
class Found:
    """Of all calls of one kind."""

    delays_ms: list[float] = field(default_factory=list)
    calm_ms: list[float] = field(default_factory=list)
    """Of calls in which this machine let no tick be late and nobody sleep through one."""
    lost: int = 0
    waits_ms: list[float] = field(default_factory=list)
    dry: int = 0
    figures: list[dict[str, Any]] = field(default_factory=list)


CLICK = (
    np.sin(2 * np.pi * np.linspace(800, 3000, 120).cumsum() / RATE_HZ) * np.hanning(120) * 0.7
).astype(np.float32)
"""5 ms of a rising tone: what a codec made for voices keeps the place of."""


def speech(seconds: float, rng: np.random.Generator) -> tuple[NDArray[np.float32], list[int]]:
    """Faint noise with clicks in it, and where they are."""
    pcm = (rng.standard_normal(int(seconds * RATE_HZ)) * 1e-4).astype(np.float32)
    at, clicks = 2.0, []
    while at < seconds - 1:
        clicks.append(int(at * RATE_HZ) + int(rng.integers(0, SAMPLES)))
        pcm[clicks[-1] : clicks[-1] + CLICK.size] += CLICK
        at += float(rng.choice(CLICK_GAPS_S))
    return pcm, clicks


async def hold(url: str, kind: Kind, seconds: float, seed: int, found: Found) -> None:
    """One call: say clicks, play what comes, and find them in it."""
    pcm, clicks = speech(seconds, np.random.default_rng(seed))
    player = kind.player()
    heard: list[NDArray[np.float32]] = []
    protocols = (kind.subprotocol,) if kind.subprotocol else ()
    async with ClientSession() as session, session.ws_connect(url, protocols=protocols) as ws:
        out = PageOpus() if kind.subprotocol == OPUS else sphn.OpusStreamWriter(RATE_HZ)
        plain = VOICES[PCM](RATE_HZ)
        back = VOICES[kind.subprotocol](RATE_HZ)
        live = asyncio.Event()

        async def listen() -> None:
            async for message in ws:
                now_ms = CLOCK.now_ns() / NS_PER_MS
                if message.data[0] == 0:
                    live.set()
                elif message.data[0] == 1:
                    parts = [back.decode(part) for part in back.unpack(message.data[1:])]
                    for number, got in enumerate(parts):
                        heard.append(got)
                        player.arrive(got.size, now_ms, number == 0)
                elif message.data[0] == 5:
                    sys.stderr.write(f"{message.data[1:].decode()}\n")

        listener = asyncio.create_task(listen())
        if not kind.early:
            await asyncio.wait_for(live.wait(), 20)
        start_ms = CLOCK.now_ns() / NS_PER_MS + 5
        for index, at in enumerate(range(0, pcm.size - kind.block, kind.block), 1):
            due_ms = start_ms + index * kind.block * 1000 / RATE_HZ
            await asyncio.sleep(max(0.0, due_ms - CLOCK.now_ns() / NS_PER_MS) / 1000)
            block = pcm[at : at + kind.block]
            in_pcm = kind.subprotocol == PCM
            payload = plain.encode(block) if in_pcm else out.append_pcm(block)
            if payload:
                await ws.send_bytes(b"\x01" + payload)
        async with session.get(url.replace("/api/chat", "/api/line")) as answer:
            found.figures += (await answer.json())["calls"]
        await ws.close()
        await listener
    found.waits_ms += player.waits_ms[25:]
    found.dry += player.dry
    _find(np.concatenate(heard), np.concatenate(player.heard_ms), clicks, start_ms, found)


def _find(
    heard: NDArray[np.float32],
    heard_ms: NDArray[np.float64],
    clicks: list[int],
    start_ms: float,
    found: Found,
) -> None:
    matched = np.abs(np.correlate(heard, CLICK, "valid"))
    for click in clicks:
        said_ms = start_ms + click * 1000 / RATE_HZ
        later_ms = heard_ms[: matched.size] - said_ms
        near = np.flatnonzero((later_ms > 0) & (later_ms < LONGEST_MS))
        if not near.size or matched[near].max() < 0.3 * float((CLICK**2).sum()):
            found.lost += 1
            continue
        found.delays_ms.append(float(later_ms[near[int(matched[near].argmax())]]) - PERIOD_MS)


def told(name: str, kind: Kind, found: Found) -> dict[str, Any]:
    """Print one kind of client; what goes into JSON."""
    p50, p99, most = (round(float(ms), 1) for ms in np.percentile(found.delays_ms, [50, 99, 100]))

    def part(of: str) -> float:
        return float(np.median([f[of]["p50_ms"] for f in found.figures if f[of]]))

    opus_ms, resampler_ms = (0.0, 10.0) if kind.subprotocol == PCM else (6.5, 5.0)
    block_ms = kind.block * 1000 / RATE_HZ
    parts = {
        "the client collects a block": block_ms,
        "Opus looks ahead, both ways": 2 * opus_ms,
        "the resampler that follows the client's clock": resampler_ms,
        "arrival to tick: what a network may be late by, lead": part("arrived_to_tick") - block_ms,
        "the frame itself": float(PERIOD_MS),
        "the tick": part("tick_to_made"),
        "made to sent: until its time comes": part("made_to_sent"),
        "the client's buffer": float(np.median(found.waits_ms)),
    }
    say = sys.stdout.write
    say(f"\n{name}: {len(found.delays_ms)} clicks, {found.lost} lost, {found.dry} times dry\n")
    say(f"  beyond the model's frame   p50 {p50:.0f} ms   p99 {p99:.0f} ms   max {most:.0f} ms\n")
    if found.calm_ms and len(found.calm_ms) < len(found.delays_ms):
        calm = np.percentile(found.calm_ms, [50, 99, 100]).tolist()
        say(f"  {len(found.calm_ms)} of them in calls that the machine did not disturb:\n")
        say("  {:<26} p50 {:.0f} ms   p99 {:.0f} ms   max {:.0f} ms\n".format("", *calm))
    for what, ms in parts.items():
        say(f"    {what:<54} {ms:6.1f}\n")
    say(f"    {'sum of these medians':<54} {sum(parts.values()):6.1f}\n")
    sys.stdout.flush()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": most, "lost": found.lost, "parts_ms": parts}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=8, help="of each kind of client")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=15.0, help="a step of the echo takes this")
    parser.add_argument("--client", choices=sorted(KINDS), action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--role", choices=("box", "line"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "box":
        run_box(args.folder, args.step_ms)
        return 0
    if args.role == "line":
        asyncio.run(run_line(args.folder))
        return 0
    with tempfile.TemporaryDirectory(prefix="dbx-m2e-") as name:
        return measure(args, Path(name))


def measure(args: argparse.Namespace, folder: Path) -> int:
    def start(role: str, **more: Any) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "bench.web_mouth_to_ear", "--role", role]
        words += ["--folder", str(folder), "--step-ms", str(args.step_ms)]
        return subprocess.Popen(words, cwd=ROOT, text=True, **more)

    box = start("box", stderr=subprocess.DEVNULL)
    never_ns = CLOCK.now_ns() + 30_000 * NS_PER_MS
    while CLOCK.now_ns() < never_ns:
        with contextlib.suppress(control.BoxGone):
            control.ControlClient.connect(folder / "box.sock").close()
            break
        CLOCK.sleep_until(CLOCK.now_ns() + 100 * NS_PER_MS)
    CLOCK.sleep_until(CLOCK.now_ns() + 3_000 * NS_PER_MS)  # it calibrates
    line = start("line", stdout=subprocess.PIPE)
    assert line.stdout is not None
    url = f"ws://127.0.0.1:{int(line.stdout.readline())}/api/chat"
    with contextlib.suppress(OSError):  # a browser's audio has priority, too
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    results = {}
    try:
        for name in args.client or list(KINDS):
            found = Found()
            for first in range(0, args.calls, args.at_once):
                asyncio.run(_together(url, KINDS[name], first, args, found))
            results[name] = told(name, KINDS[name], found)
    finally:
        for process in (line, box):
            process.terminate()
            process.wait(30)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


async def _together(
    url: str, kind: Kind, first: int, args: argparse.Namespace, found: Found
) -> None:
    seeds = range(first, min(first + args.at_once, args.calls))
    clicks, calls, dry, lost = len(found.delays_ms), len(found.figures), found.dry, found.lost
    await asyncio.gather(*(hold(url, kind, args.seconds, seed, found) for seed in seeds))
    troubles = ("short", "overslept", "paid_back", "filled", "late")
    troubled = sum(call[what] for call in found.figures[calls:] for what in troubles)
    if not troubled and (found.dry, found.lost) == (dry, lost):
        found.calm_ms += found.delays_ms[clicks:]


if __name__ == "__main__":
    sys.exit(main())
