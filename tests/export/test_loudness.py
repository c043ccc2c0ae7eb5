"""Loudness against the figures BS.1770-4 and its conformance tests state."""

import numpy as np
import pytest

from export.loudness import TooQuiet, loudness_lufs


def tone(rate_hz: int, seconds: float, dbfs: float, hz: float = 997.0) -> np.ndarray:
    at = np.arange(round(rate_hz * seconds)) / rate_hz
    return np.asarray(10 ** (dbfs / 20) * np.sin(2 * np.pi * hz * at))


@pytest.mark.parametrize("rate_hz", [16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("dbfs", [0.0, -23.0, -40.0])
def test_a_sine_of_997_hz_is_3_lu_below_its_peak(rate_hz: int, dbfs: float) -> None:
    found = loudness_lufs(tone(rate_hz, 5.0, dbfs), rate_hz)
    assert found == pytest.approx(dbfs - 3.01, abs=0.05)


def test_silence_between_words_does_not_count() -> None:
    # EBU Tech 3341, case 3: 10 s at -36, 60 s at -23, 10 s at -36 dBFS; mono here.
    parts = [tone(24_000, 10, -36), tone(24_000, 60, -23), tone(24_000, 10, -36)]
    found = loudness_lufs(np.concatenate(parts), 24_000)
    assert found == pytest.approx(-26.01, abs=0.1)


def test_low_tones_weigh_less_and_high_ones_more() -> None:
    low, middle, high = (
        loudness_lufs(tone(24_000, 5, -20, hz), 24_000) for hz in (30.0, 500.0, 5000.0)
    )
    assert low < middle - 3
    assert high == pytest.approx(middle + 4, abs=0.8)


@pytest.mark.parametrize(
    ("pcm", "says"),
    [
        (np.zeros(0), "0.00 s of sound"),
        (tone(24_000, 0.39, 0), "0.39 s of sound"),
        (np.zeros(48_000), "-70 LUFS"),
        (tone(24_000, 2, -90), "-70 LUFS"),
    ],
)
def test_what_cannot_be_measured_is_said(pcm: np.ndarray, says: str) -> None:
    with pytest.raises(TooQuiet, match=says):
        loudness_lufs(pcm, 24_000)
