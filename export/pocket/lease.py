"""One lease of a training machine: the codec for so many seconds, then the language model.

Everything it needs is the bank and the checkpoints of the lease before; everything it leaves is
checkpoints. `rehearse` runs the same on any machine at a size of no use, so that no second of a
lease is spent on a mistake.

Not here: the steps (`codec_training`, `lm_training`).
"""

import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from export.pocket import bank, checkpoint, codec_training, lm_training
from export.pocket.mix import Mixer
from export.pocket.pace import Pace
from export.pocket.script import Stage

Say = Callable[[str], None]
TINY_CODEC = codec_training.Size(batch=2, frames=14, listened=9_600, listener_from=2)
TINY_LM = lm_training.Size(calls=4, chunk=2, frames=60, batch=3, ticks=30, refresh=2)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lease is for."""

    bank: Path
    out: Path
    start: Path | None
    codec_seconds: float
    lm_seconds: float
    device: str
    workers: int
    rehearse: bool = False
    capture: bool = True


def run(wanted: Wanted, say: Say) -> None:
    """Train; writes checkpoints into ``wanted.out``."""
    opened = Pace(1)
    wanted.out.mkdir(parents=True, exist_ok=True)
    if wanted.start is not None:
        for path in wanted.start.glob("*.safetensors"):
            shutil.copy(path, wanted.out / path.name)
    codec_size = TINY_CODEC if wanted.rehearse else codec_training.Size()
    lm_size = TINY_LM if wanted.rehearse else lm_training.Size()
    codec_size = replace(codec_size, capture=wanted.capture)
    lm_size = replace(lm_size, capture=wanted.capture)
    stage = Stage(bank.read(wanted.bank))
    say(f"bank read, {opened.spent_s():.1f} s")
    lm_training.begin_writer(stage)
    # The writers are forked before anything touches the GPU.
    with ProcessPoolExecutor(wanted.workers, get_context("fork")) as executor:
        calls = lm_training.chunks(executor, lm_size, 0, 3 * wanted.workers)
        first = next(calls) if wanted.lm_seconds else []
        device = torch.device(wanted.device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark_limit = 3  # of each convolution; more took 27 s of a lease
        torch.set_float32_matmul_precision("high")
        mixer = Mixer(stage, device)
        say(f"{len(first)} calls written, bank on {device}, {opened.spent_s():.1f} s")
        if wanted.codec_seconds:
            trainer = codec_training.Trainer(mixer, stage.labels.count, codec_size)
            pace = Pace(wanted.codec_seconds)
            told = codec_training.train(trainer, wanted.out, pace, say)
            say(f"codec: {told}, {opened.spent_s():.1f} s")
            del trainer
        if wanted.lm_seconds:
            codec = codec_training.Codec(stage.labels.count, 0).to(device)
            checkpoint.restore(wanted.out / "codec.safetensors", codec)
            pool = lm_training.Pool(mixer, codec, lm_size)
            speaker = lm_training.Trainer(pool, stage.labels.count, lm_size)
            pace = Pace(wanted.lm_seconds)
            told = lm_training.train(speaker, calls, wanted.out, pace, say)
            say(f"lm: {told}, {opened.spent_s():.1f} s")
        executor.shutdown(wait=False, cancel_futures=True)
