"""What happens to telephone calls, told to a program of the operator's; nothing waits for it.

Decides how often it is started: a caller who presses keys all day must not fill the machine with
processes. What is more is left out and counted in the log.
"""

import asyncio
import json
import logging
import subprocess
from pathlib import Path

from appliance.clock import Clock
from appliance.lines.limits import Bucket
from appliance.log import Seldom

logger = logging.getLogger(__name__)

PER_S, BURST, MOST = 50, 200, 16
"""How often it is started; how many may run at once."""

LONGEST_S = 30


class ProgramHook:
    """Starts ``program`` with one JSON object on its standard input. For one event loop."""

    def __init__(self, program: Path, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._bucket = Bucket(PER_S, BURST)
        self._running: set[asyncio.Task[None]] = set()
        self._left_out = Seldom(logger, logging.WARNING)

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

    async def settle(self, within_s: float = 5.0) -> None:
        """Wait for those that run: the line stops, and what it said last counts, too."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)

    async def _start(self, event: dict[str, object]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                str(self._program), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        except OSError as err:
            logger.warning("hook %s could not be started: %s", self._program, err)
            return
        try:
            await asyncio.wait_for(process.communicate(json.dumps(event).encode()), LONGEST_S)
        except TimeoutError:
            process.kill()
            logger.warning(
                "hook %s ran for longer than %d s and was killed", self._program, LONGEST_S
            )
