"""Mouth to ear over the websocket line: clicks through the whole path, part by part.

    python -m bench.web_mouth_to_ear [--calls 8] [--seconds 20] [--step-ms 15] [--client NAME ...]
    python -m bench.web_mouth_to_ear --simulated busy

The box is the real one, with an executor that echoes one frame later, as a model answers at the
earliest (`echo_box`); the line is the real one in a process of its own; the clients are those of
`web_players`, on the loopback. With --simulated the line's code runs on a clock that jumps, in a
world that is as late as its name says (`web_simulated`): how busy this machine is does not matter.

Every click is found again in what its client plays. Printed is how much later than it was said,
beyond the one frame that the echo takes, and where the time goes. Sound cards and browsers are not
in it (10 to 40 ms for both ways is usual), and neither are networks. Exits with 1 when a page of
ours is later than the goal.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import ClientSession

from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.lines.niceness import ask_for
from appliance.lines.web_voice import OPUS, PCM
from bench import web_simulated
from bench.echo_box import PERIOD_MS, stand
from bench.web_players import KINDS, Caller, Found, Kind

CLOCK = MonotonicClock()
GOAL_MS = 200.0
"""At p99, beyond the model's frame, for pages of ours; other clients have buffers of their own."""

OPUS_MS = 6.5
"""What libopus looks ahead when it encodes, at any rate."""

TROUBLES = ("short", "overslept", "paid_back", "filled", "late")


@dataclass
class Measured(Found):
    """With what the line says of the same calls."""

    calm_ms: list[float] = field(default_factory=list)
    """Of calls in which this machine let no tick be late and nobody sleep through one."""
    figures: list[dict[str, Any]] = field(default_factory=list)


async def hold(url: str, kind: Kind, seconds: float, seed: int, found: Measured) -> None:
    """One call: say clicks, play what comes, and find them in it."""
    caller = Caller(kind, seconds, seed)
    protocols = (kind.subprotocol,) if kind.subprotocol else ()
    async with ClientSession() as session, session.ws_connect(url, protocols=protocols) as ws:
        live = asyncio.Event()

        async def listen() -> None:
            async for message in ws:
                caller.hear(message.data, CLOCK.now_ns() / NS_PER_MS)
                if message.data[0] == 0:
                    live.set()
                elif message.data[0] == 5:
                    sys.stderr.write(f"{message.data[1:].decode()}\n")

        listener = asyncio.create_task(listen())
        if not kind.early:
            await asyncio.wait_for(live.wait(), 20)
        start_ms = CLOCK.now_ns() / NS_PER_MS + 5
        for index, payload in enumerate(caller.payloads):
            due_ms = start_ms + caller.due_ms(index)
            await asyncio.sleep(max(0.0, due_ms - CLOCK.now_ns() / NS_PER_MS) / 1000)
            if payload:
                await ws.send_bytes(b"\x01" + payload)
        async with session.get(url.replace("/api/chat", "/api/line")) as answer:
            found.figures += (await answer.json())["calls"]
        await ws.close()
        await listener
    caller.settle(start_ms, found)


async def together(url: str, kind: Kind, seconds: float, seeds: range, found: Measured) -> None:
    """Some calls at once."""
    clicks, calls = len(found.delays_ms), len(found.figures)
    dry, lost = found.dry + found.drops, found.lost
    await asyncio.gather(*(hold(url, kind, seconds, seed, found) for seed in seeds))
    troubled = sum(call[what] for call in found.figures[calls:] for what in TROUBLES)
    if not troubled and (found.dry + found.drops, found.lost) == (dry, lost):
        found.calm_ms += found.delays_ms[clicks:]


def simulated(world: web_simulated.World, kind: Kind, seconds: float, calls: int) -> Measured:
    """The same, one call after the other, on a clock that jumps."""
    found = Measured()
    for seed in range(calls):
        caller = Caller(kind, seconds, seed)
        held = web_simulated.hold(caller, world, seed)
        caller.settle(held.start_ms, found)
        found.figures.append(msgspec.to_builtins(held.figures))
    return found


def parts_ms(kind: Kind, found: Measured) -> dict[str, tuple[float, float]]:
    """Where the time goes: median, and 99th percentile where it varies."""

    def part(of: str) -> tuple[float, float]:
        had = [f[of] for f in found.figures if f[of]]
        p50_ms = float(np.median([one["p50_ms"] for one in had]))
        return p50_ms, max(one["p99_ms"] for one in had)

    def always(ms: float) -> tuple[float, float]:
        return ms, ms

    in_pcm = kind.subprotocol == PCM
    waited = part("arrived_to_tick")
    waits = np.percentile(found.waits_ms, [50, 99])
    return {
        "the client collects a block": always(kind.block_ms),
        "Opus looks ahead, both ways": always(0.0 if in_pcm else 2 * OPUS_MS),
        "the resampler that follows the client's clock": always(10.0 if in_pcm else 5.0),
        "arrival to tick: what a network may be late by, lead": (
            waited[0] - kind.block_ms,
            waited[1] - kind.block_ms,
        ),
        "the frame itself": always(float(PERIOD_MS)),
        "the tick": part("tick_to_made"),
        "made to sent: until its time comes": part("made_to_sent"),
        "the client's buffer": (float(waits[0]), float(waits[1])),
    }


def told(name: str, kind: Kind, found: Measured) -> dict[str, Any]:
    """Print one kind of client; what goes into JSON."""
    p50, p99, most = (round(float(ms), 1) for ms in np.percentile(found.delays_ms, [50, 99, 100]))
    parts = parts_ms(kind, found)
    say = sys.stdout.write
    buffer = f"{found.dry} times dry, {found.drops} times too full"
    say(f"\n{name}: {len(found.delays_ms)} clicks, {found.lost} lost, {buffer}\n")
    say(f"  beyond the model's frame   p50 {p50:.0f} ms   p99 {p99:.0f} ms   max {most:.0f} ms\n")
    if found.calm_ms and len(found.calm_ms) < len(found.delays_ms):
        calm = np.percentile(found.calm_ms, [50, 99, 100]).tolist()
        say(f"  {len(found.calm_ms)} of them in calls that the machine did not disturb:\n")
        say("  {:<26} p50 {:.0f} ms   p99 {:.0f} ms   max {:.0f} ms\n".format("", *calm))
    say("  {:<56} {:>6} {:>8}\n".format("", "p50", "p99 ms"))
    for what, (middle, late) in parts.items():
        say(f"    {what:<54} {middle:6.1f} {late:8.1f}\n")
    say(f"    {'sum of these medians':<54} {sum(middle for middle, _ in parts.values()):6.1f}\n")
    counts = {what: sum(call[what] for call in found.figures) for what in TROUBLES}
    say(f"    frames: {', '.join(f'{what} {count}' for what, count in counts.items())}\n")
    sys.stdout.flush()
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "max_ms": most,
        "lost": found.lost,
        "dry": found.dry,
        "drops": found.drops,
        **counts,
        "parts_ms": parts,
    }


def measure(args: argparse.Namespace) -> dict[str, Measured]:
    names = args.client or list(KINDS)
    if args.simulated:
        world = web_simulated.WORLDS[args.simulated]
        return {n: simulated(world, KINDS[n], args.seconds, args.calls) for n in names}
    results = {name: Measured() for name in names}
    with stand(step_ms=args.step_ms) as both:
        ask_for()  # a browser's audio has priority, too
        for name, found in results.items():
            for first in range(0, args.calls, args.at_once):
                seeds = range(first, min(first + args.at_once, args.calls))
                asyncio.run(together(both.url, KINDS[name], args.seconds, seeds, found))
    return results


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench.web_mouth_to_ear", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--calls", type=int, default=8, help="of each kind of client")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=15.0, help="a step of the echo takes this")
    parser.add_argument("--client", choices=sorted(KINDS), action="append")
    parser.add_argument("--simulated", choices=sorted(web_simulated.WORLDS), metavar="WORLD")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = {name: told(name, KINDS[name], found) for name, found in measure(args).items()}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    ours = [results[name] for name in results if KINDS[name].subprotocol in (OPUS, PCM)]
    return 0 if all(one["p99_ms"] <= GOAL_MS for one in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
