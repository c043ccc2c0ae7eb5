"""A checkpoint out of a bundle: the weights alone, for training to go on when nothing else is left.

The graphs call weights what the modules call them, whole or in equal parts along their first axis,
in float32 or, with ``.half`` behind the name, in float16. Codebooks come back as their centroids.
What only training had (moments, heads, the listener) begins anew.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engines import bundle
from export.models.quantizer import Codebook
from export.pocket.codec_training import Codec
from export.pocket.finished import CODEC, LM
from export.pocket.lm_training import Speaker

HALF = ".half"


def revive(path: Path, out: Path, labels: int) -> None:
    """Write the checkpoints of the bundle at ``path``; labels: of the bank training will use."""
    stored = _stored(bundle.read(path))
    out.mkdir(parents=True, exist_ok=True)
    codec, speaker = Codec(labels, 0), Speaker(labels, 0)
    for model, prefix, inner in ((codec, "mimi.", codec.mimi), (speaker, "lm.", speaker.lm)):
        fill(inner, prefix, stored)
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, out / (CODEC if model is codec else LM), {"told": '{"steps": 0}'})


@torch.no_grad()
def fill(model: nn.Module, prefix: str, stored: dict[str, Tensor]) -> None:
    """Every value of ``model`` from what a bundle stores under its name."""
    books = {name: m for name, m in model.named_modules() if isinstance(m, Codebook)}
    for name, book in books.items():
        book.embedding_sum.copy_(stored[f"{prefix}{name}.embedding"])
        book.cluster_usage.fill_(1.0)
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] in books:
            continue
        found = stored.get(prefix + name)
        if found is None:
            parts = [stored.get(f"{prefix}{name}.{n}") for n in range(64)]
            found = torch.cat([part for part in parts if part is not None])
        tensor.copy_(found.reshape(tensor.shape))


def _stored(opened: bundle.Bundle) -> dict[str, Tensor]:
    """Every named weight of every graph, in float32."""
    found: dict[str, Tensor] = {}
    for stage in opened.manifest.stages:
        if not stage.graph:
            continue
        model = onnx.load(opened.file(stage.graph))
        for weight in model.graph.initializer:
            value = np.array(onnx.numpy_helper.to_array(weight))
            if value.dtype in (np.float16, np.float32):
                found[weight.name.removesuffix(HALF)] = torch.from_numpy(value).float()
    return found
