"""Hard, freshness and event: what is run, what is dropped, and what is told to whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.clock import TickGrid
from appliance.contracts import Contract, Outcome, Terms, Work, judge, plan_work, raises_alarm
from appliance.side_loop import WAITING_LIMIT, Input, Record, SideLoop
from tests.fakes import FakeClock

P = 32 * MS
HARD = Terms(Contract.HARD, P, 0)
FRESH = Terms(Contract.FRESHNESS, P, 50 * MS)
EVENT = Terms(Contract.EVENT, P, 50 * MS)
PCM = np.zeros(4, np.float32)


def test_hard_runs_the_period_that_is_now_and_gives_up_those_that_cannot_be_met() -> None:
    assert plan_work(HARD, 3, 3 * P, 0, [3 * P], 5 * MS) == Work(3, 0, 0, True, 4 * P)
    # 2.5 periods late: two periods are missed, and their inputs are dropped with them.
    work = plan_work(HARD, 3, 5 * P + P // 2, 0, [3 * P, 4 * P, 5 * P], 5 * MS)
    assert work == Work(5, 2, 2, True, 6 * P)
    # In the rest of this period nothing can be done any more: the next one is taken on.
    assert plan_work(HARD, 3, 4 * P - MS, 0, [3 * P], 5 * MS).tick == 3
    # An input that has not come is waited for, up to a quarter of the period.
    assert plan_work(HARD, 3, 3 * P, 0, [], 5 * MS) == Work(3, 0, 0, False, 4 * P, waits=True)
    assert plan_work(HARD, 3, 4 * P - 11 * MS, 0, [], 5 * MS).waits
    assert not plan_work(HARD, 3, 4 * P - 10 * MS, 0, [], 5 * MS).waits


def test_freshness_takes_the_newest_and_nothing_that_is_too_old() -> None:
    assert plan_work(FRESH, 0, 40 * MS, 0, [1, 20 * MS, 35 * MS], MS) == Work(
        0, 0, 2, True, 85 * MS
    )
    assert plan_work(FRESH, 0, 90 * MS, 0, [1, 20 * MS], MS) == Work(0, 0, 2, False, 70 * MS)
    assert not plan_work(FRESH, 0, 90 * MS, 0, [], MS).runs


def test_event_takes_every_input_in_order_but_not_the_hopeless() -> None:
    assert plan_work(EVENT, 0, 40 * MS, 0, [30 * MS, 35 * MS], MS) == Work(0, 0, 0, True, 80 * MS)
    assert plan_work(EVENT, 0, 75 * MS, 0, [20 * MS, 30 * MS], 4 * MS) == Work(
        0, 0, 1, True, 80 * MS
    )
    # Steps have become slower than the bound: the newest is run on all the same.
    assert plan_work(EVENT, 0, 40 * MS, 0, [30 * MS, 35 * MS], 90 * MS).runs
    assert not plan_work(EVENT, 0, 99 * MS, 0, [30 * MS, 35 * MS], MS).runs


def test_who_is_told_what() -> None:
    work = Work(0, 0, 0, True, 100)
    assert [judge(terms, work, 100) for terms in (HARD, FRESH, EVENT)] == [Outcome.DELIVERED] * 3
    assert [judge(terms, work, 101) for terms in (HARD, FRESH, EVENT)] == [
        Outcome.SUBSTITUTED,
        Outcome.LATE,
        Outcome.LATE,
    ]
    assert raises_alarm(HARD, Outcome.SUBSTITUTED)
    assert raises_alarm(EVENT, Outcome.DROPPED)
    assert not raises_alarm(FRESH, Outcome.DROPPED)
    assert not raises_alarm(HARD, Outcome.DELIVERED)


class Desk:
    """A side loop on a fake clock; the model's number is the index of the input it heard."""

    def __init__(self, terms: Terms, works_ns: list[int]) -> None:
        self.clock = FakeClock()
        self.records: list[Record] = []
        self.told: list[Record] = []
        self.works_ns = works_ns
        self.steps = 0
        self.loop = SideLoop(
            self, terms, self.clock, TickGrid(0, terms.period_ns), self.records.append,
            self.told.append,
        )  # fmt: skip

    def step(self, pcm: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> float:
        self.clock.advance(self.works_ns[self.steps % len(self.works_ns)])
        self.steps += 1
        return float(pcm[0])

    def run(self, arrivals_ns: list[int], until_ns: int) -> None:
        """Inputs come at ``arrivals_ns``; the loop turns whenever it may."""
        coming = [Input(n, at_ns, np.full(4, n, np.float32)) for n, at_ns in enumerate(arrivals_ns)]
        while self.clock.now_ns() < until_ns:
            while coming and coming[0].captured_ns <= self.clock.now_ns():
                self.loop.waiting.append(coming.pop(0))
            before = self.clock.now_ns()
            self.loop.turn()
            if self.clock.now_ns() == before:
                self.clock.advance(MS)


def test_hard_substitutes_the_result_before_and_raises_an_alarm() -> None:
    desk = Desk(HARD, [5 * MS, 5 * MS, 80 * MS, 5 * MS])
    desk.run([n * P for n in range(10)], 9 * P)
    outcomes = [record.outcome for record in desk.records]
    # The third step ends 2.5 periods after its start: its own result is worthless, and so are those
    # of the period it ran over; the fifth starts late and is in time.
    assert outcomes[:6] == [
        *(Outcome.DELIVERED, Outcome.DELIVERED, Outcome.SUBSTITUTED, Outcome.SUBSTITUTED),
        *(Outcome.DELIVERED, Outcome.DELIVERED),
    ]
    assert [record.value for record in desk.records[:5]] == [0, 1, 1, 1, 4]
    assert [record.number for record in desk.records] == list(range(len(desk.records)))
    assert [record.number for record in desk.told] == [
        record.number for record in desk.records if record.outcome is Outcome.SUBSTITUTED
    ]
    assert desk.records[2].margin_ns == -48 * MS


def test_freshness_is_never_far_behind_however_slow_steps_are() -> None:
    desk = Desk(FRESH, [45 * MS])
    desk.run([n * 10 * MS for n in range(60)], 600 * MS)
    delivered = [record for record in desk.records if record.outcome is Outcome.DELIVERED]
    assert len(delivered) >= 12
    assert max(record.age_ns for record in delivered) <= FRESH.bound_ns
    assert sum(record.outcome is Outcome.DROPPED for record in desk.records) > 40
    assert desk.loop.alarms == 0


def test_an_event_that_cannot_be_in_time_is_dropped_so_that_the_next_one_is() -> None:
    desk = Desk(EVENT, [40 * MS])
    desk.run([0, 1 * MS, 2 * MS, 100 * MS], 300 * MS)
    assert [(record.number, record.outcome) for record in desk.records] == [
        (0, Outcome.DELIVERED),
        (1, Outcome.DROPPED),
        (2, Outcome.LATE),
        (3, Outcome.DELIVERED),
    ]
    assert desk.loop.alarms == 2


@given(
    contract=st.sampled_from([HARD, FRESH, EVENT]),
    works_ms=st.lists(st.integers(0, 120), min_size=1, max_size=8),
    gaps_ms=st.lists(st.integers(0, 90), min_size=1, max_size=40),
)
def test_every_period_or_input_has_exactly_one_record_and_nothing_late_is_delivered(
    contract: Terms, works_ms: list[int], gaps_ms: list[int]
) -> None:
    desk = Desk(contract, [work * MS for work in works_ms])
    arrivals = np.cumsum(gaps_ms).tolist()
    desk.run([at * MS for at in arrivals], (arrivals[-1] + 500) * MS)
    numbers = [record.number for record in desk.records]
    if contract.contract is Contract.HARD:
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= arrivals[-1] // 32
    else:
        assert numbers == list(range(len(arrivals)))
    for record in desk.records:
        if record.outcome is Outcome.DELIVERED:
            assert record.margin_ns >= 0
            assert contract is HARD or record.age_ns <= contract.bound_ns
        elif contract is not HARD:
            assert np.isnan(record.value)  # nothing is handed on


def test_inputs_nobody_takes_are_bounded() -> None:
    desk = Desk(EVENT, [0])
    for n in range(WAITING_LIMIT + 5):
        desk.loop.waiting.append(Input(n, 0, PCM))
    desk.loop.turn()
    assert [record.outcome for record in desk.records[:6]] == [Outcome.DROPPED] * 5 + [
        Outcome.DELIVERED
    ]


@pytest.mark.parametrize("terms", [HARD, FRESH, EVENT])
def test_without_trouble_everything_is_delivered(terms: Terms) -> None:
    desk = Desk(terms, [3 * MS])
    desk.run([n * P for n in range(20)], 20 * P)
    assert {record.outcome for record in desk.records} == {Outcome.DELIVERED}
    assert [record.value for record in desk.records] == list(range(20))
