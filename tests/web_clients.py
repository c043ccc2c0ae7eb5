"""Clients of the websocket line that behave as the published ones do, and remember what they got.

`PythonClient`: 80 ms blocks, sent from the moment it is connected, whatever it is told
(client.py in kyutai-labs/moshi). `PageClient`: nothing before the handshake, then two 20 ms frames
a page; what it plays goes through `PageBuffer`, which drops and stutters as the page does.
"""

import asyncio
import contextlib
import ssl
from asyncio.trsock import TransportSocket
from dataclasses import dataclass, field

import numpy as np
import sphn
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, MonotonicClock

RATE_HZ = 24_000
CLOCK = MonotonicClock()


class PageBuffer:
    """The buffer of the page's audio worklet (client/src/audio-processor.ts), in milliseconds.

    It starts to play 10 ms after 80 ms are there. At 100 ms and more it drops back to 90, and
    allows 5 ms more from then on; when it runs dry it starts again, waiting 5 ms longer.
    """

    def __init__(self) -> None:
        self.start_ms, self.partial_ms, self.slack_ms = 80.0, 10.0, 10.0
        self.held_ms = 0.0
        self.dropped_ms = 0.0
        self.drops = 0
        self.dry = 0
        self._at_ms = 0.0
        self._play_from_ms: float | None = None

    def _play_until(self, now_ms: float) -> None:
        if self._play_from_ms is not None and now_ms > self._play_from_ms:
            played = now_ms - max(self._at_ms, self._play_from_ms)
            if played > self.held_ms:
                self.held_ms = 0.0
                self.dry += 1
                self._play_from_ms = None
                self.partial_ms = min(80.0, self.partial_ms + 5)
            else:
                self.held_ms -= played
        self._at_ms = now_ms

    def arrive(self, ms: float, now_ms: float) -> None:
        """``ms`` of audio have been decoded."""
        self._play_until(now_ms)
        self.held_ms += ms
        if self._play_from_ms is None and self.held_ms >= self.start_ms:
            self._play_from_ms = now_ms + self.partial_ms
        if self.held_ms >= self.start_ms + self.partial_ms + self.slack_ms:
            self.drops += 1
            self.dropped_ms += self.held_ms - self.start_ms - self.partial_ms
            self.held_ms = self.start_ms + self.partial_ms
            self.slack_ms = min(80.0, self.slack_ms + 5)


@dataclass
class Heard:
    """What a client was sent."""

    kinds: list[int] = field(default_factory=list)
    pcm: list[NDArray[np.float32]] = field(default_factory=list)
    arrived_ms: list[float] = field(default_factory=list)
    """Of each audio message."""
    messages: list[bytes] = field(default_factory=list)
    """All but audio."""
    text: str = ""
    close_code: int | None = None
    handshake_ms: float = 0.0
    began_ms: float = 0.0
    """When the first of what it said was recorded."""

    @property
    def audio(self) -> NDArray[np.float32]:
        return np.concatenate([*self.pcm, np.zeros(0, np.float32)])


def now_ms() -> float:
    return CLOCK.now_ns() / NS_PER_MS


async def listen(ws: ClientWebSocketResponse, heard: Heard, live: asyncio.Event) -> None:
    """Until the server closes."""
    reader = sphn.OpusStreamReader(RATE_HZ)
    async for message in ws:
        assert message.type is WSMsgType.BINARY
        data: bytes = message.data
        heard.kinds.append(data[0])
        if data[0] == 1:
            heard.arrived_ms.append(now_ms())
            heard.pcm.append(reader.append_bytes(data[1:]))
            continue
        heard.messages.append(data)
        if data[0] == 0:
            heard.handshake_ms = now_ms()
            live.set()
        elif data[0] == 2:
            heard.text += data[1:].decode()  # strictly, as the clients do
    heard.close_code = ws.close_code


async def call(
    url: str,
    speech: NDArray[np.float32],
    *,
    page: bool = False,
    block: int = 1920,
    sent_ms: list[float] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Heard:
    """One call: say all of ``speech`` in real time, then hang up and return what was heard.

    page: behave as the web page does (wait for the handshake; 20 ms frames, two a page).
    sent_ms: gets the time at which each block was sent.
    """
    heard, live = Heard(), asyncio.Event()
    block = 480 if page else block
    async with ClientSession() as session, session.ws_connect(url, ssl=tls or True) as ws:
        connection: TransportSocket = ws.get_extra_info("socket")
        listener = asyncio.create_task(listen(ws, heard, live))
        if page:
            waiting = asyncio.create_task(live.wait())
            await asyncio.wait({waiting, listener}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        writer = sphn.OpusStreamWriter(RATE_HZ)
        start_ms = heard.began_ms = now_ms()
        for index, at in enumerate(range(0, speech.size - block + 1, block), 1):
            due_ms = start_ms + index * block * 1000 / RATE_HZ
            await asyncio.sleep(max(0.0, due_ms - now_ms()) / 1000)
            if listener.done():
                break
            if sent_ms is not None:
                sent_ms.append(now_ms())
            pages = writer.append_pcm(speech[at : at + block])
            if pages:
                with contextlib.suppress(ConnectionError):  # it may be sent away just now
                    await ws.send_bytes(b"\x01" + pages)
        await ws.close()
        await listener
    if tls is not None:
        await _let_go(connection)
    return heard


async def _let_go(connection: TransportSocket) -> None:
    """Wait for the server's goodbye, which TLS wants after a websocket's own.

    A loop that ends before it leaves the connection to the garbage collector, which complains in
    some other test.
    """
    while connection.fileno() != -1:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
