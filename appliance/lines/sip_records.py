"""One row per telephone call, in SQLite: who called, when, for how long, and how it was.

Decides the columns. A row is written when a call begins and again when it is over, so a row
without an end is a call that is on, or whose process was killed; the next process says so. A
thread of its own writes, so that a slow disk is nobody's gap; what it cannot write costs a line
in the log, never a call.
"""

import contextlib
import csv
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from appliance.clock import wall_stamp

logger = logging.getLogger(__name__)

VERSION = 1
"""PRAGMA user_version; a table of another version is set aside and begun anew."""

ROWS_LIMIT = 500_000
"""Rows kept, newest first: about 200 MB."""

LOST = "the line's process ended"


class Row(msgspec.Struct, frozen=True):
    """A call at a glance."""

    id: str
    """Of this call, in this table; ours."""
    began: str
    """UTC, when the INVITE came."""
    line: str
    account: str
    caller: str
    call_id: str
    """The peer's, for comparing with its own records."""
    source: str = ""
    session: int = 0
    """The box's, for its ledger; 0: never admitted."""
    waited_ms: int = 0
    """From the INVITE until the call was answered, or ended without."""
    talked_ms: int = 0
    held_ms: int = 0
    ended: str = ""
    """UTC; empty: it is on."""
    why: str = ""
    digits: str = ""
    frames: int = 0
    """Handed to the model."""
    whole: int = 0
    """Of these, nothing but the caller's audio."""
    concealed_ms: int = 0
    noise_ms: int = 0
    delivered: int = 0
    late: int = 0
    filled: int = 0
    discarded: int = 0
    underruns: int = 0
    rx_packets: int = 0
    rx_lost: int = 0
    tx_packets: int = 0
    tx_lost: int = 0
    rtt_ms: float = 0.0
    figures: str = ""
    """All of `sip_figures.Figures`, as JSON."""


COLUMNS = Row.__struct_fields__


class Records:
    """The table at one path. `write` may be called from one thread; nothing waits for the disk."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` or `sqlite3.Error` if there can be no table."""
        self._path = path
        self._queue: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self.failures = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open(path) as table:
            lost = table.execute(
                "UPDATE calls SET ended = ?, why = ? WHERE ended = ''", (wall_stamp(), LOST)
            )
            self.lost = lost.rowcount
            """Calls that were on when the process before this one ended."""
            table.commit()
        self._thread = threading.Thread(target=self._run, name="sip-records", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Add a call, or what has become of it."""
        self._queue.put(row)

    def close(self) -> None:
        """Return when everything has been written."""
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        written = 0
        while (row := self._queue.get()) is not None:
            rows = [row]
            last = False
            with contextlib.suppress(queue.Empty):
                while len(rows) < 100:
                    more = self._queue.get_nowait()
                    if more is None:
                        last = True
                        break
                    rows.append(more)
            try:
                with _open(self._path) as table:
                    _insert(table, rows)
                    written += len(rows)
                    if written >= 1000:
                        written = 0
                        _trim(table)
                    table.commit()
            except (OSError, sqlite3.Error) as err:
                self.failures += len(rows)
                logger.warning("%s: %d rows could not be written: %s", self._path, len(rows), err)
            if last:
                return


def read(path: Path, since: str = "") -> list[Row]:
    """All calls that began at or after ``since`` (a prefix of UTC), oldest first.

    Raises `OSError` or `sqlite3.Error`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: no telephone line has run with it")
    with _open(path) as table:
        found = table.execute(
            f"SELECT {', '.join(COLUMNS)} FROM calls WHERE began >= ? ORDER BY began", (since,)
        )
        return [Row(*values) for values in found]


def write_csv(rows: list[Row], out: TextIO) -> None:
    """All columns, after a head line. What a spreadsheet would take for a formula is quoted."""
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])


def _cell(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


@contextlib.contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    table = sqlite3.connect(path, timeout=5)
    try:
        version = table.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            table.close()
            aside = path.with_suffix(f".v{version}{path.suffix}")
            path.rename(aside)
            logger.warning("%s has version %d and was moved to %s", path, version, aside)
            table = sqlite3.connect(path, timeout=5)
            version = 0
        if version == 0:
            table.execute("PRAGMA journal_mode = WAL")
            columns = ", ".join(f"{name} {_kind(name)}" for name in COLUMNS)
            table.execute(f"CREATE TABLE IF NOT EXISTS calls ({columns}, PRIMARY KEY (id))")
            table.execute("CREATE INDEX IF NOT EXISTS by_time ON calls (began)")
            table.execute(f"PRAGMA user_version = {VERSION}")
            table.commit()
        yield table
    finally:
        table.close()


def _kind(name: str) -> str:
    kind = Row.__annotations__[name]
    return {int: "INTEGER NOT NULL", float: "REAL NOT NULL"}.get(kind, "TEXT NOT NULL")


def _insert(table: sqlite3.Connection, rows: list[Row]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    values = [tuple(getattr(row, name) for name in COLUMNS) for row in rows]
    table.executemany(f"INSERT OR REPLACE INTO calls VALUES ({marks})", values)


def _trim(table: sqlite3.Connection) -> None:
    table.execute(
        "DELETE FROM calls WHERE rowid IN "
        "(SELECT rowid FROM calls ORDER BY began DESC LIMIT -1 OFFSET ?)",
        (ROWS_LIMIT,),
    )
