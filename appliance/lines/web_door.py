"""Who gets in at the websocket line's door, and how many at a time.

Decides from a request's headers who is sent away, with which words; and lets newcomers in one at a
time, so that a crowd never keeps those who talk already from being looked after. Does not know
HTTP, calls or boxes (`web_server`).

A page of another site, in the browser of somebody who reaches this line, comes in two ways. It says
where it is from (`Origin`), which is then not this host. Or its site's name is made to mean this
machine once the page is there (DNS rebinding): `Origin` and `Host` agree then, and only the name is
wrong. So a name must be one that this line goes by; an address is no name, and belongs to nobody.
"""

import asyncio
import hmac
import ipaddress
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

ANY = "*"
LONGEST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Guard:
    """What the operator allows."""

    token: str = ""
    """What callers must know; empty: nothing."""
    origins: frozenset[str] = frozenset()
    """Origins of pages that may call besides our own; `ANY` is any."""
    hosts: frozenset[str] = frozenset()
    """Names of this line, in lower case, besides addresses and localhost; `ANY` is any."""

    def wrong_name(self, headers: Mapping[str, str]) -> str:
        """Why a request was not meant for this line; empty: it was."""
        host = headers.get("Host", "")
        if not host or ANY in self.hosts or (name := _name(host)) in self.hosts:
            return ""  # browsers always say which host they mean
        if name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return ""
        shown = _shown(name)
        return f"this line does not go by the name {shown}; if it should, start it with --host NAME"

    def refusal(self, headers: Mapping[str, str], given: str) -> tuple[int, str] | None:
        """Status and words for who may not use `/api/`. given: the token in the address."""
        origin = headers.get("Origin")
        if origin is not None and not may_call(origin, headers.get("Host", ""), self.origins):
            return 403, f"pages of this origin may not call; allow it: --origin {_shown(origin)}"
        if self.token:
            bearer = headers.get("Authorization", "")
            if bearer.startswith("Bearer "):
                given = bearer.removeprefix("Bearer ")
            # A header's bytes that are no UTF-8 come as surrogates.
            known = given.encode(errors="surrogateescape")
            if not hmac.compare_digest(known, self.token.encode()):
                return 401, "a token is needed: ?token=..."
        return None


class Turnstile:
    """Lets one through at each `turn`, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Wait for our turn."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        finally:
            if mine in self._waiting:  # it has gone away meanwhile
                self._waiting.remove(mine)

    def turn(self) -> None:
        """The next one may go."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return


def may_call(origin: str, host: str, origins: frozenset[str]) -> bool:
    """Whether a page of ``origin`` may open a socket at ``host``: our own, or one allowed."""
    if ANY in origins or origin in origins:
        return True
    try:
        return urlsplit(origin).netloc == host
    except ValueError:  # no browser's
        return False


def _name(host: str) -> str:
    """Of ``NAME``, ``NAME:PORT`` or ``[ADDRESS]:PORT``, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _shown(text: str) -> str:
    """What a stranger wrote, short and of ASCII."""
    return text[:LONGEST_SHOWN].encode("ascii", "backslashreplace").decode()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
