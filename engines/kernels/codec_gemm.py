"""The codec's products: in which order each sums, and how a batch is cut into blocks. Pure.

`Product` says what is multiplied; its chunks, and how many chunks a part sums, follow from the
layer alone, so that the bits of a session do not depend on the batch. `choose` picks blocks for a
batch: a choice of speed, which changes no bit. The kernels are in codec_gemm.cuh.

Numbers of k are added up in parts. Where a session has few rows (2 per frame in the transformers),
time goes into reading the matrix: parts of 512 at most, and blocks (`deep`) of eight warps that
share one. Where it has many (`wide`), warps share rows and columns instead. Several parts meet in a
launch of their own.

Not here: which products there are (codec_net.py), addresses.
"""

import ctypes
from dataclasses import dataclass

from engines.cuda import LaunchShape

DEEP_CHUNK, DEEP_CHUNKS, DEEP_THREADS = 64, 8, 256  # codec_gemm.cuh
MOST = DEEP_CHUNK * DEEP_CHUNKS
FEW_ROWS = 4
"""Rows per session up to which a product is summed in parts that `deep` blocks can take."""
STEP = 32
"""Sums leave the tensor cores so often."""
MEET_THREADS = 256
ENOUGH_BLOCKS = 200
"""So many keep a large GPU busy; with fewer, smaller ones are better."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """One compiled size of blocks."""

    name: str
    columns: int
    rows: int
    threads: int = 128
    is_deep: bool = False
    shared_bytes: int = 0

    def grid(self, total_rows: int, n: int, parts: int) -> tuple[int, int, int]:
        return -(-n // self.columns), -(-total_rows // self.rows), parts


def _deep(columns: int, rows: int, k: int, stages: int) -> Blocks:
    pitch = columns if columns == 16 else columns + 8
    copies = DEEP_CHUNKS * stages * (k * pitch + rows * (k + 4))
    sums = 2 * DEEP_CHUNKS * rows * (columns + 4)
    name, shared_bytes = f"deep_{columns}x{rows}", 4 * max(copies, sums)
    return Blocks(name, columns, rows, DEEP_THREADS, True, shared_bytes)


DEEP = (_deep(16, 8, 64, 1), _deep(16, 16, 64, 1), _deep(32, 32, 16, 2))
WIDE = tuple(
    Blocks(f"wide_{columns}x{rows}", columns, rows)
    for columns, rows in ((32, 16), (32, 32), (64, 32), (64, 64), (32, 128))
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
    most: int = MOST
    """Numbers of k in a part, if a session has few rows."""

    @property
    def is_few(self) -> bool:
        return self.rows <= FEW_ROWS

    @property
    def part(self) -> int:
        """Numbers of k that are added up before they meet others."""
        if self.is_few:
            return -(-min(self.most, self.k) // STEP) * STEP
        # As many as keep a GPU busy with one session, and of no more than `MOST` numbers.
        tiles = -(-self.rows // 16) * -(-self.n // 32)
        parts = max(-(-self.k // MOST), min(96 // tiles, self.k // 256), 1)
        return -(-self.k // (STEP * parts)) * STEP

    @property
    def parts(self) -> int:
        return -(-self.k // self.part)

    @property
    def leaves_parts(self) -> bool:
        """Whether its result is in parts when its launch ends."""
        return self.parts > 1 or not self.meets


def choices(product: Product) -> tuple[Blocks, ...]:
    """Every cut that gives the same bits."""
    return BLOCKS if product.is_few else WIDE


def choose(product: Product, batch: int) -> Blocks:
    """The cut for a batch, after what was measured on one H200 (LOG.md)."""
    total, columns = product.rows * batch, product.n * product.parts
    # Matrices of many columns give blocks enough to share rows between warps.
    is_narrow = columns < (4096 if total >= 64 else 16_384)
    if product.is_few and (total <= 8 or (product.part > 128 and is_narrow)):
        return _largest(product, total, DEEP, ENOUGH_BLOCKS // 2)
    return _largest(product, total, WIDE, ENOUGH_BLOCKS)


def _largest(product: Product, total: int, blocks: tuple[Blocks, ...], enough: int) -> Blocks:
    """The largest that waste less than half and are still enough; else the smallest."""
    least, *_ = sorted(blocks, key=lambda b: b.columns * b.rows)
    fitting = [b for b in blocks if b is least or _fits(b, product, total)]
    for found in sorted(fitting, key=lambda b: -b.columns * b.rows):
        x, y, z = found.grid(total, product.n, product.parts)
        if x * y * z >= enough:
            return found
    return least


def _fits(blocks: Blocks, product: Product, total: int) -> bool:
    """The tall ones are for results of 32 columns alone."""
    if blocks.rows > 64 and product.n > 32:
        return False
    return blocks.rows < 2 * total and blocks.columns <= max(32, product.n)


class GemmParams(ctypes.Structure):
    """`GemmParams` of codec_gemm.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in ("a w bias add out out_elu parts tail tail_next live").split()
        ],
        *[
            (name, ctypes.c_int)
            for name in (
                "a_session a_row rows total_rows k n part bias_n add_session add_row "
                "out_session out_row elu_session elu_row steps stride gelu parts_count"
            ).split()
        ],
    ]


def launch(
    product: Product, batch: int, blocks: Blocks, **given: int
) -> tuple[str, LaunchShape, GemmParams]:
    """Kernel, shape and argument. ``given`` has the addresses and strides.

    If it leaves parts, ``parts`` of the argument must be set, and `meet` may follow.
    """
    total = product.rows * batch
    params = GemmParams(
        rows=product.rows,
        total_rows=total,
        k=product.k,
        n=product.n,
        part=product.part,
        parts_count=product.parts,
        **{"bias_n": product.n, **given},
    )
    grid = blocks.grid(total, product.n, product.parts)
    shape = LaunchShape(grid, (blocks.threads, 1, 1), blocks.shared_bytes)
    return f"codec_{blocks.name}", shape, params


def meet(product: Product, batch: int) -> LaunchShape:
    """Of the launch in which parts meet; it takes the same argument."""
    quads = product.rows * batch * product.n // 4
    return LaunchShape((-(-quads // MEET_THREADS), 1, 1), (MEET_THREADS, 1, 1))


def parts_floats(product: Product, batch: int) -> int:
    """Scratch of one product."""
    return product.parts * batch * product.rows * product.n if product.leaves_parts else 0
