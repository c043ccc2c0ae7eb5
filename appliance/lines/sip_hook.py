"""What happens to telephone calls, told to a program of the operator's; nothing waits for it.

Decides how often it is started: a caller who presses keys all day must not fill the machine with
processes. What is more is left out and counted in the log.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
from pathlib import Path

from appliance.clock import Clock
from appliance.lines.limits import Bucket
from appliance.log import Seldom

logger = logging.getLogger(__name__)

PER_S, BURST, MOST = 50, 200, 16
"""How often it is started; how many may run at once."""

LONGEST_S = 30
SETTLE_S = 3.0
"""What a line that stops waits for them; its supervisor takes five seconds without a word for a
death (`sip_supervisor.SILENT_NS`)."""


class ProgramHook:
    """Starts ``program`` with one JSON object on its standard input. For one event loop."""

    def __init__(self, program: Path, clock: Clock, longest_s: float = LONGEST_S) -> None:
        self._program = program
        self._clock = clock
        self._longest_s = longest_s
        self._bucket = Bucket(PER_S, BURST)
        self._running: set[asyncio.Task[None]] = set()
        self._left_out = Seldom(logger, logging.WARNING)
        self._failed = Seldom(logger, logging.WARNING)
        if not os.access(program, os.X_OK):  # no reason to take no calls
            logger.warning("hook %s: there is no such program that may be run", program)

    def __call__(self, event: dict[str, object]) -> None:
        now_ns = self._clock.now_ns()
        if len(self._running) >= MOST or not self._bucket.take(1, now_ns):
            self._left_out.say(
                now_ns, "hook %s was left out for %s", self._program, event.get("event")
            )
            return
        task = asyncio.get_running_loop().create_task(self._start(event))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settle(self, within_s: float = SETTLE_S) -> None:
        """Wait for those that run: the line stops, and what it said last counts, too."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)

    async def _start(self, event: dict[str, object]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                str(self._program),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as err:
            now_ns = self._clock.now_ns()
            self._failed.say(now_ns, "hook %s could not be started: %s", self._program, err)
            return
        try:
            await asyncio.wait_for(process.communicate(json.dumps(event).encode()), self._longest_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever a script waits for
            await process.wait()
            self._failed.say(
                self._clock.now_ns(),
                "hook %s ran for longer than %g s and was killed",
                self._program,
                self._longest_s,
            )
