"""The tick loop on a fake clock: real channels, an echoing executor, no waiting."""

import gc
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import frame_ring, tick_loop
from appliance.clock import NS_PER_MS as MS
from appliance.ledger import TICK, TICK_FIELDS, TICK_VALUES, Flag
from appliance.seat import Depart, Left, WentLive
from appliance.session import Event, SessionId
from appliance.tick_loop import TickLoop
from tests.fakes import FakeCaller, FakeClock, FakeExecutor, make_bundle, make_loop

Join = Callable[..., FakeCaller]


class Desk:
    """A loop on a fake clock and the callers of one test."""

    def __init__(self, folder: Path, slots: int = 4, **kwargs: Any) -> None:
        self.clock = FakeClock()
        self.work_ns: dict[int, int] = {}
        self.executor = FakeExecutor(make_bundle(folder, slots), slots, self._work)
        self.loop: TickLoop = make_loop(self.executor, self.clock, **kwargs)
        self.callers: list[FakeCaller] = []
        self.due = 0
        self.starts: list[int] = []
        self._steps = 0

    def _work(self, batch: int) -> None:
        self.starts.append(self.clock.now_ns())
        self.clock.advance(self.work_ns.get(self._steps, 10 * MS))
        self._steps += 1

    def caller(self, **settings: float) -> FakeCaller:
        name = f"dbxtest-{uuid.uuid4().hex[:12]}"
        caller = FakeCaller(self.loop, name, len(self.callers) + 1, **settings)
        self.callers.append(caller)
        caller.arrive()
        return caller

    def tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.clock.sleep_until(self.loop.grid.start_ns(self.due))
            self.due = self.loop.turn(self.due)

    def records(self) -> np.ndarray[Any, Any]:
        return self.loop.ring.take()

    def close(self) -> None:
        for caller in self.callers:
            caller.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def test_a_record_has_the_ledgers_fields_in_order() -> None:
    first = ("kind", "unused", "flags", "generation", "session", "index", "tick")
    rest = (
        "captured_ns",
        "made_ns",
        "margin_ns",
        "step_ns",
        "text",
        "batch",
        "slot",
        "lag",
        "skipped",
        "misses",
        "buffer_us",
        "spare",
        "crc",
    )
    assert first + rest == TICK_FIELDS
    values = range(1, len(TICK_FIELDS) + 1)
    (record,) = np.frombuffer(TICK_VALUES.pack(*values), TICK)
    assert [int(record[name]) for name in TICK_FIELDS] == list(values)


def test_a_caller_gets_one_frame_for_each_of_its_own(desk: Desk) -> None:
    caller = desk.caller()
    for n in range(5):
        caller.speak(last=n == 4)
        desk.tick()
    desk.tick(2)
    heard = caller.hear()
    assert [h.frame_index for h, _ in heard] == [0, 1, 2, 3, 4]
    assert [value for _, value in heard] == [0, *(caller.value(n) for n in range(4))]
    assert [h.heard for h, _ in heard] == [0, 1, 2, 3, 4]
    assert {(h.session, h.generation) for h, _ in heard} == {(1, 1)}
    assert [bool(h.flags & frame_ring.WARMING) for h, _ in heard] == [True] + [False] * 4
    assert [bool(h.flags & frame_ring.FINAL) for h, _ in heard] == [False] * 4 + [True]
    assert [h.text for h, _ in heard] == [-1, 1, 2, 0, 1]
    assert list(desk.loop.outbox) == [
        WentLive(SessionId(1), 0, 0),
        Left(SessionId(1), Event.LAST_FRAME, 5),
    ]


def test_a_record_says_when_and_with_how_much_to_spare(desk: Desk) -> None:
    desk.caller().speak()
    desk.tick()
    (record,) = desk.records()
    assert (record["tick"], record["index"], record["batch"], record["slot"]) == (0, 0, 1, 0)
    assert (record["made_ns"], record["margin_ns"], record["step_ns"]) == (
        10 * MS,
        70 * MS,
        10 * MS,
    )
    assert record["flags"] == Flag.HEARD | Flag.GENERATED | Flag.WARMING
    assert (record["session"], record["generation"], record["captured_ns"]) == (1, 1, 1)


def test_a_late_tick_does_not_move_the_ones_after_it(desk: Desk) -> None:
    desk.work_ns = {1: 95 * MS}
    caller = desk.caller()
    for _ in range(4):
        caller.speak()
        desk.tick()
    assert [start // MS for start in desk.starts] == [0, 80, 175, 240]
    assert [m // MS for m in desk.records()["margin_ns"]] == [70, -15, 55, 70]
    assert (desk.loop.counts.late, desk.loop.counts.missed) == (1, 0)


def test_late_and_slow_steps_are_counted_while_they_last(desk: Desk) -> None:
    desk.work_ns = {0: 80 * MS, 1: 120 * MS, 2: 70 * MS, 3: 70 * MS}
    desk.caller().speak()
    runs = []
    for _ in range(5):
        desk.tick()
        runs.append((desk.loop.counts.late_run, desk.loop.counts.slow_run))
    # A whole period is neither; after the slow step two fast ones are late by what it left.
    assert runs == [(0, 0), (1, 1), (2, 0), (3, 0), (0, 0)]
    assert desk.loop.counts.late == 3


def test_it_beats_no_more_often_than_it_is_told(desk: Desk) -> None:
    beats: list[int] = []
    desk.loop.beat, desk.loop.beat_ticks = lambda: beats.append(desk.due), 3
    desk.tick(8)
    assert beats == [0, 3, 6]


def test_a_missing_frame_is_concealed_and_recorded_not_waited_for(desk: Desk) -> None:
    caller = desk.caller()
    caller.speak()
    desk.tick(2)
    caller.speak()
    desk.tick(1)
    flags = desk.records()["flags"].tolist()
    assert [f & (Flag.HEARD | Flag.CONCEALED) for f in flags] == [
        Flag.HEARD,
        Flag.CONCEALED,
        Flag.HEARD,
    ]
    heard = caller.hear()
    assert [bool(h.flags & frame_ring.CONCEALED) for h, _ in heard] == [False, True, False]
    assert [h.heard for h, _ in heard] == [0, -1, 1]
    assert heard[2][1] == 0  # the model was fed silence one tick ago, and echoes it


def test_a_session_goes_live_with_its_first_frame_and_not_before(desk: Desk) -> None:
    caller = desk.caller()
    desk.tick(3)
    assert (desk.loop.live, len(desk.records())) == (0, 0)
    caller.speak()
    desk.tick()
    assert desk.loop.live == 1
    assert desk.records()["tick"].tolist() == [3]


def test_a_caller_who_never_speaks_is_given_up(desk: Desk) -> None:
    seat = desk.caller()
    desk.loop.inbox[0].seat.wait_until_ns = 200 * MS  # type: ignore[union-attr]
    desk.tick(4)
    assert list(desk.loop.outbox) == [Left(seat.session, Event.TIMEOUT, 0)]


def test_an_overrun_catches_up_while_it_is_worth_it_and_records_what_it_drops(desk: Desk) -> None:
    desk.work_ns = {1: 330 * MS}  # tick 1 runs from 80 to 410: 2 and 3 are too old, 4 is late
    caller = desk.caller()
    caller.speak(2)
    desk.tick(2)
    caller.speak(3)
    desk.tick()
    assert desk.due == 5
    records = desk.records()
    assert records["tick"].tolist() == [0, 1, 2, 3, 4]
    assert records["index"].tolist() == [0, 1, 2, 3, 4]
    assert [bool(f & Flag.MISSED) for f in records["flags"]] == [False, False, True, True, False]
    assert [bool(f & Flag.GENERATED) for f in records["flags"]] == [True, True, False, False, True]
    assert records["misses"].tolist() == [0, 1, 2, 3, 4]
    assert (records["margin_ns"] // MS).tolist() == [70, -250, -170, -90, -20]
    dropped = records[2:4]
    assert dropped[["made_ns", "step_ns", "text"]].tolist() == [(0, 0, -1)] * 2
    # The missed ticks took their callers' frames with them: the session lags behind no further.
    assert records["lag"][-1] == 0
    assert [h.heard for h, _ in caller.hear()] == [0, 1, 4]


def test_after_an_overrun_each_tick_takes_its_own_frame_and_none_is_skipped(desk: Desk) -> None:
    desk.work_ns = {1: 650 * MS}  # tick 1 runs from 80 to 730: 2 to 7 are missed, 8 is late
    caller = desk.caller()
    caller.speak(2)
    desk.tick(2)
    caller.speak(8)  # those of ticks 2 to 9, which all came in the meantime
    desk.tick(3)
    records = desk.records()
    missed = [n for n, f in enumerate(records["flags"].tolist()) if f & Flag.MISSED]
    assert (missed, len(records)) == ([2, 3, 4, 5, 6, 7], 11)
    assert records["skipped"].sum() == 0
    assert [h.heard for h, _ in caller.hear()] == [0, 1, 8, 9, -1]


def test_a_last_frame_in_a_missed_tick_ends_the_session(desk: Desk) -> None:
    desk.work_ns = {1: 330 * MS}
    caller = desk.caller()
    caller.speak(2)
    desk.tick(2)
    caller.speak(1, last=True)  # for tick 2, which will be missed
    desk.tick(2)
    assert desk.loop.outbox[-1] == Left(caller.session, Event.LAST_FRAME, 3)
    assert desk.records()["tick"].tolist() == [0, 1, 2]


def test_a_backlog_is_skipped_oldest_first_and_recorded(desk: Desk) -> None:
    caller = desk.caller()
    caller.speak(9)
    desk.tick(3)
    records = desk.records()
    assert records["skipped"].tolist() == [4, 0, 0]
    assert records["lag"].tolist() == [4, 3, 2]
    assert [h.heard for h, _ in caller.hear()] == [4, 5, 6]


def test_a_leavers_hole_is_filled_and_nobody_hears_anybody_else(desk: Desk) -> None:
    callers = [desk.caller(gain=gain) for gain in (1.0, 0.5, 2.0)]
    for n in range(6):
        for caller in callers:
            if not (n > 2 and caller is callers[0]):
                caller.speak()
        if n == 3:
            desk.loop.inbox.append(Depart(callers[0].session, Event.LEAVE))
        desk.tick()
    assert [list(desk.executor.batches)] == [[3, 3, 3, 2, 2, 2]]
    for caller, gain, frames in zip(callers, (1.0, 0.5, 2.0), (3, 6, 6), strict=True):
        values = [value for _, value in caller.hear()]
        assert values == [0, *(gain * caller.value(n) for n in range(frames - 1))]
    assert desk.records()["slot"].tolist() == [0, 1, 2] * 3 + [0, 1] * 3


def test_a_broken_row_ends_its_session_and_no_other(desk: Desk) -> None:
    sick, well = desk.caller(), desk.caller()
    for n in range(4):
        sick.speak()
        well.speak()
        desk.executor.break_slot = 0 if n == 1 else -1
        desk.tick()
    assert [h.frame_index for h, _ in sick.hear()] == [0]
    assert [h.frame_index for h, _ in well.hear()] == [0, 1, 2, 3]
    assert desk.loop.outbox[-1] == Left(sick.session, Event.FAULT, 2)
    records = desk.records()
    faulty = records[(records["flags"] & Flag.FAULT) > 0]
    assert faulty["session"].tolist() == [1]
    assert not faulty["flags"][0] & Flag.GENERATED


def test_a_foreign_stamp_in_a_slot_ends_that_session(desk: Desk) -> None:
    caller, other = desk.caller(), desk.caller()
    caller.speak()
    other.speak()
    desk.tick()
    desk.loop._stamps[1] = 77  # as if the arena's row belonged to a former tenant
    desk.tick(2)
    assert [n for n in desk.loop.outbox if isinstance(n, Left)] == [
        Left(other.session, Event.FAULT, 2)
    ]


def test_a_callers_nan_never_reaches_the_model(desk: Desk) -> None:
    caller = desk.caller()
    caller.speak(value=float("nan"))
    desk.tick(1)
    caller.speak()
    desk.tick(2)
    assert [value for _, value in caller.hear()] == [0, 0, caller.value(1)]
    assert desk.records()["flags"][0] & (Flag.BAD_INPUT | Flag.CONCEALED | Flag.HEARD) == (
        Flag.BAD_INPUT | Flag.CONCEALED
    )


def test_a_line_that_scribbles_over_its_counters_is_concealed(desk: Desk) -> None:
    caller, other = desk.caller(), desk.caller()
    for n in range(3):
        caller.speak()
        other.speak()
        if n == 1:
            caller._line.uplink._cursor.shared[8] = 2**63
        desk.tick()
    records = desk.records()
    flags = records["flags"][records["session"] == 1]
    assert [bool(f & Flag.CONCEALED) for f in flags] == [False, True, False]
    assert len(other.hear()) == 3


def test_a_setting_refused_late_costs_only_its_session(desk: Desk) -> None:
    well, sick = desk.caller(), desk.caller(seed=13)
    well.speak()
    sick.speak()
    desk.tick()
    assert desk.loop.live == 1
    assert desk.loop.outbox[-1] == Left(sick.session, Event.FAULT, 0)
    assert len(well.hear()) == 1


def test_a_line_that_does_not_read_loses_its_own_frames(desk: Desk) -> None:
    deaf, well = desk.caller(), desk.caller()
    for _ in range(70):
        deaf.speak()
        well.speak()
        desk.tick()
        assert len(well.hear()) == 1
    records = desk.records()
    unread = records[(records["flags"] & Flag.UNREAD) > 0]
    assert unread["session"].tolist() == [1] * 6
    assert unread["index"].tolist() == list(range(64, 70))


def test_a_line_that_reads_nothing_for_too_long_is_taken_to_hang_and_its_call_ends(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, unread_limit_frames=20)
    hung, reader = desk.caller(), desk.caller()
    for _ in range(64 + 10):
        hung.speak()
        reader.speak()
        desk.tick()
        reader.hear()
    hung.hear()  # it was only slow: the count begins again
    for _ in range(64 + 20):
        reader.speak()
        desk.tick()
        reader.hear()
    assert [news for news in desk.loop.outbox if isinstance(news, Left)] == []
    desk.tick()
    (left,) = [news for news in desk.loop.outbox if isinstance(news, Left)]
    assert (left.session, left.event, left.due) == (hung.session, Event.TIMEOUT, 2 * 64 + 30)
    assert (desk.loop.counts.hung, desk.loop.live) == (1, 1)
    desk.close()


def test_an_exception_of_the_executor_is_not_caught(desk: Desk) -> None:
    class StageFailed(RuntimeError):
        pass

    def fail(batch: int) -> None:
        raise StageFailed("stage temporal failed")

    desk.caller().speak()
    desk.executor.work = fail
    with pytest.raises(StageFailed):
        desk.tick()


def test_a_full_record_ring_loses_records_and_counts_them(tmp_path: Path) -> None:
    desk = Desk(tmp_path, records=3)
    try:
        desk.caller().speak()
        desk.tick(5)
        assert desk.loop.ring.lost == 2
        assert desk.records()["index"].tolist() == [0, 1, 2]
    finally:
        desk.close()


def test_run_keeps_to_the_grid_and_stops_when_told(desk: Desk) -> None:
    caller = desk.caller()
    caller.speak(3)
    desk.clock.advance(1000 * MS)  # warming up took a while

    def work(batch: int) -> None:
        desk.starts.append(desk.clock.now_ns())
        desk.loop.stopping = len(desk.starts) == 3

    desk.executor.work = work
    desk.loop.run()
    assert [start // MS for start in desk.starts] == [1040, 1120, 1200]


def test_500_ticks_retain_nothing(desk: Desk) -> None:
    callers = [desk.caller() for _ in range(3)]

    def tick() -> None:
        for caller in callers:
            caller.speak()
        desk.tick()
        for caller in callers:
            while caller._line.downlink.get(caller._pcm) is not None:
                pass
        desk.loop.ring.read = desk.loop.ring.written

    desk.executor.work = lambda batch: desk.clock.advance(10 * MS)  # `starts` would grow
    for _ in range(300):
        tick()  # past 256, below which integers are not allocated at all
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(20):
            tick()
        gc.collect()
        before = tracemalloc.take_snapshot()
        for _ in range(500):
            tick()
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = tracemalloc.Filter(True, str(Path(tick_loop.__file__).parent / "*"))
    grown = after.filter_traces([own]).compare_to(before.filter_traces([own]), "lineno")
    kept = sum(max(0, line.size_diff) for line in grown)
    # One object per tick would be 14,000 bytes; an integer may have been replaced by a wider one.
    assert kept < 200, [str(line) for line in grown if line.size_diff > 0]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_1000_ticks_of_joins_and_leaves_leak_no_slot(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Every due frame has exactly one record, and live slots are 0..batch-1 without holes."""
    random = Random(seed)  # not drawn: 1,000 ticks are more choices than hypothesis will make
    slots = 4
    desk = Desk(tmp_path_factory.mktemp("bundle"), slots)
    present: list[FakeCaller] = []
    lefts: list[Left] = []
    records = []
    try:
        desk.work_ns = {random.randrange(900): random.randrange(500) * MS for _ in range(20)}
        while desk.due < 1000:
            if len(present) < slots and random.random() < 0.1:
                present.append(desk.caller())
            for caller in present:
                caller.hear()
                if random.random() < 0.9 and caller.channel.uplink.waiting < 10:
                    caller.speak(last=random.random() < 0.02)
                if random.random() < 0.005:
                    event = random.choice([Event.LEAVE, Event.LOST])
                    desk.loop.inbox.append(Depart(caller.session, event))
            desk.tick()
            assert desk.loop.live <= len(present) <= slots
            assert [seat.slot for seat in desk.loop._slots] == list(range(desk.loop.live))
            records.append(desk.records())
            while desk.loop.outbox:
                news = desk.loop.outbox.popleft()
                if isinstance(news, Left):
                    lefts.append(news)
                    present = [c for c in present if c.session != news.session]
        for caller in present:
            desk.loop.inbox.append(Depart(caller.session, Event.LEAVE))
        desk.tick()
        records.append(desk.records())
        lefts += [news for news in desk.loop.outbox if isinstance(news, Left)]
    finally:
        desk.close()
    assert desk.loop.live == 0
    assert sorted(left.session for left in lefts) == [c.session for c in desk.callers]
    ledger = np.concatenate(records)
    for left in lefts:
        mine = ledger[ledger["session"] == left.session]
        assert mine["index"].tolist() == list(range(left.due))
        assert (np.diff(mine["tick"]) == 1).all()
