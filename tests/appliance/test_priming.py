"""Personas are fed in margins and nowhere else: the pure decisions, and the desk in a tick loop."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import priming
from appliance.clock import NS_PER_MS as MS
from appliance.clock import TickGrid
from appliance.priming import CHUNKS, Costs, Job, Kind, Need, PrimingDesk, plan_piece
from appliance.seat import Arrive, Depart, Left, Primed, Seat, WentLive
from appliance.session import Event, SessionId
from engines.snapshot import Snapshot
from tests.fakes import PERIOD_NS, FakeCaller, FakeClock, make_loop
from tests.fakes_prompt import PromptedExecutor, make_prompted_bundle, prompt_of

NEVER = 2**62


def test_the_largest_chunk_that_fits_is_chosen() -> None:
    costs = Costs({(Kind.FEED, n): n * MS for n in CHUNKS} | {(Kind.CLEAR, 0): 3 * MS})
    feed = Need(Kind.FEED, 100)
    assert plan_piece(feed, 70 * MS, costs) == Need(Kind.FEED, 64)
    assert plan_piece(feed, 63 * MS, costs) == Need(Kind.FEED, 32)
    assert plan_piece(feed, 1 * MS, costs) == Need(Kind.FEED, 1)
    assert plan_piece(feed, 1 * MS - 1, costs) is None
    assert plan_piece(Need(Kind.FEED, 5), 70 * MS, costs) == Need(Kind.FEED, 4)
    assert plan_piece(Need(Kind.CLEAR), 3 * MS, costs) == Need(Kind.CLEAR)
    assert plan_piece(Need(Kind.CLEAR), 3 * MS - 1, costs) is None
    assert plan_piece(Need(Kind.OPEN), 0, Costs()) is None


def test_rows_never_fed_at_once_are_taken_to_cost_twice_their_half() -> None:
    costs = Costs({(Kind.FEED, 4): 10 * MS})
    assert costs.expect(Kind.FEED, 16) == 40 * MS
    assert plan_piece(Need(Kind.FEED, 64), 45 * MS, costs) == Need(Kind.FEED, 16)


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_what_a_piece_took_is_never_underestimated_and_a_hiccup_is_forgotten(
    times: list[int],
) -> None:
    costs = Costs()
    for took in times:
        costs.saw(Kind.OPEN, 0, took)
        assert costs.expect(Kind.OPEN) >= took
    for _ in range(400):
        costs.saw(Kind.OPEN, 0, 1000)
    assert costs.expect(Kind.OPEN) < 1000 + 16


class Desk:
    """A loop of 4 slots on a fake clock: a step takes 40 ms, a row 1 ms, a first choice 2 ms."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.step_ns, self.row_ns = 40 * MS, 1 * MS
        self.executor = PromptedExecutor(
            make_prompted_bundle(folder),
            work=lambda batch: self.clock.advance(self.step_ns),
            feeding=lambda rows: self.clock.advance(rows * self.row_ns + MS),
        )
        self.loop = make_loop(self.executor, self.clock)
        manifest = self.executor.bundle.manifest
        self.desk = PrimingDesk(self.executor, manifest, 4, self.clock)
        self.desk.calibrate(prompt_of(30))
        # That took time: tick 0 starts now.
        self.loop.grid = TickGrid(self.clock.now_ns(), PERIOD_NS)
        self.loop.desk = self.desk
        self.callers: list[FakeCaller] = []
        self.arrived = 0
        self.due = 0

    def caller(self, job: Job | None = None) -> FakeCaller:
        name = f"dbxtest-{uuid.uuid4().hex[:12]}"
        self.arrived += 1
        caller = FakeCaller(self.loop, name, self.arrived)
        self.callers.append(caller)
        if job is None:
            caller.arrive()
        else:
            seat = Seat(caller.session, caller.generation, caller.channel, {}, 0, job, NEVER // 2)
            self.loop.inbox.append(Arrive(seat))
        return caller

    def job(self, rows: int, first_id: int = 100, until_ns: int = NEVER) -> Job:
        return Job(prompt_of(rows, first_id), {}, None, keep=True, until_ns=until_ns)

    def tick(self, ticks: int = 1, speak: bool = True) -> None:
        for _ in range(ticks):
            for caller in self.callers if speak else []:
                if caller.session in {seat.session for seat in self.loop._slots}:
                    caller.speak()
            self.clock.sleep_until(self.loop.grid.start_ns(self.due))
            self.due = self.loop.turn(self.due)

    def news(self) -> list[object]:
        found: list[object] = list(self.loop.outbox)
        self.loop.outbox.clear()
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for caller in desk.callers:
        caller.close()


def test_a_newcomers_persona_costs_the_others_no_frame(desk: Desk) -> None:
    for _ in range(3):
        desk.caller().speak()
    desk.tick(2)
    desk.row_ns = 3 * MS  # dearer than it was when it was timed: learnt on the way
    desk.caller(desk.job(60))
    desk.tick(40)
    records = desk.loop.ring.take()
    assert set(records["session"]) == {1, 2, 3}
    assert (desk.loop.counts.late, desk.loop.counts.missed) == (0, 0)
    assert records["margin_ns"].min() >= 0
    primed = [n for n in desk.news() if isinstance(n, Primed)]
    assert [n.session for n in primed] == [4]
    job = primed[0].job
    covered = [r for s, f, n in desk.executor.fed if s == 3 for r in range(f, f + n)]
    assert covered == list(range(60))
    assert job.ticks > 5  # 60 rows of 3 ms in margins of at most 30 ms
    assert desk.desk.counts.spent_ns >= 60 * 3 * MS
    assert desk.desk.counts.waiting == 0
    assert desk.desk.counts.overruns <= 1  # the one that taught it the new price


def test_a_primed_session_waits_for_its_caller_and_goes_live_at_a_boundary(desk: Desk) -> None:
    caller = desk.caller(desk.job(9))
    desk.tick(5)
    assert [type(n) for n in desk.news()] == [Primed]
    assert desk.loop.live == 0
    caller.speak()
    desk.tick()
    assert desk.news() == [WentLive(SessionId(1), 5, 0)]
    assert desk.executor.told == {0: prompt_of(9).ids[:, 0].tobytes()}
    (record,) = desk.loop.ring.take()
    assert (record["index"], record["slot"], record["batch"]) == (0, 0, 1)


def test_a_primed_session_is_as_old_as_its_prompt_and_its_call(desk: Desk) -> None:
    full = desk.loop.full_frames
    caller = desk.caller(desk.job(9))
    desk.tick(5, speak=False)
    caller.speak()
    desk.tick(3)
    fills = [desk.loop.steps_seen.rows[n, 1] for n in range(desk.loop.steps_seen.written)]
    assert fills == [(9 + age) * 1000 // full for age in (1, 2, 3)]


def test_every_kind_of_piece_is_timed_before_anybody_is_let_in(desk: Desk) -> None:
    assert {kind for kind, _ in desk.desk.costs.of} == set(Kind)
    assert desk.desk.costs.expect(Kind.FEED, 8) == 9 * MS
    assert desk.desk.costs.expect(Kind.OPEN) > 0
    desk.caller(desk.job(30))
    desk.tick(5, speak=False)
    assert desk.desk.counts.longest_ns == 17 * MS  # the largest that fits in a prompt of 30: 16


def test_sessions_being_primed_make_way_for_those_who_talk(desk: Desk) -> None:
    jobs = [desk.job(30, 1000 * n) for n in (1, 2, 3)]
    callers = [desk.caller(job) for job in jobs]
    desk.step_ns = 69 * MS  # nothing fits but in ticks without a session
    desk.tick(3)
    assert [job.slot for job in jobs] == [3, 2, 1]
    callers[0].speak()
    desk.tick()  # the first goes live in slot 0, so slot 3 is free again
    assert jobs[0].slot == -1
    desk.caller().speak()
    desk.tick()  # and one without a persona needs slot 1
    assert sorted(job.slot for job in jobs[1:]) == [2, 3]
    callers[1].speak()
    callers[2].speak()
    desk.tick()
    assert desk.loop.live == 4
    told = {slot: what for slot, what in desk.executor.told.items() if slot in (0, 2, 3)}
    assert sorted(told.values()) == sorted(job.prompt.ids[:, 0].tobytes() for job in jobs)


def test_a_box_without_margins_gives_a_persona_up(desk: Desk) -> None:
    desk.caller().speak()
    desk.tick()
    desk.step_ns = 75 * MS
    now_ns = desk.clock.now_ns()
    desk.caller(desk.job(40, until_ns=now_ns + 10 * PERIOD_NS))
    desk.tick(20)
    assert desk.loop.counts.late == 0
    assert [n for n in desk.news() if isinstance(n, Left)] == [Left(SessionId(2), Event.TIMEOUT, 0)]
    assert desk.desk.counts.waiting == 0
    assert desk.executor.fed[-1][0] == 0  # nothing was fed since calibration


def test_whoever_leaves_while_being_primed_frees_the_slot(desk: Desk) -> None:
    desk.step_ns = 75 * MS
    desk.caller().speak()
    job = desk.job(40)
    caller = desk.caller(job)
    desk.tick(2)
    assert job.slot == 3
    desk.loop.inbox.append(Depart(caller.session, Event.LOST))
    desk.tick(2)
    assert job.slot == -1
    assert [n for n in desk.news() if isinstance(n, Left)] == [Left(SessionId(2), Event.LOST, 0)]


def test_the_last_of_all_slots_is_free_again_as_well(desk: Desk) -> None:
    desk.desk.guard_ns = PERIOD_NS  # there is never time: all of them wait
    jobs = [desk.job(40) for _ in range(4)]
    callers = [desk.caller(job) for job in jobs]
    desk.tick()
    assert [job.slot for job in jobs] == [3, 2, 1, 0]
    desk.loop.inbox.append(Depart(callers[3].session, Event.LOST))
    desk.tick()
    assert jobs[3].slot == -1
    desk.caller(another := desk.job(40))
    desk.tick()
    assert another.slot == 0


def test_a_kept_snapshot_replaces_feeding_and_is_the_same_state(desk: Desk) -> None:
    first = desk.job(50)
    desk.caller(first)
    desk.tick(6, speak=False)
    assert first.kept is not None
    assert first.kept.rings["prompt.ring"].shape == (1, 49, 2)
    fed = len(desk.executor.fed)
    second = Job(prompt_of(50), {}, first.kept, keep=True, until_ns=NEVER)
    desk.caller(second).speak()
    desk.tick(2, speak=False)
    assert [rows for _, _, rows in desk.executor.fed[fed:]] == [1]
    assert second.used_snapshot
    assert second.kept is None
    assert desk.executor.told[0] == prompt_of(50).ids[:, 0].tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_ticks_of_comings_and_goings_mix_no_slot_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(priming, "PIECE_BYTES", 48)  # three rows
    desk, draw, number = Desk(tmp_path), Random(seed), 0
    under_way: dict[int, tuple[FakeCaller, Job | None]] = {}
    told, kept = 0, list[tuple[int, int, Snapshot]]()
    for _ in range(1000):
        desk.step_ns = draw.choice([5, 40, 66, 69]) * MS
        if len(under_way) < 4 and draw.random() < 0.3:
            number += 1
            job = desk.job(draw.randint(1, 60), 1000 * number) if draw.random() < 0.8 else None
            if job is not None and kept and draw.random() < 0.5:
                rows, first_id, snapshot = draw.choice(kept)
                job = desk.job(rows, first_id)
                job.loaded = snapshot
            under_way[number] = (desk.caller(job), job)
        for session, (caller, _) in list(under_way.items()):
            if draw.random() < 0.4 and caller.channel.uplink.waiting < 8:
                caller.speak(last=draw.random() < 0.1)
            elif draw.random() < 0.05:
                desk.loop.inbox.append(Depart(SessionId(session), Event.LOST))
        desk.tick(speak=False)
        live = {seat.session: seat for seat in desk.loop._slots}
        for session, seat in live.items():
            _, mine = under_way[session]
            expected = mine.prompt.ids[:, 0].tobytes() if mine is not None else None
            told += expected is not None
            assert desk.executor.told.get(seat.slot) == expected, (session, seat.slot)
        parked = [job.slot for _, job in under_way.values() if job is not None and job.slot >= 0]
        assert len(set(parked)) == len(parked)
        assert not set(parked) & set(range(len(live)))
        heard = desk.news()
        for done in [news.job for news in heard if isinstance(news, Primed)]:
            if done.kept is not None:
                kept.append((done.prompt.rows, int(done.prompt.frames[0, 0]), done.kept))
        for gone in [news for news in heard if isinstance(news, Left)]:
            caller, job = under_way.pop(gone.session)
            caller.close()
            desk.callers.remove(caller)
            assert job is None or job.slot == -1
        desk.loop.ring.take()
    assert number > 100
    assert told > 300
    assert desk.loop.counts.late == 0
    for caller, _ in under_way.values():
        caller.close()
