"""Crowds at the websocket line's door, and callers who talk meanwhile: each a process of its own.

    python -m tests.web_storm storm PORT --bursts 4 --size 500 --pause 1
    python -m tests.web_storm talk PORT --calls 8 --seconds 20    prints how many frames each heard

The crowd is raw sockets, so that it costs this machine little: all connect at once, ask for the
upgrade, and are reset half a second later, whatever they were answered.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import Counter

import numpy as np
import sphn
from aiohttp import ClientSession

from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from appliance.lines.web_voice import PCM

CLOCK = MonotonicClock()
ANSWERS_S = 0.5
BLOCK_MS = 40
RATE_HZ = 24_000


def sleep(seconds: float) -> None:
    CLOCK.sleep_until(CLOCK.now_ns() + round(seconds * NS_PER_S))


def burst(port: int, size: int) -> Counter[str]:
    """Connect ``size`` times at once and vanish; what was answered, by status."""
    ask = (
        f"GET /api/chat HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
    ).encode()
    crowd = [socket.socket() for _ in range(size)]
    for one in crowd:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", port))
    for one in crowd:
        with contextlib.suppress(OSError):
            one.send(ask)
    sleep(ANSWERS_S)
    answers: Counter[str] = Counter()
    for one in crowd:
        try:
            answers[one.recv(64).decode("latin-1")[9:12]] += 1
        except OSError:
            answers["none"] += 1
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        one.close()
    return answers


async def talk(port: int, seconds: float, protocol: str) -> int:
    """One call that says silence; how many frames it was sent."""
    came = 0
    url = f"ws://127.0.0.1:{port}/api/chat"
    protocols = (protocol,) if protocol else ()
    writer = sphn.OpusStreamWriter(RATE_HZ)
    block = np.zeros(RATE_HZ * BLOCK_MS // 1000, np.float32)
    async with ClientSession() as session, session.ws_connect(url, protocols=protocols) as ws:

        async def listen() -> None:
            nonlocal came
            async for message in ws:
                came += message.data[0] == 1

        listening = asyncio.create_task(listen())
        start_ns = CLOCK.now_ns()
        for index in range(round(seconds * 1000 / BLOCK_MS)):
            due_ns = start_ns + (index + 1) * BLOCK_MS * NS_PER_MS
            await asyncio.sleep(max(0, due_ns - CLOCK.now_ns()) / NS_PER_S)
            data = bytes(2 * block.size) if protocol == PCM else writer.append_pcm(block)
            if ws.closed:  # the box had no time for it, or the line failed
                break
            with contextlib.suppress(ConnectionError):
                await ws.send_bytes(b"\x01" + data)
        await ws.close()
        await listening
    return came


async def talk_together(port: int, calls: int, pages: int, seconds: float) -> list[int]:
    """The published client, ``calls`` times, and then ``pages`` of ours."""
    talking = [asyncio.create_task(talk(port, seconds, "")) for _ in range(calls)]
    await asyncio.sleep(1)
    talking += [asyncio.create_task(talk(port, seconds - 1, PCM)) for _ in range(pages)]
    return await asyncio.gather(*talking)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("storm", "talk"))
    parser.add_argument("port", type=int)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--pages", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    if args.what == "talk":
        together = talk_together(args.port, args.calls, args.pages, args.seconds)
        json.dump(asyncio.run(together), sys.stdout)
        return
    answers: Counter[str] = Counter()
    for _ in range(args.bursts):
        answers += burst(args.port, args.size)
        sleep(args.pause)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
