"""The model must not hear itself: echo cancellation and noise suppression, 10 ms at a time.

The work is done by WebRTC's audio processing (AEC3), as the `livekit` package carries it; this
file only converts samples and refuses rates that it has no whole blocks for. It does not know where
samples come from, nor when. Both streams of a duplex device go through it in step: what the
loudspeaker was given while a block was heard. How long the way through the room is, AEC3 finds
out by itself; the delay that the sound library reports is where it begins to look.

Measured on speech by `tests/appliance/lines/test_echo.py`, which also holds it to its bounds.
"""

import numpy as np
from livekit import rtc
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS

BLOCKS_PER_S = 100
"""AEC3 works on blocks of 10 ms."""

MOST_DELAY_MS = 500
"""A longer one is a library's mistake."""

FILTER_MS = {(True, True): 15, (True, False): 9, (False, True): 7, (False, False): 1}
"""What the filter banks of (echo, noise) delay a voice by at 48 kHz; a test measures it."""

_SCALE = 32_767.0


class EchoError(ValueError):
    """Echo cannot be cancelled at this rate; the operator's to fix."""


class EchoCanceller:
    """One microphone and one loudspeaker. Not for sharing between streams."""

    def __init__(self, rate_hz: int, *, echo: bool = True, noise: bool = True) -> None:
        """echo, noise: what is taken out. Raises `EchoError`."""
        if rate_hz % BLOCKS_PER_S or not 8_000 <= rate_hz <= 192_000:
            raise EchoError(
                f"echo cannot be cancelled at {rate_hz} Hz: expected 8 to 192 kHz in whole blocks "
                "of 10 ms. Choose another device (duplexbox appliance talk --devices), or "
                "headphones and --no-echo-cancellation"
            )
        self.block = rate_hz // BLOCKS_PER_S
        self.delay_ns = FILTER_MS[echo, noise] * NS_PER_MS
        self._echo = echo
        self._apm = rtc.AudioProcessingModule(
            echo_cancellation=echo, noise_suppression=noise, high_pass_filter=True
        )
        self._heard, self._heard_pcm = _frame(rate_hz, self.block)
        self._played, self._played_pcm = _frame(rate_hz, self.block)

    def clean(
        self, heard: NDArray[np.float32], played: NDArray[np.float32], delay_ns: int
    ) -> NDArray[np.float32]:
        _to_int16(heard, self._heard_pcm)
        if self._echo:
            _to_int16(played, self._played_pcm)
            self._apm.process_reverse_stream(self._played)
            self._apm.set_stream_delay_ms(max(0, min(MOST_DELAY_MS, delay_ns // NS_PER_MS)))
        self._apm.process_stream(self._heard)
        return self._heard_pcm.astype(np.float32) / np.float32(_SCALE)


def _frame(rate_hz: int, samples: int) -> tuple[rtc.AudioFrame, NDArray[np.int16]]:
    """A block for the library, which it changes in place, and a view of its samples."""
    frame = rtc.AudioFrame(bytearray(samples * 2), rate_hz, 1, samples)
    return frame, np.frombuffer(frame.data, np.int16)


def _to_int16(pcm: NDArray[np.float32], out: NDArray[np.int16]) -> None:
    """NaN is silence: a sound library's bad block is none of the model's."""
    scaled = np.nan_to_num(np.clip(pcm, -1.0, 1.0) * np.float32(_SCALE))
    np.rint(scaled, out=scaled)
    out[:] = scaled
