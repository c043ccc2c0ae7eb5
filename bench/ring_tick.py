# ruff: noqa: T201  (a script run by hand)
"""What attention of our own changes in a whole tick on a GPU: bits, words, time, memory.

    python -m bench.random_bundle graphs out/standard --batches 1-160
    python -m bench.random_bundle graphs out/ring --batches 1-160 --attention ring
    python -m bench.random_bundle weights out/standard
    python -m bench.ring_tick link out/standard out/ring       # the same weights, not twice
    python -m bench.ring_tick bits out/ring                    # ends with 1 if bits differ
    python -m bench.ring_tick agree out/standard out/ring      # ends with 1 if they do not agree
    python -m bench.ring_tick figures out/standard out/ring --json out/ring_tick.json
    python -m bench.ring_tick report out/ring --json out/report.json    # all of it in three loads

`bits` asks of four sessions that join one after the other, 620 ticks: run = rerun, memory on
demand = memory in full, graph replay = eager run. Then of every attention, on what a tick left in
its wires: that it answers each of 64 sessions of mixed ages with the same bits in batches of 1, 7
and 64. (A whole tick need not: the matrices around it are a library's, which chooses by batch.)

`agree` runs greedy sessions through both bundles. A session's text logits are compared for as long
as all its tokens were the same, heard and said: from there on both listen to something else, and of
untrained weights, whose logits are nearly even, rounding soon turns one choice of nine.
`figures` times ticks of sessions whose context is full, stage by stage, and counts graph nodes and
device memory, which holds one library handle per session graph: 52 in a cut bundle, 4 in a whole.
The goals beside them are those of a full tick of Moshi 7B on one H200.

`report` asks the same of one bundle with as few loads as can be: bits; words, logits and times with
kernels in the stages' place and with their graphs instead; memory of 64 sessions a minute old.

Not here: the kernel alone (`bench.ring_attention`).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
YOUNG = 300
"""Ticks: the other age that is timed."""
REPEATS = 20
TIMED_TICKS = 200
CLOSE = 0.05
"""Of the largest text logit: two orders of summing 32 layers in bfloat16 are apart by less."""
TOKENS = "lm.tokens"
"""The region that holds what a session heard and said of late."""
AGREEING = 32
"""Greedy sessions that two ways of computing are compared by."""
AGREE_TICKS = 40


class Spoken(NamedTuple):
    """One tick of some sessions."""

    tokens: NDArray[np.int64]
    """(B, S, R): all that the next tick may listen to."""
    logits: NDArray[np.float32]
    """(B, text card)."""


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
    odd = odd_attentions(executor)
    executor.close()
    return int(faults + odd > 0)


def odd_attentions(executor: CudaExecutor) -> int:
    """How many attentions answer a session differently in another batch. Needs `BATCHES` slots."""
    most = max(BATCHES)
    for slot in range(most):
        executor.join(slot, {})
        executor.age(slot, 1 + slot * OLDEST // most)
    executor.audio_in[:] = 0.1 * np.random.default_rng(2).standard_normal(executor.audio_in.shape)
    executor.step(most)  # fills the wires
    executor.arena.map_all_due()  # what is launched below writes each session's next row
    stages = [stage for stage in executor.bundle.manifest.stages if stage.ring]
    odd = [stage.name for stage in stages if not depends_on_nothing_else(executor, stage)]
    print(
        f"{len(stages)} attentions of {most} sessions aged 1 to {OLDEST}, alone, in batches of "
        f"{', '.join(map(str, BATCHES))}, {REPEATS} times each: "
        + (f"differ: {', '.join(odd)}" if odd else "the same bits for every session")
    )
    return len(odd)


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
        executor = CudaExecutor(opened, AGREEING, CudaOptions(batches=(AGREEING,)))
        said.append(spoken(executor, AGREEING))
        executor.close()
    return apart(*said)


def spoken(executor: CudaExecutor, batch: int) -> list[Spoken]:
    """`AGREE_TICKS` of greedy sessions, each of which hears other noise."""
    rng = np.random.default_rng(1)
    found = []
    for slot in range(batch):
        executor.join(slot, {"sampling.temperature": 0.0, "sampling.text_temperature": 0.0})
    for _ in range(AGREE_TICKS):
        noise = rng.standard_normal((AGREEING, executor.audio_in.shape[1]))
        executor.audio_in[:batch] = 0.1 * noise[:batch]
        executor.step(batch)
        tokens = np.stack([executor.region(TOKENS, slot) for slot in range(batch)])
        logits = np.frombuffer(wire(executor, "text_logits", batch), np.float32)
        found.append(Spoken(tokens, logits.reshape(batch, -1)))
    return found


def apart(ours: list[Spoken], others: list[Spoken]) -> int:
    """Say how far logits with the same past are apart, and how long pasts stay the same."""
    sessions = len(ours[0].tokens)
    alike = np.ones(sessions, bool)
    lasted = np.zeros(sessions, int)
    furthest, squares, size = 0.0, 0.0, 0.0
    for mine, theirs in zip(ours, others, strict=True):
        if not alike.any():
            break
        distance = np.abs(mine.logits[alike] - theirs.logits[alike])
        furthest = max(furthest, float(distance.max() / np.abs(theirs.logits[alike]).max()))
        squares += float(np.square(distance, dtype=np.float64).sum())
        size += float(np.square(theirs.logits[alike], dtype=np.float64).sum())
        lasted += alike
        alike = alike & (mine.tokens == theirs.tokens).all((1, 2))
    share = float(np.sqrt(squares / size))
    print(
        f"{sessions} greedy sessions, {lasted.sum()} ticks of {sessions * len(ours)} with the same "
        f"past ({lasted.min()} to {lasted.max()} each): text logits {share:.2%} of their size "
        f"apart (root of squares), at most {furthest:.2%} of the largest (allowed {CLOSE:.0%})"
    )
    return int(not furthest <= CLOSE)  # a NaN is not


def figures(opened: Iterable[Bundle], fill: int, batches: Sequence[int]) -> list[dict[str, object]]:
    """Time both; returns rows for a file."""
    rows: list[dict[str, object]] = []
    for given in opened:
        executor = CudaExecutor(given, max(batches), CudaOptions(batches=batches))
        rows += timed(executor, given.path.name, fill, batches)
        executor.close()
    return rows


def timed(
    executor: CudaExecutor, name: str, fill: int, batches: Sequence[int], ticks: int = TIMED_TICKS
) -> list[dict[str, object]]:
    """Time one executor's ticks; rows for a file."""
    rows: list[dict[str, object]] = []
    for batch in batches:
        timings = bench.measure(executor, batch, ticks, fill)
        tick = next(timing for timing in timings if timing.name == "tick")
        parts = _parts(timings)
        use = executor.memory()
        goal = f" (goal {GOAL_MS[batch]})" if batch in GOAL_MS else ""
        print(
            f"{name:<10}{batch:>4} x {fill}: tick p50 {tick.p50_us / 1e3:.2f}, p99 "
            f"{tick.p99_us / 1e3:.2f}, p99.9 {tick.p999_us / 1e3:.2f}, max {tick.max_us / 1e3:.2f} "
            f"ms{goal}; "
            + ", ".join(f"{part} {us / 1e3:.2f}" for part, us in parts.items())
            + f"; {executor.nodes(batch):,} nodes, {use.device_used / 1e9:.1f} GB",
            flush=True,
        )
        rows.append(
            {
                "bundle": name,
                "parts_us": parts,
                "nodes": executor.nodes(batch),
                "memory": asdict(use),
                "timings": [asdict(timing) for timing in timings],
            }
        )
    return rows


def report(ring: Bundle, fill: int, batches: Sequence[int], ticks: int) -> dict[str, object]:
    """Everything about one bundle; see the module's text. "faults" says how much failed."""
    few = range(1, len(cuda_bits.JOINS) + 1)
    slots = max(*batches, *BATCHES)
    began = time.perf_counter()  # noqa: TID251  (a measurement)
    executor = CudaExecutor(
        ring, slots, CudaOptions(batches=sorted({*few, *batches, *BATCHES, AGREEING}))
    )
    loaded_s = time.perf_counter() - began  # noqa: TID251
    print(f"{slots} slots loaded in {loaded_s:.1f} s, {executor.memory()}", flush=True)
    memory = minute_old(executor)  # first, as sessions age while pages go back
    rows = timed(executor, "kernels", fill, batches, ticks)
    rows += timed(executor, "kernels", YOUNG, batches[:1], ticks)
    first, again = cuda_bits.heard(executor), cuda_bits.heard(executor)
    eager = cuda_bits.eagerly(executor)
    ours = [spoken(executor, batch) for batch in (1, AGREEING)]
    odd = odd_attentions(executor)
    counts = asdict(executor.arena.counts)
    executor.close()
    in_full = cuda_bits.once(ring, CudaOptions(batches=few, on_demand=False))
    parted = cuda_bits.compared(first, again, eager, in_full)
    few_batches = [batch for batch in batches if batch in GOAL_MS]
    options = CudaOptions(batches=sorted({1, AGREEING, *few_batches}), kernel_stages=False)
    plain = CudaExecutor(ring, max(AGREEING, *few_batches), options)
    others = [spoken(plain, batch) for batch in (1, AGREEING)]
    rows += timed(plain, "graphs", fill, few_batches, ticks)
    plain.close()
    far = sum(apart(mine, theirs) for mine, theirs in zip(ours, others, strict=True))
    return {
        "faults": {"bits": parted, "attentions": odd, "logits": far},
        "loaded_s": loaded_s,
        "minute_old": memory,
        "pages": counts,
        "rows": rows,
    }


def minute_old(executor: CudaExecutor) -> dict[str, float]:
    """Memory of 64 sessions, or as many as there are slots, 60 s into their calls."""
    sessions = min(64, executor.slots)
    ticks = round(60e9 / executor.bundle.manifest.timing.period_ns)
    executor.step(0)
    for slot in range(sessions):
        executor.join(slot, {})
        executor.age(slot, ticks)
    for _ in range(4000):  # pages of those before go back a few a tick
        executor.step(sessions)
        if executor.arena.is_settled:
            break
    use = executor.memory()
    print(
        f"{sessions} sessions, 60 s old: {use.device_used / 1e9:.1f} GB used in all, of which "
        f"pages of rings {use.committed / 1e9:.1f}",
        flush=True,
    )
    return {"sessions": sessions, "device_used": use.device_used, "rings": use.committed}


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
    parser.add_argument("what", choices=("link", "bits", "agree", "figures", "report"))
    parser.add_argument("bundles", type=Path, nargs="+", help="standard, then ring; or ring alone")
    parser.add_argument("--fill", type=int, default=3000, help="ticks the sessions have lived")
    parser.add_argument("--batches", type=int, nargs="+", default=sorted(GOAL_MS))
    parser.add_argument("--ticks", type=int, default=TIMED_TICKS, help="timed, each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = {"bits": (1,), "report": (1,), "figures": (1, 2)}.get(args.what, (2,))
    if len(args.bundles) not in wanted:
        parser.error(f"{args.what} takes {' or '.join(map(str, wanted))} bundles")
    if args.what == "link":
        return link(*args.bundles)
    opened = [bundle.read(path, hashes=False) for path in args.bundles]
    if args.what == "bits":
        return bits(*opened)
    if args.what == "agree":
        return agree(*opened)
    if args.what == "report":
        found = report(opened[0], args.fill, args.batches, args.ticks)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        print(f"faults: {found['faults']}")
        return int(any(dict.values(found["faults"])))  # type: ignore[arg-type]
    rows = figures(opened, args.fill, args.batches)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
