"""The terminal of a local call: a level meter, what the model says, and the keys.

Decides what one line of the terminal looks like. Where there is no terminal it says only what
changes. Does not know the call; it is handed what there is to show.

    space   mute or open the microphone         q   hang up
"""

import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

BAR_CELLS = 12
FLOOR_DB = -60.0
"""The left end of a meter; the right end is full scale."""

MUTE_KEY, LEAVE_KEY = " ", "q"
HELP = "space: mute or open the microphone; q: hang up"


@dataclass(frozen=True, slots=True)
class View:
    """What the line at the bottom says."""

    microphone_db: float
    speaker_db: float
    muted: bool
    margin_ms: float
    drift_ppm: float
    trouble: str = ""
    """Instead of the meters."""


def meter(view: View, width: int) -> str:
    """One line, at most ``width`` characters. Pure."""
    if view.trouble:
        return f"  {view.trouble}"[:width]
    microphone = "muted".center(BAR_CELLS) if view.muted else bar(view.microphone_db)
    return (
        f"  you [{microphone}] {_db(view.microphone_db)}   model [{bar(view.speaker_db)}] "
        f"{_db(view.speaker_db)}   margin {view.margin_ms:3.0f} ms   "
        f"card {view.drift_ppm:+5.0f} ppm"
    )[:width]


def bar(level_db: float) -> str:
    """``####........``: the share of the way from `FLOOR_DB` to full scale. Pure."""
    share = (level_db - FLOOR_DB) / -FLOOR_DB
    cells = max(0, min(BAR_CELLS, round(share * BAR_CELLS)))
    return "#" * cells + "." * (BAR_CELLS - cells)


def _db(level_db: float) -> str:
    return f"{max(level_db, -99.0):3.0f} dB"


class Screen:
    """Standard input and output. One thread uses it."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = sys.stdout if output is None else output
        self._is_terminal = self._output.isatty()
        self._keys = sys.stdin.fileno() if self._is_terminal and sys.stdin.isatty() else None
        self._words = ""
        self._shown = ""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Keys come one by one and unseen until this ends, however it ends."""
        if self._keys is None:
            yield
            return
        before = termios.tcgetattr(self._keys)
        try:
            tty.setcbreak(self._keys)
            yield
        finally:
            self._clear()
            self._flush()
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, before)

    def keys(self) -> str:
        """What has been typed since it was asked last."""
        if self._keys is None or not select.select([self._keys], [], [], 0)[0]:
            return ""
        try:
            return os.read(self._keys, 64).decode("ascii", "ignore")
        except OSError:  # the terminal has been closed; the hang-up signal is on its way
            return ""

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        self._write(f"{text}\n")
        self._draw()
        self._flush()

    def words(self, said: str) -> None:
        """More of what the model says; shown a line at a time, as words fill it."""
        self._words += said
        width = min(shutil.get_terminal_size().columns - 4, 100)
        while len(self._words) > width:
            at = self._words.rfind(" ", 0, width)
            at = width if at <= 0 else at
            line, self._words = self._words[:at], self._words[at:].lstrip()
            self.say(f"  {line}")

    def pause(self) -> None:
        """The model has stopped talking: show what waits for more."""
        if self._words.strip():
            self.say(f"  {self._words.strip()}")
        self._words = ""

    def show(self, view: View) -> None:
        """The line at the bottom, if there is a terminal."""
        if not self._is_terminal:
            return
        self._shown = meter(view, shutil.get_terminal_size().columns - 1)
        self._draw()
        self._flush()

    def _draw(self) -> None:
        if self._is_terminal and self._shown:
            self._write(f"\r{self._shown}\x1b[K")

    def _clear(self) -> None:
        if self._is_terminal and self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that has been closed
            self._output.write(text)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            self._output.flush()
