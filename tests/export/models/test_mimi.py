"""The codec with its state outside: streamed against offline, and rows that must wait."""

import pytest
import torch
from torch import Tensor

from export import tiny
from export.models.mimi import CodecTransformer, Mimi
from export.models.streaming import State, fresh_state
from export.tiny import MICRO
from tests.export.calls import speech

pytestmark = pytest.mark.torch

CONTEXT, ROWS = MICRO.mimi.context, MICRO.mimi.downsample
SAMPLES = MICRO.mimi.samples_per_frame


def longer(state: State, rows: int) -> State:
    """The same fresh state with rings long enough for ``rows`` positions."""
    return {
        name: torch.zeros(x.shape[0], 1, rows, x.shape[3]) if x.dim() == 4 else x
        for name, x in state.items()
    }


def in_steps(transformer: CodecTransformer, x: Tensor, rows: int) -> Tensor:
    """(B, C, T) streamed ``rows`` positions at a time."""
    state, out = fresh_state(transformer.regions(), x.shape[0]), []
    for start in range(0, x.shape[-1], rows):
        y, moved = transformer(x[..., start : start + rows], state)
        state |= moved
        out.append(y)
    return torch.cat(out, dim=-1)


@pytest.fixture(scope="module")
def mimi() -> Mimi:
    return tiny.seeded(MICRO, 3)[0]


@torch.no_grad()
def test_encoder_and_decoder_streamed_equal_one_offline_pass_until_the_rings_wrap(
    mimi: Mimi,
) -> None:
    ticks = CONTEXT // ROWS
    pcm = speech(10, ticks, 2, SAMPLES)
    state = longer(fresh_state(mimi.regions(), 2), ROWS * ticks)
    whole, _ = mimi.latent(pcm.transpose(0, 1).reshape(2, 1, -1), state)
    latent = torch.randn(2, MICRO.mimi.dimension, ticks)
    sound, _ = mimi.sound(latent, state)
    state = fresh_state(mimi.regions(), 2)
    for tick in range(ticks):
        step, moved = mimi.latent(pcm[tick][:, None], state)
        state |= moved
        assert (step - whole[..., tick : tick + 1]).abs().max() < 1e-5, tick
        heard, moved = mimi.sound(latent[..., tick : tick + 1], state)
        state |= moved
        expected = sound[..., tick * SAMPLES : (tick + 1) * SAMPLES]
        assert (heard - expected).abs().max() < 1e-5, tick
    assert whole.std() > 0.1
    assert sound.std() > 0.01


@torch.no_grad()
def test_a_transformer_stepped_singly_equals_the_offline_one_and_in_pairs_only_until_the_wrap(
    mimi: Mimi,
) -> None:
    transformer, length = mimi.encoder_transformer, 5 * CONTEXT
    x = torch.randn(2, MICRO.mimi.dimension, length, generator=torch.Generator().manual_seed(1))
    whole, _ = transformer(x, longer(fresh_state(transformer.regions(), 2), length))
    assert (in_steps(transformer, x, 1) - whole).abs().max() < 1e-5
    # Two rows a tick is what the package streams: the second write of a tick evicts the oldest
    # key its first row may still see.
    away = (in_steps(transformer, x, ROWS) - whole).abs().amax(dim=(0, 1))
    assert away[:CONTEXT].max() < 1e-5
    assert away[CONTEXT::ROWS].min() > 1e-3


@torch.no_grad()
def test_a_row_that_is_not_live_is_as_if_it_had_not_been_there(mimi: Mimi) -> None:
    codes = torch.randint(
        0, MICRO.mimi.bins, (40, 2, 8), generator=torch.Generator().manual_seed(2)
    )
    alone = fresh_state(mimi.regions(), 1)
    both = fresh_state(mimi.regions(), 2)
    for tick in range(40):
        waits = tick % 3 == 1
        live = torch.tensor([True, not waits])
        before = {name: x.clone() for name, x in both.items()}
        sound, moved = mimi.decode(codes[tick], both, live)
        both |= moved
        if waits:
            for name, x in both.items():
                if not name.endswith((".k", ".v")):
                    assert torch.equal(x[1], before[name][1]), name
            continue
        expected, moved = mimi.decode(codes[tick, 1:], alone)
        alone |= moved
        assert (sound[1:] - expected).abs().max() < 1e-6, tick
