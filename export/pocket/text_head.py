"""Fit what chooses words anew, on a CPU: when to answer, after all else has learnt to hear.

A trunk that was trained to answer soon takes a short silence inside a number for its end. Whether
it is one is better told one frame later, and the hidden state tells it: so calls are written whose
desk waits longer (`script.ANSWER_NUMBER_S`), the trunk runs over them once, and the 64 x 160 values
of the text head alone are fitted, starting from what they were. `PADDING_TIMES` says how much worse
a word is where none should be than none where one should. Minutes for a few hundred calls, nearly
all of which the codec takes.

Not here: the trunk, the codec, and what is said (`lm_training`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from export.pocket import checkpoint, forward, script
from export.pocket.codec_training import Codec
from export.pocket.lm_training import Pool, Size, Trainer
from export.pocket.mix import Mixer
from export.pocket.script import Stage
from export.pocket.world import PADDING

FRAMES = 250
"""Of a call: 20 s, all that the model looks back on."""
CHUNK = 4
"""Calls mixed and encoded at once."""
PADDING_TIMES = 6.0
"""Chosen on the tuning voices among 1, 2.5 and 6: see docs/pocket.md."""
NEAR = 1e-3
"""How much a squared distance from the old values costs."""
RATE = 2e-3
STEPS = 300
KEPT = 0.75
"""Share of the calls that is fitted; the rest says what it came to."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the trunk made of calls: hidden (N, C) and the word due, (N,)."""

    hidden: Tensor
    due: Tensor


def refit(
    stage: Stage, run: Path, calls: int, seed: int, say: Callable[[str], None], frames: int = FRAMES
) -> None:
    """Write the head of ``run``'s language model anew, in place. Moments no longer fit and go.

    calls: rounded up to whole `CHUNK`s. frames: of each, at most what the model looks back on.
    """
    many = -(-calls // CHUNK)
    codec = Codec(stage.labels.count, 0)
    checkpoint.restore(run / "codec.safetensors", codec)
    size = Size(calls=many * CHUNK, chunk=CHUNK, frames=frames, batch=CHUNK, ticks=frames - 1)
    pool = Pool(Mixer(stage, torch.device("cpu")), codec, size)
    trainer = Trainer(pool, stage.labels.count, size)
    told = checkpoint.restore(run / "lm.safetensors", trainer.speaker)
    for number in range(many):
        names = [f"head {seed} {number} {n}" for n in range(CHUNK)]
        pool.put([script.written(stage, name, frames) for name in names])
    seen = look(trainer)
    fitted = slice(0, int(KEPT * len(seen.due)))
    asked = slice(fitted.stop, None)
    head = trainer.speaker.lm.text_linear.weight
    before = head.detach().clone()
    say(f"text head before: {told_of(before, seen, asked)}")
    fit(head, seen, fitted, trainer.weights)
    say(f"text head after {pool.full} calls: {told_of(head.detach(), seen, asked)}")
    checkpoint.save(run, "lm", trainer.speaker, trainer.optimizer, told)
    (run / "lm-moments.safetensors").unlink(missing_ok=True)


@torch.no_grad()
def look(trainer: Trainer) -> Seen:
    """Run the trunk over every call of the pool, once."""
    hidden, due = [], []
    for first in range(0, trainer.pool.full, CHUNK):
        trainer.rows = torch.arange(first, first + CHUNK)
        trainer.starts = torch.zeros(CHUNK, dtype=torch.int64)
        ids, _, _ = trainer.positions()
        found, _ = forward.temporal(trainer.speaker.lm, ids[:, :-1])
        hidden.append(found.flatten(0, 1))
        due.append(ids[:, 1:, 0].flatten())
    return Seen(torch.cat(hidden), torch.cat(due))


def fit(head: Tensor, seen: Seen, rows: slice, weights: Tensor) -> None:
    """Move ``head`` (words, C) to what ``rows`` of ``seen`` want, in place.

    weights: of each word, as training has them.
    """
    weight = weights[seen.due[rows]]
    weight[seen.due[rows] == PADDING] *= PADDING_TIMES
    before = head.detach().clone()
    optimizer = torch.optim.Adam([head], RATE)
    for _ in range(STEPS):
        each = functional.cross_entropy(
            functional.linear(seen.hidden[rows], head), seen.due[rows], reduction="none"
        )
        loss = (each * weight).sum() / weight.sum() + NEAR * ((head - before) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def told_of(head: Tensor, seen: Seen, rows: slice) -> str:
    """How sure it is, where a word is due and where none is."""
    chances = torch.softmax(functional.linear(seen.hidden[rows], head), -1)
    due = seen.due[rows]
    is_word = due != PADDING
    right = chances.gather(1, due[:, None])[:, 0]
    early = 1 - chances[~is_word, PADDING]
    return (
        f"the word that is due {right[is_word].mean():.1%}, a word where none is {early.mean():.2%}"
    )
