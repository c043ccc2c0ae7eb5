"""The ledger's thread: takes records from the tick and receipts from the lines, writes call files.

The tick thread only copies a record into a preallocated ring and never waits; when the ring is
full the record is lost, counted, and the count lands in the END record of every call it may have
hit, so that a hole is never taken for a quiet call. Files are the business of this thread alone:
a slow or full disk delays it, and nobody else.

It also knows when a session is settled, that is, when every frame that was handed to the line
has come back as a receipt. It does not know why a session ends; the control thread says.
"""

import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance import side_report
from appliance.box_view import Watch
from appliance.call_table import NAME, CallRow, CallTable, Totals
from appliance.clock import NS_PER_S, Clock, wall_ns, wall_stamp
from appliance.frame_ring import Outcome, Receipt, ReceiptRing, Result, ResultRing
from appliance.ledger import (
    BUFFER_UNKNOWN,
    END,
    RECEIPT_VALUES,
    RECORD_BYTES,
    TICK,
    TICK_FIELDS,
    TICK_VALUES,
    Flag,
    Header,
    Kind,
    Settled,
    Why,
    encode_header,
    file_name,
    seal,
    sealed,
)
from appliance.realtime import ask_for_priority
from appliance.record_ring import RecordRing
from appliance.retention import BelievedTime, Keep, remove
from appliance.side_report import SideReport

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""How often rings are emptied: a quarter of an 80 ms tick, so they stay nearly empty."""

EARLY_FRAMES = 256
"""How far a receipt may run ahead of the records: a line fills a late frame before we make it."""

PENDING_LIMIT_BYTES = 8 * 1024 * 1024
"""Records kept per call while its disk refuses them: about half an hour."""

RETENTION_NS = 60 * NS_PER_S
"""How often old calls are looked for."""

ROWS_PENDING = 10_000
"""Rows kept for a table that cannot be written; the files have all that is in them."""

I32 = 2**31 - 1

HANDED_OVER = (Flag.GENERATED | Flag.UNREAD | Flag.FAULT).value
NAMES = TICK.names or ()
SESSION = NAMES.index("session")

MAKE_WAY_S, MAKE_WAY_TIMES = 0.001, 50
"""How long this thread steps aside at a time while the tick gathers or scatters, and how often per
pass: of 160 callers' records a pass takes longer than their tick has to spare."""


@dataclass(slots=True)
class Open:
    """Control -> ledger: a session was admitted; start its file."""

    header: Header
    receipts: ReceiptRing
    results: ResultRing | None


@dataclass(slots=True)
class Settle:
    """Control -> ledger: no frame will follow; close the file once all receipts are in."""

    session: int
    due: int
    why: Why


@dataclass(slots=True)
class Finish:
    """Control -> ledger: close the file now, whatever is missing."""

    session: int
    due: int
    why: Why


@dataclass(slots=True)
class _CallFile:
    header: Header
    receipts: ReceiptRing
    results: ResultRing | None
    lost_at_open: int
    fd: int | None = None
    """None until the file could be made: no folder, no room or no descriptor may be had for now."""
    offset: int = 0
    """Bytes that are safely written; a failed write is repeated from here."""
    pending: bytearray = field(default_factory=bytearray)
    awaited: dict[int, int] = field(default_factory=dict)
    """Frames handed to the line whose receipt has not come, and when they were handed over, ns."""
    playout_ns: int | None = None
    """When frame 0 was heard, or would have been: as the newest receipt has it."""
    totals: Totals = field(default_factory=Totals)
    seen: bytearray = field(default_factory=bytearray)
    """Receipts per frame index; a third one is not believed."""
    records: int = 0
    foreign: int = 0
    dropped: int = 0
    settle: Settle | None = None


class LedgerWriter:
    """All call files of one box. `open`, `settle`, `finish` and `closed` belong to control."""

    def __init__(
        self,
        folder: Path,
        ring: RecordRing,
        clock: Clock,
        keep: Keep | None = None,
        priority: int = 0,
        wall_ns: Callable[[], int] = wall_ns,
    ) -> None:
        """keep: how much of old calls; None: all. priority: of the thread; see `realtime`.

        wall_ns: what tells how old a call is.

        Raises `OSError` when ``folder`` is unusable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "the ledger's folder cannot be written to", str(folder))
        self.closed: deque[int] = deque()
        """Sessions whose file is closed and whose receipt ring is no longer touched."""
        self.write_errors = 0
        self.records_dropped = 0
        """Records given up because their disk refused them for too long."""
        self.watch = Watch()
        """How each open call has fared in its last ticks."""
        self.side: list[SideReport] = []
        """What models beside the voice made of all callers since the start."""
        self.failure: BaseException | None = None
        """What ended the thread before its time; control looks, and ends the box."""
        self._folder = folder
        self._ring = ring
        self._clock = clock
        self._commands: deque[Open | Settle | Finish] = deque()
        self._calls: dict[int, _CallFile] = {}
        self._failing = False
        self._keep = keep or Keep()
        self._priority = priority
        self._kept_ns = clock.now_ns() - RETENTION_NS
        self._wall_ns = wall_ns
        self._time = BelievedTime()
        self._table: CallTable | None = None
        self._rows: list[CallRow] = []
        self._patience = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def open(
        self, header: Header, receipts: ReceiptRing, results: ResultRing | None = None
    ) -> None:
        """Before the tick thread hears of the session. results: of models beside the voice."""
        self._commands.append(Open(header, receipts, results))

    def settle(self, session: int, due: int, why: Why) -> None:
        """After the tick thread has let go of the session."""
        self._commands.append(Settle(session, due, why))

    def finish(self, session: int, due: int, why: Why) -> None:
        """Give up waiting. Does nothing when the session is closed already."""
        self._commands.append(Finish(session, due, why))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is waiting, close what is open, end the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            ask_for_priority(self._priority, "the ledger's thread")
            while not self._stop.wait(POLL_S):
                self.pump()
            self.pump()
        except BaseException as err:
            self.failure = err
        for call in list(self._calls.values()):
            self._close(call)  # no END: the reader says that the box stopped in mid-call
        self._calls.clear()
        self._write_rows()
        if self._table is not None:
            self._table.close()
            self._table = None

    def pump(self) -> None:
        """One pass. Also what tests call, instead of the thread."""
        # Receipts are fetched before records and looked at after them: a receipt can then
        # never overtake the record of the frame it is about.
        self._patience = MAKE_WAY_TIMES
        self._make_way()
        fetched = [(call, _drain(call.receipts)) for call in self._calls.values()]
        closing = self._obey()
        records = self._ring.take()
        if self._calls:
            period_ns = next(iter(self._calls.values())).header.period_ns
            self.watch.add(records, period_ns)
        for record in records.tolist():
            session = record[SESSION]
            if session not in self._calls:
                closing += self._obey()  # it was admitted between the two lines above
            call = self._calls.get(session)
            assert call is not None, f"records of session {session}, which is closed or never was"
            self._enter_record(call, record)
            self._make_way()
        for call, receipts in fetched:
            self._enter_receipts(call, receipts)
            self._make_way()
        for call in self._calls.values():
            self._enter_results(call)
        for command in closing:
            self._close_on(command)
        for call in list(self._calls.values()):
            if call.settle is not None and not call.awaited:
                self._end(call, call.settle.due, call.settle.why)
            else:
                self._flush(call)
        self._write_rows()
        self._remove_old()

    def _obey(self) -> list[Settle | Finish]:
        closing: list[Settle | Finish] = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Open):
                self._open(command)
            else:
                closing.append(command)
        return closing

    def _open(self, command: Open) -> None:
        call = _CallFile(command.header, command.receipts, command.results, self._ring.lost)
        if command.header.beside and not self.side:
            self.side = side_report.begin(command.header.beside)
        call.pending += encode_header(command.header)
        self._calls[command.header.session] = call
        self.watch.begin(command.header.session, command.header.line)
        self._rows.append(call.totals.row(command.header, "", 0, 0, 0))

    def _close_on(self, command: Settle | Finish) -> None:
        call = self._calls.get(command.session)
        if call is None:
            return
        if isinstance(command, Settle):
            call.settle = command
        else:
            self._end(call, command.due, command.why)

    def _make_way(self) -> None:
        """Let go of the interpreter while the tick thread needs it; for so long, if it hangs."""
        while self._ring.is_hurried and self._patience:
            self._patience -= 1
            self._stop.wait(MAKE_WAY_S)

    def _enter_record(self, call: _CallFile, record: tuple[int, ...]) -> None:
        """record: `TICK`, in the order of its names."""
        values = dict(zip(NAMES, record, strict=True))
        flags, index, margin_ns = values["flags"], values["index"], values["margin_ns"]
        period_ns = call.header.period_ns
        at_ns = call.header.t0_ns + (values["tick"] + 1) * period_ns - margin_ns
        was_handed_over = flags & HANDED_OVER == Flag.GENERATED.value
        if was_handed_over and (index >= len(call.seen) or not call.seen[index]):
            call.awaited[index] = at_ns
        values["buffer_us"] = BUFFER_UNKNOWN
        if call.playout_ns is not None:
            left_us = (call.playout_ns + index * period_ns - at_ns) // 1000
            values["buffer_us"] = max(-I32, min(left_us, I32))
        call.totals.add_tick(flags, values["skipped"], margin_ns, values["misses"])
        call.records += 1
        call.pending += sealed(TICK_VALUES.pack(*[values[name] for name in TICK_FIELDS]))

    def _enter_receipts(self, call: _CallFile, receipts: list[Receipt]) -> None:
        rows = []
        for receipt in receipts:
            if not self._believe(call, receipt):
                call.foreign += 1
                continue
            call.totals.add_receipt(receipt, is_first=call.seen[receipt.frame_index] == 1)
            when_ns = call.awaited.pop(receipt.frame_index, None)
            if when_ns is not None and receipt.outcome in (Outcome.DELIVERED, Outcome.LATE):
                before_ns = receipt.frame_index * call.header.period_ns
                call.playout_ns = when_ns + receipt.buffer_ns - before_ns
            rows.append(receipt)
        if rows:
            self._append_receipts(call, rows)

    def _enter_results(self, call: _CallFile) -> None:
        """What models beside the voice made of this caller."""
        found: list[Result] = []
        ring, models = call.results, len(call.header.beside)
        while ring is not None and len(found) < ring.capacity:
            result = ring.get()
            if result is None:
                break
            if side_report.is_sound(result, models):
                found.append(result)
        if not found:
            return
        header = call.header
        records = side_report.side_records(found, header.session, header.generation)
        for number in np.unique(records["model"]).tolist():
            self.side[number].add(records[records["model"] == number])
        call.pending += seal(records)

    def _believe(self, call: _CallFile, receipt: Receipt) -> bool:
        """A line is another process: its numbers are looked at before they are written down."""
        index = receipt.frame_index
        if (receipt.session, receipt.generation) != (call.header.session, call.header.generation):
            return False
        if not 0 <= index < call.records + EARLY_FRAMES or not _is_outcome(receipt.outcome):
            return False
        if index >= len(call.seen):
            call.seen.extend(bytes(index + 1 - len(call.seen)))
        if call.seen[index] >= 2:
            return False
        call.seen[index] += 1
        return True

    def _append_receipts(self, call: _CallFile, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            call.pending += sealed(
                RECEIPT_VALUES.pack(
                    Kind.RECEIPT.value,
                    receipt.outcome,
                    receipt.generation,
                    receipt.session,
                    receipt.frame_index,
                    receipt.at_ns,
                    receipt.buffer_ns,
                    0,
                )
            )

    def _end(self, call: _CallFile, due: int, why: Why) -> None:
        header = call.header
        now_ns = self._clock.now_ns()
        self._enter_receipts(call, _drain(call.receipts))
        self._enter_results(call)
        if why is Why.LOST and call.awaited:
            # Nobody is left to ask. Say so, rather than leave a hole that looks like our fault.
            self._append_receipts(
                call,
                [
                    Receipt(header.session, header.generation, index, Settled.LOST, now_ns, 0)
                    for index in sorted(call.awaited)
                ],
            )
        end = np.zeros(1, END)
        end["kind"] = Kind.END
        end["generation"] = header.generation
        end["session"] = header.session
        end["index"] = due
        end["why"] = why
        end["at_ns"] = now_ns
        end["foreign"] = call.foreign
        end["records_lost"] = self._ring.lost - call.lost_at_open + call.dropped
        call.pending += seal(end)
        self._flush(call)
        self._close(call)
        lost = int(end["records_lost"][0])
        self._rows.append(call.totals.row(header, why.name.lower(), due, lost, call.offset))
        del self._calls[header.session]
        self.watch.end(header.session)
        self.closed.append(header.session)

    def _flush(self, call: _CallFile) -> None:
        """Append what waits. A disk that refuses is reported once and tried again each pass."""
        path = self._folder / file_name(call.header)
        while call.pending:
            try:
                if call.fd is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    call.fd = os.open(path, flags, 0o600)
                # At an offset of ours: a write that failed half-way is overwritten, so that a
                # full disk leaves no torn record in the middle of a file.
                written = os.pwrite(call.fd, call.pending, call.offset)
            except OSError as err:
                self._complain(path, err)
                if len(call.pending) > PENDING_LIMIT_BYTES:
                    surplus = len(call.pending) - PENDING_LIMIT_BYTES
                    surplus += -surplus % RECORD_BYTES
                    del call.pending[-surplus:]
                    call.dropped += surplus // RECORD_BYTES
                    self.records_dropped += surplus // RECORD_BYTES
                return
            call.offset += written
            del call.pending[:written]
            self._failing = False

    def _close(self, call: _CallFile) -> None:
        """Let go of the file. What could not be written by now never will be."""
        self.records_dropped += len(call.pending) // RECORD_BYTES
        if call.fd is not None:
            os.close(call.fd)

    def _write_rows(self) -> None:
        """Bring the table up to date; what cannot be written now is tried again next time."""
        if not self._rows:
            return
        try:
            if self._table is None:
                self._table = CallTable(self._folder, wall_stamp())
                if self._table.set_aside is not None:
                    logger.error(
                        "ledger: the table of calls was damaged: now %s. The calls' files "
                        "are whole",
                        self._table.set_aside,
                    )
            self._table.write(self._rows)
            self._rows.clear()
        except sqlite3.Error as err:
            self._complain(self._folder / NAME, OSError(0, str(err)))
            del self._rows[:-ROWS_PENDING]

    def _remove_old(self) -> None:
        """Once in a while: calls beyond what is to be kept go, oldest first."""
        now_ns = self._clock.now_ns()
        if self._keep == Keep() or now_ns - self._kept_ns < RETENTION_NS:
            return
        self._kept_ns = now_ns
        is_on = {file_name(call.header) for call in self._calls.values()}
        try:
            gone = remove(self._folder, self._keep, is_on, self._time, self._wall_ns(), now_ns)
            if doubt := self._time.doubt():
                logger.warning("ledger: %s", doubt)
            if gone:
                logger.info("ledger: %d old calls removed, from %s on", len(gone), gone[0])
                if self._table is not None:
                    self._table.mark_removed(gone, wall_stamp())
        except (OSError, sqlite3.Error) as err:
            self._complain(self._folder, err if isinstance(err, OSError) else OSError(0, str(err)))

    def _complain(self, path: Path, err: OSError) -> None:
        self.write_errors += 1
        if not self._failing:
            logger.error(
                "ledger: %s cannot be written: %s. Calls go on; free space in %s",
                path,
                err.strerror or err,
                self._folder,
            )
        self._failing = True


def _drain(ring: ReceiptRing) -> list[Receipt]:
    """At most a ring full, so that a line that never stops cannot keep us here."""
    taken: list[Receipt] = []
    while len(taken) < ring.capacity and (receipt := ring.get()) is not None:
        taken.append(receipt)
    return taken


def _is_outcome(value: int) -> bool:
    return any(value == outcome.value for outcome in Outcome)
