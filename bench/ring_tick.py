# ruff: noqa: T201  (a script run by hand)
"""What attention of our own changes in a whole tick on a GPU: bits, words, time, memory.

    python -m bench.random_bundle graphs out/standard --batches 1-160
    python -m bench.random_bundle graphs out/ring --batches 1-160 --attention ring
    python -m bench.random_bundle weights out/standard
    python -m bench.ring_tick link out/standard out/ring       # the same weights, not twice
    python -m bench.ring_tick bits out/ring                    # ends with 1 if bits differ
    python -m bench.ring_tick agree out/standard out/ring      # ends with 1 if they do not agree
    python -m bench.ring_tick figures out/standard out/ring --json out/ring_tick.json

`bits` asks of four sessions that join one after the other, 620 ticks: run = rerun, memory on
demand = memory in full, graph replay = eager run. Then of every attention, on what a tick left in
its wires: that it answers each of 64 sessions of mixed ages with the same bits in batches of 1, 7
and 64. (A whole tick need not: the matrices around it are a library's, which chooses by batch.)

`agree` runs one greedy session through both bundles and compares text logits until the words part.
`figures` times ticks of sessions whose context is full, stage by stage, and counts graph nodes and
device memory, which holds one library handle per session graph: 52 in a cut bundle, 4 in a whole.
The goals beside them are those of a full tick of Moshi 7B on one H200.

Not here: the kernel alone (`bench.ring_attention`).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench import cuda_bits, random_bundle
from engines import bench, bundle, cuda
from engines.bundle import Bundle, StageSpec
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.program import Buffer

GOAL_MS = {1: 7.5, 32: 20.0, 64: 32.0}
"""Batch -> a full tick at full context."""
BATCHES = (1, 7, 64)
OLDEST = 3100
"""Ticks: the ring of 3,000 has wrapped."""
REPEATS = 20
TIMED_TICKS = 200
CLOSE = 0.05
"""Of the largest text logit: two orders of summing 32 layers in bfloat16 are apart by less."""


def link(standard: Path, ring: Path) -> int:
    """Give ``ring`` the weights of ``standard`` if both say they lie at the same places."""
    places = [(folder / random_bundle.PLACES).read_text() for folder in (standard, ring)]
    if places[0] != places[1]:
        print(f"the weights of {standard} and {ring} lie elsewhere; write each bundle's own")
        return 1
    for path in sorted((standard / "stages" / "weights").iterdir()):
        target = ring / "stages" / "weights" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(path, target)
    return 0


def bits(ring: Bundle) -> int:
    faults = cuda_bits.same_three_times(ring)
    most = max(BATCHES)
    executor = CudaExecutor(ring, most, CudaOptions(batches=(most,)))
    for slot in range(most):
        executor.join(slot, {})
        executor.age(slot, 1 + slot * OLDEST // most)
    executor.audio_in[:] = 0.1 * np.random.default_rng(2).standard_normal(executor.audio_in.shape)
    executor.step(most)  # fills the wires
    executor.arena.map_all_due()  # what is launched below writes each session's next row
    stages = [stage for stage in ring.manifest.stages if stage.ring]
    odd = [stage.name for stage in stages if not depends_on_nothing_else(executor, stage)]
    executor.close()
    print(
        f"{len(stages)} attentions of {most} sessions aged 1 to {OLDEST}, alone, in batches of "
        f"{', '.join(map(str, BATCHES))}, {REPEATS} times each: "
        + (f"differ: {', '.join(odd)}" if odd else "the same bits for every session")
    )
    return int(faults + len(odd) > 0)


def depends_on_nothing_else(executor: CudaExecutor, stage: StageSpec) -> bool:
    """Whether every session is answered the same in every batch, whenever it is asked."""
    answer = stage.outputs[0].name
    expected = b""
    for batch in reversed(BATCHES):
        launch = executor.stage(stage.name, batch)
        for _ in range(REPEATS):
            launch()
            executor.stream.synchronize()
            found = wire(executor, answer, batch)
            expected = expected or found
            if found != expected[: len(found)] or not any(found):
                return False
    return True


def wire(executor: CudaExecutor, name: str, batch: int = 1) -> bytes:
    """What lies in a tensor between two stages, of the first ``batch`` sessions."""
    row_bytes = executor.layout.whole[Buffer(name, 0)].row_bytes
    return bytes(cuda.read_device(executor.wire_address(name), batch * row_bytes))


def agree(standard: Bundle, ring: Bundle) -> int:
    said = []
    for opened in (standard, ring):
        executor = CudaExecutor(opened, 1, CudaOptions(batches=(1,)))
        said.append(cuda_bits.told(executor, 1))
        executor.close()
    furthest, same = 0.0, 0
    for mine, theirs in zip(*said, strict=True):
        distance = float(np.abs(mine[1] - theirs[1]).max() / np.abs(theirs[1]).max())
        furthest = max(furthest, distance)
        if mine[0] != theirs[0]:
            break
        same += 1
    print(
        f"same words for {same} of {len(said[0])} ticks; text logits at most {furthest:.2%} of the "
        f"largest apart until then (allowed {CLOSE:.0%})"
    )
    return int(not furthest <= CLOSE)  # a NaN is not


def figures(opened: Iterable[Bundle], fill: int, batches: Sequence[int]) -> list[dict[str, object]]:
    """Time both; returns rows for a file."""
    rows: list[dict[str, object]] = []
    for given in opened:
        executor = CudaExecutor(given, max(batches), CudaOptions(batches=batches))
        for batch in batches:
            timings = bench.measure(executor, batch, TIMED_TICKS, fill)
            tick = next(timing for timing in timings if timing.name == "tick")
            parts = _parts(timings)
            use = executor.memory()
            goal = f" (goal {GOAL_MS[batch]})" if batch in GOAL_MS else ""
            print(
                f"{given.path.name:<10}{batch:>4} x {fill}: tick p50 {tick.p50_us / 1e3:.2f}, "
                f"p99 {tick.p99_us / 1e3:.2f} ms{goal}; "
                + ", ".join(f"{name} {us / 1e3:.2f}" for name, us in parts.items())
                + f"; {executor.nodes(batch):,} nodes, {use.device_used / 1e9:.1f} GB"
            )
            rows.append(
                {
                    "bundle": given.path.name,
                    "parts_us": parts,
                    "nodes": executor.nodes(batch),
                    "memory": asdict(use),
                    "timings": [asdict(timing) for timing in timings],
                }
            )
        executor.close()
    return rows


def _parts(timings: Iterable[bench.Timing]) -> dict[str, float]:
    """Medians by what a stage is part of, microseconds; attention beside the graphs around it."""
    found: dict[str, float] = {}
    for timing in timings:
        if timing.name == "tick":
            continue
        name = timing.name
        if name.endswith("_attention"):
            name = f"{name.rsplit('_', 2)[0]} attention"
        elif name[-2:].isdigit():
            name = name[:-3]
        found[name] = found.get(name, 0.0) + timing.p50_us
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("link", "bits", "agree", "figures"))
    parser.add_argument("bundles", type=Path, nargs="+", help="standard, then ring; or ring alone")
    parser.add_argument("--fill", type=int, default=3000, help="ticks the sessions have lived")
    parser.add_argument("--batches", type=int, nargs="+", default=sorted(GOAL_MS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = {"bits": (1,), "figures": (1, 2)}.get(args.what, (2,))
    if len(args.bundles) not in wanted:
        parser.error(f"{args.what} takes {' or '.join(map(str, wanted))} bundles")
    if args.what == "link":
        return link(*args.bundles)
    opened = [bundle.read(path, hashes=False) for path in args.bundles]
    if args.what == "bits":
        return bits(*opened)
    if args.what == "agree":
        return agree(*opened)
    rows = figures(opened, args.fill, args.batches)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
