"""Ring attention: the built-in stage between a model's subgraphs, and its ABI.

Per session and layer: rotate q and the new k (RoPE), store the new k and v at position mod T in
the session's ring, attend over the min(position + P, T) valid rows. One launch (two when a KV head
serves more than 4 query rows), a fixed grid per exact batch, no allocation: capturable as it is.

    in   q           (B, P, Hq*D)    bfloat16 | float32    rows ``q_stride`` elements apart
    in   k_new       (B, P, Hkv*D)   as q                  not yet rotated
    in   v_new       (B, P, Hkv*D)   as q
    in   positions   (B,)            int64    rows written before this step; not advanced here
    in   slots       (B,)            int32    where each session's ring lies; below 0: row is idle,
                                              nothing is read or written, not even ``out``
    in   page_table  (slots, pages)  int32    or null: pages of 256 rows instead of whole slots
    in   k_scale, v_scale  (Hkv,)    float32  8-bit rings only: value = stored * scale
    in   rope_frequency    (D/2,)    float32  or null: no rotation. Interleaved pairs (2i, 2i+1)
    i/o  k_cache, v_cache            bfloat16 | e4m3 | int8 | float32, time-major rows of Hkv*D:
                 slot s, row t:  base + s*slot_stride_bytes + t*row_stride_bytes
                                      + t//2**piece_shift * piece_gap_bytes
                 with pages:     base + (page_table[s, t//256]*256 + t%256)*row_stride_bytes
    out  out         (B, P, Hq*D)    as q
    i/o  partials    scratch, `RingShape.partials_bytes(batch)`; contents do not matter
    i/o  arrivals    uint32 scratch, `RingShape.arrivals_bytes(batch)`; zero before the first
                     launch ever, left zero by every launch. Launches on one stream share both.

Float32 rings take float32 q, k, v and give float32 (the codec); all others take and give bfloat16.
Rows past the valid length are never read: they may be NaN, or not be mapped. All pointers and
strides are multiples of 16 bytes. A ring may lie in pieces of 64 rows or more, a power of two, with
``piece_gap_bytes`` of something else between them; a ring shorter than a piece is one piece. All P
rows are in the ring before any query attends, so after the wrap the first of two sees T-1 rows:
upstream Mimi's streamed order, which users hear.

**Repeatable bits.** A session's output bits depend on its own inputs, ring and position: not on
batch, slot, page order, neighbours, entry point (wide or narrow) or run. They do depend on the
target, the head's constants in `RingTuning` and on how q rows are grouped (P * Hq / Hkv).

**Limits.** 8-bit rings hold q as two halves: |q| must stay below 65504. A position is taken mod
2^32, and its float32 image, which RoPE multiplies, is exact up to 2^24 rows (15 days at 12.5 Hz).

**Plugging it in.** Per kind of ring, ``nvrtc.compile_source(SOURCE, shape.definitions(), target)``
once per target; at load, one ``RingKernels(shape, cubin, multiprocessors)``; per captured batch
and layer, ``kernels.launch(ring_params(shape, batch, q=..., ...), stream)`` between the two
subgraphs, captured like any launch. What changes from tick to tick is device memory: positions,
slots, page table. Nothing is allocated and nothing is read back.

Not here: compiling (nvrtc.py), driver calls (cuda.py), what the numbers should be
(ring_reference.py), advancing positions, committing pages.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.cuda import Function, LaunchShape, Module, Stream

SOURCE = Path(__file__).with_name("ring_attention.cu")
PAGE_ROWS = 256  # ring_rows.cuh: 2 MiB of bfloat16 rows of 32 heads x 128
MAX_ROWS_PER_STEP = 4
QUERIES_PER_WARP = 4  # query columns of one tensor-core operand, two parts each
WIDE_WARPS = 2  # ring_attention.cu


class RingShapeError(ValueError):
    """A ring that the kernel cannot serve: the export's fault."""


class CacheType(enum.IntEnum):
    """Stored form of a ring's elements; the value is ``RING_CACHE`` in ring_rows.cuh."""

    BFLOAT16 = 0
    E4M3 = 1
    INT8 = 2
    FLOAT32 = 3

    @property
    def element_bytes(self) -> int:
        return {CacheType.BFLOAT16: 2, CacheType.FLOAT32: 4}.get(self, 1)

    @property
    def io_bytes(self) -> int:
        """Bytes of an element of q, k_new, v_new and out."""
        return 4 if self is CacheType.FLOAT32 else 2

    @property
    def is_scaled(self) -> bool:
        return self in (CacheType.E4M3, CacheType.INT8)

    @property
    def chunk_rows(self) -> int:
        """Rows summed before anything is folded; ``CHUNK_ROWS`` of the .cuh in question."""
        return 32 if self is CacheType.FLOAT32 else 64


@dataclass(frozen=True, slots=True)
class RingTuning:
    """What was tuned on a device. Only ``segment_rows`` changes bits."""

    segment_rows: int = 256
    """Rows folded before a partial result leaves its multiprocessor."""
    wide_buffers: int = 8
    """Units of 2 KiB that a warp keeps in flight, a power of two."""
    wide_warps: int = 8
    """Warps per multiprocessor that registers are limited for, a multiple of 4."""
    narrow_warps: int = 12


@dataclass(frozen=True, slots=True)
class RingShape:
    """One kind of ring: everything the compiled kernel and its launch depend on but the batch."""

    cache: CacheType
    query_heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    """T, rows retained."""
    rows_per_step: int = 1
    """P, rows written and queries asked per tick."""
    tuning: RingTuning = RingTuning()

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128):
            raise RingShapeError(f"head dim is {self.head_dim}; the kernel serves 64 and 128")
        if self.kv_heads < 1 or self.query_heads % self.kv_heads:
            raise RingShapeError(
                f"{self.query_heads} query heads do not divide among {self.kv_heads} KV heads"
            )
        if not 1 <= self.rows_per_step <= min(MAX_ROWS_PER_STEP, self.capacity):
            raise RingShapeError(
                f"{self.rows_per_step} rows per step in a ring of {self.capacity}; "
                f"the kernel writes 1 to {MAX_ROWS_PER_STEP}, and no more than the ring holds"
            )
        rows = self.tuning.segment_rows
        if PAGE_ROWS % rows or rows % self.cache.chunk_rows:
            raise RingShapeError(
                f"segments of {rows} rows do not lie in pages of {PAGE_ROWS} "
                f"or hold whole chunks of {self.cache.chunk_rows}"
            )

    @property
    def queries(self) -> int:
        """Query rows that read one KV head."""
        return self.rows_per_step * self.query_heads // self.kv_heads

    @property
    def query_groups(self) -> int:
        """Warps that read one KV head, each for up to 4 query rows."""
        return -(-self.queries // QUERIES_PER_WARP)

    @property
    def segments(self) -> int:
        return -(-self.capacity // self.tuning.segment_rows)

    @property
    def row_bytes(self) -> int:
        """One time step of K (or of V), all KV heads."""
        return self.kv_heads * self.head_dim * self.cache.element_bytes

    @property
    def lines(self) -> int:
        """Independent outputs per session: KV heads x query groups."""
        return self.kv_heads * self.query_groups

    def partials_bytes(self, batch: int) -> int:
        held = min(QUERIES_PER_WARP, self.queries)
        if self.cache is CacheType.FLOAT32:
            floats = self.head_dim // 4 * held * (4 + 2)
        else:
            floats = 8 * held * (self.head_dim // 8 + 2)
        return batch * self.lines * self.segments * floats * 4

    def arrivals_bytes(self, batch: int) -> int:
        return batch * self.lines * 4

    def definitions(self) -> dict[str, str | int]:
        """Macros that ring_attention.cu is compiled with for this shape."""
        # Tensor cores always take 4 query columns; one kernel serves any number.
        is_float = self.cache is CacheType.FLOAT32
        queries = min(QUERIES_PER_WARP, self.queries) if is_float else QUERIES_PER_WARP
        return {
            "RING_CACHE": int(self.cache),
            "RING_HEAD_DIM": self.head_dim,
            "RING_QUERIES": queries,
            "RING_STEP_ROWS": self.rows_per_step,
            "RING_SEGMENT_ROWS": self.tuning.segment_rows,
            "RING_WIDE_BUFFERS": self.tuning.wide_buffers,
            "RING_WIDE_WARPS": self.tuning.wide_warps,
            "RING_NARROW_WARPS": self.tuning.narrow_warps,
        }


class RingParams(ctypes.Structure):
    """The kernels' one argument; its twin is ``RingParams`` in ring_rows.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "q k_new v_new out k_cache v_cache k_scale v_scale rope_frequency positions "
                "slots page_table partials arrivals"
            ).split()
        ],
        ("slot_stride_bytes", ctypes.c_longlong),
        ("piece_gap_bytes", ctypes.c_longlong),
        *[
            (name, ctypes.c_int)
            for name in (
                "row_stride_bytes q_stride k_stride v_stride out_stride batch segments_per_warp "
                "query_heads kv_heads capacity segments pages_per_slot query_groups write_rows "
                "piece_shift"
            ).split()
        ],
        ("score_scale", ctypes.c_float),
    ]


LOG2_E = 1.4426950408889634


def ring_params(shape: RingShape, batch: int, **given: int) -> RingParams:
    """Parameters with everything that follows from ``shape`` filled in.

    ``given`` names the pointers, and any stride that differs from contiguous tensors and slots.
    """
    fields = dict(
        piece_gap_bytes=0,
        piece_shift=PAGE_ROWS.bit_length() - 1,
        slot_stride_bytes=shape.capacity * shape.row_bytes,
        row_stride_bytes=shape.row_bytes,
        q_stride=shape.query_heads * shape.head_dim,
        k_stride=shape.kv_heads * shape.head_dim,
        v_stride=shape.kv_heads * shape.head_dim,
        out_stride=shape.query_heads * shape.head_dim,
        pages_per_slot=-(-shape.capacity // PAGE_ROWS),
    )
    fields.update(given)
    return RingParams(
        batch=batch,
        segments_per_warp=1,  # set by the launch
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        capacity=shape.capacity,
        segments=shape.segments,
        query_groups=shape.query_groups,
        write_rows=int(shape.query_groups == 1),
        score_scale=LOG2_E / shape.head_dim**0.5,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """How one layer's work is spread over warps: a choice of speed alone, bits do not change."""

    narrow: bool
    """A warp per chunk, a block per segment; else a warp per ``segments_per_warp``."""
    segments_per_warp: int = 1


def choose_spread(shape: RingShape, batch: int, multiprocessors: int) -> Spread:
    """The spread that keeps multiprocessors busy when every ring is full. Measured: LOG.md.

    Narrow while a warp per segment would fill less than two fifths of the warps that can be
    resident. Then as many segments per warp as end in the shortest schedule, counting a wave of
    warps as a warp's segments long and a last, partial wave as half of one at least: half the
    warps still draw all of the bandwidth. With many waves length no longer matters, only the
    start of a warp, which weighs more on the short segments of 8-bit rings.
    """
    resident = multiprocessors * shape.tuning.wide_warps
    segments, lines = shape.segments, batch * shape.lines
    if 5 * lines * segments < 2 * resident:
        return Spread(narrow=True)
    usual = min(segments, 2 if shape.cache.is_scaled else 1)
    if lines * segments > 6 * resident:
        return Spread(False, usual)

    def cost(run: int) -> tuple[float, int]:
        waves, rest = divmod(lines * -(-segments // run), resident)
        partial = max(0.5, rest / resident) if rest else 0.0
        return (waves + partial) * run, abs(run - usual)

    runs = {-(-segments // parts) for parts in range(1, segments + 1)}
    return Spread(False, min(runs, key=cost))


def plan_launches(
    shape: RingShape, batch: int, spread: Spread
) -> Iterator[tuple[str, LaunchShape]]:
    """Kernel names and launch shapes of one layer, in order."""
    if shape.query_groups > 1:
        yield "ring_write", LaunchShape((batch, shape.kv_heads, 1), (32, 1, 1))
    if spread.narrow:
        blocks = batch * shape.segments * shape.lines
        warps = shape.tuning.segment_rows // shape.cache.chunk_rows
        yield "ring_attention_narrow", LaunchShape((blocks, 1, 1), (32 * warps, 1, 1))
    else:
        runs = -(-shape.segments // spread.segments_per_warp)
        blocks = batch * runs * -(-shape.lines // WIDE_WARPS)
        yield "ring_attention_wide", LaunchShape((blocks, 1, 1), (32 * WIDE_WARPS, 1, 1))


class RingKernels:
    """The compiled kernels of one shape, loaded on the current device."""

    def __init__(self, shape: RingShape, image: bytes, multiprocessors: int) -> None:
        self.shape = shape
        self._multiprocessors = multiprocessors
        self._module = Module(image)
        names = ("ring_write", "ring_attention_narrow", "ring_attention_wide")
        self.functions: dict[str, Function] = {n: self._module.function(n) for n in names}

    def launch(self, params: RingParams, stream: Stream, spread: Spread | None = None) -> None:
        """Enqueue one layer's step; parameters are copied. ``spread`` overrides the choice."""
        batch: int = params.batch
        if spread is None:
            spread = choose_spread(self.shape, batch, self._multiprocessors)
        params.segments_per_warp = spread.segments_per_warp
        for name, launch in plan_launches(self.shape, batch, spread):
            self.functions[name].launch(launch, params, stream)

    def close(self) -> None:
        self._module.close()
