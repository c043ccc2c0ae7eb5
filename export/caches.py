"""How a bundle keeps the keys and values of its language model, and the scales of 8-bit rings.

    as the model    rings of the model's own dtype, no scales
    8 bits          rings of int8 or float8e4m3 and a file of scales: float32, layer after layer,
                    of each the keys' heads, then the values' heads

The codec's rings are float32 in every bundle: they are a thousandth of a session's bytes, and one
flipped code of the codec is heard. Not here: where scales come from (`cache_scales`), what an
8-bit ring holds (`models.coded`).
"""

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from engines import ring_stage
from engines.bundle import Bundle, Dtype, RegionSpec, WeightSpec
from export.models.coded import Coded

CacheName = Literal["bf16", "e4m3", "int8"]
"""As the command line has it."""
DTYPES: dict[CacheName, Dtype] = {"bf16": "bfloat16", "e4m3": "float8e4m3", "int8": "int8"}
LARGEST_CODE: dict[Dtype, float] = {"float8e4m3": 448.0, "int8": 127.0}
SCALES = "cache/scales.bin"


@dataclass(frozen=True, slots=True)
class Caches:
    """8-bit rings of all layers of a language model."""

    dtype: Dtype
    scales: Tensor
    """(layers, 2, heads) float32, of keys and of values."""

    def coded(self, layer: int) -> Coded:
        return Coded(self.dtype, self.scales[layer, 0], self.scales[layer, 1])

    def every_coded(self) -> list[Coded]:
        return [self.coded(layer) for layer in range(len(self.scales))]

    def place(self, layer: int) -> WeightSpec:
        """Of one layer's scales in the bundle."""
        _, both, heads = self.scales.shape
        return WeightSpec(SCALES, layer * both * heads * 4, "float32", (both, heads))

    def file(self) -> bytes:
        """What `SCALES` holds."""
        raw: bytes = self.scales.numpy().astype("<f4").tobytes()
        return raw


def kept(region: RegionSpec, caches: Caches | None) -> RegionSpec:
    """A ring of the language model as ``caches`` has it."""
    return region if caches is None else msgspec.structs.replace(region, dtype=caches.dtype)


def caches_of(bundle: Bundle) -> Caches | None:
    """The 8-bit rings of a bundle; None: it has none. Raises `BundleError`."""
    found = [
        (stage, scales)
        for stage in bundle.manifest.stages
        if stage.ring and (scales := ring_stage.read_scales(bundle, stage)) is not None
    ]
    if not found:
        return None
    every = torch.stack([torch.from_numpy(scales) for _, scales in found])
    return Caches(ring_stage.cache_of(found[0][0]), every)
