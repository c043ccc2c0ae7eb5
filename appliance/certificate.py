"""What a capacity measurement says, and when it may say that N sessions hold. Pure.

N sessions *hold* when every one of them was admitted, talked to its end, and had every frame made
before its deadline and in hand at its playout time: no late frame, none missed, none filled, none
unexplained. A session that failed is not left out: it stays in the table and in the denominator,
and the measurement says no. Frames that the callers lost, or brought too late for their tick, are
concealed and counted, and are the callers' own.

It does not run anything (`certify`) and does not draw (`certificate_page`).
"""

from collections.abc import Sequence

import msgspec

from appliance.admission import Reason
from appliance.ledger import Why
from appliance.lines.callers import Conditions
from appliance.lines.synthetic import SyntheticReport
from appliance.report import SessionReport, Summary, TickReport

FORMAT = 2

FALL = 16
"""The part of sessions that did not hold by which fewer are tried next."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str
    """none, or the GPU's name."""
    driver: str
    kernel: str
    python: str
    duplexbox: str
    engine: str
    """What ran the stages, with its version."""
    load_before: float
    """Load average over a minute when it began: what else the machine was doing."""
    load_after: float


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was run."""

    name: str
    trained: bool
    parameters: int
    checkpoint_sha256: str
    bundle: str
    period_ns: int
    full_retention_s: float
    """Age at which a session's state stops growing."""
    session_bytes: int


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of sessions, tried."""

    sessions: int
    seconds: float
    """How long all sessions were live."""
    held: bool
    why_not: str
    """Empty when it held."""
    worst_margin_ns: int
    p999_ns: int


class Newcomer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller who came when all N were talking."""

    admitted: bool
    reason: str
    detail: str


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole result. Times in nanoseconds unless their name says otherwise."""

    format: int
    started: str
    """UTC."""
    command: str
    machine: Machine
    model: Model
    path: str
    """Where audio went through, in words."""
    quick: bool
    """True: seconds, not minutes. It shows that the path works, not what the machine holds."""
    conditions: Conditions
    sessions: int
    """N: how many held; 0 when none did."""
    slots: int
    """[engine] slots of the box it was measured on, which the promise needs as well."""
    holds: bool
    forecast_sessions: int
    """How many admission would let in by its own forecast."""
    forecast_ns: int
    """The p99.9 tick that admission forecast for N sessions at full retention."""
    newcomer: Newcomer | None
    """None: the measurement ended before anybody came."""
    trials: tuple[Trial, ...]
    """In order; the last one is the measurement itself."""
    ticks: TickReport
    calls: tuple[SessionReport, ...]
    """All of the last trial, failed ones included."""
    failed: int
    mean_on_time_share: float
    worst_session: int
    worst_on_time_share: float
    smallest_margin_ns: int
    smallest_buffer_ns: int
    longest_miss_run: int
    problems: tuple[str, ...]
    """Why the last trial does not hold; empty if it does."""


def fewer(sessions: int, admitted: int) -> int:
    """How many to try next when ``sessions`` did not hold and ``admitted`` of them were let in."""
    if admitted < sessions:
        return max(1, admitted)
    return max(1, sessions - max(1, sessions // FALL))


def problems(
    summary: Summary,
    callers: Sequence[SyntheticReport],
    sessions: int,
    unreadable: Sequence[str] = (),
) -> tuple[str, ...]:
    """Why ``sessions`` do not hold, each with its number; empty when they do.

    callers: the regular ones, without those who came too late on purpose. unreadable: what is
    wrong with each call file that could not be read; nobody knows how that call went.
    """
    found = []
    if unreadable:
        found.append(f"{len(unreadable)} call files cannot be read, the first: {unreadable[0]}")
    refused = [c for c in callers if c.refused]
    if refused:
        first = refused[0]
        found.append(
            f"{len(refused)} of {sessions} callers were refused, the first for {first.refused}: "
            f"{first.detail}"
        )
    odd = [c for c in callers if not c.refused and c.ended != Why.FINISHED.name.lower()]
    if odd:
        found.append(f"{len(odd)} of {sessions} calls did not finish: the first was {odd[0].ended}")
    if len(summary.sessions) + len(refused) < sessions:
        found.append(f"{sessions - len(summary.sessions) - len(refused)} calls left no record")
    if summary.failed:
        found.append(f"{summary.failed} of {sessions} sessions failed")
    totals = (
        ("late", sum(s.late for s in summary.sessions)),
        ("filled", sum(s.filled for s in summary.sessions)),
        ("missed", sum(s.missed for s in summary.sessions)),
        ("thrown away unread", sum(s.unread for s in summary.sessions)),
        ("unexplained", summary.unexplained),
        ("short of their record", sum(s.records_lost for s in summary.sessions)),
    )
    due = sum(s.due for s in summary.sessions)
    found += [f"{count} of {due} frames were {what}" for what, count in totals if count]
    if summary.ticks.late or summary.ticks.missed:
        found.append(
            f"{summary.ticks.late} of {summary.ticks.ticks} ticks ended late and "
            f"{summary.ticks.missed} never ran"
        )
    return tuple(found)


def trial(
    summary: Summary,
    callers: Sequence[SyntheticReport],
    sessions: int,
    seconds: float,
    unreadable: Sequence[str] = (),
) -> Trial:
    """One trial's line in the certificate."""
    found = problems(summary, callers, sessions, unreadable)
    return Trial(
        sessions=sessions,
        seconds=seconds,
        held=not found,
        why_not=found[0] if found else "",
        worst_margin_ns=min((s.worst_margin_ns for s in summary.sessions), default=0),
        p999_ns=summary.ticks.p999_ns,
    )


def text(found: Certificate) -> list[str]:
    """The certificate in a dozen lines, for the terminal."""
    ticks, machine = found.ticks, found.machine
    lines = [
        f"{found.model.name} ({found.model.parameters:,} parameters"
        f"{'' if found.model.trained else ', untrained'}, checkpoint "
        f"{found.model.checkpoint_sha256[:12]}) on {machine.cpu}, {machine.cores} cores, GPU "
        f"{machine.gpu}, driver {machine.driver}, {machine.engine}; load "
        f"{machine.load_before:.2f} before, {machine.load_after:.2f} after"
    ]
    for one in found.trials:
        verdict = "held" if one.held else f"did not hold: {one.why_not}"
        lines.append(
            f"  {one.sessions} sessions, all live for {one.seconds:.0f} s: {verdict} "
            f"(p99.9 {_ms(one.p999_ns)} ms, smallest margin {_ms(one.worst_margin_ns)} ms)"
        )
    if found.newcomer is not None:
        lines.append(
            "  one more was ADMITTED"
            if found.newcomer.admitted
            else f"  one more was refused ({found.newcomer.reason}): {found.newcomer.detail}"
        )
    due = sum(s.due for s in found.calls)
    on_time = sum(s.on_time for s in found.calls)
    lines.append(
        f"  {on_time} of {due} frames on time; worst session {found.worst_session}: "
        f"{int(found.worst_on_time_share * 10_000) / 100:.2f} %; failed {found.failed} of "
        f"{len(found.calls)}; ticks p50 {_ms(ticks.p50_ns)}, p99 {_ms(ticks.p99_ns)}, p99.9 "
        f"{_ms(ticks.p999_ns)}, max {_ms(ticks.max_ns)} of {_ms(ticks.period_ns)} ms; forecast "
        f"p99.9 {_ms(found.forecast_ns)} ms"
    )
    if found.holds:
        lines.append(_verdict(found))
    else:
        lines += [f"DOES NOT HOLD: {problem}" for problem in found.problems]
    return lines


def _verdict(found: Certificate) -> str:
    """How many hold, and what keeps the next one out."""
    text = f"{found.sessions} sessions HOLD" + (" (quick)" if found.quick else "")
    reason = found.newcomer.reason if found.newcomer is not None else ""
    if reason == Reason.LINES.value and found.forecast_sessions > found.slots:
        return (
            f"{text} with [engine] slots = {found.slots}, which refuses the next one (lines); by "
            f"forecast alone {found.forecast_sessions} would be let in"
        )
    why = {
        Reason.TIME.value: "their ticks would be too close to their deadlines",
        Reason.MEMORY.value: "their state at full retention would not fit",
        Reason.LINES.value: f"all {found.slots} slots are taken",
    }
    return f"{text}; the next one is refused for {reason}: {why[reason]}" if reason in why else text


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"
