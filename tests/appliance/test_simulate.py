"""The simulation: equal to the real loop where both can run, and what it says about policy."""

import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.ledger import Flag, Settled
from appliance.lines.playout import Playout
from appliance.simulate import Frame, Overrun, Scenario, random_overruns, simulate, text
from tests.fakes import FakeCaller, FakeClock, FakeExecutor, make_bundle, make_loop

PERIOD_NS = 80 * MS
PLAIN = Scenario(
    sessions=2,
    ticks=40,
    period_ns=PERIOD_NS,
    base_ns=10 * MS,
    session_ns=0,
    spread=0.0,
    overruns=(),
    buffer_ns=80 * MS,
    catch_up_ns=80 * MS,
    lag_limit_frames=4,
    guard_ns=8 * MS,
    calm_ns=NS_PER_S,
    shed_after=0,
)


def frames_of(scenario: Scenario) -> list[Frame]:
    frames: list[Frame] = []
    simulate(scenario, frames.append)
    return sorted(frames)


def really(scenario: Scenario, folder: Path) -> list[Frame]:
    """The same scenario through the real loop, real rings and real playout."""
    clock = FakeClock()
    extra: Counter[int] = Counter()
    for overrun in scenario.overruns:
        for number in range(overrun.ticks):
            extra[overrun.first_tick + number] += overrun.extra_ns
    executor = FakeExecutor(make_bundle(folder, scenario.sessions, 16), scenario.sessions)
    loop = make_loop(executor, clock, scenario.catch_up_ns, scenario.lag_limit_frames)

    def work(batch: int) -> None:
        clock.advance(scenario.base_ns + extra[loop.counts.tick])

    executor.work = work
    count = scenario.sessions
    callers = [FakeCaller(loop, f"dbxtest-{uuid.uuid4().hex[:12]}", n + 1) for n in range(count)]
    lines: list[Playout[None]] = [
        Playout(c.session, c.generation, PERIOD_NS, scenario.buffer_ns) for c in callers
    ]
    outcomes: dict[tuple[int, int], int] = {}
    sent, tick = 0, 0

    def speak() -> None:
        nonlocal sent
        while sent * PERIOD_NS - 20 * MS <= clock.now_ns():
            for caller in callers:
                caller.speak()
            sent += 1

    def listen(now_ns: int) -> None:
        for number, (caller, line) in enumerate(zip(callers, lines, strict=True)):
            for header, _ in caller.hear():
                line.arrive(header, None, header.made_ns)
            for receipt in line.due(now_ns)[1]:
                if receipt.outcome != Settled.DISCARDED:
                    outcomes.setdefault((number, receipt.frame_index), receipt.outcome)

    for caller in callers:
        caller.arrive()
    while tick < scenario.ticks:
        clock.sleep_until(loop.grid.start_ns(tick))
        speak()
        tick = loop.turn(tick)
        listen(clock.now_ns())
    listen(clock.now_ns() + 10 * NS_PER_S)
    frames = []
    keep = Flag.HEARD | Flag.CONCEALED | Flag.GENERATED | Flag.LATE | Flag.MISSED
    for record in loop.ring.take():
        if record["tick"] < scenario.ticks:
            number, index = int(record["session"]) - 1, int(record["index"])
            flags = int(record["flags"]) & keep.value
            frames.append((number, index, flags, outcomes[number, index]))
    for caller in callers:
        caller.close()
    return sorted(frames)


@settings(max_examples=15, deadline=None)
@given(
    overruns=st.lists(
        st.builds(
            Overrun,
            st.integers(1, 30),
            st.integers(1, 5),
            st.integers(1, 400).map(lambda n: n * MS),
        ),
        max_size=4,
        unique_by=lambda o: o.first_tick // 6,
    ),
    base_ms=st.integers(5, 75),
    buffer_ms=st.sampled_from([30, 80, 160]),
    catch_up_ms=st.sampled_from([0, 80, 200]),
)
def test_the_simulation_is_the_real_loop_without_its_engine(
    tmp_path_factory: pytest.TempPathFactory,
    overruns: list[Overrun],
    base_ms: int,
    buffer_ms: int,
    catch_up_ms: int,
) -> None:
    scenario = replace(
        PLAIN,
        overruns=tuple(overruns),
        base_ns=base_ms * MS,
        buffer_ns=buffer_ms * MS,
        catch_up_ns=catch_up_ms * MS,
    )
    assert frames_of(scenario) == really(scenario, tmp_path_factory.mktemp("bundle"))


def test_without_overruns_everybody_hears_everything() -> None:
    found = simulate(replace(PLAIN, sessions=3, ticks=100, stagger_ticks=5))
    assert [(s.due, s.on_time) for s in found.sessions] == [(100, 100), (95, 95), (90, 90)]
    assert (found.ticks_late, found.ticks_missed, found.longest_run) == (0, 0, 0)


def test_a_fast_caller_is_skipped_and_a_slow_one_concealed() -> None:
    # 2,000 ppm are 0.16 ms a frame; 80 ms (a frame) are gained or lost within 500 ticks.
    found = simulate(replace(PLAIN, ticks=4000, skew_ppm=2000))
    slow, fast = found.sessions
    assert slow.concealed == pytest.approx(8, abs=1)
    assert (slow.skipped, fast.concealed) == (0, 0)
    assert fast.skipped == pytest.approx(8 - PLAIN.lag_limit_frames, abs=1)
    assert (slow.on_time, fast.on_time) == (4000, 4000)


def test_stalls_shed_nobody_but_lasting_overload_sheds_until_it_fits() -> None:
    heavy = replace(
        PLAIN, sessions=16, ticks=600, base_ns=8 * MS, session_ns=3 * MS, shed_after=3
    )  # 56 of 80 ms
    stalls = tuple(Overrun(at, 1, 400 * MS) for at in range(50, 600, 100))
    assert simulate(replace(heavy, overruns=stalls)).shed == []
    # An antagonist takes 40 ms of every tick: 8 + 3 n + 40 fit for n = 10, but leave only 2 ms
    # to catch up with; the 7th goes because lateness lasts.
    found = simulate(replace(heavy, overruns=(Overrun(100, 500, 40 * MS),)))
    assert len(found.shed) == 7
    assert [s.shed for s in found.sessions] == [False] * 9 + [True] * 7
    assert found.shed[-1] < 100 + 7 * 5
    # Those who stay hear everything in time once it fits.
    assert min(s.on_time for s in found.sessions[:9]) > 540


def test_the_same_scenario_gives_the_same_outcome() -> None:
    overruns = random_overruns(500, PERIOD_NS, 2000, 10 * MS, 300 * MS, seed=4)
    assert overruns == random_overruns(500, PERIOD_NS, 2000, 10 * MS, 300 * MS, seed=4)
    assert len(overruns) == pytest.approx(500 * 0.08 / 3600 * 2000, abs=15)
    scenario = replace(PLAIN, ticks=500, overruns=overruns, spread=0.1)
    assert simulate(scenario) == simulate(scenario)
    assert any("worst" in line for line in text(scenario, simulate(scenario)))


@pytest.mark.clock
@pytest.mark.soak
def test_256_sessions_for_an_hour_take_less_than_five_minutes() -> None:
    clock_s = _Stopwatch()
    overruns = random_overruns(45_000, PERIOD_NS, 60, 20 * MS, 300 * MS, seed=1)
    scenario = replace(
        PLAIN,
        sessions=256,
        ticks=45_000,
        base_ns=5 * MS,
        session_ns=200_000,
        spread=0.05,
        overruns=overruns,
        skew_ppm=200,
        stagger_ticks=10,
        shed_after=3,
    )
    found = simulate(scenario)
    assert clock_s.elapsed() < 300
    assert found.shed == []
    assert sum(s.due for s in found.sessions) == sum(
        s.on_time + s.late + s.filled for s in found.sessions
    )


class _Stopwatch:
    """Real seconds, from the one place that reads time."""

    def __init__(self) -> None:
        from appliance.clock import MonotonicClock

        self._clock = MonotonicClock()
        self._began_ns = self._clock.now_ns()

    def elapsed(self) -> float:
        return (self._clock.now_ns() - self._began_ns) / NS_PER_S
