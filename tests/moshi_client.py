"""`python -m moshi.client`, unchanged, with a sound card made of two files.

    python -m tests.moshi_client SAID.wav HEARD.wav SECONDS [options of moshi.client]

Only the module `sounddevice` is replaced: it calls the client's callbacks every 80 ms, as a card
does. Ends like Ctrl-C after so many seconds.
"""

import importlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import soundfile

from appliance.clock import NS_PER_S, MonotonicClock

BLOCK, RATE_HZ = 1920, 24_000
CLOCK = MonotonicClock()


class Stream:
    """A thread that calls back on a grid, as a card's driver does."""

    def __init__(self, *, samplerate: int, channels: int, blocksize: int, callback: Any) -> None:
        assert (samplerate, channels, blocksize) == (RATE_HZ, 1, BLOCK)
        self.callback: Callable[[np.ndarray[Any, Any], int, object, object], None] = callback
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def block(self, index: int) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        start_ns = CLOCK.now_ns()
        index = 0
        while not self._over.is_set():
            CLOCK.sleep_until(start_ns + (index + 1) * BLOCK * NS_PER_S // RATE_HZ)
            self.block(index)
            index += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


class InputStream(Stream):
    def block(self, index: int) -> None:
        pcm = np.zeros((BLOCK, 1), np.float32)
        part = said[index * BLOCK : (index + 1) * BLOCK]
        pcm[: part.size, 0] = part
        self.callback(pcm, BLOCK, None, None)


class OutputStream(Stream):
    def block(self, index: int) -> None:
        pcm = np.zeros((BLOCK, 1), np.float32)
        self.callback(pcm, BLOCK, None, None)
        heard.append(pcm[:, 0].copy())


if __name__ == "__main__":
    said_path, heard_path, seconds = sys.argv[1:4]
    pcm, rate_hz = soundfile.read(said_path, dtype="float32")
    at = np.arange(0, pcm.size, rate_hz / RATE_HZ)
    said = np.interp(at, np.arange(pcm.size), pcm).astype(np.float32)
    heard: list[np.ndarray[Any, Any]] = []
    card: Any = types.ModuleType("sounddevice")
    card.InputStream, card.OutputStream = InputStream, OutputStream
    sys.modules["sounddevice"] = card
    client: Any = importlib.import_module("moshi.client")

    sys.argv = ["moshi.client", *sys.argv[4:]]
    # Whoever started the tests in a shell's background has it ignored, and so has all they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    client.main()
    soundfile.write(heard_path, np.concatenate(heard), RATE_HZ)
