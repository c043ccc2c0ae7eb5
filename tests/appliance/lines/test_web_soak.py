"""The websocket line under strangers, for minutes: `make soak`.

Line and box are the real ones, each in a process of its own, but for an executor that echoes.
Beside every storm one honest call goes on, and every one of its frames is looked for in the ledger:
made, and heard; afterwards no lease is held, no connection open, the line's memory where it was.
"""

import asyncio
import contextlib
import gc
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sphn
from aiohttp import ClientError, ClientSession

from appliance import ledger, report
from appliance.clock import NS_PER_MS as MS
from appliance.clock import MonotonicClock
from appliance.frame_ring import Outcome
from appliance.lines.web_call import WebCall
from appliance.lines.web_client import OPUS, PCM, CallError, WebClient
from appliance.lines.web_server import CLOSE_NS
from appliance.lines.wire import Wish
from bench.echo_box import Stand, stand
from tests.web_call_sim import PIECES, WELCOME, start
from tests.web_line import real_time

pytestmark = [pytest.mark.soak, pytest.mark.clock]
RATE_HZ = 24_000
SPEECH = (0.2 * np.sin(np.arange(300 * RATE_HZ) / 9)).astype(np.float32)
GROWTH_BYTES = 12 * 2**20
"""What a Python process may grow by in minutes without being said to leak: its arenas."""
CLOCK = MonotonicClock()


@pytest.fixture
def both() -> Iterator[Stand]:
    """A box with two slots, and its line, before other programs where that may be had."""
    with stand(slots=2, step_ms=5) as both, real_time(both.line):
        yield both


def memory_bytes(both: Stand) -> int:
    return resident_bytes(both.line)


def resident_bytes(process: int) -> int:
    for row in Path(f"/proc/{process}/status").read_text().splitlines():
        if row.startswith("VmRSS:"):
            return int(row.split()[1]) * 1024
    raise AssertionError("the process is gone")


def sockets(both: Stand) -> int:
    found = Path(f"/proc/{both.line}/fd").iterdir()
    return sum("socket:" in str(fd.readlink()) for fd in found)


def wait_for(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        CLOCK.sleep_until(CLOCK.now_ns() + 10 * MS)
    raise AssertionError("it did not happen in time")


async def beside_a_call(both: Stand, storm: Callable[[], Awaitable[None]]) -> None:
    """An honest call from before the storm until after it."""
    async with await WebClient.connect(f"http://127.0.0.1:{both.port}") as call:
        speaking = asyncio.create_task(call.say(SPEECH))
        listening = asyncio.create_task(_listen(call))
        await asyncio.sleep(2)
        await storm()
        await asyncio.sleep(1)
        speaking.cancel()
        assert not listening.done(), call.ending  # it is still talking
        listening.cancel()


async def _listen(call: WebClient) -> None:
    async for _ in call:
        pass


def no_harm_was_done(both: Stand) -> None:
    """All leases are back, and the first call was given and heard every frame of every tick."""
    wait_for(lambda: both.ask().leases_held == 0)
    assert both.ask().sessions_live == 0
    wait_for(lambda: sockets(both) <= 8)
    calls = ledger.read_folder(both.ledger)
    assert report.summarise(calls).unexplained == 0
    first = min(calls, key=lambda one: one.header.session)
    assert [int(tick["index"]) for tick in first.ticks] == list(range(len(first.ticks)))
    assert ((first.ticks["flags"] & ledger.Flag.GENERATED.value) != 0).all()
    assert ((first.ticks["flags"] & ledger.Flag.MISSED.value) == 0).all()
    outcomes = Counter(Outcome(int(receipt["outcome"])) for receipt in first.receipts)
    assert outcomes[Outcome.FILLED] == 0, outcomes
    assert outcomes[Outcome.LATE] == 0, outcomes


async def abrupt(url: str, wait_s: float, data: list[bytes]) -> None:
    """Connect, send, and vanish: no close frame, no FIN, a reset."""
    async with ClientSession() as session:
        ws = await session.ws_connect(url)
        for message in data:
            with contextlib.suppress(ConnectionError):
                await ws.send_bytes(message)
        await asyncio.sleep(wait_s)
        transport = ws._writer.transport
        assert transport is not None
        transport.abort()


def garbage(rng: np.random.Generator) -> list[bytes]:
    """What strangers send: pages cut short, bytes that are no pages, kinds that do not exist."""
    page = sphn.OpusStreamWriter(RATE_HZ).append_pcm(np.zeros(1920, np.float32))
    flipped = bytearray(page)
    for _ in range(rng.integers(0, 12)):
        flipped[rng.integers(len(flipped))] = rng.integers(256)
    choices = [
        [b""],
        [b"\x01"],
        [b"\x01" + page],
        [b"\x01" + page[: rng.integers(len(page))]],
        [b"\x01" + bytes(flipped)],
        [bytes(rng.integers(0, 256, rng.integers(1, 900), np.uint8))],
        [b"\x01OggS" + bytes(rng.integers(0, 256, rng.integers(1, 300), np.uint8))],
        [bytes([rng.integers(256)]) + page, b"\x01" + page],
        [],
    ]
    return choices[rng.integers(len(choices))]


def test_five_hundred_connects_and_abrupt_ends(both: Stand) -> None:
    rng = np.random.default_rng(1)
    grew: list[int] = []

    async def storm() -> None:
        for round_ in range(60):
            await asyncio.gather(
                *(abrupt(both.url, float(rng.random()) * 0.3, garbage(rng)) for _ in range(10)),
                return_exceptions=True,
            )
            await asyncio.sleep(0.3)  # 20 a second are let in
            if round_ in (20, 59):
                grew.append(memory_bytes(both))

    asyncio.run(beside_a_call(both, storm))
    assert grew[1] - grew[0] < GROWTH_BYTES, grew
    no_harm_was_done(both)


def test_half_open_sockets_and_those_that_never_ask_are_closed(both: Stand) -> None:
    async def storm() -> None:
        writers = []
        for number in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", both.port)
            part = (b"", b"GET / HT", b"GET /api/chat HTTP/1.1\r\nHost: 127.0.0.1\r\n")[number % 3]
            writer.write(part)
            writers.append(writer)
        await asyncio.sleep(1)
        assert sockets(both) > 200
        async with await WebClient.connect(f"http://127.0.0.1:{both.port}"):
            pass  # there is room for others
        await asyncio.sleep(14)
        assert sockets(both) < 16
        for writer in writers:
            writer.close()

    asyncio.run(beside_a_call(both, storm))
    no_harm_was_done(both)


def test_a_peer_that_is_gone_without_a_word_is_noticed(both: Stand) -> None:
    """Its sockets stay open and silent, as after a phone lost its network."""

    async def storm() -> None:
        key = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        ask = (
            f"GET /api/chat HTTP/1.1\r\nHost: [::1]\r\n{key}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", both.port)
        writer.write(ask.encode())
        assert b"101" in await reader.readline()
        await asyncio.sleep(18)  # nothing is read or written: no pong either
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        writer.close()

    asyncio.run(beside_a_call(both, storm))
    no_harm_was_done(both)


def test_slow_readers_are_cut_off_and_hold_nothing_back(both: Stand) -> None:
    before: list[int] = []

    async def slow() -> None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", both.port))
        key = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        key += f"Sec-WebSocket-Protocol: {PCM}\r\n"
        ask = (
            f"GET /api/chat HTTP/1.1\r\nHost: [::1]\r\n{key}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
        )
        await loop.sock_sendall(connection, ask.encode())
        # A frame of 80 ms of silence, masked with zeros: it speaks, and never reads.
        frame = bytes([0x82, 0xFE]) + (3841).to_bytes(2, "big") + bytes(4) + b"\x01" + bytes(3840)
        with contextlib.suppress(ConnectionError):
            for _ in range(round(25 / 0.08)):
                await loop.sock_sendall(connection, frame)
                await asyncio.sleep(0.08)
            raise AssertionError("nobody minded that nothing was read")
        connection.close()

    async def storm() -> None:
        for _ in range(3):
            before.append(memory_bytes(both))
            await slow()

    asyncio.run(beside_a_call(both, storm))
    assert CLOSE_NS < 20e9
    assert memory_bytes(both) - before[1] < GROWTH_BYTES
    no_harm_was_done(both)


def test_who_comes_back_within_a_tick_is_let_in_or_told_that_it_is_full(both: Stand) -> None:
    """With one slot left: the old session's must come back each time, and quickly."""
    came: Counter[str] = Counter()

    async def once() -> None:
        url = f"http://127.0.0.1:{both.port}"
        for _ in range(100):
            try:
                async with await WebClient.connect(url, codec=OPUS) as call:
                    await call.say(SPEECH[: 4 * 1920])
                    came["in"] += 1
                    return
            except CallError as err:
                came[err.word] += 1
                await asyncio.sleep(0.05)
        raise AssertionError("the slot never came back")

    async def storm() -> None:
        for _ in range(40):
            await once()

    asyncio.run(beside_a_call(both, storm))
    assert came["in"] == 40
    assert set(came) <= {"in", "full"}
    assert came["full"] < 40 * 20
    no_harm_was_done(both)


def test_a_hundred_thousand_fuzzed_messages_leave_nothing_behind() -> None:
    """On a fake clock, through calls that are let in, refused, left and lost in between."""
    rng = np.random.default_rng(2)
    sent = 0
    sizes: list[int] = []
    while sent < 100_000:
        sim = start(subprotocol=("", OPUS, PCM)[rng.integers(3)])
        sim.sends = bool(rng.integers(2))
        if rng.integers(4):
            sim.admit()
        for _ in range(int(rng.integers(50, 400))):
            for message in garbage(rng):
                sim.call.receive(message, sim.at_ms * MS)
                sent += 1
            if not rng.integers(12):
                sim.run(sim.at_ms + int(rng.integers(1, 40)))
        sim.call.disconnect(sim.at_ms * MS)
        sim.run(sim.at_ms + 100)
        if sim.admitted:
            sim.gone()
            fates = Counter(index for index, _ in sim.receipts.elements())
            assert fates == dict.fromkeys(range(sim.made), 1)
        assert sim.call.is_over or not sim.admitted
        sim.channel.close()
        sim.channel.unlink()
        if sent > len(sizes) * 20_000 + 20_000:
            gc.collect()
            sizes.append(resident_bytes(os.getpid()))
    assert len(sizes) >= 4
    assert sizes[-1] - sizes[0] < GROWTH_BYTES, sizes


def test_calls_come_and_go_and_memory_stays(both: Stand) -> None:
    """Minutes of short calls, one after the other, two at once."""
    sizes: list[int] = []

    async def caller(number: int) -> None:
        url = f"http://127.0.0.1:{both.port}"
        held = 0
        while held < 40:
            try:
                async with await WebClient.connect(url, codec=(OPUS, PCM)[number]) as call:
                    listening = asyncio.create_task(_listen(call))
                    await call.say(SPEECH[: 2 * RATE_HZ])
                    listening.cancel()
            except (CallError, ClientError):  # the slot is being settled: come again
                await asyncio.sleep(0.1)
                continue
            held += 1
            if number == 0 and held in (14, 27, 40):
                sizes.append(memory_bytes(both))

    async def together() -> None:
        await asyncio.gather(caller(0), caller(1))

    asyncio.run(together())
    wait_for(lambda: both.ask().leases_held == 0)
    assert sizes[-1] - sizes[0] < GROWTH_BYTES, sizes
    calls = ledger.read_folder(both.ledger)
    assert len(calls) >= 80
    assert report.summarise(calls).unexplained == 0


def test_a_call_that_is_never_answered_is_forgotten() -> None:
    call = WebCall(1, Wish({}), "127.0.0.1", WELCOME, PIECES, 0)
    for at_ms in range(0, 21_000, 50):
        call.advance(at_ms * MS)
    assert call.ending is not None
    assert call.is_over
