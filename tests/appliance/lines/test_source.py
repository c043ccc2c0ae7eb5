"""A WAV file becomes whole frames; how much of the last is padding is known."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from appliance.lines.resample import output_samples
from appliance.lines.source import WavSource
from appliance.lines.wav import WavError, WavReader

SAMPLES = 1_920


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("samples_in", [1, 640, 3_840, 3_841, 20_000])
def test_frames_hold_the_whole_file_and_nothing_else(
    tmp_path: Path, rate_hz: int, samples_in: int
) -> None:
    path = tmp_path / "in.wav"
    pcm = np.random.default_rng(samples_in).uniform(-0.5, 0.5, samples_in).astype(np.float32)
    soundfile.write(path, pcm, rate_hz, subtype="FLOAT")
    with WavReader(path) as reader:
        source = WavSource(reader, 24_000, SAMPLES)
        frames = [source.next()]
        while not frames[-1].is_last:
            frames.append(source.next())
    samples = output_samples(samples_in, rate_hz, 24_000)
    assert len(frames) == -(-samples // SAMPLES)
    assert len(frames) * SAMPLES - source.padding_samples == samples
    assert source.samples_in == samples_in
    whole = np.concatenate([frame.pcm for frame in frames])
    assert (whole[samples:] == 0).all()
    if rate_hz == 24_000:
        assert (whole[:samples] == pcm).all()


def test_stereo_is_mixed_before_it_is_cut_into_frames(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.tile([0.5, 0.25], (100, 1)), 24_000, subtype="FLOAT")
    with WavReader(path) as reader:
        source = WavSource(reader, 24_000, SAMPLES)
        frame = source.next()
    assert frame.is_last
    assert (frame.pcm[:100] == 0.375).all()
    assert source.padding_samples == SAMPLES - 100


def test_a_sample_that_resampling_swallows_is_told_of_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "click.wav"
    soundfile.write(path, np.full(1, 0.5, np.float32), 384_000)
    with WavReader(path) as reader, pytest.raises(WavError, match=r"1 samples at 384000 Hz.*hand"):
        WavSource(reader, 24_000, 1920)
