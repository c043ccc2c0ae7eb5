"""`duplexbox appliance websocket`: callers with Moshi's clients, over one process for all of them.

Decides what the command line means and what it takes to start; serving is `web_server`. Ctrl-C or
SIGTERM ends all calls with a close frame that says so; a second one leaves at once.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import control
from appliance.clock import MonotonicClock
from appliance.lines.boxes import Boxes
from appliance.lines.niceness import ask_for
from appliance.lines.tls import AUTO, TlsError, server_context

if TYPE_CHECKING:
    import ssl

    from appliance.lines.web_server import Options, WebServer

logger = logging.getLogger(__name__)

LISTEN = "127.0.0.1:8998"
"""Port: server.py in kyutai-labs/moshi."""


class UsageError(ValueError):
    """The command line asks for something that cannot be; the operator's to fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance websocket``."""
    parser.add_argument(
        "--socket", type=Path, required=True, help="of the running box, or a folder of several"
    )
    parser.add_argument(
        "--listen", default=LISTEN, metavar="HOST:PORT", help="where clients connect (%(default)s)"
    )
    parser.add_argument(
        "--static", type=Path, metavar="DIR", help="a page to serve at / in place of our own"
    )
    parser.add_argument(
        "--tls",
        default="",
        metavar=f"{AUTO}|DIR",
        help="HTTPS, which browsers want before they give the microphone: a certificate of our "
        "own, made once and kept; or a folder with cert.pem and key.pem",
    )
    parser.add_argument(
        "--token", type=Path, metavar="FILE", help="callers must know what is written in it"
    )
    parser.add_argument(
        "--origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages from there may call too; * is any; may be repeated",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name this line goes by, besides this machine's; * is any; may be repeated",
    )
    parser.add_argument(
        "--most", type=int, default=256, metavar="N", help="connections at once (%(default)s)"
    )
    parser.add_argument(
        "--most-per-address", type=int, default=32, metavar="N", help="from one (%(default)s)"
    )


def run_websocket(args: argparse.Namespace) -> int:
    """Serve until SIGTERM. 0: stopped; 1: no box or no port; 2: usage or missing extra."""
    try:
        options, (host, port) = read_options(args), read_listen(args.listen)
        context = server_context(args.tls, reachable(host)) if args.tls else None
        boxes = Boxes.connect(args.socket, MonotonicClock())
    except (UsageError, TlsError, control.ControlError) as err:
        return _fail(str(err), 2)
    except ModuleNotFoundError as err:
        return _missing(err)
    except control.BoxGone as err:
        return _fail(str(err), 1)
    try:
        return asyncio.run(_serve(options, boxes, host, port, context))
    except ModuleNotFoundError as err:
        return _missing(err)


def read_options(args: argparse.Namespace) -> "Options":
    """The command line as `Options`. Raises `UsageError`, `ModuleNotFoundError`."""
    from appliance.lines.web_server import Options

    token = ""
    if args.token is not None:
        try:
            token = args.token.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as err:
            raise UsageError(f"--token {args.token} cannot be read: {err}") from None
        if len(token) < 16:
            raise UsageError(
                f"--token {args.token} holds {len(token)} characters; 16 are the least. "
                f"Make one: openssl rand -hex 16 > {args.token}"
            )
    if args.static is not None and not (args.static / "index.html").is_file():
        raise UsageError(f"--static {args.static}: there is no index.html in it")
    for option, value in (("--most", args.most), ("--most-per-address", args.most_per_address)):
        if not 1 <= value <= 10_000:
            raise UsageError(f"{option} {value}: expected 1 to 10000")
    return Options(
        socket=args.socket,
        static=args.static,
        token=token,
        origins=frozenset(args.origin),
        hosts=frozenset(name.lower() for name in [*args.host, *own_names(args.listen)]),
        most=args.most,
        most_per_address=args.most_per_address,
    )


def read_listen(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[::1]:PORT`` -> (host, port). Raises `UsageError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"--listen {text}: expected HOST:PORT, such as {LISTEN}")
    return host, int(port)


async def _serve(
    options: "Options", boxes: Boxes, host: str, port: int, context: "ssl.SSLContext | None"
) -> int:
    from appliance import log
    from appliance.lines.transcript import PiecesError
    from appliance.lines.web_server import WebServer
    from appliance.lines.web_site import open_site
    from engines.bundle import BundleError

    log.set_up()
    clock = MonotonicClock()
    try:
        server = WebServer(options, boxes, clock)
    except (BundleError, PiecesError) as err:
        boxes.close()
        return _fail(str(err), 2)
    _stop_on_signals(server)  # before anybody is told that it is there, and may tell it to go
    try:
        runner = await open_site(server.app(), host, port, clock, context)
    except OSError as err:
        boxes.close()
        return _fail(f"{host}:{port} cannot be listened at: {err.strerror}. See --listen", 1)
    for said in announcement(boxes.welcome, runner.addresses[0][1], host, options, context):
        _say(said)
    if why := ask_for():
        logger.info("%s; without it a busy machine is heard in calls", why)
    try:
        await server.run()
    finally:
        await runner.cleanup()
    return 0


def announcement(
    welcome: control.Welcome,
    port: int,
    host: str,
    options: "Options",
    context: "ssl.SSLContext | None",
) -> list[str]:
    """What an operator must know to open the pages, a line each."""
    name = reachable(host)[0]
    shown = f"[{name}]" if ":" in name else name
    url = f"{'http' if context is None else 'https'}://{shown}:{port}/"
    lines = [welcome.notice] if welcome.notice else []
    lines += [f"{welcome.model} answers at {url}", f"how the box is: {url}box"]
    if options.token:
        lines.append(f"both ask for the token once: {url}?token=...")
    if context is not None:
        lines.append("a certificate of its own is asked about once in every browser: accept it")
    elif not _is_local(host):
        lines.append(
            "without --tls browsers on other machines will not give this page a microphone"
        )
    return lines


def reachable(host: str) -> list[str]:
    """Names and addresses at which ``host`` is reached, the one to show first."""
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if not everywhere:
        return [host]
    found = [socket.gethostname()]
    # Which address other machines would use; a datagram socket that is connected sends nothing.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.insert(0, probe.getsockname()[0])
    return found


def own_names(listen: str) -> list[str]:
    """Names that browsers may know this line by, if it is told to listen there."""
    machine = socket.gethostname()
    return [read_listen(listen)[0], machine, f"{machine}.local", socket.getfqdn()]


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_on_signals(server: "WebServer") -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second one ends the process
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _missing(err: ModuleNotFoundError) -> int:
    return _fail(f"{err.name} is not installed. Install it: pip install 'duplexbox[lines]'", 2)


def _fail(why: str, code: int) -> int:
    _say(f"duplexbox appliance websocket: {why}")
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
