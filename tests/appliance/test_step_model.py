"""What a tick takes: the fit, its forecasts, and the ring its samples travel in."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.step_model import (
    ENOUGH_TICKS,
    FORGET_NS,
    KEEP_TICKS,
    StepModel,
    StepRing,
    StepSamples,
)

TICKS = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.floats(0, 1),
        st.integers(1, 10**9),
    ),
    min_size=1,
    max_size=60,
)


def fit(ticks: Sequence[tuple[int, float, int]]) -> StepModel:
    samples = StepSamples()
    for batch, mean_fill, busy_ns in ticks:
        samples.add(batch, batch * mean_fill, busy_ns)
    model = samples.fit(0)
    assert model is not None
    return model


def test_a_straight_line_is_found_and_carried_on() -> None:
    ticks = [
        (batch, fill, 2_000_000 + 500_000 * batch + round(250_000 * batch * fill))
        for batch in (1, 2, 4)
        for fill in (0.0, 0.5, 1.0)
        for _ in range(10)
    ]
    model = fit(ticks)
    assert model.base_ns == pytest.approx(2_000_000)
    assert model.session_ns == pytest.approx(500_000)
    assert model.fill_ns == pytest.approx(250_000)
    assert model.misfit_ns == pytest.approx(0, abs=1)
    assert model.p999_ns(8, 8) == pytest.approx(2_000_000 + 8 * 750_000, abs=10)
    assert (model.ticks, model.largest_batch, model.largest_fill) == (90, 4, 1.0)


def test_the_tail_is_what_one_tick_in_a_thousand_takes_beyond_the_median() -> None:
    model = fit([(2, 0, 1_000_000)] * 255 + [(2, 0, 9_000_000)])
    assert model.p999_ns(2, 0) == pytest.approx(9_000_000)
    assert model.p999_ns(4, 0) > 9_000_000  # beyond what was measured, the tail grows as well


def test_a_step_in_the_curve_is_not_averaged_away() -> None:
    flat = [(batch, 0.0, 1_000_000) for batch in (1, 2, 3, 4) for _ in range(20)]
    model = fit([*flat, *[(5, 0.0, 8_000_000)] * 20])
    assert model.p999_ns(5, 0) >= 8_000_000


def test_a_bucket_of_a_few_disturbed_ticks_is_no_step_in_the_curve() -> None:
    """64 callers join one a second: a dozen ticks per batch, and now and then a slow one."""
    ticks = [
        (batch, 0.0, 1_000_000 * batch + (25_000_000 if batch == 20 and n < 3 else 0))
        for batch in range(1, 41)
        for n in range(3 if batch == 20 else 12)
    ]
    model = fit(ticks)
    assert model.misfit_ns < 1_000_000
    # They are 3 of 471 ticks, so they are the 99.9th percentile, and count once.
    assert model.p999_ns(41, 0) == pytest.approx(41_000_000 + 25_000_000, rel=0.1)


def test_a_slow_batch_does_not_hide_how_much_the_others_differ() -> None:
    """What it exceeds the line by was taken off what the longest ticks exceed their median by."""
    rng = np.random.default_rng(1)
    shares = np.exp(0.1 * np.abs(rng.standard_normal((60, 12))))
    model = fit(
        [
            (batch, 0.0, round(1e6 * (batch + 6 * (batch == 8)) * share))
            for batch in range(1, 61)
            for share in shares[batch - 1]
        ]
    )
    assert model.misfit_ns > 5_000_000
    # |normal| exceeds 1.96 once in twenty, and 0.67 every other time
    assert model.sway == pytest.approx(np.exp(0.1 * (1.96 - 0.67)) - 1, abs=0.03)


def test_chance_among_many_buckets_is_no_step_in_the_curve() -> None:
    rng = np.random.default_rng(1)
    noise = 1 + 0.1 * rng.standard_normal((60, 9))
    model = fit([(b, 0.0, round(1e6 * b * t)) for b in range(1, 61) for t in noise[b - 1]])
    assert model.misfit_ns < 1_000_000  # the furthest median is 4 ms above the line


def test_an_old_disturbance_is_forgotten() -> None:
    model = fit([(2, 0, 70_000_000)] * 100 + [(2, 0, 1_000_000)] * KEEP_TICKS)
    assert model.p999_ns(2, 0) == pytest.approx(1_000_000)


def test_a_disturbance_does_not_outlast_the_ticks_it_was_seen_in() -> None:
    """Nobody is let in, so no tick of that batch can ever say that it is over."""
    samples = StepSamples()
    for _ in range(50):
        samples.add(4, 0, 10_000_000)  # calibrated
    for _ in range(ENOUGH_TICKS - 1):  # many more, and it is another machine: see below
        samples.add(4, 0, 200_000_000, at_ns=1)
    disturbed, later = samples.fit(1), samples.fit(2 + FORGET_NS)
    assert disturbed is not None
    assert later is not None
    assert disturbed.p999_ns(4, 0) == pytest.approx(200_000_000)
    assert later.p999_ns(4, 0) == pytest.approx(10_000_000)


def test_live_ticks_take_the_place_of_calibration_once_there_are_enough() -> None:
    samples = StepSamples()
    for _ in range(50):
        samples.add(4, 0, 60_000_000)  # the machine was busy when the box started
    for n in range(ENOUGH_TICKS):
        fitted = samples.fit(0)
        assert fitted is not None
        assert fitted.p999_ns(4, 0) >= 59_000_000, n
        samples.add(4, 0, 10_000_000, at_ns=0)
    fitted = samples.fit(0)
    assert fitted is not None
    assert fitted.p999_ns(4, 0) == pytest.approx(10_000_000)


def calibrated(session_ms: int = 3) -> StepSamples:
    samples = StepSamples()
    for batch in (1, 2, 4, 8):
        for _ in range(40):
            samples.add(batch, 0, (2 + session_ms * batch) * 1_000_000)
    return samples


def forecast(samples: StepSamples, batch: int, now_ns: int) -> int:
    model = samples.fit(now_ns)
    assert model is not None
    return model.p999_ns(batch, 0)


@given(times=st.floats(1, 8), batch=st.sampled_from([1, 2, 4]))
def test_a_machine_that_became_slower_is_not_taken_for_the_one_that_was_calibrated(
    times: float, batch: int
) -> None:
    """Live ticks of small batches say so; the forecast of the largest must not be too low."""
    samples = calibrated()
    for _ in range(ENOUGH_TICKS):
        samples.add(batch, 0, round((2 + 3 * batch) * 1_000_000 * times), at_ns=1)
    assert forecast(samples, batch, 1) >= (2 + 3 * batch) * 1_000_000 * times * (1 - 1e-6)
    if times >= 2:
        assert forecast(samples, 8, 1) >= 26_000_000 * times * (1 - 1e-6)
    else:  # gathering and scattering make small ticks longer, and are no other machine
        assert forecast(samples, 8, 1) >= 26_000_000 * (1 - 1e-6)


def test_a_slower_machine_is_remembered_until_it_is_calibrated_again() -> None:
    samples = calibrated()
    for _ in range(ENOUGH_TICKS):
        samples.add(2, 0, 16_000_000, at_ns=1)
    assert forecast(samples, 8, 1) == pytest.approx(52_000_000, rel=0.01)
    later = 2 + FORGET_NS  # its callers have gone, and nobody comes because nobody is let in
    assert forecast(samples, 8, later) == pytest.approx(52_000_000, rel=0.01)
    samples.renew([(batch, 0.0, (2 + 3 * batch) * 1_000_000) for batch in (1, 2, 4, 8)] * 10)
    assert samples.slower == 1
    assert forecast(samples, 8, later) == pytest.approx(26_000_000, rel=0.01)


def test_live_ticks_that_are_fast_again_take_it_back() -> None:
    samples = calibrated()
    for _ in range(ENOUGH_TICKS):
        samples.add(2, 0, 40_000_000, at_ns=1)
    assert samples.fit(1) is not None
    assert samples.slower == 5
    for _ in range(KEEP_TICKS):
        samples.add(2, 0, 9_000_000, at_ns=2)  # 1 ms of gathering and scattering
    assert samples.fit(2) is not None
    assert samples.slower == 1


def test_nothing_added_nothing_forecast() -> None:
    assert StepSamples().fit(0) is None


@given(ticks=TICKS, batch=st.integers(1, 40), fill=st.floats(0, 1))
def test_more_sessions_or_fuller_ones_never_take_less(
    ticks: list[tuple[int, float, int]], batch: int, fill: float
) -> None:
    model = fit(ticks)
    assert model.p999_ns(0, 0) == 0
    assert model.p999_ns(batch, fill) <= model.p999_ns(batch + 1, fill)
    assert model.p999_ns(batch, fill * batch) <= model.p999_ns(batch, batch)


@given(ticks=TICKS)
def test_a_forecast_is_never_below_the_median_of_what_was_measured(
    ticks: list[tuple[int, float, int]],
) -> None:
    model = fit(ticks)
    for batch in {batch for batch, _, _ in ticks}:
        busy = [b for n, _, b in ticks if n == batch]
        assert model.p999_ns(batch, batch) >= min(busy) * (1 - 1e-9)
    # All ticks of one bucket: its median is met exactly or exceeded.
    batch, mean_fill, busy_ns = ticks[0]
    alone = fit([(batch, mean_fill, busy_ns)] * 3)
    assert alone.p999_ns(batch, batch * mean_fill) >= busy_ns * (1 - 1e-6)


def test_the_ring_hands_on_every_row_and_the_smallest_margin() -> None:
    ring, samples = StepRing(capacity=4), StepSamples()
    assert ring.pour(samples, 5) is None
    for n in range(6):  # two more than fit are dropped, not written over what waits
        ring.put(2, 1000, 10 + n, 100 - n, 9)
    assert ring.pour(samples, 5) == 97
    assert samples.added == 4
    ring.put(3, 4000, 10, 5, 9)  # more fill than sessions: rounding, not an error
    assert ring.pour(samples, 5) == 5
    assert np.array_equal(ring.rows[0], [3, 4000, 10, 5, 9])
