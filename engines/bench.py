"""Time a bundle tick by tick on this machine: every stage, and the tick as a whole.

Knows an executor's stages and a clock; knows no sessions and no deadline policy. Speed here is a
measurement of this machine at this moment: state it with the command and the hardware.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.ort_executor import OrtExecutor

QUANTILES = (0.5, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one stage, or the whole tick, took over a run. Microseconds."""

    name: str
    batch: int
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float


def measure(executor: OrtExecutor, batch: int, ticks: int) -> list[Timing]:
    """Run ``ticks`` ticks of ``batch`` sessions on noise, timing every stage.

    The sessions begin fresh and age by one tick each; the rings of a CPU executor cost the same
    at any age, because ONNX Runtime's CPU attention reads the whole buffer.
    """
    rng = np.random.default_rng(0)
    for slot in range(batch):
        executor.join(slot, {})
    names = executor.stage_names()
    spent = np.empty((ticks, len(names) + 1), dtype=np.int64)
    for tick in range(ticks):
        executor.audio_in[:batch] = 0.1 * rng.standard_normal(executor.audio_in[:batch].shape)
        began = time.perf_counter_ns()
        executor.step_timed(batch, time.perf_counter_ns, spent[tick, :-1])
        spent[tick, -1] = time.perf_counter_ns() - began
    return [_summary(name, batch, spent[:, i]) for i, name in enumerate((*names, "tick"))]


def _summary(name: str, batch: int, spent_ns: NDArray[np.int64]) -> Timing:
    p50, p99, p999 = (float(q) / 1e3 for q in np.quantile(spent_ns, QUANTILES))
    return Timing(name, batch, p50, p99, p999, float(spent_ns.max()) / 1e3)


def table(timings: Sequence[Timing]) -> list[str]:
    """Lines of text, milliseconds."""
    lines = [f"{'stage':<14}{'batch':>6}{'p50':>9}{'p99':>9}{'p99.9':>9}{'max':>9}  ms"]
    lines.extend(
        f"{t.name:<14}{t.batch:>6}"
        + "".join(f"{us / 1e3:>9.2f}" for us in (t.p50_us, t.p99_us, t.p999_us, t.max_us))
        for t in timings
    )
    return lines
