"""Audio of a websocket caller, as Ogg/Opus and as samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lines.opus import RATE_HZ
from appliance.lines.web_voice import OPUS, PCM, VOICES, PcmVoice


@pytest.mark.parametrize("name", [OPUS, PCM])
def test_what_is_encoded_can_be_decoded(name: str) -> None:
    voice = VOICES[name](RATE_HZ)
    tone = (0.3 * np.sin(np.arange(RATE_HZ) / 9)).astype(np.float32)
    heard = []
    for at in range(0, tone.size, 1920):
        for part in voice.unpack(voice.encode(tone[at : at + 1920])):
            heard.append(voice.decode(part))
            assert part.samples == heard[-1].size * 2
    pcm = np.concatenate(heard)
    loud = np.sqrt((pcm[4800:].astype(float) ** 2).mean())
    assert loud == pytest.approx(0.3 / np.sqrt(2), rel=0.03)
    assert (voice.junk_bytes, voice.dropped) == (0, 0)


def test_samples_keep_their_values_and_too_loud_ones_are_clipped() -> None:
    voice = PcmVoice()
    pcm = np.array([0, 0.5, -0.5, 1, -1, 3, -3], np.float32)
    (part,) = voice.unpack(voice.encode(pcm))
    assert voice.decode(part) == pytest.approx(np.clip(pcm, -1, 1), abs=1e-4)


def test_half_a_sample_is_no_audio() -> None:
    voice = PcmVoice()
    assert voice.unpack(b"abc") == []
    assert (voice.junk_bytes, voice.dropped) == (3, 1)
    assert voice.unpack(b"") == []


@given(st.binary(max_size=2000))
def test_any_even_number_of_bytes_is_finite_audio_of_its_length(data: bytes) -> None:
    voice = PcmVoice()
    for part in voice.unpack(data):
        pcm = voice.decode(part)
        assert pcm.size == len(data) // 2
        assert np.isfinite(pcm).all()
        assert np.abs(pcm).max(initial=0) <= 1
