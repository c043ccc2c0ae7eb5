"""The receive buffer of a telephone call: one frame per tick, whatever the network does."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.receive import MOST_NS, NOISE_MOST, SPARE_NS, ReceiveBuffer

RATE_HZ = 24_000
SAMPLES = 1_920
PERIOD_NS = 80 * NS_PER_MS
PACKET = 480
PACKET_NS = 20 * NS_PER_MS


@dataclass
class Run:
    """What a simulated call handed out."""

    buffer: ReceiveBuffer
    heard: NDArray[np.float32]
    held: list[int]
    """Samples left after each take."""
    phase_ms: float


def voice(samples: int) -> NDArray[np.float32]:
    """Every sample says when it was said: a slow ramp, 1e-7 a sample, from 0.1 upwards."""
    return (0.1 + 1e-7 * np.arange(samples)).astype(np.float32)


def talk(
    seconds: float,
    *,
    phase_ns: int = 3 * NS_PER_MS,
    loss: float = 0.0,
    jitter_ns: int = 0,
    skew_ppm: float = 0.0,
    seed: int = 1,
    silent: tuple[float, float] = (0.0, 0.0),
    read_ns: int = 10 * NS_PER_MS,
) -> Run:
    """A call on a fake clock: packets of 20 ms, read every 10 ms, stretched as the buffer asks.

    silent: from, to, in seconds: nothing is sent. jitter here is what a stack leaves of it.
    """
    chance = random.Random(seed)
    buffer = ReceiveBuffer(SAMPLES, RATE_HZ, seed)
    speech = voice(int(seconds * RATE_HZ * 1.001) + PACKET)
    pace_ns = PACKET_NS / (1 + skew_ppm / 1e6)
    coming: list[tuple[int, int]] = []
    last_ns = 0
    for number in range(int(seconds * NS_PER_S / pace_ns)):
        at_ns = phase_ns + int(number * pace_ns)
        if chance.random() >= loss and not silent[0] <= at_ns / NS_PER_S < silent[1]:
            # A stack hands packets on in their order: a late one holds up those behind it.
            last_ns = max(last_ns, at_ns + chance.randrange(jitter_ns + 1))
            coming.append((last_ns, number))
    out: list[NDArray[np.float32]] = []
    held: list[int] = []
    rest, at = 0.0, 0
    take_ns = PERIOD_NS
    for now_ns in range(0, int(seconds * NS_PER_S), read_ns):
        ready = []
        while at < len(coming) and coming[at][0] <= now_ns:
            number = coming[at][1]
            ready.append(speech[number * PACKET : (number + 1) * PACKET])
            at += 1
        while take_ns <= now_ns - (read_ns if ready else 0):
            out.append(buffer.take(take_ns))
            held.append(buffer.held_samples)
            take_ns += PERIOD_NS
        if ready:
            pcm = np.concatenate(ready)
            # A stretcher, as far as amounts go: some samples more or fewer of the same audio.
            rest += pcm.size * buffer.ppm / 1e6
            if more := int(rest):
                rest -= more
                where = np.linspace(0, pcm.size - 1, pcm.size + more)
                pcm = np.interp(where, np.arange(pcm.size), pcm).astype(np.float32)
            buffer.push(pcm, now_ns, take_ns, now_ns - read_ns)
        while take_ns <= now_ns:
            out.append(buffer.take(take_ns))
            held.append(buffer.held_samples)
            take_ns += PERIOD_NS
    return Run(buffer, np.concatenate(out), held, phase_ns / NS_PER_MS)


def ages_ms(run: Run) -> NDArray[np.float64]:
    """Of each frame that ends with the caller's audio: how long ago that came, at its tick."""
    frames = run.heard.reshape(-1, SAMPLES).astype(np.float64)
    step = frames[:, -1] - frames[:, -50]
    real = (frames[:, -1] > 0.09) & (np.abs(step / 49e-7 - 1) < 0.3)
    ticks = (np.arange(len(frames)) + 1) * SAMPLES
    said = (frames[:, -1] - 0.1) / 1e-7
    age: NDArray[np.float64] = (ticks - said)[real] / RATE_HZ * 1000 - run.phase_ms
    return age


@pytest.mark.parametrize("phase_ms", [0, 1, 9, 19, 33, 79])
def test_a_clean_line_reaches_the_model_sample_by_sample(phase_ms: int) -> None:
    run = talk(20, phase_ns=phase_ms * NS_PER_MS)
    counts = run.buffer.counts
    assert (counts.short, counts.holes, counts.concealed_samples, counts.cut_samples) == (0,) * 4
    assert run.buffer.ppm == 0.0
    start = int(np.argmax(run.heard >= 0.1))
    speech = run.heard[start:]
    assert np.array_equal(speech, voice(speech.size))
    assert ages_ms(run).max() < 20 + 10 + SPARE_NS / NS_PER_MS


def test_lost_audio_is_replaced_and_the_timeline_does_not_shrink() -> None:
    run = talk(60, loss=0.05)
    counts = run.buffer.counts
    lost_ms = counts.concealed_samples / RATE_HZ * 1000
    assert lost_ms == pytest.approx(0.05 * 60_000, rel=0.3)
    ages = ages_ms(run)
    # What is said late in the call is as old as what is said early: nothing has moved up or down.
    assert abs(np.median(ages[-100:]) - np.median(ages[5:100])) < 5
    assert ages.min() > 0
    assert ages.max() < 60


def test_jitter_that_a_stack_leaves_costs_little_and_is_worked_off() -> None:
    run = talk(60, jitter_ns=30 * NS_PER_MS)
    counts = run.buffer.counts
    assert counts.whole > 0.9 * counts.frames
    assert ages_ms(run)[50:].max() < 100


@pytest.mark.parametrize(("ppm", "seconds"), [(300.0, 300), (-300.0, 120)])
def test_a_clock_that_is_off_is_followed_for_five_minutes(ppm: float, seconds: int) -> None:
    run = talk(seconds, skew_ppm=ppm)
    counts = run.buffer.counts
    assert counts.cut_samples == 0
    assert counts.concealed_samples < 0.1 * RATE_HZ
    # 300 ppm of 300 s are 90 ms; what waits moves by far less.
    held_ms = np.array(run.held[20:]) / RATE_HZ * 1000
    assert held_ms.max() - held_ms.min() < 45


@pytest.mark.parametrize("ppm", [300.0, -300.0])
def test_a_clock_that_is_off_is_followed_by_stretching_a_few_frames_and_not_most(
    ppm: float,
) -> None:
    counts = talk(60, skew_ppm=ppm).buffer.counts
    assert 0 < counts.stretched < counts.frames / 5


@pytest.mark.parametrize("ppm", [300.0, -300.0])
def test_five_minutes_of_loss_jitter_and_a_clock_that_is_off_neither_shrink_nor_drift(
    ppm: float,
) -> None:
    run = talk(300, loss=0.05, jitter_ns=60 * NS_PER_MS, skew_ppm=ppm)
    counts = run.buffer.counts
    assert counts.frames == run.heard.size // SAMPLES == 300 * RATE_HZ // SAMPLES - 1
    assert counts.cut_samples == 0
    # What a caller whose clock is off said at a time of his own was said at another of ours.
    ages = ages_ms(run)
    ours = ages + np.linspace(0.0, 300_000 * ppm / 1e6, ages.size)
    assert abs(np.median(ours[-200:]) - np.median(ours[5:200])) < 25
    assert ours[5:].max() < 110
    lost_ms = counts.concealed_samples / RATE_HZ * 1000
    assert lost_ms == pytest.approx(0.05 * 300_000, rel=0.3)


def test_silence_of_the_peer_is_comfort_noise_and_speech_begins_anew_at_the_same_delay() -> None:
    run = talk(20, silent=(5.0, 12.0))
    counts = run.buffer.counts
    assert counts.starts == 2
    quiet = run.heard[7 * RATE_HZ : 11 * RATE_HZ]
    assert 0 < np.sqrt(np.mean(quiet**2)) <= NOISE_MOST
    ages = ages_ms(run)
    assert abs(ages[-1] - ages[20]) < 25
    assert counts.concealed_samples < 0.6 * RATE_HZ


def test_what_stands_in_for_a_lost_packet_goes_on_like_the_voice_and_dies_down() -> None:
    buffer = ReceiveBuffer(SAMPLES, RATE_HZ)
    wave = (0.5 * np.sin(2 * np.pi * 150 * np.arange(RATE_HZ) / RATE_HZ)).astype(np.float32)
    for number in range(8):
        buffer.push(
            wave[number * PACKET : (number + 1) * PACKET], number * PACKET_NS, PERIOD_NS * 2
        )
    buffer.take(160 * NS_PER_MS)
    frames = [buffer.take((160 + 80 * k) * NS_PER_MS) for k in (1, 2, 3)]
    heard = np.concatenate(frames)
    start = SAMPLES - buffer.counts.concealed_samples % SAMPLES
    early = heard[start : start + PACKET]
    assert np.sqrt(np.mean(early**2)) > 0.2
    assert np.abs(np.diff(heard)).max() < 0.05  # no click: the wave's own steps are 0.02
    assert np.sqrt(np.mean(heard[-SAMPLES:] ** 2)) <= NOISE_MOST


def test_a_process_that_read_late_has_lost_nothing() -> None:
    smooth = talk(10)
    late = talk(10, read_ns=70 * NS_PER_MS)
    assert smooth.buffer.counts.holes == late.buffer.counts.holes == 0
    assert late.buffer.counts.concealed_samples < 0.2 * RATE_HZ


def test_a_stall_that_leaves_much_behind_is_cut_and_counted() -> None:
    buffer = ReceiveBuffer(SAMPLES, RATE_HZ)
    for tick in range(40):
        now_ns = tick * PERIOD_NS
        many = 6 if tick == 10 else 1
        buffer.push(voice(SAMPLES * many), now_ns, now_ns + PERIOD_NS)
        buffer.take(now_ns + PERIOD_NS)
    assert buffer.counts.cut_samples > 3 * SAMPLES
    assert buffer.held_samples < 2 * SAMPLES


pushes = st.lists(
    st.tuples(
        st.integers(0, 150),  # ms since the last
        st.integers(0, 3000),  # samples
        st.sampled_from([0.0, 0.5, -1.0, float("nan"), float("inf"), 1e30]),
        st.integers(0, 3),  # takes afterwards
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(pushes)
def test_whatever_comes_every_take_is_a_frame_and_every_sample_is_accounted_for(
    events: list[tuple[int, int, float, int]],
) -> None:
    buffer = ReceiveBuffer(SAMPLES, RATE_HZ)
    now_ns, take_ns, came, taken = 0, PERIOD_NS, 0, 0
    for wait_ms, samples, value, takes in events:
        now_ns += wait_ms * NS_PER_MS
        buffer.push(np.full(samples, value, np.float32), now_ns, max(take_ns, now_ns))
        came += samples
        for _ in range(takes):
            frame = buffer.take(max(take_ns, now_ns))
            assert frame.shape == (SAMPLES,)
            assert frame.dtype == np.float32
            assert np.isfinite(frame).all()
            now_ns = max(take_ns, now_ns)
            take_ns += PERIOD_NS
            taken += 1
    counts = buffer.counts
    assert counts.frames == taken
    put_in = counts.concealed_samples + counts.noise_samples
    # A fade joins what was put in to what came; it adds none and takes none.
    assert came + put_in == taken * SAMPLES + buffer.held_samples + counts.cut_samples
    assert buffer.held_samples <= MOST_NS * RATE_HZ // NS_PER_S


def test_audio_that_was_looked_for_late_is_not_late_itself() -> None:
    """A line that oversleeps finds packets that came on time: nothing is put in for them."""

    def run(knows: bool) -> ReceiveBuffer:
        buffer = ReceiveBuffer(SAMPLES, RATE_HZ)
        looked_ns = 0
        for number in range(1, 1000):
            # 1 ms after each packet, and 19 ms after every fortieth.
            now_ns = number * PACKET_NS + (19 if number % 40 == 0 else 1) * NS_PER_MS
            take_ns = (now_ns // PERIOD_NS + 1) * PERIOD_NS
            buffer.push(voice(PACKET), now_ns, take_ns, looked_ns if knows else None)
            if number % 4 == 0:
                buffer.take(now_ns)
            looked_ns = now_ns
        return buffer

    assert run(knows=False).counts.holes > 5
    assert run(knows=True).counts.holes == 0


@pytest.mark.soak
@pytest.mark.parametrize("ppm", [300.0, -300.0])
def test_an_hour_of_a_clock_that_is_off_is_an_hour_of_frames(ppm: float) -> None:
    run = talk(3600, loss=0.01, jitter_ns=20 * NS_PER_MS, skew_ppm=ppm)
    counts = run.buffer.counts
    assert counts.frames == 3600 * RATE_HZ // SAMPLES - 1
    assert counts.cut_samples == 0
    # A second and more is what the clocks are apart by then; what waits is not.
    held_ms = np.array(run.held[20:]) / RATE_HZ * 1000
    assert held_ms.max() < 100
    assert counts.concealed_samples < 0.02 * 3600 * RATE_HZ
