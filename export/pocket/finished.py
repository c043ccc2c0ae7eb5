"""Trained checkpoints as something `duplexbox export build` can export.

Weights are rounded to float16, which is what the bundle stores, and computed with in float32.
Heads and listeners that only training needed are left behind.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.models.quantizer import USAGE_FLOOR
from export.pocket.model import PIECES, POCKET
from export.source import Source, from_modules

CODEC, LM = "codec.safetensors", "lm.safetensors"
NOTICE = (
    "pocket: made here from synthetic speech (espeak-ng, flite, a Piper voice, Kokoro-82M); knows "
    "a front desk's few sentences and nothing else. See its model card"
)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is what training wrote."""
    return (folder / CODEC).is_file() and (folder / LM).is_file()


def open_checkpoint(folder: Path) -> Source:
    """The trained model, ready to be exported."""
    mimi, lm = modules(folder)
    source = from_modules(POCKET, mimi, lm, pieces=PIECES, trained=True, notice=NOTICE)
    made_from = source.made_from | {"model": "pocket", "stored": "float16"}
    return replace(source, made_from=made_from, halved=True)


def modules(folder: Path) -> tuple[Mimi, LanguageModel]:
    """Codec and language model as they will be served."""
    mimi, lm = Mimi(POCKET.mimi), LanguageModel(POCKET.lm)
    for model, file, prefix in ((mimi, CODEC, "mimi."), (lm, LM, "lm.")):
        found = load_file(folder / file)
        mine = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        model.load_state_dict(mine)
    with torch.no_grad():
        for book in (*mimi.quantizer.rvq_first.codebooks(), *mimi.quantizer.rvq_rest.codebooks()):
            usage = book.cluster_usage.clamp(min=USAGE_FLOOR)
            book.embedding_sum.copy_(book.embedding_sum / usage[:, None])
            book.cluster_usage.fill_(1.0)
        for tensor in _values(mimi, lm):
            tensor.copy_(tensor.half().float())
    mimi.quantizer.prepare()
    return mimi.eval().requires_grad_(False), lm.eval().requires_grad_(False)


def _values(*models: nn.Module) -> list[Tensor]:
    return [tensor for model in models for tensor in model.state_dict().values()]
