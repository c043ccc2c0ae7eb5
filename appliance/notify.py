"""What the box tells systemd: ready, alive, stopping. sd_notify(3) on a plain datagram socket.

Outside systemd there is no NOTIFY_SOCKET, and all of it does nothing. Nothing here ever blocks or
raises once it is made: the box does not depend on whoever listens. Who calls `alive`, and when, is
the point of the whole: the tick loop, and nobody else.
"""

import os
import socket
from collections.abc import Mapping


class Notify:
    """One datagram socket, or none. Any thread; also signal handlers."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Read NOTIFY_SOCKET and WATCHDOG_USEC, as systemd sets them for its child."""
        address = environment.get("NOTIFY_SOCKET", "")
        # systemd writes an abstract address with @ where the kernel has a NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
        self.watchdog_ns = _watchdog_ns(environment) if self._socket is not None else None
        """Within how long `alive` must be called again; None: nobody watches."""

    def ready(self, status: str) -> None:
        """The box takes calls. status: what `systemctl status` shows."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self) -> None:
        """The tick loop turned. Costs one system call of a few microseconds."""
        self._send("WATCHDOG=1")

    def stopping(self, within_ns: int) -> None:
        """The box drains and will be gone ``within_ns`` from now."""
        self._send(f"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={within_ns // 1000}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(state.encode(), self._address)
        except OSError:
            # Full or gone. A lost WATCHDOG=1 is made up for by the next; of a systemd that does
            # not listen there is nobody to tell.
            return


def _watchdog_ns(environment: Mapping[str, str]) -> int | None:
    """WATCHDOG_USEC, if it is meant for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    owner = environment.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if owner and owner != str(os.getpid()):
        return None
    return int(microseconds) * 1000
