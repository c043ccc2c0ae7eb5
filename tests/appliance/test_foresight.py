"""Gate, forecast and shedding over a tick loop on a fake clock."""

import itertools
import logging
from pathlib import Path

import pytest

from appliance.admission import Reason
from appliance.calibration import Recalibration
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.config import AdmissionConfig
from appliance.foresight import AGED_NS, Foresight
from appliance.seat import Depart
from appliance.session import Event
from appliance.step_model import ENOUGH_TICKS, StepSamples
from tests.appliance.test_tick_loop import Desk

CONFIG = AdmissionConfig(calm_s=1)


def foresight(desk: Desk, samples: StepSamples | None = None) -> Foresight:
    manifest = desk.executor.bundle.manifest
    return Foresight(desk.loop, manifest, CONFIG, 4, 2**30, 4012, samples or StepSamples())


def turn(desk: Desk, sight: Foresight, ticks: int = 1) -> None:
    for _ in range(ticks):
        for caller in desk.callers:
            caller.speak()
        desk.tick()
        for caller in desk.callers:
            caller.hear()
        sight.look(desk.clock.now_ns())


def test_admission_stops_before_anybody_is_late_and_resumes_when_it_is_calm(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        # Steps creep towards the deadline by 5 ms a tick, then are fast again.
        desk.work_ns = {n: min(76, 10 + 5 * n) * MS for n in range(16)}
        sight = foresight(desk)
        desk.caller()
        opened = []
        for _ in range(40):
            turn(desk, sight)
            opened.append(sight.headroom(1, ready=True, draining=False).gate_open)
            sight.look_at_time = False  # a certificate's search wants to see them late
            assert sight.headroom(1, ready=True, draining=False).gate_open
            sight.look_at_time = True
        assert desk.loop.counts.late == 0
        closed = [n for n, is_open in enumerate(opened) if not is_open]
        assert closed[0] == 13  # 10 + 65 ms of 80: the first margin below 8 ms
        assert closed == list(range(closed[0], closed[-1] + 1))
        assert opened[-1]
        # From the last thin tick (15, done at 15 * 80 + 76) until a second of calm has passed.
        assert closed[-1] in (27, 28)
    finally:
        desk.close()


def test_the_forecast_learns_from_live_ticks(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        desk.work_ns = {n: 38 * MS for n in range(200)}
        sight = foresight(desk)
        assert sight.forecast() is None  # nothing was ever timed
        desk.caller()
        turn(desk, sight, 20)
        room = sight.headroom(1, ready=True, draining=False)
        assert room.forecast is not None
        assert room.forecast.tick_ns(1) == 38 * MS
        assert room.limit is Reason.TIME  # 2 sessions are forecast from 1: more than 38 ms
        assert sight.headroom(1, ready=False, draining=False).forecast is None
    finally:
        desk.close()


def test_the_forecast_knows_how_old_the_live_sessions_are(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        full = desk.executor.bundle.manifest.ticks_until_full()
        desk.work_ns = {n: 10 * MS for n in range(200)}
        sight = foresight(desk)
        callers = [desk.caller() for _ in range(2)]
        for age in (20, 21):
            turn(desk, sight, 20 if age == 20 else 1)
            forecast = sight.forecast()
            assert forecast is not None
            assert forecast.fill_now == pytest.approx(2 * age / full, abs=0.001)
        for caller in callers:
            desk.loop.inbox.append(Depart(caller.session, Event.LEAVE))
        desk.tick()
        sight.look(desk.clock.now_ns())
        forecast = sight.forecast()
        assert forecast is not None
        assert forecast.fill_now == 0
    finally:
        desk.close()


def test_lasting_overload_sheds_one_session_and_gives_the_others_time(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        sight = foresight(desk)
        for _ in range(3):
            desk.caller()
        turn(desk, sight, 10)
        assert sight.plan_shed([1, 2, 3]) is None
        desk.work_ns = {n: 120 * MS for n in range(200)}
        chosen = []
        for _ in range(8):
            turn(desk, sight)
            if (session := sight.plan_shed([1, 2, 3])) is not None:
                chosen.append((desk.loop.counts.tick, session))
                assert not sight.gate.is_open
        ticks = [tick for tick, _ in chosen]
        assert [session for _, session in chosen] == [3] * len(chosen)
        assert len(chosen) >= 2
        assert min(b - a for a, b in itertools.pairwise(ticks)) >= CONFIG.shed_after
        sight.look_at_time = False
        turn(desk, sight, 4)
        assert sight.plan_shed([1, 2, 3]) is None
    finally:
        desk.close()


def test_one_stall_sheds_nobody(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        sight = foresight(desk)
        desk.caller()
        desk.caller()
        desk.work_ns = {5: round(0.65 * NS_PER_S)}
        for _ in range(20):
            turn(desk, sight)
            assert sight.plan_shed([1, 2]) is None
        assert desk.loop.counts.missed > 3
    finally:
        desk.close()


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What the log says of steps that have become slower or faster."""
    return [(r.levelname, r.message) for r in caplog.records if "calibrated" in r.message]


def test_an_idle_box_times_its_steps_again_when_they_are_old_or_the_machine_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk, samples = Desk(tmp_path), StepSamples()
    caplog.set_level(logging.INFO)
    try:
        idle = desk.loop.idle = Recalibration(desk.executor, desk.clock)
        for batch in (1, 2, 4):
            for _ in range(40):
                samples.add(batch, 0, 10 * MS)
        sight = foresight(desk, samples)

        def look(seconds: float) -> None:
            desk.clock.advance(round(seconds * NS_PER_S))
            sight.look(desk.clock.now_ns())

        look(0)
        look(60)
        assert not idle.asked  # it is as it was
        look(AGED_NS / NS_PER_S)
        assert idle.asked
        idle.drop()  # a caller came
        look(1)
        assert not idle.asked  # and not at once again
        look(6)
        assert idle.asked
        idle.asked, idle.done = False, [(batch, 0.0, 10 * MS) for batch in (1, 2, 4)] * 8
        look(1)
        look(10)
        assert not idle.asked
        # Live ticks take twice as long: once its callers have gone, it is looked into.
        for _ in range(ENOUGH_TICKS):
            samples.add(2, 0, 20 * MS, at_ns=desk.clock.now_ns())
        desk.clock.advance(NS_PER_S)  # the fit may be as old as that
        slow = sight.forecast()
        assert slow is not None
        assert slow.tick_ns(4) >= 20 * MS
        assert told(caplog) == [("WARNING", "steps take 2.00 times what was calibrated")]
        look(1)
        assert idle.asked
        idle.asked, idle.done = False, [(batch, 0.0, 10 * MS) for batch in (1, 2, 4)] * 8
        look(61)
        forecast = sight.forecast()
        assert forecast is not None
        assert forecast.tick_ns(4) == 10 * MS
        assert told(caplog)[1:] == [("INFO", "steps take 1.00 times what was calibrated")]
    finally:
        desk.close()


def test_a_calibration_that_a_stall_fell_into_does_not_shut_an_idle_box(tmp_path: Path) -> None:
    desk, samples = Desk(tmp_path), StepSamples()
    kinds = (1, 2, 4)
    try:
        idle = desk.loop.idle = Recalibration(desk.executor, desk.clock)
        for batch in kinds:
            for step in range(40):
                samples.add(batch, 0, (120 if (batch, step) == (2, 7) else 10) * MS)
        sight = foresight(desk, samples)

        def look(seconds: float) -> int:
            """How many would be let in."""
            desk.clock.advance(round(seconds * NS_PER_S))
            sight.look(desk.clock.now_ns())
            return sight.headroom(0, ready=True, draining=False).free

        assert look(0) == 0
        assert look(4) == 0
        assert not idle.asked  # somebody may be about to come
        assert look(2) == 0
        assert idle.asked
        idle.asked, idle.done = False, [(batch, 0.0, 10 * MS) for batch in kinds] * 40
        assert look(1) == 4
        look(60)
        assert not idle.asked
    finally:
        desk.close()
