"""Admit a newcomer or refuse it, and why; whom to send away when that was not enough. Pure.

A session is charged at full retention from its first second, because that is what it will cost
if it lasts: what it owns, or how long its ticks take, when it is young says nothing. Memory
follows from the native clocks in the bundle. Time follows from `step_model`, fitted to this
bundle on this machine: a newcomer comes in only if the p99.9 tick with one session more, all of
them as full as `Forecast.policy` says, still ends `guard_ns` before the deadline.

    guaranteed    every session at full retention, whatever its age (the default)
    statistical   as full as live calls of the stated lengths are, all but once in a thousand

Forecasts can be wrong, so margins are watched as well: `Gate` closes when a tick ends closer to
its deadline than the guard, before anybody is late, and opens only after a calm stretch with
twice the guard. If ticks are late all the same, `plan_shed` names the newest session: one caller
gets a goodbye, and the others keep every frame. Memory is always charged in full, since running
out of it would end everybody.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from appliance.step_model import StepModel
from engines.bundle import Manifest
from engines.executor import SettingError, check_setting

Z_999 = 3.0902
"""The 99.9th percentile of the standard normal distribution."""

REOPEN_GUARDS = 2
"""A closed gate opens on margins of this many guards: thin ones again would close it at once."""

PATIENCE = 4
"""How many times longer lateness may last than slowness. After a stall the box is at most one
catch-up (80 ms) behind; with the default guard of 8 ms it gains that back within 10 of the 12
steps this allows, while steps that leave less are the overload itself."""


class Reason(enum.Enum):
    """Why a newcomer is refused; each line translates it into its own protocol."""

    TIME = "time"
    """One session more would make ticks late."""
    MEMORY = "memory"
    """The state all sessions will own at full retention would not fit."""
    LINES = "lines"
    """Every slot is taken."""
    DRAINING = "draining"
    """The box is finishing its calls and will stop."""
    NOT_READY = "not_ready"
    """The engine is still warming up."""
    FAULT = "fault"
    """The request itself cannot be met, or the box failed to prepare the session."""
    OPERATOR = "operator"
    """An operator ended the call before its persona was fed."""


class Policy(enum.Enum):
    """How old sessions are taken to be when the time of a tick is forecast."""

    GUARANTEED = "guaranteed"
    STATISTICAL = "statistical"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, why, and a sentence with the numbers."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a tick would take with other sessions than now."""

    model: StepModel
    period_ns: int
    guard_ns: int
    """How long before its deadline the p99.9 tick must end."""
    policy: Policy = Policy.GUARANTEED
    full_ns: int = 0
    """Age at which a session's state is at full retention. Statistical only."""
    call_lengths_ns: tuple[int, ...] = ()
    """Lengths of calls, each as likely as the others. Statistical only."""
    fill_now: float = 0.0
    """Sum of the live sessions' fills as measured; a lower bound. Statistical only."""
    before: tuple[StepModel, ...] = ()
    """Fits of the last seconds. They differ by chance, and callers ask again and again: without
    them somebody would be let in whenever one of them is low."""

    def tick_ns(self, sessions: int) -> int:
        """The p99.9 tick with ``sessions`` live."""
        fill = float(sessions)
        if self.policy is Policy.STATISTICAL:
            bound = fill_bound(sessions, self.full_ns, self.call_lengths_ns)
            fill = min(fill, max(bound, self.fill_now))
        return max(model.p999_ns(sessions, fill) for model in (self.model, *self.before))

    def holds(self, sessions: int) -> bool:
        """Whether all ticks but one in a thousand would end before the deadline minus guard."""
        return self.tick_ns(sessions) + self.guard_ns <= self.period_ns

    def most(self, slots: int) -> int:
        """The largest number of sessions that holds, at most ``slots``."""
        fit = 0
        while fit < slots and self.holds(fit + 1):
            fit += 1
        return fit


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the box can give, as far as admission is concerned."""

    slots: int
    """Largest batch of the engine."""
    held: int
    """Leases that admitted sessions hold."""
    session_bytes: int
    """State of one session at full retention."""
    memory_bytes: int
    """What the state of all sessions together may take."""
    ready: bool
    draining: bool
    forecast: Forecast | None = None
    """None: time is not looked at; only a certificate's search for the limit does that."""
    memory_short: bool = False
    """The device had no memory for what sessions who are there will soon need."""
    gate_open: bool = True
    """False: recent ticks ended too close to their deadlines; see `Gate`."""

    @property
    def free(self) -> int:
        """How many more sessions would be admitted now."""
        if not self.ready or self.draining or not self.gate_open:
            return 0
        return max(0, min(self.slots, self.fit_memory, self.fit_time) - self.held)

    @property
    def fit_memory(self) -> int:
        """Sessions whose state fits, at most `slots`."""
        fit = self.memory_bytes // self.session_bytes if self.session_bytes else self.slots
        return min(fit, self.slots, self.held if self.memory_short else fit)

    @property
    def fit_time(self) -> int:
        """Sessions whose ticks end in time, at most `slots`."""
        return self.slots if self.forecast is None else self.forecast.most(self.slots)

    @property
    def limit(self) -> Reason:
        """What would refuse the session after the last free one."""
        if not self.ready:
            return Reason.NOT_READY
        if self.draining:
            return Reason.DRAINING
        fit = min(self.slots, self.fit_memory, self.fit_time)
        if not self.gate_open or (self.fit_time == fit < self.slots):
            return Reason.TIME
        return Reason.MEMORY if self.fit_memory == fit < self.slots else Reason.LINES


def session_bytes(manifest: Manifest) -> int:
    """Bytes of state one session owns once none of its regions grows any more."""
    return manifest.session_bytes(manifest.ticks_until_full())


def admit(room: Headroom, manifest: Manifest, settings: Mapping[str, float]) -> Refusal | None:
    """None: there is room. Otherwise the first reason that stands in the way."""
    if not room.ready:
        return Refusal(Reason.NOT_READY, "the engine is warming up; try again in a few seconds")
    if room.draining:
        return Refusal(Reason.DRAINING, f"the box stops once its {room.held} calls have ended")
    regions = {region.name: region for region in manifest.regions}
    try:
        for name, value in settings.items():
            check_setting(regions, name, value)
    except SettingError as err:
        return Refusal(Reason.FAULT, str(err))
    if room.held >= room.slots:
        return Refusal(Reason.LINES, f"all {room.slots} slots are taken")
    if room.memory_short:
        return Refusal(
            Reason.MEMORY,
            f"the GPU had no memory for what {room.held} sessions will soon need: another process "
            f"took it after the start",
        )
    needed = (room.held + 1) * room.session_bytes
    if needed > room.memory_bytes:
        return Refusal(
            Reason.MEMORY,
            f"{room.held + 1} sessions would own {needed} bytes at full retention; "
            f"the limit is {room.memory_bytes}",
        )
    if not room.gate_open:
        return Refusal(
            Reason.TIME,
            f"recent ticks of {room.held} sessions ended too close to their deadlines; "
            f"newcomers wait until the margins have been wide again for a while",
        )
    if room.forecast is not None and not room.forecast.holds(room.held + 1):
        forecast = room.forecast
        return Refusal(
            Reason.TIME,
            f"with {room.held + 1} sessions at {forecast.policy.value} fill one tick in a "
            f"thousand would take {_ms(forecast.tick_ns(room.held + 1))} ms; the limit is "
            f"{_ms(forecast.period_ns - forecast.guard_ns)} of {_ms(forecast.period_ns)} ms",
        )
    return None


def fill_bound(sessions: int, full_ns: int, call_lengths_ns: Sequence[int]) -> float:
    """What the sum of ``sessions`` live calls' fills exceeds once in a thousand looks.

    A call that is found live at a random moment has age a with a density in proportion to the
    share of calls longer than a: long calls are found more often than they begin. Its fill is
    min(a / full, 1). The sum over independent calls is taken as normal, and never more than one
    for each.
    """
    assert call_lengths_ns, "a statistical forecast needs the lengths of calls"
    if full_ns <= 0:
        return float(sessions)
    full = float(full_ns)
    first = second = total = 0.0
    for length_ns in call_lengths_ns:
        young = min(float(length_ns), full)
        old = float(length_ns) - young
        first += young**2 / (2 * full) + old
        second += young**3 / (3 * full**2) + old
        total += float(length_ns)
    mean = first / total
    deviation = math.sqrt(max(0.0, second / total - mean**2))
    return min(float(sessions), sessions * mean + Z_999 * deviation * math.sqrt(sessions))


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether newcomers are let in, as far as recent margins say. Start with `Gate(0)`."""

    calm_since_ns: int
    """Since when no margin was too thin for the state the gate is in."""
    is_open: bool = True

    def after(self, margin_ns: int | None, guard_ns: int, calm_ns: int, now_ns: int) -> "Gate":
        """The gate once the smallest margin since the last look is known.

        margin_ns: None when no tick ran, which is as calm as it gets.
        """
        if self.is_open:
            if margin_ns is not None and margin_ns < guard_ns:
                return Gate(now_ns, is_open=False)
            return self
        if margin_ns is not None and margin_ns < REOPEN_GUARDS * guard_ns:
            return replace(self, calm_since_ns=now_ns)
        return replace(self, is_open=now_ns - self.calm_since_ns >= calm_ns)


@dataclass(frozen=True, slots=True)
class Overload:
    """How late the box is, as the tick loop counts it."""

    slow_run: int
    """Steps in a row that each took longer than the period."""
    late_run: int
    """Steps in a row that finished late; ticks that never ran neither add nor end the run."""
    ticks_since_shed: int
    """Ticks since the last session was sent away."""


def plan_shed(overload: Overload, tolerated: int, live: Sequence[int]) -> int | None:
    """The session to send away now, or None. live: session numbers, in any order.

    The newest goes: it has lost least, and was the last straw. One stall is not overload: it
    makes one slow step, and the late ones after it catch up by themselves. Steps that are slow
    ``tolerated`` times in a row are; so is lateness that lasts `PATIENCE` times as long, since
    steps that only just fit do not catch up. After a goodbye the others get as much time as it
    took to be sure, so that the cure can work. The last session is never sent away: nobody would
    gain by it.
    """
    if len(live) < 2:
        return None
    patient = PATIENCE * tolerated
    if overload.slow_run >= tolerated and overload.ticks_since_shed >= tolerated:
        return max(live)
    if overload.late_run >= patient and overload.ticks_since_shed >= patient:
        return max(live)
    return None


MEMORY_SHED_TICKS = 16
"""How near the need of memory that is not there must be before somebody is sent away for it: what
took it may give it back, and the goodbye takes a tick or two."""


def plan_memory_shed(short_in_ticks: int, ticks_since_shed: int, live: Sequence[int]) -> int | None:
    """The session to send away because others will find no memory; None: nobody yet.

    Admission lets nobody in for whom there would be none, so somebody else has taken it. Again the
    newest goes: its memory keeps the others talking. The last session is never sent away.
    """
    if len(live) < 2 or short_in_ticks > MEMORY_SHED_TICKS or ticks_since_shed < 4:
        return None
    return max(live)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"
