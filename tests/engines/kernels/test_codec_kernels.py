"""The codec's kernels without a GPU: they compile, and cuts of a batch cover it."""

import math

import pytest

from engines.kernels import codec, codec_gemm, codec_kinds, nvrtc
from engines.kernels.codec_gemm import Product
from engines.kernels.codec_kinds import CodecShape
from engines.kernels.codec_net import Choose, Tick, plan_stage
from tests.engines.kernels import codec_rig as rig
from tests.engines.kernels.test_nvrtc import needs_compiler

LARGEST_SHARED_BYTES = 99 * 1024  # of a block on sm_86, sm_89 and sm_120
STATIC_SHARED_BYTES = 48 * 1024


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])  # without and with early launches
def test_the_kernels_compile(target: str) -> None:
    compiled = nvrtc.compile_source(codec.SOURCE, {"CODEC_SMALLEST": 1}, target)
    assert b"codec_wide_32x16" in compiled.ptx


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize("target", nvrtc.TARGETS)
def test_every_size_of_blocks_compiles_for_every_target(target: str) -> None:
    compiled = nvrtc.compile_source(codec.SOURCE, {}, target)
    for blocks in codec_gemm.BLOCKS:
        assert f"codec_{blocks.name}".encode() in compiled.ptx


def products(shape: CodecShape) -> list[Product]:
    """Of all stages."""
    found: list[Product] = []

    def note(product: Product, batch: int) -> codec_gemm.Blocks:
        found.append(product)
        return codec_gemm.choose(product, batch)

    for kind in codec_kinds.STAGES:
        _plan(kind, shape, 1, note)
    return found


def _plan(kind: str, shape: CodecShape, batch: int, choose: Choose) -> Tick:
    wanted = codec_kinds.STAGES[kind](shape)
    tick = Tick(shape, batch, dict.fromkeys(wanted.weights, 0), 0, 0, choose)
    plan_stage(tick, kind, [0] * len(wanted.inputs), [0] * len(wanted.outputs))
    return tick


def test_every_product_is_whole_in_its_parts_and_blocks() -> None:
    for product in products(rig.MIMI) + products(rig.SMALL):
        assert product.part % codec_gemm.STEP == 0, product
        assert (product.parts - 1) * product.part < product.k <= product.parts * product.part
        for batch in (1, 2, 3, 7, 16, 33, 64, 160):
            blocks = codec_gemm.choose(product, batch)
            assert blocks in codec_gemm.choices(product), (product, batch)
            assert not blocks.is_deep or product.part <= codec_gemm.MOST, product
            x, y, z = blocks.grid(product.rows * batch, product.n, product.parts)
            assert x * blocks.columns >= product.n, (product, batch)
            assert y * blocks.rows >= product.rows * batch, (product, batch)
            assert z == product.parts, product
            assert y <= 65_535, (product, batch)


def test_blocks_fit_into_the_smallest_shared_memory_of_the_targets() -> None:
    assert max(blocks.shared_bytes for blocks in codec_gemm.BLOCKS) <= LARGEST_SHARED_BYTES


@pytest.mark.parametrize("kind", codec_kinds.STAGES)
def test_a_larger_batch_never_needs_less_scratch(kind: str) -> None:
    """So what is asked for with all slots is enough for every batch."""
    needed = [
        _plan(kind, rig.MIMI, batch, codec_gemm.choose).scratch_bytes
        for batch in (1, 2, 4, 5, 8, 9, 16, 31, 32, 33, 64, 65, 160)
    ]
    assert needed == sorted(needed)


def test_a_session_costs_a_few_hundred_launches_at_most() -> None:
    """A tick of the published codec at one session: 8 layers in each half, attention apart."""
    times = dict.fromkeys(codec_kinds.STAGES, 1) | {"codec_piece": 14}
    launches = sum(
        len(_plan(kind, rig.MIMI, 1, codec_gemm.choose).calls) * n for kind, n in times.items()
    )
    assert launches <= 160


def test_numbers_lead_back_to_the_shape() -> None:
    assert CodecShape.of_numbers(rig.MIMI.numbers()) == rig.MIMI


def test_a_number_that_is_missing_is_named() -> None:
    numbers = rig.MIMI.numbers()
    del numbers["feedforward"]
    with pytest.raises(KeyError, match="feedforward"):
        CodecShape.of_numbers(numbers)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("filters", 6, "multiples of 4"), ("filters", 128, "1 to 64"), ("levels", 1, "2 or more")],
)
def test_a_codec_that_the_kernels_cannot_compute_says_why(
    name: str, value: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        CodecShape.of_numbers(rig.MIMI.numbers() | {name: value})


def test_a_matrix_is_turned_where_it_has_rows_and_columns() -> None:
    for kind in codec_kinds.STAGES:
        for role, weight in codec_kinds.STAGES[kind](rig.MIMI).weights.items():
            turn = codec.turn_of(role, weight, kind, rig.MIMI)
            if len(weight) == 1 or role == "upsample":
                assert turn is None, role
            else:
                assert turn is not None, role
                assert turn.inputs * turn.outputs * turn.kernel == math.prod(weight), role
