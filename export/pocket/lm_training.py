"""Train the language model on codes of scripted calls, for so many seconds.

Calls are written by processes (`script`), mixed and encoded by the trained codec into a `Pool` on
the device, a chunk of which is made anew every few steps, so that no call is heard for long. A step
takes stretches of 250 ticks: half from where a call begins, half from its middle.

The weights of the losses: a word weighs 1, a digit `DIGIT_WEIGHT`, padding `PADDING_WEIGHT`; the
semantic codebook weighs as much as two acoustic ones. Codes are learnt where the desk speaks or has
just stopped, and in a sample of its silence. A head that is thrown away tells what part of which
word the caller is saying, so that the model learns to listen before it learns to answer.

Positions and delays are those of `export.models.tokens`. Not here: what calls are like (`script`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.pocket import checkpoint, forward, script
from export.pocket.codebooks import quantise
from export.pocket.codec_training import Codec
from export.pocket.mix import Mixer
from export.pocket.model import CODEBOOKS, POCKET, begun
from export.pocket.pace import Milestones, Pace, Told, rate_at
from export.pocket.replay import Replay
from export.pocket.script import CALLER, DESK, Call, Stage
from export.pocket.world import DIGITS, IDS, PADDING

PEAK = 1.5e-3
PADDING_WEIGHT = 0.25
DIGIT_WEIGHT = 3.0
"""Most other words follow from the one before; a digit must have been heard."""
SEMANTIC, ACOUSTIC = 2.0, 1.0
TEXT, CODES, HEARD = 2.0, 2.0, 1.0
"""Of the three losses: a model that speaks well and hears badly is of no use."""
AFTER_SPEECH = 12
"""Ticks after the desk's speech that count as its speech: they are where it stops."""
SILENCE_SHARE = 0.25
"""How likely a silent tick's codes are learnt, against a speaking one's."""
LEARNT = 0.4
"""Share of ticks whose codes are learnt in a step."""
NOISE = 0.03
"""Share of codes that are something else: what it said may not be what it would have said."""
REPORT = ("text", "word", "semantic", "acoustic", "heard")


@dataclass(frozen=True, slots=True)
class Size:
    """Of the pool and of a step."""

    calls: int = 16_000
    """In the pool when it is full."""
    chunk: int = 64
    """Calls made at once."""
    frames: int = 500
    batch: int = 128
    ticks: int = 250
    refresh: int = 32
    """Steps between two chunks."""
    fill: float = 0.08
    """Share of the run that may be spent on filling the pool before the first step."""
    capture: bool = True
    """Run steps as captured graphs, on a GPU."""
    seed: int = 0


_stage: Stage | None = None


def begin_writer(stage: Stage) -> None:
    """Give a writing process its bank."""
    global _stage
    _stage = stage


def write_calls(seed: str, count: int, frames: int) -> list[Call]:
    """In a writing process: ``count`` calls of a seed."""
    assert _stage is not None
    return [script.written(_stage, f"{seed} {n}", frames) for n in range(count)]


def chunks(executor: Executor, size: Size, first: int, ahead: int) -> Iterator[list[Call]]:
    """Chunks of calls without end, ``ahead`` of them being written meanwhile."""
    pending: deque[Future[list[Call]]] = deque()
    number = first
    while True:
        while len(pending) < ahead:
            seed = f"{size.seed} {number}"
            pending.append(executor.submit(write_calls, seed, size.chunk, size.frames))
            number += 1
        yield pending.popleft().result()


class Pool:
    """Encoded calls on the device: (calls, frames, streams) uint8 codes, text, labels, speech."""

    def __init__(self, mixer: Mixer, codec: Codec, size: Size) -> None:
        self.mixer, self.codec, self.size = mixer, codec.eval(), size
        device, shape = mixer.device, (size.calls, size.frames)
        self.codes = torch.zeros(*shape, 2 * CODEBOOKS, dtype=torch.uint8, device=device)
        self.text = torch.full(shape, PADDING, dtype=torch.uint8, device=device)
        self.labels = torch.zeros(shape, dtype=torch.int16, device=device)
        self.speaks = torch.zeros(shape, dtype=torch.bool, device=device)
        self.next, self.full = 0, 0

    @torch.no_grad()
    def put(self, calls: list[Call]) -> None:
        """Mix, encode and keep ``calls`` in the place of the oldest."""
        sound = self.mixer.calls(calls)
        parts = torch.split(sound.flatten(0, 1), 32)  # more would pass two thousand million values
        found = torch.cat([encoded(self.codec, part) for part in parts])
        found = found.view(len(calls), 2, *found.shape[1:])
        at = slice(self.next, self.next + len(calls))
        self.codes[at] = torch.cat([found[:, DESK], found[:, CALLER]], dim=-1).to(torch.uint8)
        device = self.mixer.device
        self.text[at] = torch.from_numpy(np.stack([c.text for c in calls])).to(device)
        labels = torch.from_numpy(np.stack([c.labels for c in calls])).to(device)
        self.labels[at] = labels[:, CALLER]
        speaks = (labels[:, DESK] > 0).float().unsqueeze(1)
        after = functional.max_pool1d(
            functional.pad(speaks, (AFTER_SPEECH, 1)), AFTER_SPEECH + 2, 1
        )
        self.speaks[at] = after.squeeze(1) > 0
        self.next = (self.next + len(calls)) % (self.size.calls // len(calls) * len(calls))
        self.full = min(self.size.calls // len(calls) * len(calls), self.full + len(calls))


def encoded(codec: Codec, pcm: Tensor) -> Tensor:
    """(B, samples) -> codes (B, frames, Q), as the codec hears calls from their start."""
    kind = pcm.device.type
    with torch.autocast(kind, torch.bfloat16, kind == "cuda"):
        latent = forward.encode(codec.mimi, pcm.unsqueeze(1))
    return quantise(codec.mimi.quantizer, latent.float(), learn=False)[2]


class Speaker(nn.Module):
    """The language model, and the head that tells what the caller says while it trains."""

    def __init__(self, labels: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        _, self.lm = begun(POCKET, seed)
        self.heard = nn.Linear(POCKET.lm.dimension, labels)


class Trainer:
    """The model, its optimizer, and the tensors that a captured step reads."""

    def __init__(self, pool: Pool, labels: int, size: Size) -> None:
        self.pool, self.size = pool, size
        device = pool.mixer.device
        self.device = device
        self.speaker = Speaker(labels, size.seed).to(device)
        self.rate = torch.zeros((), device=device)
        decayed = [p for p in self.speaker.parameters() if p.dim() == 2]
        others = [p for p in self.speaker.parameters() if p.dim() != 2]
        groups = [
            {"params": decayed, "weight_decay": 0.03},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, self.rate, (0.9, 0.95), capturable=device.type == "cuda"
        )
        self.rows = torch.zeros(size.batch, dtype=torch.int64, device=device)
        self.starts = torch.zeros(size.batch, dtype=torch.int64, device=device)
        self.delays = torch.tensor(POCKET.lm.delays, device=device)
        self.weights = torch.ones(POCKET.lm.text_card + 1, device=device)
        self.weights[PADDING] = PADDING_WEIGHT
        self.weights[[IDS[digit] for digit in DIGITS]] = DIGIT_WEIGHT
        self.initial = torch.tensor(
            [POCKET.lm.text_card] + [POCKET.lm.card] * POCKET.lm.audio_streams, device=device
        )

    def feed(self, generator: torch.Generator) -> None:
        """Which stretches of which calls come next, in place."""
        size, device = self.size, self.device
        drawn = torch.rand(3, size.batch, device=device, generator=generator)
        self.rows.copy_((drawn[0] * self.pool.full).long())
        middle = (drawn[1] * (size.frames - size.ticks - 1)).long()
        self.starts.copy_(torch.where(drawn[2] < 0.5, 0, middle))

    def positions(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids (B, ticks + 1, streams) by position, the caller's labels and who speaks by tick."""
        ticks = torch.arange(self.size.ticks + 1, device=self.device)
        at = self.starts[:, None] + ticks  # (B, ticks + 1)
        rows = self.rows[:, None]
        text = self.pool.text[rows, at].long().unsqueeze(-1)
        codes = self.pool.codes[rows, at].long()
        before = self.pool.codes[rows, (at - 1).clamp(min=0)].long()
        delays = self.delays[1:]
        ids = torch.cat([text, torch.where(delays > 0, before, codes)], dim=-1)
        ids = torch.where(at.unsqueeze(-1) <= self.delays, self.initial, ids)
        return ids, self.pool.labels[rows, at].long(), self.pool.speaks[rows, at]

    def step(self) -> Tensor:
        """One step; returns the losses of `REPORT`, (5,)."""
        config, lm = POCKET.lm, self.speaker.lm
        ids, labels, speaks = self.positions()
        target, given = ids[:, 1:], ids[:, :-1]
        wrong = torch.rand(given.shape, device=self.device) < NOISE
        other = torch.randint(0, config.card, given.shape, device=self.device)
        wrong[..., 0] = False
        given = torch.where(wrong, other, given)
        kind = self.device.type
        with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
            hidden, text = forward.temporal(lm, given)
            heard = self.speaker.heard(hidden).float()
        wanted = target[..., 0].flatten()
        each = functional.cross_entropy(text.flatten(0, 1), wanted, reduction="none")
        is_word = (wanted != PADDING).float()
        weight = self.weights[wanted]
        text_loss = (each * weight).sum() / weight.sum()
        word_loss = (each.detach() * is_word).sum() / is_word.sum().clamp(min=1)
        told = functional.cross_entropy(heard.flatten(0, 1), labels[:, :-1].flatten())
        # Codes of position t + 1 are the desk's tick t + 1, and tick t of the delayed ones.
        worth = torch.where(speaks[:, 1:].flatten(), 1.0, SILENCE_SHARE)
        chance = torch.rand(worth.shape, device=self.device) ** (1 / worth)
        picked = chance.topk(int(LEARNT * worth.numel()), sorted=False).indices
        spoken = target.flatten(0, 1)[picked, : 1 + CODEBOOKS]
        with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
            logits = forward.depth(lm, hidden.flatten(0, 1).index_select(0, picked), spoken)
        codes = spoken[:, 1:].t()
        per_book = functional.cross_entropy(
            logits.flatten(0, 1), codes.flatten().clamp(max=config.card - 1), reduction="none"
        )
        valid = (codes < config.card).float()
        books = (per_book.view_as(codes) * valid).sum(1) / valid.sum(1).clamp(min=1)
        semantic, acoustic = books[0], books[1:].mean()
        many = SEMANTIC + ACOUSTIC * (CODEBOOKS - 1)
        code_loss = (SEMANTIC * semantic + ACOUSTIC * books[1:].sum()) / many
        loss = TEXT * text_loss + CODES * code_loss + HEARD * told
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.speaker.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        parts = (text_loss, word_loss, semantic, acoustic, told)
        return torch.stack([part.detach().float() for part in parts])


def train(
    trainer: Trainer,
    calls: Iterator[list[Call]],
    folder: Path,
    pace: Pace,
    say: Callable[[str], None],
    peak: float = PEAK,
) -> Told:
    """Continue the checkpoint in ``folder`` until the time is over. Returns what it tells then."""
    size, pool = trainer.size, trainer.pool
    told = checkpoint.load(folder, "lm", trainer.speaker, trainer.optimizer)
    steps = began = int(told.get("steps", 0))
    generator = torch.Generator(trainer.device).manual_seed(size.seed + steps)
    while pool.full < size.calls // size.chunk * size.chunk and (
        pool.full == 0 or pace.share() < size.fill
    ):
        pool.put(next(calls))
    hours = pool.full * size.frames * POCKET.period_ns / 3.6e12
    say(f"pool of {pool.full} calls, {hours:.1f} h, {pace.spent_s():.1f} s")

    def save(told: Told) -> None:
        checkpoint.save(folder, "lm", trainer.speaker, trainer.optimizer, told)

    milestones = Milestones(pace, "lm", REPORT, told, say, save)
    replay = Replay(trainer.step, trainer.device, say, size.capture)
    is_over = False
    while not is_over:
        share = pace.share()
        is_over = share >= 1
        trainer.rate.fill_(rate_at(share, steps - began, peak))
        trainer.feed(generator)
        report = replay()
        steps += 1
        if steps % size.refresh == 0:
            report.tolist()  # waits, so that the host does not run minutes ahead of the device
            pool.put(next(calls))
        told = milestones.passed(steps, report.tolist, is_over)
    return told
