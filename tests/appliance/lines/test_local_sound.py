"""Rings, drift and both ends of a card, without a call."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.lines.local_drift import Drift
from appliance.lines.local_rings import Exchange, History, SampleRing
from appliance.lines.local_sound import (
    SPEAKER_SPARE_NS,
    Level,
    Microphone,
    Reference,
    Speaker,
    Untouched,
)

RATE_HZ, BLOCK, SAMPLES, PERIOD_NS = 48_000, 480, 1920, 80 * MS


def ramp(size: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(start, start + size, dtype=np.float32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_ring_hands_out_what_was_put_in_and_in_that_order(
    steps: list[tuple[bool, int]],
) -> None:
    ring, put, got = SampleRing(32), 0, 0
    for writes, size in steps:
        if writes:
            put += ring.write(ramp(size, put))
        else:
            out = np.full(size, -1, np.float32)
            taken = ring.read_into(out)
            assert np.array_equal(out[:taken], ramp(taken, got))
            assert np.all(out[taken:] == -1)
            got += taken
        assert ring.waiting == put - got <= 32
    assert ring.skip(1000) == put - got


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=30), st.integers(-20, 400), st.integers(1, 10))
def test_a_history_has_the_newest_samples_by_number_and_zeros_for_others(
    sizes: list[int], start: int, size: int
) -> None:
    history = History(32)
    for written in sizes:
        history.write(ramp(written, history.written) + 1)
    out = np.empty(size, np.float32)
    history.copy(start, out)
    oldest = max(0, history.written - 16)
    wanted = [n + 1 if oldest <= n < history.written else 0 for n in range(start, start + size)]
    assert out.tolist() == wanted


def test_the_callbacks_keep_nothing_that_they_allocate() -> None:
    exchange = Exchange(RATE_HZ, BLOCK)
    block = np.zeros(BLOCK, np.float32)
    for n in range(200):
        exchange.hear(block, n)
        exchange.play(block, n)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(2000):
            exchange.hear(block, n)
            exchange.play(block, n)
        grown = tracemalloc.get_traced_memory()[0] - before
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert grown < 1000
    assert peak < BLOCK * 4  # not even one block of samples, for a moment


def test_a_loudspeaker_without_samples_fades_and_counts() -> None:
    exchange = Exchange(RATE_HZ, BLOCK)
    block = np.ones(BLOCK, np.float32)
    exchange.play(block, 1)
    assert not block.any()
    assert exchange.dry == 0  # nothing has ever been played
    exchange.speaker.write(np.full(BLOCK // 2, 0.5, np.float32))
    exchange.play(block, 2)
    assert exchange.dry == 1
    assert np.abs(np.diff(block)).max() < 0.01
    exchange.play(block, 3)
    assert np.abs(block).max() < 0.5
    assert abs(float(block[-1])) < 0.05


def test_a_microphone_that_nobody_reads_counts_what_is_lost() -> None:
    exchange = Exchange(RATE_HZ, BLOCK)
    for n in range(103):
        exchange.hear(np.zeros(BLOCK, np.float32), n)
    assert exchange.lost == 3
    assert exchange.heard.waiting == 100 * BLOCK


@pytest.mark.parametrize("ppm", [-450.0, -200.0, 200.0, 450.0])
def test_drift_becomes_the_integral_and_the_buffer_stays(ppm: float) -> None:
    drift, surplus_ns = Drift(PERIOD_NS), 0.0
    worst_ns = 0.0
    for _ in range(20 * 60 * 25 // 2):
        surplus_ns += PERIOD_NS * (ppm + drift.steer(round(surplus_ns))) / 1e6
        worst_ns = max(worst_ns, abs(surplus_ns))
    assert worst_ns < 8 * MS
    assert abs(surplus_ns) < 0.2 * MS
    assert drift.drift_ppm == pytest.approx(-ppm, abs=5)


def test_a_stall_is_worked_off_without_teaching_the_integral() -> None:
    drift, surplus_ns = Drift(PERIOD_NS), 60.0 * MS
    for _ in range(60 * 25 // 2):
        surplus_ns += PERIOD_NS * drift.steer(round(surplus_ns)) / 1e6
        assert abs(drift.ppm) <= 5000
        assert abs(drift.drift_ppm) < 250
    assert abs(surplus_ns) < 10 * MS


def test_the_reference_follows_what_was_played_however_callbacks_jitter() -> None:
    exchange, reference = Exchange(RATE_HZ, BLOCK), None
    rng = np.random.default_rng(1)
    reference = Reference(exchange)
    lags = []
    out = np.empty(BLOCK, np.float32)
    played = heard = 0
    events = sorted(
        [(n * 10 * MS + int(rng.integers(0, 6 * MS)), "play") for n in range(300)]
        + [(n * 10 * MS + 3 * MS + int(rng.integers(0, 6 * MS)), "hear") for n in range(300)]
    )
    for at_ns, what in events:
        if what == "play":
            exchange.speaker.write(ramp(BLOCK, played) + 1)
            exchange.play(np.empty(BLOCK, np.float32), at_ns + 1)
            played += BLOCK
            continue
        exchange.hear(np.zeros(BLOCK, np.float32), at_ns + 1)
        reference.notice()
        reference.copy(heard, out)
        exchange.heard.skip(BLOCK)
        if heard > 50 * BLOCK:
            lags.append(heard - (float(out[0]) - 1))
            assert np.all(np.diff(out) == 1), "a hole in what was played"
        heard += BLOCK
    # 20 ms on purpose, and what the two streams lie apart, give or take.
    assert max(lags) - min(lags) <= 200
    assert np.mean(lags) / RATE_HZ == pytest.approx(0.020 - 0.003, abs=0.006)


def make_speaker() -> tuple[Exchange, Speaker]:
    exchange = Exchange(RATE_HZ, BLOCK)
    return exchange, Speaker(exchange, 24_000, SAMPLES, PERIOD_NS)


def run_speaker(exchange: Exchange, now_ns: int, blocks: int = 8) -> list[float]:
    out = np.empty(BLOCK, np.float32)
    loud = []
    for n in range(blocks):
        exchange.play(out, now_ns + (n + 1) * 10 * MS)
        loud.append(float(np.abs(np.diff(out)).max()))
    return loud


def test_a_loudspeaker_that_ran_dry_is_padded_once_and_then_has_its_spare() -> None:
    exchange, speaker = make_speaker()
    exchange.play(np.empty(BLOCK, np.float32), 1)
    frame = np.full(SAMPLES, 0.5, np.float32)
    now_ns = 0
    for n in range(30):
        speaker.play(frame, now_ns)
        late_ns = 100 * MS if n == 10 else 0
        steps = run_speaker(exchange, now_ns, 8 + late_ns // (10 * MS))
        assert max(steps) < 0.05  # whatever happens, no step
        now_ns += PERIOD_NS + late_ns
    assert speaker.padded == 1
    assert speaker.spare_ns == pytest.approx(SPEAKER_SPARE_NS, abs=2 * MS)


def test_what_a_stall_of_the_card_leaves_behind_is_cut_without_a_step() -> None:
    exchange, speaker = make_speaker()
    exchange.play(np.empty(BLOCK, np.float32), 1)
    now_ns = 0
    for n in range(40):
        phase = (n * SAMPLES + np.arange(SAMPLES)) * (200 / 24_000)
        speaker.play((0.3 * np.sin(2 * np.pi * phase)).astype(np.float32), now_ns)
        if n != 5:  # for one frame it fetches nothing
            assert max(run_speaker(exchange, now_ns)) < 0.03
        now_ns += PERIOD_NS
    assert speaker.cut_samples > 0
    assert speaker.spare_ns < SPEAKER_SPARE_NS + 45 * MS
    assert speaker.padded == 0


def test_much_that_is_left_behind_is_gone_within_two_seconds() -> None:
    exchange, speaker = make_speaker()
    exchange.play(np.empty(BLOCK, np.float32), 1)
    now_ns = 0
    for n in range(34):
        speaker.play(np.full(SAMPLES, 0.1, np.float32), now_ns)
        if n >= 9:  # until then it fetches nothing, but says that it is there
            run_speaker(exchange, now_ns)
        else:
            exchange.played_ns = now_ns + PERIOD_NS
        now_ns += PERIOD_NS
    assert speaker.spare_ns < SPEAKER_SPARE_NS + 45 * MS


def test_a_missing_frame_fades_out_and_the_next_one_in() -> None:
    exchange, speaker = make_speaker()
    exchange.play(np.empty(BLOCK, np.float32), 1)
    now_ns = 0
    for n in range(12):
        frame = None if n in (5, 6) else np.full(SAMPLES, 0.5, np.float32)
        speaker.play(frame, now_ns)
        assert max(run_speaker(exchange, now_ns)) < 0.02
        now_ns += PERIOD_NS


def test_a_frame_of_nonsense_is_bounded() -> None:
    exchange, speaker = make_speaker()
    exchange.play(np.empty(BLOCK, np.float32), 1)
    frame = np.array([np.nan, np.inf, -np.inf, 9e9] * (SAMPLES // 4), np.float32)
    for n in range(3):
        speaker.play(frame, n * PERIOD_NS)
        out = np.empty(BLOCK, np.float32)
        exchange.play(out, n * PERIOD_NS + MS)
        assert np.isfinite(out).all()


def test_muting_fades_and_the_level_still_shows_the_room() -> None:
    exchange = Exchange(RATE_HZ, BLOCK)
    microphone = Microphone(exchange, Untouched(), 24_000, SAMPLES, PERIOD_NS)
    take_ns = 10 * NS_PER_S
    for n in range(30):
        microphone.muted = n >= 12
        exchange.hear(np.full(BLOCK, 0.5, np.float32), n * 10 * MS)
        microphone.listen(n * 10 * MS, take_ns)
    rest = microphone.intake._held
    assert rest[2000] == pytest.approx(0.5, abs=0.02)
    assert np.abs(np.diff(rest[200:])).max() < 0.01
    assert abs(float(rest[-1])) < 1e-6
    assert microphone.level.look() == pytest.approx(-6.0, abs=0.1)


def test_a_level_is_the_loudest_since_it_was_looked_at() -> None:
    level = Level()
    level.hear(np.array([0.1, -1.0], np.float32))
    level.hear(np.array([0.5], np.float32))
    assert level.look() == pytest.approx(0.0, abs=0.01)
    assert level.look() == -100.0
