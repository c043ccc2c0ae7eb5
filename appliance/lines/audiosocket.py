"""`duplexbox appliance audiosocket`: callers whom an Asterisk hands over, one TCP connection each.

Decides the protocol's bytes (pure: `Messages`, `message`) and when audio leaves: Asterisk plays
what comes, so 20 ms leave every 20 ms, silence if there is nothing. All else is the telephone
line's: this is one more `sip_stack.Stack`. A connection begins with its call's UUID; keys come as
messages, hanging up is a message or the end of the connection. Asterisk's `AudioSocket()` answers
before it connects, so a refused caller is hung up on, and the dialplan goes on.
"""

import argparse
import asyncio
import logging
import struct
import uuid
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S, Clock
from appliance.lines import bridge, sip_stack
from appliance.lines.sip_config import SipConfig, endpoint
from appliance.lines.sip_stack import Event, Format, StackError
from appliance.log import Seldom

logger = logging.getLogger(__name__)

HANG_UP, ID, KEY, AUDIO, ERROR = 0x00, 0x01, 0x03, 0x10, 0xFF
"""What a message is; one byte, then its length in two. AUDIO: 16 bits, 8 kHz, little-endian."""

RATE_HZ = 8_000
PACKET_NS = 20 * NS_PER_MS
PACKET_BYTES = 320
QUEUED_BYTES = 2 * RATE_HZ * 2
"""What may wait to be sent: 2 s, as in the SIP stack."""

FIRST_S = 5.0
"""How long a connection may take to say whose call it is."""

MOST_WAITING = 65_536
"""Bytes that may wait for an Asterisk that does not read: 4 s."""

BEHIND_NS = 200 * NS_PER_MS
"""A sender that is later than this begins its grid anew instead of catching up."""

SILENCE = bytes(PACKET_BYTES)
NOTHING = np.zeros(0, np.int16)


def message(kind: int, payload: bytes = b"") -> bytes:
    """One message, as it is sent."""
    return struct.pack("!BH", kind, len(payload)) + payload


class Messages:
    """Cuts a connection's bytes into messages, however they come."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[tuple[int, bytes]]:
        """(kind, payload) of each message that is whole now. What is held is less than one."""
        rest = self._rest + data
        found = []
        at = 0
        while len(rest) - at >= 3:
            kind, size = struct.unpack_from("!BH", rest, at)
            if len(rest) - at - 3 < size:
                break
            found.append((kind, rest[at + 3 : at + 3 + size]))
            at += 3 + size
        self._rest = rest[at:]
        return found


class AudioSocketMedia:
    """One call's audio."""

    codec = "slin"

    def __init__(self) -> None:
        self.in_hz = RATE_HZ
        self.is_open = True
        self._came = bytearray()
        self._queued = bytearray()

    def format(self) -> Format | None:
        return Format(RATE_HZ, len(self._queued) // 2) if self.is_open else None

    def read(self) -> NDArray[np.int16]:
        whole = len(self._came) // 2 * 2
        if not whole:
            return NOTHING
        came = bytes(self._came[:whole])
        del self._came[:whole]
        return np.frombuffer(came, "<i2").astype(np.int16, copy=False)

    def write(self, pcm: NDArray[np.int16]) -> int:
        room = max(0, (QUEUED_BYTES - len(self._queued)) // 2)
        self._queued += pcm[:room].astype("<i2", copy=False).tobytes()
        return min(room, int(pcm.size))

    def heard(self, payload: bytes) -> None:
        """Audio came. Beyond 2 s that nobody has read, the oldest is let go."""
        self._came += payload
        over = max(0, len(self._came) - QUEUED_BYTES)
        del self._came[: over + over % 2]

    def packet(self) -> bytes:
        """The next 20 ms to send."""
        packet = bytes(self._queued[:PACKET_BYTES])
        del self._queued[:PACKET_BYTES]
        return packet + SILENCE[len(packet) :]


class AudioSocketStack:
    """All connections."""

    def __init__(self, config: SipConfig, clock: Clock) -> None:
        """config: `listen`, `allow`, and one account that every call is to."""
        self._config = config
        self._clock = clock
        self._account = config.accounts[0].user
        self._hear: Callable[[Event], None] = lambda _: None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._media: dict[int, AudioSocketMedia] = {}
        self._numbers = 0
        self._server: asyncio.Server | None = None
        self._turned_away = Seldom(logger, logging.INFO)
        self.address: tuple[str, int] = ("", 0)

    async def start(self, hear: Callable[[Event], None]) -> None:
        self._hear = hear
        address, port = endpoint("listen", self._config.listen)
        try:
            self._server = await asyncio.start_server(self._serve, str(address), port, limit=65_536)
        except OSError as err:
            raise StackError(f"{self._config.listen} cannot be listened at: {err}") from None
        self.address = self._server.sockets[0].getsockname()

    def answer(self, leg: int) -> None:
        if leg in self._writers:  # it is connected, which is as answered as it gets
            asyncio.get_running_loop().call_soon(self._hear, sip_stack.Established(leg))

    def reject(self, leg: int) -> None:
        self.hang_up(leg)

    def hang_up(self, leg: int) -> None:
        if (writer := self._writers.get(leg)) is not None:
            writer.write(message(HANG_UP))
            writer.close()

    def transfer(self, leg: int, target: str) -> None:
        why = "AudioSocket knows no transfer; end the call and let the dialplan go on"
        self._hear(sip_stack.TransferEnded(leg, why))

    def media(self, leg: int) -> AudioSocketMedia:
        return self._media[leg]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    # --- one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = str(writer.get_extra_info("peername")[0])
        messages = Messages()
        try:
            if not bridge.may_call(self._config, source):
                self._turned_away.say(self._clock.now_ns(), "%s is not in allow", source)
                return
            first = await asyncio.wait_for(_first(reader, messages), FIRST_S)
            if first is None:
                self._turned_away.say(self._clock.now_ns(), "%s said no call's UUID", source)
                return
            await self._hold(reader, writer, messages, first, source)
        except (TimeoutError, ConnectionError) as err:
            self._turned_away.say(self._clock.now_ns(), "%s: %r", source, err)
        finally:
            writer.close()

    async def _hold(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        messages: Messages,
        first: list[tuple[int, bytes]],
        source: str,
    ) -> None:
        self._numbers += 1
        leg = self._numbers
        media = self._media[leg] = AudioSocketMedia()
        self._writers[leg] = writer
        number = str(uuid.UUID(bytes=first[0][1]))
        self._hear(sip_stack.Incoming(leg, self._account, number, number, source))
        sending = asyncio.create_task(self._send(writer, media))
        why = "the connection ended"
        try:
            ready = first[1:]
            while True:
                for kind, payload in ready:
                    if kind == AUDIO:
                        media.heard(payload)
                    elif kind == KEY:
                        self._hear(sip_stack.Digit(leg, payload[:1].decode("ascii", "replace")))
                    elif kind in (HANG_UP, ERROR):
                        why = "hung up" if kind == HANG_UP else f"Asterisk's error {payload[:8]!r}"
                        return
                if not (data := await reader.read(8_192)):
                    return
                ready = messages.push(data)
        except ConnectionError as err:
            why = f"the connection broke: {err}"
        finally:
            sending.cancel()
            media.is_open = False
            del self._writers[leg], self._media[leg]
            self._hear(sip_stack.Closed(leg, why))

    async def _send(self, writer: asyncio.StreamWriter, media: AudioSocketMedia) -> None:
        """A packet every 20 ms, on a grid from the first."""
        due_ns = self._clock.now_ns()
        while not writer.is_closing():
            if writer.transport.get_write_buffer_size() > MOST_WAITING:
                logger.warning("an Asterisk does not read what is sent to it; its call is cut off")
                writer.transport.abort()
                return
            writer.write(message(AUDIO, media.packet()))
            due_ns += PACKET_NS
            now_ns = self._clock.now_ns()
            if now_ns - due_ns > BEHIND_NS:
                due_ns = now_ns
            await asyncio.sleep(max(0, due_ns - now_ns) / NS_PER_S)


async def _first(
    reader: asyncio.StreamReader, messages: Messages
) -> list[tuple[int, bytes]] | None:
    """The first messages; None if they are no call's."""
    found: list[tuple[int, bytes]] = []
    while not found:
        if not (data := await reader.read(8_192)):
            return None
        found = messages.push(data)
    kind, payload = found[0]
    return found if kind == ID and len(payload) == 16 else None


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance audiosocket``."""
    bridge.add_arguments(parser, "127.0.0.1:9092")


def run_audiosocket(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    return bridge.run(args, "audiosocket", AudioSocketStack)
