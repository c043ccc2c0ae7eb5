"""Real-time priority for the thread that ticks. The machine's decision, asked for once.

SCHED_FIFO puts the tick thread ahead of every ordinary process when both want a core. That does
not help against the interpreter lock: another thread of ours that holds it, and has lost its core
to an ordinary process, holds up the tick for as long as that runs. So the other threads of the box
ask for half its priority: below the tick thread, and not at the mercy of the rest of the machine.
"""

import logging
import os

logger = logging.getLogger(__name__)


def ask_for_priority(priority: int, who: str = "the tick thread") -> bool:
    """Give the calling thread SCHED_FIFO at ``priority``, 1 to 99; 0 asks for nothing.

    Returns whether it was given. Where it is not allowed the box runs all the same, with one line
    in the log that says what would allow it.
    """
    if priority == 0:
        return False
    try:
        # Threads and processes that the tick thread might start do not inherit it.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (OSError, AttributeError) as err:
        logger.info(
            "%s has no real-time priority: %s. It needs LimitRTPRIO=%d in its unit, "
            "or CAP_SYS_NICE; [clock] realtime_priority = 0 does without",
            who,
            getattr(err, "strerror", None) or err,
            priority,
        )
        return False
    logger.info("%s has real-time priority %d", who, priority)
    return True
