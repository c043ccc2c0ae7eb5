"""The jitter buffer on a fake clock: what waits, for how long, and what a clock's skew does."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS as MS
from appliance.lines.jitter import MOST_NS, Intake
from appliance.lines.stretch import Stretcher

PERIOD_NS, SAMPLES, RATE_HZ = 80 * MS, 1920, 24_000


@dataclass
class Run:
    """What came of a simulated caller."""

    intake: Intake
    taken: list[NDArray[np.float32] | None] = field(default_factory=list)
    lag_ms: list[float] = field(default_factory=list)
    """At each take: how old the frame's last sample is, as the caller's microphone heard it."""

    @property
    def audio(self) -> NDArray[np.float32]:
        return np.concatenate([frame for frame in self.taken if frame is not None])


def simulate(
    seconds: float,
    page_ms: int = 40,
    skew_ppm: float = 0,
    jitter_ms: float = 0,
    phase_ms: float = 13,
    stall: tuple[float, float] | None = None,
    tone_hz: float = 440,
    skips: frozenset[int] = frozenset(),
) -> Run:
    """A caller with pages of ``page_ms``; during ``stall`` (from, to, s) nothing arrives.

    skips: ticks for which nothing is taken.
    """
    rng = np.random.default_rng(1)
    run = Run(Intake(SAMPLES, RATE_HZ, PERIOD_NS))
    stretch = Stretcher(RATE_HZ, RATE_HZ)
    page = page_ms * RATE_HZ // 1000
    sent, arrives_ms = 0, 0.0
    captured_ms = 0.0
    for tick in range(1, round(seconds * 1000 / 80)):
        take_ms = tick * 80.0
        while True:
            due_ms = phase_ms + (sent + 1) * page_ms * (1 - skew_ppm / 1e6)
            came_ms = max(arrives_ms, due_ms + rng.random() * jitter_ms)
            if stall is not None and stall[0] * 1000 < came_ms < stall[1] * 1000:
                came_ms = stall[1] * 1000
            if came_ms >= take_ms:
                rng = np.random.default_rng(sent)  # the same jitter when it is asked again
                break
            arrives_ms, captured_ms = came_ms, due_ms
            at = np.arange(sent * page, (sent + 1) * page)
            pcm = (0.3 * np.sin(2 * np.pi * tone_hz * at / RATE_HZ)).astype(np.float32)
            out = stretch.push(pcm, run.intake.ppm)
            run.intake.push(out, round(came_ms * MS), round(take_ms * MS))
            sent += 1
        if tick in skips:
            run.intake.skip()
        else:
            run.taken.append(run.intake.take(round(take_ms * MS)))
        run.lag_ms.append(take_ms - captured_ms + run.intake.held_samples * 1000 / RATE_HZ)
    return run


@pytest.mark.parametrize("page_ms", [20, 40, 80])
@pytest.mark.parametrize("phase_ms", [1, 37, 79])
def test_a_frame_is_as_old_as_a_page_and_the_spare(page_ms: int, phase_ms: float) -> None:
    run = simulate(40, page_ms, phase_ms=phase_ms)
    assert run.intake.short == 0
    assert run.intake.cut_samples == 0
    # 10 ms of the stretching filter are in the lag at the microphone, not in what is held.
    assert np.median(run.lag_ms[-200:]) == pytest.approx(page_ms + 20, abs=6)


@pytest.mark.parametrize("page_ms", [20, 40, 80])
def test_jitter_is_added_to_what_waits_and_loses_nothing(page_ms: int) -> None:
    run = simulate(60, page_ms, jitter_ms=15)
    assert run.intake.short == 0
    assert np.median(run.lag_ms[-200:]) < page_ms + 20 + 15 + 6


@pytest.mark.slow
@pytest.mark.parametrize("skew_ppm", [-200, 200])
def test_a_clock_that_is_off_is_followed_for_twenty_minutes(skew_ppm: float) -> None:
    run = simulate(20 * 60, skew_ppm=skew_ppm, jitter_ms=5)
    assert run.intake.short == 0
    assert run.intake.cut_samples == 0
    # In 20 minutes 200 ppm are 240 ms; the lag stays within a frame, and close to its start.
    assert max(run.lag_ms[200:]) - min(run.lag_ms[200:]) < 20
    assert run.intake.ppm == pytest.approx(-skew_ppm, abs=60)
    # A click is broad-band: nothing may stand out of the tone, at 12.5 Hz or anywhere.
    tail = run.audio[-RATE_HZ * 60 :].astype(np.float64)
    spectrum = np.abs(np.fft.rfft(tail * np.hanning(tail.size)))
    hz = np.fft.rfftfreq(tail.size, 1 / RATE_HZ)
    away = np.abs(hz - 440) > 15
    assert 20 * np.log10(spectrum[away].max() / spectrum.max()) < -70


def test_the_spectral_test_sees_a_click() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(RATE_HZ * 60) / RATE_HZ)
    tone = np.delete(tone, np.s_[RATE_HZ * 30 : RATE_HZ * 30 + 13])  # a cut, without a fade
    spectrum = np.abs(np.fft.rfft(tone * np.hanning(tone.size)))
    hz = np.fft.rfftfreq(tone.size, 1 / RATE_HZ)
    assert 20 * np.log10(spectrum[np.abs(hz - 440) > 15].max() / spectrum.max()) > -70


def test_a_stall_is_not_lag_for_the_rest_of_the_call() -> None:
    run = simulate(40, stall=(10.0, 12.0))
    missed = run.intake.short
    assert 20 <= missed <= 27  # two seconds of ticks
    assert run.intake.cut_samples > RATE_HZ * 1.5
    # After the burst at most a second is held, then it is cut; within 10 s all is as before.
    assert max(run.lag_ms) < 1200 + 2000
    assert max(run.lag_ms[round(25 / 0.08) :]) < 40 + 20 + 40


def test_a_tick_that_took_nothing_and_a_late_page_are_lag_for_seconds_only() -> None:
    for run in (simulate(30, skips=frozenset({125})), simulate(30, stall=(10.0, 10.15))):
        usual, after = np.median(run.lag_ms[50:120]), run.lag_ms[round(15.5 / 0.08)]
        assert max(run.lag_ms[120:140]) > usual + 60  # a frame more waits at first
        assert after == pytest.approx(usual, abs=25)
        assert run.intake.cut_samples == 0


def test_nothing_is_taken_before_the_first_audio_and_none_of_it_counts_as_missing() -> None:
    intake = Intake(SAMPLES, RATE_HZ, PERIOD_NS)
    assert [intake.take(tick * PERIOD_NS) for tick in range(5)] == [None] * 5
    assert (intake.short, intake.started) == (0, False)
    for at_ms in (1, 41):
        intake.push(np.ones(SAMPLES, np.float32), 5 * PERIOD_NS + at_ms * MS, 6 * PERIOD_NS)
    assert intake.take(6 * PERIOD_NS) is not None
    assert intake.take(7 * PERIOD_NS) is None
    assert intake.short == 1


def test_what_is_held_is_bounded_and_the_oldest_goes() -> None:
    intake = Intake(SAMPLES, RATE_HZ, PERIOD_NS)
    for second in range(30):
        intake.push(np.full(RATE_HZ, second, np.float32), 0, PERIOD_NS)
    assert intake.held_samples == MOST_NS * RATE_HZ // 10**9
    assert intake.cut_samples == 29 * RATE_HZ
    frame = intake.take(PERIOD_NS)
    assert frame is not None
    assert (frame == 29).all()


def test_what_is_no_number_becomes_silence() -> None:
    intake = Intake(4, 1000, 4 * MS, spare_ns=0)
    intake.push(np.array([np.nan, np.inf, -np.inf, 0.5], np.float32), 0, MS)
    intake.push(np.zeros(4, np.float32), 0, MS)
    frame = intake.take(0)
    assert frame is not None
    assert frame.tolist() == [0, 0, 0, 0.5]


@pytest.mark.parametrize(("rate_in", "rate_out"), [(24_000, 24_000), (24_000, 16_000)])
def test_the_stretching_filter_holds_back_ten_milliseconds(rate_in: int, rate_out: int) -> None:
    stretch = Stretcher(rate_in, rate_out)
    came = sum(stretch.push(np.zeros(480, np.float32), 0.0).size for _ in range(50))
    held_ms = (50 * 480 / rate_in - came / rate_out) * 1000
    assert 0 < held_ms <= 16


def test_a_stretch_makes_as_many_samples_as_it_says() -> None:
    stretch = Stretcher(24_000, 24_000)
    came = sum(stretch.push(np.zeros(960, np.float32), 1000.0).size for _ in range(1000))
    assert came == pytest.approx(960_000 * 1.001 - 240, abs=5)
