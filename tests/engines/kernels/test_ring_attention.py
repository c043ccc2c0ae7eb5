"""Ring attention on a machine without a GPU: launch plans, the ABI, and that it compiles."""

from __future__ import annotations

import ctypes

import pytest

from engines.kernels import nvrtc
from engines.kernels.ring_attention import (
    SOURCE,
    CacheType,
    RingParams,
    RingShape,
    RingShapeError,
    RingTuning,
    Spread,
    choose_spread,
    plan_launches,
    ring_params,
)

needs_compiler = pytest.mark.skipif(
    not nvrtc.is_installed(),
    reason="needs NVRTC: pip install 'cuda-bindings==13.0.*' 'nvidia-cuda-nvrtc==13.0.*'",
)

MOSHI = RingShape(CacheType.BFLOAT16, 32, 32, 128, capacity=3000)


def test_one_session_takes_narrow_launches_and_many_take_wide_ones() -> None:
    assert choose_spread(MOSHI, 1, multiprocessors=132).narrow
    assert choose_spread(MOSHI, 64, multiprocessors=132) == Spread(False, 1)


def test_few_sessions_fill_one_wave_or_leave_no_short_last_one() -> None:
    for batch in range(2, 16):
        spread = choose_spread(MOSHI, batch, multiprocessors=132)
        assert not spread.narrow
        waves = batch * 32 * -(-12 // spread.segments_per_warp) / (132 * 8)
        assert waves <= 1 or waves % 1 == 0 or waves % 1 > 1 / 3, (batch, spread)


def test_a_launch_covers_every_segment_of_every_head_of_every_session() -> None:
    (name, launch), *rest = plan_launches(MOSHI, 5, Spread(False, 5))
    assert (name, rest) == ("ring_attention_wide", [])
    assert launch.grid == (5 * 3 * 32 // 2, 1, 1)
    (name, launch), *rest = plan_launches(MOSHI, 5, Spread(narrow=True))
    assert (name, rest) == ("ring_attention_narrow", [])
    assert launch.grid == (5 * 12 * 32, 1, 1)
    assert launch.block == (4 * 32, 1, 1)


def test_more_than_four_query_rows_of_a_head_are_written_by_a_launch_of_their_own() -> None:
    shape = RingShape(CacheType.E4M3, 16, 2, 128, capacity=512)
    names = [name for name, _ in plan_launches(shape, 3, Spread(narrow=True))]
    assert names == ["ring_write", "ring_attention_narrow"]
    assert shape.query_groups == 2
    assert ring_params(shape, 3).write_rows == 0
    assert ring_params(MOSHI, 3).write_rows == 1


def test_parameters_lie_where_the_kernel_reads_them() -> None:
    # ring_rows.cuh asserts the same size; offsets of one field of each kind pin the order.
    assert ctypes.sizeof(RingParams) == 192
    offsets = {field[0]: getattr(RingParams, field[0]).offset for field in RingParams._fields_}
    assert offsets["arrivals"] == 104
    assert offsets["slot_stride_bytes"] == 112
    assert offsets["piece_gap_bytes"] == 120
    assert offsets["row_stride_bytes"] == 128
    assert offsets["score_scale"] == 188


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(head_dim=96), "head dim is 96"),
        (dict(kv_heads=5), "32 query heads do not divide among 5"),
        (dict(rows_per_step=5), "5 rows per step"),
        (dict(rows_per_step=2, capacity=1), "in a ring of 1"),
        (dict(tuning=RingTuning(segment_rows=96)), "segments of 96 rows"),
    ],
)
def test_a_ring_that_the_kernel_cannot_serve_is_refused(change: dict[str, int], said: str) -> None:
    plain = dict(cache=CacheType.BFLOAT16, query_heads=32, kv_heads=32, head_dim=128, capacity=3000)
    with pytest.raises(RingShapeError, match=said):
        RingShape(**(plain | change))  # type: ignore[arg-type]


COMPILED = [
    RingShape(CacheType.BFLOAT16, 32, 32, 128, capacity=3000),
    RingShape(CacheType.E4M3, 32, 32, 128, capacity=3000),
    RingShape(CacheType.INT8, 8, 2, 64, capacity=3000),
    RingShape(CacheType.FLOAT32, 8, 8, 64, capacity=250, rows_per_step=2),
]
EVERYWHERE = (CacheType.BFLOAT16, CacheType.E4M3)
"""Caches of models that are served; of the others, only the oldest and newest GPU in minutes."""
PAIRS = [
    pytest.param(
        shape,
        target,
        id=f"{shape.cache.name}-{target}",
        marks=pytest.mark.slow
        if shape.cache in EVERYWHERE or target in (nvrtc.TARGETS[0], nvrtc.TARGETS[-1])
        else pytest.mark.soak,
    )
    for shape in COMPILED
    for target in nvrtc.TARGETS
]


@needs_compiler
@pytest.mark.parametrize(("shape", "target"), PAIRS)
def test_the_kernel_compiles_without_a_gpu(shape: RingShape, target: str) -> None:
    compiled = nvrtc.compile_source(SOURCE, shape.definitions(), target)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert f".target {target}".encode() in compiled.ptx
    assert compiled.log.strip("\0 \n") == ""


@needs_compiler
def test_a_kernel_that_does_not_compile_says_where() -> None:
    broken = MOSHI.definitions() | {"RING_HEAD_DIM": "no_such_number"}
    with pytest.raises(nvrtc.DoesNotCompile, match="no_such_number"):
        nvrtc.compile_source(SOURCE, broken, "sm_90")
