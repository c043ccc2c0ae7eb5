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
    build.add_argument("model", help="a checkpoint's folder, or a seeded model: small, micro")
    build.add_argument("-o", "--out", type=Path, required=True, help="the bundle to write")
    build.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the language model (default: as it is stored); the codec is always float32",
    )
    build.add_argument(
        "--batches",
        default="1-8",
        help="batch profiles, from 1 without gaps (default: %(default)s)",
    )
    build.add_argument(
        "--context", type=int, help="ticks attention sees (default: as the checkpoint says)"
    )
    build.add_argument("--seed", type=int, default=0, help="of a seeded model's weights")
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

    verify = verbs.add_parser(
        "verify", help="every stage on this CPU against its golden data, and against torch"
    )
    verify.add_argument("bundle", type=Path)
    verify.add_argument(
        "--checkpoint", help="what the bundle was built from, to compare with torch anew"
    )
    verify.add_argument("--seed", type=int, default=0, help="of a seeded model's weights")
    verify.add_argument(
        "--frames", type=int, help="length of the greedy call with --checkpoint (default: golden's)"
    )
    verify.add_argument(
        "--dtype",
        choices=("float32",),
        default="float32",
        help="arithmetic; a bfloat16 or float16 stage is verified as its float32 twin",
    )
    verify.set_defaults(run=run_verify)

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
    from export import build, checkpoint, seed_progress, source  # needs torch and onnx

    batches = largest_batch(args.batches)
    if Path(args.model).is_dir() and args.model not in source.SEEDED:
        for line in checkpoint.lines(checkpoint.open_checkpoint(Path(args.model))):
            print(line)
    model = source.open_source(args.model, seed=args.seed, dtype=args.dtype, context=args.context)
    bar = seed_progress.Bar(sys.stderr.isatty())
    written = build.build(
        model,
        args.out,
        largest_batch=batches,
        progress=lambda *now: print(bar.update(*now), end="", file=sys.stderr, flush=True),
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    for line in show.lines(written.manifest):
        print(line)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from export import source, verify  # needs torch and onnx

    checked = bundle.read(args.bundle)
    reference = None
    if args.checkpoint is not None:
        reference = source.open_like(args.checkpoint, checked.manifest, seed=args.seed)
    failures = 0
    for finding in verify.findings(checked, reference, frames=args.frames):
        print(finding.sentence, file=sys.stderr if finding.is_failure else sys.stdout, flush=True)
        failures += finding.is_failure
    if failures:
        print(f"{args.bundle}: {failures} checks failed", file=sys.stderr)
        return 1
    print(f"{args.bundle}: verified")
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
