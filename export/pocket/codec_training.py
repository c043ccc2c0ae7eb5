"""Train the codec: `train` for so many seconds, from where the last run stopped.

Each step hears windows of the desk and of callers through lines of every kind (`Mixer.windows`)
and is told by four losses: mel spectra, a listener that learns beside it, the quantiser's
commitment, and what words are being said, which the semantic codebook alone must tell. The last is
what a large teacher does for the published codec; here the script knows the words.

Not here: the losses (`codec_losses`), the quantiser (`codebooks`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.pocket import checkpoint, forward
from export.pocket.codebooks import RARE, quantise
from export.pocket.codec_losses import (
    Listener,
    MelDistance,
    inner_loss,
    listener_loss,
    pleasing_loss,
)
from export.pocket.mix import Mixer
from export.pocket.model import POCKET, begun
from export.pocket.pace import Milestones, Pace, Told, rate_at
from export.pocket.replay import Replay
from export.pocket.script import FRAME

MEL, WORDS, COMMITMENT, INNER = 15.0, 1.0, 0.5, 2.0
PEAK, LISTENER_PEAK = 1.5e-3, 5e-4
LISTENER_FROM = 3_000
"""Step from which the listener's opinion counts; before it, there is nothing to listen to."""
REPORT = ("mel", "words", "right", "commitment", "pleasing", "inner", "listener")


@dataclass(frozen=True, slots=True)
class Size:
    """Of a step."""

    batch: int = 32
    frames: int = 30
    listened: int = 16_000
    """Samples of each window that the listener hears."""
    listener_from: int = LISTENER_FROM
    capture: bool = True
    """Run steps as captured graphs, on a GPU."""
    seed: int = 0


class Codec(nn.Module):
    """The codec and the head that tells words from the semantic codebook while it trains."""

    def __init__(self, labels: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mimi, _ = begun(POCKET, seed)
        for book in self._books():  # so that the first step moves most centroids onto speech
            book.get_buffer("cluster_usage").fill_(0.75 * RARE)
            book.get_buffer("embedding_sum").mul_(0.2 * RARE)
        channels = POCKET.mimi.dimension
        self.words = nn.Sequential(
            nn.Conv1d(channels, 192, 3, padding=1), nn.GELU(), nn.Conv1d(192, labels, 1)
        )

    def _books(self) -> list[nn.Module]:
        quantizer = self.mimi.quantizer
        return [*quantizer.rvq_first.codebooks(), *quantizer.rvq_rest.codebooks()]


class Trainer:
    """A codec, its listener, both optimizers, and the tensors that a captured step reads."""

    def __init__(self, mixer: Mixer, labels: int, size: Size) -> None:
        self.mixer, self.size = mixer, size
        device = mixer.device
        self.codec = Codec(labels, size.seed).to(device)
        self.listener = Listener().to(device)
        self.mel = MelDistance().to(device)
        self.rates = [torch.zeros((), device=device) for _ in range(2)]
        on_gpu = device.type == "cuda"
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), rate, betas, weight_decay=0.0, capturable=on_gpu)
            for model, rate, betas in (
                (self.codec, self.rates[0], (0.8, 0.98)),
                (self.listener, self.rates[1], (0.5, 0.9)),
            )
        ]
        self.generator = torch.Generator(device).manual_seed(size.seed)
        self.pcm = torch.zeros(size.batch, size.frames * FRAME, device=device)
        self.labels = torch.zeros(size.batch, size.frames, dtype=torch.int64, device=device)
        self.offset = torch.zeros((), dtype=torch.int64, device=device)
        self.cut = torch.arange(size.listened, device=device)

    def feed(self) -> None:
        """The next windows, in place."""
        size = self.size
        pcm, labels = self.mixer.windows(size.batch, size.frames, self.generator)
        self.pcm.copy_(pcm)
        self.labels.copy_(labels)
        most = size.frames * FRAME - size.listened
        start = torch.rand((), device=self.mixer.device, generator=self.generator)
        self.offset.copy_((start * most).long())

    def brief(self) -> torch.autocast:
        """Products in bfloat16 where that is fast, which is not on a CPU."""
        kind = self.mixer.device.type
        return torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False)

    def step(self, listened: bool) -> Tensor:
        """One step; returns the losses of `REPORT`, (7,)."""
        with self.brief():
            latent = forward.encode(self.codec.mimi, self.pcm.unsqueeze(1))
        latent = latent.float()
        quantizer = self.codec.mimi.quantizer
        semantic, whole, _, commitment = quantise(quantizer, latent, learn=True)
        with self.brief():
            told = self.codec.words(semantic).float()
            made = forward.decode(self.codec.mimi, whole)
        made = made.squeeze(1).float()
        mel = self.mel(self.pcm, made)
        words = functional.cross_entropy(told, self.labels)
        is_word = self.labels > 0
        right = ((told.argmax(1) == self.labels) & is_word).sum() / is_word.sum().clamp(min=1)
        loss = MEL * mel + WORDS * words + COMMITMENT * commitment
        zero = torch.zeros_like(mel)
        pleasing, inner, heard = zero, zero, zero
        if listened:
            # gather, because the gradient of indexing sorts
            at = (self.cut + self.offset).expand(len(made), -1)
            real, copy = self.pcm.gather(1, at), made.gather(1, at)
            heard = self._listen(real, copy.detach())
            with self.brief():
                _, real_inner = self.listener(real)
                scores, made_inner = self.listener(copy)
            pleasing = pleasing_loss([s.float() for s in scores])
            inner = inner_loss([r.detach() for r in real_inner], made_inner).float()
            loss = loss + pleasing + INNER * inner
        self._descend(0, self.codec, loss)
        parts = (mel, words, right, commitment, pleasing, inner, heard)
        return torch.stack([part.detach().float() for part in parts])

    def _listen(self, real: Tensor, copy: Tensor) -> Tensor:
        with self.brief():
            scores, _ = self.listener(torch.cat([real, copy]))
        halves = [score.float().chunk(2) for score in scores]
        loss = listener_loss([h[0] for h in halves], [h[1] for h in halves])
        self._descend(1, self.listener, loss)
        return loss

    def _descend(self, which: int, model: nn.Module, loss: Tensor) -> None:
        optimizer = self.optimizers[which]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=True)
        optimizer.step()


def train(
    trainer: Trainer,
    folder: Path,
    pace: Pace,
    say: Callable[[str], None],
    peak: float = PEAK,
) -> Told:
    """Continue the checkpoint in ``folder`` until the time is over. Returns what it tells then."""
    models = (("codec", trainer.codec), ("listener", trainer.listener))
    told: Told = {}
    for (name, model), optimizer in zip(models, trainer.optimizers, strict=True):
        told = checkpoint.load(folder, name, model, optimizer) or told

    def save(told: Told) -> None:
        for (name, model), optimizer in zip(models, trainer.optimizers, strict=True):
            checkpoint.save(folder, name, model, optimizer, told)

    milestones = Milestones(pace, "codec", REPORT, told, say, save)
    steps = began = int(told.get("steps", 0))
    trainer.generator.manual_seed(trainer.size.seed + steps)
    size, device = trainer.size, trainer.mixer.device
    plain = Replay(lambda: trainer.step(False), device, say, size.capture)
    listened = Replay(lambda: trainer.step(True), device, say, size.capture)
    is_over = False
    while not is_over:
        share = pace.share()
        is_over = share >= 1
        for rate, top in zip(trainer.rates, (peak, LISTENER_PEAK), strict=True):
            rate.fill_(rate_at(share, steps - began, top))
        trainer.feed()
        report = (listened if steps >= trainer.size.listener_from else plain)()
        steps += 1
        told = milestones.passed(steps, report.tolist, is_over)
    return told
