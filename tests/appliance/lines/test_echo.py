"""Echo out of real speech: a loudspeaker that the microphone hears, a room, and both at once.

The far side and the near side are the demo's recordings. The way through the room is 40 to 200 ms
late and 10 dB down, with reflections that decay within 60 ms.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS as MS
from appliance.lines.echo import FILTER_MS, EchoCanceller, EchoError
from appliance.lines.resample import Quality, Resampler
from appliance.lines.wav import WavReader

DEMO = Path(__file__).parents[3] / "appliance" / "demo"
RATE_HZ = 48_000
BLOCK = RATE_HZ // 100
Audio = NDArray[np.float32]


def speech(name: str, seconds: float) -> Audio:
    """A recording at the card's rate, over and over until it is long enough; peak at -6 dB."""
    reader = WavReader(DEMO / f"caller_{name}.wav")
    resampler = Resampler(reader.rate_hz, RATE_HZ, Quality.EXACT)
    pcm = np.concatenate([resampler.push(reader.read(reader.samples)), resampler.flush()])
    reader.close()
    whole = np.resize(pcm, round(seconds * RATE_HZ))
    loud: Audio = (whole / np.abs(whole).max() / 2).astype(np.float32)
    return loud


def through_room(far: Audio, delay_ms: float, seed: int = 1) -> Audio:
    """What the microphone hears of ``far``: -10 dB, late, with reflections."""
    size = round(0.06 * RATE_HZ)
    tail = np.random.default_rng(seed).standard_normal(size) * np.exp(-np.arange(size) / (size / 6))
    tail[0] = 3.0
    tail *= 10 ** (-10 / 20) / np.sqrt(np.sum(tail**2))
    late = np.concatenate([np.zeros(round(delay_ms * RATE_HZ / 1000)), far])
    length = 1 << (late.size + size).bit_length()
    heard = np.fft.irfft(np.fft.rfft(late, length) * np.fft.rfft(tail, length))
    noise = np.random.default_rng(2).standard_normal(far.size) * 10 ** (-70 / 20)
    return (heard[: far.size] + noise).astype(np.float32)


def cleaned(canceller: EchoCanceller, heard: Audio, played: Audio, delay_ms: float) -> Audio:
    return np.concatenate(
        [
            canceller.clean(heard[at : at + BLOCK], played[at : at + BLOCK], round(delay_ms * MS))
            for at in range(0, heard.size - BLOCK + 1, BLOCK)
        ]
    )


def db(pcm: Audio) -> float:
    return 10 * float(np.log10(np.mean(np.square(pcm, dtype=np.float64)) + 1e-15))


def voice_band(pcm: Audio) -> Audio:
    """300 to 3400 Hz: what carries speech; the canceller's high-pass turns what lies below."""
    spectrum = np.fft.rfft(pcm)
    hz = np.fft.rfftfreq(pcm.size, 1 / RATE_HZ)
    spectrum[(hz < 300) | (hz > 3400)] = 0
    band: Audio = np.fft.irfft(spectrum, pcm.size).astype(np.float32)
    return band


@pytest.mark.parametrize("delay_ms", [40, 120, 200])
def test_a_loudspeaker_in_the_room_is_25_db_down_after_three_seconds(delay_ms: int) -> None:
    far = speech("delivery", 9)
    heard = through_room(far, delay_ms)
    # The sound library says 40 ms, whatever the room does.
    out = cleaned(EchoCanceller(RATE_HZ), heard, far, 40)
    after = 3 * RATE_HZ
    assert db(heard[after:]) - db(out[after:]) >= 25


def test_without_cancellation_the_echo_stays() -> None:
    far = speech("delivery", 6)
    heard = through_room(far, 120)
    out = cleaned(EchoCanceller(RATE_HZ, echo=False), heard, far, 40)
    after = 3 * RATE_HZ
    assert db(heard[after:]) - db(out[after:]) < 10


def test_who_speaks_while_the_loudspeaker_does_is_still_heard() -> None:
    far, near = speech("delivery", 12), speech("router", 12)
    near[: 6 * RATE_HZ] = 0.0  # the canceller learns the room first, as in a conversation
    echo, still = through_room(far, 120), np.zeros_like(far)
    both = voice_band(cleaned(EchoCanceller(RATE_HZ), echo + near, far, 40))[6 * RATE_HZ :]
    alone = voice_band(cleaned(EchoCanceller(RATE_HZ), near, still, 40))[6 * RATE_HZ :]
    assert -3 < db(both) - db(voice_band(near)[6 * RATE_HZ :]) < 1
    assert np.corrcoef(both, alone)[0, 1] > 0.9


def test_a_voice_alone_passes_and_noise_does_not() -> None:
    near = speech("router", 6)
    hum = np.random.default_rng(3).standard_normal(near.size).astype(np.float32) * 10 ** (-45 / 20)
    still = np.zeros_like(near)
    voice = cleaned(EchoCanceller(RATE_HZ), near, still, 0)
    noise = cleaned(EchoCanceller(RATE_HZ), hum.astype(np.float32), still, 0)
    after = 2 * RATE_HZ
    assert abs(db(voice_band(voice)[after:]) - db(voice_band(near)[after:])) < 2
    assert db(hum[after:]) - db(noise[after:]) > 8


@pytest.mark.parametrize("wanted", FILTER_MS)
def test_the_filters_delay_is_what_the_figures_say(wanted: tuple[bool, bool]) -> None:
    echo, noise = wanted
    near = speech("router", 4)
    canceller = EchoCanceller(RATE_HZ, echo=echo, noise=noise)
    out = cleaned(canceller, near, np.zeros_like(near), 0)
    length = 1 << 19
    got, said = voice_band(out)[RATE_HZ:], voice_band(near)[RATE_HZ:]
    spectrum = np.fft.rfft(got, length) * np.conj(np.fft.rfft(said, length))
    late = int(np.argmax(np.fft.irfft(spectrum)[: RATE_HZ // 10]))
    assert late / RATE_HZ * 1000 == pytest.approx(FILTER_MS[wanted], abs=0.5)
    assert canceller.delay_ns == FILTER_MS[wanted] * MS


def test_a_bad_block_of_a_sound_library_is_silence() -> None:
    canceller = EchoCanceller(RATE_HZ)
    bad = np.full(BLOCK, np.nan, np.float32)
    bad[::7] = np.inf
    for _ in range(20):
        out = canceller.clean(bad, bad, -5 * MS)
    assert np.isfinite(out).all()


def test_a_rate_without_whole_blocks_is_refused_with_the_way_out() -> None:
    with pytest.raises(EchoError, match=r"22050 Hz.*--no-echo-cancellation"):
        EchoCanceller(22_050)
