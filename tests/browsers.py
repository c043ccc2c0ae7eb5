"""Real browsers without a window, for tests of pages: Chromium by its DevTools, Firefox by BiDi.

Both speak JSON over a websocket. A `Page` is one tab: it evaluates JavaScript, says what the
console said, and takes pictures. Chromium's microphone is a WAV file; Firefox's is its own fake,
a tone. Each browser has a profile of its own below a folder of the caller's.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse

START_S = 40.0
ANSWER_S = 60.0
NICENESS = -12


class BrowserError(RuntimeError):
    """The browser did not do what it was asked."""


class Wire:
    """Commands with numbered answers over one websocket."""

    def __init__(self, ws: ClientWebSocketResponse) -> None:
        self.events: list[dict[str, Any]] = []
        self._ws = ws
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._ws:
            said = json.loads(message.data)
            waiting = self._waiting.pop(said.get("id", 0) or 0, None)
            if waiting is not None:
                waiting.set_result(said)
            else:
                self.events.append(said)

    async def ask(self, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._ws.send_json({"id": number, "method": method, "params": params, **more})
        answer = await asyncio.wait_for(self._waiting[number], ANSWER_S)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer}")
        found: dict[str, Any] = answer["result"]
        return found

    async def close(self) -> None:
        self._reader.cancel()
        await self._ws.close()


class Page(Protocol):
    """One tab."""

    async def open(self, url: str) -> None: ...

    async def run(self, script: str) -> Any:
        """Evaluate an expression; a promise is awaited. What it gives must be JSON."""

    async def size(self, width: int, height: int) -> None: ...

    async def dark(self, on: bool) -> None: ...

    async def picture(self) -> bytes:
        """The whole page, as PNG."""

    def troubles(self) -> list[str]:
        """Errors on the console, uncaught exceptions and broken rules of the CSP."""


async def until(page: Page, script: str, seconds: float) -> Any:
    """Wait for an expression to be true."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        found = await page.run(script)
        if found:
            return found
        if loop.time() > end:
            raise BrowserError(f"not within {seconds:g} s: {script}; {page.troubles()}")
        await asyncio.sleep(0.1)


class ChromiumPage:
    def __init__(self, wire: Wire, session: str) -> None:
        self._wire = wire
        self._session = session
        self._width, self._height = 1280, 900

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._wire.ask(method, params, sessionId=self._session)

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self._ask(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self._ask("Page.navigate", url=url)
        await until(self, "document.readyState === 'complete'", 20)

    async def run(self, script: str) -> Any:
        answer = await self._ask(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def size(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        await self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self._ask("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self) -> bytes:
        metrics = await self._ask("Page.getLayoutMetrics")
        height = metrics["cssContentSize"]["height"]
        clip = {"x": 0, "y": 0, "width": self._width, "height": height, "scale": 1}
        shot = await self._ask(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    def troubles(self) -> list[str]:
        found = []
        for event in self._wire.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params)))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(str(params["args"]))
        return found


class FirefoxPage:
    def __init__(self, wire: Wire, context: str) -> None:
        self._wire = wire
        self._context = context

    async def open(self, url: str) -> None:
        await self._wire.ask(
            "browsingContext.navigate",
            {"context": self._context, "url": url, "wait": "complete"},
        )

    async def run(self, script: str) -> Any:
        answer = await self._wire.ask(
            "script.evaluate",
            {
                "expression": f"(async () => JSON.stringify((await ({script})) ?? null))()",
                "target": {"context": self._context},
                "awaitPromise": True,
                "userActivation": True,
            },
        )
        if answer["type"] == "exception":
            raise BrowserError(str(answer["exceptionDetails"]))
        return json.loads(answer["result"]["value"])

    async def size(self, width: int, height: int) -> None:
        await self._wire.ask(
            "browsingContext.setViewport",
            {"context": self._context, "viewport": {"width": width, "height": height}},
        )

    async def dark(self, on: bool) -> None:
        """Firefox is not told."""

    async def picture(self) -> bytes:
        shot = await self._wire.ask(
            "browsingContext.captureScreenshot", {"context": self._context, "origin": "document"}
        )
        return base64.b64decode(shot["data"])

    def troubles(self) -> list[str]:
        return [
            str(event["params"].get("text"))
            for event in self._wire.events
            if event.get("method") == "log.entryAdded" and event["params"]["level"] == "error"
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def _process(words: list[str], log: Path, **env: str) -> AsyncIterator[None]:
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=file, stderr=file, start_new_session=True, env={**os.environ, **env}
        )
    with contextlib.suppress(OSError):  # on a desktop, sound has priority over everything else
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _make(folder: Path, prefs: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if prefs:
        (folder / "user.js").write_text(prefs)


def find(*names: str) -> str:
    """The first of these programs that is installed. Raises `BrowserError`."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    raise BrowserError(f"none of {', '.join(names)} is installed: apt-get install {names[0]}")


@contextlib.asynccontextmanager
async def loudspeaker(folder: Path) -> AsyncIterator[str]:
    """A sound server with a sink that nobody hears; what PULSE_SERVER must be to play to it.

    Firefox starts no audio without one, and Chromium's own fake takes samples in bursts.
    """
    _make(folder)
    server = f"unix:{folder / 'pulse'}"
    words = [
        *(find("pulseaudio"), "-n", "--daemonize=no", "--exit-idle-time=-1", "--use-pid-file=no"),
        *("--disallow-exit", "--realtime=no", "--high-priority=no"),
        *("-L", "module-null-sink sink_name=nobody rate=48000"),
        *("-L", f"module-native-protocol-unix auth-anonymous=1 socket={folder / 'pulse'}"),
    ]
    async with _process(words, folder / "pulseaudio.log", PULSE_RUNTIME_PATH=str(folder)):
        for _ in range(100):
            if (folder / "pulse").exists():
                break
            await asyncio.sleep(0.05)
        yield server


@contextlib.asynccontextmanager
async def chromium(folder: Path, microphone: Path, pulse: str) -> AsyncIterator[ChromiumPage]:
    """microphone: a WAV file, said over and over. pulse: of `loudspeaker`."""
    _make(folder)
    port = _free_port()
    words = [
        find("chromium", "chromium-browser", "google-chrome"),
        "--headless=new",
        "--no-sandbox",  # tests run as root in containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--ignore-certificate-errors",
        f"--user-data-dir={folder / 'profile'}",
        f"--remote-debugging-port={port}",
        "--remote-allow-origins=*",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={microphone}",
        "--autoplay-policy=no-user-gesture-required",
        "about:blank",
    ]
    async with (
        _process(words, folder / "chromium.log", PULSE_SERVER=pulse),
        ClientSession() as session,
    ):
        found = await _answers(session, f"http://127.0.0.1:{port}/json/version")
        async with session.ws_connect(found["webSocketDebuggerUrl"], max_msg_size=0) as ws:
            wire = Wire(ws)
            made = await wire.ask("Target.createTarget", {"url": "about:blank"})
            target = {"targetId": made["targetId"], "flatten": True}
            attached = await wire.ask("Target.attachToTarget", target)
            page = ChromiumPage(wire, attached["sessionId"])
            await page.begin()
            yield page
            await wire.close()


FIREFOX_PREFS = """\
user_pref("media.navigator.permission.disabled", true);
user_pref("media.navigator.streams.fake", true);
user_pref("media.autoplay.default", 0);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("app.update.enabled", false);
"""


@contextlib.asynccontextmanager
async def firefox(folder: Path, pulse: str) -> AsyncIterator[FirefoxPage]:
    """Its microphone is a tone."""
    profile = folder / "profile"
    _make(profile, FIREFOX_PREFS)
    port = _free_port()
    words = [
        find("firefox-esr", "firefox"),
        *("--headless", "--profile", str(profile), "--remote-debugging-port", str(port)),
    ]
    async with (
        _process(words, folder / "firefox.log", PULSE_SERVER=pulse),
        ClientSession() as session,
    ):
        ws = await _connect(session, f"ws://127.0.0.1:{port}/session")
        wire = Wire(ws)
        await wire.ask(
            "session.new", {"capabilities": {"alwaysMatch": {"acceptInsecureCerts": True}}}
        )
        await wire.ask("session.subscribe", {"events": ["log.entryAdded"]})
        tree = await wire.ask("browsingContext.getTree", {})
        yield FirefoxPage(wire, tree["contexts"][0]["context"])
        await wire.close()


async def _answers(session: ClientSession, url: str) -> dict[str, Any]:
    end = asyncio.get_running_loop().time() + START_S
    while True:
        try:
            async with session.get(url) as answer:
                found: dict[str, Any] = await answer.json(content_type=None)
                return found
        except ClientError:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.2)


async def _connect(session: ClientSession, url: str) -> ClientWebSocketResponse:
    end = asyncio.get_running_loop().time() + START_S
    while True:
        try:
            return await session.ws_connect(url, max_msg_size=0)
        except ClientError:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.2)
