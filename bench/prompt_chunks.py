# ruff: noqa: T201  (a script run by hand)
"""What a piece of a persona's prompt costs beside live sessions on a GPU, and memory with it.

    python -m bench.random_bundle graphs B --persona --attention ring --batches 1-80
    python -m bench.random_bundle weights B
    python -m bench.prompt_chunks B --sessions 64 --json out/prompt_chunks.json

A tick of all sessions, whose windows are full, then one piece, as the box does it: between two
ticks, in a slot that no tick steps. Pieces of 1 to 64 rows early and late in a prompt, the last
row with the first choice, and what it takes to turn to another newcomer whose rows must be copied
in. Milliseconds on the host's clock until the device is done. The box leaves an eighth of a period
alone, so what may be fed in a tick is what fits into seven eighths less the tick.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from appliance.persona import Personas
from appliance.priming import CHUNKS, GUARD_SHARE
from engines import bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.prefill import Prompt

EARLY, LATE = 64, 1024
"""Rows fed before: about a voice, and a voice with a long persona."""


class Beside:
    """Live sessions, and a clock around what happens between their ticks."""

    def __init__(self, executor: CudaExecutor, sessions: int) -> None:
        self.executor, self.sessions = executor, sessions
        self._rng = np.random.default_rng(0)

    def tick(self) -> float:
        """One tick on noise, ms."""
        heard = self.executor.audio_in[: self.sessions]
        heard[:] = 0.1 * self._rng.standard_normal(heard.shape)
        return taken(lambda: self.executor.step(self.sessions))

    def each(self, count: int, work: Callable[[int], None]) -> tuple[list[float], list[float]]:
        """``work`` again and again, between two ticks each: what it and what the next tick took."""
        pieces, ticks = [], []
        for index in range(count):
            pieces.append(taken(lambda index=index: work(index)))  # type: ignore[misc]
            ticks.append(self.tick())
        return pieces, ticks


def taken(work: Callable[[], None]) -> float:
    began = time.perf_counter_ns()  # noqa: TID251  (a measurement)
    work()
    return (time.perf_counter_ns() - began) / 1e6  # noqa: TID251


def told(name: str, found: list[float]) -> dict[str, object]:
    p50, p99 = np.quantile(found, (0.5, 0.99))
    print(
        f"{name:<44} p50 {p50:7.2f}  p99 {p99:7.2f}  max {max(found):7.2f} ms  ({len(found)})",
        flush=True,
    )
    return {"name": name, "p50_ms": p50, "p99_ms": p99, "max_ms": max(found), "count": len(found)}


def run(executor: CudaExecutor, sessions: int, fill: int, count: int) -> list[dict[str, object]]:
    made = executor.bundle
    for slot in range(sessions):
        executor.join(slot, {})
        executor.age(slot, fill)
    beside = Beside(executor, sessions)
    for _ in range(5):
        beside.tick()
    rows = [told(f"tick of {sessions}, no prompt", [beside.tick() for _ in range(5 * count)])]
    before = executor.memory()
    began = time.perf_counter()  # noqa: TID251
    primer = executor.primer()
    opened_s = time.perf_counter() - began  # noqa: TID251
    after = executor.memory()
    print(
        f"primer opened in {opened_s:.1f} s; memory {before.device_used / 1e9:.1f} GB -> "
        f"{after.device_used / 1e9:.1f} GB"
    )
    prompt: Prompt = Personas(made).plain(primer.retain)
    one, other = executor.slots - 1, executor.slots - 2
    assert other >= sessions, "two slots beside the sessions are needed"
    for first in (EARLY, LATE):
        for chunk in CHUNKS:
            primer.clear(one)
            at = 0
            while at < first:  # as one who came so far, in pieces that fit
                step = min(64, first - at)
                primer.feed(one, prompt, at, step)
                at += step
            beside.tick()

            def feed(index: int, at: int = at, chunk: int = chunk) -> None:
                primer.feed(one, prompt, at + index * chunk, chunk)

            cold, _ = beside.each(1, feed)
            pieces, ticks = beside.each(count, lambda index: feed(index + 1))
            rows.append({**told(f"{chunk} rows from {first} on", pieces), "first_ms": cold[0]})
            rows.append(told("  the tick after each", ticks))
    fed = {one: 0, other: 0}
    for slot in fed:
        primer.clear(slot)
        for at in range(0, LATE, 64):
            primer.feed(slot, prompt, at, min(64, LATE - at))
        fed[slot] = LATE
    turns: list[int] = [one, other]

    def alternate(index: int) -> None:
        slot = turns[index % 2]
        primer.feed(slot, prompt, fed[slot], 8)
        fed[slot] += 8

    pieces, _ = beside.each(count, alternate)
    rows.append(told(f"8 rows behind {LATE}, newcomers in turns", pieces))
    # The last row and the first choice need a whole prompt: one that ends where we are.
    short: Prompt = Personas(made).plain(EARLY + 1)

    def opening(_: int) -> None:
        primer.open(one, short, {})

    primer.clear(one)
    primer.feed(one, short, 0, EARLY)
    pieces, _ = beside.each(count, opening)
    rows.append(told("last row and first choice", pieces))
    last = executor.memory()
    print(f"memory at the end {last.device_used / 1e9:.1f} of {last.device_total / 1e9:.1f} GB")
    period_ms = made.manifest.timing.period_ns / 1e6
    room = period_ms * (1 - 1 / GUARD_SHARE) - float(rows[0]["p50_ms"])  # type: ignore[arg-type]
    print(f"{room:.1f} ms of each tick are left to pieces")
    rows.append(
        {
            "opened_s": opened_s,
            "used_before": before.device_used,
            "used_after": after.device_used,
            "used_at_the_end": last.device_used,
            "room_ms": room,
        }
    )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--fill", type=int, default=3000, help="ticks they have lived")
    parser.add_argument("--count", type=int, default=20, help="pieces of each kind")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    opened = bundle.read(args.bundle, hashes=False)
    options = CudaOptions(batches=(args.sessions,))
    executor = CudaExecutor(opened, args.sessions + 2, options)
    rows = run(executor, args.sessions, args.fill, args.count)
    executor.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
