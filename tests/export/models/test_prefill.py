"""A prompt's rows at once against ticks that were told the same, in torch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.prefill import chunk_rows, fed_ids, tokens_after
from export import tiny
from export.models.lm import LanguageModel
from export.models.prefill import free_streams, prefill
from export.models.streaming import State, counter, fresh_state
from export.models.tokens import OFFSET, TOKENS, UNGENERATED, read, token_region
from export.prompt_stages import forced_tick
from tests.export.persona import MICRO_TALKER, frames_of, prompt_spec

pytestmark = pytest.mark.torch

CONFIG = MICRO_TALKER.lm
LONG = 3 * CONFIG.context


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny.seeded(MICRO_TALKER, 4)[1]


def fresh(lm: LanguageModel) -> State:
    regions = [token_region(CONFIG), counter(OFFSET, 1), *lm.regions()]
    return fresh_state(regions, 1)


def stepped(lm: LanguageModel, frames: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """State, hidden, text logits of the last row, and the ids every tick was fed."""
    state, ids = fresh(lm), []
    for frame in frames:
        ring = state[TOKENS]
        hidden, logits = forced_tick(lm, state, frame)
        ids.append(read(CONFIG, state[TOKENS], state[OFFSET] - 1))
        assert not torch.equal(ring, state[TOKENS])
    return state, hidden, logits, torch.cat(ids)


@torch.no_grad()
@pytest.mark.parametrize("most", [1, 7, 32, LONG])
@pytest.mark.parametrize("rows", [CONFIG.context - 3, LONG])
def test_chunks_of_any_size_leave_what_single_ticks_leave(
    lm: LanguageModel, most: int, rows: int
) -> None:
    expected, hidden, logits, ids = stepped(lm, frames_of(CONFIG, rows))
    state, position, chunks = fresh(lm), 0, []
    while position < rows:
        count = chunk_rows(position, rows - position, most, CONFIG.context)
        at = torch.arange(position, position + count)
        nothing = torch.zeros(count, CONFIG.dimension)
        found, found_logits, new = prefill(
            lm, ids[position : position + count], at, nothing, nothing[:, 0] > 0, state
        )
        state |= new
        position += count
        chunks.append(count)
    assert max(chunks) == min(most, rows, CONFIG.context)
    for name in (region.name for region in lm.regions()):
        assert (state[name] - expected[name]).abs().max() < 1e-4, name
    assert (found - hidden).abs().max() < 1e-4
    assert (found_logits - logits).abs().max() < 1e-4
    assert hidden.std() > 0.1


@torch.no_grad()
def test_an_embedding_stands_for_its_ids(lm: LanguageModel) -> None:
    *_, ids = stepped(lm, frames_of(CONFIG, 5))
    at, yes = torch.arange(5), torch.ones(5, dtype=torch.bool)
    embedded = lm.embed(ids)
    plain = prefill(lm, ids, at, torch.zeros_like(embedded), ~yes, fresh(lm))
    other = prefill(lm, torch.full_like(ids, 1), at, embedded, yes, fresh(lm))
    assert torch.equal(plain[0], other[0])
    wrong = prefill(lm, torch.full_like(ids, 1), at, embedded, ~yes, fresh(lm))
    assert (plain[0] - wrong[0]).abs().max() > 0.1


def test_the_model_chooses_text_and_the_codebook_without_delay(lm: LanguageModel) -> None:
    assert free_streams(CONFIG) == 2


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_ids_and_token_ring_are_those_of_ticks(lm: LanguageModel, count: int) -> None:
    frames = frames_of(CONFIG, 9)
    expected, *_, ids = stepped(lm, frames[:count])
    spec = prompt_spec(MICRO_TALKER)
    assert np.array_equal(fed_ids(spec, frames[:count].numpy()), ids.numpy())
    ring = tokens_after(spec, frames.numpy(), count, CONFIG.token_rows, UNGENERATED)
    assert np.array_equal(ring, expected[TOKENS][0].numpy())
