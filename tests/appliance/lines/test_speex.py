"""Resampling with hardly any delay, and by how much a stream is stretched."""

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.lines import speex
from appliance.lines.speex import SpeexStretcher, Stretches, stretcher
from appliance.lines.stretch import Stretcher

PAIRS = [(8_000, 24_000), (16_000, 24_000), (48_000, 24_000), (24_000, 8_000), (24_000, 48_000)]


def library() -> None:
    if speex.find() is None:
        pytest.fail("libspeexdsp is missing: apt-get install libspeexdsp1")


def run(stream: Stretches, rate_hz: int, seconds: float, ppm: float) -> NDArray[np.float32]:
    at = np.arange(int(rate_hz * seconds)) / rate_hz
    tone = (0.5 * np.sin(2 * np.pi * 997 * at)).astype(np.float32)
    size = rate_hz // 50
    return np.concatenate([stream.push(tone[n : n + size], ppm) for n in range(0, tone.size, size)])


@pytest.mark.parametrize(("rate_in", "rate_out"), PAIRS)
def test_every_packet_gives_its_whole_share_and_is_late_by_3_ms_at_most(
    rate_in: int, rate_out: int
) -> None:
    library()
    stream = stretcher(rate_in, rate_out)
    assert isinstance(stream, SpeexStretcher)
    assert stream.push(np.zeros(rate_in // 50, np.float32), 0.0).size == rate_out // 50
    click = np.zeros(rate_in // 50, np.float32)
    click[0] = 1.0
    heard = np.concatenate([stream.push(click, 0.0), stream.push(click * 0, 0.0)])
    assert int(np.argmax(np.abs(heard))) <= 0.0031 * rate_out


@pytest.mark.parametrize(("rate_in", "rate_out"), PAIRS)
def test_a_tone_stays_a_tone(rate_in: int, rate_out: int) -> None:
    library()
    heard = run(stretcher(rate_in, rate_out), rate_in, 1.0, 0.0)[rate_out // 2 :].astype(float)
    at = np.arange(heard.size) / rate_out
    basis = np.stack([np.sin(2 * np.pi * 997 * at), np.cos(2 * np.pi * 997 * at)], 1)
    rest = heard - basis @ np.linalg.lstsq(basis, heard, rcond=None)[0]
    assert 10 * np.log10(np.mean(heard**2) / np.mean(rest**2)) > 80


@pytest.mark.parametrize("ppm", [300.0, -300.0, 10_000.0])
def test_stretching_makes_so_many_more_and_clicks_nowhere(ppm: float) -> None:
    library()
    stream = stretcher(8_000, 24_000)
    plain, more, after = (run(stream, 8_000, 2.0, p) for p in (0.0, ppm, 0.0))
    assert plain.size == after.size == 48_000
    assert more.size - 48_000 == pytest.approx(48_000 * ppm / 1e6, abs=2)
    heard = np.concatenate([plain[-480:], more, after])
    # Each run's tone begins at its zero, as the one before ends: no step beyond a tone's own.
    assert np.abs(np.diff(heard)).max() < 1.1 * 0.5 * 2 * np.pi * 997 / 24_000


def test_without_the_library_soxr_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speex, "find", lambda: None)
    stream = stretcher(8_000, 24_000)
    assert isinstance(stream, Stretcher)
    assert stream.push(np.zeros(160, np.float32), 0.0).size == 480
