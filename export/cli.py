"""`duplexbox export <verb>`: make bundles, look at them.

Parsers first; what is heavy is imported by the verb that needs it, so that `--help` and `show`
work without torch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from engines import bundle, machine
from export import plan_progress, show, targets
from export.mistake import Mistake

VOICE_FILES = (".wav", ".pt")

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (0 done, 1 a check failed, 2 usage)."""
    parser = argparse.ArgumentParser(
        prog="duplexbox export", description="Make bundles, look at them, hold them to golden data."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_build(verbs)
    _add_seed_checkpoint(verbs)
    _add_verify(verbs)
    _add_show(verbs)

    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except (bundle.BundleError, Mistake) as err:
        print(f"duplexbox export {args.verb}: {err}", file=sys.stderr)
        return 1
    except OSError as err:
        where = f"{err.filename}: " if err.filename else ""
        what = f"{where}{err.strerror or err}. Mend that and run the same command again"
        print(f"duplexbox export {args.verb}: {what}", file=sys.stderr)
        return 1
    return code


def _add_build(verbs: Verbs) -> None:
    build = verbs.add_parser("build", help="a model -> a bundle; a bundle -> plans for a GPU")
    build.add_argument(
        "model",
        nargs="?",
        help="a checkpoint's folder, a seeded model (small, micro, personaplex-small), or with "
        "--target a bundle",
    )
    build.add_argument("-o", "--out", type=Path, help="the bundle to write, unless MODEL is one")
    build.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the language model (default: as it is stored); the codec is always float32",
    )
    build.add_argument(
        "--batches",
        help="batch profiles, from 1 without gaps (default: 1-8, or what the bundle says)",
    )
    build.add_argument(
        "--target",
        help="also build TensorRT plans for this GPU, such as rtx-4090 or sm_89; list: show all",
    )
    build.add_argument(
        "--weights",
        choices=("inputs", "constants"),
        default="inputs",
        help="large weights stay in the bundle, or go into the plans too (default: %(default)s)",
    )
    build.add_argument(
        "--context", type=int, help="ticks attention sees (default: as the checkpoint says)"
    )
    build.add_argument(
        "--attention",
        choices=("standard", "ring"),
        default="standard",
        help="over a session's rings: standard operators inside the graphs, or a stage of our own "
        "between them: bits that repeat on a GPU (default: %(default)s)",
    )
    build.add_argument(
        "--cache",
        choices=("bf16", "e4m3", "int8"),
        help="how keys and values are kept (default: as the language model is); 8 bits halve a "
        "session's memory and reading, and need --attention ring; the codec's are always float32",
    )
    build.add_argument(
        "--calibrate-on",
        type=Path,
        metavar="DIR",
        help="recordings of speech (.wav) that scales of 8-bit caches are found on (default: the "
        "demo's)",
    )
    build.add_argument(
        "--pin-persona",
        type=int,
        default=0,
        metavar="TICKS",
        help="first ticks of a call that attention never forgets, out of its context (0: as "
        "published, a persona slides out once the context is full)",
    )
    build.add_argument(
        "--voices",
        type=Path,
        metavar="DIR",
        help="recordings (.wav) or published voices (.pt) that callers may name",
    )
    build.add_argument("--seed", type=int, default=0, help="of a seeded model's weights")
    build.set_defaults(run=run_build)


def _add_seed_checkpoint(verbs: Verbs) -> None:
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


def _add_verify(verbs: Verbs) -> None:
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


def _add_show(verbs: Verbs) -> None:
    shown = verbs.add_parser("show", help="stages, regions and bytes per session of a bundle")
    shown.add_argument("bundle", type=Path)
    shown.add_argument("--json", action="store_true", help="for another program")
    shown.set_defaults(run=run_show)


def run_build(args: argparse.Namespace) -> int:
    if args.target == "list":
        return run_targets(args)
    target = targets.resolve(args.target) if args.target else None
    if args.model is None:
        raise Mistake(
            "which model? Name a checkpoint's folder or a seeded model: "
            "duplexbox export build small -o BUNDLE"
        )
    is_bundle = (Path(args.model) / "bundle.json").is_file()
    if is_bundle and (args.out or target is None):
        raise Mistake(
            f"{args.model} is a bundle already. Build plans of it: duplexbox export build "
            f"{args.model} --target TARGET"
        )
    if is_bundle:
        assert target is not None
        return build_plans(bundle.read(Path(args.model)), target, args)
    if args.out is None:
        raise Mistake(
            f"where to? Name the bundle to write: duplexbox export build {args.model} -o BUNDLE"
        )
    if target and (reason := targets.reason_not_to_build(target, machine.look())):
        raise Mistake(reason)  # before the bundle is built, which may take an hour
    code = build_bundle(args)
    return code if target is None else build_plans(bundle.read(args.out), target, args)


def run_targets(args: argparse.Namespace) -> int:
    folder = Path(args.model) if args.model else None
    for line in targets.table(bundle.read(folder, hashes=False).manifest if folder else None):
        print(line)
    return 0


def build_plans(opened: bundle.Bundle, target: targets.Target, args: argparse.Namespace) -> int:
    from export import tensorrt_build  # needs onnx and the target's flavour

    ticker = plan_progress.Ticker(sys.stderr.isatty())
    tensorrt_build.build(
        opened,
        target,
        largest_batch=largest_batch(args.batches) if args.batches else 0,
        weights=args.weights,
        say=lambda line: print(ticker.say(line), end="", file=sys.stderr, flush=True),
        progress=lambda *now: print(ticker.update(*now), end="", file=sys.stderr, flush=True),
    )
    return 0


def build_bundle(args: argparse.Namespace) -> int:
    from export import build, cache_report, checkpoint, seed_progress, source  # needs torch, onnx
    from export.pocket import finished

    batches = largest_batch(args.batches or "1-8")
    is_folder = Path(args.model).is_dir() and args.model not in source.SEEDED
    if is_folder and not finished.is_checkpoint(Path(args.model)):
        for line in checkpoint.lines(checkpoint.open_checkpoint(Path(args.model))):
            print(line)
    model = source.open_source(
        args.model,
        seed=args.seed,
        dtype=args.dtype,
        context=args.context,
        pinned=args.pin_persona,
    )
    calibration = cache_report.plan(args.cache, args.attention, model.dtype, args.calibrate_on)
    bar = seed_progress.Bar(sys.stderr.isatty())
    written = build.build(
        model,
        args.out,
        largest_batch=batches,
        attention=args.attention,
        calibration=calibration,
        voices=voices_in(args.voices),
        progress=lambda *now: print(bar.update(*now), end="", file=sys.stderr, flush=True),
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    for line in show.lines(written.manifest):
        print(line)
    report = cache_report.read(written)
    for line in cache_report.lines_of(report) if report else ():
        print(line)
    return 0


def voices_in(folder: Path | None) -> dict[str, Path]:
    """Voices by name: the .wav and .pt files of ``folder``. Raises Mistake if there is none."""
    if folder is None:
        return {}
    found = {path.stem: path for path in sorted(folder.glob("*")) if path.suffix in VOICE_FILES}
    if not found:
        raise Mistake(
            f"--voices {folder} holds no {' or '.join(VOICE_FILES)} file. "
            f"Record a few seconds of one person, or unpack voices.tgz of the checkpoint there"
        )
    return found


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
    """The N of "1-N". Raises Mistake with the form that is wanted."""
    first, dash, last = batches.partition("-")
    is_count = last.isascii() and last.isdigit() and len(last) <= len(str(bundle.LARGEST_BATCH))
    if first != "1" or not dash or not is_count or not 1 <= int(last) <= bundle.LARGEST_BATCH:
        raise Mistake(
            f"--batches {batches}: profiles run from 1 without gaps, so write 1-N, such as 1-8; N "
            f"is at most {bundle.LARGEST_BATCH}"
        )
    return int(last)
