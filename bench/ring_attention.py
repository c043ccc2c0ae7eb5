# ruff: noqa: T201  (a script run by hand)
"""Time ring attention on a GPU: read rate against the copy ceiling, per batch, cache and tuning.

    python -m bench.ring_attention --compile sm_90          # anywhere; fills build/kernels
    python -m bench.ring_attention --suite tune -o FOLDER   # on the GPU
    python -m bench.ring_attention --suite goal --pool-gib 126 -o FOLDER

A figure is the median of replays of one captured graph of 32 layers. Every layer has rings of its
own as far as the pool reaches, then they are used again in turn; nothing stays in L2 between.
Bytes are valid rows of K and V, read once; a copy counts bytes read plus written.
Rings hold normal values, one 64 MiB pattern repeated; slots are in random order.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda
from engines.kernels import nvrtc
from engines.kernels import ring_reference as ref
from engines.kernels.ring_attention import (
    SOURCE,
    CacheType,
    RingKernels,
    RingShape,
    RingTuning,
    Spread,
    choose_spread,
    ring_params,
)

LAYERS = 32
CEILINGS = Path(__file__).with_name("ceilings.cu")
COMPILED = Path(__file__).parents[1] / "build" / "kernels"
BF16, E4M3, INT8, FP32 = (
    CacheType.BFLOAT16,
    CacheType.E4M3,
    CacheType.INT8,
    CacheType.FLOAT32,
)


class CeilingParams(ctypes.Structure):
    """The three arguments of either kernel in ceilings.cu, as one struct."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("count", ctypes.c_ulonglong),
    ]


@dataclass(frozen=True, slots=True)
class Timing:
    shape: RingShape
    batch: int
    position: int
    """Rows written before the step, by every session; below 0: ages spread over the capacity."""
    spread: Spread | None = None
    piece_rows: int = 0
    """Rings of all layers in places, this many rows at a time; 0: each layer's by slot."""


def moshi(cache: CacheType, **tuning: int) -> RingShape:
    """Helium's attention in Moshi: loaders.py in kyutai-labs/moshi."""
    return RingShape(cache, 32, 32, 128, capacity=3000, tuning=RingTuning(**tuning))


def codec(**tuning: int) -> RingShape:
    """Mimi's transformers: 8 heads x 64, window 250, two rows a frame."""
    return RingShape(FP32, 8, 8, 64, 250, rows_per_step=2, tuning=RingTuning(**tuning))


def suite(name: str) -> list[Timing]:
    if name == "goal":
        timings = [
            Timing(moshi(cache), batch, position)
            for cache, cases in (
                (BF16, [(1, 3000), (7, 3000), (16, 3000), (32, 3000), (64, 3000), (80, 3000)]),
                (BF16, [(1, 299), (64, 299), (64, -1)]),
                (E4M3, [(1, 3000), (16, 3000), (64, 3000), (160, 3000), (160, -1)]),
                (INT8, [(1, 3000), (16, 3000), (64, 3000), (160, 3000), (160, -1)]),
            )
            for batch, position in cases
        ]
        timings += [Timing(codec(), batch, 1000) for batch in (1, 32, 64, 160)]
        # Grouped query heads: 4 share a KV head (one warp serves them), or 8 (two warps, and rows
        # are written by a launch of their own).
        timings += [Timing(RingShape(BF16, 32, heads, 128, 3000), 64, 3000) for heads in (8, 4)]
        return timings
    if name == "places":  # what lying in pieces costs: `engines.layout`
        return [
            Timing(moshi(cache), batch, position, None, piece)
            for cache, batch, position in (
                (BF16, 1, 3000),
                (BF16, 32, 3000),
                (BF16, 64, 3000),
                (BF16, 64, 299),
                (E4M3, 64, 3000),
                (E4M3, 128, 3000),
            )
            for piece in (0, 64, 128, 256)
        ]
    if name == "spread":
        return [
            Timing(shape, batch, 3000, spread)
            for shape, batches in (
                (moshi(BF16), (1, 2, 3, 4, 6, 8, 12, 16, 24)),
                (moshi(E4M3), (1, 2, 4, 8, 16)),
            )
            for batch in batches
            for spread in (None, *(Spread(False, run) for run in (1, 2, 3, 4, 6)))
        ]
    tunings: list[dict[str, int]] = [
        dict(wide_buffers=buffers, wide_warps=wide, narrow_warps=narrow)
        for buffers, wide, narrow in ((8, 8, 12), (4, 12, 16), (4, 16, 8), (2, 16, 12))
    ]
    return [
        Timing(moshi(cache, **tuning), batch, 3000, spread)
        for tuning in tunings
        for cache, batch, spreads in (
            (BF16, 1, [Spread(True)]),
            (BF16, 64, [Spread(False, 1), Spread(False, 2)]),
            (E4M3, 1, [Spread(True)]),
            (E4M3, 160, [Spread(False, 1), Spread(False, 2)]),
            (INT8, 160, [Spread(False, 1), Spread(False, 2)]),
        )
        for spread in spreads
    ]


class Bench:
    def __init__(self, pool_bytes: int) -> None:
        self.device = cuda.Device()
        self.stream = cuda.Stream()
        major, minor = self.device.compute_capability
        self.target = f"sm_{major}{minor}"
        self.multiprocessors = self.device.attribute("MULTIPROCESSOR_COUNT")
        self.pool_bytes = pool_bytes
        self.pool = cuda.allocate(pool_bytes)
        self.holds: CacheType | None = None
        self.small = cuda.allocate(256 << 20)

    def fill(self, cache: CacheType) -> None:
        """The whole pool becomes stored normal values."""
        if self.holds is cache:
            return
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64 << 20) // cache.element_bytes).astype(np.float32)
        pattern = ref.store(cache, x, np.array(1 / 32, np.float32)).tobytes()
        cuda.write_device(self.pool, pattern)
        done = len(pattern)
        while done < self.pool_bytes:
            step = min(done, self.pool_bytes - done)
            cuda.copy_device(cuda.DevicePtr(self.pool + done), self.pool, step, self.stream)
            done += step
        self.stream.synchronize()
        self.holds = cache

    def median_us(self, graph: cuda.Graph, replays: int) -> tuple[float, float, float]:
        """(median, least, most) device time of one replay."""
        marks = [cuda.Event() for _ in range(replays + 1)]
        for _ in range(3):
            graph.replay(self.stream)
        marks[0].record(self.stream)
        for mark in marks[1:]:
            graph.replay(self.stream)
            mark.record(self.stream)
        times = [after.elapsed_us(before) for before, after in pairwise(marks)]
        cuda.close_all(marks)
        return statistics.median(times), min(times), max(times)

    def ceilings(self) -> dict[str, float]:
        """TB/s of a large read, and of a copy by kernel and by driver (read plus written)."""
        image = nvrtc.compile_cached(CEILINGS, {}, self.target, COMPILED)
        module = cuda.Module(image)
        half = min(self.pool_bytes // 2, 8 << 30)
        other = cuda.DevicePtr(self.pool + half)
        grid = cuda.LaunchShape((self.multiprocessors * 4, 1, 1), (512, 1, 1))
        count = half // 16
        read = CeilingParams(self.pool, self.small, count)
        copy = CeilingParams(self.pool, other, count)
        ways: dict[str, tuple[int, Callable[[], None]]] = {
            "read": (1, lambda: module.function("read_all").launch(grid, read, self.stream)),
            "copy": (2, lambda: module.function("copy_all").launch(grid, copy, self.stream)),
            "driver_copy": (2, lambda: cuda.copy_device(other, self.pool, half, self.stream)),
        }
        found = {}
        for name, (passes, record) in ways.items():
            graph = self.stream.capture(record)
            median, *_ = self.median_us(graph, 10)
            graph.close()
            found[name] = round(passes * half / median / 1e6, 3)
        module.close()
        return found

    def run(self, timing: Timing) -> dict[str, Any]:
        shape, batch = timing.shape, timing.batch
        self.fill(shape.cache)
        image = nvrtc.compile_cached(SOURCE, shape.definitions(), self.target, COMPILED)
        kernels = RingKernels(shape, image, self.multiprocessors)
        rng = np.random.default_rng(1)
        used = 0

        def put(x: np.ndarray[Any, Any]) -> int:
            nonlocal used
            pointer = cuda.DevicePtr(self.small + used)
            cuda.write_device(pointer, x.tobytes())
            used += -(-x.nbytes // 256) * 256
            return pointer

        def normal(heads: int) -> int:
            x = rng.normal(size=(batch, shape.rows_per_step, heads, shape.head_dim))
            is_float = shape.cache is FP32
            return put(x.astype(np.float32) if is_float else ref.bf16_bits(x.astype(np.float32)))

        positions = np.full(batch, timing.position, np.int64)
        if timing.position < 0:
            positions = np.linspace(0, shape.capacity - 1, batch).astype(np.int64)
        ring = batch * shape.capacity * shape.row_bytes
        distinct = min(LAYERS, self.pool_bytes // (2 * ring))
        piece_bytes = timing.piece_rows * shape.row_bytes
        if timing.piece_rows:
            groups = -(-shape.capacity // timing.piece_rows)
            place = 2 * LAYERS * groups * piece_bytes
            assert batch * place <= self.pool_bytes, "a larger --pool-gib"
            lie = dict(
                slot_stride_bytes=place,
                piece_shift=timing.piece_rows.bit_length() - 1,
                piece_gap_bytes=(2 * LAYERS - 1) * piece_bytes,
            )
        else:
            lie = {}
        scale = put(np.full(shape.kv_heads, 1 / 32, np.float32))
        common = ring_params(
            shape,
            batch,
            q=normal(shape.query_heads),
            k_new=normal(shape.kv_heads),
            v_new=normal(shape.kv_heads),
            out=normal(shape.query_heads),
            k_scale=scale,
            v_scale=scale,
            rope_frequency=put(ref.rope_frequency(shape.head_dim)),
            positions=put(positions),
            slots=put(rng.permutation(batch).astype(np.int32)),
            arrivals=put(np.zeros(batch * shape.lines, np.uint32)),
            partials=put(np.zeros(shape.partials_bytes(batch), np.uint8)),
            **lie,
        )

        def record() -> None:
            for layer in range(LAYERS):
                if timing.piece_rows:
                    common.k_cache = self.pool + 2 * layer * piece_bytes
                    common.v_cache = common.k_cache + piece_bytes
                else:
                    common.k_cache = self.pool + layer % distinct * 2 * ring
                    common.v_cache = common.k_cache + ring
                kernels.launch(common, self.stream, timing.spread)

        record()
        self.stream.synchronize()
        graph = self.stream.capture(record)
        median, least, most = self.median_us(graph, 15)
        spread = timing.spread or choose_spread(shape, batch, self.multiprocessors)
        name = "ring_attention_narrow" if spread.narrow else "ring_attention_wide"
        function = kernels.functions[name]
        graph.close()
        valid = np.minimum(positions + shape.rows_per_step, shape.capacity)
        read = LAYERS * 2 * int(valid.sum()) * shape.row_bytes
        row = {
            "cache": shape.cache.name,
            "heads": [shape.query_heads, shape.kv_heads, shape.head_dim],
            "batch": batch,
            "valid_rows": "mixed" if timing.position < 0 else int(valid[0]),
            "narrow": spread.narrow,
            "segments_per_warp": spread.segments_per_warp,
            "spread_chosen": timing.spread is None,
            "tuning": asdict(shape.tuning),
            "layers_us": round(median, 1),
            "least_us": round(least, 1),
            "most_us": round(most, 1),
            "tb_per_s": round(read / median / 1e6, 3),
            "rings_apart": distinct,
            "piece_rows": timing.piece_rows,
            "registers": function.attribute("NUM_REGS"),
            "local_bytes": function.attribute("LOCAL_SIZE_BYTES"),
        }
        kernels.close()
        return row


def compile_all(target: str) -> None:
    """Everything that the suites and the GPU tests need, in parallel."""
    shapes = [t.shape for name in ("goal", "spread", "tune") for t in suite(name)]
    shapes += [
        RingShape(cache, group, 1, head_dim, 3000, rows)
        for cache in (BF16, E4M3, INT8, FP32)
        for head_dim in (64, 128)
        for rows in (1, 2, 3, 4)
        for group in ((1, 2, 4) if cache is FP32 else (1,))
    ]
    unique = {json.dumps(s.definitions()): s for s in shapes}
    with ProcessPoolExecutor() as workers:
        jobs = [
            workers.submit(nvrtc.compile_cached, SOURCE, s.definitions(), target, COMPILED)
            for s in unique.values()
        ]
        for job in jobs:
            job.result()
    nvrtc.compile_cached(CEILINGS, {}, target, COMPILED)
    print(f"{len(unique)} kernels for {target} in {COMPILED}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", metavar="TARGET", help="compile only, for example sm_90")
    parser.add_argument("--suite", choices=["goal", "spread", "tune", "places"], default="goal")
    parser.add_argument("--pool-gib", type=int, default=16, help="device memory for rings")
    parser.add_argument("-o", "--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    if args.compile:
        compile_all(args.compile)
        return
    bench = Bench(args.pool_gib << 30)
    bench.fill(BF16)
    rows = []
    ceilings = [bench.ceilings()]
    print(f"{bench.device.name}: TB/s {ceilings[0]}", flush=True)
    for timing in suite(args.suite):
        row = bench.run(timing)
        rows.append(row)
        t, kind = row["tuning"], "narrow" if row["narrow"] else "wide"
        print(
            f"{row['cache']:9}{row['heads'][0]}/{row['heads'][1]} "
            f"{row['batch']:3} x {row['valid_rows']!s:5} "
            f"{'in pieces of ' + str(row['piece_rows']) if row['piece_rows'] else 'by slot':16}"
            f"{'narrow' if row['narrow'] else 'wide ' + str(row['segments_per_warp']):7}"
            f"buf {t['wide_buffers']} warps {t[kind + '_warps']:2} regs {row['registers']} "
            f"local {row['local_bytes']:3}: {row['layers_us'] / 1e3:7.3f} ms "
            f"({row['least_us'] / 1e3:.3f}..{row['most_us'] / 1e3:.3f}) {row['tb_per_s']:.2f} TB/s",
            flush=True,
        )
    ceilings.append(bench.ceilings())
    print(f"again: TB/s {ceilings[1]}")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"device": bench.device.name, "suite": args.suite, "ceilings": ceilings, "rows": rows}
    (args.out / f"ring_attention_{args.suite}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
