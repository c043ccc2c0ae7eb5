"""A small streaming model in one ONNX file: a chunk of audio in, one number out, state in between.

For models that run beside the voice under contracts of their own (`appliance.contracts`), such as
voice activity detectors. It knows one stream and its state; it knows no clock and no sessions. The
two that are described here come with their weights in wheels from PyPI; neither is a dependency.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray


class StreamModelError(RuntimeError):
    """A file is not the model it should be; the operator named the wrong one."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """How a model wants its chunks."""

    name: str
    rate_hz: int
    samples: int
    """New samples per step."""
    context: int
    """Samples before them that it wants to see again."""
    audio: str
    state_in: str
    state_shape: tuple[int, ...]
    result: str
    state_out: str
    wheel: str
    """What on PyPI brings its weights."""
    takes_rate: str = ""
    """Name of an int64 input for the sample rate; empty: none."""

    @property
    def period_ns(self) -> int:
        return self.samples * 1_000_000_000 // self.rate_hz


SILERO = StreamSpec(
    "silero-vad",
    16_000,
    512,
    64,
    "input",
    "state",
    (2, 1, 128),
    "output",
    "stateN",
    "silero-vad==6.2.3",
    "sr",
)
"""silero_vad/data/silero_vad.onnx of silero-vad 6.2.3 (MIT): 512 new samples and 64 of context at
16 kHz, as its OnnxWrapper feeds them (silero_vad/utils_vad.py)."""

AKIKI = StreamSpec(
    "akiki-vad",
    16_000,
    256,
    320,
    "audio_with_context",
    "h",
    (1, 1, 128),
    "probability",
    "h_out",
    "akiki==0.0.6",
)
"""akiki-vad.onnx of akiki 0.0.6 (Apache-2.0): 256 new samples, 320 of context (akiki/vad.py)."""

SPECS = {spec.name: spec for spec in (SILERO, AKIKI)}
"""By the names a box's config may use."""


class StreamModel:
    """One stream through one model, on one CPU thread. One thread uses it."""

    def __init__(self, spec: StreamSpec, path: Path) -> None:
        """Load ``path``. Raises `StreamModelError` when it is not what ``spec`` says."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
            raise StreamModelError(f"{path} does not load: {str(err).splitlines()[0]}") from None
        inputs = {i.name for i in self._session.get_inputs()}
        outputs = {o.name for o in self._session.get_outputs()}
        wanted = {spec.audio, spec.state_in, *filter(None, [spec.takes_rate])}
        if inputs != wanted or not {spec.result, spec.state_out} <= outputs:
            raise StreamModelError(
                f"{path} is not {spec.name}: it takes {sorted(inputs)}, not {sorted(wanted)}"
            )
        self.spec = spec
        self._feeds: dict[str, NDArray[np.generic]] = {}
        if spec.takes_rate:
            self._feeds[spec.takes_rate] = np.array(spec.rate_hz, np.int64)
        self.reset()

    def another(self) -> Self:
        """A new stream through the same loaded graph, for the same thread."""
        other = copy.copy(self)
        other._feeds = dict(self._feeds)
        other.reset()
        return other

    def reset(self) -> None:
        """Begin a new stream."""
        spec = self.spec
        self._chunk = np.zeros((1, spec.context + spec.samples), np.float32)
        self._feeds[spec.audio] = self._chunk
        self._feeds[spec.state_in] = np.zeros(spec.state_shape, np.float32)

    def step(self, pcm: NDArray[np.float32]) -> float:
        """The model's number for (samples,) float32 that follow those of the step before."""
        spec, chunk = self.spec, self._chunk
        if spec.context:
            chunk[0, : spec.context] = chunk[0, -spec.context :].copy()
        chunk[0, spec.context :] = pcm
        result, state = self._session.run([spec.result, spec.state_out], self._feeds)
        self._feeds[spec.state_in] = state
        return float(result.reshape(-1)[0])
