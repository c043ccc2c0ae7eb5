"""Puts one ring attention case on a GPU and brings the result back, for tests.

A `Case` is host data alone; `RingRig` owns the device, a bump allocator over one buffer, and the
compiled kernels, which it keeps on disk by content, because compiling takes longer than running.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda
from engines.kernels import nvrtc
from engines.kernels import ring_reference as ref
from engines.kernels.ring_attention import (
    PAGE_ROWS,
    SOURCE,
    CacheType,
    RingKernels,
    RingParams,
    RingShape,
    Spread,
    ring_params,
)

Array = np.ndarray[Any, np.dtype[Any]]
COMPILED = Path(__file__).parents[3] / "build" / "kernels"


@dataclass(frozen=True)
class Case:
    """One step of a batch; arrays as in ring_reference."""

    shape: RingShape
    q: Array
    k_new: Array
    v_new: Array
    positions: Array
    slots: Array
    k_cache: Array
    v_cache: Array
    k_scale: Array
    v_scale: Array
    frequency: Array | None
    page_table: Array | None = None
    lie: tuple[tuple[str, int], ...] = ()
    """Strides of `ring_params`, where slots do not lie one after the other."""

    def only(self, rows: list[int]) -> Case:
        """The same rings, with only these rows of the batch."""
        return replace(
            self,
            q=self.q[rows],
            k_new=self.k_new[rows],
            v_new=self.v_new[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
        )

    def expected(self, k_cache: Array, v_cache: Array) -> Array:
        """(B, P, Hq, D) float64 over rings as they are after the step."""
        return ref.attend(
            self.shape, self.q, self.positions, self.slots, k_cache, v_cache,
            self.k_scale, self.v_scale, self.frequency, self.page_table,
        )  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """A case on the device: where everything lies, and what its output looks like."""

    params: RingParams
    out_like: Array


class RingRig:
    """With ``fresh``, every array is an allocation of its own and nothing is filled that a kernel
    should fill itself: what compute-sanitizer needs to see a stray access.
    """

    def __init__(self, pool_bytes: int = 1 << 30, fresh: bool = False) -> None:
        self.fresh = fresh
        self._owned: list[cuda.DevicePtr] = []
        self.device = cuda.Device()
        self.stream = cuda.Stream()
        major, minor = self.device.compute_capability
        self.target = f"sm_{major}{minor}"
        self.multiprocessors = self.device.attribute("MULTIPROCESSOR_COUNT")
        self._pool = cuda.allocate(pool_bytes)
        self._pool_bytes = pool_bytes
        self._used = 0
        self._kernels: dict[RingShape, RingKernels] = {}
        self._images: dict[str, bytes] = {}

    def kernels(self, shape: RingShape) -> RingKernels:
        key = json.dumps(shape.definitions())
        if key not in self._images:
            self._images[key] = nvrtc.compile_cached(
                SOURCE, shape.definitions(), self.target, COMPILED
            )
        if shape not in self._kernels:
            if len(self._kernels) > 64:
                self._kernels.pop(next(iter(self._kernels))).close()
            self._kernels[shape] = RingKernels(shape, self._images[key], self.multiprocessors)
        return self._kernels[shape]

    def place(self, array: Array) -> cuda.DevicePtr:
        """Copy to the device; valid until `forget`."""
        pointer = self.room(array.nbytes)
        cuda.write_device(pointer, np.ascontiguousarray(array).tobytes())
        return pointer

    def room(self, nbytes: int) -> cuda.DevicePtr:
        if self.fresh:
            self._owned.append(cuda.allocate(nbytes))
            return self._owned[-1]
        pointer = cuda.DevicePtr(self._pool + self._used)
        self._used += -(-nbytes // 256) * 256
        assert self._used <= self._pool_bytes, (self._used, self._pool_bytes)
        return pointer

    def forget(self) -> None:
        self._used = 0
        while self._owned:
            cuda.release(self._owned.pop())

    def read(self, pointer: cuda.DevicePtr, like: Array) -> Array:
        raw = np.frombuffer(cuda.read_device(pointer, like.nbytes), like.dtype)
        return raw.reshape(like.shape)

    def put(self, case: Case) -> Placed:
        """Everything of ``case`` on the device; what `put` placed before is gone."""
        shape, batch = case.shape, len(case.slots)
        self.forget()
        partials = self.room(shape.partials_bytes(batch))
        if not self.fresh:
            cuda.fill_bytes(partials, 0xFF, shape.partials_bytes(batch))
        pages = case.page_table
        like = np.zeros(case.q.shape, np.float32 if shape.cache.io_bytes == 4 else np.uint16)
        params = ring_params(
            shape,
            batch,
            q=self.place(as_input(shape, case.q)),
            k_new=self.place(as_input(shape, case.k_new)),
            v_new=self.place(as_input(shape, case.v_new)),
            out=self.room(like.nbytes),
            k_cache=self.place(case.k_cache),
            v_cache=self.place(case.v_cache),
            k_scale=self.place(case.k_scale) if shape.cache.is_scaled else 0,
            v_scale=self.place(case.v_scale) if shape.cache.is_scaled else 0,
            rope_frequency=0 if case.frequency is None else self.place(case.frequency),
            positions=self.place(case.positions.astype(np.int64)),
            slots=self.place(case.slots.astype(np.int32)),
            page_table=0 if pages is None else self.place(pages.astype(np.int32)),
            partials=partials,
            arrivals=self.place(np.zeros(batch * shape.lines, np.uint32)),
            **dict(case.lie),
        )
        return Placed(params, like)

    def run(
        self, case: Case, spread: Spread | None, replays: int = 1
    ) -> tuple[Array, Array, Array]:
        """(output in stored bits, k_cache, v_cache) after the step; asserts replays are equal.

        The output is poisoned first, so an element that nothing wrote is NaN.
        """
        placed, kernels = self.put(case), self.kernels(case.shape)
        params, like = placed.params, placed.out_like
        first: Array | None = None
        for _ in range(replays):
            cuda.fill_bytes(params.out, 0xFF, like.nbytes)
            self.device.synchronize()
            kernels.launch(params, self.stream, spread)
            self.stream.synchronize()
            got = self.read(params.out, like)
            assert first is None or np.array_equal(first.view(np.uint8), got.view(np.uint8))
            first = got
        assert first is not None
        arrivals = np.zeros(len(case.slots) * case.shape.lines, np.uint32)
        left = self.read(params.arrivals, arrivals)
        assert not left.any(), "arrivals are not back at zero"
        return (
            first,
            self.read(params.k_cache, case.k_cache),
            self.read(params.v_cache, case.v_cache),
        )


def as_input(shape: RingShape, x: Array) -> Array:
    """Float32 values as the kernel takes them."""
    return x if shape.cache is CacheType.FLOAT32 else ref.bf16_bits(x)


POISON = {
    CacheType.BFLOAT16: 0x7FFF,
    CacheType.E4M3: 0x7F,
    CacheType.INT8: -128,  # int8 has no NaN; -128 is what storing never writes
    CacheType.FLOAT32: np.nan,
}


def random_case(
    rng: np.random.Generator,
    shape: RingShape,
    positions: Array,
    slots: int,
    paged: bool = False,
    rotated: bool = True,
    size: float = 1.0,
) -> Case:
    """Rings with random valid rows and poison everywhere else; slots in random order."""
    batch = len(positions)
    assert slots >= batch
    place = rng.permutation(slots)[:batch]
    pages = -(-shape.capacity // PAGE_ROWS)
    table = rng.permutation(slots * pages).reshape(slots, pages) if paged else None
    rows = slots * (pages * PAGE_ROWS if paged else shape.capacity)
    k_scale, v_scale = rng.uniform(0.01, 0.04, (2, shape.kv_heads)).astype(np.float32)
    caches = []
    for scale in (k_scale, v_scale):
        pool = np.full(
            (rows, shape.kv_heads, shape.head_dim),
            POISON[shape.cache],
            ref.STORED_DTYPES[shape.cache],
        )
        for position, slot in zip(positions.tolist(), place.tolist(), strict=True):
            held = ref.ring_rows(shape, slot, table)[: min(position, shape.capacity)]
            x = rng.normal(size=(len(held), *pool.shape[1:])).astype(np.float32)
            pool[held] = ref.store(shape.cache, x, scale[:, None])
        caches.append(pool)
    steps = (batch, shape.rows_per_step)
    # Inputs that the kernel is given exactly.
    exact = (lambda x: x) if shape.cache is CacheType.FLOAT32 else _through_bf16
    q = exact(size * rng.normal(size=(*steps, shape.query_heads, shape.head_dim)))
    k, v = (exact(rng.normal(size=(*steps, shape.kv_heads, shape.head_dim))) for _ in range(2))
    return Case(
        shape,
        q.astype(np.float32),
        k.astype(np.float32),
        v.astype(np.float32),
        positions,
        place,
        caches[0],
        caches[1],
        k_scale,
        v_scale,
        ref.rope_frequency(shape.head_dim) if rotated else None,
        table,
    )


def _through_bf16(x: Array) -> Array:
    return ref.bf16_values(ref.bf16_bits(x))
