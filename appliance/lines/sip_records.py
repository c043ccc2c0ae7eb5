"""One row per telephone call, in SQLite: who called, when, for how long, and how it was.

Decides the columns. A row is written when a call begins and again when it is over, so a row
without an end is a call that is on, or whose process was killed; the next process says so. A
thread of its own writes, so that a slow disk is nobody's gap; what it cannot write waits, and costs
lines in the log, never a call.
"""

import contextlib
import csv
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from appliance.clock import NS_PER_MS, wall_stamp
from appliance.lines.sip_call import PhoneCall

logger = logging.getLogger(__name__)

VERSION = 3
"""PRAGMA user_version; a table of an older version gets the columns it lacks, one of a newer is set
aside and begun anew."""

ROWS_LIMIT = 500_000
"""Rows kept, newest first: about 200 MB."""

PATIENCE_S = 5.0
"""How long another program's lock on the table is waited for, such as a backup's."""
AGAIN_S = 5.0
"""And after how long what could not be written is tried again."""

AT_ONCE, MOST_KEPT = 100, 10_000
"""Rows written together; rows that wait for a table that cannot be written."""

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
    """The caller's address, as the peer says; not to be trusted."""
    call_id: str
    """The peer's, for comparing with its own records."""
    source: str = ""
    number: str = ""
    """The caller's number or name: that which the peer vouches for, or else the one in `caller`,
    without the rest."""
    name: str = ""
    """What the peer says the caller is called."""
    called: str = ""
    """The number or name the caller dialled; of a trunk, one of many."""
    diverted: str = ""
    """And of a call that was diverted to us, the one that it was diverted from."""
    voice: str = ""
    """The account's, which the model spoke with."""
    codec: str = ""
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
    """Keys the caller pressed."""
    transfer_to: str = ""
    """Where the caller was to be sent on, the last time; empty: nowhere."""
    transfer_by: str = ""
    transfer: str = ""
    """What the peer said became of it."""
    recording: str = ""
    """Path of its file; empty: there is none."""
    recorded_ms: int = 0
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
    rx_jitter_ms: float = 0.0
    """Of the packets that came, as RTCP has it; and of ours, as the peer reported."""
    tx_jitter_ms: float = 0.0
    rx_late: int = 0
    """Packets that came after their time."""
    rx_disordered: int = 0
    figures: str = ""
    """All of `sip_figures.Figures`, as JSON."""


COLUMNS = Row.__struct_fields__


def row_at_end(row: Row, call: PhoneCall, now_ns: int) -> Row:
    """What has become of a call. row: as it began."""
    figures, stats, sent_on = call.figures(), call.stats, call.sent_on
    ended_ns = call.ended_ns or now_ns
    answered_ns = call.talked_from_ns
    waited_ns = (answered_ns or ended_ns) - call.began_ns
    talked_ns = 0 if answered_ns is None else ended_ns - answered_ns
    return msgspec.structs.replace(
        row,
        codec=call.codec if answered_ns is not None else "",
        session=figures.session,
        waited_ms=waited_ns // NS_PER_MS,
        talked_ms=talked_ns // NS_PER_MS,
        held_ms=figures.held_ms,
        ended=wall_stamp(),
        why=call.why,
        digits=figures.digits,
        transfer_to=sent_on.target,
        transfer_by=sent_on.by,
        transfer=sent_on.outcome,
        recording="" if call.tape is None else str(call.tape.path),
        frames=figures.frames,
        whole=figures.whole,
        concealed_ms=figures.concealed_ms,
        noise_ms=figures.noise_ms,
        delivered=figures.delivered,
        late=figures.late,
        filled=figures.filled,
        discarded=figures.discarded,
        underruns=figures.underruns,
        rx_packets=int(stats.get("rx_packets", 0)),
        rx_lost=int(stats.get("jbuf_lost", 0)),
        tx_packets=int(stats.get("tx_packets", 0)),
        tx_lost=int(stats.get("rtcp_tx_lost", 0)),
        rtt_ms=stats.get("rtcp_rtt_us", 0) / 1000,
        rx_jitter_ms=stats.get("rtcp_rx_jitter_us", 0) / 1000,
        tx_jitter_ms=stats.get("rtcp_tx_jitter_us", 0) / 1000,
        rx_late=int(stats.get("jbuf_late", 0)),
        rx_disordered=int(stats.get("jbuf_oos", 0)),
        figures=msgspec.json.encode(figures).decode(),
    )


class _Lost(NamedTuple):
    """Calls that ended with the process before this one; see `Records.end_lost`."""

    line: str
    run: str


class Records:
    """The table at one path. `write` may be called from one thread; nothing waits for the disk."""

    def __init__(
        self, path: Path, patience_s: float = PATIENCE_S, again_s: float = AGAIN_S
    ) -> None:
        """patience_s: how long to wait for somebody else who writes to it. again_s: and until then.

        Raises `OSError` or `sqlite3.Error` if there can be no table. One that is broken is set
        aside, and one that is locked is written to later: neither is worth a call.
        """
        self._path = path
        self._patience_s, self._again_s = patience_s, again_s
        self._queue: queue.SimpleQueue[Row | _Lost | None] = queue.SimpleQueue()
        self.failures = 0
        """Rows that were never written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _open(path, patience_s):
                pass
        except sqlite3.DatabaseError as err:
            if err.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                logger.warning("%s: %s; calls are written down once it is free", path, err)
            elif err.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                aside = path.with_suffix(f".broken-{wall_stamp()}{path.suffix}")
                path.rename(aside)
                logger.warning("%s: %s; it was moved to %s and begun anew", path, err, aside)
                with _open(path, patience_s):
                    pass
            else:
                raise
        self._thread = threading.Thread(target=self._run, name="sip-records", daemon=True)
        self._thread.start()

    def end_lost(self, line: str, run: str) -> None:
        """Calls of ``line`` that seem to be on are not, unless their ids begin with ``run``.

        To be said once nobody else can be that line: another one may write to the same table.
        """
        self._queue.put(_Lost(line, run))

    def write(self, row: Row) -> None:
        """Add a call, or what has become of it."""
        self._queue.put(row)

    def close(self) -> None:
        """Return when everything has been written."""
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        rows: list[Row] = []
        lost: list[_Lost] = []
        written, last = 0, False
        while not last:
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=self._again_s if rows or lost else None)
                while item is not None:
                    if isinstance(item, Row):
                        rows.append(item)
                    else:
                        lost.append(item)
                    if len(rows) >= AT_ONCE:
                        break
                    item = self._queue.get_nowait()
                last = item is None
            if not rows and not lost:
                continue
            try:
                with _open(self._path, self._patience_s) as table:
                    ended = sum(_end_lost(table, one) for one in lost)
                    _insert(table, rows)
                    written += len(rows)
                    if written >= 1000:
                        written = 0
                        _trim(table)
                    table.commit()
                rows, lost = [], []
            except (OSError, sqlite3.Error) as err:
                logger.warning(
                    "%s: %d rows could not be written so far: %s", self._path, len(rows), err
                )
                self.failures += len(rows[:-MOST_KEPT])
                rows = rows[-MOST_KEPT:]
                continue
            if ended:
                logger.warning("%d calls were on when %s", ended, LOST)
        self.failures += len(rows)


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
def _open(path: Path, patience_s: float = PATIENCE_S) -> Iterator[sqlite3.Connection]:
    table = sqlite3.connect(path, timeout=patience_s)
    try:
        version = table.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            table.close()
            aside = path.with_suffix(f".v{version}{path.suffix}")
            path.rename(aside)
            logger.warning("%s has version %d and was moved to %s", path, version, aside)
            table = sqlite3.connect(path, timeout=patience_s)
            version = 0
        if 0 < version < VERSION:
            have = {row[1] for row in table.execute("PRAGMA table_info (calls)")}
            for name in COLUMNS:
                if name not in have:
                    default = {int: "0", float: "0.0"}.get(Row.__annotations__[name], "''")
                    table.execute(
                        f"ALTER TABLE calls ADD COLUMN {name} {_kind(name)} DEFAULT {default}"
                    )
            table.execute(f"PRAGMA user_version = {VERSION}")
            table.commit()
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


def _end_lost(table: sqlite3.Connection, lost: _Lost) -> int:
    """How many there were."""
    return table.execute(
        "UPDATE calls SET ended = ?, why = ? WHERE ended = '' AND line = ? AND id NOT LIKE ?",
        (wall_stamp(), LOST, lost.line, f"{lost.run}-%"),
    ).rowcount


def _kind(name: str) -> str:
    kind = Row.__annotations__[name]
    return {int: "INTEGER NOT NULL", float: "REAL NOT NULL"}.get(kind, "TEXT NOT NULL")


def _insert(table: sqlite3.Connection, rows: list[Row]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    values = [tuple(getattr(row, name) for name in COLUMNS) for row in rows]
    # By name: a table that was given columns later has them in another order.
    names = ", ".join(COLUMNS)
    table.executemany(f"INSERT OR REPLACE INTO calls ({names}) VALUES ({marks})", values)


def _trim(table: sqlite3.Connection) -> None:
    table.execute(
        "DELETE FROM calls WHERE rowid IN "
        "(SELECT rowid FROM calls ORDER BY began DESC LIMIT -1 OFFSET ?)",
        (ROWS_LIMIT,),
    )
