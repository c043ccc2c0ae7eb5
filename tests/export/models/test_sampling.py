"""Choosing tokens: greedy is argmax, sampling has the distribution it claims."""

import math

import pytest
import torch
from torch import Tensor

from export import tiny
from export.models.sampling import Taste
from export.models.streaming import fresh_state
from export.models.tokens import OFFSET, TOKENS
from export.stages import HIDDEN, NOISE, TEXT_LOGITS, all_regions, graphs_of
from export.tiny import MICRO

pytestmark = pytest.mark.torch


def gumbel(*shape: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -torch.log(-torch.log(uniform)).float()


def taste(temperature: list[float], top_k: list[int], candidates: int) -> Taste:
    return Taste(torch.tensor(temperature), torch.tensor(top_k), candidates)


def test_temperature_zero_is_argmax_whatever_the_noise() -> None:
    logits = torch.randn(500, 30, generator=torch.Generator().manual_seed(3))
    chosen = taste([0.0] * 500, [25] * 500, 25).choose(logits, 100 * gumbel(500, 25))
    assert torch.equal(chosen, logits.argmax(-1))


def test_each_row_is_sampled_with_its_own_temperature_and_top_k() -> None:
    draws, cards = 60_000, 6
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    for temperature, top_k in ((0.5, 3), (1.0, 6), (2.0, 0), (1.3, 1)):
        both = taste([temperature, 0.0] * (draws // 2), [top_k, 4] * (draws // 2), cards)
        chosen = both.choose(logits.expand(draws, -1), gumbel(draws, cards, seed=top_k))
        assert set(chosen[1::2].tolist()) == {0}
        found = torch.bincount(chosen[::2], minlength=cards) / (draws // 2)
        kept = logits.clone()
        kept[top_k or cards :] = -math.inf
        expected = torch.softmax(kept / temperature, -1)
        spread = torch.sqrt(expected * (1 - expected) / (draws // 2))
        assert ((found - expected).abs() <= 4.5 * spread).all(), (temperature, top_k)


def test_fewer_candidates_than_noise_use_its_beginning() -> None:
    logits, noise = torch.randn(4, 9), gumbel(4, 20)
    one = taste([1.0] * 4, [9] * 4, 9)
    assert torch.equal(one.choose(logits, noise), one.choose(logits, noise[:, :9].clone()))


@torch.no_grad()
def test_noise_has_a_row_for_text_and_then_one_per_codebook() -> None:
    """A call that is replayed, or primed elsewhere, must find each row where it was."""
    mimi, lm = tiny.seeded(MICRO, 4)
    graphs = graphs_of(MICRO, mimi, lm)
    depth = next(graph for graph in graphs if graph.name == "depth")
    state = fresh_state(all_regions(graphs, MICRO), 1)
    draw = torch.Generator().manual_seed(2)
    steps, after = 1 + MICRO.lm.depth_codebooks, 5
    state[OFFSET].fill_(after)
    given = state | {
        HIDDEN: torch.randn(1, MICRO.lm.dimension, generator=draw),
        TEXT_LOGITS: torch.randn(1, MICRO.lm.text_card, generator=draw),
    }

    def spoken(noise: Tensor) -> list[int]:
        ring = depth.run(given | {NOISE: noise})[TOKENS]
        found: list[int] = ring[0, :steps, after % MICRO.lm.token_rows].tolist()
        return found

    quiet = torch.zeros(1, steps, MICRO.sampling.candidates)
    plain = spoken(quiet)
    for row in range(steps):
        loud = quiet.clone()
        loud[0, row, 3] = 1e6  # the fourth best, whatever it is
        found = spoken(loud)
        assert found[:row] == plain[:row], row
        assert found[row] != plain[row], row
