"""What the box knows about the ticks to come: forecast, gate, and whom to send away.

The control thread's memory between looks; it reads what the tick thread left in its ring and
counters and asks the pure functions of `admission` and `step_model`. It decides nothing itself.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from appliance.admission import (
    Forecast,
    Gate,
    Headroom,
    Overload,
    Policy,
    plan_memory_shed,
    plan_shed,
)
from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.config import AdmissionConfig
from appliance.step_model import StepModel, StepSamples
from appliance.tick_loop import TickLoop
from engines.bundle import Manifest
from engines.executor import MemoryUse, OnDevice

logger = logging.getLogger(__name__)

REFIT_NS = NS_PER_S
"""How old a fit may be: a disturbance of the machine shows in forecasts a second later. The gate,
which looks at margins themselves, needs no fit."""

IDLE_NS = 5 * NS_PER_S
"""How long nobody must have been in the box before steps are timed again: a caller who comes in
the middle costs the half that was done."""

AGED_NS = 600 * NS_PER_S
"""How old a calibration may become in a box that nobody uses. It is also done again, as soon as the
box is idle, when live ticks have shown that the machine has become slower (`step_model`)."""


TOLD = 0.1
"""By how much the machine must have become slower or faster for the log to say so again."""


class Foresight:
    """One box's view of its own time. The control thread uses it."""

    def __init__(
        self,
        loop: TickLoop,
        manifest: Manifest,
        config: AdmissionConfig,
        slots: int,
        memory_bytes: int,
        session_bytes: int,
        samples: StepSamples,
        device: OnDevice | None = None,
    ) -> None:
        """memory_bytes, session_bytes: with a ``device``, it is asked again each time."""
        self.model: StepModel | None = None
        self.gate = Gate(0)
        self.look_at_time = True
        """False: admit by slots and memory alone, and never shed; a certificate's search does."""
        self._loop = loop
        self._config = config
        self._slots = slots
        self._memory_bytes = memory_bytes
        self._session_bytes = session_bytes
        self._samples = samples
        self._device = device
        self._period_ns = manifest.timing.period_ns
        self._guard_ns = config.min_margin_ms * NS_PER_MS
        self._full_ns = manifest.ticks_until_full() * self._period_ns
        self._calls_ns = tuple(length * NS_PER_S for length in config.call_lengths_s)
        self._fill_now = 0.0
        self._fitted_ns: int | None = None
        self._before: deque[tuple[int, StepModel]] = deque()
        """When each of the last fits was made, and the fit."""
        self._idle_since_ns: int | None = None
        self._calibrated_ns: int | None = None
        self._slower = 1.0
        self._shed_tick = -config.shed_after

    def look(self, now_ns: int) -> None:
        """Take in what was ticked since the last look; cheap, called every few milliseconds."""
        ring = self._loop.steps_seen
        margin_ns = None
        if ring.read < ring.written:
            self._fill_now = int(ring.rows[(ring.written - 1) % ring.capacity, 1]) / 1000
            margin_ns = ring.pour(self._samples, now_ns)
        elif not self._loop.counts.live:
            self._fill_now = 0.0
        self._watch_calibration(now_ns)
        calm_ns = self._config.calm_s * NS_PER_S
        gate = self.gate.after(margin_ns, self._guard_ns, calm_ns, now_ns)
        if gate.is_open != self.gate.is_open:
            logger.warning(
                "newcomers %s: margin_us=%d sessions=%d",
                "are let in again" if gate.is_open else "wait: margins are thin",
                self._loop.counts.margin_ns // 1000,
                self._loop.counts.live,
            )
        self.gate = gate

    def _watch_calibration(self, now_ns: int) -> None:
        """Have steps timed again in an idle box once what was timed no longer holds."""
        idle, loop = self._loop.idle, self._loop
        if idle is None:
            return
        if self._calibrated_ns is None:
            self._calibrated_ns = now_ns
        if idle.done is not None:
            self._samples.renew(idle.done)
            idle.done, self._fitted_ns, self._calibrated_ns = None, None, now_ns
            self._before.clear()
            logger.info("steps were timed again: ticks=%d", self._samples.added)
        if loop.counts.live:
            self._idle_since_ns = None
            return
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns
        if idle.asked or now_ns - self._idle_since_ns <= IDLE_NS:
            return
        is_old = now_ns - self._calibrated_ns > AGED_NS
        if is_old or self._samples.slower > 1 or self._lets_nobody_in():
            idle.asked, self._idle_since_ns = True, now_ns  # if a caller comes: not at once again

    def _lets_nobody_in(self) -> bool:
        """Whoever is refused brings no tick that would show what was timed to be a stall."""
        forecast = self.forecast()
        return forecast is not None and not forecast.holds(1)

    def headroom(self, held: int, ready: bool, draining: bool) -> Headroom:
        """What admission goes by, now."""
        use = self.memory()
        limit, session = self._memory_bytes, self._session_bytes
        if use is not None:
            # Another process may have taken some since; what the config allows stays the most.
            limit, session = min(limit, use.for_sessions), use.session
        return Headroom(
            slots=self._slots,
            held=held,
            session_bytes=session,
            memory_bytes=limit,
            memory_short=use is not None and use.short_in_ticks is not None,
            ready=ready,
            draining=draining,
            forecast=self.forecast() if ready else None,
            gate_open=self.gate.is_open or not self.look_at_time,
        )

    def memory(self) -> MemoryUse | None:
        """What lies on the GPU; None: there is none."""
        return None if self._device is None else self._device.memory()

    @property
    def gpu(self) -> str:
        """Name of the device sessions live on; empty: there is none."""
        return "" if self._device is None else self._device.gpu

    def forecast(self) -> Forecast | None:
        """None: time is not looked at, or nothing was ever timed, which no box that is ready is."""
        if not self.look_at_time:
            return None
        now_ns = self._loop.clock.now_ns()
        if self._fitted_ns is None or now_ns - self._fitted_ns >= REFIT_NS:
            # Also when nothing was added: what is too old no longer counts.
            self.model = self._samples.fit(now_ns) or self.model
            self._fitted_ns = now_ns
            if self.model is not None:
                self._before.append((now_ns, self.model))
            calm_ns = self._config.calm_s * NS_PER_S
            while self._before and now_ns - self._before[0][0] > calm_ns:
                self._before.popleft()
            if abs(self._samples.slower - self._slower) >= TOLD:
                self._slower = self._samples.slower
                logger.log(
                    logging.WARNING if self._slower > 1 else logging.INFO,
                    "steps take %.2f times what was calibrated",
                    self._slower,
                )
        if self.model is None:
            return None
        return Forecast(
            model=self.model,
            period_ns=self._period_ns,
            guard_ns=self._guard_ns,
            policy=Policy(self._config.policy),
            full_ns=self._full_ns,
            call_lengths_ns=self._calls_ns,
            fill_now=self._fill_now,
            before=tuple(model for _, model in self._before),
        )

    def plan_shed(self, live: Sequence[int]) -> int | None:
        """`admission.plan_shed` with what the tick loop counted; remembers when it said yes."""
        counts = self._loop.counts
        since = counts.tick - self._shed_tick
        use = self.memory()
        chosen = None
        if use is not None and use.short_in_ticks is not None:
            chosen = plan_memory_shed(use.short_in_ticks, since, live)
        if chosen is None and self.look_at_time and counts.late_run:
            overload = Overload(counts.slow_run, counts.late_run, since)
            chosen = plan_shed(overload, self._config.shed_after, live)
        if chosen is not None:
            self._shed_tick = counts.tick
            self.gate = replace(self.gate, is_open=False, calm_since_ns=self._loop.clock.now_ns())
        return chosen
