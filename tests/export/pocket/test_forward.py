"""What training computes over a whole recording is what serving computes tick by tick."""

from dataclasses import replace

import torch
from torch import Tensor

from export.models.config import ModelConfig
from export.models.streaming import fresh_state
from export.pocket import forward, model
from export.pocket.model import POCKET
from export.tiny import seeded

SMALL = replace(
    POCKET,
    mimi=replace(POCKET.mimi, filters=2, dimension=16, heads=2, feedforward=24, context=10),
    lm=replace(POCKET.lm, dimension=32, layers=2, heads=2, context=40),
)
FRAMES = 12
"""Of the codec: past the wrap of its rings of 10 rows, two a frame."""


def test_the_codec_trains_on_what_it_will_hear_and_say() -> None:
    mimi, _ = seeded(SMALL, 3)
    samples = SMALL.mimi.samples_per_frame
    pcm = 0.1 * torch.randn(2, 1, FRAMES * samples, generator=torch.Generator().manual_seed(1))
    state = fresh_state(mimi.regions(), 2)
    latents, sounds = [], []
    with torch.no_grad():
        for frame in range(FRAMES):
            latent, new = mimi.latent(pcm[..., frame * samples : (frame + 1) * samples], state)
            state |= new
            sound, new = mimi.sound(latent, state)
            state |= new
            latents.append(latent)
            sounds.append(sound)
        whole = forward.encode(mimi, pcm)
        back = forward.decode(mimi, whole)
    torch.testing.assert_close(whole, torch.cat(latents, -1), atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(back, torch.cat(sounds, -1), atol=2e-5, rtol=2e-4)


def test_the_language_model_trains_on_what_it_will_think_and_choose() -> None:
    _, lm = seeded(SMALL, 4)
    config, ticks = SMALL.lm, 9
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, config.text_card, (2, ticks, config.streams), generator=generator)
    ids[0, 3, 2] = -1
    state = fresh_state(lm.regions(), 2)
    chosen: list[list[Tensor]] = []
    logits: list[list[Tensor]] = []

    def choose(step: int, found: Tensor) -> Tensor:
        logits[-1].append(found)
        token = found.argmax(-1)
        chosen[-1].append(token)
        return token

    with torch.no_grad():
        for tick in range(ticks):
            at = torch.full((2,), tick)
            hidden, text, new = lm.temporal(ids[:, tick], at, state)
            state |= new
            chosen.append([])
            logits.append([])
            lm.depth(hidden, text, choose)
        hidden, text = forward.temporal(lm, ids)
        spoken = torch.stack([torch.stack(tick, -1) for tick in chosen], 1)
        codes = forward.depth(lm, hidden.flatten(0, 1), spoken.flatten(0, 1))
    stepped = torch.stack([tick[0] for tick in logits], 1)
    torch.testing.assert_close(text, stepped, atol=1e-4, rtol=1e-3)
    for book in range(config.depth_codebooks):
        stepped = torch.stack([tick[1 + book] for tick in logits], 1).flatten(0, 1)
        torch.testing.assert_close(codes[book], stepped, atol=1e-4, rtol=1e-3)


def test_the_pocket_model_keeps_to_its_size() -> None:
    def values(config: ModelConfig) -> int:
        return sum(t.numel() for m in model.begun(config, 0) for t in m.state_dict().values())

    assert values(POCKET) <= 6_000_000
    assert len(model.PIECES) == POCKET.lm.text_card
