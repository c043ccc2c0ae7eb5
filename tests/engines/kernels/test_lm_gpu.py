"""The language model's kernels on a GPU: against float64, and their bits against each other.

Tolerance: three steps of the element, as roundings may go the other way and be added to or gated;
a step is 2^-8 of a bfloat16's value, and for float32 what sums of that length lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import pytest

from engines.bundle import Dtype, StageSpec, TensorSpec
from engines.kernels import depth, gated
from engines.kernels import lm_reference as ref
from engines.kernels.linear_choice import CLUSTER, FEW, TILES, Finish, Product, few, many, wide
from tests.engines.kernels.lm_rig import (
    Array,
    LmRig,
    depth_stage,
    draw,
    draw_weights,
    tensor,
    with_weights,
)

pytestmark = pytest.mark.gpu

STEP = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
BATCHES = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 96, 128, 160, 161)
HALVES: tuple[Dtype, ...] = ("bfloat16", "float16")
SHAPES = (
    Product(1056, 1024),
    Product(160, 2816, Finish.ADD),
    Product(704, 512, Finish.GATE),
    Product(520, 4096, Finish.FLOAT),
    Product(72, 192),
    Product(24, 64, Finish.GATE),
)


@pytest.fixture(scope="module")
def rig() -> Iterator[LmRig]:
    rig = LmRig()
    yield rig
    assert rig.is_clean()
    rig.close()


def drawn(dtype: Dtype, product: Product, batch: int) -> tuple[Array, Array, Array | None]:
    rng = np.random.default_rng(product.outputs + product.inputs)
    height = product.outputs * (2 if product.finish is Finish.GATE else 1)
    x = draw(dtype, (batch, product.inputs), rng, 1.0)
    w = draw(dtype, (height, product.inputs), rng, product.inputs**-0.5)
    add = draw(dtype, (batch, product.outputs), rng, 1.0)
    return x, w, add if product.finish is Finish.ADD else None


def near(dtype: Dtype, found: Array, expected: Array, add: Array | None) -> bool:
    """What is added may cancel the sum, not the rounding of either."""
    scale = np.maximum(np.abs(expected), 1)
    if add is not None:
        scale = np.maximum(scale, np.abs(ref.values(add)))
    return bool((np.abs(ref.values(found) - expected) <= 3 * STEP[dtype] * scale).all())


def same(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("product", SHAPES, ids=str)
def test_a_product_is_right_and_the_same_in_every_batch(
    rig: LmRig, product: Product, dtype: Dtype
) -> None:
    x, w, add = drawn(dtype, product, BATCHES[-1])
    expected = ref.product(
        dtype,
        ref.values(x),
        ref.values(w),
        product.finish,
        None if add is None else ref.values(add),
    )
    whole = rig.product(dtype, product, x, w, add=add)
    assert near(dtype, whole, expected, add)
    for batch in BATCHES[:-1]:
        part = None if add is None else add[:batch]
        assert same(rig.product(dtype, product, x[:batch], w, add=part), whole[:batch]), batch
    order = np.random.default_rng(0).permutation(64)
    moved = rig.product(dtype, product, x[order], w, add=None if add is None else add[order])
    assert same(moved, whole[order])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", SHAPES, ids=str)
def test_every_way_to_launch_gives_the_same_bits(
    rig: LmRig, product: Product, dtype: Dtype
) -> None:
    for batch in (1, FEW, *(8 * tiles - 1 for tiles in TILES)):
        x, w, add = drawn(dtype, product, batch)
        first = rig.product(dtype, product, x, w, add=add)
        ways = [many(product, batch, h, split) for h in (64, 128) for split in (False, True)]
        if batch <= FEW:
            ways += [few(product, batch, stages=stages) for stages in (3, 6)]
        if rig.device.compute_capability == (9, 0):
            for is_split in (False, True)[: 1 + (product.slices == CLUSTER)]:
                ways += [wide(product, batch, is_split=is_split, stages=s) for s in (None, 3)]
        for choice in ways:
            found = rig.product(dtype, product, x, w, add=add, choice=choice)
            assert same(found, first), astuple(choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_norm_folded_in_is_the_norm_in_front(rig: LmRig, dtype: Dtype) -> None:
    for product in SHAPES:
        if product.finish is Finish.ADD:
            continue
        x, w, _ = drawn(dtype, product, 3)
        alpha = draw(dtype, (product.inputs,), np.random.default_rng(1), 1.0)
        together = rig.product(dtype, product, x, w, alpha=alpha)
        for row in range(3):
            alone = rig.product(dtype, product, x[row : row + 1], w, alpha=alpha)
            assert same(alone, together[row : row + 1])
        rows = ref.norm(dtype, ref.values(x), ref.values(alpha), 1e-8)
        expected = ref.product(dtype, rows, ref.values(w), product.finish)
        # A normed row may round the other way too; that is a step of one of many inputs.
        error = np.abs(ref.values(together) - expected)
        assert (error <= STEP[dtype] * np.maximum(np.abs(expected), 1) * 2.1).all()


@pytest.mark.parametrize("batch", [7, 64])
def test_a_session_that_is_no_number_touches_no_other(rig: LmRig, batch: int) -> None:
    for product in SHAPES:
        x, w, add = drawn("bfloat16", product, batch)
        clean = rig.product("bfloat16", product, x, w, add=add)
        x[3] = 0x7FC0
        found = rig.product("bfloat16", product, x, w, add=add)
        others = np.arange(batch) != 3
        assert same(found[others], clean[others])
        assert np.isnan(ref.values(found)[3]).all()


def depth_inputs(stage: StageSpec, batch: int, rng: np.random.Generator) -> dict[str, Array]:
    dtype = stage.inputs[0].dtype
    (hidden,), (text_card,), noise = (t.row_shape for t in stage.inputs[:3])
    streams, rows = stage.inputs[3].row_shape
    assert stage.kernel is not None
    card = int(stage.kernel.numbers["card"])
    logits = draw(dtype, (batch, text_card), rng, 2.0)
    return {
        "hidden": draw(dtype, (batch, hidden), rng, 1.0),
        "text_logits": ref.values(logits).astype(np.float32),
        "noise": -np.log(-np.log(rng.random((batch, *noise)))).astype(np.float32),
        "tokens": rng.integers(-2, card, (batch, streams, rows)),
        "offset": rng.integers(1, 9, batch),
        "temperature": rng.choice(np.array([0, 0.8, 1.3], np.float32), batch),
        "text_temperature": rng.choice(np.array([0, 0.7], np.float32), batch),
        "top_k": rng.choice([0, 1, 5, 250], batch),
        "text_top_k": rng.choice([0, 3, 25], batch),
    }


def depth_expected(
    stage: StageSpec, weights: dict[str, Array], inputs: dict[str, Array]
) -> dict[str, Array]:
    assert stage.kernel is not None
    numbers = stage.kernel.numbers
    said = ref.depth(
        stage.inputs[0].dtype,
        lambda role: ref.values(weights[role]),
        numbers,
        ref.values(inputs["hidden"]),
        inputs["text_logits"],
        inputs["noise"],
        ref.Taste(*(inputs[name] for name in (
            "temperature", "text_temperature", "top_k", "text_top_k"))),
    )  # fmt: skip
    ring, text, codes, valid = ref.speak(numbers, inputs["tokens"], inputs["offset"], said)
    return {"tokens.next": ring, "text": text, "codes": codes, "valid": valid}


DEPTHS = {
    "odd": dict(hidden=36, features=20, gate=28, heads=4),
    "even": dict(hidden=256, features=128, gate=64, heads=2, card=300, candidates=250),
}


@pytest.mark.parametrize("size", list(DEPTHS))
def test_depth_says_what_the_reference_says(rig: LmRig, size: str) -> None:
    rng = np.random.default_rng(5)
    stage = depth_stage("float32", **DEPTHS[size])
    weights, inputs = draw_weights(stage, rng), depth_inputs(stage, 67, rng)
    found = rig.stage(depth.KINDS["depth"], stage, weights, inputs, times=2)
    for name, expected in depth_expected(stage, weights, inputs).items():
        np.testing.assert_array_equal(found[name], expected, name)
    assert 0 < found["valid"].sum() < 67


@pytest.mark.parametrize("dtype", HALVES)
def test_depth_says_the_same_in_every_batch_and_slot(rig: LmRig, dtype: Dtype) -> None:
    rng = np.random.default_rng(6)
    stage = depth_stage(dtype, **DEPTHS["even"])
    weights, inputs = draw_weights(stage, rng), depth_inputs(stage, 160, rng)
    whole = rig.stage(depth.KINDS["depth"], stage, weights, inputs)
    for rows in (np.arange(1), np.arange(7), np.arange(64), rng.permutation(160)):
        part = {name: array[rows] for name, array in inputs.items()}
        found = rig.stage(depth.KINDS["depth"], stage, weights, part)
        for name, array in whole.items():
            np.testing.assert_array_equal(found[name], array[rows], name)
    # Rounding may choose another token, and then the rest of that frame differs.
    expected = depth_expected(stage, weights, inputs)
    assert (found["codes"] == expected["codes"][rows]).mean() > 0.8
    assert (whole["text"] == expected["text"]).all()


def test_ties_go_to_the_lower_id(rig: LmRig) -> None:
    """All logits equal but for a few: candidates are those, then ids from 0 on."""
    rng = np.random.default_rng(7)
    stage = depth_stage("bfloat16", **DEPTHS["even"] | {"text_card": 5000})
    weights, inputs = draw_weights(stage, rng), depth_inputs(stage, 40, rng)
    logits = np.zeros((40, 5000), np.float32)
    logits[:, [4000, 17, 2900]] = 1
    logits[::2, 100:] = -0.0
    logits[1::4] = rng.integers(-2, 3, (10, 5000))
    inputs |= {"text_logits": logits, "text_top_k": rng.integers(0, 251, 40)}
    found = rig.stage(depth.KINDS["depth"], stage, weights, inputs)
    expected = depth_expected(stage, weights, inputs)
    np.testing.assert_array_equal(found["text"], expected["text"])
    ours = found["tokens.next"][:, 0]
    np.testing.assert_array_equal(ours, expected["tokens.next"][:, 0])


def gated_stage(kind: str, dtype: Dtype, features: int, gate: int) -> StageSpec:
    row, wide = (features,), (3 * features,)
    back = (tensor("x", dtype, *row), tensor("attended", dtype, *row))
    offset = tensor("offset", "int64")
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    if kind == "gated_first":
        inputs = (tensor("codes", "int64", 4), tensor("tokens", "int64", 9, 3), offset)
        outputs = (
            tensor("y", dtype, *row), tensor("qkv", dtype, *wide), tensor("moved", "int64", 9, 3)
        )  # fmt: skip
    elif kind == "gated_piece":
        inputs, outputs = back, (tensor("y", dtype, *row), tensor("qkv", dtype, *wide))
    else:
        inputs = (*back, offset)
        outputs = (
            tensor("hidden", dtype, *row), tensor("logits", "float32", 96),
            tensor("offset.next", "int64"),
        )  # fmt: skip
    numbers: dict[str, float] = {"eps": 1e-8, "gate": gate, "initial.0": 96, "initial.1": 40}
    numbers |= {f"delay.{s}": d for s, d in enumerate((0, 0, 1, 1, 1, 0, 1, 1, 1))}
    return with_weights(StageSpec("s", inputs, outputs, graph="g"), dtype, kind, numbers)


def gated_inputs(stage: StageSpec, batch: int, rng: np.random.Generator) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for t in stage.inputs:
        shape = (batch, *t.row_shape)
        if t.name == "offset":
            found[t.name] = rng.integers(0, 7, batch)
        elif t.dtype == "int64":
            found[t.name] = rng.integers(-1 if t.name == "tokens" else 0, 40, shape)
        else:
            found[t.name] = draw(t.dtype, shape, rng, 1.0)
    return found


def gated_expected(
    stage: StageSpec, weights: dict[str, Array], inputs: dict[str, Array]
) -> dict[str, Array]:
    assert stage.kernel is not None
    kind, numbers = stage.kernel.kind, stage.kernel.numbers
    dtype = next(iter(stage.kernel.weights.values())).dtype

    def weight(role: str) -> Array:
        return ref.values(weights[role])

    found: dict[str, Array] = {}
    if kind == "gated_first":
        found["moved"], y = ref.embed(
            dtype, weight, numbers, inputs["codes"], inputs["tokens"], inputs["offset"]
        )
    else:
        x, attended = ref.values(inputs["x"]), ref.values(inputs["attended"])
        y = ref.product(dtype, attended, weight("out"), Finish.ADD, x)
        normed = ref.norm(dtype, y, weight("norm2"), 1e-8)
        opened = ref.product(dtype, normed, weight("gate"), Finish.GATE)
        y = ref.product(dtype, opened, weight("down"), Finish.ADD, y)
    if kind == "gated_last":
        found["hidden"] = ref.norm(dtype, y, weight("out_norm"), 1e-8)
        found["logits"] = ref.product(dtype, found["hidden"], weight("text"))
        found["offset.next"] = inputs["offset"] + 1
        return found
    found["y"] = y
    found["qkv"] = ref.product(dtype, ref.norm(dtype, y, weight("norm1"), 1e-8), weight("qkv"))
    return found


@pytest.mark.parametrize(
    ("dtype", "features", "gate"),
    [("float32", 20, 28), ("float32", 128, 64), ("bfloat16", 256, 192), ("float16", 128, 64)],
)
@pytest.mark.parametrize("kind", ["gated_first", "gated_piece", "gated_last"])
def test_a_gated_stage_is_right_and_the_same_in_every_batch(
    rig: LmRig, kind: str, dtype: Dtype, features: int, gate: int
) -> None:
    rng = np.random.default_rng(8)
    stage = gated_stage(kind, dtype, features, gate)
    weights, inputs = draw_weights(stage, rng), gated_inputs(stage, 161, rng)
    whole = rig.stage(gated.KINDS[kind], stage, weights, inputs, times=2)
    for name, expected in gated_expected(stage, weights, inputs).items():
        if expected.dtype == np.int64:
            np.testing.assert_array_equal(whole[name], expected, name)
            continue
        error = np.abs(ref.values(whole[name]) - expected)
        # Roundings in a chain: a step each, of values near one.
        assert error.max() <= 6 * STEP[dtype] * max(1.0, np.abs(expected).max()), name
        assert np.sqrt((error**2).mean()) <= STEP[dtype], name
    for rows in (np.arange(1), np.arange(7), np.arange(64), rng.permutation(160)):
        part = {name: array[rows] for name, array in inputs.items()}
        found = rig.stage(gated.KINDS[kind], stage, weights, part)
        for name, array in whole.items():
            assert same(found[name], array[rows]), (name, len(rows))
