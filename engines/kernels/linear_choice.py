"""How a product of few rows with large weights is cut into blocks, and by which kernel. Pure.

    y[b, o] = finish(sum of w[o, i] * x[b, i])       W (O, I) as in the file, B = 1, 2, 3, ...

`choose` says which kernel of `linear.cu` serves which batch, by what was measured (LOG.md); a
session's bits are the same under all of them, whatever its batch and neighbours.

Finishes: STORE rounds to the element; ADD then adds a row and rounds again; GATE takes a matrix
of twice the outputs and gives silu(first half) * second half; FLOAT rounds and stores float32.

Not here: memory and launches (`linear`), what the products are for (`gated`, `depth`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engines.bundle import Dtype

SOURCE = Path(__file__).with_name("linear.cu")
ELEMENTS: dict[Dtype, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
"""`LINEAR_ELEMENT` of linear_types.cuh."""
THREADS = 256
WARPS = 8
STEP = 64
"""Inputs that a stage holds."""
FEW = 8
"""Sessions that `linear_few` serves."""
TILES = (2, 4, 6, 8, 10, 12, 16, 20)
"""Tiles of 8 sessions that `linear_many` is compiled for."""
MOST = 8 * TILES[-1]
"""Sessions of one launch; more run in groups."""
PLAIN_GROUP = 4
GROUP = 64
"""Sessions that a warpgroup of `linear_wide` multiplies."""
CLUSTER = 4
"""Blocks of `linear_wide` that have a part of one sum each; as many as a sum has parts."""
WIDEST, WIDEST_OF_MORE = 176, {2: 128, 3: 96}
"""Rows of weights that a block of `linear_wide` has registers for; with more groups of sessions."""
NARROW = 64
"""Rows of weights a block below which it reads x as long as weights, nearly."""
STAGES = (3, 4, 5, 6, 8, 12)
"""Stages under way that `linear_few` and `linear_many` are compiled for."""
MOST_STAGES = 16
"""Of `linear_wide`."""
LEAD = 3
"""At 64 sessions 4096 -> 12288 took 28.5 us so and 30.5 with 0, but 11264 -> 4096, whose sum is
long and split, 36.3 and 30.3 (LOG.md)."""
SWIZZLE_BYTES = 1 << 10
"""What the stages of `linear_wide` are aligned to."""
STATIC_BYTES = 3 << 9
"""Shared memory that a block takes beside its stages, rounded up."""


class Finish(enum.IntEnum):
    """What becomes of a sum; `FINISH_*` in linear.cu."""

    STORE = 0
    ADD = 1
    GATE = 2
    FLOAT = 3


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix and what follows it. outputs: of a gate, of one half."""

    outputs: int
    inputs: int
    finish: Finish = Finish.STORE

    @property
    def slices(self) -> int:
        """Parts of the sum, 0 if only `linear_plain` can do it. Part of what bits depend on."""
        for slices in (4, 2, 1):
            if self.inputs % (slices * STEP) == 0:
                return slices
        return 0


class Room(NamedTuple):
    """What a device has; the default is an H200's."""

    multiprocessors: int = 132
    shared_bytes: int = 228 << 10
    """Of a multiprocessor."""
    block_bytes: int = 227 << 10
    has_wgmma: bool = True

    def half(self) -> int:
        """Bytes for the stages of each of two blocks on a multiprocessor."""
        return min(self.block_bytes, self.shared_bytes // 2) - STATIC_BYTES

    def whole(self) -> int:
        return self.block_bytes - STATIC_BYTES


H200 = Room()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a product of one batch is launched."""

    kernel: str
    blocks: tuple[int, int, int]
    shared_bytes: int = 0
    tiles: int = 0
    """`linear_many`: of 8 sessions; `linear_wide`: of `GROUP`; 0: neither is meant."""
    height: int = 0
    """Rows of weights of a block of these two."""
    stages: int = STAGES[0]
    blocks_per_sum: int = 1
    threads: int = THREADS
    lead: int = 0
    """`linear_wide`: steps that are left to copy when the launch behind it may begin."""


BARE = Choice("norm_rows", (1, 1, 1), stages=4)
"""Any with no tiles: its module has the norm."""


def choose(
    product: Product, batch: int, *, is_half: bool, normed: bool = False, room: Room = H200
) -> Choice:
    """The fastest way known. batch: up to `MOST`.

    is_half: elements of 16 bits; normed: the norm of one session is folded in.
    """
    if not is_half or not product.slices:
        assert not normed, product
        groups = -(-batch // PLAIN_GROUP)
        return Choice("linear_plain", (-(-product.outputs // WARPS), groups, 1), stages=4)
    if batch <= FEW:
        return few(product, batch, normed=normed, room=room)
    if room.has_wgmma and product.outputs % 2 == 0:
        alone = wide(product, batch, room=room)
        is_narrow = product.slices == CLUSTER and alone.height < NARROW
        return wide(product, batch, is_split=True, room=room) if is_narrow else alone
    stripes = _rows(product) / 64
    # Whole sums where there are blocks enough; where sums are short, half as many are enough.
    is_split = stripes < (32 if product.inputs <= 16 * STEP else 96)
    # More sessions make rows of x dear, and tall blocks read them less often.
    if batch > 64 and stripes >= 64:
        tall = many(product, batch, 128, is_split, room=room)
        if tall.shared_bytes <= room.block_bytes:
            return tall
    return many(product, batch, 64, is_split, room=room)


def few(
    product: Product,
    batch: int,
    *,
    normed: bool = False,
    stages: int | None = None,
    room: Room = H200,
) -> Choice:
    """`linear_few_*`. stages: as many as fit, with two blocks on a multiprocessor if need be."""
    stripe = 16 * WARPS // product.slices // (2 if product.finish is Finish.GATE else 1)
    blocks = -(-product.outputs // stripe)
    normed_bytes = -(-product.inputs * 2 // 128) * 128 if normed else 0
    stage_bytes = WARPS * (16 + (0 if normed else batch)) * 2 * STEP
    most = room.whole() if blocks <= room.multiprocessors else room.half()
    fit = stages or min(
        8 if blocks <= room.multiprocessors else 4,
        _fitting((most - normed_bytes) // stage_bytes),
    )
    kernel = "linear_few_normed" if normed else "linear_few_rows"
    return Choice(kernel, (blocks, 1, 1), normed_bytes + fit * stage_bytes, stages=fit)


def many(
    product: Product,
    batch: int,
    height: int,
    is_split: bool,
    *,
    stages: int | None = None,
    room: Room = H200,
) -> Choice:
    """`linear_many` of 64 or 128 rows a block; split: a block has one part of their sums."""
    tiles = next(tiles for tiles in TILES if 8 * tiles >= batch)
    stripe = height // (2 if product.finish is Finish.GATE else 1)
    per_sum = product.slices if is_split else 1
    blocks = -(-product.outputs // stripe) * per_sum
    stage_bytes = (height + 8 * tiles) * 2 * STEP
    is_alone = blocks <= room.multiprocessors or tiles > 8
    fit = stages or _fitting((room.whole() if is_alone else room.half()) // stage_bytes)
    out_bytes = 8 * tiles * (height + 4) * 4
    shared = max(fit * stage_bytes, out_bytes)
    return Choice(
        "linear_many", (blocks, 1, 1), shared, tiles, height, fit, per_sum, threads=2 * height
    )


def wide(
    product: Product,
    batch: int,
    *,
    is_split: bool = False,
    stages: int | None = None,
    lead: int | None = None,
    room: Room = H200,
) -> Choice:
    """`linear_wide`: all multiprocessors have equal shares of the rows; split: clusters have."""
    groups, parts = -(-batch // GROUP), CLUSTER if is_split else 1
    assert product.slices % parts == 0, product
    # Whole sums are held twice, so that registers end sooner.
    most = WIDEST if is_split or groups < 2 else WIDEST_OF_MORE[groups]
    at_once = room.multiprocessors // parts
    waves = -(-_rows(product) // (at_once * most))
    rows = -(-_rows(product) // (at_once * waves * 16)) * 16
    blocks = -(-product.outputs // (rows // (2 if product.finish is Finish.GATE else 1))) * parts
    stage_bytes = (sessions_of(batch) + rows) * 2 * STEP
    # Of one group two blocks find room on a multiprocessor, so that the next launch can begin.
    most_bytes = (room.half() if groups == 1 else room.whole()) - SWIZZLE_BYTES
    steps = product.inputs // (parts * STEP)
    # Of the last stage a warpgroup reads 64 rows of x where fewer are.
    beyond = max(0, groups * GROUP * 2 * STEP - stage_bytes)
    fit = stages or min((most_bytes - beyond) // stage_bytes, steps, MOST_STAGES)
    if lead is None:
        lead = 0 if is_split and groups == 1 and steps > MOST_STAGES else LEAD
    # Sums of a cluster lie where stages were.
    sums_bytes = rows * GROUP * groups * 4 if is_split else 0
    shared = max(fit * stage_bytes + beyond, sums_bytes) + SWIZZLE_BYTES
    shape, threads = (blocks, 1, 1), 128 * groups + 32
    return Choice("linear_wide", shape, shared, groups, rows, fit, parts, threads, lead)


def sessions_of(batch: int) -> int:
    """Rows of x that a stage of `linear_wide` has."""
    return -(-batch // 8) * 8


def _rows(product: Product) -> int:
    """Of the matrix."""
    return product.outputs * (2 if product.finish is Finish.GATE else 1)


def _fitting(most: int) -> int:
    return max([stages for stages in STAGES if stages <= most], default=STAGES[0])


def partials_bytes(product: Product, batch: int) -> int:
    """Scratch that any choice for up to ``batch`` sessions stays within."""
    if not product.slices or batch <= FEW:
        return 0
    rows = _rows(product)
    tiles = next(tiles for tiles in TILES if 8 * tiles >= min(batch, MOST))
    return (-(-rows // 128) + 1) * 128 * 8 * tiles * 4 * product.slices


def target_of(capability: tuple[int, int]) -> str:
    """What linear.cu is compiled for. "a": with wgmma, which no later device has."""
    major, minor = capability
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


def definitions(element: int, choice: Choice) -> dict[str, str | int]:
    """Macros that linear.cu is compiled with."""
    return {
        "LINEAR_ELEMENT": element,
        "LINEAR_TILES": choice.tiles,
        "LINEAR_HEIGHT": choice.height,
        "LINEAR_STAGES": 0 if choice.kernel == "linear_wide" else choice.stages,
        "LINEAR_PARTS": choice.blocks_per_sum,
        "LINEAR_WIDE": int(choice.kernel == "linear_wide"),
    }
