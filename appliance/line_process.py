"""A line in a process of its own beside a box in this one: the demo's callers and certify's.

A thread starts the process once the box is ready, shows how it goes, and drains the box when the
process has ended or is told to. It does not know what the callers do or what they leave behind:
the command says it, and whoever made the command reads the result.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from appliance.box import Box
from appliance.clock import NS_PER_S
from appliance.realtime import ask_for_priority
from appliance.seat import TickCounts

PROGRESS_S = 0.25
ROOT = Path(__file__).parents[1]


class LineProcess:
    """One run of ``command``; what it prints goes into ``log``, or None: it has the terminal.

    progress: called a few times a second from the thread, with the seconds since the box's tick 0
    and what its loop has counted.
    """

    def __init__(
        self,
        box: Box,
        command: list[str],
        log: Path | None,
        progress: Callable[[float, TickCounts], None],
        priority: int = 0,
    ) -> None:
        """priority: of the thread; as of the box's other threads, see `realtime`."""
        self.exit_code: int | None = None
        self._box = box
        self._command = command
        self._log = log
        self._progress = progress
        self._priority = priority
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="line-process")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        """Tell the process to say goodbye (SIGTERM); the box drains once it has. From a signal
        handler too; before the process exists the box drains at once."""
        if self._process is None:
            self._stop.set()
            self._box.drain()
        elif self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            ask_for_priority(self._priority, "the thread that watches the callers")
            while not self._box.switchboard.ready:
                if self._stop.wait(0.05):
                    return
            # The checkout, or wherever this package lies: the child must run the same duplexbox.
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            with contextlib.ExitStack() as stack:
                log = None if self._log is None else stack.enter_context(self._log.open("wb"))
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=None if log is None else subprocess.DEVNULL,
                    stdout=log,
                    stderr=None if log is None else subprocess.STDOUT,
                    env=env,
                )
                try:
                    self._watch(process)
                finally:
                    if process.poll() is None:
                        process.terminate()
                    self.exit_code = process.wait()
        finally:
            self._box.drain()

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        while process.poll() is None and not self._stop.wait(PROGRESS_S):
            counts = self._box.loop.counts
            self._progress((counts.tick + 1) * self._box.loop.grid.period_ns / NS_PER_S, counts)
