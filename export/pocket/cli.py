"""`python -m export.pocket.cli VERB`: make the bank, train, export and judge the pocket model."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run one verb; each says in --help what it needs."""
    parser = argparse.ArgumentParser(prog="python -m export.pocket.cli", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    bank = verbs.add_parser("bank", help="let every voice say everything (espeak-ng, flite, Piper)")
    bank.add_argument("folder", type=Path)
    bank.add_argument("--seed", type=int, default=0)
    bank.add_argument(
        "--voices",
        choices=("training", "tuning", "held-out"),
        default="training",
        help="tuning: settings are chosen on these; held-out: figures are told of these",
    )
    train = verbs.add_parser("train", help="train codec and language model for so many seconds")
    train.add_argument("bank", type=Path)
    train.add_argument("out", type=Path, help="where checkpoints are and will be")
    train.add_argument("--from", dest="start", type=Path, help="continue these, write to OUT")
    train.add_argument("--codec-seconds", type=float, default=0)
    train.add_argument("--lm-seconds", type=float, default=0)
    train.add_argument("--device", default="cuda")
    train.add_argument("--workers", type=int, default=12, help="processes that write calls")
    train.add_argument("--rehearse", action="store_true", help="a few tiny steps of everything")
    train.add_argument("--step-by-step", action="store_true", help="capture no graphs")
    revive = verbs.add_parser("revive", help="checkpoints out of a bundle, to train on from")
    revive.add_argument("bundle", type=Path)
    revive.add_argument("out", type=Path)
    revive.add_argument("--bank", type=Path, required=True, help="what training will go on with")
    head = verbs.add_parser("head", help="fit anew, on a CPU, what chooses words and when")
    head.add_argument("bank", type=Path)
    head.add_argument("run", type=Path, help="checkpoints; its language model's is written anew")
    head.add_argument("--calls", type=int, default=128, help="that it is fitted to (128)")
    head.add_argument("--seed", type=int, default=0)
    callers = verbs.add_parser("callers", help="the demo's callers, by voices training never heard")
    callers.add_argument("bank", type=Path, help="made with --voices held-out")
    callers.add_argument("folder", type=Path)
    asked = parser.parse_args(argv)
    if asked.verb == "bank":
        from export.pocket import bank as banks
        from export.pocket import voices
        from export.pocket.world import Group

        group = Group(asked.voices)
        every = group is not Group.TRAINING
        cast = voices.cast(asked.seed, group)
        index = banks.make(asked.folder, asked.seed, cast, every, say)
        say(f"{asked.folder}: {len(index.callers)} callers, {len(index.chunks)} chunks")
    if asked.verb == "head":
        from export.pocket import bank as banks
        from export.pocket.script import Stage
        from export.pocket.text_head import refit

        refit(Stage(banks.read(asked.bank)), asked.run, asked.calls, asked.seed, say)
    if asked.verb == "train":
        from export.pocket.lease import Wanted, run

        run(
            Wanted(
                bank=asked.bank,
                out=asked.out,
                start=asked.start,
                codec_seconds=asked.codec_seconds,
                lm_seconds=asked.lm_seconds,
                device=asked.device,
                workers=asked.workers,
                rehearse=asked.rehearse,
                capture=not asked.step_by_step,
            ),
            say,
        )
    if asked.verb == "revive":
        from export.pocket import bank as banks
        from export.pocket.revival import revive as write
        from export.pocket.script import Stage

        write(asked.bundle, asked.out, Stage(banks.read(asked.bank)).labels.count)
        say(f"{asked.out}: weights of {asked.bundle}; moments and heads begin anew")
    if asked.verb == "callers":
        from export.pocket import bank as banks
        from export.pocket.callers import write as write_callers
        from export.pocket.script import Stage

        write_callers(Stage(banks.read(asked.bank)), asked.folder)
    return 0


def say(sentence: str) -> None:
    """Print at once: a lease may end before the buffer is full."""
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
