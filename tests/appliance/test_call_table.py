"""The table of calls: written by the ledger, readable while it is, set aside when broken."""

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from appliance import call_table, ledger
from appliance.call_table import NAME, CallRow, CallTable, Totals, read_rows, row_of
from appliance.frame_ring import Outcome, Receipt
from appliance.ledger import Flag, Why, read_call
from tests.appliance.test_ledger import HEARD, Desk, header


def row(number: int, day: str = "20260131", **fields: Any) -> CallRow:
    name = f"{day}T120000.000Z-{number:06d}.call"
    return CallRow(name, number, f"{day}T120000.000Z", "left", "file", "Ann", "echo", "0", **fields)


def test_rows_are_read_back_in_order_and_by_day(tmp_path: Path) -> None:
    table = CallTable(tmp_path, "now")
    late, early = row(2, "20260201", due=9), row(1, worst_margin_ns=-5)
    table.write([late, early])
    assert read_rows(tmp_path) == [early, late]
    assert read_rows(tmp_path, "20260201") == [late]
    table.write([row(1, due=7)])  # the same call again: replaced
    assert [r.due for r in read_rows(tmp_path)] == [7, 9]
    table.close()
    assert read_rows(tmp_path / "nowhere") == []


def test_a_reader_never_makes_the_writer_wait(tmp_path: Path) -> None:
    table = CallTable(tmp_path, "now")
    table.write([row(1)])
    reader = sqlite3.connect(tmp_path / NAME)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM calls").fetchone() == (1,)
    table.write([row(2)])
    assert reader.execute("SELECT count(*) FROM calls").fetchone() == (1,)
    reader.close()
    assert len(read_rows(tmp_path)) == 2
    table.close()


@pytest.mark.parametrize("broken", ["garbage", "another version"])
def test_a_broken_table_is_set_aside_not_overwritten(tmp_path: Path, broken: str) -> None:
    path = tmp_path / NAME
    if broken == "garbage":
        path.write_bytes(b"no database at all" * 100)
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    before = path.read_bytes()
    table = CallTable(tmp_path, "20260131")
    assert table.set_aside is not None
    assert table.set_aside.read_bytes() == before
    table.write([row(1)])
    assert read_rows(tmp_path) == [row(1)]
    table.close()


def test_rows_of_removed_files_stay_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_table, "ROWS_LIMIT", 3)
    table = CallTable(tmp_path, "now")
    table.write([row(n) for n in range(5)])
    table.mark_removed([row(2).file], "20270101")
    assert [(r.session, r.removed) for r in read_rows(tmp_path)] == [
        (2, "20270101"),
        (3, ""),
        (4, ""),
    ]
    table.close()


def test_a_share_is_of_what_was_owed() -> None:
    assert row(1, due=10, on_time=4, discarded=2).on_time_share == 0.5
    assert row(1).on_time_share == 1.0


def test_the_ledger_writes_a_row_when_a_call_begins_and_one_when_it_ends(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "calls")
    desk.open()
    (begun,) = read_rows(desk.folder)
    assert (begun.ended, begun.caller, begun.file) == ("", "Änn", ledger.file_name(header()))
    desk.tick(0, flags=(Flag.CONCEALED | Flag.GENERATED).value, skipped=2)
    desk.tick(1, flags=Flag.MISSED.value, margin_ns=-7, misses=1)
    desk.tick(2)
    desk.receipt(0)
    desk.receipt(1, Outcome.FILLED)
    desk.receipt(2, Outcome.FILLED)
    desk.receipt(2, Outcome.DISCARDED)  # came too late: the caller heard silence
    desk.ledger.pump()
    desk.ledger.settle(1, due=3, why=Why.FINISHED)
    desk.ledger.pump()
    (ended,) = read_rows(desk.folder)
    assert (ended.ended, ended.due, ended.on_time, ended.filled) == ("finished", 3, 1, 2)
    assert (ended.missed, ended.concealed, ended.skipped, ended.discarded) == (1, 1, 2, 0)
    assert (ended.worst_margin_ns, ended.longest_miss_run) == (-7, 1)
    assert ended.bytes == desk.path().stat().st_size
    # What the table says is what the file says.
    assert row_of(read_call(desk.path())) == ended
    desk.close()


def test_a_table_that_cannot_be_written_costs_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: CallTable, rows: list[CallRow]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    desk = Desk(tmp_path / "calls")
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(CallTable, "write", full)
        desk.open()
        desk.tick(0, flags=Flag.MISSED.value)
        desk.ledger.settle(1, due=1, why=Why.FINISHED)
        desk.ledger.pump()
        assert list(desk.ledger.closed) == [1]
        assert desk.ledger.write_errors == 2
        assert "database or disk is full" in caplog.text
    desk.ledger.pump()  # there is room again: nothing was forgotten
    assert [r.ended for r in read_rows(desk.folder)] == ["finished"]
    desk.close()


def test_totals_take_only_the_first_word_on_a_frame() -> None:
    totals = Totals()
    for margin_ns in range(2):
        totals.add_tick(HEARD, 0, margin_ns, 0)
    totals.add_receipt(Receipt(1, 1, 0, Outcome.FILLED, 0, 0), is_first=True)
    totals.add_receipt(Receipt(1, 1, 0, Outcome.DISCARDED, 0, 0), is_first=False)
    made = totals.row(header(), "left", 2, 0, 100)
    assert (made.filled, made.discarded, made.worst_margin_ns) == (1, 0, 0)
