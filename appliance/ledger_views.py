"""What the ledger verb shows: a list of calls, one call frame by frame, a table for others.

Decides which calls are meant (a day, a number, the worst) and how they are written as text, CSV or
JSON. Reads files and the table of calls through `ledger` and `call_table`; prints nothing.
"""

import csv
import io
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance import ledger
from appliance.call_table import CallRow, read_rows, row_of
from appliance.clock import NS_PER_S, wall_stamp
from appliance.ledger import BUFFER_UNKNOWN, SUFFIX, Call, Flag, LedgerError, Settled
from appliance.report import SessionReport, Summary, first_outcomes, shown

DAY_S = 86_400

FRAME_COLUMNS = (
    *("file", "session", "generation", "frame", "tick", "second"),
    *("heard", "concealed", "generated", "warming", "missed", "late", "unread", "fault", "last"),
    *("bad_input", "outcome", "batch", "slot", "step_us", "margin_us", "buffer_us"),
    *("receipt_buffer_us", "lag", "skipped", "misses", "text"),
)
"""One line per due frame of a call: the tick's record joined with the line's receipt."""


class ViewError(ValueError):
    """The command line names a day or a call that is none; the operator's to fix."""


def day_of(words: str) -> str:
    """``today``, ``yesterday``, 2026-01-31 or 20260131 as YYYYMMDD, UTC. Raises `ViewError`."""
    if words == "today":
        return wall_stamp()[:8]
    if words == "yesterday":
        return wall_stamp(ago_s=DAY_S)[:8]
    if re.fullmatch(r"\d{4}-?\d{2}-?\d{2}", words):
        return words.replace("-", "")
    raise ViewError(f"--on {words}: expected today, yesterday or a date such as 2026-01-31 (UTC)")


def rows(folder: Path, day: str = "", unreadable: list[LedgerError] | None = None) -> list[CallRow]:
    """Every call of ``folder``: from the table, and from the files it does not know.

    day: YYYYMMDD, or empty for all. unreadable: takes what is wrong with damaged files.
    """
    try:
        found = {row.file: row for row in read_rows(folder, day)}
    except sqlite3.Error as err:
        found = {}
        if unreadable is not None:
            unreadable.append(LedgerError(f"{folder}: the table of calls cannot be read: {err}"))
    for path in sorted(folder.glob(f"{day}*{SUFFIX}")):
        row = found.get(path.name)
        if row is None:
            try:
                found[path.name] = row_of(ledger.read_call(path))
            except LedgerError as err:
                if unreadable is not None:
                    unreadable.append(err)
    return [found[name] for name in sorted(found)]


def paths(folder: Path, day: str = "", call: str = "") -> list[Path]:
    """The files that are meant, oldest first. Raises `ViewError` when there is none.

    call: a session's number, or the beginning of a file's name. Numbers begin anew with every
    box, so a number may name several calls; a day narrows it down.
    """
    if not folder.is_dir():
        return [folder]
    found = sorted(folder.glob(f"{day}*{SUFFIX}"))
    if call.isdigit() and len(call) < 8:
        found = [path for path in found if path.stem.endswith(f"-{int(call):06d}")]
    elif call:
        found = [path for path in found if path.name.startswith(call)]
    if not found:
        what = f"call {call}" if call else "call"
        when = f" of {day}" if day else ""
        raise ViewError(f"{folder} holds no {what}{when}. What it holds: --list")
    return found


def worst(summary: Summary, count: int) -> list[SessionReport]:
    """The ``count`` worst sessions: failed first, then by what their callers missed."""
    ordered = sorted(
        summary.sessions, key=lambda s: (not s.failed, s.on_time_share, s.worst_margin_ns)
    )
    return ordered[:count]


LIST_COLUMNS = (
    *("started", "call", "line", "caller", "ended", "due", "on time", "late", "filled"),
    *("missed", "concealed", "margin ms", "longest run"),
)


def list_text(found: Sequence[CallRow]) -> list[str]:
    """A table, one line per call, and how many there are."""
    table = [LIST_COLUMNS, *(_list_row(row) for row in found)]
    widths = [max(len(row[i]) for row in table) for i in range(len(LIST_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 2, 3, 4) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    gone = sum(bool(row.removed) for row in found)
    lines.append(f"{len(found)} calls" + (f", the files of {gone} removed" if gone else ""))
    return lines


def _list_row(row: CallRow) -> tuple[str, ...]:
    # The table has a call's sums from its end on; until then its file has them.
    counts = (row.due, row.on_time, row.late, row.filled, row.missed, row.concealed)
    worst_ms = f"{row.worst_margin_ns / 1e6:.1f}"
    sums = (*map(str, counts), worst_ms, str(row.longest_miss_run))
    return (
        row.started,
        str(row.session),
        row.line,
        shown(row.caller),
        (row.ended or "unfinished") + (" (removed)" if row.removed else ""),
        *(sums if row.ended or any(counts) else ("-",) * len(sums)),
    )


def call_text(call: Call) -> list[str]:
    """One call: what it was, and every stretch of frames that were not as they should be."""
    header = call.header
    lines = [
        f"call {header.session} of {header.started}, generation {header.generation}, line "
        f"{header.line}, caller {shown(header.caller)}",
        f"{header.model}, checkpoint {header.checkpoint_sha256[:12]}, settings "
        f"{header.settings or 'as the bundle has them'}",
    ]
    stretches = list(_stretches(call))
    for first, last, what in stretches:
        frames = f"frame {first}" if first == last else f"frames {first} to {last}"
        start_s = first * header.period_ns / NS_PER_S
        margins = call.ticks["margin_ns"][
            (call.ticks["index"] >= first) & (call.ticks["index"] <= last)
        ]
        worst_ms = f", worst margin {margins.min() / 1e6:.1f} ms" if len(margins) else ""
        lines.append(f"  {start_s:9.2f} s  {frames}: {what}{worst_ms}")
    if not stretches:
        lines.append("  every frame was heard, made in time and delivered in time")
    return lines


def _stretches(call: Call) -> Iterator[tuple[int, int, str]]:
    """Runs of frames with the same trouble: first and last frame, and what it was."""
    frames = int(call.ticks["index"].max()) + 1 if len(call.ticks) else 0
    outcomes = first_outcomes(call, frames)
    begun: tuple[int, int, str] | None = None
    for record in call.ticks:
        index = int(record["index"])
        what = _trouble(int(record["flags"]), int(outcomes[index]), int(record["skipped"]))
        if begun is not None and begun[2] == what and begun[1] == index - 1:
            begun = (begun[0], index, what)
            continue
        if begun is not None and begun[2]:
            yield begun
        begun = (index, index, what)
    if begun is not None and begun[2]:
        yield begun


def _trouble(flags: int, outcome: int, skipped: int) -> str:
    """Empty when nothing is to be said about a frame."""
    said = []
    if flags & Flag.RESET:
        said.append("the model began anew")
    if flags & Flag.PRIMING:
        said.append("never made: the model's prompt was fed again after a reset")
    if flags & Flag.MISSED:
        said.append("never made: the tick was dropped after an overrun")
    if flags & Flag.FAULT:
        said.append("the session's row was broken")
    if flags & Flag.LATE:
        said.append("made late")
    if flags & Flag.UNREAD:
        said.append("thrown away: the line did not read")
    if flags & Flag.BAD_INPUT:
        said.append("the caller sent NaN, the model heard silence")
    elif flags & Flag.CONCEALED:
        said.append("the caller's frame was missing, the model heard silence")
    if skipped:
        said.append(f"{skipped} of the caller's frames dropped unheard before it")
    if outcome == Settled.FILLED:
        said.append("the caller heard silence instead")
    elif outcome == Settled.LATE:
        said.append("the playout buffer covered it")
    elif outcome == Settled.LOST:
        said.append("the line vanished before it said")
    elif outcome == Settled.DISCARDED:
        said.append("not heard: the caller had hung up")
    elif outcome == 0 and flags & Flag.GENERATED and not flags & Flag.UNREAD:
        said.append("NO RECEIPT")
    return "; ".join(said)


def frames_csv(calls: Sequence[Call]) -> Iterator[str]:
    """The joined records of ``calls`` as CSV, a header first; text in chunks of one call."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FRAME_COLUMNS)
    for call in calls:
        if len(call.ticks):
            writer.writerows(_frame_rows(call))
        yield out.getvalue()
        out.seek(0)
        out.truncate()
    yield out.getvalue()


def _frame_rows(call: Call) -> Iterator[tuple[object, ...]]:
    ticks, header = call.ticks, call.header
    frames = int(ticks["index"].max()) + 1
    outcomes = first_outcomes(call, frames)
    buffers = _receipt_buffers(call, frames)
    for record in ticks:
        index, flags = int(record["index"]), int(record["flags"])
        buffer_us = int(record["buffer_us"])
        yield (
            call.path.name,
            header.session,
            int(record["generation"]),
            index,
            int(record["tick"]),
            f"{index * header.period_ns / NS_PER_S:.3f}",
            *(
                int(bool(flags & flag))
                for flag in (
                    *(Flag.HEARD, Flag.CONCEALED, Flag.GENERATED, Flag.WARMING, Flag.MISSED),
                    *(Flag.LATE, Flag.UNREAD, Flag.FAULT, Flag.LAST, Flag.BAD_INPUT),
                )
            ),
            Settled(int(outcomes[index])).name.lower() if outcomes[index] else "",
            int(record["batch"]),
            int(record["slot"]),
            int(record["step_ns"]) // 1000,
            int(record["margin_ns"]) // 1000,
            "" if buffer_us == BUFFER_UNKNOWN else buffer_us,
            "" if buffers[index] == BUFFER_UNKNOWN else int(buffers[index]),
            int(record["lag"]),
            int(record["skipped"]),
            int(record["misses"]),
            int(record["text"]),
        )


def _receipt_buffers(call: Call, frames: int) -> NDArray[np.int64]:
    """(frames,) playout buffer in µs as each frame's first receipt has it, or BUFFER_UNKNOWN."""
    buffers = np.full(frames, BUFFER_UNKNOWN, np.int64)
    receipts = call.receipts[call.receipts["index"] < frames][::-1]
    buffers[receipts["index"]] = receipts["buffer_ns"] // 1000
    return buffers


def rows_json(found: Sequence[CallRow]) -> str:
    return msgspec.json.format(msgspec.json.encode(list(found))).decode()
