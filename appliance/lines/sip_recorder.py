"""Telephone calls on disk: both sides of each in one WAV file, written by a thread of its own.

Decides when there is room: the disk must keep `min_free_mb`, all files together may take `keep_mb`,
old ones go first (`retention`), and when that is not enough nothing is recorded, which costs no
call. Calls hand over frames and wait for nothing; what a slow disk cannot take is left out as
silence and counted. `recording` knows where a sample belongs.
"""

import contextlib
import enum
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S, Clock, wall_ns, wall_stamp
from appliance.lines.recording import Conversation
from appliance.lines.sip_config import SipRecording
from appliance.lines.wav import WavError
from appliance.log import Seldom
from appliance.retention import BelievedTime, Stored, plan_removal

logger = logging.getLogger(__name__)

SUFFIX = ".wav"

MOST_WAITING = 10_000
"""Frames that may wait for the disk: of 100 calls, 4 s."""

GAP_NS = 50 * NS_PER_MS
"""What frames may seem to lie apart and still abut: two packets, and a turn of the line."""

LOOK_NS = 5 * NS_PER_S
"""How often the disk is looked at while something is recorded."""

MB = 10**6


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call is over, and its file is finished."""

    name: str
    """As the tape's."""
    path: Path
    seconds: float
    """0: there is no file."""
    trouble: str
    """Why it does not hold all of the call; empty: it does."""


class RecorderError(RuntimeError):
    """Calls cannot be recorded at all; the message says what to change."""


class _What(enum.Enum):
    SAID, HEARD, OVER = range(3)


class Tape:
    """One call's recording. The call uses `said`, `heard` and `close`; nothing there waits."""

    def __init__(self, recorder: "Recorder", name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.left_out = 0
        """Frames that the disk was too slow for."""
        self._recorder = recorder
        self._is_closed = False
        self._next_ns = 0
        """When what the caller has been sent so far has been heard."""
        # The thread's:
        self.conversation: Conversation | None = None
        self.trouble = ""

    def said(self, pcm: NDArray[np.float32] | None, arrived_ns: int) -> None:
        """The caller's next frame, (S,) float32; None: a frame of which nothing was heard.

        arrived_ns: when its last sample had come.
        """
        if self._recorder.is_behind:
            self.left_out += pcm is not None
            pcm = None  # the caller's side keeps the time
        self._recorder.put(self, _What.SAID, pcm, arrived_ns)

    def heard(self, pcm: NDArray[np.float32], playout_ns: int) -> None:
        """The caller hears (S,) float32 from about ``playout_ns`` on.

        A sender takes whole packets, so that is known to a packet only; frames abut unless there
        was a gap.
        """
        if abs(playout_ns - self._next_ns) < GAP_NS:
            playout_ns = self._next_ns
        self._next_ns = playout_ns + self._recorder.frame_ns
        if self._recorder.is_behind:
            self.left_out += 1
        else:
            self._recorder.put(self, _What.HEARD, pcm, playout_ns)

    def close(self) -> None:
        """The call is over. A second time is nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._recorder.put(self, _What.OVER, None, 0)


class Recorder:
    """All recordings of one line process."""

    def __init__(
        self, config: SipRecording, clock: Clock, hear: Callable[[Recorded], None]
    ) -> None:
        """hear: called by the thread. Raises `RecorderError`."""
        try:
            config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(config.folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "this user may not write to it", str(config.folder))
        except OSError as err:
            raise RecorderError(
                f"[sip.recording] folder = {config.folder}: {err.strerror or err}"
            ) from None
        self._config = config
        self._clock = clock
        self._hear = hear
        self._queue: queue.SimpleQueue[
            tuple[Tape, _What, NDArray[np.float32] | None, int] | None
        ] = queue.SimpleQueue()
        self._samples, self._rate_hz = 0, 0
        self.frame_ns = 0
        self._silence = np.zeros(0, np.float32)
        self._open: set[Tape] = set()
        self._no_room = ""
        """Why nothing can be recorded now; empty: it can."""
        self._look_ns = 0
        self._time = BelievedTime()
        self._troubles = Seldom(logger, logging.WARNING)
        self._thread = threading.Thread(target=self._run, name="sip-recorder", daemon=True)
        self._thread.start()

    def frames(self, samples: int, rate_hz: int) -> None:
        """What the model's frames are, before the first tape; a line keeps to one model."""
        self._samples, self._rate_hz = samples, rate_hz
        self.frame_ns = samples * NS_PER_S // rate_hz
        self._silence = np.zeros(samples, np.float32)

    def tape(self, name: str) -> Tape:
        """For the call called ``name``; its file is made with its first frame."""
        return Tape(self, name, self._config.folder / f"{wall_stamp()}-{name}{SUFFIX}")

    @property
    def is_behind(self) -> bool:
        """The disk does not keep up."""
        return self._queue.qsize() >= MOST_WAITING

    def put(self, tape: Tape, what: _What, pcm: NDArray[np.float32] | None, at_ns: int) -> None:
        """A tape has something."""
        self._queue.put((tape, what, pcm, at_ns))

    def close(self) -> None:
        """Return when every file has been finished."""
        self._queue.put(None)
        self._thread.join(10)

    # --- the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            tape, what, pcm, at_ns = item
            if what is _What.OVER:
                self._finish(tape)
            elif not tape.trouble:
                try:
                    self._write(tape, what, pcm, at_ns)
                except (OSError, WavError) as err:
                    tape.trouble = str(err)
                    self._troubles.say(self._clock.now_ns(), "call %s: %s", tape.name, err)
        for tape in list(self._open):
            self._finish(tape)

    def _write(self, tape: Tape, what: _What, pcm: NDArray[np.float32] | None, at_ns: int) -> None:
        now_ns = self._clock.now_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._no_room = self._make_room()
        if self._no_room:
            raise WavError(self._no_room)
        if what is _What.SAID:
            if tape.conversation is None:
                tape.conversation = Conversation(tape.path, self._rate_hz)
                self._open.add(tape)
            audio = self._silence if pcm is None else pcm
            tape.conversation.said(audio, at_ns - self.frame_ns)
        elif tape.conversation is not None and pcm is not None:
            tape.conversation.heard(pcm, at_ns)

    def _finish(self, tape: Tape) -> None:
        seconds = 0.0
        if tape.conversation is not None:
            seconds = tape.conversation.samples / self._rate_hz
            try:
                tape.conversation.close()
            except WavError as err:
                tape.trouble = tape.trouble or str(err)
            self._open.discard(tape)
        if not tape.trouble and tape.left_out:
            tape.trouble = f"the disk was too slow for {tape.left_out} frames"
        self._hear(Recorded(tape.name, tape.path, seconds, tape.trouble))

    def _make_room(self) -> str:
        """Remove what is too old or too much; why there is no room all the same, or nothing."""
        config, folder = self._config, self._config.folder
        with os.scandir(folder) as entries:
            files = stored(entries)
        free = shutil.disk_usage(folder).free
        is_on = {tape.path.name for tape in self._open}
        names = [file.name for file in files]
        now_ns = self._clock.now_ns()
        oldest = self._time.oldest(config.keep_days, names, is_on, wall_ns(), now_ns)
        if doubt := self._time.doubt():
            logger.warning("recordings: %s", doubt)
        keep, needed = config.keep_mb * MB, config.min_free_mb * MB - free
        gone = set(plan_removal(files, is_on, oldest, keep, needed))
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        removed = sum(file.bytes for file in files if file.name in gone)
        total = sum(file.bytes for file in files) - removed
        if removed < needed:
            return (
                f"{folder}: {(free + removed) // MB} MB are free, and [sip.recording] min_free_mb "
                f"is {config.min_free_mb}; nothing is recorded"
            )
        if keep and total > keep:
            return (
                f"{folder}: calls that are on take {total // MB} MB, and [sip.recording] keep_mb "
                f"is {config.keep_mb}; nothing more is recorded"
            )
        return ""


def stored(entries: Iterable["os.DirEntry[str]"]) -> list[Stored]:
    """The recordings of a folder. One that an operator has moved elsewhere meanwhile is none."""
    files = []
    for entry in entries:
        if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                files.append(Stored(entry.name, entry.stat().st_size))
    return files
