"""The control socket's connections: who came, what was said, who is gone, what waits to be sent.

Decides when a line is cut off: it cannot be read from, or it leaves more than `MOST_WAITING`
messages unread. A line may be busy for a moment, as when many callers come at once; what the kernel
has no room for waits here and is sent as it reads on. Does not know what messages mean
(`switchboard`). The control thread uses it.
"""

import logging
import selectors
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from appliance.control import LIMIT_BYTES
from appliance.listener import Listener
from appliance.log import Seldom
from appliance.session import SessionId

logger = logging.getLogger(__name__)

MOST_LINES = 64
"""Connections at once: far more line processes than a box has lines, and few enough that they
cannot use up the descriptors that calls need."""

MOST_WAITING = 1024
"""Messages that may wait for a line that does not read, beyond the kernel's 200 or so."""


@dataclass(eq=False, slots=True)
class Connection:
    """One line."""

    socket: socket.socket
    sessions: set[SessionId] = field(default_factory=set)
    waiting: deque[bytes] = field(default_factory=deque)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0


@dataclass(frozen=True, slots=True)
class Came:
    """A line was let in."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class Said:
    """It sent a message."""

    connection: Connection
    raw: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """It is gone, or was cut off; its socket is closed. Once per connection that came."""

    connection: Connection


class LineSockets:
    """All lines of one box."""

    def __init__(self, path: Path) -> None:
        """Binds the socket. Raises `listener.SocketTaken`."""
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(path)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._lost: deque[Connection] = deque()
        self._behind: set[Connection] = set()
        # What a peer can cause at will is logged seldom, each kind for itself.
        self._cut_off = Seldom(logger, logging.WARNING)
        self._turned_away = Seldom(logger, logging.WARNING)

    def __len__(self) -> int:
        """Lines that are there."""
        return len(self._selector.get_map()) - 1  # the listener is in it, too

    def poll(self, timeout_s: float, now_ns: int) -> Iterator[Came | Said | Lost]:
        """What happened, at most one message a line, waiting up to ``timeout_s`` for it."""
        for behind in list(self._behind):
            self._flush(behind, now_ns)
        for key, _ in self._selector.select(0 if self._lost else timeout_s):
            if key.data is None:
                connection = self._accept(now_ns)
                if connection is not None:
                    yield Came(connection)
            elif key.data.is_open:  # not dropped by something earlier in this pass
                raw = self._read(key.data)
                if raw:
                    yield Said(key.data, raw)
                elif raw is not None:
                    self._drop(key.data)
        while self._lost:
            yield Lost(self._lost.popleft())

    def send(self, connection: Connection, raw: bytes, now_ns: int) -> None:
        """Send a message, or keep it until there is room. To one that is gone: nothing."""
        if connection.is_open:
            connection.waiting.append(raw)
            self._flush(connection, now_ns)

    def cut_off(self, connection: Connection, why: str, now_ns: int) -> None:
        """It is not worth listening to: `Lost` follows."""
        if connection.is_open:
            self._cut_off.say(now_ns, "a line was cut off: %s", why)
            self._drop(connection)

    def close(self) -> None:
        """Give everything back."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self._selector.close()
        self._listener.close()

    def _accept(self, now_ns: int) -> Connection | None:
        peer, problem = self._listener.accept(has_room=len(self) < MOST_LINES)
        if peer is None:
            say = "a line was not let in: %s; %d are"
            self._turned_away.say(now_ns, say, problem, len(self))
            return None
        connection = Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        return connection

    def _read(self, connection: Connection) -> bytes | None:
        """b"": it has gone; None: nothing was there after all."""
        try:
            return connection.socket.recv(LIMIT_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _flush(self, connection: Connection, now_ns: int) -> None:
        waiting = connection.waiting
        try:
            while waiting:
                connection.socket.send(waiting[0])
                waiting.popleft()
        except BlockingIOError:
            self._behind.add(connection)
            if len(waiting) > MOST_WAITING:
                self.cut_off(connection, f"it left {len(waiting)} messages unread", now_ns)
            return
        except OSError as err:
            self.cut_off(connection, f"it cannot be sent to ({err.strerror or err})", now_ns)
            return
        self._behind.discard(connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.waiting.clear()
        self._behind.discard(connection)
        self._lost.append(connection)
