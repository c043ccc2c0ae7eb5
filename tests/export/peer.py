"""The published PyPI package `moshi`, built from our configuration and loaded with our weights.

Loading is part of the proof: the package accepts our state dictionaries strictly, in the fused
layout of the published checkpoints. Install it beside torch 2.13 with

    pip install --no-deps moshi==0.2.13
    pip install einops 'huggingface-hub<1' sentencepiece sphn tqdm
"""

import importlib
import os
from typing import Any

import torch

from export.models.config import LmConfig, MimiConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi

os.environ.setdefault("NO_TORCH_COMPILE", "1")  # read when the package is imported

loaders: Any = importlib.import_module("moshi.models.loaders")
package: Any = importlib.import_module("moshi.models.lm")


def peer_mimi(mimi: Mimi) -> Any:
    """The package's codec with the weights of ours."""
    config: MimiConfig = mimi.config
    seanet = dict(loaders._seanet_kwargs, dimension=config.dimension, n_filters=config.filters)
    quantizer = {
        "dimension": config.codebook_dimension,
        "n_q": config.codebooks,
        "bins": config.bins,
        "input_dimension": config.dimension,
        "output_dimension": config.dimension,
    }
    transformer = dict(
        loaders._transformer_kwargs,
        d_model=config.dimension,
        num_heads=config.heads,
        num_layers=config.layers,
        context=config.context,
        dim_feedforward=config.feedforward,
        input_dimension=config.dimension,
        output_dimensions=[config.dimension],
    )
    parts = {"seanet": seanet, "quantizer": quantizer, "transformer": transformer}
    model = loaders.get_mimi(
        None, loaders._mimi_config | parts, num_codebooks=config.codebooks_used
    )
    model.load_state_dict(mimi.state_dict())
    return model.eval()


def peer_lm(lm: LanguageModel) -> Any:
    """The package's greedy `LMGen` with the weights of our language model."""
    config: LmConfig = lm.config
    kwargs = dict(
        loaders._lm_kwargs,
        dim=config.dimension,
        text_card=config.text_card,
        n_q=config.audio_streams,
        dep_q=config.depth_codebooks,
        card=config.card,
        num_heads=config.heads,
        num_layers=config.layers,
        hidden_scale=config.feedforward / config.dimension,
        context=config.context,
        depformer_dim=config.depth_dimension,
        depformer_dim_feedforward=config.depth_feedforward,
        depformer_num_heads=config.depth_heads,
        depformer_num_layers=config.depth_layers,
        depformer_context=config.depth_codebooks,
        delays=list(config.delays),
    )
    model = package.LMModel(dtype=torch.float32, **kwargs)
    model.load_state_dict(lm.state_dict())
    return package.LMGen(model.eval(), use_sampling=False, support_out_of_sync=True, check=True)
