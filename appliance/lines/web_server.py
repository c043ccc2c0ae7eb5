"""The websocket line's shell: aiohttp on one side, the boxes on the other, one event loop.

Carries bytes between sockets and `WebCall`s, and messages between those and the box; every call
is paced by one task, so that all of them leave at their time whatever one client does. What a
message means is `wire`'s business, what a call does `web_call`'s, who gets in `web_door`'s.

Nothing here waits for a client: each has a task of its own that empties its call's queue, and one
that does not read ends by its queue's bound, then by its transport being cut. Nothing waits for
the box either: a lost one is looked for in a thread, and callers are told meanwhile.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from appliance import control
from appliance.clock import NS_PER_MS, NS_PER_S, Clock
from appliance.lines import wire
from appliance.lines.boxes import Boxes, News
from appliance.lines.limits import Bucket
from appliance.lines.transcript import PiecesError, read_pieces
from appliance.lines.web_box import BoxFeed, ways
from appliance.lines.web_call import WebCall
from appliance.lines.web_door import Guard, Turnstile
from appliance.lines.web_figures import Figures
from appliance.lines.web_pace import TickTimes
from appliance.lines.web_pages import Pages
from appliance.lines.web_voice import SUBPROTOCOLS
from appliance.lines.wire import Ending, Model, WishError
from appliance.log import Seldom
from engines import bundle as bundles
from engines.bundle import BundleError

logger = logging.getLogger(__name__)

LONGEST_MESSAGE_BYTES = 65_536 + 64
"""A page of Ogg has 65,307 bytes at most."""

HEARTBEAT_S = 10.0
"""A websocket ping this often; a peer that answers nothing for half as long again is cut."""

CLOSE_NS = 2 * NS_PER_S
"""How long a client may take to read what is left for it once its call has ended."""

SEND_BUFFER_BYTES = 32_768
"""Of the socket. The kernel would keep minutes of speech for a client that does not read."""

WRITE_HIGH_BYTES = 16_384

IDLE_S = 0.05
"""How often the box is listened to while nobody calls."""

SEEK_S = 1.0
"""Between two attempts to find a box that is gone."""

STOP_NS = 15 * NS_PER_S
"""Longest from `stop` to the end: `web_call.SETTLE_NS`, and a box that has yet to answer a Join."""

CONNECTS_PER_S, CONNECTS_BURST = 20, 200

MEMORY_POINTS = 32
"""Of the curve of a session's memory by its age, from its beginning to full retention."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator decides."""

    socket: Path
    """Of the box, or a folder of several."""
    static: Path | None = None
    token: str = ""
    origins: frozenset[str] = frozenset()
    """Origins of pages that may call besides our own; "*" is any."""
    hosts: frozenset[str] = frozenset()
    """Names this line goes by, besides addresses and localhost; "*" is any."""
    most: int = 256
    """Connections at once."""
    most_per_address: int = 32


@dataclass(eq=False, slots=True)
class _Client:
    """One connection."""

    call: WebCall
    request: web.Request
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended_ns: int | None = None
    done: bool = False


Facts = Callable[[control.Welcome], tuple[Model, list[str]]]
"""What a box's model lets callers choose, and its text pieces."""


class WebServer:
    """All callers of one line process."""

    def __init__(
        self, options: Options, boxes: Boxes, clock: Clock, facts: Facts | None = None
    ) -> None:
        """boxes: connected; the server closes them. facts: default `read_facts`.

        Raises `BundleError`, `PiecesError`.
        """
        self._facts = facts or read_facts
        self._options = options
        self._clock = clock
        self._boxes: Boxes | None = None
        self._clients: dict[int, _Client] = {}
        self._calls: dict[int, WebCall] = {}
        """Those of the clients, by number."""
        self._numbers = 0
        self._addresses: Counter[str] = Counter()
        self._connects = Bucket(CONNECTS_PER_S, CONNECTS_BURST)
        self._guard = Guard(options.token, options.origins, options.hosts)
        self._door = Turnstile()
        self._wake = asyncio.Event()
        self._stop_ns: int | None = None
        self._turned_away = Seldom(logger, logging.INFO)
        self._ended = Seldom(logger, logging.INFO)
        self._feed = BoxFeed(options.socket, self._hear_report)
        self._refusals: Counter[str] = Counter()
        self._use(boxes, *self._facts(boxes.welcome))

    def app(self) -> web.Application:
        """The pages and the socket."""
        app = web.Application(client_max_size=1024, middlewares=[self._know_our_name])
        app.router.add_get("/api/chat", self.chat)
        app.router.add_get("/api/line", self.line)
        app.router.add_get("/api/model", self.model)
        app.router.add_get("/api/live", self.live)
        Pages().add_to(app, root=self._options.static is None)
        if self._options.static is not None:
            app.router.add_get("/", self.root)
            app.router.add_static("/", self._options.static)
        app.on_startup.append(self._start_feed)
        app.on_cleanup.append(self._stop_feed)
        return app

    async def _start_feed(self, app: web.Application) -> None:
        self._feeding = asyncio.create_task(self._feed.run())

    async def _stop_feed(self, app: web.Application) -> None:
        self._feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._feeding

    # --- the clock

    async def run(self) -> None:
        """Pace all calls until `stop` has been called and the last one is over."""
        seeking: asyncio.Task[None] | None = None
        while not self._has_stopped():
            self._turn()
            if self._boxes is None and (seeking is None or seeking.done()):
                if seeking is not None:
                    seeking.result()
                seeking = asyncio.create_task(self._seek())
            now_ns = self._clock.now_ns()
            calls = [call for call in self._calls.values() if not call.is_over]
            if self._door.waiting:
                await asyncio.sleep(0)  # until whoever was let in is; then it is our turn again
                continue
            if not calls:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), IDLE_S)
                continue
            waits = min(call.wake_ns(now_ns) for call in calls) - now_ns
            await asyncio.sleep(min(max(0, waits) / NS_PER_S, IDLE_S))
        if seeking is not None:
            seeking.cancel()
        if self._boxes is not None:
            self._boxes.close()

    def stop(self) -> None:
        """Refuse newcomers, end all calls; `run` returns when that has been done."""
        now_ns = self._stop_ns = self._clock.now_ns()
        for call in self._calls.values():
            call.dismiss(Ending.DRAINING, "this line stops", now_ns)
        self._wake.set()

    def _has_stopped(self) -> bool:
        if self._stop_ns is None:
            return False
        return not self._clients or self._clock.now_ns() - self._stop_ns > STOP_NS

    def _turn(self) -> None:
        """All calls, then one newcomer."""
        boxes = self._boxes
        try:
            if boxes is not None:
                for news in boxes.deal(self._calls):
                    self._note(news)
            else:
                for call in self._calls.values():
                    call.advance(self._clock.now_ns())
        except (control.BoxGone, control.ControlError) as err:
            self._lose(str(err))
        now_ns = self._clock.now_ns()
        for number, client in list(self._clients.items()):
            self._look_after(number, client, now_ns)
        self._door.turn()

    def _look_after(self, number: int, client: _Client, now_ns: int) -> None:
        call = client.call
        if call.outbox or call.ending is not None:
            client.news.set()
        if call.ending is not None:
            client.ended_ns = client.ended_ns or now_ns
            transport = client.request.transport
            if not client.done and transport and now_ns - client.ended_ns > CLOSE_NS:
                transport.abort()
        if client.done and call.is_over:
            del self._clients[number], self._calls[number]

    # --- the box

    def _use(self, boxes: Boxes, model: Model, pieces: list[str]) -> None:
        self._boxes = boxes
        self._model = model
        self._pieces = pieces
        self._welcome = boxes.welcome
        self._times = TickTimes(boxes.welcome.period_ns)

    def _note(self, news: News) -> None:
        match news.message:
            case control.Admitted() as message:
                logger.info("call %d admitted: session=%d", news.call, message.session)
            case control.Refused() as message:
                self._refusals[message.reason.value] += 1

    def _lose(self, why: str) -> None:
        logger.warning("no box: %s; %d calls ended", why, len(self._clients))
        if self._boxes is not None:
            self._boxes.close()
        self._boxes = None
        now_ns = self._clock.now_ns()
        for call in self._calls.values():
            call.lost("the box is gone", now_ns)

    async def _seek(self) -> None:
        """Find a box again, off the event loop: a box that is starting answers slowly."""
        while self._boxes is None and self._stop_ns is None:
            await asyncio.sleep(SEEK_S)
            try:
                boxes = await asyncio.to_thread(Boxes.connect, self._options.socket, self._clock)
                self._use(boxes, *await asyncio.to_thread(self._facts, boxes.welcome))
            except control.BoxGone:
                continue
            except (control.ControlError, BundleError, PiecesError) as err:
                logger.warning("a box was found that cannot be used: %s", err)
                continue
            logger.info("a box answers again: %s", self._welcome.model)

    # --- HTTP

    async def root(self, request: web.Request) -> web.StreamResponse:
        """The index of the operator's own page."""
        assert self._options.static is not None
        return web.FileResponse(self._options.static / "index.html")

    async def model(self, request: web.Request) -> web.StreamResponse:
        """What a page must know before it calls, as JSON."""
        if (refusal := self._refuse_http(request)) is not None:
            return refusal
        turned = self._turn_away()
        return _json(
            {
                "model": self._welcome.model,
                "notice": self._welcome.notice,
                "period_ms": self._welcome.period_ns / NS_PER_MS,
                "voices": self._model.voices,
                "persona": self._model.takes_persona,
                "bounds": self._model.bounds,
                "trouble": turned[0].reason(turned[1]) if turned is not None else "",
                "open": len(self._clients),
                "most": self._options.most,
            }
        )

    async def live(self, request: web.Request) -> web.StreamResponse:
        """How the boxes are, once a second, for the box page."""
        if (refusal := self._refuse_http(request)) is not None:
            return refusal
        answer: web.StreamResponse = await self._feed.stream(request, self._about_line)
        return answer

    def _about_line(self) -> dict[str, object]:
        return {
            "model": self._welcome.model,
            "notice": self._welcome.notice,
            "memory": self._model.memory,
            "connections": len(self._clients),
            "most": self._options.most,
            "ways": ways([call.figures() for call in self._calls.values()]),
            "refused": dict(self._refusals),
        }

    def _hear_report(self, report: control.Report) -> None:
        if report.forecast_ns:
            self._times.forecast_ns = report.forecast_ns

    async def line(self, request: web.Request) -> web.StreamResponse:
        """The figures of all calls, as JSON."""
        if (refusal := self._refuse_http(request)) is not None:
            return refusal
        figures: list[Figures] = [call.figures() for call in self._calls.values()]
        return _json(
            {"model": self._welcome.model, "box": self._boxes is not None, "calls": figures}
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One call, from the upgrade to the close."""
        now_ns = self._clock.now_ns()
        if (refusal := self._refuse_http(request)) is not None:
            self._turned_away.say(now_ns, "turned away: %s %s", request.remote, refusal.status)
            return refusal
        address = request.remote or "?"
        if not self._connects.take(1, now_ns):
            return _busy(429, f"more than {CONNECTS_PER_S} connections a second")
        if self._addresses.total() >= self._options.most:
            return _busy(503, f"{self._options.most} connections are open")
        if self._addresses[address] >= self._options.most_per_address:
            return _busy(429, f"{self._options.most_per_address} are open from this address")
        ws = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S,
            max_msg_size=LONGEST_MESSAGE_BYTES,
            compress=False,  # Opus does not get smaller
            timeout=CLOSE_NS / NS_PER_S,
            protocols=SUBPROTOCOLS,
        )
        self._addresses[address] += 1
        try:
            self._wake.set()
            await self._door.enter()
            with contextlib.suppress(ConnectionError):  # it has gone meanwhile
                await ws.prepare(request)
                await self._hold(ws, request, address)
        finally:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
        return ws

    async def _hold(self, ws: web.WebSocketResponse, request: web.Request, address: str) -> None:
        now_ns = self._clock.now_ns()
        _bound_buffers(request)
        turned = self._turn_away()
        try:
            wish = wire.read_wish(request.query, self._model)
        except WishError as err:
            turned = turned or (Ending.RULES, str(err))
        if turned is not None:
            self._refusals[turned[0].value[1]] += 1
            await _refuse(ws, *turned)
            return
        self._numbers += 1
        call = WebCall(
            self._numbers,
            wish,
            address,
            self._welcome,
            self._pieces,
            now_ns,
            ws.ws_protocol or "",
            self._times,
        )
        client = self._clients[call.number] = _Client(call, request)
        self._calls[call.number] = call
        self._wake.set()
        reader = asyncio.create_task(self._read(ws, call))
        writer = asyncio.create_task(self._write(ws, client))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if call.ending is None:
                await reader
            elif not reader.done():
                # Nobody may read any more: closing does, until the client has closed, too. Cut
                # off with audio unread, a socket is reset, and the reason may never arrive.
                reader.cancel()
                await asyncio.wait({reader})
                ending, detail = call.ending
                await ws.close(code=ending.code, message=ending.reason(detail).encode())
        finally:
            call.disconnect(self._clock.now_ns())
            client.news.set()
            client.done = True
            for task in (reader, writer):
                task.cancel()
            self._wake.set()
            ending, detail = call.ending or (Ending.OVER, "")
            self._ended.say(
                self._clock.now_ns(),
                "call %d over: %s %s",
                call.number,
                ending.reason(detail),
                _Shown(call),
            )

    async def _read(self, ws: web.WebSocketResponse, call: WebCall) -> None:
        """Hand on what the client sends, until it has gone."""
        async for message in ws:
            if message.type is WSMsgType.BINARY:
                call.receive(message.data, self._clock.now_ns())

    async def _write(self, ws: web.WebSocketResponse, client: _Client) -> None:
        """Send what the call has for its client, until it has ended."""
        call = client.call
        with contextlib.suppress(ConnectionError):
            while call.ending is None or call.outbox:
                client.news.clear()
                while call.outbox:
                    await ws.send_bytes(call.outbox.popleft())
                if call.ending is None:
                    await client.news.wait()

    def _turn_away(self) -> tuple[Ending, str] | None:
        """Why nobody can be let in at all right now."""
        if self._stop_ns is not None:
            return Ending.DRAINING, "this line stops"
        if self._boxes is None:
            return Ending.LOADING, "no box answers; try again in some seconds"
        return None

    def _refuse_http(self, request: web.Request) -> web.Response | None:
        """What those get who may not use `/api/`."""
        found = self._guard.refusal(request.headers, request.query.get("token", ""))
        return None if found is None else web.Response(status=found[0], text=f"{found[1]}\n")

    @web.middleware
    async def _know_our_name(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := self._guard.wrong_name(request.headers):
            return web.Response(status=421, text=f"{why}\n")
        return await handler(request)


class _Shown:
    """The figures of a call, reckoned if somebody reads them: calls may end by hundreds."""

    def __init__(self, call: WebCall) -> None:
        self._call = call

    def __str__(self) -> str:
        return msgspec.json.encode(self._call.figures()).decode()


def read_facts(welcome: control.Welcome) -> tuple[Model, list[str]]:
    """What callers may choose, and the text pieces. Raises `BundleError`, `PiecesError`."""
    manifest = bundles.read(Path(welcome.bundle), hashes=False).manifest
    bounds = {region.name: region.bounds for region in manifest.regions if region.bounds}
    full = manifest.ticks_until_full()
    ages = sorted({round(full * part / MEMORY_POINTS) for part in range(MEMORY_POINTS + 1)})
    memory = tuple((age, manifest.session_bytes(age)) for age in ages)
    model = Model(bounds, welcome.voices, welcome.takes_persona, memory)
    return model, read_pieces(welcome.pieces)


def _json(body: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _busy(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n", headers={"Retry-After": "5"})


async def _refuse(ws: web.WebSocketResponse, ending: Ending, detail: str) -> None:
    with contextlib.suppress(ConnectionError):
        await ws.send_bytes(wire.error(ending.reason(detail)))
        await ws.close(code=ending.code, message=ending.reason(detail).encode())


def _bound_buffers(request: web.Request) -> None:
    transport = request.transport
    if transport is None:
        return
    transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
