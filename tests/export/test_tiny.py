"""The seeded models: nothing is left at what training would start from."""

import pytest
import torch

from export import tiny

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", sorted(tiny.MODELS))
def test_every_tensor_is_random_and_follows_the_seed(name: str) -> None:
    config = tiny.MODELS[name]
    models = zip(
        tiny.seeded(config, 1), tiny.seeded(config, 1), tiny.seeded(config, 2), strict=True
    )
    for first, again, other in models:
        for key, tensor in first.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[key]), key
            if key.endswith("_initialized"):
                continue
            assert not torch.equal(tensor, other.state_dict()[key]), key
            assert tensor.numel() == 1 or tensor.std() > 0.001, key
            assert torch.isfinite(tensor).all(), key


@pytest.mark.parametrize("name", sorted(tiny.MODELS))
def test_every_text_id_has_a_piece_and_silent_ones_say_nothing(name: str) -> None:
    config = tiny.MODELS[name]
    pieces = tiny.pieces(config)
    assert len(pieces) == config.lm.text_card
    assert all(pieces[silent] == "" for silent in config.silent_ids)
    assert len(set(pieces[4:])) == len(pieces) - 4


def test_small_models_have_the_timing_of_the_large_one() -> None:
    for config in tiny.MODELS.values():
        assert config.period_ns == 80_000_000
        assert config.mimi.samples_per_frame == 1920
        assert config.mimi.ratios == (8, 6, 5, 4)
        assert config.lm.streams == 17
        assert config.lm.depth_codebooks == 8
