"""What ring attention should give, in numpy: rows stored bit by bit, attention in float64.

Decides the meaning of the stage that ring_attention.cu implements: which bits a new row is stored
as, which rows a query sees, what the output is. Does not know about warps, launches or devices.
Slow on purpose (a Python loop per session and query): it is compared with, never served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.kernels.ring_attention import PAGE_ROWS, CacheType, RingShape

Array = npt.NDArray[Any]

STORED_DTYPES = {
    CacheType.BFLOAT16: np.uint16,
    CacheType.E4M3: np.uint8,
    CacheType.INT8: np.int8,
    CacheType.FLOAT32: np.float32,
}
"""How stored elements lie in numpy: bit patterns where numpy has no such type."""

ROPE_MAX_PERIOD = 10_000.0  # modules/rope.py in kyutai-labs/moshi


def rope_frequency(head_dim: int, max_period: float = ROPE_MAX_PERIOD) -> npt.NDArray[np.float32]:
    """(D/2,) float32 radians per position of each interleaved pair."""
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    exponent = pairs * np.float32(-np.log(max_period) * 2 / head_dim)
    return np.asarray(np.exp(exponent), np.float32)


def bf16_bits(x: Array) -> npt.NDArray[np.uint16]:
    """Float32 rounded to nearest even bfloat16, as bit patterns."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: Array) -> npt.NDArray[np.float32]:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _e4m3_table() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


E4M3_VALUES = _e4m3_table()


def e4m3_bits(x: Array) -> npt.NDArray[np.uint8]:
    """Float32 rounded to nearest even e4m3, saturating at 448, as bit patterns."""
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x), np.float32(448))
    leading = np.where(size > 0, np.frexp(size)[1] - 1, -6)
    exponent = np.maximum(leading, -6)  # subnormals share the smallest
    steps = np.rint(np.ldexp(size, 3 - exponent))  # 0..16 eighths of 2^exponent
    code = np.where(np.isnan(x), 127, (exponent + 6) * 8 + steps)
    return (code.astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)).astype(np.uint8)


def store(cache: CacheType, x: Array, scale: Array) -> Array:
    """Float32 values -> stored form; ``scale`` broadcasts against ``x``, 8-bit rings only."""
    if cache is CacheType.FLOAT32:
        return np.asarray(x, np.float32)
    if cache is CacheType.BFLOAT16:
        return bf16_bits(x)
    scaled = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    if cache is CacheType.E4M3:
        return e4m3_bits(scaled)
    return np.clip(np.rint(scaled), -127, 127).astype(np.int8)


def values(cache: CacheType, stored: Array, scale: Array) -> npt.NDArray[np.float64]:
    """Stored form -> float64 values."""
    if cache is CacheType.FLOAT32:
        return stored.astype(np.float64)
    if cache is CacheType.BFLOAT16:
        return bf16_values(stored).astype(np.float64)
    plain = E4M3_VALUES[stored] if cache is CacheType.E4M3 else stored
    return plain.astype(np.float64) * np.asarray(scale, np.float64)


def rotate(x: Array, position: int, frequency: Array | None) -> npt.NDArray[np.float32]:
    """(H, D) float32 -> rotated by ``position``, trigonometry in float32."""
    if frequency is None:
        return np.asarray(x, np.float32)
    angle = np.float32(position) * frequency
    cosine, sine = np.cos(angle), np.sin(angle)
    out = np.empty(x.shape, np.float32)
    out[..., 0::2] = x[..., 0::2] * cosine - x[..., 1::2] * sine
    out[..., 1::2] = x[..., 0::2] * sine + x[..., 1::2] * cosine
    return out


def ring_rows(shape: RingShape, slot: int, page_table: Array | None) -> npt.NDArray[np.int64]:
    """(T,) row of the pool that holds each ring row of ``slot``."""
    rows = np.arange(shape.capacity)
    if page_table is None:
        return slot * shape.capacity + rows
    pages = np.asarray(page_table[slot, rows // PAGE_ROWS], np.int64)
    return pages * PAGE_ROWS + rows % PAGE_ROWS


def new_rows(shape: RingShape, position: int) -> list[int]:
    """Ring row of each of the step's P rows."""
    return [(position + p) % shape.capacity for p in range(shape.rows_per_step)]


def write(
    shape: RingShape,
    k_new: Array,
    v_new: Array,
    positions: Array,
    slots: Array,
    k_cache: Array,
    v_cache: Array,
    k_scale: Array,
    v_scale: Array,
    frequency: Array | None,
    page_table: Array | None = None,
) -> None:
    """Store the step's rows.

    k_new, v_new: (B, P, Hkv, D) float32; positions, slots: (B,); k_scale, v_scale: (Hkv,).
    k_cache, v_cache: (rows, Hkv, D) stored form, changed in place.
    """
    for b, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        if slot < 0:
            continue
        pool = ring_rows(shape, slot, page_table)
        for p, row in enumerate(new_rows(shape, position)):
            key = rotate(k_new[b, p], position + p, frequency)
            k_cache[pool[row]] = store(shape.cache, key, k_scale[:, None])
            v_cache[pool[row]] = store(shape.cache, v_new[b, p], v_scale[:, None])


def attend(
    shape: RingShape,
    q: Array,
    positions: Array,
    slots: Array,
    k_cache: Array,
    v_cache: Array,
    k_scale: Array,
    v_scale: Array,
    frequency: Array | None,
    page_table: Array | None = None,
) -> npt.NDArray[np.float64]:
    """Attend over rings that already hold the step's rows; the output before rounding.

    q: (B, P, Hq, D) float32, not yet rotated; the rest as in `write`.
    Returns (B, P, Hq, D) float64; NaN where the slot is negative.
    """
    group = shape.query_heads // shape.kv_heads
    out = np.full(q.shape, np.nan)
    for b, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        if slot < 0:
            continue
        length = min(position + shape.rows_per_step, shape.capacity)
        valid = ring_rows(shape, slot, page_table)[:length]
        written = new_rows(shape, position)
        keys = np.repeat(values(shape.cache, k_cache[valid], k_scale[:, None]), group, axis=1)
        held = np.repeat(values(shape.cache, v_cache[valid], v_scale[:, None]), group, axis=1)
        for p in range(shape.rows_per_step):
            query = rotate(q[b, p], position + p, frequency).astype(np.float64)
            scores = np.einsum("hd,thd->ht", query, keys) / shape.head_dim**0.5
            scores[:, written[p + 1 :]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[b, p] = np.einsum("ht,thd->hd", weights, held)
    return out
