"""Names and shapes: those of the modules, in the published counts."""

from dataclasses import replace

import pytest
import torch

from export import checkpoint_layout as layout
from export.checkpoint_file import CheckpointError
from export.models.config import DELAYS, LmConfig, MimiConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from tests.export.checkpoints import LM, MIMI, PERSONAPLEX

pytestmark = pytest.mark.torch

MOSHI_FULL = LmConfig()
PERSONAPLEX_FULL = replace(MOSHI_FULL, depth_codebooks=16)


@pytest.mark.parametrize(
    ("config", "fused", "split", "parameters"),
    [(MOSHI_FULL, 355, 439, 7_687_729_152), (PERSONAPLEX_FULL, 475, 655, 8_371_408_896)],
)
def test_full_width_has_the_published_counts(
    config: LmConfig, fused: int, split: int, parameters: int
) -> None:
    shapes = layout.lm_shapes(config)
    in_parts = layout.split_shapes(shapes, config)
    assert (len(shapes), len(in_parts)) == (fused, split)
    assert layout.values(shapes) == layout.values(in_parts) == parameters


def test_mimi_has_the_published_counts() -> None:
    shapes = layout.mimi_shapes(MimiConfig())
    assert len(layout.split_shapes(shapes, MimiConfig())) == 318
    assert layout.values(shapes) == 96_151_393


@pytest.mark.parametrize("config", [MOSHI_FULL, PERSONAPLEX_FULL, LM])
def test_the_language_model_has_exactly_these_tensors(config: LmConfig) -> None:
    with torch.device("meta"):
        state = LanguageModel(config).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == layout.lm_shapes(config)


@pytest.mark.parametrize("config", [MimiConfig(), MIMI])
def test_mimi_has_exactly_these_tensors(config: MimiConfig) -> None:
    with torch.device("meta"):
        state = Mimi(config).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == layout.mimi_shapes(config)


@pytest.mark.parametrize("config", [MOSHI_FULL, PERSONAPLEX_FULL, LM, PERSONAPLEX])
@pytest.mark.parametrize("split", [False, True])
def test_shapes_tell_the_language_model(config: LmConfig, split: bool) -> None:
    shapes = layout.lm_shapes(config)
    if split:
        shapes = layout.whole_shapes("model", layout.split_shapes(shapes, config))
    assert layout.infer_lm("model", shapes, DELAYS) == config


@pytest.mark.parametrize("config", [MimiConfig(), MIMI])
def test_shapes_tell_the_codec(config: MimiConfig) -> None:
    assert layout.infer_mimi("mimi", layout.mimi_shapes(config), 8) == config


@pytest.mark.parametrize(
    ("also", "twice"),
    [
        ("transformer.layers.0.self_attn.in_proj.weight", "in_proj_weight twice"),
        ("transformer.layers.0.self_attn.in_projs.0.weight", "in_proj_weight twice"),
    ],
)
def test_a_tensor_under_two_names_is_refused(also: str, twice: str) -> None:
    shapes = layout.lm_shapes(LM)
    shapes[also] = shapes["transformer.layers.0.self_attn.in_proj_weight"]
    with pytest.raises(CheckpointError, match=twice):
        layout.gather("model.safetensors", shapes)
