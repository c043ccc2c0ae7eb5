"""Checkpoints for tests: the smallest of the published topology, written by safetensors itself."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export import checkpoint_layout as layout
from export.checkpoint_config import CONFIG_FILE, LM_FILE, MIMI_FILE
from export.models.config import LmConfig, MimiConfig

LM = LmConfig(
    dimension=128,
    layers=2,
    heads=1,
    feedforward=96,
    text_card=24,
    card=16,
    depth_dimension=64,
    depth_layers=1,
    depth_heads=1,
    depth_feedforward=48,
)
PERSONAPLEX = replace(LM, depth_codebooks=16)
MIMI = MimiConfig(
    filters=2, dimension=64, heads=1, layers=1, feedforward=32, codebook_dimension=8, bins=16
)

Tensors = dict[str, Tensor]


def tensors(config: LmConfig | MimiConfig, dtype: torch.dtype) -> Tensors:
    """Every tensor of a model; no two rows next to each other alike, nor two tensors."""
    if isinstance(config, LmConfig):
        shapes = layout.lm_shapes(config)
    else:
        shapes = layout.mimi_shapes(config)
    return {
        name: ((torch.arange(math.prod(shape)) + 7 * index) % 251).view(shape).to(dtype)
        for index, (name, shape) in enumerate(shapes.items())
    }


def write_folder(folder: Path, lm: LmConfig = LM, **config_json: object) -> Path:
    """A folder as published; with a config.json if any field of it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(lm, torch.bfloat16), folder / LM_FILE, {"format": "pt"})
    save_file(tensors(MIMI, torch.float32), folder / MIMI_FILE, {"format": "pt"})
    if config_json:
        (folder / CONFIG_FILE).write_text(json.dumps(config_json))
    return folder


def change(path: Path, edit: Callable[[Tensors], None]) -> None:
    """Rewrite a safetensors file after ``edit`` changed its tensors in place."""
    held = load_file(path)
    edit(held)
    save_file(held, path, {"format": "pt"})
