"""A pinned prefix: it stays bit for bit, and attention sees it and the newest rows, no others."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.clocks import ClockKind, NativeClock, Order
from export import tiny
from export.models.config import ROPE_MAX_PERIOD
from export.models.lm import LanguageModel
from export.models.streaming import State, fresh_state
from export.models.transformer import GatedLayer, row_of
from export.tiny import MICRO

pytestmark = pytest.mark.torch

CONTEXT, PINNED = 12, 5
CONFIG = replace(MICRO, lm=replace(MICRO.lm, context=CONTEXT, pinned=PINNED))
TICKS = PINNED + 6 * (CONTEXT - PINNED)


def ids_of(ticks: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, CONFIG.lm.text_card, (1, ticks, CONFIG.lm.streams), generator=draw)


def test_rows_are_where_the_native_clock_says() -> None:
    clock = NativeClock(ClockKind.RING, 0, "1", CONTEXT, PINNED, Order.MODULO)
    positions = torch.arange(TICKS)
    rows = row_of(positions, CONTEXT, PINNED)
    assert rows.tolist() == [clock.row_of(position) for position in range(TICKS)]
    assert min(rows[CONTEXT:].tolist()) == PINNED
    for region in LanguageModel(CONFIG.lm).regions():
        assert (region.clock.pinned, region.clock.retain) == (PINNED, CONTEXT)


@torch.no_grad()
def test_the_prefix_survives_five_wraps_bit_for_bit_and_nothing_else_does() -> None:
    assert TICKS >= CONTEXT + 5 * (CONTEXT - PINNED)
    lm = tiny.seeded(CONFIG, 4)[1]
    rings, kept = fresh_state(lm.regions(), 1), {}
    for tick, ids in enumerate(ids_of(TICKS)[0]):
        rings |= lm.temporal(ids[None], torch.tensor([tick]), rings)[2]
        if tick == CONTEXT - 1:
            kept = {name: ring.clone() for name, ring in rings.items()}
    for name, ring in rings.items():
        assert torch.equal(ring[:, :, :PINNED], kept[name][:, :, :PINNED]), name
        moved = (ring[:, :, PINNED:] != kept[name][:, :, PINNED:]).any(-1)
        assert bool(moved.all()), name


@torch.no_grad()
def test_attention_sees_the_prefix_and_the_newest_rows_and_no_others() -> None:
    lm = tiny.seeded(CONFIG, 4)[1]
    ids = ids_of(TICKS)
    rings: State = fresh_state(lm.regions(), 1)
    reference = Reference(lm)
    for tick in range(TICKS):
        hidden, _, new = lm.temporal(ids[:, tick], torch.tensor([tick]), rings)
        rings |= new
        expected = reference.step(ids[:, tick], tick)
        assert np.abs(hidden[0].numpy() - expected).max() < 1e-5, tick
    forgetful = LanguageModel(replace(CONFIG.lm, pinned=0))
    forgetful.load_state_dict(lm.state_dict())
    rings = fresh_state(lm.regions(), 1)
    for tick in range(TICKS):
        other, _, new = forgetful.temporal(ids[:, tick], torch.tensor([tick]), rings)
        rings |= new
    assert (other - hidden).abs().max() > 1e-3, "pinning changes nothing"


class Reference:
    """The temporal transformer in float64 with every key and value ever made, in lists."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.keys: list[list[np.ndarray]] = [[] for _ in lm.transformer.layers]
        self.values: list[list[np.ndarray]] = [[] for _ in lm.transformer.layers]

    def step(self, ids: Tensor, position: int) -> np.ndarray:
        """(1, streams) at ``position`` -> hidden (C,)."""
        x = self.lm.embed(ids)[0].double().numpy()
        seen = [p for p in range(position + 1) if p < PINNED or position - p < CONTEXT - PINNED]
        if position < CONTEXT:
            seen = list(range(position + 1))
        for index, layer in enumerate(self.lm.transformer.layers):
            assert isinstance(layer, GatedLayer)
            attention = layer.self_attn
            mixed = array(attention.in_proj_weight) @ norm(x, array(layer.norm1.alpha))
            query, key, value = np.split(mixed, 3)
            heads = attention.heads
            self.keys[index].append(turned(key, position, heads))
            self.values[index].append(value.reshape(heads, -1))
            q = turned(query, position, heads)
            k = np.stack([self.keys[index][p] for p in seen], 1)
            v = np.stack([self.values[index][p] for p in seen], 1)
            score = np.einsum("hd,hpd->hp", q, k) / math.sqrt(q.shape[1])
            weight = np.exp(score - score.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            found = np.einsum("hp,hpd->hd", weight, v).reshape(-1)
            x = x + array(attention.out_proj.weight) @ found
            opened, gate = np.split(
                array(layer.gating.linear_in.weight) @ norm(x, array(layer.norm2.alpha)), 2
            )
            x = x + array(layer.gating.linear_out.weight) @ (opened / (1 + np.exp(-opened)) * gate)
        return norm(x, array(self.lm.out_norm.alpha))


def array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().double().numpy())


def norm(x: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.asarray(x * alpha.reshape(-1) / np.sqrt(1e-8 + np.mean(x**2)))


def turned(x: np.ndarray, position: int, heads: int) -> np.ndarray:
    """Rotated by the position it was made at, and never again: (heads, D)."""
    pairs = x.reshape(heads, -1, 2)
    count = pairs.shape[1]
    angle = position * ROPE_MAX_PERIOD ** (-np.arange(count) / count)
    real = pairs[..., 0] * np.cos(angle) - pairs[..., 1] * np.sin(angle)
    imaginary = pairs[..., 0] * np.sin(angle) + pairs[..., 1] * np.cos(angle)
    return np.stack([real, imaginary], -1).reshape(heads, -1)
