"""`duplexbox appliance sip`: callers by telephone, over one worker process that is kept alive.

Decides what the command line means and who watches whom. The parent knows no SIP: it starts the
worker, which is everything else, starts it again within a second when it dies, and passes on the
signal to stop. SIGTERM refuses newcomers and lets calls end for `--drain`; a second one leaves at
once. When the worker dies, so do its calls: the box sees its socket close, ends their sessions and
counts them.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import config as configs
from appliance import control, log
from appliance.clock import NS_PER_S, Clock, MonotonicClock
from appliance.config import EXIT_CONFIG, ConfigError
from appliance.lines.boxes import Boxes
from appliance.lines.limits import Bucket
from appliance.lines.sip_config import SipConfig

if TYPE_CHECKING:
    from appliance.lines.sip_server import Hook

logger = logging.getLogger(__name__)

NICENESS = -11
"""Of the worker, where the machine allows it, as of the websocket line: what sound servers ask."""

AGAIN_S = (0.1, 0.5, 1.0)
"""Before a worker that died is started again: the first, second, ... time within `CALM_S`."""
LONG_S = 10.0
"""And after that."""
CALM_S = 60

HOOKS_PER_S, HOOKS_BURST, HOOKS_MOST = 50, 200, 16
"""How often a hook is started; how many may run at once. What is more is counted and left out."""


SAID_PER_S, SAID_BURST = 1, 30
"""Lines of the stack's own in the log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance sip``."""
    parser.add_argument("--config", type=Path, default=configs.DEFAULT_PATH, metavar="FILE")
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="of the running box, or a folder of several; default: as the config has it",
    )
    parser.add_argument(
        "--drain", type=int, default=30, metavar="S", help="how long calls may go on (%(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="log what only a developer needs")
    parser.add_argument(
        "--csv",
        metavar="DAY",
        help="print the records of calls from that day on, such as 20260131, and end; all: all",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run_sip(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    try:
        config = configs.load(args.config)
    except ConfigError as err:
        return _fail(str(err), EXIT_CONFIG)
    if config.sip is None:
        return _fail(f"{args.config} has no table [sip]; see docs/telephone.md", EXIT_CONFIG)
    if args.csv:
        return _print_records(config.sip.records, "" if args.csv == "all" else args.csv)
    log.set_up(verbose=args.verbose)
    socket = args.socket or config.control.socket
    if args.worker:
        return _work(config.sip, socket, args.drain, args.verbose)
    command = [sys.executable, "-m", "duplexbox", "appliance", "sip", "--worker"]
    command += ["--config", str(args.config), "--socket", str(socket), "--drain", str(args.drain)]
    if args.verbose:
        command.append("--verbose")
    return Supervisor(command).run()


def _print_records(path: Path, since: str) -> int:
    import sqlite3

    from appliance.lines.sip_records import read, write_csv

    try:
        rows = read(path, since)
    except (OSError, sqlite3.Error) as err:
        return _fail(f"[sip] records = {path}: {err}", 2)
    write_csv(rows, sys.stdout)
    return 0


class Calm(logging.Filter):
    """Lets what a stack says through at `SAID_PER_S`: no stranger can fill the disk with it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.left_out = 0
        self._clock = clock
        self._bucket = Bucket(SAID_PER_S, SAID_BURST)

    def filter(self, record: logging.LogRecord) -> bool:
        said = self._bucket.take(1, self._clock.now_ns())
        self.left_out += not said
        return said


class Supervisor:
    """Keeps one worker process running until it is told to stop."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._worker: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._clock = MonotonicClock()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        deaths: deque[int] = deque()
        while True:
            # In a group of its own, so that Ctrl-C reaches it once, through us.
            self._worker = subprocess.Popen(self._command, start_new_session=True)
            if self._stopping:
                self._worker.terminate()
            code = self._worker.wait()
            if self._stopping or code in (0, 2, EXIT_CONFIG):
                return max(0, code)
            now_ns = self._clock.now_ns()
            while deaths and now_ns - deaths[0] > CALM_S * NS_PER_S:
                deaths.popleft()
            again_s = AGAIN_S[len(deaths)] if len(deaths) < len(AGAIN_S) else LONG_S
            deaths.append(now_ns)
            logger.error("the telephone line ended with %d; again in %.1f s", code, again_s)
            self._wait(again_s)
            if self._stopping:
                return 0

    def _wait(self, seconds: float) -> None:
        """Sleep, unless a signal to stop comes."""
        until_ns = self._clock.now_ns() + int(seconds * NS_PER_S)
        while not self._stopping and (now_ns := self._clock.now_ns()) < until_ns:
            self._clock.sleep_until(min(until_ns, now_ns + NS_PER_S // 20))

    def _stop(self, *_: object) -> None:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True


def _work(config: SipConfig, socket: Path, drain_s: int, verbose: bool) -> int:
    """The worker: everything but being kept alive."""
    try:
        boxes = Boxes.connect(socket, MonotonicClock())
    except control.BoxGone as err:
        return _fail(str(err), 1)
    except control.ControlError as err:
        return _fail(str(err), 2)
    try:
        return asyncio.run(_serve(config, socket, boxes, drain_s, verbose))
    except ModuleNotFoundError as err:
        return _fail(f"{err.name} is not installed. Install it: pip install 'duplexbox[sip]'", 2)


async def _serve(config: SipConfig, socket: Path, boxes: Boxes, drain_s: int, verbose: bool) -> int:
    import sqlite3

    from appliance.lines.sip_baresip import BaresipStack
    from appliance.lines.sip_health import Health
    from appliance.lines.sip_records import LOST, Records
    from appliance.lines.sip_server import SipServer
    from appliance.lines.sip_stack import StackError

    calm = Calm(MonotonicClock())
    if not verbose:
        logging.getLogger("baresip").setLevel(logging.WARNING)  # it has a line for every call
        logging.getLogger("baresip.native").addFilter(calm)
    stack = BaresipStack(config, verbose=verbose)
    health = Health(config.health, also=stack.show_room)
    try:
        records = Records(config.records)
        if records.lost:
            logger.warning("%d calls were on when %s", records.lost, LOST)
        server = SipServer(
            config,
            socket,
            boxes,
            stack,
            records,
            MonotonicClock(),
            hook=_hook(config.hook),
            room=health.show,
        )
    except (OSError, sqlite3.Error) as err:
        return _fail(f"[sip] records = {config.records}: {err}", EXIT_CONFIG)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: server.stop(within_ns=drain_s * NS_PER_S))
    _ask_for_niceness()
    try:
        await health.start()
        trouble = await server.run()
    except StackError as err:
        return _fail(str(err), EXIT_CONFIG)
    except OSError as err:
        return _fail(f"[sip] health = {config.health}: {err}", EXIT_CONFIG)
    finally:
        health.close()
    logger.info(
        "calls since the start: %s; datagrams dropped: %d; lines of the stack left out: %d",
        server.counts,
        stack.dropped(),
        calm.left_out,
    )
    return _fail(trouble, 1) if trouble else 0


def _hook(program: Path | None) -> "Hook | None":
    """What starts ``program`` with one JSON object on its standard input; nothing waits for it."""
    if program is None:
        return None
    bucket = Bucket(HOOKS_PER_S, HOOKS_BURST)
    clock = MonotonicClock()
    running: set[asyncio.Task[None]] = set()

    async def start(event: dict[str, object]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                str(program), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            await asyncio.wait_for(process.communicate(json.dumps(event).encode()), 30)
        except TimeoutError:
            process.kill()
            logger.warning("hook %s ran for longer than 30 s and was killed", program)
        except OSError as err:
            logger.warning("hook %s could not be started: %s", program, err)

    def hook(event: dict[str, object]) -> None:
        if len(running) >= HOOKS_MOST or not bucket.take(1, clock.now_ns()):
            logger.warning("hook %s was left out for %s", program, event.get("event"))
            return
        task = asyncio.get_running_loop().create_task(start(event))
        running.add(task)
        task.add_done_callback(running.discard)

    return hook


def _ask_for_niceness() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    except OSError as err:
        logger.info("no niceness of %d: %s. It needs LimitNICE in its unit", NICENESS, err.strerror)


def _fail(why: str, code: int) -> int:
    sys.stderr.write(f"duplexbox appliance sip: {why}\n")
    sys.stderr.flush()
    return code
