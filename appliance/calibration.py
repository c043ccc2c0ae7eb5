"""Time the engine before anybody is let in, so that admission has something to go by.

Decides which batches and ages are timed, and how often; what follows from the figures is
`step_model`'s business. Live ticks replace these samples later. What is timed is the engine's
step; gathering and scattering are added by live ticks.

It is done at the start (`calibrate`), and again by the tick loop in a box that nobody uses
(`Recalibration`), one step a tick, when `foresight` says that what was timed no longer holds.
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

REST = 4
"""After each step a quarter of its time is rest. A thread of real-time priority that never pauses
is held up by the kernel for 50 ms of every second in which others want its core; ticks pause by
themselves, and never meet that."""

RECALIBRATE_STEPS = 32
"""Per batch and age when it is done again: a tick each, so 21 s for the 8 kinds of 8 sessions."""


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

    budget_ns: for all of it; shared equally, and exceeded only by `LEAST_STEPS`. Ends early at the
    first batch that no period has room for. The slots hold nobody yet; each session's `join` cleans
    its slot.
    """
    ages = calibration_ages(executor)
    if executor.bundle.manifest.ticks_until_full() and len(ages) == 1:
        logger.warning(
            "this engine cannot be timed at full retention: the forecast starts from young "
            "sessions and learns from live ones"
        )
    batches = calibration_batches(executor.slots)
    kinds = [(batch, age) for batch in batches for age in ages]
    period_ns = executor.bundle.manifest.timing.period_ns
    end_ns = clock.now_ns() + budget_ns
    for number, (batch, age) in enumerate(kinds):
        _seat(executor, batch, age)
        until_ns = clock.now_ns() + max(0, end_ns - clock.now_ns()) // (len(kinds) - number)
        took_ns: list[int] = []
        while len(took_ns) < KEEP_TICKS:
            before_ns = clock.now_ns()
            if stopping() or (before_ns >= until_ns and len(took_ns) >= LEAST_STEPS):
                break
            executor.step(batch)
            after_ns = clock.now_ns()
            took_ns.append(after_ns - before_ns)
            if _is_hopeless(batch, took_ns, period_ns):
                return
            clock.sleep_until(after_ns + (after_ns - before_ns) // REST)
        for one_ns in took_ns:
            samples.add(batch, batch if age else 0, one_ns)


def _is_hopeless(batch: int, took_ns: list[int], period_ns: int) -> bool:
    """Even the shortest of some steps is longer than a period: no tick will ever be so large.

    What hiccups do to such steps says nothing about those that are, so they are not counted.
    """
    return batch > 1 and len(took_ns) == LEAST_STEPS and min(took_ns) > period_ns


def calibration_ages(executor: Executor) -> list[int]:
    """Young, and at full retention where the engine can be timed there; in ticks."""
    full = executor.bundle.manifest.ticks_until_full()
    return [0, full] if isinstance(executor, Ages) and full else [0]


def _seat(executor: Executor, batch: int, age: int) -> None:
    """Put sessions of ``age`` into slots 0..batch-1, in which nobody sits."""
    for slot in range(batch):
        executor.join(slot, {})
        if isinstance(executor, Ages) and age:
            executor.age(slot, age)


class Recalibration:
    """Time the steps again while nobody is in the box. The tick thread works; control asks."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self.asked = False
        """Set by the control thread; cleared when it has been done."""
        self.done: list[tuple[int, float, int]] | None = None
        """(batch, sum of fills, busy_ns) of all steps, for the control thread to take."""
        self._executor = executor
        self._clock = clock
        ages, batches = calibration_ages(executor), calibration_batches(executor.slots)
        self._kinds = [(batch, age) for batch in batches for age in ages]
        self._found: list[tuple[int, float, int]] = []

    def work(self) -> None:
        """One step. Only between ticks, and only while nobody is live, waits or is primed."""
        if not self.asked:
            return
        kind, step = divmod(len(self._found), RECALIBRATE_STEPS)
        batch, age = self._kinds[kind]
        if step == 0:
            _seat(self._executor, batch, age)
        before_ns = self._clock.now_ns()
        self._executor.step(batch)
        self._found.append((batch, batch if age else 0.0, self._clock.now_ns() - before_ns))
        mine = [busy_ns for _, _, busy_ns in self._found[kind * RECALIBRATE_STEPS :]]
        if _is_hopeless(batch, mine, self._executor.bundle.manifest.timing.period_ns):
            self._finish(kind * RECALIBRATE_STEPS)
        elif len(self._found) == len(self._kinds) * RECALIBRATE_STEPS:
            self._finish(len(self._found))

    def drop(self) -> None:
        """Somebody came: what was timed so far is left, and begun anew when it is asked again."""
        self._found.clear()  # slots are left alone: somebody may sit in any of them by now
        self.asked = False

    def _finish(self, counted: int) -> None:
        self.done, self._found, self.asked = self._found[:counted], [], False
        _seat(self._executor, self._executor.slots, 0)  # old ones own memory that nobody needs
