"""Small models of the real topology, with weights from a seed.

`SMALL` is what the committed bundle is made of: 24 kHz, 1,920 samples a frame, 17 streams, the
published delays, 8 depth steps and Mimi's strides, at a width two CPU cores carry easily. `MICRO`
is the same at the smallest width, with rings of 8 and 20 rows, so that a test wraps every ring
many times within seconds.

Every tensor is random, those that training starts at zero or one included, because a test on a
zero tests nothing. Each tensor is drawn from a generator of its own, keyed by seed and name, so
adding one does not change the others; numpy's PCG64 gives the same bits on every machine. Scales
are chosen so that the untrained network is neither silent nor clipping and its tokens vary.

Not here: exporting (`export.build`).
"""

import math
import zlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.checkpoint_text import SPECIAL, seeded_pieces, sentencepiece_model
from export.models.config import (
    LmConfig,
    MimiConfig,
    ModelConfig,
    PromptConfig,
    SamplingConfig,
)
from export.models.lm import LanguageModel
from export.models.mimi import Mimi

SMALL = ModelConfig(
    name="moshi-small",
    mimi=MimiConfig(
        filters=5,
        dimension=48,
        layers=2,
        heads=4,
        feedforward=96,
        context=250,
        codebook_dimension=16,
        bins=128,
        codebooks=8,
    ),
    lm=LmConfig(
        dimension=64,
        layers=3,
        heads=4,
        feedforward=192,
        context=125,
        text_card=64,
        card=128,
        depth_dimension=32,
        depth_layers=2,
        depth_heads=4,  # TensorRT-RTX 1.7.1 fails to build attention of 2 heads at batch 1
        depth_feedforward=96,
    ),
    sampling=SamplingConfig(top_k=32, text_top_k=25, candidates=32),
)

MICRO = ModelConfig(
    name="moshi-micro",
    mimi=MimiConfig(
        filters=2,
        dimension=16,
        layers=2,
        heads=2,
        feedforward=24,
        context=20,
        codebook_dimension=8,
        bins=32,
        codebooks=8,
    ),
    lm=LmConfig(
        dimension=32,
        layers=2,
        heads=2,
        feedforward=132,
        context=8,
        text_card=24,
        card=32,
        depth_dimension=16,
        depth_layers=2,
        depth_heads=2,
        depth_feedforward=48,
    ),
    sampling=SamplingConfig(top_k=12, text_top_k=8, candidates=16),
)

PERSONA_SMALL = replace(
    SMALL,
    name="personaplex-small",
    lm=replace(SMALL.lm, context=250, text_card=128),
    prompt=PromptConfig(silence_codes=None, sine_codes=None),
)
"""`SMALL` that may be told who it is: text ids for every letter, and a window of 20 s."""

PERSONA_MICRO = replace(
    MICRO,
    name="personaplex-micro",
    lm=replace(MICRO.lm, context=48, text_card=128),
    prompt=PromptConfig(silence_codes=None, sine_codes=None),
)
"""The same of `MICRO`: a prompt of 40 frames fits, and its ring wraps within four seconds."""

PIECES = (
    "",  # 0: end of padding
    "",  # 1: beginning of a text
    "",  # 2: end of a text
    "",  # 3: padding
    *"▁a ▁the ▁and ▁to ▁of ▁is ▁it ▁you ▁we ▁yes ▁no ▁not ▁so ▁in ▁on ▁now".split(),
    *"▁m ▁t ▁s ▁b ▁w ▁h ▁r ▁l ▁o ▁e ▁i ▁u".split(),
    *"a e i o u n r s t l d m k y er in an ou ly ing".split(),
    *". , ? ! ▁oh ▁well ▁good ▁day ▁thank ▁please ▁hello ▁bye".split(),
)
"""Text of every id of `SMALL`: 64 of them."""


MODELS = {
    "small": SMALL,
    "micro": MICRO,
    "personaplex-small": PERSONA_SMALL,
    "personaplex-micro": PERSONA_MICRO,
}
"""What `duplexbox export build` knows by name."""

CODEBOOK_SCALE = 2.0
"""Spread of the centroids before division by usage: about that of what they quantise."""

VOICE_FRAMES = 8
"""Of the voices a seeded model comes with."""

GAINS = {
    "encoder.model.0.conv.conv.weight": 8.0,  # speech is near 0.1 rms, the biases are not smaller
    "downsample.conv.conv.conv.weight": 3.0,  # codes vary only if the latent does
    "decoder.model.14.conv.conv.weight": 0.08,  # sound near 0.1 rms, peaks far from clipping
    "decoder.model.14.conv.conv.bias": 0.1,
}
"""By end of name: what a tensor needs beyond one over the root of its inputs."""


def pieces(config: ModelConfig) -> tuple[str, ...]:
    """Text of every id of a small model; as many as it has text tokens."""
    if config.prompt is not None:  # its persona goes through a tokenizer, which has them
        specials = {text for text, _ in SPECIAL}
        return tuple("" if p in specials else p for p in seeded_pieces(config.lm.text_card))
    assert config.lm.text_card <= len(PIECES), (config.lm.text_card, len(PIECES))
    return PIECES[: config.lm.text_card]


def tokenizer(config: ModelConfig) -> bytes:
    """The SentencePiece model of a small model that takes a persona; its pieces are `pieces`."""
    assert config.prompt is not None, config.name
    return sentencepiece_model(seeded_pieces(config.lm.text_card))


def voices(config: ModelConfig) -> dict[str, NDArray[np.float64]]:
    """Two hums, a fifth apart, for a model whose voices mean nothing: (S,) at the codec's rate."""
    rate_hz = config.mimi.sample_rate_hz
    at = np.arange(VOICE_FRAMES * config.mimi.samples_per_frame) / rate_hz
    sway = 0.4 + 0.2 * np.sin(2 * np.pi * 3 * at)
    tones = {"bass": 110.0, "alto": 165.0}
    return {
        name: sway * sum(np.sin(2 * np.pi * n * hz * at) / n for n in range(1, 6))
        for name, hz in tones.items()
    }


def seeded(config: ModelConfig, seed: int) -> tuple[Mimi, LanguageModel]:
    """The codec and the language model of ``config`` with weights from ``seed``, in eval mode."""
    mimi, lm = Mimi(config.mimi), LanguageModel(config.lm)
    with torch.no_grad():
        for model in (mimi, lm):
            for name, tensor in model.state_dict().items():
                tensor.copy_(_draw(name, tensor, seed))
            model.eval()
    mimi.quantizer.prepare()
    return mimi, lm


def parameters(model: nn.Module) -> int:
    """Trained values in a model: parameters, and the buffers its checkpoint keeps."""
    return sum(tensor.numel() for tensor in model.state_dict().values())


def _draw(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Values for one tensor of a checkpoint; the rules go by the checkpoint's names."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = torch.from_numpy(generator.standard_normal(tuple(tensor.shape))).float()
    if name.endswith("_initialized"):
        return torch.ones_like(tensor)
    if name.endswith("cluster_usage"):
        return 1.0 + noise.abs()
    if name.endswith("embedding_sum"):
        return CODEBOOK_SCALE * noise
    if name.endswith(("alpha", "norm1.weight", "norm2.weight")):
        return 1.0 + 0.2 * noise
    gain = next((g for suffix, g in GAINS.items() if name.endswith(suffix)), 1.0)
    if name.endswith("bias"):
        return gain * 0.1 * noise
    if name.endswith("layer_scale_1.scale") or name.endswith("layer_scale_2.scale"):
        return 0.3 + 0.1 * noise
    if "emb" in name:
        return noise
    if ".convtr." in name:
        # two steps of the input overlap in each step of the output
        fan_in = 2 * (1 if tensor.shape[1] == 1 else tensor.shape[0])
    else:
        fan_in = math.prod(tensor.shape[1:])
    return gain / math.sqrt(fan_in) * noise
