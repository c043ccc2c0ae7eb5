"""One call's audio, out of baresip's rings and into them.

Decides nothing but what its memory means: signed 16 bits at the codec's own rate, one channel or
several. The binding's own object for this makes a struct, a buffer and a record of eleven fields
each time it is asked; with a hundred calls that is asked 5,000 times a second, so the native calls
it makes are made here, with one struct and one buffer a call.
"""

import numpy as np
from baresip._native import ffi, lib
from numpy.typing import NDArray

from appliance.lines.sip_stack import Format

READ_BYTES = 4_096
"""At a time: twelve packets of G.711, two of Opus."""
SAMPLE_BYTES = 2
NOTHING = np.zeros(0, np.int16)

SPOKEN = {8_000: "g711", 16_000: "g722", 48_000: "opus"}
"""The codec by the rate it has here; the stack does not name it."""


class BaresipMedia:
    """One call's audio. For one thread."""

    def __init__(self, handle: int) -> None:
        """handle: the stack's of the call; one that is over has no audio."""
        self.in_hz = 0
        self._handle = handle
        self._epoch: int | None = None
        """Of the streams that these channels are of; None: to be asked. It changes when a call's
        audio is negotiated anew, and what is asked of streams that are gone is refused."""
        self._channels = (0, 0)
        """In and out."""
        self._info = ffi.new("struct bp_audio_info *")
        self._read = ffi.new("uint8_t[]", READ_BYTES)
        self._pcm: NDArray[np.int16] = np.frombuffer(ffi.buffer(self._read), np.int16)

    @property
    def codec(self) -> str:
        return SPOKEN.get(self.in_hz, "")

    def format(self) -> Format | None:
        info = self._info
        self._epoch = None
        if lib.bp_audio_probe(self._handle, info) or not (info.tx_ready and info.rx_ready):
            return None
        self._epoch = info.epoch
        self.in_hz = info.rx_srate
        self._channels = (info.rx_ch, info.tx_ch)
        return Format(info.tx_srate, info.tx_fill // (SAMPLE_BYTES * info.tx_ch))

    def read(self) -> NDArray[np.int16]:
        if self._epoch is None and self.format() is None:
            return NOTHING
        pcm = NOTHING
        size = READ_BYTES
        while size == READ_BYTES:
            size = lib.bp_audio_read(self._handle, self._epoch, self._read, READ_BYTES)
            if size < 0:
                self._epoch = None  # what comes next may be of another rate
                return NOTHING
            piece = self._pcm[: size // SAMPLE_BYTES]
            pcm = np.concatenate([pcm, piece]) if pcm.size else piece.copy()
        channels = self._channels[0]
        if channels > 1:
            pcm = pcm[: pcm.size // channels * channels].reshape(-1, channels)[:, 0]
        return pcm

    def write(self, pcm: NDArray[np.int16]) -> int:
        if self._epoch is None:
            return 0
        channels = self._channels[1]
        data = np.ascontiguousarray(pcm if channels == 1 else np.repeat(pcm, channels))
        source = ffi.from_buffer("uint8_t[]", data)
        taken: int = lib.bp_audio_write(self._handle, self._epoch, source, data.nbytes)
        if taken < 0:
            self._epoch = None
            return 0
        return taken // (SAMPLE_BYTES * channels)
