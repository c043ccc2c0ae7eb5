"""A live session's model begins anew: the call goes on, and no other session loses a frame."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance.clock import NS_PER_MS as MS
from appliance.ledger import Flag
from appliance.priming import Job
from appliance.seat import Depart, Left, Primed, Restart, Restarted, WentLive
from appliance.session import Event
from tests.appliance.test_priming import NEVER, Desk
from tests.fakes import PERIOD_NS, FakeCaller
from tests.fakes_prompt import prompt_of


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for caller in desk.callers:
        caller.close()


def flags_of(records: np.ndarray, caller: FakeCaller) -> list[Flag]:
    mine = records[records["session"] == caller.session]
    assert mine["index"].tolist() == list(range(mine["index"][0], mine["index"][0] + len(mine)))
    return [Flag(int(flags)) for flags in mine["flags"]]


def live(desk: Desk, jobs: list[Job | None]) -> list[FakeCaller]:
    """Callers who have talked for two ticks."""
    callers = [desk.caller(job) for job in jobs]
    desk.tick(4, speak=False)
    for caller in callers:
        caller.speak()
    desk.tick(1, speak=False)
    desk.tick(1)
    assert desk.loop.live == len(jobs)
    for caller in callers:
        caller.hear()
    desk.loop.ring.take()
    desk.news()
    return callers


def restart(desk: Desk, caller: FakeCaller, job: Job | None = None) -> None:
    desk.loop.inbox.append(Restart(caller.session, job))


def test_without_a_prompt_the_next_tick_steps_a_new_state_and_no_frame_is_lost(desk: Desk) -> None:
    mine, other = live(desk, [None, None])
    restart(desk, mine)
    desk.tick(2)
    assert desk.news() == [Restarted(mine.session, 6, 2, 0, None)]
    # The echo has forgotten what it heard before: silence first, and its delays fill again.
    heard = mine.hear()
    assert [value for _, value in heard] == [0.0, mine.value(2)]
    assert [header.frame_index for header, _ in heard] == [2, 3]
    assert [value for _, value in other.hear()] == [other.value(1), other.value(2)]
    records = desk.loop.ring.take()
    good = Flag.HEARD | Flag.GENERATED
    assert flags_of(records, mine) == [good | Flag.RESET | Flag.WARMING, good]
    assert flags_of(records, other) == [good, good]


def test_a_persona_is_fed_again_in_margins_in_a_full_box(desk: Desk) -> None:
    job = desk.job(9)
    mine, *others = live(desk, [job, None, None, None])
    desk.row_ns = 5 * MS  # 9 rows: two or three ticks' margins
    again = desk.job(9)
    restart(desk, mine, again)
    mine.speak(0)
    for _ in range(6):
        if mine.session not in {seat.session for seat in desk.loop._slots}:
            mine.speak()  # whoever calls goes on talking
        desk.tick(1)
    (news,) = desk.news()
    assert isinstance(news, Restarted)
    assert (news.session, news.job) == (mine.session, again)
    assert 1 <= news.held <= 4
    assert news.frame_index == 2 + news.held
    told = desk.executor.told
    slot = next(seat.slot for seat in desk.loop._slots if seat.session == mine.session)
    assert told == {slot: again.prompt.ids[:, 0].tobytes()}
    records = desk.loop.ring.take()
    mine_did = flags_of(records, mine)
    assert mine_did[: news.held] == [Flag.PRIMING] * news.held
    assert Flag.RESET in mine_did[news.held]
    for flags in mine_did[news.held :]:
        assert {Flag.HEARD, Flag.GENERATED} <= set(flags)
    for other in others:
        assert flags_of(records, other) == [Flag.HEARD | Flag.GENERATED] * 6
    assert desk.loop.counts.late == desk.loop.counts.missed == 0
    # It does not lag behind its caller for the frames it did not hear.
    assert records["lag"].max() == 0
    assert desk.desk.counts.waiting == 0


def test_a_kept_snapshot_makes_it_quick_and_says_how_it_was_fed(desk: Desk) -> None:
    first = desk.job(30)
    (mine,) = live(desk, [first])
    assert first.kept is not None
    assert first.kept.fed == tuple(first.chunks)
    again = Job(prompt_of(30), {}, first.kept, keep=True, until_ns=NEVER)
    restart(desk, mine, again)
    desk.tick(3)
    (news,) = desk.news()
    assert isinstance(news, Restarted)
    assert (news.held, again.used_snapshot, again.chunks) == (1, True, first.chunks)
    assert desk.executor.told == {0: again.prompt.ids[:, 0].tobytes()}


@pytest.mark.parametrize("event", [Event.LEAVE, Event.LOST, Event.SHED])
def test_whoever_leaves_while_the_persona_is_fed_again_frees_the_slot_at_the_boundary(
    desk: Desk, event: Event
) -> None:
    mine, other = live(desk, [desk.job(9), None])
    desk.step_ns = 75 * MS  # no margin
    job = desk.job(40)
    restart(desk, mine, job)
    desk.tick(3)
    desk.loop.inbox.append(Depart(mine.session, event))
    stranger = desk.caller()
    stranger.speak()
    desk.tick(1)
    assert desk.news() == [Left(mine.session, event, 5), WentLive(stranger.session, 9, 1)]
    assert job.slot == -1
    assert desk.desk.counts.waiting == 0
    assert flags_of(desk.loop.ring.take(), other) == [Flag.HEARD | Flag.GENERATED] * 4


def test_a_last_frame_while_the_persona_is_fed_again_ends_the_call(desk: Desk) -> None:
    (mine,) = live(desk, [desk.job(9)])
    desk.desk.guard_ns = PERIOD_NS
    restart(desk, mine, desk.job(40))
    desk.tick(1)
    mine.speak(1, last=True)
    desk.tick(2, speak=False)
    assert desk.news() == [Left(mine.session, Event.LAST_FRAME, 4)]
    did = flags_of(desk.loop.ring.take(), mine)
    assert did == [Flag.PRIMING, Flag.PRIMING | Flag.LAST]
    assert desk.desk.counts.waiting == 0


def test_a_persona_that_cannot_be_fed_in_time_ends_the_call(desk: Desk) -> None:
    (mine,) = live(desk, [desk.job(9)])
    desk.desk.guard_ns = PERIOD_NS
    restart(desk, mine, desk.job(40, until_ns=desk.clock.now_ns() + 5 * PERIOD_NS))
    desk.tick(10)
    assert [type(n) for n in desk.news()] == [Left]


def test_a_tick_that_never_ran_while_the_persona_was_fed_is_recorded_as_such(desk: Desk) -> None:
    mine, other = live(desk, [desk.job(9), None])
    desk.desk.guard_ns = PERIOD_NS
    restart(desk, mine, desk.job(40))
    desk.tick(1)
    desk.step_ns = 400 * MS
    desk.tick(1)
    desk.step_ns = 40 * MS
    desk.tick(1)
    records = desk.loop.ring.take()
    missed = [Flag.MISSED in flags for flags in flags_of(records, mine)]
    assert missed == [Flag.MISSED in flags for flags in flags_of(records, other)]
    assert sum(missed) > 1


def test_a_session_nobody_knows_or_that_ends_is_not_reset(desk: Desk) -> None:
    (mine,) = live(desk, [None])
    ghost = FakeCaller(desk.loop, f"dbxtest-{uuid.uuid4().hex[:12]}", 99)
    restart(desk, ghost)
    desk.loop.inbox.append(Depart(mine.session, Event.LEAVE))
    restart(desk, mine)
    desk.tick(1)
    assert desk.news() == [Left(mine.session, Event.LEAVE, 2)]
    ghost.close()


def test_a_newcomer_who_is_primed_beside_a_reset_gets_its_own_prompt(desk: Desk) -> None:
    mine, _ = live(desk, [desk.job(9, 300), None])
    again, theirs = desk.job(20, 300), desk.job(20, 700)
    restart(desk, mine, again)
    newcomer = desk.caller(theirs)
    desk.tick(4)
    newcomer.speak()
    desk.tick(2)
    assert {type(n) for n in desk.news()} == {Restarted, Primed, WentLive}
    slots = {seat.session: seat.slot for seat in desk.loop._slots}
    assert desk.executor.told == {
        slots[mine.session]: again.prompt.ids[:, 0].tobytes(),
        slots[newcomer.session]: theirs.prompt.ids[:, 0].tobytes(),
    }
