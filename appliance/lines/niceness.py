"""Asking the kernel for more of the processor than programs that only compute get.

Niceness is a thread's, and threads begun later inherit it: ask before they are. With
`sched_autogroup` (on in Debian and Ubuntu) it counts only among the processes of one session, and a
service is a session of its own: there it is the group that has to be asked for, in
/proc/self/autogroup. Both need CAP_SYS_NICE or LimitNICE.
"""

import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")

NICENESS = -11
"""Of a line, where the machine allows it: what sound servers ask for. What a line is late by is
heard as a gap, and a busy machine is late by more than that."""


def ask_for(niceness: int = NICENESS, autogroup: Path = AUTOGROUP) -> str:
    """Of this thread and its process's session; why it was not given, empty if it was.

    The caller's process should lead its session: others in it get the same.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        if autogroup.exists():
            autogroup.write_text(f"{niceness}\n", encoding="ascii")
    except OSError as err:
        return f"no niceness of {niceness}: {err.strerror}. It needs LimitNICE in its unit"
    return ""
