"""A websocket line in a process of its own, beside a box that echoes, for tests in real time.

    python -m tests.web_rig SOCKET [--token X] ...   the line; prints its port on stdout

The box is real but for its executor, and lies in the process of the tests. Its bundle has no
graphs, so the line is told what callers may choose instead of reading it.
"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from appliance import control
from appliance.clock import MonotonicClock
from appliance.lines.boxes import Boxes
from appliance.lines.niceness import ask_for
from appliance.lines.transcript import read_pieces
from appliance.lines.web_server import Options, WebServer
from appliance.lines.web_site import open_site
from appliance.lines.wire import Model


def facts(welcome: control.Welcome) -> tuple[Model, list[str]]:
    return Model({"gain": (0, 2), "seed": (0, 100)}), read_pieces(welcome.pieces)


async def serve(options: Options) -> None:
    clock = MonotonicClock()
    server = WebServer(options, Boxes.connect(options.socket, clock), clock, facts)
    runner = await open_site(server.app(), "127.0.0.1", 0, clock)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await server.run()
    await runner.cleanup()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ask_for()  # as the real command does, if it may
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--token", default="")
    parser.add_argument("--most-per-address", type=int, default=32)
    args = parser.parse_args()
    asyncio.run(
        serve(Options(args.socket, token=args.token, most_per_address=args.most_per_address))
    )
