"""`duplexbox engines <verb>`: measure what runs a bundle on this machine."""

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from engines import bundle


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (0 done, 1 a check failed, 2 usage)."""
    parser = argparse.ArgumentParser(prog="duplexbox engines", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    bench = verbs.add_parser("bench", help="time every stage and the tick, batch by batch")
    bench.add_argument("bundle", type=Path)
    bench.add_argument("--batches", default="1,4", help="batch sizes (default: %(default)s)")
    bench.add_argument("--ticks", type=int, default=500, help="ticks each (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="for another program")
    bench.set_defaults(run=run_bench)

    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except (bundle.BundleError, ValueError) as err:
        print(f"duplexbox engines {args.verb}: {err}", file=sys.stderr)
        return 1
    return code


def run_bench(args: argparse.Namespace) -> int:
    from engines import bench
    from engines.ort_executor import OrtExecutor

    batches = batch_list(args.batches)
    if args.ticks < 1:
        raise ValueError(f"--ticks {args.ticks}: at least 1 tick must run")
    executor = OrtExecutor(bundle.read(args.bundle), max(batches))
    timings = []
    for batch in batches:
        bench.measure(executor, batch, min(args.ticks, 20))  # warm up: first runs allocate
        timings += bench.measure(executor, batch, args.ticks)
    if args.json:
        print(json.dumps([dataclasses.asdict(timing) for timing in timings], indent=1))
        return 0
    print(f"{args.bundle} on {_cpu()}, ONNX Runtime CPU, one thread, {args.ticks} ticks each")
    for line in bench.table(timings):
        print(line)
    return 0


def batch_list(text: str) -> list[int]:
    """ "1,4" -> [1, 4]. Raises ValueError with the form that is wanted."""
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--batches {text}: write batch sizes with commas, such as 1,4")
    return [int(word) for word in words]


def _cpu() -> str:
    """The processor's own name; figures without it mean nothing."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
