"""Time a bundle tick by tick on this machine: every stage, the tick as a whole, and its floor.

Knows what executors have in common and a clock; knows no sessions and no deadline policy. Speed
here is a measurement of this machine at this moment: state it with the command and the hardware.

The tick is timed as the box will run it, from the call of `step` until its outputs are there. The
stages are timed in further ticks with time stamps between them, which cost a little, so they need
not add up. The floor is what must be read once, over the measured copy rate: all weights (tables
of embeddings too, of which a tick reads a few rows) and the valid rows of every session's rings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.bundle import Manifest
from engines.clocks import ClockKind
from engines.executor import Ages, Executor

QUANTILES = (0.5, 0.99, 0.999)
WARM_UPS = 5
STAGE_TICKS = 50
"""Ticks with time stamps, at most."""


class Timed(Executor, Ages, Protocol):
    """An executor that can say what its stages took."""

    def stage_names(self) -> tuple[str, ...]: ...

    def step_timed(
        self, batch: int, now_ns: Callable[[], int], spent_ns: NDArray[np.int64]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """What one stage, or the whole tick, took over a run. Microseconds."""

    name: str
    batch: int
    fill: int
    """Ticks the sessions had lived through when the run began."""
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a tick of ``batch`` sessions has to move, and what that costs at the least."""

    batch: int
    fill: int
    tick_bytes: int
    floor_us: float | None
    """None where no copy rate was measured."""
    share: float | None
    """Floor over the tick's median: 1 is as fast as memory allows."""


def measure(executor: Timed, batch: int, ticks: int, fill: int = 0) -> list[Timing]:
    """Run ``ticks`` ticks of ``batch`` sessions on noise; every stage, then the tick.

    The sessions begin ``fill`` ticks old and age by one tick each.
    """
    rng = np.random.default_rng(0)
    names = executor.stage_names()
    whole = np.empty(ticks, dtype=np.int64)
    spent = np.empty((min(ticks, STAGE_TICKS), len(names)), dtype=np.int64)
    scratch = np.empty(len(names), dtype=np.int64)
    for slot in range(batch):
        executor.join(slot, {})
        if fill:
            executor.age(slot, fill)

    def hear() -> None:
        executor.audio_in[:batch] = 0.1 * rng.standard_normal(executor.audio_in[:batch].shape)

    for _ in range(WARM_UPS):
        hear()
        executor.step(batch)
    for tick in range(ticks):
        hear()
        began = time.perf_counter_ns()
        executor.step(batch)
        whole[tick] = time.perf_counter_ns() - began
    executor.step_timed(batch, time.perf_counter_ns, scratch)
    for row in spent:
        hear()
        executor.step_timed(batch, time.perf_counter_ns, row)
    timings = [_summary(n, batch, fill, spent[:, i]) for i, n in enumerate(names)]
    return [*timings, _summary("tick", batch, fill, whole)]


def tick_bytes(manifest: Manifest, batch: int, fill: int) -> int:
    """Bytes a tick must read: weights once, and the valid rows of ``batch`` sessions."""
    weights = sum(spec.bytes for name, spec in manifest.files.items() if "weights/" in name)
    rings = sum(r.bytes_at(fill + 1) for r in manifest.regions if r.clock.kind is ClockKind.RING)
    return weights + batch * rings


def load(manifest: Manifest, tick: Timing, copy_bytes_per_us: float | None) -> Load:
    """The floor of the tick that was measured. copy_bytes_per_us: read plus written."""
    nbytes = tick_bytes(manifest, tick.batch, tick.fill)
    if copy_bytes_per_us is None:
        return Load(tick.batch, tick.fill, nbytes, None, None)
    floor_us = nbytes / copy_bytes_per_us
    return Load(tick.batch, tick.fill, nbytes, floor_us, floor_us / tick.p50_us)


def _summary(name: str, batch: int, fill: int, spent_ns: NDArray[np.int64]) -> Timing:
    p50, p99, p999 = (float(q) / 1e3 for q in np.quantile(spent_ns, QUANTILES))
    return Timing(name, batch, fill, p50, p99, p999, float(spent_ns.max()) / 1e3)


def table(timings: Sequence[Timing]) -> list[str]:
    """Lines of text, milliseconds."""
    lines = [f"{'stage':<14}{'batch':>6}{'fill':>6}{'p50':>9}{'p99':>9}{'p99.9':>9}{'max':>9}  ms"]
    lines.extend(
        f"{t.name:<14}{t.batch:>6}{t.fill:>6}"
        + "".join(f"{us / 1e3:>9.2f}" for us in (t.p50_us, t.p99_us, t.p999_us, t.max_us))
        for t in timings
    )
    return lines
