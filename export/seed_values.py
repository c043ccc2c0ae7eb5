"""One value of a seeded checkpoint: from seed, tensor name and place alone.

Element j of a tensor is the j-th 16-bit number of a Philox stream whose key is (seed, tensor
name), looked up in a table of 65,536 quantiles of the normal distribution that the tensor's rule
has shifted and scaled. So a value depends on nothing else: not on order, on chunks, on which
tensors were written before a run was killed, nor on how many depth steps follow (PersonaPlex
begins with Moshi's eight). A table has the bits of the file's dtype, so a draw is one lookup.

The rules keep activations near one through every layer, and make codes and tokens vary.

Pure. Not here: which tensors there are (`checkpoint_layout`), files (`seed`).
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.bundle import Dtype

GENERATOR = 1
"""Raised whenever the same seed would give other values."""

PER_COUNTER = 16
"""16-bit numbers from one Philox counter: four words of 64 bits."""
QUANTILES = 1 << 16


def draw(
    seed: int, name: str, shape: tuple[int, ...], dtype: Dtype, first: int, count: int
) -> npt.NDArray[Any]:
    """Values ``first`` to ``first + count`` of a tensor, flat, as its bytes (uint16 or uint32).

    name: fused; shape: of the whole tensor or of a depth step of it, which have the same fan-in.
    """
    table = _table(rule(name, shape), dtype)
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], dtype="<u8")
    counter, skipped = divmod(first, PER_COUNTER)
    words = -(-(skipped + count) // PER_COUNTER) * 4
    stream = np.random.Philox(key=key, counter=counter)
    places = stream.random_raw(words).astype("<u8", copy=False).view("<u2")
    taken: npt.NDArray[Any] = table.take(places[skipped : skipped + count])
    return taken


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a standard normal quantile q: ``offset + scale * q``, or of its size."""

    scale: float
    offset: float = 0.0
    positive: bool = False


GAINS = {
    "text_linear.weight": 2.0,  # logits far enough apart that sampling has something to choose
    "encoder.model.0.conv.conv.weight": 20.0,  # speech is near 0.05 rms, the biases are not smaller
    "encoder.model.14.conv.conv.weight": 5.0,  # the transformer must not drown what was heard
    "downsample.conv.conv.conv.weight": 1.5,  # codes vary only if the latent does
    "decoder.model.14.conv.conv.weight": 0.1,  # sound near 0.1 rms, seldom clipping
    "decoder.model.14.conv.conv.bias": 0.1,
}
"""By end of name: what a tensor needs beyond one over the root of its inputs."""

CODEBOOK_SCALE = 2.0
"""Spread of the centroids before division by usage: about that of what they quantise."""


def rule(name: str, shape: tuple[int, ...]) -> Rule:
    """How a tensor is scaled, by its name; activations stay near one through every layer."""
    gain = next((g for end, g in GAINS.items() if name.endswith(end)), 1.0)
    if name.startswith("linears."):
        gain = 0.5  # the depth transformer has no last norm: its hidden state spreads by about 4
    if name.startswith(("transformer.", "depformer.")) and name.endswith("in_proj_weight"):
        gain = 1.5  # scores spread by about 2: attention looks at some rows, not at all alike
    if name.endswith("_initialized"):
        return Rule(0.0, 1.0)
    if name.endswith("cluster_usage"):
        return Rule(1.0, 1.0, positive=True)
    if name.endswith("embedding_sum"):
        return Rule(CODEBOOK_SCALE)
    if name.endswith((".alpha", ".norm1.weight", ".norm2.weight")):
        return Rule(0.2, 1.0)
    if name.endswith(".scale"):
        return Rule(0.1, 0.3)
    if name.endswith(".bias"):
        return Rule(0.1 * gain)
    if "emb." in name:
        return Rule(1.0)
    fan_in = math.prod(shape[1:])
    if ".convtr." in name:
        # two steps of the input overlap in each step of the output
        fan_in = 2 * (1 if shape[1] == 1 else shape[0])
    return Rule(gain / math.sqrt(fan_in))


@cache
def _quantiles() -> npt.NDArray[np.float64]:
    half = [NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES // 2)]
    return np.array([*half, *(-q for q in reversed(half))])


@cache
def _table(of: Rule, dtype: Dtype) -> npt.NDArray[Any]:
    """(65536,) the values a rule can give, as the bits of the file's dtype."""
    normal = np.abs(_quantiles()) if of.positive else _quantiles()
    wide: npt.NDArray[Any] = (of.offset + of.scale * normal).astype("<f4").view("<u4")
    if dtype == "float32":
        return wide
    assert dtype == "bfloat16", dtype
    # To the nearest, ties to even: half of the last bit kept, minus one where that bit is even.
    nearest: npt.NDArray[Any] = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
    return nearest
