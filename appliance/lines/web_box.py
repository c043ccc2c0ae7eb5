"""What a line's pages are told of its boxes: asked for seldom, shared by all who watch.

One task asks every box how it is, once a second while somebody watches and seldom otherwise, and
turns the answers into one JSON text that every watcher is sent. Boxes are asked from a thread, so
that one that hangs costs nobody a frame. Knows nothing of calls but the figures it is given.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from appliance import control
from appliance.box_view import SessionView
from appliance.clock import NS_PER_MS
from appliance.lines.boxes import SOCKETS
from appliance.lines.web_figures import Figures

WATCHED_S = 1.0
IDLE_S = 10.0
"""Between two questions while nobody watches: what ticks take must be known when a call begins."""

ANSWER_S = 2.0
"""How long a box may take; its pages show then that it did not."""

MOST_WATCHERS = 32
SEND_S = 5.0
"""A watcher who takes so long to read a message of some kB is cut off."""

WRITE_HIGH_BYTES = 65_536


class BoxFeed:
    """All boxes at one socket or in one folder."""

    def __init__(self, path: Path, on_report: Callable[[control.Report], None]) -> None:
        """on_report: told of every answer, in the event loop."""
        self._path = path
        self._on_report = on_report
        self._clients: dict[Path, control.ControlClient] = {}
        self._reports: dict[str, control.Report | str] = {}
        self._periods: dict[str, float] = {}
        self._watchers = 0
        self._asked_for = asyncio.Event()
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                answers = await asyncio.to_thread(self._ask_all)
                for answer in answers.values():
                    if isinstance(answer, control.Report):
                        self._on_report(answer)
                async with self._news:
                    self._reports = answers
                    self._news.notify_all()
                self._asked_for.clear()
                if self._watchers:
                    await asyncio.sleep(WATCHED_S)
                else:
                    await _within(self._asked_for.wait(), IDLE_S)
        finally:
            for client in self._clients.values():
                client.close()

    async def stream(self, request: web.Request, extra: Callable[[], Mapping[str, Any]]) -> Any:
        """Server-sent events until the watcher goes. extra: what the line adds to each."""
        if self._watchers >= MOST_WATCHERS:
            return web.Response(status=503, text=f"{MOST_WATCHERS} pages watch already\n")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self._watchers += 1
        self._asked_for.set()
        try:
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
            while True:
                async with self._news:
                    await _within(self._news.wait(), IDLE_S)
                body = msgspec.json.encode({"boxes": self.boxes(), **extra()})
                if not await _within(response.write(b"data: " + body + b"\n\n"), SEND_S):
                    if request.transport is not None:
                        request.transport.abort()
                    return response
        except ConnectionError:
            return response
        finally:
            self._watchers -= 1

    def boxes(self) -> list[dict[str, Any]]:
        """As the page takes it."""
        return [_box(name, answer, self._periods) for name, answer in self._reports.items()]

    def _ask_all(self) -> dict[str, control.Report | str]:
        """In a thread of its own; nobody else touches the connections."""
        paths = sorted(self._path.glob(SOCKETS)) if self._path.is_dir() else [self._path]
        for gone in [path for path in self._clients if path not in paths]:
            self._clients.pop(gone).close()
        return {path.name: self._ask(path) for path in paths}

    def _ask(self, path: Path) -> control.Report | str:
        try:
            client = self._clients.get(path)
            if client is None:
                client = self._clients[path] = control.ControlClient.connect(path, ANSWER_S)
                self._periods[path.name] = client.welcome.period_ns / NS_PER_MS
            client.send(control.Status(1, detail=True))
            message = client.receive(ANSWER_S)
            if isinstance(message, control.Report):
                return message
            # An answer that comes later would be taken for that to the next question.
            raise control.BoxGone(f"it did not answer within {ANSWER_S:g} s")
        except (control.BoxGone, control.ControlError) as err:
            if path in self._clients:
                self._clients.pop(path).close()
            return str(err)


async def _within(awaitable: Any, seconds: float) -> bool:
    """Whether it was done in time."""
    try:
        await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        return False
    return True


def _box(
    name: str, answer: control.Report | str, periods_ms: Mapping[str, float]
) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"name": name, "trouble": answer}
    view = answer.view
    return {
        "name": name,
        "period_ms": periods_ms.get(name, 80.0),
        "ready": answer.ready,
        "draining": answer.draining,
        "tick": answer.tick,
        "live": answer.sessions_live,
        "held": answer.leases_held,
        "slots": answer.slots,
        "free": answer.sessions_free,
        "limited_by": answer.limited_by,
        "forecast_ms": round(answer.forecast_ns / NS_PER_MS, 1),
        "margin_ms": round(answer.last_margin_ns / NS_PER_MS, 1),
        "worst_ms": round(answer.worst_margin_ns / NS_PER_MS, 1),
        "late": answer.ticks_late,
        "missed": answer.ticks_missed,
        "refusals": answer.refusals,
        "shed": answer.sessions_shed,
        "alarms": {
            "ledger records lost": answer.records_lost,
            "ledger records given up": answer.records_dropped,
            "failed writes to the ledger": answer.disk_errors,
        },
        "histogram": view.histogram if view is not None else (),
        "left_out": view.left_out if view is not None else 0,
        "sessions": [_session(s) for s in view.sessions] if view is not None else [],
    }


def _session(view: SessionView) -> dict[str, Any]:
    return msgspec.structs.asdict(view)


def ways(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """By session: what the line measured of its calls, for the row of that session."""
    return {
        str(figure.session): {
            "p50_ms": figure.arrived_to_sent.p50_ms,
            "p99_ms": figure.arrived_to_sent.p99_ms,
            "filled": figure.filled,
        }
        for figure in figures
        if figure.arrived_to_sent is not None
    }
