"""The numpy reference of ring attention against a naive one that keeps every row in order.

The naive one has no ring: it keeps a session's rows in a list and lets each query see the rows
that upstream's ring would still hold. The stored forms are checked against their definition.
"""

from __future__ import annotations

import numpy as np
import pytest

from engines.kernels import ring_reference as ref
from engines.kernels.ring_attention import CacheType, RingShape


def small(cache: CacheType, capacity: int, rows_per_step: int = 1) -> RingShape:
    return RingShape(cache, 4, 2, 64, capacity=capacity, rows_per_step=rows_per_step)


def naive_output(
    q: np.ndarray, keys: list[np.ndarray], held: list[np.ndarray], position: int, capacity: int
) -> np.ndarray:
    """One query (Hq, D) at ``position``; keys and held: every row of the session so far, (Hkv, D).

    All rows of the step are in the ring already, so the oldest it holds is len(keys) - capacity.
    """
    oldest = max(0, len(keys) - capacity)
    heads, dim = q.shape
    out = np.zeros((heads, dim))
    for head in range(heads):
        kv_head = head // (heads // keys[0].shape[0])
        total = 0.0
        for row in range(oldest, position + 1):
            score = sum(
                float(a) * float(b) for a, b in zip(q[head], keys[row][kv_head], strict=True)
            )
            weight = np.exp(score / dim**0.5)
            total += weight
            out[head] += weight * held[row][kv_head].astype(np.float64)
        out[head] /= total
    return out


@pytest.mark.parametrize("cache", list(CacheType))
@pytest.mark.parametrize("rows_per_step", [1, 2, 3])
def test_a_ring_equals_a_list_of_all_rows_through_the_wrap(
    cache: CacheType, rows_per_step: int
) -> None:
    shape = small(cache, 7, rows_per_step)
    rng = np.random.default_rng(cache * 10 + rows_per_step)
    scale = np.array([0.03, 0.05], np.float32)
    frequency = ref.rope_frequency(shape.head_dim)
    slots = np.array([1, 0])
    pool = np.zeros((2 * 7, 2, 64), ref.STORED_DTYPES[cache])
    k_cache, v_cache = pool.copy(), pool.copy()
    keys: list[list[np.ndarray]] = [[], []]
    held: list[list[np.ndarray]] = [[], []]
    for step in range(8):
        # The second session is two steps younger: rings of different ages in one batch.
        positions = np.array([step, max(0, step - 2)]) * rows_per_step
        q, k, v = (
            rng.normal(size=(2, rows_per_step, heads, 64)).astype(np.float32) for heads in (4, 2, 2)
        )
        live = slots if step >= 2 else np.array([1, -1])
        ref.write(shape, k, v, positions, live, k_cache, v_cache, scale, scale, frequency)
        out = ref.attend(shape, q, positions, live, k_cache, v_cache, scale, scale, frequency)
        for b in range(2 if step >= 2 else 1):
            for p in range(rows_per_step):
                rotated = ref.rotate(k[b, p], int(positions[b]) + p, frequency)
                for rows, x in ((keys, rotated), (held, v[b, p])):
                    stored = ref.store(cache, x, scale[:, None])
                    rows[b].append(ref.values(cache, stored, scale[:, None]))
            for p in range(rows_per_step):
                at = int(positions[b]) + p
                query = ref.rotate(q[b, p], at, frequency)
                expected = naive_output(query, keys[b], held[b], at, shape.capacity)
                np.testing.assert_allclose(out[b, p], expected, rtol=1e-9, atol=1e-12)
        assert np.isnan(out[1]).all() == (step < 2)


def test_the_first_of_two_rows_sees_one_row_less_after_the_wrap() -> None:
    shape = RingShape(CacheType.FLOAT32, 1, 1, 64, capacity=4, rows_per_step=2)
    ones = np.ones(1, np.float32)
    pool = np.zeros((4, 1, 64), np.float32)
    k_cache, v_cache = pool.copy(), pool.copy()
    zero = np.zeros((1, 2, 1, 64), np.float32)  # equal scores: the output is the mean row number
    for position in (0, 2, 4):
        rows = np.broadcast_to(np.arange(position, position + 2)[:, None, None], (1, 2, 1, 64))
        at, slots = np.array([position]), np.array([0])
        ref.write(
            shape, zero, rows.astype(np.float32), at, slots, k_cache, v_cache, ones, ones, None
        )
    out = ref.attend(shape, zero, np.array([4]), np.array([0]), k_cache, v_cache, ones, ones, None)
    assert out[0, :, 0, 0].tolist() == [np.mean([2, 3, 4]), np.mean([2, 3, 4, 5])]


def test_pages_hold_what_slots_hold() -> None:
    shape = small(CacheType.BFLOAT16, 600)
    rng = np.random.default_rng(3)
    scale = np.ones(2, np.float32)
    slots, positions = np.array([0, 1]), np.array([900, 130])
    k, v = (ref.bf16_bits(rng.normal(size=(1200, 2, 64))) for _ in range(2))
    q = rng.normal(size=(2, 1, 4, 64)).astype(np.float32)
    table = np.array([[4, 0, 2], [1, 5, 3]])
    paged_k, paged_v = (np.zeros((6 * 256, 2, 64), np.uint16) for _ in range(2))
    for slot in range(2):
        rows = ref.ring_rows(shape, slot, table)
        paged_k[rows], paged_v[rows] = k[slot * 600 :][:600], v[slot * 600 :][:600]
    whole = ref.attend(shape, q, positions, slots, k, v, scale, scale, None)
    paged = ref.attend(shape, q, positions, slots, paged_k, paged_v, scale, scale, None, table)
    assert np.array_equal(whole, paged)


def test_e4m3_is_the_nearest_value_ties_to_even_saturating() -> None:
    finite = np.array(range(127))
    table = ref.E4M3_VALUES[finite].astype(np.float64)
    assert table[-1] == 448
    assert np.array_equal(ref.e4m3_bits(ref.E4M3_VALUES[finite]), finite)
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    even = np.where(finite[:-1] % 2 == 0, finite[:-1], finite[1:])
    assert np.array_equal(ref.e4m3_bits(middles), even)
    assert np.array_equal(ref.e4m3_bits(np.nextafter(middles, np.float32(1e9))), finite[1:])
    assert np.array_equal(ref.e4m3_bits(np.nextafter(middles, np.float32(0))), finite[:-1])
    assert ref.e4m3_bits(np.array([1e9, -1e9, np.inf, -0.0], np.float32)).tolist() == [
        126,
        254,
        126,
        128,
    ]


def test_bfloat16_is_the_nearest_value_ties_to_even() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=10_000).astype(np.float32)
    x[:100] = ref.bf16_values(ref.bf16_bits(x[:100])) * np.float32(1 + 2**-9)
    got = ref.bf16_bits(x)
    low = (x.view(np.uint32) >> 16).astype(np.uint16)
    below, above = ref.bf16_values(low), ref.bf16_values(low + np.uint16(1))
    near_below = np.abs(x - below) < np.abs(above - x)
    tie = np.abs(x - below) == np.abs(above - x)
    expected = np.where(near_below | (tie & (low % 2 == 0)), low, low + 1)
    assert np.array_equal(got, expected)
    assert np.isnan(ref.bf16_values(ref.bf16_bits(np.array([np.nan], np.float32)))).all()
