"""The codec's products: in which order each sums, and how a batch is cut into blocks. Pure.

`Product` says what is multiplied; its chunks, and how many chunks a part sums, follow from the
layer alone, so that the bits of a session do not depend on the batch. `choose` picks blocks for a
batch: a choice of speed, which changes no bit. The kernels are in codec_gemm.cuh.

Where a session has few rows (2 per frame in the transformers), time goes into reading the matrix:
chunks of 64, parts of 8 chunks, a block per part with a warp per chunk (`deep`). Where it has many,
blocks are many too (`wide`): a block sums all chunks, or one, whose results then meet in the same
order, in the block that comes last or, if there is much to add, in a launch of its own.

Not here: which products there are (codec_net.py), addresses.
"""

import ctypes
from dataclasses import dataclass

from engines.cuda import LaunchShape

DEEP_CHUNK, DEEP_CHUNKS, DEEP_THREADS = 64, 8, 256  # codec_gemm.cuh
FEW_ROWS = 4
"""Rows per session up to which a product is summed in parts of at most `DEEP_CHUNKS` chunks."""
CHUNK_STEP = 32
"""Sums leave the tensor cores so often."""
MULTIPROCESSORS = 132
MEET_THREADS = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """One compiled size of blocks."""

    name: str
    columns: int
    rows: int
    threads: int
    speed: float
    """Products of two numbers a multiprocessor makes per clock, about; see LOG.md."""
    is_deep: bool = False
    sums_many: bool = False
    """Of the wide: sums all its chunks. Others sum one."""
    shared_bytes: int = 0

    def grid(self, total_rows: int, n: int, parts: int) -> tuple[int, int, int]:
        return -(-n // self.columns), -(-total_rows // self.rows), parts


def _deep(columns: int, rows: int, k: int, stages: int, speed: float) -> Blocks:
    floats = DEEP_CHUNKS * stages * (k * (columns + 8) + rows * (k + 4))
    name = f"deep_{columns}x{rows}"
    return Blocks(name, columns, rows, DEEP_THREADS, speed, is_deep=True, shared_bytes=4 * floats)


DEEP = (_deep(16, 8, 64, 1, 25.0), _deep(16, 16, 64, 1, 45.0), _deep(32, 32, 16, 2, 80.0))
WIDE = (
    Blocks("wide_32x16", 32, 16, 128, 45.0),
    Blocks("wide_32x32", 32, 32, 128, 80.0),
    Blocks("wide_64x32", 64, 32, 128, 110.0),
    Blocks("wide_64x64", 64, 64, 128, 140.0),
    Blocks("wide_32x128", 32, 128, 128, 130.0),
    Blocks("wide_128x64", 128, 64, 256, 150.0),
    Blocks("wide_64x64_many", 64, 64, 128, 130.0, sums_many=True),
    Blocks("wide_128x64_many", 128, 64, 256, 140.0, sums_many=True),
)
BLOCKS = (*DEEP, *WIDE)


@dataclass(frozen=True, slots=True)
class Product:
    """(rows, k) windows of every session times (k, n)."""

    name: str
    k: int
    n: int
    rows: int
    """Per session."""
    meets: bool = True
    """False: its parts are left to the launch that follows."""
    part_chunks: int = DEEP_CHUNKS
    """Of a product with few rows."""

    @property
    def is_few(self) -> bool:
        return self.rows <= FEW_ROWS

    @property
    def chunk(self) -> int:
        """Numbers of k that are added up before anything else is added."""
        if self.is_few:
            return DEEP_CHUNK
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
    is_apart: bool = False
    """Parts meet in a launch of their own."""


def choices(product: Product) -> list[Choice]:
    """Every cut that gives the same bits."""
    found: list[Choice] = []
    for blocks in BLOCKS:
        span = product.part_chunks if product.is_few else product.chunks
        span = min(span, product.chunks)
        if blocks.is_deep and not product.is_few:
            continue
        if not (blocks.is_deep or blocks.sums_many) and span > 1:
            if product.is_few:
                continue
            span = 1
        if blocks.sums_many and span == 1:
            continue
        found.append(Choice(blocks, span))
        if product.meets and product.parts(span) > 1:
            found.append(Choice(blocks, span, is_apart=True))
    return found


def choose(product: Product, batch: int) -> Choice:
    """The cut for a batch; see LOG.md for what was measured."""
    return min(choices(product), key=lambda choice: _cost(product, product.rows * batch, choice))


def _cost(product: Product, total: int, choice: Choice) -> float:
    """Rough clocks: what the busiest multiprocessor multiplies, and what it costs to meet."""
    blocks = choice.blocks
    parts = product.parts(choice.span)
    x, y, z = blocks.grid(total, product.n, parts)
    k = min(product.k, choice.span * product.chunk)
    # Blocks on one multiprocessor take turns; one alone leaves it idle while it waits.
    turns = max(-(-x * y * z // MULTIPROCESSORS), 1.5)
    time = blocks.rows * blocks.columns * k / blocks.speed * turns
    # Deep blocks of one column read the same piece of the matrix, wide ones as well.
    time += blocks.columns * k * turns / 40
    if parts == 1:
        return time
    if not product.meets:
        return time + parts * total * product.n / 4000
    if choice.is_apart:
        return time + 4500 + parts * total * product.n / 2000
    return time + 1500 + parts * blocks.rows * blocks.columns / 12


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
                "a_session a_row rows total_rows k n chunk span bias_n add_session add_row "
                "out_session out_row elu_session elu_row steps stride gelu reduce parts_count"
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
        reduce=int(product.meets and not choice.is_apart),
        parts_count=parts,
        **{"bias_n": product.n, **given},
    )
    blocks = choice.blocks
    grid = blocks.grid(total, product.n, parts)
    shape = LaunchShape(grid, (blocks.threads, 1, 1), blocks.shared_bytes)
    return f"codec_{blocks.name}", shape, params


def meet(product: Product, batch: int) -> LaunchShape:
    """Of the launch in which parts meet."""
    quads = product.rows * batch * product.n // 4
    return LaunchShape((-(-quads // MEET_THREADS), 1, 1), (MEET_THREADS, 1, 1))


def parts_floats(product: Product, batch: int, choice: Choice) -> int:
    """Scratch of one launch."""
    parts = product.parts(choice.span)
    needed = parts > 1 or not product.meets
    return parts * batch * product.rows * product.n if needed else 0
