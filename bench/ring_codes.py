# ruff: noqa: T201  (a script run by hand)
"""8-bit rings on a GPU against their CPU twin: the same codes, and attention over them.

    python -m bench.ring_codes write out/codes      # anywhere; needs the export extra
    python -m bench.ring_codes check out/codes      # on a GPU; ends with 1 if something is not so

`write` builds a small bundle in bfloat16 with rings of each 8-bit kind, heads of 64 as the kernel
wants them, and scales calibrated on the demo's speech; and what the twin of every attention of the
language model answers, in float32, to bfloat16 rows of sessions before, at and beyond the wrap.
`check` gives the kernel the same through `RingLauncher`, alone and in a batch, twice, and with the
slots in another order. Codes must be the twin's, but where a key lies on the edge between two (the
sines of two libraries differ in the last place); what it attends to must be as near to the twin as
rounding to bfloat16 allows; a session's bits must not depend on the batch. Then whole calls run,
captured: twice with the same bits.

Not here: the kernel's own tests, which need no bundle (`tests/engines/kernels`).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines import bundle, cuda, ring_stage
from engines.bundle import Bundle, Dtype, StageSpec
from engines.cuda import Device, DevicePtr, Stream
from engines.golden import draw
from engines.program import Buffer, Step, plan_program
from engines.ring_launch import RingLauncher

Array = NDArray[Any]
KINDS: tuple[Dtype, ...] = ("int8", "float8e4m3")
CONTEXT = 300
AGES = (0, 1, 63, 64, 200, 298, 299, 300, 301, 900, 12_345)
SEED = 3
SCALED_ERROR = 2.0**-8
"""Rounding a result to bfloat16 moves it by so much of itself at most; the rest is sums."""
SMALL = 2e-4
"""Of the largest result: float32 sums in another order, and keys at the edge of a code."""
EDGES = 2e-3
"""Of the keys written: more than ever lay so near an edge."""
TICKS = 60


def write(folder: Path) -> int:
    from export import build, cache_report, tiny
    from export.source import from_modules
    from export.twin import Twin

    micro = tiny.MICRO
    config = replace(
        micro,
        name="micro-wide",
        mimi=replace(micro.mimi, dimension=64, heads=1),
        lm=replace(micro.lm, dimension=128, heads=2, context=CONTEXT),
    )
    mimi, lm = tiny.seeded(config, SEED)
    source = from_modules(config, mimi, lm, "bfloat16", pieces=tiny.pieces(config))
    for kind, name in zip(KINDS, ("int8", "e4m3"), strict=True):
        wanted = cache_report.plan(name, "ring", "bfloat16")  # type: ignore[arg-type]
        made = build.build(
            source, folder / kind, largest_batch=len(AGES), attention="ring", calibration=wanted
        )
        held: dict[str, Array] = {}
        for stage in stages_of(made):
            qkv = np.random.default_rng(len(held)).normal(
                size=(len(AGES), *stage.inputs[0].row_shape)
            )
            bits = (qkv.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            rings = [draw(SEED, made.manifest.region(t.name), AGES) for t in stage.inputs[2:]]
            given = {
                stage.inputs[0].name: widened(bits),
                stage.inputs[1].name: np.array(AGES, np.int64),
                **{t.name: ring for t, ring in zip(stage.inputs[2:], rings, strict=True)},
            }
            found: dict[str, Array] = {}
            Twin(made, stage).run(given, found.__setitem__)
            held[f"{stage.name}/qkv"] = bits
            for port, tensor in zip(("attended", "k", "v"), stage.outputs, strict=True):
                held[f"{stage.name}/{port}"] = found[tensor.name]
        with (folder / f"{kind}.npz").open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **held)
        print(f"{folder / kind}: {len(held)} arrays of {len(stages_of(made))} attentions")
    return 0


def widened(bits: Array) -> Array:
    """bfloat16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stages_of(made: Bundle) -> list[StageSpec]:
    return [s for s in made.manifest.stages if s.ring and ring_stage.cache_of(s) in KINDS]


class Desk:
    """One bundle's attentions on the device, with memory for their tensors."""

    def __init__(self, made: Bundle, device: Device) -> None:
        self.made, self.stream = made, Stream()
        stages = stages_of(made)
        self.launcher = RingLauncher(
            stages,
            len(AGES),
            device,
            Path("build/kernels"),
            lambda s: ring_stage.read_scales(made, s),
        )
        steps = plan_program(made.manifest).steps[0]
        self.steps: list[Step] = [step for step in steps if step.stage in stages]
        self.places: dict[Buffer, DevicePtr] = {}

    def run(self, step: Step, held: dict[str, Array], rows: list[int]) -> tuple[Array, ...]:
        """One launch for the sessions ``rows``: attended as float32, and both rings."""
        stage, count = step.stage, len(rows)
        rings = [draw(SEED, self.made.manifest.region(t.name), AGES) for t in stage.inputs[2:]]
        given = [held[f"{stage.name}/qkv"], np.array(AGES, np.int64), *rings]
        for bound, value in zip(step.inputs, given, strict=True):
            raw = np.ascontiguousarray(value[rows]).tobytes()
            if bound.buffer not in self.places:
                size = len(raw) // count * len(AGES)
                self.places[bound.buffer] = cuda.allocate(size)
            cuda.write_device(self.places[bound.buffer], raw)
        out = step.outputs[0].buffer
        nbytes = held[f"{stage.name}/attended"][rows].size * 2
        if out not in self.places:
            self.places[out] = cuda.allocate(nbytes // count * len(AGES))
        cuda.fill_bytes(self.places[out], 0xFF, nbytes)
        self.launcher.bind(step, count, self.places.__getitem__, self.stream)()
        self.stream.synchronize()
        attended = np.frombuffer(cuda.read_device(self.places[out], nbytes), np.uint16)
        after = [
            np.frombuffer(
                cuda.read_device(self.places[bound.buffer], ring[rows].nbytes), ring.dtype
            ).reshape(ring[rows].shape)
            for bound, ring in zip(step.inputs[2:], rings, strict=True)
        ]
        return widened(attended).reshape(count, -1), *after


def check(folder: Path) -> int:
    device, failed = Device(), 0
    for kind in KINDS:
        made = bundle.read(folder / kind)
        held = dict(np.load(folder / f"{kind}.npz"))
        desk = Desk(made, device)
        every = list(range(len(AGES)))
        for step in desk.steps:
            name = step.stage.name
            attended, k, v = desk.run(step, held, every)
            again = desk.run(step, held, every)
            turned = desk.run(step, held, every[::-1])
            alone = [desk.run(step, held, [row]) for row in every]
            same = all(
                np.array_equal(ours[row], others[row])
                and np.array_equal(ours[row], backwards[-1 - row])
                and np.array_equal(ours[row], single[row][0])
                for ours, others, backwards, single in zip(
                    (attended, k, v), again, turned, zip(*alone, strict=True), strict=True
                )
                for row in every
            )
            values = int((v != held[f"{name}/v"]).sum())
            keys = int((k != held[f"{name}/k"]).sum())
            far = int((np.abs(_ordered(k) - _ordered(held[f"{name}/k"])) > 1).sum())
            wanted = held[f"{name}/attended"]
            away = np.abs(attended - wanted)
            largest = float(np.abs(wanted).max())
            within = bool((away <= SCALED_ERROR * np.abs(wanted) + SMALL * largest).all())
            good = same and within and not values and not far and keys <= EDGES * attended.size
            failed += not good
            print(
                f"{kind} {name}: {values} of {attended.size} new values and {keys} new keys have "
                f"another code than the twin's ({far} by more than a step), attended within "
                f"{float(away.max()) / largest:.1e} of the largest, bits the same alone, in a "
                f"batch and in any order: {same}{'' if good else '   <-- NOT SO'}"
            )
    return int(failed > 0)


def calls(folder: Path) -> int:
    """Three sessions through captured ticks, twice."""
    from engines.cuda_executor import CudaExecutor

    failed = 0
    for kind in KINDS:
        made = bundle.read(folder / kind)
        samples = made.manifest.timing.samples_per_frame
        pcm = np.random.default_rng(1).normal(0, 0.1, (TICKS, 3, samples)).astype(np.float32)
        runs = []
        for _ in range(2):
            executor = CudaExecutor(made, 3)
            said, batch = [], 0
            for tick, frame in enumerate(pcm):
                if tick in (0, 5, 11):
                    executor.join(batch, {"sampling.seed": batch + 1.0})
                    batch += 1
                executor.audio_in[:batch] = frame[:batch]
                executor.step(batch)
                said.append(executor.audio_out[:batch].tobytes() + executor.text[:batch].tobytes())
            ring = executor.region("temporal.layers.0.k", 0)
            runs.append((said, ring.tobytes()))
            filled = float((ring != 0).mean())
            executor.close()
        same = runs[0] == runs[1]
        failed += not same
        print(
            f"{kind}: {TICKS} captured ticks of 3 sessions, run = rerun: {same}; "
            f"{filled:.0%} of the first ring's codes are not 0"
        )
    return int(failed > 0)


def _ordered(codes: Array) -> Array:
    """Codes as numbers that follow one another as their values do; uint8 is e4m3."""
    wide = codes.astype(np.int64)
    return wide if codes.dtype == np.int8 else np.where(wide < 128, wide, 128 - wide)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("write", "check", "calls"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    return {"write": write, "check": check, "calls": calls}[args.what](args.folder)


if __name__ == "__main__":
    sys.exit(main())
