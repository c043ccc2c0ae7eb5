"""`duplexbox appliance <verb>`: serve callers, place calls, run the demo, read the ledger."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance import cli_calls
from appliance import config as configs
from appliance.cli_calls import Verbs
from appliance.config import EXIT_CONFIG, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (0 done, 1 a check failed, 2 usage, 78 bad config)."""
    parser = argparse.ArgumentParser(prog="duplexbox appliance", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    serve = verbs.add_parser("serve", help="run the box until SIGTERM or Ctrl-C, then drain")
    serve.add_argument("--config", type=Path, default=configs.DEFAULT_PATH, metavar="FILE")
    serve.add_argument("--verbose", action="store_true", help="log what only a developer needs")
    serve.set_defaults(run=run_serve)

    _add_line_verbs(verbs)
    _add_verbs_of_a_running_box(verbs)
    _add_certify(verbs)
    _add_simulate(verbs)
    cli_calls.add_verbs(verbs)

    demo = verbs.add_parser("demo", help="three callers on this CPU, in real time")
    demo.add_argument("--out", type=Path, metavar="DIR", help="default: out/demo-<time>")
    demo.add_argument("--bundle", type=Path, metavar="DIR", help="default: the demo's own")
    demo.set_defaults(run=run_demo)

    init = verbs.add_parser("init", help="write a config with every setting and its default")
    init.add_argument("path", nargs="?", default="duplexbox.toml", help="- for stdout")
    init.add_argument("--bundle", type=Path, metavar="DIR", help="the bundle to serve")
    init.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="where the box's socket, calls and all else it keeps go (default: as a service)",
    )
    init.set_defaults(run=run_init)

    check = verbs.add_parser("check", help="read the config and its bundle as serve would")
    check.add_argument("--config", type=Path, default=configs.DEFAULT_PATH, metavar="FILE")
    check.set_defaults(run=run_check)

    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _add_line_verbs(verbs: Verbs) -> None:
    """Where callers come in."""
    call = verbs.add_parser("call", help="place calls from WAV files into a running box")
    _add_call_arguments(call)
    call.set_defaults(run=run_call)

    callers = verbs.add_parser("callers", help="place many synthetic callers into a running box")
    _add_callers_arguments(callers)
    callers.set_defaults(run=run_callers)

    websocket = verbs.add_parser("websocket", help="callers with Moshi's clients and web pages")
    _add_websocket_arguments(websocket)
    websocket.set_defaults(run=run_websocket)

    sip = verbs.add_parser("sip", help="callers by telephone: a SIP account, a PBX or a trunk")
    _add_sip_arguments(sip)
    sip.set_defaults(run=run_sip)

    audiosocket = verbs.add_parser("audiosocket", help="callers whom an Asterisk hands over")
    _add_audiosocket_arguments(audiosocket)
    audiosocket.set_defaults(run=run_audiosocket)

    chan_websocket = verbs.add_parser(
        "chan-websocket", help="the same, over the websockets of Asterisk 22.6 or later"
    )
    _add_chan_websocket_arguments(chan_websocket)
    chan_websocket.set_defaults(run=run_chan_websocket)

    talk = verbs.add_parser("talk", help="with this machine's microphone and loudspeaker")
    _add_talk_arguments(talk)
    talk.set_defaults(run=run_talk)


def _add_verbs_of_a_running_box(verbs: Verbs) -> None:
    status = verbs.add_parser("status", help="how a running box is, and whom it would still admit")
    status.add_argument(
        "--socket", type=Path, required=True, help="of the box, or a folder of many"
    )
    status.add_argument("--json", action="store_true", help="for another program")
    status.set_defaults(run=run_status)

    reset = verbs.add_parser("reset", help="have a call's model begin anew; the call goes on")
    reset.add_argument("call", type=int, help="the session's number, as the box's log has it")
    reset.add_argument("--socket", type=Path, required=True, help="of the box")
    reset.set_defaults(run=run_reset)

    transfer = verbs.add_parser("transfer", help="have a telephone caller called on elsewhere")
    transfer.add_argument("call", type=int, help="the session's number, as the box's log has it")
    transfer.add_argument(
        "target", help="such as sip:desk@pbx.example; [sip] transfer_to allows it"
    )
    transfer.add_argument("--socket", type=Path, required=True, help="of the box")
    transfer.set_defaults(run=run_transfer)

    hang_up = verbs.add_parser("hangup", help="end a call, whatever its line does")
    hang_up.add_argument("call", type=int, help="the session's number, as the box's log has it")
    hang_up.add_argument("--socket", type=Path, required=True, help="of the box")
    hang_up.add_argument(
        "--why", default="", metavar="TEXT", help="for records, logs and whoever is on a web page"
    )
    hang_up.set_defaults(run=run_hang_up)


def _add_certify(verbs: Verbs) -> None:
    certify = verbs.add_parser("certify", help="how many sessions hold on this machine, proven")
    certify.add_argument("bundle", type=Path)
    how = certify.add_mutually_exclusive_group()
    how.add_argument("--sessions", type=int, metavar="N", help="measure N sessions")
    how.add_argument("--find", action="store_true", help="search the most that hold (default)")
    certify.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="all sessions at once (10)"
    )
    certify.add_argument("--quick", action="store_true", help="seconds, not minutes: no evidence")
    certify.add_argument("--out", type=Path, metavar="DIR", help="default: out/certify-<time>")
    certify.add_argument(
        "--executor", choices=("auto", "cpu", "cuda"), default="auto", help="as [engine] executor"
    )
    certify.add_argument("--gpu", type=int, default=0, metavar="N", help="as [engine] gpu (0)")
    certify.add_argument("--speech", nargs="+", type=Path, metavar="WAV", help="what callers say")
    for name, help_ in (
        ("jitter-ms", "frames are late by 0 to this"),
        ("loss", "share of frames that never arrive"),
        ("skew-ppm", "callers' clocks spread over plus and minus this"),
    ):
        certify.add_argument(f"--{name}", type=float, metavar="X", help=help_)
    certify.set_defaults(run=run_certify)


def _add_simulate(verbs: Verbs) -> None:
    simulate = verbs.add_parser("simulate", help="the scheduler and its policies on a fake clock")
    for name, default, help_ in (
        ("sessions", 256, "callers, one joining every 10 ticks"),
        ("minutes", 60.0, "of simulated time"),
        ("base-ms", 5.0, "a step takes this"),
        ("session-ms", 0.2, "and this per session"),
        ("overruns-per-hour", 60.0, "single long steps, at random"),
        ("overrun-ms", 300.0, "the longest; the shortest are 20 ms"),
        ("slow-from-minute", 0.0, "every step takes slow-ms more from here"),
        ("slow-ms", 0.0, "0: never"),
        ("buffer-ms", 80.0, "playout buffer of every line"),
        ("catch-up-ms", 80.0, "as [clock] catch_up_ms"),
        ("shed-after", 3, "as [admission] shed_after; 0: never"),
        ("skew-ppm", 200.0, "callers' clocks spread over plus and minus this"),
        ("seed", 0, "of everything that is random"),
    ):
        simulate.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            metavar="X",
            help=f"{help_} ({default:g})",
        )
    simulate.add_argument("--json", action="store_true", help="for another program")
    simulate.set_defaults(run=run_simulate)


def _add_call_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import file

    file.add_arguments(parser)


def run_call(args: argparse.Namespace) -> int:
    from appliance.lines import file

    return file.run_calls(args)


def _add_callers_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import callers

    callers.add_arguments(parser)


def run_callers(args: argparse.Namespace) -> int:
    from appliance.lines import callers

    return callers.run_callers(args)


def _add_websocket_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import websocket

    websocket.add_arguments(parser)


def run_websocket(args: argparse.Namespace) -> int:
    from appliance.lines import websocket

    return websocket.run_websocket(args)


def _add_talk_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import local

    local.add_arguments(parser)


def run_talk(args: argparse.Namespace) -> int:
    from appliance.lines import local

    return local.run_talk(args)


def _add_sip_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import sip

    sip.add_arguments(parser)


def run_sip(args: argparse.Namespace) -> int:
    from appliance.lines import sip

    return sip.run_sip(args)


def _add_audiosocket_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import audiosocket

    audiosocket.add_arguments(parser)


def run_audiosocket(args: argparse.Namespace) -> int:
    from appliance.lines import audiosocket

    return audiosocket.run_audiosocket(args)


def _add_chan_websocket_arguments(parser: argparse.ArgumentParser) -> None:
    from appliance.lines import bridge

    bridge.add_arguments(parser, "127.0.0.1:9093")


def run_chan_websocket(args: argparse.Namespace) -> int:
    from appliance.lines import bridge

    return bridge.run_chan_websocket(args)


def run_status(args: argparse.Namespace) -> int:
    import msgspec

    from appliance import control
    from appliance.status import ask, text

    sockets = sorted(args.socket.glob("*.sock")) if args.socket.is_dir() else [args.socket]
    if not sockets:
        return _fail(args, f"{args.socket} holds no socket (*.sock); name a box's", 2)
    found, code = {}, 0
    for path in sockets:
        try:
            found[str(path)] = ask(path)
        except (control.BoxGone, control.ControlError) as err:
            code = _fail(args, err, 1)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for name, report in found.items():
            for line in text(name, report):
                print(line)
    return code


def run_reset(args: argparse.Namespace) -> int:
    from appliance import control
    from appliance.status import reset, reset_text

    try:
        answer = reset(args.socket, args.call)
    except (control.BoxGone, control.ControlError) as err:
        return _fail(args, err, 1)
    if isinstance(answer, control.Refused):
        return _fail(args, answer.detail, 1)
    print(reset_text(answer))
    return 0


def run_transfer(args: argparse.Namespace) -> int:
    from appliance import control, status

    if len(args.target) > control.LONGEST_TARGET:
        return _fail(args, f"an address of {len(args.target)} characters: at most 200", 2)
    try:
        answer = status.transfer(args.socket, args.call, args.target)
    except (control.BoxGone, control.ControlError) as err:
        return _fail(args, err, 1)
    if isinstance(answer, control.Refused) or not answer.is_done:
        return _fail(args, f"session {args.call} stays: {answer.detail}", 1)
    print(f"session {args.call}: {answer.detail}")
    return 0


def run_hang_up(args: argparse.Namespace) -> int:
    from appliance import control, endings, status

    why = endings.printable(args.why)
    if len(why) > control.LONGEST_WHY:
        return _fail(args, f"--why has {len(why)} characters: at most {control.LONGEST_WHY}", 2)
    try:
        answer = status.hang_up(args.socket, args.call, why)
    except (control.BoxGone, control.ControlError) as err:
        return _fail(args, err, 1)
    if isinstance(answer, control.Refused):
        return _fail(args, answer.detail, 1)
    print(f"session {answer.session} is ended; {answer.due} frames of it were due")
    return 0


def run_certify(args: argparse.Namespace) -> int:
    from appliance import certify
    from appliance.clock import wall_stamp
    from engines.bundle import BundleError

    out: Path = args.out or Path("out") / f"certify-{wall_stamp()}"
    try:
        asked = certify.plan(args)
        return certify.run(args.bundle, asked, out, _say, _progress_line())
    except certify.UsageError as err:
        return _fail(args, err, 2)
    except (BundleError, certify.CertifyFailed) as err:
        return _fail(args, err, 1)


def run_simulate(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from appliance import simulate

    try:
        scenario = simulate.scenario(args)
    except ValueError as err:
        return _fail(args, err, 2)
    found = simulate.simulate(scenario)
    if args.json:
        print(json.dumps({"scenario": dataclasses.asdict(scenario), **dataclasses.asdict(found)}))
    else:
        for line in simulate.text(scenario, found):
            print(line)
    return 0


def run_serve(args: argparse.Namespace) -> int:
    from appliance import log
    from appliance.box import open_box
    from appliance.listener import SocketTaken
    from engines.bundle import BundleError

    log.set_up(verbose=args.verbose)
    try:
        box = open_box(configs.load(args.config))
    except (ConfigError, BundleError, SocketTaken) as err:
        return _fail(args, err, EXIT_CONFIG)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: box.drain())
    try:
        box.run()
    except ConfigError as err:
        return _fail(args, err, EXIT_CONFIG)
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from appliance import demonstration
    from appliance.clock import wall_stamp
    from appliance.listener import SocketTaken
    from engines import bundle as bundles
    from engines.bundle import BundleError
    from engines.ort_executor import OrtExecutor

    out: Path = args.out or Path("out") / f"demo-{wall_stamp()}"
    try:
        folder = args.bundle or demonstration.POCKET
        script = demonstration.script(folder)
        bundle = bundles.read(folder)
        slots = min(bundle.manifest.largest_batch, len(script.callers) + 1)
        executor = OrtExecutor(bundle, slots)
        return demonstration.run_demo(executor, script, out, _say, _progress_line())
    except (BundleError, ConfigError, SocketTaken, demonstration.DemoFailed) as err:
        return _fail(args, err, 1)


def run_init(args: argparse.Namespace) -> int:
    text = configs.with_paths(args.bundle, args.state)
    if args.path == "-":
        print(text, end="")
        return 0
    try:
        with Path(args.path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return _fail(args, f"{args.path} exists already and was left as it is", 2)
    except OSError as err:
        return _fail(args, f"{args.path}: {err.strerror or err}", 2)
    from appliance import demonstration

    print(f"wrote {args.path}")
    if args.bundle is None:
        print(f"Set [engine] bundle; a trained one is {demonstration.POCKET}")
    print(f"Next: duplexbox appliance check --config {args.path}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    from appliance import preflight
    from appliance.admission import session_bytes
    from appliance.side_models import plan
    from engines import bundle as bundles
    from engines.bundle import BundleError

    try:
        config = configs.load(args.config)
        bundle = bundles.read(config.engine.bundle)
    except (ConfigError, BundleError) as err:
        return _fail(args, err, EXIT_CONFIG)
    manifest = bundle.manifest
    slots = config.engine.slots or manifest.largest_batch
    if slots > manifest.largest_batch:
        return _fail(
            args,
            f"{args.config}: [engine] slots = {slots}, but the largest batch of {bundle.path} is "
            f"{manifest.largest_batch}. Lower slots, or build: duplexbox export build --help",
            EXIT_CONFIG,
        )
    for fault in preflight.faults(config):
        return _fail(args, f"{args.config}: {fault}", EXIT_CONFIG)
    try:
        plan(config.beside)
    except ConfigError as err:
        return _fail(args, f"{args.config}: {err}", EXIT_CONFIG)
    state, limit = session_bytes(manifest), config.admission.memory_mb * 2**20
    print(f"{args.config}: ok")
    print(f"{bundle.path}: {manifest.model.name}, {slots} sessions, {state} bytes of state each")
    if limit and state * slots > limit:  # the box starts, and refuses callers for memory
        print(
            f"{args.config}: [admission] memory_mb is room for {limit // state} of {slots} "
            "sessions at full retention; the others will be refused"
        )
    return 0


def _fail(args: argparse.Namespace, err: object, code: int) -> int:
    print(f"duplexbox appliance {args.verb}: {err}", file=sys.stderr)
    return code


def _say(line: str) -> None:
    print(line, flush=True)


def _progress_line() -> Callable[[str], None]:
    """A line that overwrites itself on a terminal; elsewhere, one line every two seconds."""
    terminal = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1
    seen = 0

    def show(line: str) -> None:
        nonlocal seen
        if terminal:
            print(
                "\r" + line[:width].ljust(width) + ("" if line else "\r"), end="", file=sys.stderr
            )
            sys.stderr.flush()
        elif line and seen % 8 == 0:
            print(line, file=sys.stderr, flush=True)
        seen += 1

    return show
