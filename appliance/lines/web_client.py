"""Calls from a script: one class, over the websocket line, for any machine that reaches it.

    async with await WebClient.connect("http://127.0.0.1:8998", voice="alto") as call:
        speaking = asyncio.create_task(call.say(pcm))          # (n,) float32 at 24 kHz
        async for event in call:
            match event:
                case Heard(pcm=reply): ...                     # (n,) float32 at 24 kHz
                case Words(text=words): ...

`examples/scripted_call.py` is a whole program. The model listens all the time: while nothing is
said, `say` silence or the box conceals what is missing. It needs the `lines` extra and neither a
sound card nor the rest of the box. Decides nothing about playback: frames are handed out as they
come, one per 80 ms, and whoever plays them keeps a small buffer.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from aiohttp import (
    ClientError,
    ClientSession,
    ClientWebSocketResponse,
    WSMsgType,
    WSServerHandshakeError,
)
from numpy.typing import NDArray

from appliance.clock import NS_PER_S, Clock, MonotonicClock
from appliance.lines.opus import RATE_HZ
from appliance.lines.web_voice import OPUS, PCM, VOICES
from appliance.lines.wire import HANDSHAKE, Ending, Kind, audio

BLOCK_SAMPLES = RATE_HZ // 50
"""20 ms: what `say` sends at once."""

ANSWER_S = 660.0
"""How long a box may take to let a caller in; it may have to feed a persona first."""


HTTP = {401: "rules", 403: "rules", 429: "full", 503: "full"}
"""What a line means that does not even open the socket."""


WORDS = frozenset(ending.value[1] for ending in Ending)


class CallError(ConnectionError):
    """The box did not take the call. word: full, loading, draining, fault, rules, media or lost."""

    def __init__(self, word: str, detail: str) -> None:
        super().__init__(f"{word}: {detail}" if detail else word)
        self.word = word
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Heard:
    """What the model says, as sound."""

    pcm: NDArray[np.float32]
    """(n,) at 24 kHz."""
    at_ns: int
    """When it came."""


@dataclass(frozen=True, slots=True)
class Words:
    """What the model says, as text: some letters or words, spaces included."""

    text: str


@dataclass(frozen=True, slots=True)
class Told:
    """How the call goes, twice a second: margins_ms, ways_ms, lag_frames, late, filled ..."""

    figures: Mapping[str, Any]


Event = Heard | Words | Told


class WebClient:
    """One call that has been let in. Make it with `connect`."""

    def __init__(
        self, session: ClientSession, ws: ClientWebSocketResponse, codec: str, clock: Clock
    ) -> None:
        self.notes: tuple[str, ...] = ()
        """What was asked for and is not granted."""
        self.ending = ""
        """How it ended, once it has: a word, and why."""
        self._session = session
        self._ws = ws
        self._clock = clock
        self._voice = VOICES[codec](RATE_HZ)
        self._said_ns: int | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        voice: str = "",
        persona: str = "",
        settings: Mapping[str, float] | None = None,
        token: str = "",
        codec: str = OPUS,
        tls: ssl.SSLContext | bool = True,
        clock: Clock | None = None,
    ) -> Self:
        """Call, and wait until the box has let us in. Raises `CallError`.

        url: of the line, as it prints it. settings: query parameters, such as audio_topk.
        codec: `OPUS`, or `PCM` where bandwidth is no matter and a few milliseconds are.
        """
        wish = {"voice_prompt": voice, "text_prompt": persona, "token": token}
        query = {name: value for name, value in wish.items() if value}
        query.update({name: str(value) for name, value in (settings or {}).items()})
        session = ClientSession()
        try:
            ws = await session.ws_connect(
                f"{url.rstrip('/')}/api/chat",
                params=query,
                protocols=(codec,),
                ssl=tls,
                max_msg_size=1 << 20,
            )
            call = cls(session, ws, codec, clock or MonotonicClock())
            await asyncio.wait_for(call._let_in(), ANSWER_S)
        except BaseException as err:  # also when whoever waits for it gives up
            await session.close()
            match err:
                case CallError():
                    raise
                case WSServerHandshakeError():
                    word = HTTP.get(err.status, "lost")
                    raise CallError(word, f"the line answered {err.status}") from None
                case ClientError() | TimeoutError() | OSError():
                    raise CallError("lost", str(err)) from None
            raise
        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.hang_up()

    async def send(self, pcm: NDArray[np.float32]) -> None:
        """Hand in sound that has just been captured: (n,) float32 at 24 kHz, any n. At once.

        To a line that has ended the call it is nothing; the events say how it ended.
        """
        payload = self._voice.encode(np.asarray(pcm, np.float32))
        if payload and not self._ws.closed:
            with contextlib.suppress(ConnectionError):
                await self._ws.send_bytes(audio(payload))

    async def say(self, pcm: NDArray[np.float32]) -> None:
        """Say all of it at the pace of speech, 20 ms at a time, after what was said before."""
        if self._said_ns is None or self._said_ns < self._clock.now_ns() - NS_PER_S:
            self._said_ns = self._clock.now_ns()
        for at in range(0, len(pcm), BLOCK_SAMPLES):
            block = pcm[at : at + BLOCK_SAMPLES]
            self._said_ns += len(block) * NS_PER_S // RATE_HZ
            await asyncio.sleep(max(0, self._said_ns - self._clock.now_ns()) / NS_PER_S)
            if self._ws.closed:
                return
            await self.send(block)

    async def hang_up(self) -> None:
        """End the call. A second time is nothing."""
        if not self._ws.closed:
            self.ending = self.ending or "over"
        await self._ws.close()
        await self._session.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        """What comes, until the call is over; `ending` then says how."""
        async for message in self._ws:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            kind, payload = message.data[0], message.data[1:]
            if kind == Kind.AUDIO:
                pcm = [self._voice.decode(part) for part in self._voice.unpack(payload)]
                yield Heard(np.concatenate([np.zeros(0, np.float32), *pcm]), self._clock.now_ns())
            elif kind == Kind.TEXT:
                yield Words(payload.decode())
            elif kind == Kind.METADATA:
                told = msgspec.json.decode(payload)
                self.notes = tuple(told.get("notes", self.notes))
                if "pulse" in told:
                    yield Told(told["pulse"])
            elif kind == Kind.ERROR:
                self.ending = payload.decode()
        self.ending = self.ending or _word(self._ws.close_code)

    async def _let_in(self) -> None:
        """The handshake, or why there is none."""
        detail = ""
        async for message in self._ws:
            if message.type is WSMsgType.BINARY and message.data == HANDSHAKE:
                return
            if message.type is WSMsgType.BINARY and message.data[:1] == bytes([Kind.ERROR]):
                detail = message.data[1:].decode()
        # The reason's first word is the same as the code's, which a lost connection may swallow.
        said, _, rest = detail.partition(": ")
        word = _word(self._ws.close_code)
        raise CallError(said, rest) if said in WORDS else CallError(word, detail)


def _word(code: int | None) -> str:
    return next((ending.value[1] for ending in Ending if ending.code == code), "lost")


__all__ = ["OPUS", "PCM", "CallError", "Heard", "Told", "WebClient", "Words"]
