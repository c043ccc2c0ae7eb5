"""Which threads of a telephone stack go ahead of ordinary programs: those that owe a packet now.

Decides what is asked of the kernel for them, and when nothing may be asked. Such a thread sleeps
for a few milliseconds, sends 20 ms of one call and sleeps again: what it is woken late by is a gap
in the caller's ear, and on two busy cores ordinary threads are woken up to 25 ms late. So they get
the lowest real-time priority there is. The thread that reads what strangers send stays an ordinary
one, and so does Python's. A box's tick must stay ahead of them, whoever calls in whatever codec:
nothing is asked for while a box has no real-time priority above theirs.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

PRIORITY = 1
PROC = Path("/proc")
RT_PRIORITY = 37
"""Its place among what /proc/PID/stat says after the name."""


def give(thread: int) -> None:
    """Raises `OSError`. Threads it might start do not inherit it."""
    kind = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(thread, kind, os.sched_param(PRIORITY))


class MediaThreads:
    """Threads of this process that have been put ahead."""

    def __init__(
        self,
        names: Iterable[str],
        boxes: Callable[[], Iterable[int]],
        give: Callable[[int], None] = give,
        proc: Path = PROC,
    ) -> None:
        """names: as the stack calls such threads. boxes: processes that must stay ahead of them.

        give: of one thread, what the kernel gives or refuses with `OSError`.
        """
        self._names = frozenset(names)
        self._boxes = boxes
        self._give = give
        self._proc = proc
        self._ahead: set[int] = set()
        self._said = ""

    def look(self) -> None:
        """Put those ahead that have begun since the last time."""
        tasks = self._proc / "self" / "task"
        now = {int(name) for name in os.listdir(tasks)}
        self._ahead &= now
        # A thread that has just begun has its creator's name still, and is looked at again.
        new = [one for one in now - self._ahead if _text(tasks / f"{one}/comm") in self._names]
        if not new:
            return
        boxes = (highest_priority(box, self._proc) for box in self._boxes())
        if min(boxes, default=0) <= PRIORITY:
            self._say(
                f"the stack's media threads stay ordinary ones: a box's tick has no real-time "
                f"priority above {PRIORITY}, which theirs would be ([clock] realtime_priority)"
            )
            return
        for thread in new:
            try:
                self._give(thread)
            except ProcessLookupError:
                continue  # that call is over
            except OSError as err:
                self._say(
                    f"no real-time priority of {PRIORITY} for the stack's media threads: "
                    f"{err.strerror}. It needs LimitRTPRIO={PRIORITY} in its unit, or CAP_SYS_NICE"
                )
                return
            self._ahead.add(thread)

    def _say(self, why: str) -> None:
        """Once: the same holds for every call."""
        if why != self._said:
            self._said = why
            logger.info("%s", why)


def highest_priority(process: int, proc: Path = PROC) -> int:
    """Real-time, of any of its threads; 0: it has none, or is not there."""
    found = 0
    for stat in (proc / str(process) / "task").glob("*/stat"):
        fields = _text(stat).rpartition(")")[2].split()
        if len(fields) > RT_PRIORITY:
            found = max(found, int(fields[RT_PRIORITY]))
    return found


def _text(path: Path) -> str:
    """Empty if the thread has gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""
