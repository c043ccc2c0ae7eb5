"""Old calls go, the oldest first, and never one that is on."""

import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import clock
from appliance.call_table import read_rows
from appliance.clock import NS_PER_S, stamp, stamped_ns
from appliance.ledger import Why
from appliance.ledger_writer import RETENTION_NS, LedgerWriter
from appliance.record_ring import RecordRing
from appliance.retention import (
    DAY_NS,
    STEADY_NS,
    STEP_NS,
    BelievedTime,
    Keep,
    Stored,
    plan_removal,
    remove,
)
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
    (tmp_path / "link.call").symlink_to(tmp_path / "notes.txt")
    assert remove(tmp_path, Keep(bytes=1), (), BelievedTime(), 0, 0) == [NAMES[0]]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["folder.call", "link.call", "notes.txt"]


def test_a_disk_that_must_have_room_left_takes_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    for file in FILES:
        (tmp_path / file.name).write_bytes(bytes(file.bytes))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    keep = Keep(free_bytes=1150)
    assert remove(tmp_path, keep, (), BelievedTime(), 0, 0) == NAMES[:2]


NOON_NS = 20_000 * DAY_NS
"""Of some day, by the wall; the monotonic clock shows 0 then."""


def test_a_stamp_is_read_as_it_was_written() -> None:
    assert stamp(NOON_NS + 250_000_000) == "20241004T000000.250Z"
    assert stamped_ns("20241004T000000.250Z-000001.call") == NOON_NS
    assert stamped_ns("notes.call") is stamped_ns("20241304T000000.000Z-000001.call") is None
    assert stamp(-DAY_NS) == "19700101T000000.000Z"  # kept for a hundred years: all of them


@given(steps=st.lists(st.tuples(st.integers(0, DAY_NS), st.integers(0, STEP_NS)), max_size=20))
def test_a_clock_that_goes_and_is_set_a_little_is_believed(steps: list[tuple[int, int]]) -> None:
    time, wall_ns, now_ns = BelievedTime(), NOON_NS, 0
    assert time.look(wall_ns, now_ns) == wall_ns
    for passed_ns, step_ns in steps:
        now_ns += passed_ns
        wall_ns += passed_ns + step_ns
        assert time.look(wall_ns, now_ns) == wall_ns
    assert not time.doubt()


def test_a_clock_set_far_ahead_counts_when_it_has_stood_and_not_before() -> None:
    time, ahead_ns, hour_ns = BelievedTime(), 365 * DAY_NS, STEADY_NS // 12
    time.look(NOON_NS, 0)
    for hour in range(1, 13):
        now_ns = hour * hour_ns
        assert time.look(NOON_NS + ahead_ns + now_ns, now_ns) == NOON_NS + now_ns
        assert ("365.0 days ahead" in time.doubt()) == (hour == 1)
        assert time.doubted_ns == ahead_ns
    now_ns = 13 * hour_ns
    assert time.look(NOON_NS + ahead_ns + now_ns, now_ns) == NOON_NS + ahead_ns + now_ns
    assert (time.doubt(), time.doubted_ns) == ("", 0)
    now_ns += 1  # the next such step is doubted, and said, as the first one was
    assert time.look(NOON_NS + 2 * ahead_ns + now_ns, now_ns) == NOON_NS + ahead_ns + now_ns
    assert time.doubt()


def test_a_clock_that_is_set_right_again_was_never_believed() -> None:
    time = BelievedTime()
    time.look(NOON_NS, 0)
    time.look(NOON_NS + 2 * STEP_NS, 0)
    assert time.look(NOON_NS + 1, 1) == NOON_NS + 1
    later_ns = STEADY_NS - 1  # counted from the second mistake
    assert time.look(NOON_NS + 2 * STEP_NS + 2, 2) == NOON_NS + 2
    assert time.look(NOON_NS + 2 * STEP_NS + later_ns, later_ns) == NOON_NS + later_ns


def test_a_clock_set_back_counts_at_once() -> None:
    time = BelievedTime()
    time.look(NOON_NS, 0)
    assert time.look(NOON_NS - 365 * DAY_NS, 1) == NOON_NS - 365 * DAY_NS
    assert not time.doubt()


def test_a_box_that_starts_with_a_clock_from_the_future_goes_by_its_newest_call() -> None:
    names = [f"{stamp(NOON_NS - days * DAY_NS)}-000001.call" for days in (40, 20, 0)]
    on = f"{stamp(NOON_NS + 400 * DAY_NS)}-000002.call"  # named by the wrong clock
    time = BelievedTime()
    wrong_ns = NOON_NS + 400 * DAY_NS
    assert time.oldest(30, [*names, on, "notes"], {on}, wrong_ns, 7) == stamp(NOON_NS - 30 * DAY_NS)
    assert time.doubt()
    assert BelievedTime().oldest(0, names, (), wrong_ns, 7) == ""
    assert BelievedTime().oldest(30, (), (), wrong_ns, 7) == stamp(wrong_ns - 30 * DAY_NS)


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


def test_the_ledger_keeps_its_calls_when_the_wall_clock_is_set_ahead_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started_ns = clock.wall_ns()
    ticking, ahead_ns = FakeClock(), 0

    def wall_ns() -> int:
        return started_ns + ticking.now_ns() + ahead_ns

    kept = tmp_path / f"{stamp(started_ns)}-000001.call"
    kept.write_bytes(bytes(10))
    writer = LedgerWriter(tmp_path, RecordRing(16), ticking, Keep(days=5), wall_ns=wall_ns)
    writer.pump()
    ahead_ns = 30 * DAY_NS
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ticking.advance(RETENTION_NS)
            writer.pump()
    assert caplog.text.count("the wall clock is 30.0 days ahead") == 1
    assert kept.exists()
    ticking.advance(STEADY_NS)
    writer.pump()
    assert not kept.exists()
    writer.stop()
