"""The language model: single steps against one offline pass, and the ids that mean nothing."""

import pytest
import torch

from export import tiny
from export.models.lm import LanguageModel
from export.models.streaming import fresh_state
from export.models.tokens import ZERO
from export.tiny import MICRO

pytestmark = pytest.mark.torch

CONFIG = MICRO.lm


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny.seeded(MICRO, 4)[1]


@torch.no_grad()
def test_single_steps_equal_one_offline_pass_for_every_prefix_past_the_wrap(
    lm: LanguageModel,
) -> None:
    ticks = 4 * CONFIG.context
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CONFIG.text_card, (2, ticks, CONFIG.streams), generator=draw)
    start = torch.zeros(2, dtype=torch.int64)
    rings = fresh_state(lm.regions(), 2)
    long = {name: torch.zeros(2, 1, ticks, x.shape[3]) for name, x in rings.items()}
    whole, logits, _ = lm.temporal(ids, start, long)
    whole, logits = whole.view(2, ticks, -1), logits.view(2, ticks, -1)
    for tick in range(ticks):
        hidden, text, moved = lm.temporal(ids[:, tick], start + tick, rings)
        rings |= moved
        assert (hidden - whole[:, tick]).abs().max() < 1e-5, tick
        assert (text - logits[:, tick]).abs().max() < 1e-5, tick
    assert whole.std(dim=1).min() > 1e-3


@torch.no_grad()
def test_the_zero_id_embeds_as_nothing_and_every_stream_counts(lm: LanguageModel) -> None:
    none = torch.full((1, CONFIG.streams), ZERO)
    start, rings = torch.zeros(1, dtype=torch.int64), fresh_state(lm.regions(), 1)
    silent, _, _ = lm.temporal(none, start, rings)
    assert silent.abs().max() == 0
    for stream in range(CONFIG.streams):
        ids = none.clone()
        ids[0, stream] = 1
        alone, _, _ = lm.temporal(ids, start, rings)
        assert alone.abs().max() > 0.1, stream


@torch.no_grad()
def test_every_depth_step_hears_the_one_before(lm: LanguageModel) -> None:
    hidden = torch.randn(1, CONFIG.dimension, generator=torch.Generator().manual_seed(2))
    text_logits = torch.zeros(1, CONFIG.text_card)
    steps = CONFIG.depth_codebooks

    def logits(forced: list[int]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def choose(step: int, found: torch.Tensor) -> torch.Tensor:
            seen.append(found)
            return torch.tensor([forced[step]])

        spoken = lm.depth(hidden, text_logits, choose)
        assert spoken.tolist() == [forced]
        return seen

    plain = logits([1] * (steps + 1))
    for changed in range(steps):
        forced = [1] * (steps + 1)
        forced[changed] = 2
        found = logits(forced)
        same = [torch.equal(a, b) for a, b in zip(plain, found, strict=True)]
        assert same == [True] * (changed + 1) + [False] * (steps - changed), changed
