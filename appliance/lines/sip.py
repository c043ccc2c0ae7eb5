"""`duplexbox appliance sip`: callers by telephone, over one worker process that is kept alive.

Decides what the command line means and who watches whom. The parent knows no SIP: it starts the
worker, which is everything else, starts it again within a second when it dies, and passes on the
signal to stop. SIGTERM refuses newcomers and lets calls end for `--drain`; a second one leaves at
once. When the worker dies, so do its calls: the box sees its socket close, ends their sessions and
counts them.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import config as configs
from appliance import control, log
from appliance.clock import NS_PER_S, Clock, MonotonicClock
from appliance.config import EXIT_CONFIG, ConfigError
from appliance.lines import niceness, sip_baresip_words, sip_pace
from appliance.lines.boxes import Boxes
from appliance.lines.limits import Bucket
from appliance.lines.sip_config import SipConfig
from appliance.lines.sip_supervisor import (
    BEAT_NS,
    BUSY,
    IDLE,
    Supervisor,
    limit_memory,
    wait_to_begin,
)

if TYPE_CHECKING:
    from appliance.lines.sip_baresip import BaresipStack
    from appliance.lines.sip_server import SipServer

logger = logging.getLogger(__name__)

EXIT_AGAIN = 1
"""Of a worker that may start in a while: its supervisor tries again, for as long as it takes."""

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
        help="print the records of calls from that day on and end: today, yesterday, 2026-01-31 "
        "(UTC), or all",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--go", type=int, default=-1, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--beat", type=int, default=-1, metavar="FD", help=argparse.SUPPRESS)


def run_sip(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    if args.worker:
        sip_pace.tell_nobody(os.environ)
    if args.worker and args.go >= 0 and not _is_wanted(args.go):
        return 0
    try:
        config = configs.load(args.config)
    except ConfigError as err:
        return _fail(str(err), EXIT_CONFIG)
    if config.sip is None:
        return _fail(f"{args.config} has no table [sip]; see docs/telephone.md", EXIT_CONFIG)
    if args.csv:
        return _print_records(config.sip.records, args.csv)
    log.set_up(verbose=args.verbose)
    socket = args.socket or config.control.socket
    if args.worker:
        limit_memory(config.sip.most)
        return _work(config.sip, socket, args.drain, args.verbose, args.beat)
    command = [sys.executable, "-m", "duplexbox", "appliance", "sip", "--worker"]
    command += ["--config", str(args.config), "--socket", str(socket), "--drain", str(args.drain)]
    if args.verbose:
        command.append("--verbose")
    environ = dict(os.environ)
    if why := sip_pace.preload(environ):
        logger.info("%s", why)
    return Supervisor(command, config.sip.most, environ).run()


def _is_wanted(go: int) -> bool:
    """Be ready, and wait until the worker before this one has gone; False: it never will."""
    with contextlib.suppress(ModuleNotFoundError):  # which is said when it is needed
        importlib.import_module("appliance.lines.sip_baresip")
        importlib.import_module("appliance.lines.sip_server")
    return wait_to_begin(go)


def _print_records(path: Path, since: str) -> int:
    import sqlite3

    from appliance.ledger_views import ViewError, day_of
    from appliance.lines.sip_records import read, write_csv

    try:
        rows = read(path, "" if since == "all" else day_of(since))
    except ViewError:
        expected = "all, today, yesterday or a date such as 2026-01-31 (UTC)"
        return _fail(f"--csv {since}: expected {expected}", 2)
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


def _work(config: SipConfig, socket: Path, drain_s: int, verbose: bool, beat: int) -> int:
    """The worker: everything but being kept alive. beat: where to say that it is well."""
    faulthandler.enable()
    try:
        boxes = Boxes.connect(socket, MonotonicClock())
    except control.BoxGone as err:
        return _fail(str(err), 1)
    except control.ControlError as err:
        return _fail(str(err), 2)
    try:
        return asyncio.run(_serve(config, socket, boxes, drain_s, verbose, beat))
    except ModuleNotFoundError as err:
        return _fail(f"{err.name} is not installed. Install it: pip install 'duplexbox[sip]'", 2)


async def _serve(
    config: SipConfig, socket: Path, boxes: Boxes, drain_s: int, verbose: bool, beat: int
) -> int:
    import sqlite3

    from appliance.lines.media_threads import MediaThreads
    from appliance.lines.sip_baresip import MEDIA_THREADS, BaresipStack
    from appliance.lines.sip_health import Health
    from appliance.lines.sip_hook import ProgramHook
    from appliance.lines.sip_recorder import RecorderError
    from appliance.lines.sip_records import Records
    from appliance.lines.sip_server import SipServer
    from appliance.lines.sip_stack import NotYet, StackError

    calm = Calm(MonotonicClock())
    if not verbose:
        logging.getLogger("baresip").setLevel(logging.WARNING)  # it has a line for every call
        logging.getLogger("baresip.native").addFilter(calm)
    # Of the server, which is made below: boxes may be lost and found again.
    media = MediaThreads(MEDIA_THREADS, lambda: server.boxes)
    stack = BaresipStack(config, media, verbose=verbose)
    health = Health(config.health, also=stack.show_room, networks=config.networks)
    hook = None if config.hook is None else ProgramHook(config.hook, MonotonicClock())
    try:
        records = Records(config.records)
        server = SipServer(
            config,
            socket,
            boxes,
            stack,
            records,
            MonotonicClock(),
            hook=hook,
            room=health.show,
        )
    except RecorderError as err:
        return _fail(str(err), EXIT_CONFIG)
    except (OSError, sqlite3.Error) as err:
        return _fail(f"[sip] records = {config.records}: {err}", EXIT_CONFIG)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: server.stop(within_ns=drain_s * NS_PER_S))
    if why := niceness.ask_for():
        logger.info("%s", why)
    beating = loop.create_task(_beat(beat, stack, server))
    # All that was imported is never looked at again when garbage is sought.
    gc.collect()
    gc.freeze()
    try:
        try:
            await health.start()
        except OSError as err:
            code = EXIT_AGAIN if sip_baresip_words.passes(err) else EXIT_CONFIG
            return _fail(f"[sip] health = {config.health}: {err}", code)
        trouble = await server.run()
    except NotYet as err:
        return _fail(str(err), EXIT_AGAIN)
    except StackError as err:
        return _fail(str(err), EXIT_CONFIG)
    finally:
        beating.cancel()
        health.close()
    if hook is not None:
        await hook.settle()
    logger.info(
        "calls since the start: %s; datagrams dropped: %d; lines of the stack left out: %d",
        server.counts,
        stack.dropped(),
        calm.left_out,
    )
    return _fail(trouble, 1) if trouble else 0


async def _beat(pipe: int, stack: "BaresipStack", server: "SipServer") -> None:
    """Say that this process is well, for as long as its stack answers; end if nobody listens.

    An answer that is still to come is none that failed to: with more calls than the machine can
    bear a turn of the loop may take a second, and ending them all is no remedy.
    """
    every_s = BEAT_NS / NS_PER_S / 10  # until it has started
    is_well = False
    asked = asyncio.ensure_future(stack.answers())
    try:
        while pipe >= 0:
            if asked.done():
                is_well = asked.result()
                asked = asyncio.ensure_future(stack.answers())
            if is_well:
                every_s = BEAT_NS / NS_PER_S
                try:
                    os.write(pipe, BUSY if server.calls else IDLE)
                except OSError:
                    logger.error("the supervisor is gone")
                    os._exit(1)
            await asyncio.sleep(every_s)
    finally:
        asked.cancel()


def _fail(why: str, code: int) -> int:
    sys.stderr.write(f"duplexbox appliance sip: {why}\n")
    sys.stderr.flush()
    return code
