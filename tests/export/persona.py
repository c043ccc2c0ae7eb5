"""A small model that takes prompts, and prompts for it."""

from dataclasses import replace

import torch
from torch import Tensor

from engines.bundle import PromptSpec
from export import prompt, tiny
from export.models.config import LmConfig, ModelConfig
from export.prompt_stages import prompt_graphs
from export.tiny import PERSONA_MICRO

MICRO_TALKER = replace(PERSONA_MICRO, lm=replace(PERSONA_MICRO.lm, context=24, text_card=40))
"""Its ring wraps within two seconds; for what needs no tokenizer."""


def frames_of(config: LmConfig, count: int, seed: int = 3) -> Tensor:
    """(count, streams) int64: ids that tell every frame and stream from the others."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(0, config.text_card, (count, 1), generator=draw)
    codes = torch.randint(0, config.card, (count, config.audio_streams), generator=draw)
    return torch.cat([text, codes], dim=1)


def prompt_spec(config: ModelConfig) -> PromptSpec:
    """The manifest section `build` would write, without a bundle around it."""
    mimi, lm = tiny.seeded(config, 4)
    return prompt.prompt_spec(config, mimi, prompt_graphs(config, lm), "tokenizer.model")
