"""Time the engine before anybody is let in, so that admission has something to go by.

Decides which batches and ages are timed, and how often; what follows from the figures is
`step_model`'s business. Live ticks replace these samples later. What is timed is the engine's
step; gathering and scattering are added by live ticks.
"""

import logging
from collections.abc import Callable

from appliance.clock import Clock
from appliance.step_model import KEEP_TICKS, StepSamples
from engines.executor import Ages, Executor

logger = logging.getLogger(__name__)

WARM_STEPS = 3
"""Steps per batch size before the box is ready: an executor has two phases, and the first runs of
a graph allocate."""

LEAST_STEPS = 8
"""Per batch and age, whatever the budget: a median of fewer means nothing."""


def warm_up(executor: Executor, stopping: Callable[[], bool]) -> None:
    """Run every batch profile a few times; slots must be clean afterwards, so join them again."""
    for batch in range(1, executor.slots + 1):
        for _ in range(WARM_STEPS):
            if stopping():
                return
            executor.step(batch)


def calibration_batches(slots: int) -> tuple[int, ...]:
    """Powers of two, and the largest batch itself: 1, 2, 4, ..., slots."""
    batches = [1 << n for n in range(slots.bit_length()) if 1 << n < slots]
    return (*batches, slots)


def calibrate(
    executor: Executor,
    clock: Clock,
    budget_ns: int,
    samples: StepSamples,
    stopping: Callable[[], bool],
) -> None:
    """Time steps of each of `calibration_batches`, young and at full retention.

    budget_ns: for all of it; shared equally, and exceeded only by `LEAST_STEPS`. The slots hold
    nobody yet; each session's `join` cleans its slot.
    """
    full = executor.bundle.manifest.ticks_until_full()
    ages = [0, full] if isinstance(executor, Ages) and full else [0]
    if full and len(ages) == 1:
        logger.warning(
            "this engine cannot be timed at full retention: the forecast starts from young "
            "sessions and learns from live ones"
        )
    batches = calibration_batches(executor.slots)
    share_ns = budget_ns // (len(batches) * len(ages))
    for batch in batches:
        for age in ages:
            for slot in range(batch):
                executor.join(slot, {})
                if isinstance(executor, Ages) and age:
                    executor.age(slot, age)
            until_ns = clock.now_ns() + share_ns
            for step in range(KEEP_TICKS):
                before_ns = clock.now_ns()
                if stopping() or (before_ns >= until_ns and step >= LEAST_STEPS):
                    break
                executor.step(batch)
                samples.add(batch, batch if age else 0, clock.now_ns() - before_ns)
