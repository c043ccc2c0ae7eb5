"""`duplexbox appliance ledger` and `replay`: the verbs that read what calls have left behind."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from appliance.ledger import LedgerError

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_verbs(verbs: Verbs) -> None:
    ledger = verbs.add_parser(
        "ledger", help="summarise calls; exit 1 if a frame is unexplained or a file is no call"
    )
    ledger.add_argument("folder", type=Path, help="a box's [ledger] folder, or one .call file")
    ledger.add_argument("--json", action="store_true", help="for another program")
    ledger.add_argument("--plot", type=Path, metavar="FILE.svg", help="margin over time")
    ledger.add_argument("--list", action="store_true", help="one line per call, from the table")
    ledger.add_argument(
        "--on", default="", metavar="DAY", help="today, yesterday or 2026-01-31 (UTC): only these"
    )
    ledger.add_argument(
        "--call", default="", metavar="CALL", help="a session's number or a file's: in detail"
    )
    ledger.add_argument("--worst", type=int, metavar="N", help="the N worst calls, in detail")
    ledger.add_argument("--csv", type=Path, metavar="FILE.csv", help="every frame, one a line")
    ledger.set_defaults(run=run_ledger)

    replay = verbs.add_parser("replay", help="run a recorded call again and compare it")
    replay.add_argument("call", type=Path, help="the call's file in the ledger's folder")
    replay.add_argument(
        "--journal", type=Path, required=True, metavar="FILE", help="what its line kept"
    )
    replay.add_argument("--bundle", type=Path, metavar="DIR", help="default: as the call has it")
    for name, help_ in (("from", "compare from here"), ("to", "compare up to here")):
        replay.add_argument(
            f"--{name}",
            type=seconds,
            dest=f"{name}_s",
            metavar="S",
            help=f"{help_}, such as 30s",
        )
    replay.add_argument("--out", type=Path, metavar="FILE.wav", help="what the model says in it")
    replay.add_argument("--json", action="store_true", help="for another program")
    replay.set_defaults(run=run_replay)


def seconds(text: str) -> float:
    """ "30s" or "30" -> 30.0."""
    value = float(text.removesuffix("s"))
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def run_ledger(args: argparse.Namespace) -> int:
    from appliance import ledger
    from appliance.ledger_views import ViewError

    unreadable: list[ledger.LedgerError] = []
    try:
        code = _list_calls(args, unreadable) if args.list else _show_calls(args, unreadable)
    except (ledger.LedgerError, ViewError, OSError) as err:
        return _fail(args, err, 2)
    for damage in unreadable:
        _fail(args, damage, 1)
    return 1 if unreadable else code


def _list_calls(args: argparse.Namespace, unreadable: "list[LedgerError]") -> int:
    from appliance import ledger_views as views

    if not args.folder.is_dir():
        raise views.ViewError(f"--list needs a folder; {args.folder} is none")
    found = views.rows(args.folder, views.day_of(args.on) if args.on else "", unreadable)
    if args.json:
        print(views.rows_json(found))
    else:
        for line in views.list_text(found):
            print(line)
    return 0


def _show_calls(args: argparse.Namespace, unreadable: "list[LedgerError]") -> int:
    import msgspec

    from appliance import ledger, report
    from appliance import ledger_views as views
    from appliance.plot import margin_plot

    if args.on or args.call:
        day = views.day_of(args.on) if args.on else ""
        calls = ledger.read_files(views.paths(args.folder, day, args.call), unreadable)
    else:
        calls = ledger.read_folder(args.folder, unreadable)
    summary = report.summarise(calls)
    if args.worst:
        chosen = [s.file for s in views.worst(summary, args.worst)]
        calls = sorted(
            (call for call in calls if call.path.name in chosen),
            key=lambda call: chosen.index(call.path.name),
        )
        summary = report.summarise(calls)
    if args.plot:
        title = f"{args.folder}: margin of {len(calls)} calls"
        args.plot.write_text(margin_plot(calls, title), encoding="utf-8")
    if args.csv:
        with args.csv.open("w", encoding="utf-8") as file:
            file.writelines(views.frames_csv(calls))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print(report.text(summary))
        if args.call or args.worst:
            for call in calls:
                print("", *views.call_text(call), sep="\n")
    return 1 if summary.unexplained else 0


def run_replay(args: argparse.Namespace) -> int:
    import contextlib
    import dataclasses
    import json

    from appliance import journal, ledger, replay
    from appliance.config import EngineConfig
    from appliance.engine import open_engine
    from appliance.lines.wav import WavError, WavWriter
    from engines import bundle as bundles
    from engines.bundle import BundleError

    try:
        call = ledger.read_call(args.call)
        steps = replay.plan(call, journal.read(args.journal))
        period_ns = call.header.period_ns
        first, last = replay.frames_between(period_ns, args.from_s, args.to_s, len(call.ticks))
        bundle = bundles.read(args.bundle or Path(call.header.bundle))
        most = max((step.batch for step in steps), default=1)
        # Bits are promised where batches do not change them: on the CPU.
        executor = open_engine(bundle, EngineConfig(bundle.path, most, "cpu")).executor
        with contextlib.ExitStack() as stack:
            hear = None
            if args.out:
                rate_hz = bundle.manifest.timing.sample_rate_hz
                hear = stack.enter_context(WavWriter(args.out, rate_hz)).write
            found = replay.run(executor, call, steps, first, last, hear)
    except (ledger.LedgerError, journal.JournalError, replay.ReplayError, WavError) as err:
        return _fail(args, err, 2)
    except BundleError as err:
        return _fail(args, err, 1)
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        for line in replay.text(found, period_ns):
            print(line)
    return 0 if found.is_equal else 1


def _fail(args: argparse.Namespace, err: object, code: int) -> int:
    print(f"duplexbox appliance {args.verb}: {err}", file=sys.stderr)
    return code
