"""Callers whom an Asterisk hands over by its `chan_websocket`, one websocket each.

Decides the protocol's messages (pure: `event`, `command`, `rate_of`) and what waits at the
Asterisk. Audio is in binary messages, everything else in text ones, in one of two forms; we answer
in the form that the first came in. The Asterisk plays 20 ms every 20 ms and silence when it has
nothing, so audio is sent as soon as it is there, in whole packets (the rest of one that is not
whole would be dropped there), and how much waits is reckoned, and put right now and then by what
the Asterisk says. All else is the telephone line's: this is one more `sip_stack.Stack`.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from aiohttp import WSMsgType, web
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S, Clock
from appliance.lines import bridge, sip_stack
from appliance.lines.sip_config import SipConfig, endpoint
from appliance.lines.sip_stack import Event, Format, StackError
from appliance.log import Seldom

logger = logging.getLogger(__name__)

FIRST_S = 5.0
"""How long a connection may take to say whose call it is."""

LONGEST_BYTES = 65_536
HEARTBEAT_S = 10.0
"""A ping this often: an Asterisk that has vanished says nothing."""

ASK_NS = 5 * NS_PER_S
"""How often the Asterisk is asked how much waits there: clocks differ by little."""

OFF_NS = 20 * NS_PER_MS
"""Its answer is in whole packets, so what differs by less is right."""

HELD_NS = 2 * NS_PER_S
"""What may wait unread of the caller's, as in the SIP stack."""

MOST_WAITING = 400
"""Messages that may wait for an Asterisk that does not read."""

NOTHING = np.zeros(0, np.int16)

_SLIN = re.compile(r"slin(\d{0,3})")


@dataclass(frozen=True, slots=True)
class Said:
    """One text message of the Asterisk's."""

    kind: str
    """Such as MEDIA_START."""
    fields: Mapping[str, str] = field(default_factory=dict)


def event(text: str) -> Said:
    """Either form: ``KIND name:value ...``, or JSON with the kind in "event". Pure."""
    if not text.startswith("{"):
        kind, _, rest = text.strip().partition(" ")
        pairs = (word.partition(":") for word in rest.split())
        return Said(kind, {name: value for name, colon, value in pairs if colon})
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            plain = {k: str(v) for k, v in found.items() if isinstance(v, str | int)}
            return Said(plain.pop("event", ""), plain)
    return Said("")


def command(name: str, *, as_json: bool) -> str:
    """What we ask for, such as HANGUP, in the Asterisk's form. Pure."""
    return json.dumps({"command": name}) if as_json else name


def rate_of(audio: str) -> int:
    """Samples a second of the format ``audio``, such as slin16; 0: not of 16 bits. Pure."""
    found = _SLIN.fullmatch(audio)
    if found is None:
        return 0
    rate_hz = {"": 8_000, "44": 44_100}.get(found[1]) or int(found[1]) * 1000
    return rate_hz if 8_000 <= rate_hz <= 48_000 else 0


def packet_bytes(text: str) -> int:
    """The Asterisk's word for how long a packet is; 0: no such packet can be. Pure."""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(LONGEST_BYTES)):
        return 0
    return int(text) if 2 <= int(text) <= LONGEST_BYTES else 0


def _printable(text: str) -> str:
    """What somebody will read in a log or a list of calls."""
    return "".join(char for char in text[:200] if char.isprintable())


class WebsocketMedia:
    """One call's audio. Nothing here waits; ``send`` queues a message."""

    def __init__(
        self, audio: str, packet_bytes: int, send: Callable[[bytes], None], clock: Clock
    ) -> None:
        """audio: the format, one of `rate_of`. packet_bytes: what the Asterisk takes as one."""
        self.codec = audio
        self.in_hz = rate_of(audio)
        self.is_open = True
        self.is_stopped = False
        """The Asterisk wants no more for now."""
        self._packet_bytes = packet_bytes
        self._send = send
        self._clock = clock
        self._came: deque[bytes] = deque()
        self._came_bytes = 0
        self._rest = b""
        """Less than a packet."""
        self._dry_ns = 0
        """When the Asterisk has played what it has."""

    def format(self) -> Format | None:
        if not self.is_open:
            return None
        ahead = max(0, self._dry_ns - self._clock.now_ns()) * self.in_hz // NS_PER_S
        # What is less than a packet waits behind others, or an Asterisk has run dry.
        return Format(self.in_hz, ahead + len(self._rest) // 2 if ahead else 0)

    def read(self) -> NDArray[np.int16]:
        if not self._came:
            return NOTHING
        came = b"".join(self._came)
        self._came.clear()
        self._came_bytes = 0
        return np.frombuffer(came[: len(came) // 2 * 2], "<i2").astype(np.int16, copy=False)

    def write(self, pcm: NDArray[np.int16]) -> int:
        if self.is_stopped or not self.is_open:
            return 0
        audio = self._rest + pcm.astype("<i2", copy=False).tobytes()
        whole = len(audio) // self._packet_bytes * self._packet_bytes
        self._rest = audio[whole:]
        if whole:
            self._send(audio[:whole])
            now_ns = self._clock.now_ns()
            self._dry_ns = max(now_ns, self._dry_ns) + whole // 2 * NS_PER_S // self.in_hz
        return int(pcm.size)

    def heard(self, payload: bytes) -> None:
        """Audio came. Beyond 2 s that nobody has read, the oldest is let go."""
        self._came.append(payload)
        self._came_bytes += len(payload)
        while self._came_bytes > 2 * self.in_hz * HELD_NS // NS_PER_S:
            self._came_bytes -= len(self._came.popleft())

    def waits(self, packets: int) -> None:
        """The Asterisk says how many packets wait there; the one it plays is not counted."""
        packet_ns = self._packet_bytes // 2 * NS_PER_S // self.in_hz
        found_ns = self._clock.now_ns() + packets * packet_ns + packet_ns // 2
        if abs(found_ns - self._dry_ns) > OFF_NS:
            self._dry_ns = found_ns


class _Call:
    """One connection that is a call."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.outbox: asyncio.Queue[bytes | str | None] = asyncio.Queue(MOST_WAITING)
        self.is_stuck = False

    def ask(self, name: str) -> None:
        self.send(command(name, as_json=self.as_json))

    def send(self, message: bytes | str | None) -> None:
        """None: close."""
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.is_stuck = True


class ChanWebsocketStack:
    """All connections."""

    def __init__(self, config: SipConfig, clock: Clock) -> None:
        """config: `listen`, `allow`, and one account that every call is to."""
        self._config = config
        self._clock = clock
        self._account = config.accounts[0].user
        self._hear: Callable[[Event], None] = lambda _: None
        self._calls: dict[int, _Call] = {}
        self._media: dict[int, WebsocketMedia] = {}
        self._numbers = 0
        self._runner: web.AppRunner | None = None
        self._turned_away = Seldom(logger, logging.INFO)
        self._unusable = Seldom(logger, logging.WARNING)

    async def start(self, hear: Callable[[Event], None]) -> None:
        self._hear = hear
        address, port = endpoint("listen", self._config.listen)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, str(address), port).start()
        except OSError as err:
            await self._runner.cleanup()
            raise StackError(f"{self._config.listen} cannot be listened at: {err}") from None

    def answer(self, leg: int) -> None:
        if (call := self._calls.get(leg)) is not None:
            call.ask("ANSWER")
            asyncio.get_running_loop().call_soon(self._hear, sip_stack.Established(leg))

    def reject(self, leg: int) -> None:
        self.hang_up(leg)

    def hang_up(self, leg: int) -> None:
        if (call := self._calls.get(leg)) is not None:
            call.ask("HANGUP")
            call.send(None)

    def transfer(self, leg: int, target: str) -> None:
        why = "chan_websocket knows no transfer; end the call and let the dialplan go on"
        self._hear(sip_stack.TransferEnded(leg, why))

    def media(self, leg: int) -> WebsocketMedia:
        return self._media[leg]

    async def close(self) -> None:
        for call in self._calls.values():
            call.send(None)
        if self._runner is not None:
            await self._runner.cleanup()

    # --- one connection

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        source = request.remote or ""
        if not bridge.may_call(self._config, source):
            self._turned_away.say(self._clock.now_ns(), "%s is not in allow", source)
            return web.Response(status=403)
        if "Origin" in request.headers:  # a page in somebody's browser, not an Asterisk
            self._turned_away.say(self._clock.now_ns(), "%s: a browser's page", source)
            return web.Response(status=403)
        wanted = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        socket = web.WebSocketResponse(
            protocols=tuple(name.strip() for name in wanted if name.strip()),
            heartbeat=HEARTBEAT_S,
            max_msg_size=LONGEST_BYTES,
            compress=False,
        )
        if not socket.can_prepare(request).ok:
            return web.Response(status=426, text="this port is for Asterisk's chan_websocket\n")
        await socket.prepare(request)
        why = await self._hold(request, socket)
        if why:
            self._turned_away.say(self._clock.now_ns(), "%s: %s", source, why)
        await socket.close()
        return socket

    async def _hold(self, request: web.Request, socket: web.WebSocketResponse) -> str:
        """One call from its first message to its end; why it was none, or nothing."""
        try:
            first = await socket.receive(FIRST_S)
        except TimeoutError:
            return f"it said nothing for {FIRST_S:g} s"
        said = event(first.data) if first.type is WSMsgType.TEXT else Said("")
        if said.kind != "MEDIA_START":
            return "it began with something else than MEDIA_START"
        audio, packet = said.fields.get("format", ""), said.fields.get("optimal_frame_size", "")
        if not rate_of(audio) or not packet_bytes(packet):
            self._unusable.say(
                self._clock.now_ns(),
                "a call in the format %.20s was hung up on; in the dialplan: %s",
                audio or "none",
                "Dial(WebSocket/duplexbox/c(slin16)n)",
            )
            return ""
        call = _Call(as_json=first.data.startswith("{"))
        self._numbers += 1
        leg = self._numbers
        media = WebsocketMedia(audio, packet_bytes(packet), call.send, self._clock)
        self._calls[leg], self._media[leg] = call, media
        ours = said.fields.get("channel_id", "")
        self._hear(
            sip_stack.Incoming(
                leg,
                self._account,
                _printable(request.query.get("caller", ours)),
                _printable(request.query.get("call", ours)),
                request.remote or "",
                _printable(request.query.get("name", "")),
            )
        )
        sending = asyncio.create_task(self._send(socket, call))
        why = "the connection ended"
        try:
            why = await self._listen(socket, leg, call, media)
        finally:
            sending.cancel()
            media.is_open = False
            del self._calls[leg], self._media[leg]
            self._hear(sip_stack.Closed(leg, why))
        return ""

    async def _listen(
        self, socket: web.WebSocketResponse, leg: int, call: _Call, media: WebsocketMedia
    ) -> str:
        """Until it is over; why."""
        ask_ns = self._clock.now_ns() + ASK_NS
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                media.heard(message.data)
            elif message.type is WSMsgType.TEXT:
                said = event(message.data)
                match said.kind:
                    case "DTMF_END":
                        self._hear(sip_stack.Digit(leg, said.fields.get("digit", "")[:1]))
                    case "STATUS":
                        waiting = said.fields.get("queue_length", "")
                        if waiting.isascii() and waiting.isdecimal():
                            media.waits(int(waiting[:6]))
                    case "MEDIA_XOFF" | "MEDIA_XON":
                        media.is_stopped = said.kind == "MEDIA_XOFF"
                        logger.warning("call at %d: the Asterisk says %s", leg, said.kind)
                    case "ERROR":
                        logger.warning("an Asterisk says: %.200s", message.data)
            if call.is_stuck:
                return "the Asterisk did not read what was sent to it"
            if (now_ns := self._clock.now_ns()) >= ask_ns:
                ask_ns = now_ns + ASK_NS
                call.ask("GET_STATUS")
        return "hung up" if socket.close_code in (1000, 1001) else "the connection ended"

    async def _send(self, socket: web.WebSocketResponse, call: _Call) -> None:
        """What waits, in order."""
        with contextlib.suppress(ConnectionError):
            while (message := await call.outbox.get()) is not None:
                if isinstance(message, str):
                    await socket.send_str(message)
                else:
                    await socket.send_bytes(message)
            await socket.close()
