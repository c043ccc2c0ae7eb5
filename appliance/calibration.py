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

SETTLE_STEPS = 2
"""Steps of a kind that are not counted: in those an engine does for a whole batch of sessions what
it does for one joiner otherwise."""

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

    budget_ns: for all of it; shared equally, and exceeded only by `LEAST_STEPS`. Leaves out batches
    that no period has room for. The slots hold nobody yet; each session's `join` cleans its slot.
    """
    ages = calibration_ages(executor)
    if executor.bundle.manifest.ticks_until_full() and len(ages) == 1:
        logger.warning(
            "this engine cannot be timed at full retention: the forecast starts from young "
            "sessions and learns from live ones"
        )
    kinds = calibration_kinds(executor)
    period_ns = executor.bundle.manifest.timing.period_ns
    end_ns = clock.now_ns() + budget_ns
    hopeless = executor.slots + 1
    for number, (batch, age) in enumerate(kinds):
        if batch >= hopeless:
            continue
        _seat(executor, batch, age)
        until_ns = clock.now_ns() + max(0, end_ns - clock.now_ns()) // (len(kinds) - number)
        took_ns: list[int] = []
        for _ in range(SETTLE_STEPS):
            if not stopping():
                executor.step(batch)
        while len(took_ns) < KEEP_TICKS:
            before_ns = clock.now_ns()
            if stopping() or (before_ns >= until_ns and len(took_ns) >= LEAST_STEPS):
                break
            executor.step(batch)
            after_ns = clock.now_ns()
            took_ns.append(after_ns - before_ns)
            if _is_hopeless(batch, took_ns, period_ns):
                hopeless = batch
                took_ns.clear()
                break
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


def calibration_kinds(executor: Executor) -> list[tuple[int, int]]:
    """(batch, age) in the order in which they are timed: small before large, young before old.

    So an engine whose memory follows the ages only ever needs more of it: giving memory back takes
    an engine's time in the steps that follow, and would be taken for what such a batch costs.
    """
    batches = calibration_batches(executor.slots)
    return [(batch, age) for age in calibration_ages(executor) for batch in batches]


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
        self._kinds = calibration_kinds(executor)
        self._found: list[tuple[int, float, int]] = []
        self._kind = 0
        """Which of the kinds is timed."""
        self._mine: list[int] = []
        """What its steps took, those that settle first."""
        self._hopeless = executor.slots + 1

    def work(self) -> None:
        """One step. Only between ticks, and only while nobody is live, waits or is primed."""
        if not self.asked:
            return
        batch, age = self._kinds[self._kind]
        if not self._mine:
            _seat(self._executor, batch, age)
        before_ns = self._clock.now_ns()
        self._executor.step(batch)
        self._mine.append(self._clock.now_ns() - before_ns)
        counted = self._mine[SETTLE_STEPS:]
        if _is_hopeless(batch, counted, self._executor.bundle.manifest.timing.period_ns):
            self._hopeless = batch
        elif len(counted) < RECALIBRATE_STEPS:
            return
        else:
            fill = batch if age else 0.0
            self._found.extend((batch, fill, busy_ns) for busy_ns in counted)
        self._mine.clear()
        self._kind += 1
        while self._kind < len(self._kinds) and self._kinds[self._kind][0] >= self._hopeless:
            self._kind += 1
        if self._kind == len(self._kinds):
            self.done = self._found
            self._forget()
            _seat(self._executor, self._executor.slots, 0)  # old ones own memory nobody needs

    def drop(self) -> None:
        """Somebody came: what was timed so far is left, and begun anew when it is asked again."""
        self._forget()  # slots are left alone: somebody may sit in any of them by now

    def _forget(self) -> None:
        self._found, self._mine, self._kind = [], [], 0
        self._hopeless, self.asked = self._executor.slots + 1, False
