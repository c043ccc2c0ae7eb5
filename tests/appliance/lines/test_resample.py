"""Sample-exact, chunk by chunk the same, and no trace of the frame rate in the sound."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from appliance.lines.resample import (
    Quality,
    RateError,
    Resampler,
    most_held_samples,
    output_samples,
)

PAIRS = [
    (8_000, 24_000),
    (16_000, 24_000),
    (22_050, 24_000),
    (44_100, 24_000),
    (48_000, 24_000),
    (24_000, 8_000),
    (24_000, 16_000),
    (24_000, 44_100),
    (24_000, 48_000),
    (24_000, 24_000),
]
RATES = st.sampled_from(PAIRS)
QUALITIES = st.sampled_from(list(Quality))


def resample(
    pcm: NDArray[np.float32], pair: tuple[int, int], quality: Quality, cuts: list[int]
) -> NDArray[np.float32]:
    """Push ``pcm`` in pieces of the sizes in ``cuts``, over and over, then flush."""
    resampler = Resampler(*pair, quality)
    out, at, turn = [], 0, 0
    while at < pcm.size:
        size = cuts[turn % len(cuts)]
        out.append(resampler.push(pcm[at : at + size]))
        at, turn = at + size, turn + 1
    out.append(resampler.flush())
    assert resampler.held_samples + Fraction(1, 2) >= 0
    return np.concatenate(out)


def tone(hz: float, rate_hz: int, seconds: float) -> NDArray[np.float32]:
    phase = 2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.5 * np.sin(phase)).astype(np.float32)


@pytest.mark.parametrize(
    ("samples", "pair", "expected"),
    [
        (0, (8_000, 24_000), 0),
        (7, (8_000, 24_000), 21),
        (1, (48_000, 24_000), 1),  # a half rounds upwards
        (3, (16_000, 24_000), 5),
        (44_100 * 3600, (44_100, 24_000), 24_000 * 3600),
        (44_099, (44_100, 24_000), 23_999),
    ],
)
def test_output_length(samples: int, pair: tuple[int, int], expected: int) -> None:
    assert output_samples(samples, *pair) == expected


@settings(max_examples=150, deadline=None)
@given(RATES, QUALITIES, st.integers(0, 6_000), st.lists(st.integers(1, 900), min_size=1))
def test_the_length_is_exact_and_the_cuts_do_not_matter(
    pair: tuple[int, int], quality: Quality, samples: int, cuts: list[int]
) -> None:
    pcm = np.random.default_rng(samples).uniform(-0.5, 0.5, samples).astype(np.float32)
    whole = resample(pcm, pair, quality, [max(1, samples)])
    assert whole.size == output_samples(samples, *pair)
    assert whole.dtype == np.float32
    assert (resample(pcm, pair, quality, cuts) == whole).all()


@pytest.mark.parametrize("quality", Quality)
@pytest.mark.parametrize("pair", PAIRS)
def test_an_impulse_lands_where_it_should(pair: tuple[int, int], quality: Quality) -> None:
    pcm = np.zeros(pair[0], np.float32)
    pcm[pair[0] // 2] = 1.0
    out = resample(pcm, pair, quality, [pair[0] // 50])
    off = abs(int(np.abs(out).argmax()) - pair[0] // 2 * pair[1] / pair[0])
    assert off <= (1 if quality is Quality.EXACT else 3)


@pytest.mark.parametrize("quality", Quality)
@pytest.mark.parametrize("pair", PAIRS)
def test_pitch_and_level_survive_and_the_frame_rate_is_not_heard(
    pair: tuple[int, int], quality: Quality
) -> None:
    """A 1 kHz tone in 80 ms pieces: no sidebands at multiples of 12.5 Hz, nor of 50 Hz."""
    out = resample(tone(1_000, pair[0], 4.0), pair, quality, [pair[0] * 80 // 1000])
    middle = out[pair[1] : 3 * pair[1]].astype(np.float64)
    # Two seconds, so that a bin is 0.5 Hz and all of 1000 ± 12.5 k falls on one. Blackman-Harris
    # keeps the tone's own skirt below -92 dB from four bins on.
    n = np.arange(middle.size) / middle.size
    window = (
        0.35875
        - 0.48829 * np.cos(2 * np.pi * n)
        + 0.14128 * np.cos(4 * np.pi * n)
        - 0.01168 * np.cos(6 * np.pi * n)
    )
    spectrum = np.abs(np.fft.rfft(middle * window)) / (window.sum() / 2)
    assert int(spectrum.argmax()) == 2_000
    assert abs(20 * np.log10(spectrum[2_000] / 0.5)) < 0.01
    others = np.delete(spectrum, np.arange(1_990, 2_011))
    assert 20 * np.log10(others.max() / 0.5) < -90


HELD = {
    Quality.LIVE: {
        (8_000, 24_000): 720,
        (16_000, 24_000): 360,
        (44_100, 24_000): 131,
        (48_000, 24_000): 120,
        (24_000, 8_000): 200,
        (24_000, 48_000): 480,
    },
    Quality.EXACT: {
        (8_000, 24_000): 1752,
        (16_000, 24_000): 878,
        (44_100, 24_000): 920,
        (48_000, 24_000): 920,
        (24_000, 8_000): 584,
        (24_000, 48_000): 1840,
    },
}
"""The table in the module's docstring."""


@pytest.mark.parametrize("quality", Quality)
def test_the_filter_holds_back_no_more_than_is_stated(quality: Quality) -> None:
    for pair, samples in HELD[quality].items():
        assert most_held_samples(*pair, quality, pair[0] // 100) <= samples, pair
    for pair in PAIRS:
        if quality is Quality.LIVE:
            assert most_held_samples(*pair, quality, pair[0] // 50) <= pair[1] * 30 // 1000
    assert most_held_samples(24_000, 24_000, quality, 480) == 0


@pytest.mark.parametrize("rate_hz", [0, -1, 3_999, 384_001])
def test_a_rate_no_line_has_is_refused(rate_hz: int) -> None:
    with pytest.raises(RateError, match=f"a sample rate of {rate_hz} Hz is outside"):
        Resampler(rate_hz, 24_000)
