"""How the box logs: one line per change of state, to stderr; journald adds the time.

Nothing is logged per tick or per frame, and nothing at all from the tick thread.
"""

import logging
import sys

SELDOM_NS = 1_000_000_000


class Seldom:
    """A kind of line that a peer can cause at will: at most one a second, with how many more there
    were, so that a flood does not fill the disk. One thread uses it."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._quiet_until_ns: int | None = None
        self._left_out = 0

    def say(self, now_ns: int, message: str, *args: object) -> None:
        """Log ``message % args``, or count it."""
        if self._quiet_until_ns is not None and now_ns < self._quiet_until_ns:
            self._left_out += 1
            return
        if self._left_out:
            message = f"{message}; {self._left_out} like it before were not logged"
        self._logger.log(self._level, message, *args)
        self._quiet_until_ns = now_ns + SELDOM_NS
        self._left_out = 0


def set_up(*, verbose: bool = False) -> None:
    """Once, from a verb that serves. verbose: also what only a developer wants to know."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
