"""PortAudio behind the seam of `local_card`: what only works with a real sound library.

Decides which rate and how many channels a device is opened with: 48 kHz and one, else what the
device offers. Imported late, because importing `sounddevice` is what finds out that PortAudio is
not there.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_S, Clock
from appliance.lines.local_card import BLOCKS_PER_S, RATE_HZ, CardError, Device, Pair
from appliance.lines.local_rings import Exchange

MISSING = (
    "{what} is not installed. Install it: pip install 'duplexbox[lines]' and "
    "apt-get install libportaudio2 libasound2-plugins"
)


class _Times(Protocol):
    """PaStreamCallbackTimeInfo, in seconds of a clock of PortAudio's own."""

    inputBufferAdcTime: float
    currentTime: float
    outputBufferDacTime: float


class PortAudio:
    """The machine's sound devices."""

    def __init__(self, clock: Clock) -> None:
        """Raises `CardError` where there is no PortAudio."""
        try:
            import sounddevice
        except ModuleNotFoundError:
            raise CardError(MISSING.format(what="sounddevice")) from None
        except OSError:
            raise CardError(MISSING.format(what="PortAudio")) from None
        self._library: Any = sounddevice
        self._clock = clock

    def devices(self) -> list[Device]:
        library = self._library
        apis = library.query_hostapis()
        default_in, default_out = self._default("input"), self._default("output")
        return [
            Device(
                index=index,
                name=str(found["name"]),
                api=str(apis[found["hostapi"]]["name"]),
                inputs=int(found["max_input_channels"]),
                outputs=int(found["max_output_channels"]),
                rate_hz=round(found["default_samplerate"]),
                default_input=index == default_in,
                default_output=index == default_out,
            )
            for index, found in enumerate(library.query_devices())
        ]

    def open(self, pair: Pair, latency_s: float) -> tuple[Exchange, "PortAudioStream"]:
        said = ""
        rates = dict.fromkeys((RATE_HZ, pair.microphone.rate_hz, pair.speaker.rate_hz))
        for rate_hz in rates:
            for channels in ((1, 1), (1, 2), (2, 2)):
                try:
                    return self._open(pair, latency_s, rate_hz, channels)
                except self._library.PortAudioError as err:
                    said = said or str(err)
        raise CardError(
            f"{pair.microphone.name} and {pair.speaker.name} cannot be opened together: {said}. "
            "Another program may hold them; choose others: duplexbox appliance talk --devices"
        )

    def look_again(self) -> None:
        # PortAudio lists devices once, when it is initialised; sounddevice has no public name
        # for doing that again.
        self._library._terminate()
        self._library._initialize()

    def _default(self, kind: str) -> int:
        try:
            return int(self._library.query_devices(None, kind)["index"])
        except (self._library.PortAudioError, ValueError):
            return -1

    def _open(
        self, pair: Pair, latency_s: float, rate_hz: int, channels: tuple[int, int]
    ) -> tuple[Exchange, "PortAudioStream"]:
        block = rate_hz // BLOCKS_PER_S
        exchange = Exchange(rate_hz, block)
        shared = {
            "samplerate": rate_hz,
            "blocksize": block,
            "dtype": "float32",
            "latency": latency_s,
        }
        streams: list[Any] = []
        try:
            streams.append(
                self._library.InputStream(
                    device=pair.microphone.index,
                    channels=channels[0],
                    callback=_hear(exchange, self._clock),
                    **shared,
                )
            )
            streams.append(
                self._library.OutputStream(
                    device=pair.speaker.index,
                    channels=channels[1],
                    callback=_play(exchange, self._clock),
                    **shared,
                )
            )
            for stream in streams:
                stream.start()
        except self._library.PortAudioError:
            for stream in streams:
                stream.close(ignore_errors=True)
            raise
        return exchange, PortAudioStream(streams)


class PortAudioStream:
    """Both streams of a card."""

    def __init__(self, streams: list[Any]) -> None:
        self._streams = streams

    @property
    def active(self) -> bool:
        return all(stream.active for stream in self._streams)

    def close(self) -> None:
        for stream in self._streams:
            stream.abort(ignore_errors=True)
            stream.close(ignore_errors=True)


Callback = Callable[[NDArray[np.float32], int, _Times, object], None]


def _hear(exchange: Exchange, clock: Clock) -> Callback:
    """What PortAudio's thread runs for every block of the microphone. It copies, and counts."""

    def callback(pcm: NDArray[np.float32], size: int, times: _Times, status: object) -> None:
        exchange.hear(pcm[:, 0], clock.now_ns())
        exchange.library_faults += bool(status)
        # Some hosts give no times; 0 then, and the figures say so.
        if times.inputBufferAdcTime:
            exchange.in_latency_ns = _ns(times.currentTime - times.inputBufferAdcTime)

    return callback


def _play(exchange: Exchange, clock: Clock) -> Callback:
    """The same for the loudspeaker."""
    mono = np.zeros(exchange.block, np.float32)

    def callback(pcm: NDArray[np.float32], size: int, times: _Times, status: object) -> None:
        out = mono[:size]
        exchange.play(out, clock.now_ns())
        pcm[:] = out[:, None]
        exchange.library_faults += bool(status)
        if times.outputBufferDacTime:
            exchange.out_latency_ns = _ns(times.outputBufferDacTime - times.currentTime)

    return callback


def _ns(seconds: float) -> int:
    return max(0, round(seconds * NS_PER_S))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """ALSA and PortAudio write what they try, and every underflow, into the terminal that somebody
    is looking at: while this lasts, standard error goes nowhere."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
