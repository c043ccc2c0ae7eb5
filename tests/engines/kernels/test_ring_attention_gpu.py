"""Ring attention on a GPU, against float64 and against itself.

Output tolerance: half a bfloat16 step of the output plus 2e-4 of the largest |v| (float32 rings:
1e-5 of it). That is tighter than rounding q or the probabilities to bfloat16 would allow.

RING_RANDOM_SHAPES sets how many random shapes are tried; RING_FRESH=1 gives every array its own
allocation, for compute-sanitizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engines import cuda
from engines.kernels import ring_reference as ref
from engines.kernels.ring_attention import CacheType, RingShape, Spread
from tests.engines.kernels.ring_rig import POISON, Array, Case, RingRig, as_input, random_case

pytestmark = pytest.mark.gpu

SPREADS = (Spread(narrow=True), Spread(False, 1), Spread(False, 2), Spread(False, 5))
RANDOM_SHAPES = int(os.environ.get("RING_RANDOM_SHAPES", "1000"))


@pytest.fixture(scope="module")
def rig() -> Iterator[RingRig]:
    rig = RingRig(fresh="RING_FRESH" in os.environ)
    yield rig
    rig.stream.close()
    rig.device.close()


def value(shape: RingShape, bits: Array) -> Array:
    if shape.cache is CacheType.FLOAT32:
        return bits.astype(np.float64)
    return ref.bf16_values(bits).astype(np.float64)


def same_bits(x: Array, y: Array) -> bool:
    return bool(np.array_equal(x.view(np.uint8), y.view(np.uint8)))


def check_rows(case: Case, k_cache: Array, v_cache: Array) -> None:
    """What the kernel stored is what the reference stores, one step of rounding apart at most."""
    k, v = case.k_cache.copy(), case.v_cache.copy()
    ref.write(
        case.shape, case.k_new, case.v_new, case.positions, case.slots, k, v,
        case.k_scale, case.v_scale, case.frequency, case.page_table,
    )  # fmt: skip
    assert same_bits(v, v_cache)
    if case.shape.cache is CacheType.FLOAT32:
        # Sine and cosine are not the same code: a few units in the last place.
        np.testing.assert_allclose(k_cache, k, rtol=0, atol=2e-6)
        return
    different = np.flatnonzero(k.view(np.uint8) != k_cache.view(np.uint8))
    new = case.k_new.size * k.itemsize
    assert len(different) <= 2 + 0.01 * new, (len(different), new)
    if case.shape.cache is CacheType.BFLOAT16:
        # A difference of two products can be as small as what sine and cosine differ by.
        k, k_cache = ref.bf16_values(k), ref.bf16_values(k_cache)
        changed = np.abs(np.nan_to_num(k) - np.nan_to_num(k_cache))
        assert (changed <= np.abs(np.nan_to_num(k)) * 2.0**-7 + 2e-6).all(), changed.max()
        return
    step = np.abs(k.view(np.int8).astype(int) - k_cache.view(np.int8).astype(int)).max()
    assert step <= 1


def check_output(case: Case, bits: Array, k_cache: Array, v_cache: Array) -> float:
    """Returns ‖out - expected‖ / ‖expected‖."""
    expected = case.expected(k_cache, v_cache)
    live = case.slots >= 0
    got, expected = value(case.shape, bits)[live], expected[live]
    largest = np.abs(expected).max()
    if case.shape.cache is CacheType.FLOAT32:
        bound = np.full(expected.shape, 1e-5 * max(1.0, largest))
    else:
        bound = np.abs(expected) * 2.0**-8 + 2e-4 * max(0.1, largest)
    worst = np.abs(got - expected) - bound
    assert (worst <= 0).all(), (case.shape, case.positions, float(np.nanmax(worst)))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def check(rig: RingRig, case: Case) -> float:
    """Every spread against the reference and each other; returns the relative error."""
    first, k_cache, v_cache = rig.run(case, SPREADS[0])
    for spread in SPREADS[1:]:
        again, again_k, again_v = rig.run(case, spread)
        assert same_bits(first, again), (case.shape, spread)
        assert same_bits(k_cache, again_k)
        assert same_bits(v_cache, again_v)
    check_rows(case, k_cache, v_cache)
    return check_output(case, first, k_cache, v_cache)


@pytest.mark.parametrize("cache", list(CacheType))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_age_of_a_long_ring_in_one_batch(
    rig: RingRig, cache: CacheType, head_dim: int
) -> None:
    shape = RingShape(cache, 4, 4, head_dim, capacity=3000)
    ages = [0, 1, 63, 64, 255, 256, 257, 1500, 2999, 3000, 3001, 5999, 6000, 45_000]
    case = random_case(np.random.default_rng(1), shape, np.array(ages), slots=16)
    assert check(rig, case) < (2e-6 if cache is CacheType.FLOAT32 else 2.5e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_codec_advances_two_rows_through_the_wrap(rig: RingRig, head_dim: int) -> None:
    shape = RingShape(CacheType.FLOAT32, 8, 8, head_dim, capacity=250, rows_per_step=2)
    ages = np.array([0, 2, 30, 62, 126, 246, 248, 250, 252, 500, 998, 90_000])
    case = random_case(np.random.default_rng(2), shape, ages, slots=12)
    assert check(rig, case) < 2e-6


@pytest.mark.parametrize("cache", [CacheType.BFLOAT16, CacheType.E4M3, CacheType.INT8])
def test_bits_do_not_depend_on_the_batch_the_slot_or_the_page(
    rig: RingRig, cache: CacheType
) -> None:
    shape = RingShape(cache, 4, 4, 128, capacity=3000)
    rng = np.random.default_rng(3)
    case = random_case(rng, shape, rng.integers(0, 6000, 64), slots=64)
    whole, *_ = rig.run(case, None, replays=1000)
    for rows in (list(range(7)), [63], [5], list(rng.permutation(64))):
        for spread in SPREADS:
            part, *_ = rig.run(case.only(rows), spread)
            assert same_bits(part, whole[rows])

    table = rng.permutation(70 * 12).reshape(70, 12)
    slots = rng.permutation(70)[:64]
    pools = []
    for pool in (case.k_cache, case.v_cache):
        paged = np.full((70 * 12 * 256, *pool.shape[1:]), pool[0, 0, 0], pool.dtype)
        for old, new in zip(case.slots.tolist(), slots.tolist(), strict=True):
            paged[ref.ring_rows(shape, new, table)] = pool[ref.ring_rows(shape, old, None)]
        pools.append(paged)
    moved = Case(
        shape, case.q, case.k_new, case.v_new, case.positions, slots, pools[0], pools[1],
        case.k_scale, case.v_scale, case.frequency, table,
    )  # fmt: skip
    paged_bits, *_ = rig.run(moved, None)
    assert same_bits(paged_bits, whole)


@pytest.mark.parametrize("cache", list(CacheType))
@pytest.mark.parametrize("piece", [64, 128, 256])
def test_bits_do_not_depend_on_how_a_ring_is_cut_into_pieces(
    rig: RingRig, cache: CacheType, piece: int
) -> None:
    shape = RingShape(cache, 4, 4, 128, capacity=1500)
    rng = np.random.default_rng(4)
    case = random_case(rng, shape, rng.integers(0, 4000, 20), slots=20)
    expected, *stored = rig.run(case, None)
    places = rng.permutation(22)[:20]
    pieces = -(-shape.capacity // piece)
    rows = np.arange(shape.capacity)
    spread_rows = rows // piece * 3 * piece + rows % piece  # two other rings in between
    pools = []
    for pool in (case.k_cache, case.v_cache):
        apart = np.full((22 * pieces * 3 * piece, *pool.shape[1:]), POISON[cache], pool.dtype)
        for old, new in zip(case.slots.tolist(), places.tolist(), strict=True):
            apart[new * pieces * 3 * piece + spread_rows] = pool[ref.ring_rows(shape, old, None)]
        pools.append(apart)
    lie = {
        "slot_stride_bytes": pieces * 3 * piece * shape.row_bytes,
        "piece_shift": piece.bit_length() - 1,
        "piece_gap_bytes": 2 * piece * shape.row_bytes,
    }
    cut = replace(case, slots=places, k_cache=pools[0], v_cache=pools[1], lie=tuple(lie.items()))
    for spread in (None, *SPREADS):
        bits, *caches = rig.run(cut, spread)
        assert same_bits(bits, expected)
        for found, before in zip(caches, stored, strict=True):
            for old, new in zip(case.slots.tolist(), places.tolist(), strict=True):
                mine = found[new * pieces * 3 * piece + spread_rows]
                assert same_bits(mine, before[ref.ring_rows(shape, old, None)])


@pytest.mark.parametrize("spread", SPREADS[:3])
def test_a_thousand_replays_give_the_same_bits(rig: RingRig, spread: Spread) -> None:
    shape = RingShape(CacheType.BFLOAT16, 32, 32, 128, capacity=1024)
    rng = np.random.default_rng(4)
    case = random_case(rng, shape, rng.integers(0, 2000, 7), slots=7)
    rig.run(case, spread, replays=1000)


@pytest.mark.parametrize("cache", [CacheType.FLOAT32, CacheType.INT8])
def test_one_captured_graph_serves_every_age(rig: RingRig, cache: CacheType) -> None:
    """Two sessions of different ages live through the wrap; only device data changes."""
    shape = RingShape(cache, 4, 2, 64, capacity=150, rows_per_step=2)
    rng = np.random.default_rng(6)
    case = random_case(rng, shape, np.array([0, 20]), slots=2)
    placed, kernels = rig.put(case), rig.kernels(shape)
    params = placed.params
    graph = rig.stream.capture(lambda: kernels.launch(params, rig.stream))
    for step in range(100):
        now = replace(
            random_case(rng, shape, case.positions + 2 * step, slots=2),
            slots=case.slots, k_scale=case.k_scale, v_scale=case.v_scale,
        )  # fmt: skip
        cuda.write_device(params.positions, now.positions.astype(np.int64).tobytes())
        for pointer, x in ((params.q, now.q), (params.k_new, now.k_new), (params.v_new, now.v_new)):
            cuda.write_device(pointer, as_input(shape, x).tobytes())
        before_k = rig.read(params.k_cache, case.k_cache)
        before_v = rig.read(params.v_cache, case.v_cache)
        graph.replay(rig.stream)
        rig.stream.synchronize()
        k_cache = rig.read(params.k_cache, case.k_cache)
        v_cache = rig.read(params.v_cache, case.v_cache)
        check_rows(replace(now, k_cache=before_k, v_cache=before_v), k_cache, v_cache)
        check_output(now, rig.read(params.out, placed.out_like), k_cache, v_cache)
    graph.close()


def test_an_idle_row_is_left_alone(rig: RingRig) -> None:
    shape = RingShape(CacheType.BFLOAT16, 8, 8, 128, capacity=300)
    case = random_case(np.random.default_rng(5), shape, np.array([10, 400, 290]), slots=3)
    slots = case.slots.copy()
    slots[1] = -1
    idle = replace(case, slots=slots)
    for spread in SPREADS:
        out, k_cache, v_cache = rig.run(idle, spread)
        assert (out[1] == 0xFFFF).all()
        check_output(idle, out, k_cache, v_cache)
        check_rows(idle, k_cache, v_cache)


@pytest.mark.parametrize("cache", list(CacheType))
def test_random_shapes(rig: RingRig, cache: CacheType) -> None:
    rng = np.random.default_rng(100 + cache)
    errors = []
    for _ in range(RANDOM_SHAPES // len(CacheType)):
        group = int(rng.choice([1, 1, 2, 4, 8]))
        capacity = int(rng.choice([4, 17, 63, 64, 65, 250, 256, 257, 400, 700]))
        kv_heads = int(rng.integers(1, 6))
        shape = RingShape(
            cache,
            kv_heads * group,
            kv_heads,
            int(rng.choice([64, 128])),
            capacity,
            rows_per_step=int(rng.integers(1, 5)),
        )
        batch = int(rng.integers(1, 6))
        ages = rng.choice(
            [0, 1, capacity - 1, capacity, capacity + 1, *rng.integers(0, 3 * capacity, 5)], batch
        )
        case = random_case(
            rng,
            shape,
            np.maximum(ages, 0),
            slots=batch + int(rng.integers(0, 3)),
            paged=bool(rng.integers(2)),
            rotated=bool(rng.integers(4)),
            size=float(rng.choice([0.1, 1.0, 5.0])),
        )
        errors.append(check(rig, case))
        row = int(rng.integers(batch))
        whole, *_ = rig.run(case, None)
        alone, *_ = rig.run(case.only([row]), None)
        assert same_bits(alone[0], whole[row])
    assert np.mean(errors) < (1e-6 if cache is CacheType.FLOAT32 else 2e-3)
