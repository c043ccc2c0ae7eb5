"""Checkpoint folders whose numbers make sense: the micro model, written as it would be published.

Unlike those of `tests.export.checkpoints`, which hold rulers, a model of these weights speaks: they
are what `tiny` seeds, in the files, names and layout of the published checkpoints.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export import tiny
from export.checkpoint_config import CONFIG_FILE, LM_FILE, MIMI_FILE, TEXT_FILE
from export.checkpoint_text import seeded_pieces, sentencepiece_model
from export.models.config import LmConfig, ModelConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi

MODEL = replace(tiny.MICRO, mimi=replace(tiny.MICRO.mimi, heads=1, context=250))
"""Micro, as far as a checkpoint can say so: a codec's heads and context leave no trace in it."""
THIN = replace(
    MODEL,
    mimi=replace(MODEL.mimi, layers=1),
    lm=replace(MODEL.lm, layers=1, depth_layers=1),
)
"""The same with one layer of each kind, where the files are asked about and not the layers."""
SIXTEEN = replace(MODEL, lm=replace(MODEL.lm, depth_codebooks=16, context=25))
"""The same with the depth steps of a PersonaPlex file, and room for a prompt."""


def write(
    folder: Path, config: ModelConfig = MODEL, *, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Mimi, LanguageModel]:
    """Write the folder; returns the modules with the very weights it holds, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    mimi, lm = Mimi(config.mimi), LanguageModel(config.lm)
    mimi.load_state_dict({name: tiny._draw(name, x, seed) for name, x in mimi.state_dict().items()})
    mimi.quantizer.prepare()
    lm.load_state_dict({name: tiny._draw(name, x, seed) for name, x in lm.state_dict().items()})
    lm.to(dtype)
    save_file(dict(lm.state_dict()), folder / LM_FILE, {"format": "pt"})
    save_file(dict(mimi.state_dict()), folder / MIMI_FILE, {"format": "pt"})
    (folder / TEXT_FILE).write_bytes(sentencepiece_model(seeded_pieces(config.lm.text_card)))
    (folder / CONFIG_FILE).write_text(json.dumps(config_json(config.lm)))
    return mimi.eval(), lm.float().eval()


def config_json(lm: LmConfig) -> dict[str, object]:
    """What the shapes do not tell."""
    return {
        "num_heads": lm.heads,
        "depformer_num_heads": lm.depth_heads,
        "context": lm.context,
    }


def changed(folder: Path, out: Path, file: str, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the folder in which one file's tensors were edited."""
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name == file:
            held = load_file(path)
            edit(held)
            save_file(held, out / file, {"format": "pt"})
        else:
            (out / path.name).write_bytes(path.read_bytes())
    return out


def shuffled(tensor: Tensor, seed: int) -> Tensor:
    """Other values of the same spread; ones and zeros among them too."""
    generator = np.random.default_rng(seed)
    noise = torch.from_numpy(generator.standard_normal(tuple(tensor.shape))).to(tensor.dtype)
    return tensor + noise.abs() * (tensor.float().std(correction=0).to(tensor.dtype) + 0.1)
