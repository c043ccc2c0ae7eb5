"""The control socket's listening end: whose path it is, and how a line is let in or turned away.

Decides whether a socket that lies at the path is a box or was left behind by one, and what happens
when descriptors run out. Does not know who is let in, or what is said then (`switchboard`).
"""

import errno
import os
import socket
import stat
from pathlib import Path

BACKLOG = 128
"""Lines that may knock at once; beyond it the kernel tells them to try again."""


class SocketTaken(RuntimeError):
    """The control socket cannot be had; the operator's to fix."""


class Listener:
    """A listening socket at a path, mode 0600. One thread uses it."""

    def __init__(self, path: Path) -> None:
        """Bind; a stale socket of a killed box is replaced. Raises `SocketTaken`."""
        self._path = path
        self._socket = _listen(path)
        # Given up for a moment when descriptors run out: a connection that cannot be accepted
        # stays readable, and whoever waits for it would spin.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        """For a selector: readable when somebody knocks."""
        return self._socket.fileno()

    def accept(self, *, has_room: bool) -> tuple[socket.socket | None, str]:
        """Whoever knocks, non-blocking; or None and why nobody was let in.

        has_room: False closes the connection at once, which the peer sees.
        """
        try:
            peer, _ = self._socket.accept()
        except OSError as err:  # it went away again, or we have no descriptors left
            if err.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return None, err.strerror or str(err)
        if not has_room:
            peer.close()
            return None, "too many lines"
        peer.setblocking(False)
        return peer, ""

    def close(self) -> None:
        """Give back the path and the descriptors.

        The path first: whoever finds a socket that nobody listens at puts its own in its place, and
        that must not be taken away.
        """
        self._path.unlink(missing_ok=True)
        self._socket.close()
        os.close(self._spare)

    def _turn_away(self) -> None:
        os.close(self._spare)
        try:
            self._socket.accept()[0].close()
        except OSError:
            pass  # it has gone already, which is as good
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise SocketTaken(f"{path} is not a socket; name another one in [control] socket")
            _remove_if_stale(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as err:
        listener.close()
        raise SocketTaken(
            f"the control socket {path} cannot be made: {err.strerror or err}. "
            f"Name a path of at most 107 bytes in a folder this user may write to"
        ) from None
    except SocketTaken:
        listener.close()
        raise
    return listener


def _remove_if_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)  # a box that is busy or stopped may have a full backlog
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # nobody listens: left behind by a box that was killed
            return
        except BlockingIOError:
            pass  # the backlog is full, so somebody listens
    raise SocketTaken(f"another box listens at {path}. Stop it, or name another [control] socket")
