"""Old calls go, the oldest first, and never one that is on."""

import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import clock
from appliance.call_table import read_rows
from appliance.clock import NS_PER_S
from appliance.ledger import Why
from appliance.ledger_writer import RETENTION_NS, LedgerWriter
from appliance.record_ring import RecordRing
from appliance.retention import Keep, Stored, plan_removal, remove
from tests.appliance.test_ledger import header
from tests.fakes import FakeClock

FILES = [Stored(f"2026013{day}T000000.000Z-00000{day}.call", 100) for day in range(5)]
NAMES = [file.name for file in FILES]


def test_what_is_older_than_allowed_goes() -> None:
    assert plan_removal(FILES, (), "20260132", 0, 0) == NAMES[:2]


def test_what_is_more_than_allowed_goes_oldest_first() -> None:
    assert plan_removal(list(reversed(FILES)), (), "", 250, 0) == NAMES[:3]
    assert plan_removal(FILES, (), "", 500, 0) == []


def test_what_must_be_freed_is_freed_as_far_as_there_are_calls() -> None:
    assert plan_removal(FILES, (), "", 0, 101) == NAMES[:2]
    assert plan_removal(FILES, (), "", 0, 10**9) == NAMES
    assert plan_removal(FILES, (), "", 0, -5) == []


@given(
    sizes=st.lists(st.integers(0, 1000), max_size=30),
    on=st.sets(st.integers(0, 29)),
    keep=st.integers(0, 5000),
    needed=st.integers(-100, 5000),
)
def test_a_call_that_is_on_stays_and_the_rest_is_bounded(
    sizes: list[int], on: set[int], keep: int, needed: int
) -> None:
    files = [Stored(f"{n:04d}.call", size) for n, size in enumerate(sizes)]
    is_on = {f"{n:04d}.call" for n in on}
    gone = plan_removal(files, is_on, "", keep, needed)
    assert not is_on & set(gone)
    assert gone == sorted(gone)
    kept = sum(f.bytes for f in files if f.name not in gone and f.name not in is_on)
    held = sum(f.bytes for f in files if f.name in is_on)
    assert keep == 0 or kept == 0 or kept + held <= keep


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).write_bytes(bytes(10))
    (tmp_path / "notes.txt").write_bytes(bytes(10))
    (tmp_path / "folder.call").mkdir()
    assert remove(tmp_path, Keep(bytes=1), (), "") == [NAMES[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.call", "notes.txt"]


def test_a_disk_that_must_have_room_left_takes_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    for file in FILES:
        (tmp_path / file.name).write_bytes(bytes(file.bytes))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    assert remove(tmp_path, Keep(free_bytes=1150), (), "") == NAMES[:2]


def test_the_ledger_removes_what_is_too_old_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring, ticking = RecordRing(16), FakeClock(10 * NS_PER_S)
    old = header(1, started=clock.wall_stamp(ago_s=10 * 86_400))
    fresh = header(2, started=clock.wall_stamp())
    writer = LedgerWriter(tmp_path, ring, ticking, Keep(days=5))

    class NoReceipts:
        capacity = 0

    for made in (old, fresh):
        writer.open(made, NoReceipts())  # type: ignore[arg-type]
    writer.pump()
    assert len(list(tmp_path.glob("*.call"))) == 2  # both are on: neither goes
    for made in (old, fresh):
        writer.finish(made.session, 0, Why.LEFT)
    writer.pump()
    with caplog.at_level(logging.INFO):
        ticking.advance(RETENTION_NS)
        writer.pump()
    assert [path.name[-11:] for path in tmp_path.glob("*.call")] == ["000002.call"]
    assert "1 old calls removed" in caplog.text
    assert [bool(r.removed) for r in read_rows(tmp_path)] == [True, False]
    writer.stop()
