"""Where the websocket line listens: sockets whose crowds are let in a few at a time.

An event loop accepts as many connections in one go as its socket's backlog is long, and does
nothing else meanwhile. So the loop is told of a short one, and the kernel of a long one, where
newcomers wait without costing anything. Knows nothing of what is served (`web_server`).
"""

import gc
import logging
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from appliance.clock import NS_PER_S, Clock

if TYPE_CHECKING:
    import ssl

REQUEST_S = 10.0
"""How long a connection may be open without a whole request: it is closed then."""

ACCEPTED_AT_ONCE = 2
"""Connections between two looks at everything else: about a millisecond."""

QUEUE = 1024
"""Connections that the kernel keeps for us; it knows a lower bound of its own (somaxconn)."""


async def open_site(
    app: web.Application,
    host: str,
    port: int,
    clock: Clock,
    context: "ssl.SSLContext | None" = None,
) -> web.AppRunner:
    """Listen at ``host``, at all its addresses; `runner.addresses` says where. Raises `OSError`."""
    log_seldom(clock)
    # What is loaded by now stays; a look through all of it takes the collector some 50 ms.
    gc.collect()
    gc.freeze()
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, keepalive_timeout=REQUEST_S
    )
    await runner.setup()
    try:
        for listener in _listeners(host, port):
            site = web.SockSite(runner, listener, ssl_context=context, backlog=ACCEPTED_AT_ONCE)
            await site.start()
            listener.listen(QUEUE)
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _listeners(host: str, port: int) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        kind = socket.SOCK_STREAM
        for family, _, _, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        ):
            listener = socket.socket(family, kind)
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError:
        for listener in found:
            listener.close()
        raise
    return found


class _Seldom(logging.Filter):
    """At most one line a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._quiet_until_ns = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_ns = self._clock.now_ns()
        if now_ns < self._quiet_until_ns:
            return False
        self._quiet_until_ns = now_ns + NS_PER_S
        return True


def log_seldom(clock: Clock) -> None:
    """What the HTTP library has to say of strangers: a traceback of some milliseconds each time."""
    logger = logging.getLogger("aiohttp.server")
    if not any(isinstance(one, _Seldom) for one in logger.filters):
        logger.addFilter(_Seldom(clock))
