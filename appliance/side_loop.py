"""Run one small model beside the voice, under a contract of its own.

A loop like `tick_loop`, for one stream and one number per step: it takes inputs from a queue, asks
`contracts` what to do, steps, and hands on the result if it is in time. Every period (or input,
for EVENT) gets exactly one record. It runs in a process of its own, so the voice shares nothing
with it but the machine. An exception of the model is not caught.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.clock import Clock, TickGrid
from appliance.contracts import Contract, Outcome, Terms, Work, judge, plan_work, raises_alarm

RECENT_STEPS = 8
"""Steps looked back on to guess the next one's length: the shortest, as `tick_loop` has it."""

WAITING_LIMIT = 64
"""Inputs that may wait; beyond, the oldest is dropped and recorded like any other."""


class Model(Protocol):
    """What is run; `engines.stream_model.StreamModel` is one."""

    def step(self, pcm: NDArray[np.float32]) -> float:
        """One number for one chunk."""


@dataclass(frozen=True, slots=True)
class Input:
    """One chunk. pcm: (S,) float32."""

    index: int
    captured_ns: int
    pcm: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one period (HARD) or one input (the others)."""

    number: int
    """Period, or input index."""
    outcome: Outcome
    value: float
    """What was handed on: the result, or what stood in for it; NaN when nothing was."""
    margin_ns: int
    """Due minus in hand; negative when it was late. 0 when nothing was run."""
    age_ns: int
    """From the input's capture to the result in hand; 0 when nothing was run."""


@dataclass(slots=True)
class SideLoop:
    """One model, one contract, one stream. One thread calls `turn` or `run`."""

    model: Model
    terms: Terms
    clock: Clock
    grid: TickGrid
    hand_on: Callable[[Record], None]
    """Takes every record, in order; those with a value are what the stream's user gets."""
    alarm: Callable[[Record], None] = lambda record: None
    waiting: deque[Input] = field(default_factory=deque)
    """Filled by another thread: append only."""
    stopping: bool = False
    alarms: int = 0
    first: int = 0
    """HARD: the first period that is owed."""
    _due: int = field(init=False)
    _last: float = 0.0
    """What stands in for a result that does not come: the one before."""
    _steps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def __post_init__(self) -> None:
        self._due = self.first

    def wake_ns(self, never_ns: int) -> int:
        """HARD: when the next period begins, if no input is needed to know; else ``never_ns``."""
        if self.terms.contract is not Contract.HARD:
            return never_ns
        return self.grid.start_ns(self._due)

    def run(self, poll_ns: int) -> None:
        """Turn until told to stop: on the grid for HARD, else as inputs come."""
        while not self.stopping:
            self.turn()
            now_ns = self.clock.now_ns()
            if self.terms.contract is Contract.HARD and now_ns < self.grid.start_ns(self._due):
                self.clock.sleep_until(self.grid.start_ns(self._due))
            elif not self.waiting:
                self.clock.sleep_until(now_ns + poll_ns)

    def turn(self) -> None:
        """Do what is due now."""
        while len(self.waiting) > WAITING_LIMIT:
            self._drop()
        inputs = list(self.waiting)
        now_ns = self.clock.now_ns()
        if self.terms.contract is Contract.HARD and now_ns < self.grid.start_ns(self._due):
            return
        captured = [one.captured_ns for one in inputs]
        expected_ns = min(self._steps_ns, default=0)
        work = plan_work(self.terms, self._due, now_ns, self.grid.t0_ns, captured, expected_ns)
        for number in range(work.tick - work.missed, work.tick):
            if self.terms.contract is Contract.HARD:
                self._record(Record(number, Outcome.SUBSTITUTED, self._last, 0, 0))
        if work.waits:
            self._due = work.tick
            return
        for _ in range(work.skip):
            self._drop()
        if work.runs:
            self._step(work, self.waiting.popleft())
        elif self.terms.contract is Contract.HARD:
            self._record(Record(work.tick, Outcome.SUBSTITUTED, self._last, 0, 0))
        if self.terms.contract is Contract.HARD:
            self._due = work.tick + 1

    def _step(self, work: Work, one: Input) -> None:
        began_ns = self.clock.now_ns()
        value = self.model.step(one.pcm)
        finished_ns = self.clock.now_ns()
        self._steps_ns.append(finished_ns - began_ns)
        outcome = judge(self.terms, work, finished_ns)
        if outcome is Outcome.DELIVERED:
            self._last = value
        handed = {Outcome.DELIVERED: value, Outcome.SUBSTITUTED: self._last}.get(outcome, np.nan)
        is_hard = self.terms.contract is Contract.HARD
        self._record(
            Record(
                work.tick if is_hard else one.index,
                outcome,
                float(handed),
                work.due_ns - finished_ns,
                finished_ns - one.captured_ns,
            )
        )

    def _drop(self) -> None:
        """The oldest input is not run on. HARD's records are of periods, which have their own."""
        one = self.waiting.popleft()
        if self.terms.contract is not Contract.HARD:
            self._record(Record(one.index, Outcome.DROPPED, np.nan, 0, 0))

    def _record(self, record: Record) -> None:
        self.hand_on(record)
        if raises_alarm(self.terms, record.outcome):
            self.alarms += 1
            self.alarm(record)
