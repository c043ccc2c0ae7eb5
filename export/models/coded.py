"""Keys and values in 8 bits: what a ring of `int8` or `float8e4m3` holds for a value.

    code = nearest of value / scale, ties to even, the largest where it would be larger
    value = code * scale                               one scale per head, for keys and for values

Of int8 the codes are -127 to 127, of e4m3 -448 to 448. Keys are rounded once, after they were
turned in float32. `engines.kernels.ring_reference` says the same in numpy, and holds the kernel to
it. float8 is carried as its bits in uint8, which every operator knows.

Not here: which scales (`export.cache_scales`), rings (`transformer`).
"""

from dataclasses import dataclass

from torch import Tensor

from engines.bundle import Dtype
from export.models import operators as op


@dataclass(frozen=True, slots=True)
class Coded:
    """How one layer's rings are kept."""

    dtype: Dtype
    k_scale: Tensor
    """One per head, float32, in any shape."""
    v_scale: Tensor

    def encode_k(self, keys: Tensor) -> Tensor:
        """(B, R, H*D) float32, turned -> codes."""
        return encode(keys, self.k_scale, self.dtype)

    def encode_v(self, values: Tensor) -> Tensor:
        return encode(values, self.v_scale, self.dtype)

    def decode_k(self, codes: Tensor) -> Tensor:
        """Codes (B, T, H*D) -> float32."""
        return decode(codes, self.k_scale, self.dtype)

    def decode_v(self, codes: Tensor) -> Tensor:
        return decode(codes, self.v_scale, self.dtype)


def encode(x: Tensor, scale: Tensor, dtype: Dtype) -> Tensor:
    """(B, R, H*D) float32 over scale (H values) as codes of the same shape."""
    parts = _by_head(x, scale) / scale.reshape(-1, 1)
    codes = op.to_int8(parts) if dtype == "int8" else op.to_e4m3(parts)
    return codes.reshape(_shape(x))


def decode(codes: Tensor, scale: Tensor, dtype: Dtype) -> Tensor:
    """Codes (B, R, H*D) -> float32 of the same shape."""
    plain = codes.float() if dtype == "int8" else op.of_e4m3(codes)
    return (_by_head(plain, scale) * scale.reshape(-1, 1)).reshape(_shape(codes))


def _by_head(x: Tensor, scale: Tensor) -> Tensor:
    heads = scale.numel()
    return x.reshape(-1, heads, x.shape[-1] // heads)


def _shape(x: Tensor) -> list[int]:
    """Of a traced tensor too, whose one symbolic length is then left to be worked out."""
    return [length if isinstance(length, int) else -1 for length in x.shape]
