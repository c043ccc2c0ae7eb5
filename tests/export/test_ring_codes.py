"""8-bit rings through the twin, against the reference the kernel is held to: the same bits.

Values are not rotated, so theirs are the reference's exactly. A key is: what a library's sine makes
of it may differ in the last place, so its code may be the neighbour where the reference's value
lies on the edge between two, and nowhere else.
"""

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engines.bundle import NEXT, Dtype, RegionSpec, RingSpec, StageSpec, WeightSpec
from engines.clocks import ClockKind, NativeClock, Order
from engines.cuda import DevicePtr, Stream
from engines.golden import draw
from engines.kernels import ring_reference as reference
from engines.kernels.ring_attention import CacheType, RingShape
from engines.program import Bound, Buffer, Step
from engines.ring_launch import RingLauncher, rope_frequency
from export.models import operators as op
from export.models.coded import Coded
from export.models.config import ROPE_MAX_PERIOD
from export.models.streaming import counter
from export.ring_stages import RingStage, Scales, Wires
from export.to_onnx import Weights, graph_bytes
from tests.engines import fake_driver

pytestmark = pytest.mark.torch

Array = np.ndarray[Any, np.dtype[Any]]
CACHES: dict[Dtype, CacheType] = {"int8": CacheType.INT8, "float8e4m3": CacheType.E4M3}
SHAPES = ((1, 64, 6, 1), (2, 64, 4, 2), (1, 128, 3, 1))
"""Heads, head dim, rows of the ring, rows per tick."""
E4M3 = np.concatenate([reference.E4M3_VALUES[:127], -reference.E4M3_VALUES[:127]])
MIDDLES = (E4M3[:126] + E4M3[1:127]) / 2
EDGES = (
    0.0,
    -0.0,
    0.5,
    1.5,
    -2.5,
    126.5,
    127.4,
    -127.5,
    447,
    -448,
    464,
    1e9,
    -1e9,
    2.0**-10,
    1e-30,
)
UNITS = st.one_of(
    st.floats(-600, 600, width=32),
    st.sampled_from(EDGES),
    st.sampled_from(MIDDLES.tolist()),
    st.integers(-130, 130).map(lambda x: x + 0.5),
)
"""Multiples of the scale: anything, what lies between two codes, and what is larger than any."""
NEAR = 1e-5
"""Of a step: what a library's sine and cosine leave uncertain."""


def ring_stage(dtype: Dtype, heads: int, dim: int, rows: int, per_tick: int) -> RingStage:
    clock = NativeClock(ClockKind.RING, 1, str(per_tick), rows, order=Order.MODULO)
    rings = [
        RegionSpec(f"ring.{x}", dtype, (1, rows, heads * dim), clock, in_place=True) for x in "kv"
    ]
    wires = Wires("x", "qkv", "attended")
    position = counter("position", per_tick)
    ones = torch.ones(heads)
    scales = Scales(Coded(dtype, ones, ones), None)
    return RingStage("stage", position, rings, heads, wires, "float32", scales)


@functools.cache
def twin(dtype: Dtype, shape: tuple[int, int, int, int]) -> ort.InferenceSession:
    raw = graph_bytes(ring_stage(dtype, *shape).written(), Weights(Path("unused")))
    return ort.InferenceSession(raw, providers=["CPUExecutionProvider"])


@st.composite
def steps(draw_from: st.DrawFn) -> tuple[tuple[int, int, int, int], dict[str, Array]]:
    shape = draw_from(st.sampled_from(SHAPES))
    heads, dim, rows, per_tick = shape
    scales = draw_from(
        hnp.arrays(np.float32, (2, heads), elements=st.floats(2.0**-20, 64, width=32))
    )
    random = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    units = random.normal(0, 60, (2, per_tick, 3, heads, dim)).astype(np.float32)
    planted = [*EDGES, *draw_from(st.lists(UNITS, max_size=40))]
    for which in (1, 2):  # keys, values
        row = units[:, :, which].reshape(-1)
        row[random.permutation(row.size)[: len(planted)]] = planted
        units[:, :, which] = row.reshape(units[:, :, which].shape)
    ticks = draw_from(hnp.arrays(np.int64, 2, elements=st.integers(0, 4 * rows)))
    x = units.copy()
    x[:, :, 1:] *= scales[:, :, None]
    x[:, :, 0] /= 60 * np.maximum(1, 60 * scales[0][:, None])
    return shape, {"x": x, "position": ticks * per_tick, "scales": scales}


@pytest.mark.parametrize("dtype", ["int8", "float8e4m3"])
@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(case=steps())
def test_a_twin_stores_the_reference_s_codes_and_attends_to_them(
    dtype: Dtype, case: tuple[tuple[int, int, int, int], dict[str, Array]]
) -> None:
    (heads, dim, rows, per_tick), given_ = case
    cache, x, position, scales = CACHES[dtype], given_["x"], given_["position"], given_["scales"]
    ages = (position // per_tick).tolist()
    regions = ring_stage(dtype, *case[0]).regions
    before = [draw(1, region, ages) for region in regions[1:]]
    attended, k, v = twin(dtype, case[0]).run(
        None,
        {
            "qkv": x.reshape(2, -1),
            "position": position,
            "ring.k": before[0],
            "ring.v": before[1],
            "ring.k_scale": scales[:1],
            "ring.v_scale": scales[1:],
        },
    )
    shape = RingShape(cache, heads, heads, dim, rows, per_tick)
    pools = [ring.copy().reshape(2 * rows, heads, dim) for ring in before]
    held = (position, np.arange(2), *pools, *scales, rope_frequency(dim, ROPE_MAX_PERIOD))
    reference.write(shape, x[:, :, 1], x[:, :, 2], *held)
    np.testing.assert_array_equal(v.reshape(pools[1].shape), pools[1])
    odd = k.reshape(pools[0].shape) != pools[0]
    if odd.any():
        _check_neighbours(shape, x[:, :, 1], k.reshape(pools[0].shape), odd, position, scales[0])
        pools[0][odd] = k.reshape(pools[0].shape)[odd]
    assert not odd[~_written(shape, position)].any()
    expected = reference.attend(shape, x[:, :, 0], *held)
    away = np.abs(attended.reshape(expected.shape) - expected)
    assert away.max() <= 1e-5 * np.abs(expected).max() + 1e-30


@pytest.mark.parametrize("dtype", ["int8", "float8e4m3"])
def test_the_kernel_is_given_each_stage_s_scales_and_rows_of_bfloat16(
    dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, random = (2, 64, 4, 1), np.random.default_rng(3)
    heads, dim, rows, _ = shape
    cut = ring_stage(dtype, *shape)
    spec = RingSpec(
        "t", heads, heads, dim, rows, 1, ROPE_MAX_PERIOD, WeightSpec("s", 0, "float32", (2, 2))
    )
    ports = [*cut.spec.inputs], [*cut.spec.outputs]
    for side in ports:  # the kernel takes and gives bfloat16
        side[0] = msgspec.structs.replace(side[0], dtype="bfloat16")
    stages = [
        StageSpec(name, tuple(ports[0]), tuple(ports[1]), builtin="ring_attention", ring=spec)
        for name in ("first", "second")
    ]
    scales = {stage.name: random.uniform(0.01, 0.05, (2, heads)).astype("f4") for stage in stages}
    driver = fake_driver.install(monkeypatch)
    device: Any = fake_driver.FakeDevice(driver)
    launcher = RingLauncher(stages, 2, device, Path(), lambda stage: scales[stage.name])
    bits = (random.normal(0, 2, (2, 3 * heads * dim)).astype("f4").view("u4") >> 16).astype("u2")
    qkv, position = (bits.astype("u4") << 16).view("f4"), np.array([1, 9])
    for stage in stages:
        before = [draw(1, region, position.tolist()) for region in cut.regions[1:]]
        out = np.zeros((2, heads * dim), np.uint16)
        held = {"qkv": bits, "position": position, "ring.k": before[0].copy()}
        held |= {"ring.v": before[1].copy(), "attended": out}
        step = Step(
            stage,
            tuple(Bound(t, Buffer(t.name, 0)) for t in stage.inputs),
            tuple(Bound(t, Buffer(t.name.removesuffix(NEXT), 0)) for t in stage.outputs),
        )
        places = {Buffer(name, 0): DevicePtr(x.ctypes.data) for name, x in held.items()}
        stream = Stream()
        launcher.bind(step, 2, places.__getitem__, stream)()
        stream.synchronize()
        given_ = {"qkv": qkv, "position": position, "ring.k": before[0], "ring.v": before[1]}
        given_ |= {"ring.k_scale": scales[stage.name][:1], "ring.v_scale": scales[stage.name][1:]}
        attended, k, v = twin(dtype, shape).run(None, given_)
        np.testing.assert_array_equal(held["ring.k"], k)
        np.testing.assert_array_equal(held["ring.v"], v)
        np.testing.assert_allclose(
            (out.astype("u4") << 16).view("f4"), attended, rtol=2**-8, atol=1e-6
        )


def _written(shape: RingShape, position: Array) -> Array:
    found = np.zeros((2, shape.capacity), bool)
    for session, first in enumerate(position.tolist()):
        found[session, reference.new_rows(shape, first)] = True
    return found.reshape(-1)


def _check_neighbours(
    shape: RingShape, keys: Array, found: Array, odd: Array, position: Array, scale: Array
) -> None:
    """Codes other than the reference's are those of a value a hair's breadth away."""
    frequency = rope_frequency(shape.head_dim, ROPE_MAX_PERIOD)
    for session, first in enumerate(position.tolist()):
        for p, row in enumerate(reference.new_rows(shape, first)):
            at = session * shape.capacity + row
            size = np.abs(keys[session, p]).reshape(shape.kv_heads, -1, 2).max(-1).repeat(2, -1)
            key = reference.rotate(keys[session, p], first + p, frequency)
            near = [
                reference.store(shape.cache, key + sign * NEAR * size, scale[:, None])
                for sign in (-1, 1)
            ]
            assert ((found[at] == near[0]) | (found[at] == near[1]))[odd[at]].all()


def test_every_code_of_e4m3_comes_back_and_every_tie_goes_to_the_even_one() -> None:
    exact = torch.from_numpy(E4M3.astype(np.float32))
    middles = torch.from_numpy(MIDDLES.astype(np.float32))
    for values in (exact, middles, torch.tensor([449.0, 1e30, -1e30, -0.0])):
        bits = op.to_e4m3(values).numpy()
        np.testing.assert_array_equal(bits, reference.e4m3_bits(values.numpy()))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    np.testing.assert_array_equal(op.of_e4m3(codes).numpy(), reference.E4M3_VALUES)
    halves = torch.tensor([0.5, 1.5, -2.5, 126.5, 127.5, -128.0, -300.0])
    assert op.to_int8(halves).tolist() == [0, 2, -2, 126, 127, -127, -127]
