"""One row per call, in SQLite beside the call files: what a list of calls shows.

The files are the record; the table is an index of them that can be read without reading them
all. It decides the columns and how they add up while a call goes on. A row is written when a call
begins and again when it is over, so a call without an end was on when its box stopped, or is
still on. One thread uses it; a table that cannot be written costs a line in the log, never a call.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from appliance.frame_ring import Receipt
from appliance.ledger import Call, Flag, Header, Settled, file_name
from appliance.report import summarise

NAME = "calls.sqlite"

VERSION = 1
"""PRAGMA user_version; a table of another version is set aside and begun anew."""

ROWS_LIMIT = 200_000
"""Rows kept, newest first, also of calls whose files are gone: about 60 MB."""

BUSY_MS = 200
"""How long a write waits for a reader of the table: the ledger's thread must not fall behind."""


class CallRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call at a glance. Counts are frames, as in `report.SessionReport`."""

    file: str
    session: int
    started: str
    """UTC, sortable."""
    ended: str
    """How, in the words of `ledger.Why`; empty: still on, or the box was killed."""
    line: str
    caller: str
    model: str
    checkpoint_sha256: str
    due: int = 0
    on_time: int = 0
    late: int = 0
    filled: int = 0
    discarded: int = 0
    missed: int = 0
    concealed: int = 0
    skipped: int = 0
    worst_margin_ns: int = 0
    longest_miss_run: int = 0
    records_lost: int = 0
    bytes: int = 0
    """Size of the file when the call ended."""
    removed: str = ""
    """When retention removed the file; empty: it is there."""

    @property
    def on_time_share(self) -> float:
        """As `report.SessionReport.on_time_share`, for a call that did not fail."""
        owed = self.due - self.discarded
        return self.on_time / owed if owed > 0 else 1.0


COLUMNS = tuple(CallRow.__struct_fields__)
_TEXT = frozenset(
    ("file", "started", "ended", "line", "caller", "model", "checkpoint_sha256", "removed")
)


MISSED, CONCEALED = Flag.MISSED.value, Flag.CONCEALED.value


@dataclass(slots=True)
class Totals:
    """What a call adds up to while it goes on; the ledger's thread feeds it."""

    missed: int = 0
    concealed: int = 0
    skipped: int = 0
    worst_margin_ns: int | None = None
    longest_miss_run: int = 0
    outcomes: dict[int, int] = field(default_factory=dict)
    """First outcomes by `Settled`."""

    def add_tick(self, flags: int, skipped: int, margin_ns: int, misses: int) -> None:
        """One record of this call, `ledger.TICK`."""
        self.missed += bool(flags & MISSED)
        self.concealed += bool(flags & CONCEALED)
        self.skipped += skipped
        if self.worst_margin_ns is None or margin_ns < self.worst_margin_ns:
            self.worst_margin_ns = margin_ns
        self.longest_miss_run = max(self.longest_miss_run, misses)

    def add_receipt(self, receipt: Receipt, *, is_first: bool) -> None:
        """is_first: of its frame; a frame's first outcome is what the caller heard."""
        if is_first:
            self.outcomes[receipt.outcome] = self.outcomes.get(receipt.outcome, 0) + 1

    def row(self, header: Header, ended: str, due: int, records_lost: int, size: int) -> CallRow:
        """The call's row. due: frames that were due, by the tick loop's count."""
        return CallRow(
            file=file_name(header),
            session=header.session,
            started=header.started,
            ended=ended,
            line=header.line,
            caller=header.caller,
            model=header.model,
            checkpoint_sha256=header.checkpoint_sha256,
            due=due,
            on_time=self.outcomes.get(Settled.DELIVERED, 0),
            late=self.outcomes.get(Settled.LATE, 0),
            filled=self.outcomes.get(Settled.FILLED, 0),
            discarded=self.outcomes.get(Settled.DISCARDED, 0),
            missed=self.missed,
            concealed=self.concealed,
            skipped=self.skipped,
            worst_margin_ns=self.worst_margin_ns or 0,
            longest_miss_run=self.longest_miss_run,
            records_lost=records_lost,
            bytes=size,
        )


class CallTable:
    """The table of one ledger folder. Raises `sqlite3.Error`; one thread at a time."""

    def __init__(self, folder: Path, stamp: str) -> None:
        """Open or make ``folder``/calls.sqlite. A broken one is renamed with ``stamp``."""
        self.path = folder / NAME
        self.set_aside: Path | None = None
        """Where a table went that could not be read or has another version."""
        try:
            self._open()
        except sqlite3.DatabaseError as err:
            if isinstance(err, sqlite3.OperationalError):
                raise  # no room, no permission, locked: not the file's fault
            self.set_aside = self.path.with_name(f"{NAME}.{stamp}")
            self.path.rename(self.set_aside)
            for ending in ("-wal", "-shm"):
                self.path.with_name(NAME + ending).unlink(missing_ok=True)
            self._open()

    def _open(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            found = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if found not in (0, VERSION):
                raise sqlite3.DatabaseError(f"version {found}; this program writes {VERSION}")
            # A write-ahead log: somebody who lists calls never makes the ledger wait.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            columns = ", ".join(
                f"{c} {'TEXT' if c in _TEXT else 'INTEGER'} NOT NULL" for c in COLUMNS
            )
            connection.execute(f"CREATE TABLE IF NOT EXISTS calls ({columns}, PRIMARY KEY (file))")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def write(self, rows: Sequence[CallRow]) -> None:
        """Add or replace ``rows``, all or none."""
        marks = ", ".join("?" * len(COLUMNS))
        values = [tuple(getattr(row, name) for name in COLUMNS) for row in rows]
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany(f"INSERT OR REPLACE INTO calls VALUES ({marks})", values)

    def mark_removed(self, files: Sequence[str], stamp: str) -> None:
        """``files`` are gone from the disk; rows beyond `ROWS_LIMIT` go, too."""
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "UPDATE calls SET removed = ? WHERE file = ?", [(stamp, file) for file in files]
            )
            self._connection.execute(
                "DELETE FROM calls WHERE file IN (SELECT file FROM calls ORDER BY file DESC "
                "LIMIT -1 OFFSET ?)",
                (ROWS_LIMIT,),
            )

    def close(self) -> None:
        self._connection.close()


def read_rows(folder: Path, day: str = "") -> list[CallRow]:
    """All rows of ``folder``, oldest first; none when there is no table. Raises `sqlite3.Error`.

    day: YYYYMMDD, only calls that started on it (UTC).
    """
    path = folder / NAME
    if not path.exists():
        return []
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute(f"PRAGMA busy_timeout = {10 * BUSY_MS}")
        found = connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM calls WHERE started LIKE ? || '%' ORDER BY file",
            (day,),
        ).fetchall()
    finally:
        connection.close()
    return [_row(values) for values in found]


def _row(values: tuple[Any, ...]) -> CallRow:
    return msgspec.convert(dict(zip(COLUMNS, values, strict=True)), CallRow)


def row_of(call: Call) -> CallRow:
    """The row of a call that was read back from its file, for files the table does not know."""
    (session,) = summarise([call]).sessions
    header = call.header
    return CallRow(
        file=call.path.name,
        session=header.session,
        started=header.started,
        ended="" if call.end is None else session.ended,
        line=header.line,
        caller=header.caller,
        model=header.model,
        checkpoint_sha256=header.checkpoint_sha256,
        due=session.due,
        on_time=session.on_time,
        late=session.late,
        filled=session.filled,
        discarded=session.discarded,
        missed=session.missed,
        concealed=session.concealed,
        skipped=session.skipped,
        worst_margin_ns=session.worst_margin_ns,
        longest_miss_run=int(call.ticks["misses"].max()) if len(call.ticks) else 0,
        records_lost=session.records_lost,
        bytes=call.path.stat().st_size if call.path.exists() else 0,
    )
