"""What the ledger adds up to: per session, worst beside mean, and whether anything is unexplained.

Pure arithmetic on calls that were read back; it does not know files, sockets or plots. Averages
hide one broken caller among many, so the worst session always stands next to the mean, and a
session that failed stays in the denominator.

A due frame is *explained* when it has exactly one record and, if it was handed to the line,
a receipt that says what the caller heard. Whatever is not explained is a fault of ours (or of a
line that does not settle its frames), and the verbs that print a report then exit with 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.ledger import RECORD_BYTES, Call, Flag, Settled, Why
from appliance.side_report import SideReport, side_reports
from appliance.side_report import text as side_text

LONGEST_NAME = 40
"""Characters of a caller's name that a table has room for; the ledger keeps all of it."""

FAILED = (Why.FAULT, Why.LOST, Why.TIMEOUT, Why.SHED)
UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One call. Counts are frames unless their name says otherwise."""

    session: int
    caller: str
    file: str
    ended: str
    """`ledger.Why` in lower case; unfinished: still on, or the box was killed."""
    failed: bool
    due: int
    generated: int
    on_time: int
    """DELIVERED: heard, and made before its deadline."""
    late: int
    """Heard, though made after its deadline: the playout buffer covered it."""
    filled: int
    """The caller heard silence in its place."""
    discarded: int
    """Made, and never due to be heard: the caller had hung up."""
    lost: int
    """The line vanished before it said."""
    concealed: int
    missed: int
    skipped: int
    """Frames of the caller dropped unheard."""
    unread: int
    warming: int
    worst_lag_frames: int
    worst_margin_ns: int
    """Of frames that were due; 0 when none was."""
    worst_buffer_ns: int
    """Least playout buffer of a frame that was heard; 0 when none was."""
    longest_miss_run: int
    """Due frames in a row that were late, never made, or not heard in time."""
    on_time_share: float
    """on_time ÷ (due − discarded); 0 for a failed session without frames, else 1."""
    unrecorded: int
    duplicated: int
    unreceipted: int
    in_flight: int
    """Newest frames of an unfinished call, whose receipts may still come."""
    foreign_receipts: int
    records_lost: int
    dropped_bytes: int

    @property
    def damaged(self) -> int:
        """Whole records after the first that cannot be read: a write that was cut short tears one,
        so this file was changed, or its disk is failing."""
        return self.dropped_bytes // RECORD_BYTES

    @property
    def unexplained(self) -> int:
        return self.unrecorded + self.duplicated + self.unreceipted + self.damaged


@dataclass(frozen=True, slots=True)
class TickReport:
    """All ticks that had a live session. Durations: from the tick's start on the grid to done."""

    ticks: int
    late: int
    missed: int
    longest_miss_run: int
    """Ticks in a row that were late or never ran."""
    p50_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int
    period_ns: int
    """Of the last box in the report; all others' durations are measured against their own."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole report."""

    sessions: tuple[SessionReport, ...]
    ticks: TickReport
    failed: int
    mean_on_time_share: float
    """Over all sessions, failed ones included."""
    worst_session: int
    """Whose share is the smallest, then whose margin is; 0 when there is none."""
    worst_on_time_share: float
    unexplained: int
    beside: tuple[SideReport, ...] = ()
    """Models beside the voice, and how their contracts were kept."""


def summarise(calls: Sequence[Call]) -> Summary:
    """Add up ``calls``; the order of the sessions is kept."""
    sessions = tuple(_session(call) for call in calls)
    worst = min(sessions, key=lambda s: (s.on_time_share, s.worst_margin_ns), default=None)
    return Summary(
        sessions=sessions,
        ticks=_ticks(calls),
        failed=sum(s.failed for s in sessions),
        mean_on_time_share=float(np.mean([s.on_time_share for s in sessions])) if sessions else 1.0,
        worst_session=worst.session if worst else 0,
        worst_on_time_share=worst.on_time_share if worst else 1.0,
        unexplained=sum(s.unexplained for s in sessions),
        beside=tuple(side_reports(calls)),
    )


def _session(call: Call) -> SessionReport:
    ticks, end = call.ticks, call.end
    flags = ticks["flags"]
    last = int(ticks["index"].max()) + 1 if len(ticks) else 0
    due = int(end["index"]) if end is not None else last
    ended = Why(int(end["why"])).name.lower() if end is not None else UNFINISHED
    failed = end is None or Why(int(end["why"])) in FAILED
    recorded = np.bincount(ticks["index"], minlength=due)
    first = first_outcomes(call, len(recorded))
    handed = np.zeros(len(recorded), bool)
    handed[ticks["index"][(flags & (Flag.GENERATED | Flag.UNREAD)) == Flag.GENERATED]] = True
    open_frames = handed & (first == 0)
    settled = np.flatnonzero(first)
    newest = int(settled[-1]) + 1 if len(settled) else 0
    in_flight = int(open_frames[newest:].sum()) if end is None else 0
    heard = np.isin(first, (Settled.DELIVERED, Settled.LATE))
    receipts = call.receipts
    buffers = receipts["buffer_ns"][np.isin(receipts["outcome"], (Settled.DELIVERED, Settled.LATE))]
    on_time = int((first == Settled.DELIVERED).sum())
    discarded = int((first == Settled.DISCARDED).sum())
    owed = due - discarded
    broken = np.zeros(len(recorded), bool)
    broken[ticks["index"][(flags & (Flag.LATE | Flag.MISSED | Flag.FAULT)) > 0]] = True
    broken |= (first == Settled.FILLED) | ((recorded == 0) & ~heard)
    return SessionReport(
        session=call.header.session,
        caller=call.header.caller,
        file=call.path.name,
        ended=ended,
        failed=failed,
        due=due,
        generated=_count(flags, Flag.GENERATED),
        on_time=on_time,
        late=int((first == Settled.LATE).sum()),
        filled=int((first == Settled.FILLED).sum()),
        discarded=discarded,
        lost=int((first == Settled.LOST).sum()),
        concealed=_count(flags, Flag.CONCEALED),
        missed=_count(flags, Flag.MISSED),
        skipped=int(ticks["skipped"].sum()),
        unread=_count(flags, Flag.UNREAD),
        warming=_count(flags, Flag.WARMING),
        worst_lag_frames=int(ticks["lag"].max()) if len(ticks) else 0,
        worst_margin_ns=int(ticks["margin_ns"].min()) if len(ticks) else 0,
        worst_buffer_ns=int(buffers.min()) if len(buffers) else 0,
        longest_miss_run=longest_run(broken),
        on_time_share=on_time / owed if owed > 0 else (0.0 if failed else 1.0),
        unrecorded=int((recorded[:due] == 0).sum()),
        duplicated=int(len(ticks) - (recorded > 0).sum()) + int((recorded[due:] > 0).sum()),
        unreceipted=int(open_frames.sum()) - in_flight,
        in_flight=in_flight,
        foreign_receipts=int(end["foreign"]) if end is not None else 0,
        records_lost=int(end["records_lost"]) if end is not None else 0,
        dropped_bytes=call.dropped_bytes,
    )


def first_outcomes(call: Call, frames: int) -> NDArray[np.uint8]:
    """(frames,) uint8: what the caller heard of each frame, `ledger.Settled`; 0: nobody said.

    A frame may have two receipts (FILLED, then DISCARDED when it came too late): the first counts.
    """
    first = np.zeros(frames, np.uint8)
    receipts = call.receipts[call.receipts["index"] < frames][::-1]
    first[receipts["index"]] = receipts["outcome"]  # of equal indices, the last assignment stays
    return first


def _ticks(calls: Sequence[Call]) -> TickReport:
    """Ticks of all boxes in the report; two boxes are told apart by their grids' origins."""
    busy_ns: list[int] = []
    late = missed = longest = 0
    period_ns = calls[-1].header.period_ns if calls else 0
    for t0_ns in sorted({call.header.t0_ns for call in calls}):
        mine = [call for call in calls if call.header.t0_ns == t0_ns]
        records = np.concatenate([call.ticks for call in mine])
        records = records[(records["flags"] & Flag.PRIMING) == 0]  # that session took no tick
        if not len(records):
            continue
        numbers, which = np.unique(records["tick"], return_inverse=True)
        margins = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(margins, which, records["margin_ns"])
        never_ran = np.zeros(len(numbers), bool)
        never_ran[which[(records["flags"] & Flag.MISSED) > 0]] = True
        ran_late = ~never_ran & (margins < 0)
        busy_ns += (mine[0].header.period_ns - margins[~never_ran]).tolist()
        late += int(ran_late.sum())
        missed += int(never_ran.sum())
        bad = np.zeros(int(numbers[-1] - numbers[0]) + 1, bool)
        bad[numbers[never_ran | ran_late] - numbers[0]] = True
        longest = max(longest, longest_run(bad))
    p50, p99, p999 = np.percentile(busy_ns, (50, 99, 99.9)) if busy_ns else (0, 0, 0)
    return TickReport(
        ticks=len(busy_ns) + missed,
        late=late,
        missed=missed,
        longest_miss_run=longest,
        p50_ns=int(p50),
        p99_ns=int(p99),
        p999_ns=int(p999),
        max_ns=max(busy_ns, default=0),
        period_ns=period_ns,
    )


def longest_run(bad: NDArray[np.bool_]) -> int:
    """Longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], bad, [False]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _count(flags: NDArray[np.uint16], flag: Flag) -> int:
    return int(((flags & flag) > 0).sum())


def text(summary: Summary) -> str:
    """The report for people: a table, the worst session, the ticks, and the verdict."""
    rows = [*zip(*COLUMNS, strict=True), *(_row(s) for s in summary.sessions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (1, 2) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    ticks = summary.ticks
    lines += [
        "",
        f"sessions  {len(summary.sessions)}, failed {summary.failed}; on time: mean "
        f"{_percent(summary.mean_on_time_share)}, worst {_percent(summary.worst_on_time_share)} "
        f"(session {summary.worst_session})",
        f"ticks     {ticks.ticks}, late {ticks.late}, missed {ticks.missed}, longest run of misses "
        f"{ticks.longest_miss_run}; start to done: p50 {_ms(ticks.p50_ns)}, "
        f"p99 {_ms(ticks.p99_ns)}, p99.9 {_ms(ticks.p999_ns)}, max {_ms(ticks.max_ns)} "
        f"of {_ms(ticks.period_ns)} ms",
    ]
    lines += [side_text(one) for one in summary.beside]
    lines += [remark for s in summary.sessions for remark in _remarks(s)]
    if summary.unexplained:
        lines.append(f"ledger    {summary.unexplained} frames are UNEXPLAINED")
    else:
        due = sum(s.due for s in summary.sessions)
        lines.append(f"ledger    every one of {due} due frames is accounted for")
    return "\n".join(lines)


COLUMNS = (
    ("", "call"),
    ("", "caller"),
    ("", "ended"),
    ("", "due"),
    ("", "made"),
    ("on", "time"),
    ("", "late"),
    ("", "filled"),
    ("dis-", "carded"),
    ("con-", "cealed"),
    ("", "missed"),
    ("", "skipped"),
    ("worst", "lag"),
    ("margin", "ms"),
    ("longest", "run"),
)
"""Two header lines each. The last three are the session's worst; run: of misses."""


def _row(s: SessionReport) -> tuple[str, ...]:
    counts = (s.due, s.generated, s.on_time, s.late, s.filled, s.discarded, s.concealed)
    return (
        str(s.session),
        shown(s.caller),
        s.ended,
        *map(str, counts),
        str(s.missed),
        str(s.skipped),
        str(s.worst_lag_frames),
        _ms(s.worst_margin_ns),
        str(s.longest_miss_run),
    )


def shown(name: str) -> str:
    """A caller's name as a terminal or an SVG may show it: whoever calls chooses it."""
    clean = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return clean if len(clean) <= LONGEST_NAME else f"{clean[: LONGEST_NAME - 1]}…"


def _remarks(s: SessionReport) -> list[str]:
    """What is wrong with a call's record, in words; nothing when all is well."""
    found = (
        (s.unrecorded, "due frames without a record"),
        (s.duplicated, "records that are one too many"),
        (s.unreceipted, "frames handed to the line that it never accounted for"),
        (s.in_flight, "frames whose receipts may still come: the call has no end"),
        (s.lost, "frames whose line vanished before it said what was heard"),
        (s.unread, "frames thrown away because the line did not read"),
        (s.foreign_receipts, "receipts that could not be true"),
        (s.records_lost, "records lost on their way to the ledger"),
        (s.damaged, "records that cannot be read: the file is damaged before its end"),
        (s.dropped_bytes, "bytes of torn tail dropped"),
    )
    return [f"session {s.session}: {count} {what}" for count, what in found if count]


def _percent(share: float) -> str:
    """Never rounded up to 100 %."""
    return f"{int(share * 10_000) / 100:.2f} %"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"
