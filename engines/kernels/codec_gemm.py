"""The codec's products: in which order each sums, and how a batch is cut into blocks. Pure.

`Product` says what is multiplied; its chunks, and how many chunks a part sums, follow from the
layer alone, so that the bits of a session do not depend on the batch. `choose` picks blocks for a
batch: a choice of speed, which changes no bit. The kernels are in codec_gemm.cuh.

Two ways of summing. Where a session has few rows (2 per frame in the transformers), all time goes
into reading the matrix: chunks of 64, parts of 8 chunks, a block per part. Where it has many,
blocks are many too: everything in one part, which one block sums whole, or a block per chunk
whose results meet in the same order.

Not here: which products there are (codec_net.py), addresses.
"""

import ctypes
from dataclasses import dataclass

from engines.cuda import LaunchShape

SKINNY_ROWS, SKINNY_COLUMNS, SKINNY_CHUNK, SKINNY_CHUNKS = 4, 16, 64, 8  # codec_gemm.cuh
FEW_ROWS = 4
"""Rows per session up to which a product is summed in parts of `SKINNY_CHUNKS` chunks."""
CHUNK_STEP = 32
"""Chunks are whole tiles of k."""
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Blocks:
    """One compiled size of blocks."""

    name: str
    rows: int
    columns: int
    threads: int

    def grid(self, total_rows: int, n: int, parts: int) -> tuple[int, int, int]:
        return -(-n // self.columns), -(-total_rows // self.rows), parts


SKINNY = Blocks("skinny", SKINNY_ROWS, SKINNY_COLUMNS, 128)
TILES = tuple(
    Blocks(f"{rows}x{columns}", rows, columns, rows // tm * (columns // tn))
    for rows, columns, tm, tn in (
        (16, 32, 1, 4),
        (32, 32, 2, 4),
        (32, 64, 4, 4),
        (64, 64, 8, 4),
        (128, 32, 8, 4),
        (64, 128, 8, 8),
        (128, 64, 8, 8),
    )
)
BY_NAME = {blocks.name: blocks for blocks in (SKINNY, *TILES)}


@dataclass(frozen=True, slots=True)
class Product:
    """(rows, k) windows of every session times (k, n)."""

    name: str
    k: int
    n: int
    rows: int
    """Per session."""
    meets: bool = True
    """False: its parts are left to the kernel that follows."""
    part_chunks: int = SKINNY_CHUNKS
    """Of a product with few rows."""

    @property
    def is_few(self) -> bool:
        return self.rows <= FEW_ROWS

    @property
    def chunk(self) -> int:
        """Numbers of k that one thread sums, one after the other."""
        if self.is_few:
            return SKINNY_CHUNK
        if self.rows >= 400:
            wanted = self.k
        elif self.rows >= 64:
            wanted = max(128, self.k // 4)
        else:
            wanted = max(64, self.k // 16)
        return -(-wanted // CHUNK_STEP) * CHUNK_STEP

    @property
    def chunks(self) -> int:
        return -(-self.k // self.chunk)

    def parts(self, span: int) -> int:
        return -(-self.chunks // span)


@dataclass(frozen=True, slots=True)
class Choice:
    """How one product of one batch is cut."""

    blocks: Blocks
    span: int
    """Chunks a block sums."""


def choices(product: Product, batch: int) -> list[Choice]:
    """Every cut that gives the same bits."""
    if product.is_few:
        return [Choice(blocks, product.part_chunks) for blocks in (SKINNY, *TILES)]
    spans = sorted({1, product.chunks})
    return [Choice(blocks, span) for blocks in TILES for span in spans]


def choose(product: Product, batch: int) -> Choice:
    """The cut for a batch; see LOG.md for what was measured."""
    total = product.rows * batch
    if product.is_few and total <= 16:
        return Choice(SKINNY, product.part_chunks)
    return min(choices(product, batch), key=lambda choice: _cost(product, total, choice))


def _cost(product: Product, total: int, choice: Choice) -> float:
    """Rough time: what the busiest multiprocessor multiplies, and what parts cost to meet."""
    blocks, span = choice.blocks, choice.span
    if blocks is SKINNY:
        return float("inf")
    parts = product.parts(span)
    x, y, z = blocks.grid(total, product.n, parts)
    k = min(product.k, span * product.chunk)
    per_block = blocks.rows * blocks.columns * k / SPEED[blocks.name]
    waves = -(-x * y * z // MULTIPROCESSORS)
    # Two blocks on a multiprocessor take turns; one alone leaves it idle while it waits.
    time = per_block * max(waves, 1.4)
    meeting = (0 if parts == 1 else 2500) + parts * total * product.n / 2500 * (parts > 1)
    return time + meeting


SPEED = {
    "16x32": 35.0,
    "32x32": 55.0,
    "32x64": 75.0,
    "64x64": 85.0,
    "128x32": 80.0,
    "64x128": 95.0,
    "128x64": 95.0,
}
"""Products of two numbers a multiprocessor makes per clock."""


class GemmParams(ctypes.Structure):
    """`GemmParams` of codec_gemm.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in ("a w bias add out out_elu parts arrivals tail tail_next live").split()
        ],
        *[
            (name, ctypes.c_int)
            for name in (
                "a_session a_row rows total_rows k n chunk span chunks bias_n add_session add_row "
                "out_session out_row elu_session elu_row steps stride gelu reduce"
            ).split()
        ],
    ]


def launch(
    product: Product, batch: int, choice: Choice, **given: int
) -> tuple[str, LaunchShape, GemmParams]:
    """Kernel, shape and argument. ``given`` has the addresses and strides."""
    total = product.rows * batch
    parts = product.parts(choice.span)
    params = GemmParams(
        rows=product.rows,
        total_rows=total,
        k=product.k,
        n=product.n,
        chunk=product.chunk,
        span=choice.span,
        chunks=product.chunks,
        reduce=int(product.meets),
        **{"bias_n": product.n, **given},
    )
    name = f"codec_{choice.blocks.name}"
    if choice.blocks is not SKINNY:
        name += "_many" if min(choice.span, product.chunks) > 1 else "_one"
    grid = choice.blocks.grid(total, product.n, parts)
    return name, LaunchShape(grid, (choice.blocks.threads, 1, 1)), params


def parts_floats(product: Product, batch: int, choice: Choice) -> int:
    """Scratch of one launch."""
    parts = product.parts(choice.span)
    needed = parts > 1 or not product.meets
    return parts * batch * product.rows * product.n if needed else 0
