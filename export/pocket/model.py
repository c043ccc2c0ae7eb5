"""The pocket model's numbers: Moshi's topology at a width that eight calls share two CPU cores.

Same modules, same stages and same exporter as Moshi 7B. Six codebooks of 256 instead of eight of
2,048, a vocabulary of the front desk's words, and windows of 2 s (codec) and 20 s (language model).
"""

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from export.models.config import LmConfig, MimiConfig, ModelConfig, SamplingConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.pocket.world import END_OF_PADDING, PADDING, VOCABULARY

CODEBOOKS = 6

POCKET = ModelConfig(
    name="pocket",
    mimi=MimiConfig(
        filters=16,
        dimension=128,
        layers=2,
        heads=4,
        feedforward=256,
        context=50,
        codebook_dimension=32,
        bins=256,
        codebooks=CODEBOOKS,
        codebooks_used=CODEBOOKS,
    ),
    lm=LmConfig(
        dimension=160,
        layers=6,
        heads=5,
        feedforward=640,
        context=250,
        text_card=64,
        card=256,
        delays=(0, *(0, 1, 1, 1, 1, 1), *(0, 1, 1, 1, 1, 1)),
        depth_codebooks=CODEBOOKS,
        depth_dimension=64,
        depth_layers=2,
        depth_heads=4,
        depth_feedforward=192,
    ),
    sampling=SamplingConfig(
        temperature=0.6, text_temperature=0.5, top_k=24, text_top_k=8, candidates=32
    ),
    silent_ids=(END_OF_PADDING, PADDING),
)

PIECES = (*VOCABULARY, *[""] * (POCKET.lm.text_card - len(VOCABULARY)))
"""Text of every id; those left over are never trained to be said."""


def begun(config: ModelConfig, seed: int) -> tuple[Mimi, LanguageModel]:
    """The modules as training begins: small noise from ``seed``, norms at one, biases at zero."""
    mimi, lm = Mimi(config.mimi), LanguageModel(config.lm)
    with torch.no_grad():
        for model in (mimi, lm):
            for name, tensor in model.state_dict().items():
                tensor.copy_(_first(name, tensor, seed))
    return mimi, lm


def _first(name: str, tensor: Tensor, seed: int) -> Tensor:
    if name.endswith(("_initialized", "cluster_usage", "alpha", "norm1.weight", "norm2.weight")):
        return torch.ones_like(tensor)
    if name.endswith("bias"):
        return torch.zeros_like(tensor)
    if name.endswith("scale"):
        return torch.full_like(tensor, 0.1)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = torch.from_numpy(generator.standard_normal(tuple(tensor.shape))).float()
    if name.endswith("embedding_sum"):
        return noise
    if "emb" in name:
        return 0.05 * noise
    if ".convtr." in name:
        return noise / math.sqrt(2 * (1 if tensor.shape[1] == 1 else tensor.shape[0]))
    if name.endswith("decoder.model.14.conv.conv.weight"):
        noise = 0.1 * noise  # speech is quiet
    gain = 0.5 if name.endswith(("linear_out.weight", "out_proj.weight")) else 1.0
    gain = 0.3 if name.startswith(("linears", "text_linear")) else gain
    return gain * noise / math.sqrt(math.prod(tensor.shape[1:]))
