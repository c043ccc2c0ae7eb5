"""WAV files in and out: any a caller may hand us, and one that survives being killed.

Decides which files are taken (RIFF, RF64 and W64 with any sample format libsndfile knows, any
number of channels, cut short or not), how they become mono float32 within ±1, and how PCM is
rounded and clipped on its way to disk. Does not know frames, sessions or the model's rate.

Both directions stream: an hour of audio is never in memory.
"""

import contextlib
import os
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import soundfile
from numpy.typing import NDArray

from appliance.lines.resample import HIGHEST_HZ, LOWEST_HZ

WAV_FORMATS = {"WAV", "WAVEX", "RF64", "W64"}
"""libsndfile's names of what may be called a WAV file."""

INT16_SCALE = 32_768
"""As libsndfile reads 16-bit PCM, so that what was 16 bits comes out with the same bits."""

HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
"""The canonical 44 bytes: RIFF, fmt and the head of data; all sizes little-endian."""

MOST_DATA_BYTES = 2**32 - 1 - HEADER.size
"""What a 32-bit size can say; about 24 hours of 24 kHz mono."""


class WavError(ValueError):
    """A file is not audio we can take, or cannot be written; the operator's fault."""


class WavReader:
    """One WAV file, read from its beginning to its end as mono float32."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` and look at its header. Raises `WavError`."""
        self.path = path
        self.bad_samples = 0
        """Samples that were NaN, infinite or beyond ±1, and have been made to fit."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
                raise WavError(f"{path} is not a file; hand in a WAV file")
            with path.open("rb") as file:
                head = file.read(12)
        except OSError as err:
            raise WavError(f"{path} cannot be read: {err.strerror}") from None
        if not head:
            raise WavError(f"{path} is empty; hand in a WAV file with audio in it")
        try:
            self._file = soundfile.SoundFile(os.fsencode(path))  # a name need not be UTF-8
        except soundfile.LibsndfileError as err:
            if head[:4] in (b"RIFF", b"RF64", b"riff"):
                raise WavError(
                    f"{path} begins like a WAV file but is broken or cut off before its audio "
                    f"({err.error_string}); hand in the whole file"
                ) from None
            raise WavError(f"{path} is not a WAV file. {_convert(path)}") from None
        info = self._file
        problem = ""
        if info.format not in WAV_FORMATS:
            problem = f"{path} is {info.format}, not a WAV file. {_convert(path)}"
        elif not LOWEST_HZ <= info.samplerate <= HIGHEST_HZ:
            problem = (
                f"{path} has {info.samplerate} samples a second, which is outside "
                f"{LOWEST_HZ}..{HIGHEST_HZ}. {_convert(path)}"
            )
        elif info.frames < 1:
            problem = f"{path} has 0 samples; hand in a WAV file with audio in it"
        if problem:
            self._file.close()
            raise WavError(problem)
        self.rate_hz: int = info.samplerate
        self.samples: int = info.frames
        """Samples per channel that the file holds; fewer than its header says if it is cut off."""
        self.channels: int = info.channels

    def read(self, samples: int) -> NDArray[np.float32]:
        """The next (n,) float32, n ≤ ``samples``, channels averaged; n is 0 at the end.

        Raises `WavError` if the file cannot be decoded further.
        """
        try:
            rows: NDArray[np.float32] = self._file.read(samples, "float32", always_2d=True)
        except soundfile.LibsndfileError as err:
            raise WavError(f"{self.path} cannot be read on: {err.error_string}") from None
        mono: NDArray[np.float32] = rows.mean(axis=1)
        # Not NaN-safe the other way round: every comparison with NaN is False.
        good = np.abs(mono) <= 1.0
        if not good.all():
            self.bad_samples += int(mono.size - np.count_nonzero(good))
            np.nan_to_num(mono, copy=False, nan=0.0)
            np.clip(mono, -1.0, 1.0, out=mono)
        return mono

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class WavWriter:
    """A 16-bit PCM WAV file that is valid, up to the last second, at every moment.

    The sizes in the header are brought up to date after every second of audio that reached the
    file: kill the process, and what it had written by then can be played.
    """

    def __init__(self, path: Path, rate_hz: int, channels: int = 1) -> None:
        """Create ``path``, or empty it. Raises `WavError`."""
        self.path = path
        self.rate_hz = rate_hz
        self.channels = channels
        self.samples = 0
        """Samples per channel written."""
        self.clipped_samples = 0
        """Samples that were NaN or beyond full scale."""
        self._said = 0
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as err:
            raise WavError(f"{path} cannot be written: {err.strerror}") from None
        try:
            self._sync()
        except OSError as err:
            with contextlib.suppress(OSError):  # what it has buffered cannot be written either
                self._file.close()
            raise WavError(f"{path} cannot be written: {err.strerror}") from None

    def write(self, pcm: NDArray[np.float32]) -> None:
        """Append (n,) or (n, channels) float32; full scale is ±1. Raises `WavError`."""
        scaled = np.rint(pcm.astype(np.float64) * INT16_SCALE)
        fits = (scaled >= -INT16_SCALE) & (scaled <= INT16_SCALE - 1)
        if not fits.all():
            # Exactly +1.0 becomes 32767 and is not called clipping: nobody would hear it.
            self.clipped_samples += int(np.count_nonzero(~fits & (scaled != INT16_SCALE)))
            np.nan_to_num(scaled, copy=False, nan=0.0)
            np.clip(scaled, -INT16_SCALE, INT16_SCALE - 1, out=scaled)
        data = scaled.astype("<i2").tobytes()
        if (self.samples * 2 * self.channels) + len(data) > MOST_DATA_BYTES:
            raise WavError(f"{self.path} is full: a WAV file holds at most {MOST_DATA_BYTES} bytes")
        try:
            self._file.write(data)
            self.samples += len(data) // (2 * self.channels)
            if self.samples - self._said >= self.rate_hz:
                self._sync()
        except OSError as err:
            raise WavError(
                f"{self.path} cannot be written: {err.strerror} after {self.samples} samples"
            ) from None

    def close(self) -> None:
        """Bring the header up to date and close. Closing twice is allowed. Raises `WavError`."""
        if self._file.closed:
            return
        try:
            try:
                self._sync()
            finally:
                self._file.close()
        except OSError as err:
            raise WavError(f"{self.path} cannot be written: {err.strerror}") from None

    def _sync(self) -> None:
        """Audio first, then the header that speaks of it."""
        self._file.flush()
        self._file.seek(0)
        self._file.write(_header(self.rate_hz, self.channels, self.samples))
        self._file.flush()
        self._file.seek(0, 2)
        self._said = self.samples

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _header(rate_hz: int, channels: int, samples: int) -> bytes:
    row_bytes = 2 * channels
    data_bytes = samples * row_bytes
    return HEADER.pack(
        b"RIFF",
        HEADER.size - 8 + data_bytes,
        b"WAVE",
        b"fmt ",
        16,  # bytes of the fmt chunk
        1,  # WAVE_FORMAT_PCM
        channels,
        rate_hz,
        rate_hz * row_bytes,
        row_bytes,
        16,  # bits per sample
        b"data",
        data_bytes,
    )


def _convert(path: Path) -> str:
    return f"Convert it: ffmpeg -i {path.name} -ar 24000 -ac 1 {path.stem}-24k.wav"
