"""What is timed before anybody is let in."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from appliance.calibration import LEAST_STEPS, calibrate, calibration_batches, warm_up
from appliance.clock import NS_PER_MS as MS
from appliance.step_model import KEEP_TICKS, StepSamples
from tests.fakes import FakeClock, FakeExecutor, make_bundle


class AgingExecutor(FakeExecutor):
    """5 ms, 2 ms per session, and 3 ms more for each that is at full retention."""

    def __init__(self, folder: Path, clock: FakeClock, slots: int = 5) -> None:
        self._old = [False] * slots
        super().__init__(make_bundle(folder, slots), slots, self._spend)
        self._clock = clock

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        super().join(slot, settings)
        self._old[slot] = False

    def age(self, slot: int, ticks: int) -> None:
        self._old[slot] = ticks >= self.bundle.manifest.ticks_until_full()

    def _spend(self, batch: int) -> None:
        self._clock.advance((5 + 2 * batch + 3 * sum(self._old[:batch])) * MS)


@pytest.mark.parametrize(
    ("slots", "batches"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_batches_double_up_to_the_largest(slots: int, batches: tuple[int, ...]) -> None:
    assert calibration_batches(slots) == batches


def test_young_and_old_sessions_are_timed_and_the_fit_tells_them_apart(tmp_path: Path) -> None:
    clock, samples = FakeClock(), StepSamples()
    calibrate(AgingExecutor(tmp_path, clock), clock, 3000 * MS, samples, lambda: False)
    model = samples.fit(0)
    assert model is not None
    terms = (model.base_ns, model.session_ns, model.fill_ns)
    assert terms == pytest.approx((5 * MS, 2 * MS, 3 * MS), rel=1e-6)
    assert (model.largest_batch, model.largest_fill) == (5, 1.0)
    # One step more than the budget at most, for each of the 8 kinds of step.
    assert 2500 * MS < clock.now_ns() < 3000 * MS + 8 * 30 * MS


def test_a_tiny_budget_still_gives_every_kind_its_least_steps(tmp_path: Path) -> None:
    clock, samples = FakeClock(), StepSamples()
    calibrate(AgingExecutor(tmp_path, clock), clock, 1, samples, lambda: False)
    assert samples.added == 8 * LEAST_STEPS


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


def test_a_box_told_to_stop_calibrates_no_further(tmp_path: Path) -> None:
    executor = FakeExecutor(make_bundle(tmp_path, 2), 2)
    samples = StepSamples()
    warm_up(executor, lambda: True)
    calibrate(executor, FakeClock(), 10 * MS, samples, lambda: True)
    assert (samples.added, len(executor.batches)) == (0, 0)
