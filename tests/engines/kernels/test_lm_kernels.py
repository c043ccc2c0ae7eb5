"""The language model's kernels without a GPU: plans, the ABI, and that they compile."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.kernels import depth, gated, linear, linear_choice, nvrtc
from engines.kernels import lm_reference as ref
from engines.kernels.linear_choice import (
    FEW,
    GROUP,
    H200,
    MOST,
    TILES,
    Choice,
    Finish,
    Product,
    Room,
    choose,
    few,
    many,
    partials_bytes,
    sessions_of,
    target_of,
    wide,
)
from tests.engines.kernels.lm_rig import depth_stage

needs_compiler = pytest.mark.skipif(
    not nvrtc.is_installed(),
    reason="needs NVRTC: pip install 'cuda-bindings==13.0.*' 'nvidia-cuda-nvrtc==13.0.*'",
)

PRODUCTS = (
    Product(12_288, 4096),
    Product(11_264, 4096, Finish.GATE),
    Product(4096, 11_264, Finish.ADD),
    Product(4096, 4096, Finish.ADD),
    Product(32_000, 4096, Finish.FLOAT),
    Product(3072, 1024),
    Product(1024, 2816, Finish.ADD),
    Product(1000, 192),
)
SMALL = Room(84, shared_bytes=100 << 10, block_bytes=99 << 10, has_wgmma=False)
"""An RTX 30 or 40."""


@pytest.mark.parametrize("room", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_every_batch_has_a_launch_that_covers_all_outputs(product: Product, room: Room) -> None:
    halves = 2 if product.finish is Finish.GATE else 1
    for batch in range(1, MOST + 1):
        choice = choose(product, batch, is_half=True, room=room)
        assert choice.shared_bytes <= room.block_bytes, (batch, choice)
        if batch <= FEW:
            rows = 16 * linear_choice.WARPS // product.slices
        else:
            assert choice.tiles * (GROUP if room.has_wgmma else 8) >= batch
            rows = choice.height
        assert choice.blocks[0] * rows // choice.blocks_per_sum >= product.outputs * halves


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("product", PRODUCTS[:7], ids=str)
def test_a_wide_block_has_room_for_all_it_reads_and_writes(
    product: Product, is_split: bool
) -> None:
    for batch in range(1, MOST + 1):
        choice = wide(product, batch, is_split=is_split)
        stage_bytes = (sessions_of(batch) + choice.height) * 128
        room = choice.shared_bytes - linear_choice.SWIZZLE_BYTES
        assert choice.shared_bytes <= H200.block_bytes - linear_choice.STATIC_BYTES
        assert 2 <= choice.stages <= linear_choice.MOST_STAGES
        assert room >= choice.stages * stage_bytes
        assert room >= (choice.stages - 1) * stage_bytes + choice.tiles * GROUP * 128
        assert room >= is_split * choice.height * choice.tiles * GROUP * 4
        assert choice.height % 16 == 0
        assert choice.height <= 176, "what wgmma multiplies at once"
        assert choice.blocks[0] % choice.blocks_per_sum == 0


def test_a_choice_of_many_sessions_uses_every_multiprocessor() -> None:
    """But for what a share that is a multiple of 16 rows rounds off, and clusters of four."""
    for product in PRODUCTS[:4]:
        choice = choose(product, 64, is_half=True)
        assert choice.kernel == "linear_wide"
        assert 128 <= choice.blocks[0] <= 132, product


def test_what_float32_or_an_odd_length_needs_is_the_plain_kernel() -> None:
    odd = Product(20, 36)
    assert odd.slices == 0
    assert choose(odd, 5, is_half=True).kernel == "linear_plain"
    plain = choose(PRODUCTS[0], 5, is_half=False)
    assert (plain.kernel, plain.blocks) == ("linear_plain", (12_288 // 8, 2, 1))


def test_sums_are_cut_by_the_shape_alone() -> None:
    assert [p.slices for p in PRODUCTS] == [4, 4, 4, 4, 4, 4, 4, 1]
    assert Product(8, 128).slices == 2


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_scratch_holds_the_parts_of_every_choice(product: Product) -> None:
    for batch in (9, 16, 64, 160):
        for height in (64, 128):
            choice = many(product, batch, height, is_split=True)
            stored = choice.blocks[0] * height * 8 * choice.tiles * 4
            assert stored <= partials_bytes(product, batch), (batch, height)
            assert choice.blocks[0] <= 16_384 or choice.blocks_per_sum == 1, "a counter each"
    assert partials_bytes(product, 160) >= partials_bytes(product, 64)


STRUCTS = [
    ("linear.cu", linear.LinearParams),
    ("linear.cu", linear.NormParams),
    ("gated.cu", gated.EmbedParams),
    ("gated.cu", gated.CountParams),
    ("depth.cu", depth.AttendParams),
    ("depth.cu", depth.ChooseParams),
]
C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "float": ctypes.c_float}
C_TYPES["int"] = ctypes.c_int


@pytest.mark.parametrize(("file", "twin"), STRUCTS, ids=[s.__name__ for _, s in STRUCTS])
def test_a_kernels_argument_is_laid_out_as_its_source_says(
    file: str, twin: type[ctypes.Structure]
) -> None:
    source = linear_choice.SOURCE.with_name(file).read_text()
    body = re.search(rf"struct {twin.__name__} \{{(.*?)\n\}};", source, re.DOTALL)
    assert body, file
    said = re.findall(r"^\s+(u64|u32|int|float) (\w+)(?:\[MOST_STREAMS\])?;", body[1], re.MULTILINE)
    fields = [(field[0], field[1]) for field in twin._fields_]
    assert [name for _, name in said] == [name for name, _ in fields]
    for (c_type, name), (_, ours) in zip(said, fields, strict=True):
        element = getattr(ours, "_type_", None) if name == "delays" else ours
        assert element is C_TYPES[c_type], name


def test_maps_and_numbers_of_a_wide_product_lie_where_its_source_has_them() -> None:
    source = linear_choice.SOURCE.with_name("linear_wide.cuh").read_text()
    assert f"sizeof(WideParams) == {ctypes.sizeof(linear.WideParams)}," in source
    body = re.search(r"struct WideParams \{(.*?)\n\};", source, re.DOTALL)
    assert body
    said = re.findall(r"^    \w+ (\w+)(?:\[2\])?;", body[1], re.MULTILINE)
    assert said == [field[0] for field in linear.WideParams._fields_]
    assert linear.WideParams.product.offset == 2 * 128


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_the_kernels_compile_for_every_target(target: str) -> None:
    product = Product(4096, 1024)
    choices = [few(product, 1, stages=4)]
    if target in ("sm_80", "sm_90a", "sm_120"):
        choices.append(many(product, 16, 64, is_split=True, stages=4))
    if target == "sm_90a":
        choices += [wide(product, 9, is_split=split) for split in (False, True)]
    for choice in choices:
        compiled = nvrtc.compile_source(
            linear_choice.SOURCE, linear_choice.definitions(1, choice), target
        )
        assert "warning" not in compiled.log, compiled.log
        assert choice.kernel.encode() in compiled.ptx
        assert (b"wgmma" in compiled.ptx) == (choice.kernel == "linear_wide")
    if target == "sm_80":
        for source in (gated.SOURCE, depth.SOURCE):
            nvrtc.compile_source(source, {"LINEAR_ELEMENT": 0}, target)


def test_wgmma_is_for_one_target_only() -> None:
    assert target_of((9, 0)) == "sm_90a"
    assert target_of((8, 6)) == "sm_86"
    assert target_of((12, 0)) == "sm_120"


def test_definitions_tell_choices_apart() -> None:
    seen = set()
    for tiles in TILES:
        for height in (64, 128):
            for is_split in (False, True):
                choice = many(PRODUCTS[0], 8 * tiles, height, is_split)
                seen.add(str(linear_choice.definitions(1, choice)))
    assert len(seen) == len(TILES) * 4
    seen |= {str(linear_choice.definitions(1, wide(PRODUCTS[0], b))) for b in range(1, MOST + 1)}
    assert len(seen) == len(TILES) * 4 + 3, "the stages of `linear_wide` are no definition"
    plain = Choice("linear_plain", (1, 1, 1))
    assert linear_choice.definitions(0, plain)["LINEAR_TILES"] == 0


class H200Device:
    """As much of a `Device` as is asked for."""

    compute_capability = (9, 0)

    def attribute(self, name: str) -> int:
        return {
            "MULTIPROCESSOR_COUNT": H200.multiprocessors,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": H200.shared_bytes,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": H200.block_bytes,
        }[name]


def test_a_start_compiles_at_once_what_its_batches_will_ask_for() -> None:
    device: Any = H200Device()
    for dtype, is_half in (("bfloat16", True), ("float32", False)):
        made = linear.jobs(PRODUCTS, 40, dtype, device)  # type: ignore[arg-type]
        texts = [str(job.definitions) for job in made]
        assert len(set(texts)) == len(texts)
        assert {job.target for job in made} == {"sm_90a"}
        element = linear_choice.ELEMENTS[dtype]  # type: ignore[index]
        for product in PRODUCTS:
            for batch in range(1, 41):
                asked = choose(product, batch, is_half=is_half)
                assert str(linear_choice.definitions(element, asked)) in texts
    assert len(texts) == 1


def test_the_reference_chooses_as_the_graphs_do() -> None:
    """Without ties, whose order torch leaves open; with them by id, as ONNX says."""
    torch = pytest.importorskip("torch")
    from export.models.sampling import Taste

    rng = np.random.default_rng(3)
    logits = rng.normal(size=(200, 90)).astype(np.float32)
    noise = rng.gumbel(size=(200, 40)).astype(np.float32)
    heat = rng.choice(np.array([0, 0.5, 1.5], np.float32), 200)
    top_k = rng.choice([0, 1, 7, 40, 99], 200)
    taste = Taste(torch.tensor(heat), torch.tensor(top_k), 40)
    expected = taste.choose(torch.tensor(logits), torch.tensor(noise))
    found = [
        ref.choose(*row) for row in zip(logits, noise, heat.tolist(), top_k.tolist(), strict=True)
    ]
    assert found == expected.tolist()
    even = np.zeros(90, np.float32)
    assert ref.choose(even, noise[0], 0, 0) == 0
    assert ref.choose(even, noise[0], 1, 5) == int(noise[0][:5].argmax())


def test_scratch_of_a_stage_grows_with_its_slots_and_begins_aligned() -> None:
    stage = depth_stage("bfloat16", hidden=256, features=128, gate=64, heads=2)
    kind = depth.KINDS["depth"]
    sizes = [kind.scratch_bytes(stage, slots) for slots in (1, 8, 9, 64, 160)]
    assert sizes == sorted(sizes)
    assert all(size % 256 == 0 for size in sizes)


def test_sources_include_nothing_of_a_toolkit() -> None:
    for source in (linear_choice.SOURCE, gated.SOURCE, depth.SOURCE):
        included = re.findall(r'#include (["<].*)', Path(source).read_text())
        assert all(name.startswith('"linear_') for name in included), included
