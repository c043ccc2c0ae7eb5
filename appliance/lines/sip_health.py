"""Whether one more call would be taken, told to whoever asks with OPTIONS at a port of its own.

Decides the answer's bytes. The SIP stack answers OPTIONS with 200 however full it is, so a load
balancer asks here instead: 200 while there is room, 503 with the reason and a Retry-After while
there is none. Whatever else comes is counted and not answered; nothing is remembered of anybody.
This is Python, on the thread that calls wait for, so who may ask is the kernel's to say, as at the
port for calls (`sip_filter`).
"""

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network
from typing import cast

from appliance.lines import sip_filter
from appliance.lines.sip_config import endpoint

LONGEST_BYTES = 8_192
RETRY_S = 5

_START = re.compile(rb"OPTIONS sips?:[^\s]{1,200} SIP/2\.0\r\n")
_HEADER = re.compile(
    rb"(?i)^(via|v|from|f|to|t|call-id|i|cseq)[ \t]*:[ \t]*([\x20-\x7e\x80-\xff\t]{1,1000})\r$",
    re.M,
)
_NAMES = {b"v": b"via", b"f": b"from", b"t": b"to", b"i": b"call-id"}


def answer(request: bytes, why: str) -> bytes | None:
    """The answer to an OPTIONS request; None for anything else. why: empty if there is room."""
    if len(request) > LONGEST_BYTES or not _START.match(request):
        return None
    head, gap, _ = request.partition(b"\r\n\r\n")
    if not gap:
        return None
    kept: dict[bytes, list[bytes]] = {}
    for name, value in _HEADER.findall(head + b"\r\n"):
        kept.setdefault(_NAMES.get(name.lower(), name.lower()), []).append(value)
    if any(len(kept.get(name, [])) != 1 for name in (b"from", b"to", b"call-id", b"cseq")):
        return None
    if b"via" not in kept:
        return None
    to = kept[b"to"][0]
    lines = [b"SIP/2.0 503 Service Unavailable" if why else b"SIP/2.0 200 OK"]
    lines += [b"Via: " + value for value in kept[b"via"]]
    lines.append(b"From: " + kept[b"from"][0])
    lines.append(b"To: " + (to if b"tag=" in to else to + b";tag=room"))
    lines.append(b"Call-ID: " + kept[b"call-id"][0])
    lines.append(b"CSeq: " + kept[b"cseq"][0])
    if why:
        lines.append(b"Retry-After: %d" % RETRY_S)
        lines.append(b'Warning: 399 duplexbox "' + _quoted(why) + b'"')
    return b"\r\n".join([*lines, b"Content-Length: 0", b"", b""])


def _quoted(why: str) -> bytes:
    return re.sub(rb'[^\x20-\x7e]|["\\]', b"'", why[:200].encode("ascii", "replace"))


class Health(asyncio.DatagramProtocol):
    """The port, if there is one, and whoever else is to know."""

    def __init__(
        self, at: str, also: Callable[[bool], None], networks: Sequence[IPv4Network] = ()
    ) -> None:
        """at: ADDRESS:PORT, or empty. also: told whether there is room, when that changes.

        networks: who may ask; empty: anybody.
        """
        self._at = at
        self._networks = networks
        self._also = also
        self._why = "starting"
        self._had_room: bool | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self.answered = 0
        self.ignored = 0

    async def start(self) -> None:
        """Begin to answer. Raises `OSError`."""
        if not self._at:
            return
        address, port = endpoint("health", self._at)
        bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sip_filter.attach(bound, sip_filter.program(self._networks))
            bound.bind((str(address), port))
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=bound)
        except BaseException:
            bound.close()
            raise

    def show(self, has_room: bool, why: str) -> None:
        """From now on say this."""
        self._why = "" if has_room else why or "full"
        if has_room != self._had_room:
            self._had_room = has_room
            self._also(has_room)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # On 3.11 a datagram transport is no instance of its own protocol.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        said = answer(data, self._why)
        if said is None or self._transport is None:
            self.ignored += 1
            return
        self.answered += 1
        self._transport.sendto(said, addr)
