"""Crowds at the websocket line's door, and callers who talk meanwhile: each a process of its own.

    python -m tests.web_storm storm PORT --bursts 4 --size 500 --pause 1
    python -m tests.web_storm talk PORT --calls 8 --seconds 20       prints when each frame came

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

from aiohttp import ClientSession

from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from appliance.lines.web_voice import PCM

CLOCK = MonotonicClock()
ANSWERS_S = 0.5
BLOCK_MS = 20
SILENCE = b"\x01" + bytes(2 * 24 * BLOCK_MS)


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


async def talk(port: int, seconds: float) -> list[int]:
    """One call that says silence; when each message of audio came, in ns."""
    came: list[int] = []
    url = f"ws://127.0.0.1:{port}/api/chat"
    async with ClientSession() as session, session.ws_connect(url, protocols=(PCM,)) as ws:

        async def listen() -> None:
            async for message in ws:
                if message.data[0] == 1:
                    came.append(CLOCK.now_ns())

        listening = asyncio.create_task(listen())
        start_ns = CLOCK.now_ns()
        for block in range(round(seconds * 1000 / BLOCK_MS)):
            due_ns = start_ns + (block + 1) * BLOCK_MS * NS_PER_MS
            await asyncio.sleep(max(0, due_ns - CLOCK.now_ns()) / NS_PER_S)
            await ws.send_bytes(SILENCE)
        await ws.close()
        await listening
    return came


async def talk_together(port: int, calls: int, seconds: float) -> list[list[int]]:
    return await asyncio.gather(*(talk(port, seconds) for _ in range(calls)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("storm", "talk"))
    parser.add_argument("port", type=int)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    if args.what == "talk":
        json.dump(asyncio.run(talk_together(args.port, args.calls, args.seconds)), sys.stdout)
        return
    answers: Counter[str] = Counter()
    for _ in range(args.bursts):
        answers += burst(args.port, args.size)
        sleep(args.pause)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
