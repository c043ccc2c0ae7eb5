"""The built-in stage `ring_attention` on a GPU: one compiled kernel per shape, launched in a tick.

Where things lie comes from the executor's layout: queries, keys and values side by side in a wire
(the kernel takes strides, so nothing is split or copied), rings as the arena has them. A table on
the device says in which place each row of the batch has its rings; it changes between ticks, when
a session moves to another slot and its rings stay where they are. Scratch is shared by all layers
of a shape, since launches on one stream follow each other.

A launch allocates nothing and waits for nothing, so it is captured like any other part of a tick.
Not here: the kernel and what it promises (`kernels.ring_attention`), the manifest (`ring_stage`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines import cuda, ring_stage
from engines.bundle import NEXT, BundleError, Dtype, StageSpec
from engines.cuda import Device, DevicePtr, Stream
from engines.cuda_memory import write_ordered
from engines.kernels import nvrtc
from engines.kernels.ring_attention import (
    SOURCE,
    CacheType,
    RingKernels,
    RingParams,
    RingShape,
    RingShapeError,
    ring_params,
)
from engines.layout import RingRows
from engines.program import Buffer, Step

CACHES: dict[tuple[Dtype, Dtype], CacheType] = {
    ("float32", "float32"): CacheType.FLOAT32,
    ("bfloat16", "bfloat16"): CacheType.BFLOAT16,
    ("bfloat16", "float8e4m3"): CacheType.E4M3,
    ("bfloat16", "int8"): CacheType.INT8,
}
"""By dtype of the rows and of the rings."""

Scales = Callable[[StageSpec], NDArray[np.float32] | None]
"""(2, KV heads) float32 of a stage's 8-bit rings: `ring_stage.read_scales` of a bundle."""

Address = Callable[[Buffer], DevicePtr]
"""Where slot 0 of a buffer lies."""

Rows = Callable[[str], RingRows | None]
"""How the rows of a ring lie from there on; None: slot after slot, row after row."""


def shape_of(stage: StageSpec) -> RingShape:
    """The kernel's shape. Raises `BundleError` when there is no kernel for this stage."""
    ring = stage.ring
    assert ring is not None, stage.name
    rows, rings = stage.inputs[0].dtype, ring_stage.cache_of(stage)
    cache = CACHES.get((rows, rings))
    remedy = "Build the bundle for it again: duplexbox export build --attention standard"
    if cache is None:
        known = ", ".join(f"{ours} with rings of {kept}" for ours, kept in CACHES)
        raise BundleError(
            f"stage {stage.name}: rows of {rows} with rings of {rings}; the kernel takes {known}. "
            f"Build the bundle for it again: duplexbox export build --dtype bfloat16"
        )
    try:
        return RingShape(
            cache=cache,
            query_heads=ring.query_heads,
            kv_heads=ring.kv_heads,
            head_dim=ring.head_dim,
            capacity=ring.retain,
            rows_per_step=ring.rows,
        )
    except RingShapeError as err:
        raise BundleError(f"stage {stage.name}: {err}. {remedy}") from None


def rope_frequency(head_dim: int, max_period: float) -> NDArray[np.float32]:
    """(D/2,) radians per row of each pair, in float32 as the models have them."""
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    frequency: NDArray[np.float32] = np.exp(pairs * np.float32(-np.log(max_period) * 2 / head_dim))
    return frequency


def load_kernels(shape: RingShape, device: Device, folder: Path) -> RingKernels:
    """Compile for ``device``, or find in ``folder``, and load. Raises `nvrtc.NoCompiler`."""
    major, minor = device.compute_capability
    image = nvrtc.compile_cached(SOURCE, shape.definitions(), f"sm_{major}{minor}", folder)
    return RingKernels(shape, image, device.attribute("MULTIPROCESSOR_COUNT"))


def _by_slot(name: str) -> None:
    """`Rows` of rings that lie as tensors do."""


def _shifted(lie: RingRows | None, k: int, v: int) -> RingRows | None:
    return None if lie is None else replace(lie, first=lie.first + v - k)


def _strides(lie: RingRows) -> dict[str, int]:
    """The kernel's numbers for rings whose rows lie so."""
    shift = lie.piece_rows.bit_length() - 1
    is_whole = lie.piece_rows & (lie.piece_rows - 1) != 0  # all its rows: no gap is ever crossed
    return {
        "slot_stride_bytes": lie.slot_bytes,
        "row_stride_bytes": lie.row_bytes,
        "piece_shift": 30 if is_whole else shift,
        "piece_gap_bytes": 0 if is_whole else lie.piece_bytes - lie.piece_rows * lie.row_bytes,
    }


class RingLauncher:
    """Kernels, scratch and tables of all ring stages of a bundle. One thread uses it."""

    def __init__(
        self,
        stages: Iterable[StageSpec],
        slots: int,
        device: Device,
        folder: Path,
        scales: Scales = lambda stage: None,
    ) -> None:
        """Load what ``stages`` need for batches up to ``slots``; others are passed over.

        scales: asked once for every stage with 8-bit rings.
        Raises `BundleError` when a stage has no kernel, `nvrtc.NoCompiler`.
        """
        self._held: list[DevicePtr] = []
        self._kernels: dict[RingShape, RingKernels] = {}
        self._scratch: dict[RingShape, tuple[DevicePtr, DevicePtr]] = {}
        self._frequency: dict[tuple[int, float], DevicePtr] = {}
        self._scales: dict[str, DevicePtr] = {}
        self.scratch_bytes = 0
        self._slots = DevicePtr(0)
        self._count = slots
        try:
            for stage in stages:
                if stage.ring is not None:
                    self._load(stage, slots, device, folder)
                    self._load_scales(stage, scales(stage))
            if self._kernels:
                self._slots = self._table(np.arange(slots, dtype=np.int32).tobytes())
        except BaseException:
            self.close()
            raise

    def place(self, places: Sequence[int], stream: Stream) -> None:
        """From the next launch on, row i of a batch has its rings in ``places[i]``."""
        assert sorted(places) == list(range(self._count)), places
        if self._kernels:
            write_ordered(self._slots, np.array(places, np.int32).tobytes(), stream)

    def bind(
        self, step: Step, batch: int, address: Address, stream: Stream, rows: Rows = _by_slot
    ) -> Callable[[], None]:
        """What enqueues one stage for exactly ``batch`` sessions in slots 0..batch-1."""
        params = self.params(step, batch, address, rows)
        kernels = self._kernels[shape_of(step.stage)]
        return lambda: kernels.launch(params, stream)

    def params(self, step: Step, batch: int, address: Address, rows: Rows = _by_slot) -> RingParams:
        """The kernel's argument: every address and stride of one stage and batch."""
        ring, shape = step.stage.ring, shape_of(step.stage)
        assert ring is not None, step.stage.name
        qkv, position, k, v = (address(bound.buffer) for bound in step.inputs)
        attended, k_next, v_next = (address(bound.buffer) for bound in step.outputs)
        assert (k, v) == (k_next, v_next), f"{step.stage.name}: rings are updated where they lie"
        io = shape.cache.io_bytes
        queries, keys = ring.query_heads * ring.head_dim, ring.kv_heads * ring.head_dim
        width = queries + 2 * keys
        partials, arrivals = self._scratch[shape]
        has_rope = ring.max_period > 0
        k_scale = int(self._scales.get(step.stage.name, 0))
        lie = rows(step.inputs[2].tensor.name)
        assert rows(step.inputs[3].tensor.name) in (None, _shifted(lie, k, v)), step.stage.name
        strides = {} if lie is None else _strides(lie)
        return ring_params(
            shape,
            batch,
            q=int(qkv),
            k_new=int(qkv) + queries * io,
            v_new=int(qkv) + (queries + keys) * io,
            q_stride=width,
            k_stride=width,
            v_stride=width,
            out=int(attended),
            k_cache=int(k),
            v_cache=int(v),
            k_scale=k_scale,
            v_scale=k_scale + self._v_scale_bytes(ring.kv_heads) if k_scale else 0,
            positions=int(position),
            slots=int(self._slots),
            rope_frequency=int(self._frequency[ring.head_dim, ring.max_period]) if has_rope else 0,
            partials=int(partials),
            arrivals=int(arrivals),
            **strides,
        )

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()
        for pointer in self._held:
            cuda.release(pointer)
        self._kernels, self._held = {}, []

    def _load(self, stage: StageSpec, slots: int, device: Device, folder: Path) -> None:
        ring, shape = stage.ring, shape_of(stage)
        assert ring is not None, stage.name
        names = [tensor.name + NEXT for tensor in stage.inputs[2:]]
        assert names == [tensor.name for tensor in stage.outputs[1:]], stage.name
        key = (ring.head_dim, ring.max_period)
        if ring.max_period > 0 and key not in self._frequency:
            self._frequency[key] = self._table(rope_frequency(*key).tobytes())
        if shape in self._kernels:
            return
        self._kernels[shape] = load_kernels(shape, device, folder)
        partials = self._allocate(shape.partials_bytes(slots))
        arrivals = self._allocate(shape.arrivals_bytes(slots))
        cuda.fill_bytes(arrivals, 0, shape.arrivals_bytes(slots))
        self._scratch[shape] = (partials, arrivals)

    def _load_scales(self, stage: StageSpec, scales: NDArray[np.float32] | None) -> None:
        assert (scales is not None) == shape_of(stage).cache.is_scaled, stage.name
        if scales is None:
            return
        assert stage.ring is not None, stage.name
        rows = np.zeros((2, self._v_scale_bytes(stage.ring.kv_heads) // 4), np.float32)
        rows[:, : scales.shape[1]] = scales
        self._scales[stage.name] = self._table(rows.tobytes())

    @staticmethod
    def _v_scale_bytes(kv_heads: int) -> int:
        """How far the scales of the values lie behind those of the keys: pointers are aligned."""
        return -(-kv_heads * 4 // 16) * 16

    def _table(self, raw: bytes) -> DevicePtr:
        table = self._allocate(len(raw))
        cuda.write_device(table, raw)
        return table

    def _allocate(self, nbytes: int) -> DevicePtr:
        self._held.append(cuda.allocate(nbytes))
        self.scratch_bytes += nbytes
        return self._held[-1]
