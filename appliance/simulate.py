"""The box on a clock that jumps: the real scheduler and the real policies, without an engine.

To study policy: 256 sessions for an hour take a minute or two. What is real is every decision:
which tick runs after an overrun and what each slot hears (`scheduler`), when newcomers wait and
who is sent away (`admission`). What is modelled is time: how long steps take, when callers'
frames come, and when frames are heard, by the rule of `lines.playout` with a line that looks at
once. Pure: the same scenario gives the same outcome.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance.admission import Gate, Overload, plan_shed
from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.config import AdmissionConfig, ClockConfig
from appliance.ledger import Flag, Settled
from appliance.report import longest_run
from appliance.scheduler import Occupant, plan_resume, plan_tick
from appliance.tick_loop import RECENT_STEPS

PERIOD_NS = 80 * NS_PER_MS
"""Of the command line's scenarios: a frame of Moshi."""

CAPTURE_LEAD_NS = 20 * NS_PER_MS
"""How long before a tick its frame is handed in, as `lines.call.LEAD_NS`."""


@dataclass(frozen=True, slots=True)
class Overrun:
    """A stretch of ticks that take longer."""

    first_tick: int
    ticks: int
    extra_ns: int
    """On top of what each of these ticks takes anyway."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything the simulation depends on."""

    sessions: int
    ticks: int
    period_ns: int
    base_ns: int
    session_ns: int
    """A step takes base + session * live, times a lognormal factor."""
    spread: float
    """Standard deviation of that factor's logarithm."""
    overruns: tuple[Overrun, ...]
    buffer_ns: int
    """Playout buffer of every line."""
    catch_up_ns: int
    lag_limit_frames: int
    guard_ns: int
    calm_ns: int
    shed_after: int
    """Slow steps in a row before the newest session goes; 0: never."""
    skew_ppm: float = 0.0
    """Callers' clocks are spread evenly over plus and minus this."""
    stagger_ticks: int = 0
    """Between one caller's first frame and the next one's."""
    seed: int = 0


@dataclass(slots=True)
class SessionOutcome:
    """What became of one session. Counts are frames."""

    due: int = 0
    on_time: int = 0
    late: int = 0
    filled: int = 0
    missed: int = 0
    concealed: int = 0
    skipped: int = 0
    longest_run: int = 0
    """Frames in a row that were late, missed or filled."""
    shed: bool = False


@dataclass(slots=True)
class Outcome:
    """The whole result."""

    sessions: list[SessionOutcome]
    ticks_late: int = 0
    ticks_missed: int = 0
    longest_run: int = 0
    """Ticks in a row that were late or never ran."""
    shed: list[int] = field(default_factory=list)
    """Ticks at which a session was sent away."""
    gate_closed_ticks: int = 0
    worst_margin_ns: int = 0


@dataclass(slots=True)
class _State:
    """Arrays over sessions; a session is live from its first frame until it is shed."""

    first_ns: NDArray[np.float64]
    step_ns: NDArray[np.float64]
    """Between a caller's frames, on its own clock."""
    taken: NDArray[np.int64]
    """Frames of the caller that were heard, skipped or dropped with a missed tick."""
    index: NDArray[np.int64]
    playout_ns: NDArray[np.int64]
    """When frame 0 is heard; -1 before one was made."""
    live: NDArray[np.bool_]


Frame = tuple[int, int, int, int]
"""session, frame index, ledger flags (HEARD, CONCEALED, GENERATED, LATE, MISSED), `Settled`."""


def simulate(scenario: Scenario, watch: Callable[[Frame], None] | None = None) -> Outcome:
    """Run ``scenario`` from its first tick to its last.

    watch: told of every due frame, for small scenarios.
    """
    wanted, count, period = scenario, scenario.sessions, scenario.period_ns
    rng = np.random.default_rng(wanted.seed)
    spread = np.linspace(-1, 1, count) if count > 1 else np.zeros(1)
    starts = np.arange(count) * wanted.stagger_ticks
    state = _State(
        first_ns=(starts * period - CAPTURE_LEAD_NS).astype(np.float64),
        step_ns=period * (1 - spread * wanted.skew_ppm / 1e6),
        taken=np.zeros(count, np.int64),
        index=np.zeros(count, np.int64),
        playout_ns=np.full(count, -1, np.int64),
        live=np.zeros(count, np.bool_),
    )
    extra = np.zeros(wanted.ticks, np.int64)
    for overrun in wanted.overruns:
        extra[overrun.first_tick : overrun.first_tick + overrun.ticks] += overrun.extra_ns
    factors = np.exp(wanted.spread * rng.standard_normal(wanted.ticks))
    shed = np.zeros(count, np.bool_)
    bad = np.zeros(wanted.ticks, np.bool_)
    tally = _Tally(count)
    found = Outcome([])
    recent = [period // 2] * RECENT_STEPS
    gate = Gate(0)
    now_ns = late_run = slow_run = due_tick = 0
    shed_tick = -wanted.shed_after
    worst: int | None = None
    while due_tick < wanted.ticks:
        now_ns = max(now_ns, due_tick * period)
        tick = plan_resume(due_tick, now_ns, 0, period, min(recent), wanted.catch_up_ns)
        for missed in range(due_tick, min(tick, wanted.ticks)):
            slots = np.flatnonzero(state.live)
            if len(slots):
                found.ticks_missed += 1
                bad[missed] = True
                _miss(state, slots, now_ns, tally, watch)
        if tick >= wanted.ticks:
            break
        state.live |= ~shed & (state.first_ns <= now_ns)
        slots = np.flatnonzero(state.live)
        due_tick = tick + 1
        if not len(slots):
            continue
        waiting = _waiting(state, slots, now_ns)
        occupants = [Occupant(slot, n) for slot, n in enumerate(waiting.tolist())]
        behind = max(0, now_ns // period - tick)
        plan = plan_tick(tick, occupants, wanted.lag_limit_frames + behind)
        # What the plan says of each slot, as arrays: the decision is the scheduler's alone.
        hears = np.array([slot.hears for slot in plan.slots])
        skips = np.array([slot.skip for slot in plan.slots])
        took_ns = round((wanted.base_ns + wanted.session_ns * plan.batch) * factors[tick])
        took_ns += int(extra[tick])
        recent[tick % RECENT_STEPS] = took_ns
        now_ns += took_ns
        margin_ns = (tick + 1) * period - now_ns
        worst = margin_ns if worst is None else min(worst, margin_ns)
        is_late = margin_ns < 0
        found.ticks_late += is_late
        bad[tick] = is_late
        state.taken[slots] += hears + skips
        _step(state, slots, hears, skips, now_ns, is_late, wanted, tally, watch)
        late_run = late_run + 1 if is_late else 0
        slow_run = slow_run + 1 if took_ns > period else 0
        gate = gate.after(margin_ns, wanted.guard_ns, wanted.calm_ns, now_ns)
        found.gate_closed_ticks += not gate.is_open
        if wanted.shed_after and late_run:
            overload = Overload(slow_run, late_run, tick - shed_tick)
            chosen = plan_shed(overload, wanted.shed_after, slots.tolist())
            if chosen is not None:
                shed[chosen], state.live[chosen] = True, False
                found.shed.append(tick)
                shed_tick = tick
    found.longest_run = longest_run(bad)
    found.worst_margin_ns = worst or 0
    found.sessions = list(tally.outcomes(state.index, shed))
    return found


def _waiting(state: _State, slots: NDArray[np.int64], now_ns: int) -> NDArray[np.int64]:
    """Frames of each caller that have come and were not taken yet."""
    came = np.floor((now_ns - state.first_ns[slots]) / state.step_ns[slots]).astype(np.int64) + 1
    waiting: NDArray[np.int64] = np.maximum(0, came - state.taken[slots])
    return waiting


class _Tally:
    """What is counted, per session."""

    def __init__(self, count: int) -> None:
        names = ("on_time", "late", "filled", "missed", "concealed", "skipped")
        self.counts = {name: np.zeros(count, np.int64) for name in names}
        self.run = np.zeros(count, np.int64)
        self.longest = np.zeros(count, np.int64)

    def add(self, slots: NDArray[np.int64], was_bad: NDArray[np.bool_]) -> None:
        """One due frame of each of ``slots`` more, bad or not: for the runs."""
        self.run[slots] = np.where(was_bad, self.run[slots] + 1, 0)
        self.longest = np.maximum(self.longest, self.run)

    def outcomes(self, due: NDArray[np.int64], shed: NDArray[np.bool_]) -> Iterator[SessionOutcome]:
        for number in range(len(due)):
            counts = {name: int(values[number]) for name, values in self.counts.items()}
            yield SessionOutcome(
                due=int(due[number]),
                **counts,
                longest_run=int(self.longest[number]),
                shed=bool(shed[number]),
            )


def _miss(
    state: _State,
    slots: NDArray[np.int64],
    now_ns: int,
    tally: _Tally,
    watch: Callable[[Frame], None] | None,
) -> None:
    """A tick that never ran: one due frame of each slot is missed, and a waiting one dropped."""
    state.taken[slots] += _waiting(state, slots, now_ns) > 0
    tally.counts["missed"][slots] += 1
    tally.counts["filled"][slots] += 1
    tally.add(slots, np.ones(len(slots), np.bool_))
    if watch is not None:
        for slot in slots.tolist():
            watch((slot, int(state.index[slot]), Flag.MISSED.value, Settled.FILLED.value))
    state.index[slots] += 1


def _step(
    state: _State,
    slots: NDArray[np.int64],
    hears: NDArray[np.bool_],
    skips: NDArray[np.int64],
    made_ns: int,
    is_late: bool,
    wanted: Scenario,
    tally: _Tally,
    watch: Callable[[Frame], None] | None,
) -> None:
    """A tick that ran: one frame of each slot, made at ``made_ns``, heard or not."""
    begins = state.playout_ns[slots] < 0
    base = made_ns + wanted.buffer_ns - state.index[slots] * wanted.period_ns
    state.playout_ns[slots] = np.where(begins, base, state.playout_ns[slots])
    in_hand = made_ns <= state.playout_ns[slots] + state.index[slots] * wanted.period_ns
    counts = tally.counts
    counts["concealed"][slots] += ~hears
    counts["skipped"][slots] += skips
    counts["late" if is_late else "on_time"][slots] += in_hand
    counts["filled"][slots] += ~in_hand
    tally.add(slots, ~in_hand | is_late)
    if watch is not None:
        for slot, heard, held in zip(slots.tolist(), hears.tolist(), in_hand.tolist(), strict=True):
            flags = Flag.GENERATED | (Flag.HEARD if heard else Flag.CONCEALED)
            flags |= Flag.LATE if is_late else Flag(0)
            settled = (Settled.LATE if is_late else Settled.DELIVERED) if held else Settled.FILLED
            watch((slot, int(state.index[slot]), flags.value, settled.value))
    state.index[slots] += 1


def scenario(args: argparse.Namespace) -> Scenario:
    """The command line as a scenario of 80 ms ticks. Raises ValueError with the option's name."""
    for name, low, high in (
        ("sessions", 1, 4096),
        ("minutes", 0.01, 24 * 60),
        ("base_ms", 0, 10_000),
        ("session_ms", 0, 10_000),
        ("overruns_per_hour", 0, 45_000),
        ("overrun_ms", 20, 60_000),
        ("slow_from_minute", 0, 24 * 60),
        ("slow_ms", 0, 10_000),
        ("buffer_ms", 0, 10_000),
        ("catch_up_ms", 0, 10_000),
        ("shed_after", 0, 1000),
        ("skew_ppm", 0, 100_000),
    ):
        value = getattr(args, name)
        if not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected {low:g} to {high:g}")

    def ns(ms: float) -> int:
        return round(ms * NS_PER_MS)

    ticks = round(args.minutes * 60 * NS_PER_S / PERIOD_NS)
    overruns = random_overruns(
        ticks, PERIOD_NS, args.overruns_per_hour, ns(20), ns(args.overrun_ms), args.seed
    )
    if args.slow_ms:
        first = round(args.slow_from_minute * 60 * NS_PER_S / PERIOD_NS)
        overruns += (Overrun(first, max(0, ticks - first), ns(args.slow_ms)),)
    policy = AdmissionConfig()
    return Scenario(
        sessions=args.sessions,
        ticks=ticks,
        period_ns=PERIOD_NS,
        base_ns=ns(args.base_ms),
        session_ns=ns(args.session_ms),
        spread=0.05,
        overruns=overruns,
        buffer_ns=ns(args.buffer_ms),
        catch_up_ns=ns(args.catch_up_ms),
        lag_limit_frames=ClockConfig().lag_limit_frames,
        guard_ns=policy.min_margin_ms * NS_PER_MS,
        calm_ns=policy.calm_s * NS_PER_S,
        shed_after=args.shed_after,
        skew_ppm=args.skew_ppm,
        stagger_ticks=10,
        seed=args.seed,
    )


def random_overruns(
    ticks: int, period_ns: int, per_hour: float, shortest_ns: int, longest_ns: int, seed: int
) -> tuple[Overrun, ...]:
    """Single overruns at random ticks, of random lengths."""
    rng = np.random.default_rng(seed)
    expected = per_hour * ticks * period_ns / (3600 * NS_PER_S)
    count = min(ticks, int(rng.poisson(expected)))
    at = rng.choice(ticks, size=count, replace=False)
    extra = rng.integers(shortest_ns, longest_ns + 1, size=count)
    return tuple(Overrun(int(t), 1, int(e)) for t, e in zip(at, extra, strict=True))


def text(scenario: Scenario, found: Outcome) -> list[str]:
    """The outcome in a few lines, the worst session beside the mean."""
    due = sum(s.due for s in found.sessions)
    shares = [s.on_time / s.due if s.due else 1.0 for s in found.sessions]
    worst = min(range(len(shares)), key=lambda n: shares[n])
    total = {
        name: sum(getattr(s, name) for s in found.sessions)
        for name in ("on_time", "late", "filled", "missed", "concealed", "skipped")
    }
    return [
        f"{scenario.sessions} sessions, {scenario.ticks} ticks "
        f"({scenario.ticks * scenario.period_ns / NS_PER_S:g} s), {len(scenario.overruns)} "
        f"overruns, playout buffer {scenario.buffer_ns / NS_PER_MS:g} ms, catch-up "
        f"{scenario.catch_up_ns / NS_PER_MS:g} ms, shed after {scenario.shed_after or 'never'}",
        f"ticks     late {found.ticks_late}, missed {found.ticks_missed}, longest run "
        f"{found.longest_run}, worst margin {found.worst_margin_ns / NS_PER_MS:.1f} ms; gate "
        f"closed for {found.gate_closed_ticks}",
        f"frames    {due} due: " + ", ".join(f"{n} {name}" for name, n in total.items()),
        f"sessions  on time: mean {np.mean(shares):.4%}, worst {shares[worst]:.4%} (session "
        f"{worst}, longest run {found.sessions[worst].longest_run}); shed {len(found.shed)}",
    ]
