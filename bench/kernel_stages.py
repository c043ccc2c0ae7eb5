# ruff: noqa: T201  (a script run by hand)
"""Time the language model's kernels on a GPU, with random weights of Moshi 7B's sizes.

    python -m bench.kernel_stages --compile sm_90a --batches 80     # anywhere; fills build/kernels
    python -m bench.kernel_stages products             # every way to launch each product
    python -m bench.kernel_stages stages               # temporal with its attentions, and depth

A figure is the median of replays of one captured graph: of 32 launches of a product, whose
weights lie apart so that nothing stays in L2, or of a stage as a tick has it. Rates count weights
once. `stages --rows 3000` reads that many rows of every ring (1.57 GB a session).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda
from engines.bundle import ITEMSIZE, StageSpec
from engines.kernel_stages import COUNTER_BYTES, Bindable, Scratch
from engines.kernels import depth, gated, linear, linear_choice, lm_stage, nvrtc
from engines.kernels import lm_reference as ref
from engines.kernels.linear import LinearKernels, Rows
from engines.kernels.linear_choice import Choice, Finish, Product, choose, few, many, wide
from engines.kernels.ring_attention import SOURCE as RING
from engines.kernels.ring_attention import CacheType, RingKernels, RingShape, ring_params
from engines.kernels.ring_reference import rope_frequency
from engines.program import Bound, Buffer, Step
from tests.engines.kernels.lm_rig import depth_stage, tensor, with_weights

COMPILED = Path(__file__).parents[1] / "build" / "kernels"
LAYERS, FEATURES, GATE, TEXT = 32, 4096, 11_264, 32_000
DEPTH = dict(
    hidden=FEATURES, features=1024, gate=2816, heads=16, steps=8, layers=6, card=2048,
    text_card=TEXT, candidates=250,
)  # fmt: skip
PRODUCTS = {
    "qkv": Product(3 * FEATURES, FEATURES),
    "gate": Product(GATE, FEATURES, Finish.GATE),
    "down": Product(FEATURES, GATE, Finish.ADD),
    "out": Product(FEATURES, FEATURES, Finish.ADD),
    "text": Product(TEXT, FEATURES, Finish.FLOAT),
    "depth in": Product(8192, FEATURES),
    "depth qkv": Product(3072, 1024),
    "depth gate": Product(2816, 1024, Finish.GATE),
    "depth down": Product(1024, 2816, Finish.ADD),
    "depth out": Product(1024, 1024, Finish.ADD),
    "depth head": Product(2048, 1024, Finish.FLOAT),
}
BOTH = (False, True)
SHAPE = RingShape(CacheType.BFLOAT16, 32, 32, 128, capacity=3000)


class Bench:
    """A device with a pool of weights."""

    def __init__(self, pool_bytes: int) -> None:
        self.device = cuda.Device()
        self.stream = cuda.Stream()
        major, minor = self.device.compute_capability
        self.target = f"sm_{major}{minor}"
        self.linear = LinearKernels("bfloat16", self.device, COMPILED)
        self.pool, self.pool_bytes = cuda.allocate(pool_bytes), pool_bytes
        rng = np.random.default_rng(0)
        self.fill(self.pool, pool_bytes, ref.store("bfloat16", rng.normal(size=32 << 20) / 64))
        self.counters = cuda.allocate(COUNTER_BYTES)
        cuda.fill_bytes(self.counters, 0, COUNTER_BYTES)
        self.room = cuda.allocate(1 << 30)
        self.fill(self.room, 1 << 30, ref.store("bfloat16", rng.normal(size=32 << 20)))

    def fill(self, pointer: int, nbytes: int, pattern: np.ndarray[Any, Any]) -> None:
        raw = pattern.tobytes()[:nbytes]
        cuda.write_device(cuda.DevicePtr(pointer), raw)
        done = len(raw)
        while done < nbytes:
            step = min(done, nbytes - done)
            target, source = cuda.DevicePtr(pointer + done), cuda.DevicePtr(pointer)
            cuda.copy_device(target, source, step, self.stream)
            self.stream.synchronize()
            done += step

    def median_us(self, record: Callable[[], None], replays: int = 15) -> tuple[float, int]:
        """Of one captured graph, and its nodes."""
        record()
        self.stream.synchronize()
        graph = self.stream.capture(record)
        began, ended = cuda.Event(), cuda.Event()
        spent = []
        for _ in range(replays + 2):
            began.record(self.stream)
            graph.replay(self.stream)
            ended.record(self.stream)
            spent.append(ended.elapsed_us(began))
        nodes = graph.nodes
        graph.close()
        return statistics.median(spent[2:]), nodes

    def product(self, product: Product, batch: int, choice: Choice | None) -> float:
        """Microseconds of one launch among 32."""
        halves = 2 if product.finish is Finish.GATE else 1
        nbytes = product.outputs * halves * product.inputs * 2
        apart = self.pool_bytes // nbytes
        x, y = int(self.room), int(self.room) + (64 << 20)
        launches = []
        for layer in range(LAYERS):
            launches += self.linear.product(
                product,
                batch,
                w=self.pool + layer % apart * nbytes,
                x=Rows(x, product.inputs),
                y=Rows(y, product.outputs),
                add=Rows(y, product.outputs) if product.finish is Finish.ADD else None,
                scratch=(self.counters, cuda.DevicePtr(self.room + (256 << 20))),
                stream=self.stream,
                choice=choice,
            )
        return self.median_us(lm_stage.run_all(launches))[0] / LAYERS


def products(bench: Bench, batches: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        product = PRODUCTS[name]
        halves = 2 if product.finish is Finish.GATE else 1
        nbytes = product.outputs * halves * product.inputs * 2
        for batch in batches:
            ways = {"as chosen": choose(product, batch, is_half=True)}
            if batch <= linear_choice.FEW:
                found = [few(product, batch, stages=stages) for stages in (4, 8)]
            else:
                found = [
                    many(product, batch, height, split) for height in (64, 128) for split in BOTH
                ]
            for split in BOTH if batch > 1 else ():
                found += [
                    wide(product, batch, is_split=split, stages=stages) for stages in (3, 4, 6, 8)
                ]
            for way in found:
                if way.shared_bytes <= linear_choice.H200.whole():
                    ways[f"{way.kernel[7:]} {way.height} / {way.blocks_per_sum} {way.stages}"] = way
            spent = {way: bench.product(product, batch, choice) for way, choice in ways.items()}
            text = ", ".join(f"{way} {us:.1f}" for way, us in spent.items())
            rate = nbytes / min(spent.values()) / 1e6
            print(f"{name:10} {batch:3}: {rate:.2f} TB/s; us: {text}", flush=True)
            rows += [
                {"product": name, "batch": batch, "way": way, "us": us} for way, us in spent.items()
            ]
    return rows


def gated_stages() -> list[StageSpec]:
    """The pieces of a temporal stage of Moshi's size."""
    numbers: dict[str, float] = {"eps": 1e-8, "gate": GATE, "initial.0": TEXT, "initial.1": 2048}
    numbers |= {f"delay.{s}": d for s, d in enumerate((0, *(0, *(1,) * 7) * 2))}
    row, wide = (FEATURES,), (3 * FEATURES,)
    offset = tensor("offset", "int64")
    found = []
    for index in range(LAYERS + 1):
        back = (tensor("x", "bfloat16", *row), tensor("attended", "bfloat16", *row))
        ahead = (tensor("x.next", "bfloat16", *row), tensor("qkv", "bfloat16", *wide))
        if index == 0:
            codes, ring = tensor("codes", "int64", 8), tensor("tokens", "int64", 17, 3)
            moved = tensor("tokens.next", "int64", 17, 3)
            stage = StageSpec("0", (codes, ring, offset), (*ahead, moved), graph="g")
            kind = "gated_first"
        elif index < LAYERS:
            stage, kind = StageSpec(str(index), back, ahead, graph="g"), "gated_piece"
        else:
            hidden = tensor("hidden", "bfloat16", *row)
            logits = tensor("logits", "float32", TEXT)
            said = (hidden, logits, tensor("offset.next", "int64"))
            stage, kind = StageSpec("last", (*back, offset), said, graph="g"), "gated_last"
        found.append(with_weights(stage, "bfloat16", kind, numbers))
    return found


def bound(bench: Bench, stage: StageSpec, batch: int, at: int) -> tuple[Bindable, int]:
    """A stage whose weights lie in the pool from ``at`` on, and where they end."""
    assert stage.kernel is not None
    weights = {}
    for role, weight in stage.kernel.weights.items():
        size = -(-weight.nbytes // 256) * 256
        if at + size > bench.pool_bytes:
            at = 0
        weights[role] = cuda.DevicePtr(bench.pool + at)
        at += size
    wires: dict[str, int] = {}
    end = int(bench.room)
    for t in (*stage.inputs, *stage.outputs):
        wires[t.name] = end
        end += -(-batch * int(np.prod(t.row_shape)) * ITEMSIZE[t.dtype] // 256) * 256
    integers = [t.name for t in (*stage.inputs, *stage.outputs) if t.dtype == "int64"]
    for name in integers:
        cuda.fill_bytes(cuda.DevicePtr(wires[name]), 0, batch * 17 * 3 * 8)
    step = Step(
        stage,
        tuple(Bound(t, Buffer(t.name, 0)) for t in stage.inputs),
        tuple(Bound(t, Buffer(t.name, 0)) for t in stage.outputs),
    )
    scratch = Scratch(bench.counters, cuda.DevicePtr(bench.room + (384 << 20)))
    address = lambda buffer: cuda.DevicePtr(wires[buffer.name])  # noqa: E731
    return Bindable(step, batch, weights, address, scratch, bench.stream), at


def stages(bench: Bench, batches: Sequence[int], rows: int) -> list[dict[str, Any]]:
    found = []
    spec = depth_stage("bfloat16", **DEPTH)
    depths = depth.DepthKernels([spec], bench.device, COMPILED)
    pieces = gated_stages()
    layers = gated.GatedKernels(pieces, bench.device, COMPILED)
    image = nvrtc.compile_cached(RING, SHAPE.definitions(), bench.target, COMPILED)
    ring = RingKernels(SHAPE, image, bench.device.attribute("MULTIPROCESSOR_COUNT"))
    per_session = SHAPE.capacity * SHAPE.row_bytes
    caches_bytes = 2 * LAYERS * per_session * max(batches) if rows else 1 << 20
    caches = cuda.allocate(caches_bytes)
    bench.fill(
        caches, caches_bytes, ref.store("bfloat16", np.random.default_rng(1).normal(size=32 << 20))
    )
    table = cuda.allocate(1 << 20)
    for batch in batches:
        bench.linear = layers.kernels.linear
        runs: dict[str, Callable[[], None]] = {}
        deep, _ = bound(bench, spec, batch, 0)
        runs["depth"] = depths.bind(deep)
        at, parts = 0, []
        positions = np.full(batch, rows, np.int64).tobytes()
        cuda.write_device(table, positions)
        slots = np.arange(batch, dtype=np.int32).tobytes()
        cuda.write_device(cuda.DevicePtr(table + 8192), slots)
        frequency = rope_frequency(128).tobytes()
        cuda.write_device(cuda.DevicePtr(table + 16384), frequency)
        cuda.fill_bytes(cuda.DevicePtr(table + 32768), 0, 1 << 19)
        for index, stage in enumerate(pieces):
            piece, at = bound(bench, stage, batch, at)
            parts.append((stage.name, layers.bind(piece)))
            if index == LAYERS or not rows:
                continue
            qkv = int(piece.address(Buffer("qkv", 0)))
            params = ring_params(
                SHAPE,
                batch,
                q=qkv,
                k_new=qkv + FEATURES * 2,
                v_new=qkv + FEATURES * 4,
                q_stride=3 * FEATURES,
                k_stride=3 * FEATURES,
                v_stride=3 * FEATURES,
                out=int(bench.room) + batch * FEATURES * 2,
                k_cache=caches + 2 * index * per_session * batch,
                v_cache=caches + (2 * index + 1) * per_session * batch,
                positions=int(table),
                slots=int(table) + 8192,
                rope_frequency=int(table) + 16384,
                arrivals=int(table) + 32768,
                partials=int(bench.room) + (768 << 20),
            )
            parts.append(("attention", lambda params=params: ring.launch(params, bench.stream)))  # type: ignore[misc]
        runs["temporal"] = lm_stage.run_all([run for _, run in parts])
        runs["temporal without attention"] = lm_stage.run_all(
            [run for name, run in parts if name != "attention"]
        )
        for overlaps in (True, False):
            linear.OVERLAPS = overlaps
            for name, run in runs.items():
                us, nodes = bench.median_us(run)
                found.append(
                    {"stage": name, "batch": batch, "us": us, "nodes": nodes, "overlaps": overlaps}
                )
                print(
                    f"{name:28}{batch:4} sessions{'' if overlaps else ', one after the other'}: "
                    f"{us / 1e3:.3f} ms, {nodes} nodes",
                    flush=True,
                )
        linear.OVERLAPS = True
    cuda.release(caches)
    return found


def compile_all(target: str, most: int, folder: Path) -> None:
    """Everything that a bundle of Moshi's size needs for batches up to ``most``, in parallel."""
    choices = [
        choose(product, batch, is_half=True, normed=normed)
        for product in PRODUCTS.values()
        for batch in range(1, most + 1)
        for normed in ((False, True) if batch == 1 else (False,))
    ]
    made = [linear_choice.definitions(1, choice) for choice in (linear_choice.BARE, *choices)]
    jobs: list[tuple[Path, dict[str, str | int], str]] = [
        (linear_choice.SOURCE, one, target) for one in {str(one): one for one in made}.values()
    ]
    plain = target.rstrip("a")
    jobs += [(source, {"LINEAR_ELEMENT": 1}, plain) for source in (gated.SOURCE, depth.SOURCE)]
    jobs.append((RING, SHAPE.definitions(), plain))
    with ProcessPoolExecutor() as workers:
        done = [workers.submit(nvrtc.compile_cached, *job, folder) for job in jobs]
        for one_done in done:
            one_done.result()
    print(f"{len(jobs)} kernels for {target} in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("products", "stages"), default="stages")
    parser.add_argument("--compile", metavar="TARGET", help="compile only, for example sm_90a")
    parser.add_argument("--kernels", type=Path, default=COMPILED, help="where --compile puts them")
    parser.add_argument("--batches", default="1,8,32,64,160")
    parser.add_argument("--names", default=",".join(PRODUCTS), help="of products")
    parser.add_argument("--rows", type=int, default=0, help="of every ring; 0: no attention")
    parser.add_argument("-o", "--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    if args.compile:
        compile_all(args.compile, max(batches), args.kernels)
        return
    bench = Bench(14 << 30)
    if args.what == "products":
        rows = products(bench, batches, args.names.split(","))
    else:
        rows = stages(bench, batches, args.rows)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"device": bench.device.name, "rows": rows}
    (args.out / f"kernel_stages_{args.what}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
