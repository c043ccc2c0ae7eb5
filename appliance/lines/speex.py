"""Samples at another rate, and a little more or fewer of them, with hardly any delay.

The shell around the resampler of libspeexdsp, a library of the system: it holds back 3 ms between
8 and 24 kHz where soxr's variable filter holds back 30, at a quarter of the work. Where the library
is missing, `stretcher` falls back on soxr (`stretch`); calls are then later by the difference.
"""

import ctypes
import ctypes.util
import functools
import math
import weakref
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.lines.stretch import Stretcher

QUALITY = 3
"""Of 0 to 10: at 97 dB far above what a telephone's codec leaves, with the shortest filter."""

STEP_PPM = 25
"""Stretching is rounded to this: each change of the ratio makes the filter anew."""

SCALE = 1_000_000

FIRST_SAMPLES = 2_048
"""What may be pushed at once before buffers are made anew."""


class Stretches(Protocol):
    """One stream of mono float32."""

    def push(self, pcm: NDArray[np.float32], ppm: float) -> NDArray[np.float32]:
        """The next (n,) samples; returns the (m,) that are ready. ppm: how many more to make."""


def stretcher(rate_in_hz: int, rate_out_hz: int) -> Stretches:
    """The best there is on this machine, with silence in its filter: what comes first gives as
    much as what follows."""
    library = find()
    stream: Stretches
    if library is None:
        stream = Stretcher(rate_in_hz, rate_out_hz)
    else:
        stream = SpeexStretcher(library, rate_in_hz, rate_out_hz)
    stream.push(np.zeros(rate_in_hz // 10, np.float32), 0.0)
    return stream


@functools.cache
def find() -> ctypes.CDLL | None:
    """libspeexdsp; None if the machine has none (Debian: libspeexdsp1)."""
    for name in ("libspeexdsp.so.1", ctypes.util.find_library("speexdsp")):
        if name is None:
            continue
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        number, counter = ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)
        library.speex_resampler_init.restype = ctypes.c_void_p
        library.speex_resampler_init.argtypes = [
            *(number, number, number, ctypes.c_int),
            ctypes.POINTER(ctypes.c_int),
        ]
        library.speex_resampler_process_float.argtypes = [
            *(ctypes.c_void_p, number, ctypes.c_void_p, counter, ctypes.c_void_p, counter)
        ]
        library.speex_resampler_set_rate_frac.argtypes = [ctypes.c_void_p, *[number] * 4]
        library.speex_resampler_destroy.argtypes = [ctypes.c_void_p]
        return library
    return None


class SpeexStretcher:
    """One stream of mono float32. Not for sharing between streams."""

    def __init__(self, library: ctypes.CDLL, rate_in_hz: int, rate_out_hz: int) -> None:
        self._library = library
        self._rates = (rate_in_hz, rate_out_hz)
        divisor = math.gcd(rate_in_hz, rate_out_hz)
        self._ratio = (rate_in_hz // divisor, rate_out_hz // divisor)
        error = ctypes.c_int(0)
        state = library.speex_resampler_init(
            1, rate_in_hz, rate_out_hz, QUALITY, ctypes.byref(error)
        )
        if not state:
            raise MemoryError(f"libspeexdsp makes no resampler: error {error.value}")
        self._state = ctypes.c_void_p(state)
        weakref.finalize(self, library.speex_resampler_destroy, self._state)
        self._ppm = 0
        self._read = ctypes.c_uint32()
        self._written = ctypes.c_uint32()
        self._process = library.speex_resampler_process_float
        self._make_room(FIRST_SAMPLES)

    def push(self, pcm: NDArray[np.float32], ppm: float) -> NDArray[np.float32]:
        wanted = round(ppm / STEP_PPM) * STEP_PPM
        if wanted != self._ppm:
            self._ppm = wanted
            down, up = self._ratio
            if wanted:
                down, up = down * SCALE, up * (SCALE + wanted)
            self._library.speex_resampler_set_rate_frac(self._state, down, up, *self._rates)
        if pcm.size > self._in.size:
            self._make_room(pcm.size)
        self._in[: pcm.size] = pcm
        self._read.value, self._written.value = pcm.size, self._out.size
        self._process(*self._arguments)
        return self._out[: self._written.value].copy()

    def _make_room(self, samples: int) -> None:
        """For so many at once. To name a buffer to the library costs as much as to fill it."""
        room = math.ceil(samples * self._rates[1] / self._rates[0] * 1.02) + 64
        self._in = np.empty(samples, np.float32)
        self._out = np.empty(room, np.float32)
        self._arguments = (
            self._state,
            ctypes.c_uint32(0),
            ctypes.c_void_p(self._in.ctypes.data),
            ctypes.byref(self._read),
            ctypes.c_void_p(self._out.ctypes.data),
            ctypes.byref(self._written),
        )
