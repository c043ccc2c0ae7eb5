"""Operators the graphs must contain as one node each, run here by plain torch.

Exporting a `cat` of slices or a hand-written norm leaves it to the exporter what appears in the
graph. Where it matters (state written in place, fused norms, no constant weight behind a
Transpose) the modules call these instead; `export.to_onnx` knows the ONNX operator behind each.
Run eagerly they are ordinary torch code, and that is what the parity tests prove.

Not here: which ONNX operator stands for which (`export.to_onnx`).
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as functional
from torch import Tensor

INT8_MOST = 127.0
"""-128 has no counterpart above 0 and is not used."""
E4M3_MOST = 448.0

Function = TypeVar("Function", bound=Callable[..., object])


def _operator(fake: Callable[..., object]) -> Callable[[Function], Function]:
    """Register a function as ``duplexbox::<its name>``; ``fake`` gives the shapes alone."""

    def register(function: Function) -> Function:
        name = f"duplexbox::{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(fake)
        return cast(Function, operator)

    return register


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _linear_shape(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    part = x.new_empty(x.shape[0], x.shape[1] // 2)
    return part, torch.empty_like(part)


def _thirds(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    part = x.new_empty(x.shape[0], x.shape[1] // 3)
    return part, torch.empty_like(part), torch.empty_like(part)


@_operator(_linear_shape)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, I) times (O, I) transposed: (N, O). A Gemm with transB, so no weight is transposed."""
    return functional.linear(x, weight)


def _product_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_operator(_product_shape)
def product(x: Tensor, weight: Tensor) -> Tensor:
    """(N, I) times (I, O): (N, O). For weights that are stored that way round."""
    return x @ weight


@_operator(_linear_shape)
def linear_bias(x: Tensor, weight: Tensor, bias: Tensor, alpha: float) -> Tensor:
    """``alpha`` times (N, I) times (O, I) transposed, plus (O,): (N, O)."""
    return alpha * functional.linear(x, weight) + bias


@_operator(_like_first)
def rms_norm(x: Tensor, alpha: Tensor, eps: float) -> Tensor:
    """(N, C) float32 over its last axis, scaled by alpha (C,) float32."""
    variance = eps + torch.mean(x**2, dim=-1, keepdim=True)
    return x * (alpha * torch.rsqrt(variance))


@_operator(_like_first)
def rotate(x: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> Tensor:
    """Interleaved rotary embedding of x (B, R, H*D) float32 by cosine, sine (B, R, D/2)."""
    pairs = x.reshape(*x.shape[:2], heads, -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cosine, sine = cosine.unsqueeze(2), sine.unsqueeze(2)
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(turned, dim=-1).flatten(2)


@_operator(_like_first)
def ring_write(ring: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Write rows (B, 1, R, C) into ring (B, 1, T, C) from index (B,) on, without wrapping.

    Returns the whole ring. An executor binds both to one address, so nothing is copied.
    """
    at = index.view(-1, 1, 1, 1) + torch.arange(rows.shape[2]).view(1, 1, -1, 1)
    return ring.scatter(2, at.expand_as(rows), rows)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.empty_like(x, dtype=dtype)


@_operator(_as(torch.int8))
def to_int8(x: Tensor) -> Tensor:
    """The nearest of -127 to 127 to float32 values, ties to even."""
    return x.round().clamp(-INT8_MOST, INT8_MOST).to(torch.int8)


@_operator(_as(torch.uint8))
def to_e4m3(x: Tensor) -> Tensor:
    """Bits of the nearest e4m3 to float32 values, ties to even, 448 at most."""
    return x.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)


@_operator(_as(torch.float32))
def of_e4m3(bits: Tensor) -> Tensor:
    """What bits of e4m3 stand for, in float32."""
    return bits.view(torch.float8_e4m3fn).float()


@_operator(_like_first)
def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Every query row (B, R, H*D) sees every key row (B, T, H*D)."""
    return _attention(query, key, value, None, heads)


@_operator(_like_first)
def attend_valid(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, heads: int) -> Tensor:
    """One query row (B, 1, H*D) sees the first valid (B,) int64 key rows."""
    seen = torch.arange(key.shape[1]) < valid.view(-1, 1)
    return _attention(query, key, value, seen[:, None, None], heads)


@_operator(_like_first)
def attend_seen(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, heads: int) -> Tensor:
    """Query row r (B, R, H*D) sees the key rows where seen (B, 1, R, T) bool is set."""
    return _attention(query, key, value, seen, heads)


@_operator(_halves)
def split2(x: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 2C) into two of (N, C)."""
    first, second = x.chunk(2, dim=-1)
    return first.clone(), second.clone()


@_operator(_thirds)
def split3(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, 3C) into three of (N, C)."""
    first, second, third = x.chunk(3, dim=-1)
    return first.clone(), second.clone(), third.clone()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, heads: int
) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:2], heads, -1).transpose(1, 2) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, seen)
    return out.transpose(1, 2).flatten(2)
