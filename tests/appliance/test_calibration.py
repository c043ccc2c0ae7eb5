"""What is timed before anybody is let in."""

import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from appliance.calibration import (
    LEAST_STEPS,
    RECALIBRATE_STEPS,
    SETTLE_STEPS,
    WARM_STEPS,
    Recalibration,
    calibrate,
    calibration_batches,
    warm_up,
)
from appliance.clock import NS_PER_MS as MS
from appliance.clock import TickGrid
from appliance.seat import Depart
from appliance.session import Event
from appliance.step_model import KEEP_TICKS, StepSamples
from engines.cuda_executor import CudaExecutor, CudaOptions
from tests.engines import fake_driver, toy
from tests.fakes import PERIOD_NS, FakeCaller, FakeClock, FakeExecutor, make_bundle, make_loop


class AgingExecutor(FakeExecutor):
    """5 ms, 2 ms per session, and 3 ms more for each that is at full retention."""

    def __init__(self, folder: Path, clock: FakeClock, slots: int = 5) -> None:
        self._old = [False] * slots
        super().__init__(make_bundle(folder, slots), slots, self._spend)
        self._clock = clock
        self.slower = 1
        self.spent_ns: list[int] = []

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        super().join(slot, settings)
        self._old[slot] = False

    def age(self, slot: int, ticks: int) -> None:
        self._old[slot] = ticks >= self.bundle.manifest.ticks_until_full()

    def _spend(self, batch: int) -> None:
        took_ns = (5 + 2 * batch + 3 * sum(self._old[:batch])) * MS * self.slower
        self.spent_ns.append(took_ns)
        self._clock.advance(took_ns)


@pytest.mark.parametrize(
    ("slots", "batches"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_batches_double_up_to_the_largest(slots: int, batches: tuple[int, ...]) -> None:
    assert calibration_batches(slots) == batches


def test_young_and_old_sessions_are_timed_and_the_fit_tells_them_apart(tmp_path: Path) -> None:
    clock, samples = FakeClock(), StepSamples()
    executor = AgingExecutor(tmp_path, clock)
    calibrate(executor, clock, 3000 * MS, samples, lambda: False)
    model = samples.fit(0)
    assert model is not None
    terms = (model.base_ns, model.session_ns, model.fill_ns)
    assert terms == pytest.approx((5 * MS, 2 * MS, 3 * MS), rel=1e-6)
    assert (model.largest_batch, model.largest_fill) == (5, 1.0)
    # One step more than the budget at most, and its rest, for each of the 8 kinds of step.
    assert 2500 * MS < clock.now_ns() < 3000 * MS + 8 * 38 * MS
    # The kernel holds up a real-time thread that takes more than 95 % of a second.
    assert sum(executor.spent_ns) < 0.85 * clock.now_ns()


def test_a_tiny_budget_still_gives_every_kind_its_least_steps(tmp_path: Path) -> None:
    clock, samples = FakeClock(), StepSamples()
    calibrate(AgingExecutor(tmp_path, clock), clock, 1, samples, lambda: False)
    assert samples.added == 8 * LEAST_STEPS


def test_batches_no_period_has_room_for_are_left_out_and_forecast_all_the_same(
    tmp_path: Path,
) -> None:
    clock, samples = FakeClock(), StepSamples()
    executor = AgingExecutor(tmp_path, clock, 32)  # 5 + 2 n ms, 5 + 5 n at full retention
    calibrate(executor, clock, 3000 * MS, samples, lambda: False)
    model = samples.fit(0)
    assert model is not None
    # 16 young ones take 37 ms, 16 old ones 85: a step of those says nothing about any tick.
    assert (model.largest_batch, executor.batches[-1]) == (32, 16)
    assert model.p999_ns(16, 16) >= 85 * MS * (1 - 1e-6)
    idle = Recalibration(executor, clock)
    idle.asked = True
    for _ in range(11 * (SETTLE_STEPS + RECALIBRATE_STEPS)):
        idle.work()
    assert idle.done is not None
    assert {batch for batch, fill, _ in idle.done if fill} == {1, 2, 4, 8}
    assert {batch for batch, fill, _ in idle.done if not fill} == {1, 2, 4, 8, 16, 32}
    assert max(busy_ns for _, _, busy_ns in idle.done) < PERIOD_NS


def test_an_engine_that_cannot_age_is_timed_young(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = FakeExecutor(make_bundle(tmp_path, 2), 2)
    samples = StepSamples()
    calibrate(executor, FakeClock(), 10 * MS, samples, lambda: False)
    assert samples.added == 2 * KEEP_TICKS  # a clock that stands still: the budget never ends
    model = samples.fit(0)
    assert model is not None
    assert model.largest_fill == 0
    assert "cannot be timed at full retention" in caplog.text


def test_every_batch_runs_a_few_times_before_anything_is_timed(tmp_path: Path) -> None:
    ran: list[int] = []
    warm_up(FakeExecutor(make_bundle(tmp_path, 3), 3, ran.append), lambda: False)
    assert ran == [batch for batch in (1, 2, 3) for _ in range(WARM_STEPS)]


def test_a_box_told_to_stop_calibrates_no_further(tmp_path: Path) -> None:
    executor = FakeExecutor(make_bundle(tmp_path, 2), 2)
    samples = StepSamples()
    warm_up(executor, lambda: True)
    calibrate(executor, FakeClock(), 10 * MS, samples, lambda: True)
    assert (samples.added, len(executor.batches)) == (0, 0)


def test_steps_are_timed_again_while_nobody_is_there_and_left_when_somebody_comes(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    executor = AgingExecutor(tmp_path, clock, 4)
    loop = make_loop(executor, clock)
    samples = StepSamples()
    calibrate(executor, clock, 500 * MS, samples, lambda: False)
    loop.grid = TickGrid(clock.now_ns(), PERIOD_NS)
    idle = loop.idle = Recalibration(executor, clock)
    tick = 0

    def turn(ticks: int) -> None:
        nonlocal tick
        for _ in range(ticks):
            clock.sleep_until(loop.grid.start_ns(tick))
            tick = loop.turn(tick)

    executor.slower = 3
    executor.batches.clear()
    turn(5)
    assert not executor.batches  # nobody asked
    idle.asked = True
    turn(100)
    caller = FakeCaller(loop, f"dbxtest-{uuid.uuid4().hex[:12]}", 1)
    caller.arrive()
    turn(1)
    assert (idle.asked, idle.done) == (False, None)
    for _ in range(3):
        caller.speak()
        idle.asked = True  # as it was asked before control heard of the caller
        turn(1)
        assert not idle.asked
    heard = caller.hear()
    assert [header.frame_index for header, _ in heard] == [0, 1, 2]
    assert [value for _, value in heard] == [0, caller.value(0), caller.value(1)]
    assert loop.counts.late == 0
    loop.inbox.append(Depart(caller.session, Event.LEAVE))
    idle.asked = True
    turn(6 * (SETTLE_STEPS + RECALIBRATE_STEPS))
    assert idle.done is not None
    samples.renew(idle.done)
    model = samples.fit(0)
    assert model is not None
    terms = (model.base_ns, model.session_ns, model.fill_ns)
    assert terms == pytest.approx((15 * MS, 6 * MS, 9 * MS), rel=1e-6)
    assert not idle.asked
    caller.close()


def test_an_engine_gives_no_memory_back_while_its_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Young sessions timed after old ones would pay for the pages of those."""
    fake_driver.install(monkeypatch)
    bundle = toy.write_toy(tmp_path / "toy")
    executor = CudaExecutor(bundle, 3, CudaOptions(graphs=False))
    arena, step = executor.arena, executor.step
    worked: list[tuple[int, int]] = []

    def counted(batch: int) -> None:
        mapped, unmapped = arena.counts.late, arena.counts.unmapped
        step(batch)
        worked.append((arena.counts.late - mapped, arena.counts.unmapped - unmapped))

    monkeypatch.setattr(executor, "step", counted)
    calibrate(executor, FakeClock(), 1, StepSamples(), lambda: False)
    assert not any(unmapped for _, unmapped in worked)
    executor.close()
