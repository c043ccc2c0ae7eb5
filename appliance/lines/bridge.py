"""What the lines from an Asterisk have in common: their words on the command line, and one run.

The Asterisk does signalling, codecs, encryption and transfers; such a line brings audio and keys,
and to end a call is to let the dialplan go on. Which protocol brings them is the business of
`audiosocket` and `chan_websocket`: each is one more `sip_stack.Stack` for `sip_server`.
"""

import argparse
import asyncio
import functools
import ipaddress
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance import control, log
from appliance.clock import NS_PER_S, Clock, MonotonicClock
from appliance.lines.boxes import Boxes
from appliance.lines.sip_config import SipConfig
from appliance.lines.sip_hook import ProgramHook
from appliance.lines.sip_stack import Stack, StackError
from appliance.lines.sip_transfer import HANG_UP

KEYS = "0123456789ABCD*#"
OPTIONS = {"max_s": "--max-s", "words": "--end-words", "most": "--most"}
"""By what the table [sip] calls them."""


def add_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    """Define the verb. listen: where it listens by default."""
    parser.add_argument(
        "--socket", type=Path, required=True, help="of the box, or a folder of many"
    )
    parser.add_argument("--listen", default=listen, metavar="ADDRESS:PORT")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NETWORK", help="who may; may be repeated"
    )
    parser.add_argument("--records", type=Path, required=True, metavar="FILE", help="SQLite")
    parser.add_argument("--voice", default="")
    parser.add_argument("--persona", default="")
    parser.add_argument("--max-s", type=int, default=3600, metavar="S", help="longest call (3600)")
    parser.add_argument("--most", type=int, default=120, metavar="N", help="calls at once (120)")
    parser.add_argument("--drain", type=int, default=30, metavar="S", help="at SIGTERM (30)")
    parser.add_argument("--hook", type=Path, metavar="PROGRAM", help="started for what happens")
    parser.add_argument(
        "--end-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ends the call; may be repeated",
    )
    parser.add_argument(
        "--end-words",
        action="append",
        default=[],
        metavar="TEXT",
        help="said by the model, such as goodbye, ends the call; may be repeated",
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep both sides of calls")
    parser.add_argument("--announce", type=Path, metavar="WAV", help="heard before that")


def run_chan_websocket(args: argparse.Namespace) -> int:
    """``duplexbox appliance chan-websocket``: the exit code."""
    try:
        from appliance.lines.chan_websocket import ChanWebsocketStack
    except ModuleNotFoundError as err:
        why = f"{err.name} is not installed. Install it: pip install 'duplexbox[lines]'"
        return _fail("chan-websocket", why, 2)
    return run(args, "chan-websocket", ChanWebsocketStack)


def run(args: argparse.Namespace, line: str, make: Callable[[SipConfig, Clock], Stack]) -> int:
    """Serve until told to stop; the exit code. line: its verb. make: what brings calls."""
    log.set_up()
    try:
        config = _config(args, line)
        boxes = Boxes.connect(args.socket, MonotonicClock())
    except (ValueError, control.ControlError) as err:
        return _fail(line, str(err), 2)
    except control.BoxGone as err:
        return _fail(line, str(err), 1)
    return asyncio.run(_serve(args, line, config, boxes, make))


def may_call(config: SipConfig, source: str) -> bool:
    """Whether ``source``, an address, may bring calls. Pure."""
    try:
        address = ipaddress.IPv4Address(source)
    except ValueError:
        return False
    return not config.networks or any(address in network for network in config.networks)


def _config(args: argparse.Namespace, line: str) -> SipConfig:
    """Raises `ValueError`."""
    recording: dict[str, str | None] | None = None
    if args.record is not None:
        announce = None if args.announce is None else str(args.announce)
        recording = {"folder": str(args.record), "announce": announce}
    elif args.announce is not None:
        raise ValueError("--announce is for calls that are recorded: --record FOLDER")
    for option, text, most in (
        ("--persona", args.persona, control.LONGEST_PERSONA),
        ("--voice", args.voice, control.LONGEST_VOICE),
    ):
        if len(text) > most:
            raise ValueError(f"{option} has {len(text)} characters; {most} are allowed")
    for key in args.end_key:
        if len(key) != 1 or key not in KEYS:
            raise ValueError(f"--end-key {key}: expected one of {KEYS}")
    account = {
        "user": line,
        "persona": args.persona,
        "voice": args.voice,
        "max_s": args.max_s,
        "digits": dict.fromkeys(args.end_key, HANG_UP),
        "words": dict.fromkeys(args.end_words, HANG_UP),
        "record": recording is not None,
    }
    table = {
        "listen": args.listen,
        "accounts": [account],
        "allow": args.allow,
        "most": args.most,
        "records": str(args.records),
        "recording": recording,
    }
    try:
        return msgspec.convert(table, SipConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as err:
        raise ValueError(_by_option(str(err))) from None


def _by_option(said: str) -> str:
    """An error about a table that nobody wrote, in terms of the command line. Pure."""
    why, _, where = said.partition(" - at `")
    option = next((option for name, option in OPTIONS.items() if name in where), "")
    return f"{option}: {why}" if option else why


async def _serve(
    args: argparse.Namespace,
    line: str,
    config: SipConfig,
    boxes: Boxes,
    make: Callable[[SipConfig, Clock], Stack],
) -> int:
    import sqlite3

    from appliance.lines.sip_recorder import RecorderError
    from appliance.lines.sip_records import Records
    from appliance.lines.sip_server import SipServer

    clock = MonotonicClock()
    hook = None if args.hook is None else ProgramHook(args.hook, clock)
    try:
        records = Records(config.records)
        stack = make(config, clock)
        server = SipServer(config, args.socket, boxes, stack, records, clock, line=line, hook=hook)
    except (OSError, sqlite3.Error) as err:
        return _fail(line, f"--records {config.records}: {err}", 2)
    except RecorderError as err:
        return _fail(line, str(err), 2)
    stop = functools.partial(server.stop, within_ns=args.drain * NS_PER_S)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        trouble = await server.run()
    except StackError as err:
        return _fail(line, str(err), 1)
    if hook is not None:
        await hook.settle()
    return _fail(line, trouble, 1) if trouble else 0


def _fail(line: str, why: str, code: int) -> int:
    sys.stderr.write(f"duplexbox appliance {line}: {why}\n")
    sys.stderr.flush()
    return code
