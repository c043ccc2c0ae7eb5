"""`duplexbox export <verb>`: make bundles, look at them.

Parsers first; what is heavy is imported by the verb that needs it, so that `--help` and `show`
work without torch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engines import bundle
from export import show


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (0 done, 1 a check failed, 2 usage)."""
    parser = argparse.ArgumentParser(prog="duplexbox export", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    build = verbs.add_parser("build", help="a model -> a bundle")
    build.add_argument("model", choices=("small", "micro"), help="a seeded model by name")
    build.add_argument("-o", "--out", type=Path, required=True, help="the bundle to write")
    build.add_argument("--seed", type=int, default=0, help="seed of the untrained weights")
    build.add_argument(
        "--batches",
        default="1-8",
        help="batch profiles, from 1 without gaps (default: %(default)s)",
    )
    build.set_defaults(run=run_build)

    seeded = verbs.add_parser(
        "seed-checkpoint", help="a random checkpoint in a published layout; continues when killed"
    )
    seeded.add_argument("name", choices=("moshiko", "moshika", "personaplex"))
    seeded.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    seeded.add_argument(
        "--width",
        choices=("small", "full"),
        default="small",
        help="small: 20 MB; full: the real sizes, 16 GB (default: %(default)s)",
    )
    seeded.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    seeded.add_argument(
        "--layout",
        choices=("fused", "split"),
        default="fused",
        help="attention as one matrix, as published, or one per depth step",
    )
    seeded.set_defaults(run=run_seed_checkpoint)

    shown = verbs.add_parser("show", help="stages, regions and bytes per session of a bundle")
    shown.add_argument("bundle", type=Path)
    shown.add_argument("--json", action="store_true", help="for another program")
    shown.set_defaults(run=run_show)

    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except (bundle.BundleError, ValueError) as err:
        print(f"duplexbox export {args.verb}: {err}", file=sys.stderr)
        return 1
    return code


def run_build(args: argparse.Namespace) -> int:
    from export import build  # needs torch and onnx

    written = build.build_seeded(
        args.model, args.out, seed=args.seed, largest_batch=largest_batch(args.batches)
    )
    for line in show.lines(written.manifest):
        print(line)
    return 0


def run_seed_checkpoint(args: argparse.Namespace) -> int:
    from export import checkpoint, seed, seed_progress  # numpy

    bar = seed_progress.Bar(sys.stderr.isatty())
    written = seed.write_checkpoint(
        args.name,
        args.out,
        width=args.width,
        seed=args.seed,
        keys=args.layout,
        progress=lambda *now: print(bar.update(*now), end="", file=sys.stderr, flush=True),
    )
    for line in checkpoint.lines(checkpoint.open_checkpoint(args.out)):
        print(line)
    print(f"{args.out}: {written:,} bytes written" if written else f"{args.out}: already whole")
    return 0


def run_show(args: argparse.Namespace) -> int:
    manifest = bundle.read(args.bundle).manifest
    if args.json:
        print(json.dumps(show.describe(manifest), indent=1))
    else:
        for line in show.lines(manifest):
            print(line)
    return 0


def largest_batch(batches: str) -> int:
    """The N of "1-N". Raises ValueError with the form that is wanted."""
    first, dash, last = batches.partition("-")
    if first != "1" or not dash or not last.isdigit() or int(last) < 1:
        raise ValueError(
            f"--batches {batches}: profiles run from 1 without gaps, so write 1-N, such as 1-8"
        )
    return int(last)
