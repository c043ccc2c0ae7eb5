# ruff: noqa: T201  (a script run by hand)
"""The codec's kernels alone on a GPU: right, the same bits in every batch, and how long.

    python -m bench.codec_kernels check            # against numpy; ends with 1 if something differs
    python -m bench.codec_kernels figures --batches 1 8 64
    python -m bench.codec_kernels sweep --batches 1 8 64 --json out/codec.json

Random weights of the published codec's shape. `figures` times the stages of a tick, attention
left out, each captured into one graph; `sweep` times every product cut in every way that gives the
same bits, from which `codec_gemm.choose` was made. Needs a GPU and cuda-bindings; no bundle.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda
from engines.cuda import DevicePtr, Event
from engines.kernel_stages import COUNTER_BYTES
from engines.kernels import codec, codec_gemm, codec_kinds
from engines.kernels.codec_gemm import Blocks, Product
from engines.kernels.codec_kinds import CodecShape
from engines.kernels.codec_net import Tick, plan_stage
from engines.kernels.codec_params import Call
from engines.kernels.codec_reference import Memory, run
from tests.engines.kernels import codec_rig as rig

STAGES = {
    "codec_encode_first": 1,
    "codec_piece": 14,
    "codec_encode_last": 1,
    "codec_decode_first": 1,
    "codec_decode_last": 1,
}
"""Of a tick: how often each kind runs."""
COMPILED = Path("build/kernels")
REPEATS = 30
CLOSE = 5e-6
"""Largest distance from float64, of what is sought: ten convolutions of thousands of products."""
NOISE_BYTES = 64 << 20
"""What memory holds when only time matters: numbers, not zeros."""


class Rig:
    """A device with one buffer that stands for a `Memory`."""

    def __init__(self, nbytes: int) -> None:
        self.device = cuda.Device()
        self.nbytes = nbytes
        self.base = cuda.allocate(nbytes)
        self.stream = cuda.Stream()
        self.kernels = codec.load([], self.device, COMPILED)
        noise = np.random.default_rng(1).standard_normal(NOISE_BYTES // 4, np.float32).tobytes()
        for first in range(0, nbytes // 3, NOISE_BYTES):
            cuda.write_device(DevicePtr(self.base + first), noise)

    def close(self) -> None:
        self.kernels.close()
        cuda.release(self.base)
        self.stream.close()
        self.device.close()

    def send(self, memory: Memory) -> None:
        cuda.write_device(DevicePtr(memory.base), memory.raw.tobytes())

    def fetch(self, memory: Memory) -> Memory:
        found = Memory(memory.base, 0)
        found.raw = np.frombuffer(
            cuda.read_device(DevicePtr(memory.base), len(memory.raw)), np.uint8
        )
        return found

    def run(self, calls: Iterable[Call]) -> None:
        self.kernels.launches(calls, self.stream)()
        self.stream.synchronize()

    def time_us(self, enqueue: Callable[[], None], times: int = 1) -> float:
        """Median device time of a captured graph that holds ``times`` runs, per run."""

        def record() -> None:
            for _ in range(times):
                enqueue()

        graph = self.stream.capture(record)
        before, after = Event(), Event()
        found = []
        for _ in range(REPEATS):
            before.record(self.stream)
            graph.replay(self.stream)
            after.record(self.stream)
            found.append(after.elapsed_us(before) / times)
        graph.close()
        return float(np.median(found[3:]))


def shapes_of(kind: str, shape: CodecShape) -> dict[str, tuple[int, ...]]:
    """What weights a kind asks for."""
    return codec_kinds.STAGES[kind](shape).weights


def check(device: Rig, shape: CodecShape, batch: int, choose: Any = codec_gemm.choose) -> int:
    """Every stage against numpy. Returns how many outputs differ."""
    faults, worst = 0, 0.0
    for kind in STAGES:
        weights = rig.random_weights(shapes_of(kind, shape))
        ins, outs = rig.tensors(kind, shape, batch)
        memory = Memory(int(device.base), 1 << 29)
        placed = rig.place(memory, kind, shape, weights, ins, outs, choose)
        memory.raw = memory.raw[: memory._next - memory.base]
        device.send(memory)
        device.run(placed.calls)
        found = rig.results(device.fetch(memory), placed, outs)
        run(placed.calls, memory)
        expected = rig.results(memory, placed, outs)
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            a, b = mine.astype(np.float64), theirs.astype(np.float64)
            error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
            worst = max(worst, error)
            if not error < CLOSE:
                faults += 1
                print(f"  {kind} batch {batch} output {index} {mine.shape}: off by {error:.2e}")
    print(
        f"{shape.dimension} wide, batch {batch}: {faults} outputs differ, the others by {worst:.1e}"
    )
    return faults


def bits(device: Rig, shape: CodecShape, batches: Sequence[int]) -> int:
    """The first sessions of the largest batch, alone in every smaller one: the same bits?"""
    faults = 0
    for kind in STAGES:
        weights = rig.random_weights(shapes_of(kind, shape))
        ins, outs = rig.tensors(kind, shape, max(batches))
        memory = Memory(int(device.base), 1 << 30)
        addresses = {
            role: memory.put(rig.turn(role, kind, shape, w)) for role, w in weights.items()
        }
        start = memory._next
        before: list[Any] = []
        for batch in sorted(batches, reverse=True):
            memory._next = start
            few, made = [x[:batch] for x in ins], [x[:batch] for x in outs]
            placed = rig.place_beside(memory, kind, shape, addresses, few, made)
            used = Memory(memory.base, 0)
            used.raw = memory.raw[: memory._next - memory.base]
            device.send(used)
            device.run(placed.calls)
            found = rig.results(device.fetch(used), placed, made)
            before = before or found
            for index, (mine, theirs) in enumerate(zip(found, before, strict=True)):
                if mine.tobytes() != theirs[:batch].tobytes():
                    faults += 1
                    print(f"  {kind} output {index}: batch {batch} differs from {max(batches)}")
    print(f"bits of batches {list(batches)}: {faults} outputs differ")
    return faults


def figures(device: Rig, shape: CodecShape, batches: Sequence[int], detail: bool) -> None:
    for batch in batches:
        total, parts = 0.0, []
        for kind, times in STAGES.items():
            calls = on_device(device, kind, shape, batch)
            us = device.time_us(device.kernels.launches(calls, device.stream), 5)
            total += us * times
            parts.append(f"{kind[6:]} {us:.1f}")
            if detail:
                for call in calls:
                    alone = device.time_us(device.kernels.launches([call], device.stream), 20)
                    grid = "x".join(map(str, call.shape.grid))
                    print(f"    {alone:7.2f} us  {call.kernel:<22} {grid:<14} {call.label}")
        print(f"batch {batch}: {total / 1e3:.3f} ms without attention: {', '.join(parts)}")


def on_device(device: Rig, kind: str, shape: CodecShape, batch: int) -> list[Call]:
    """A stage over memory that holds small numbers; addresses alone matter for its time."""
    memory = Memory(int(device.base), 0)
    memory.raw = np.empty(device.nbytes, np.uint8)  # never touched
    memory._next = memory.base
    weights = {role: memory.take(4 * int(np.prod(s))) for role, s in shapes_of(kind, shape).items()}
    ins, outs = rig.tensors(kind, shape, 1)
    ends = [[memory.take(batch * x.nbytes) for x in side] for side in (ins, outs)]
    counters = memory.take(COUNTER_BYTES)
    cuda.fill_bytes(DevicePtr(counters), 0, COUNTER_BYTES)
    device.device.synchronize()
    scratch = memory.take(0)
    return plan_stage(Tick(shape, batch, weights, scratch, counters), kind, *ends)


def sweep(device: Rig, shape: CodecShape, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Every cut of every product."""
    cuda.fill_bytes(device.base, 0, COUNTER_BYTES)
    rows: list[dict[str, Any]] = []
    seen: set[tuple[Product, int]] = set()
    for batch in batches:
        for kind in STAGES:
            products: list[Product] = []

            def note(product: Product, batch: int, products: list[Product] = products) -> Blocks:
                products.append(product)
                return codec_gemm.choose(product, batch)

            memory = Memory(int(device.base), 0)
            ends = rig.tensors(kind, shape, 1)
            weights = dict.fromkeys(shapes_of(kind, shape), memory.base)
            tick = Tick(shape, batch, weights, 0, 0, note)
            plan_stage(tick, kind, [0] * len(ends[0]), [0] * len(ends[1]))
            for product in products:
                if (product, batch) in seen:
                    continue
                seen.add((product, batch))
                rows += times_of(device, product, batch)
    return rows


def times_of(device: Rig, product: Product, batch: int) -> list[dict[str, Any]]:
    """One product in every cut, its matrix read anew each time from a different place."""
    chosen = codec_gemm.choose(product, batch)
    found: list[dict[str, Any]] = []
    base = int(device.base)
    weights_bytes = product.k * product.n * 4
    copies = max(1, min(20, (400 << 20) // weights_bytes))
    a = base + (1 << 30)
    out = a + (1 << 30)
    elu = out + (1 << 30)
    parts = elu + (1 << 30)
    needed = codec_gemm.parts_floats(product, batch) * 4
    for blocks in codec_gemm.choices(product):
        if max(needed, product.rows * batch * product.k * 4) > 1 << 30:
            continue
        calls = []
        for copy in range(copies):
            name, launch, params = codec_gemm.launch(
                product,
                batch,
                blocks,
                a=a,
                a_session=product.rows * product.k,
                a_row=product.k,
                w=base + COUNTER_BYTES + copy * weights_bytes,
                bias=base if product.meets else 0,
                out=out if product.meets else 0,
                out_session=product.rows * product.n,
                out_row=product.n,
                out_elu=elu if product.meets and product.rows > 4 else 0,
                elu_session=product.rows * product.n,
                elu_row=product.n,
            )
            params.parts = parts if product.leaves_parts else 0
            calls.append(Call(name, launch, params, product.name))
            if product.leaves_parts and product.meets:
                calls.append(Call("codec_meet", codec_gemm.meet(product, batch), params, ""))
        us = device.time_us(device.kernels.launches(calls, device.stream)) / copies
        found.append({"cut": blocks.name, "us": round(us, 2)})
    found.sort(key=lambda row: row["us"])
    mine = next((row["us"] for row in found if row["cut"] == chosen.name), float("nan"))
    macs = product.k * product.n * product.rows * batch
    best = ", ".join(f"{row['cut']} {row['us']}" for row in found[:4])
    print(
        f"B={batch:<3} {product.name:<16} {product.rows}x{product.k}x{product.n} "
        f"parts {product.parts}: chosen {chosen.name} {mine}; {best}; "
        f"{macs / found[0]['us'] / 1e6:.1f} TMAC/s"
    )
    key = {"batch": batch, "name": product.name, "rows": product.rows}
    size = {"k": product.k, "n": product.n, "chosen": mine}
    return [{**key, **size, **row} for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=("check", "figures", "sweep"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serial", action="store_true", help="no launch begins early")
    parser.add_argument("--detail", action="store_true", help="every launch alone")
    args = parser.parse_args()
    device = Rig(12 << 30)
    if args.serial:
        device.kernels.overlaps = False
    faults = 0
    for what in args.what:
        if what == "check":
            for batch in (1, 3, 9):
                faults += check(device, rig.SMALL, batch)
            faults += check(device, rig.MIMI, 2)
            faults += bits(device, rig.SMALL, (1, 7, 64))
            faults += bits(device, rig.MIMI, (1, 7, 40))
        elif what == "figures":
            figures(device, rig.MIMI, args.batches, args.detail)
        else:
            rows = sweep(device, rig.MIMI, args.batches)
            if args.json:
                args.json.write_text(json.dumps(rows))
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
