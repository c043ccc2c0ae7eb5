"""The temporal transformer between its attentions, as launches: kinds `gated_*` of `lm_kinds`.

    gated_first   embed, norm + qkv                           2 launches at one session
    gated_piece   out + x, norm + gate, down + x, norm + qkv  4
    gated_last    out + x, norm + gate, down + x, norm, text, count

A norm is a launch of its own where there is more than one session. Weights and rows have one
element type, everything is summed in float32, and what the graph rounds is rounded here.

Not here: how a product runs (`linear`), what the roles are (`lm_kinds`).
"""

import ctypes
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from engines import cuda
from engines.bundle import ITEMSIZE, BundleError, StageSpec
from engines.cuda import Device, DevicePtr, LaunchShape
from engines.kernel_stages import Bindable, Kind
from engines.kernels.linear import Launch, Rows, jobs, launch_of
from engines.kernels.linear_choice import THREADS, Finish, Product, partials_bytes
from engines.kernels.lm_kinds import MOST_STREAMS
from engines.kernels.lm_stage import (
    Areas,
    SmallKernels,
    StageProducts,
    dtype_of,
    numbers_of,
    run_all,
)
from engines.kernels.nvrtc import Job

SOURCE = Path(__file__).with_name("gated.cu")


class EmbedParams(ctypes.Structure):
    """Twin of ``EmbedParams`` in gated.cu."""

    _fields_ = [
        *[(name, ctypes.c_uint64) for name in "codes tokens offset moved y tables".split()],
        *[(name, ctypes.c_uint32) for name in "streams own rows features".split()],
        ("text_initial", ctypes.c_int),
        ("initial", ctypes.c_int),
        ("delays", ctypes.c_int * MOST_STREAMS),
    ]


class CountParams(ctypes.Structure):
    """Twin of ``CountParams`` in gated.cu."""

    _fields_ = [
        ("counter", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
        ("batch", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class _Areas(Areas):
    """Scratch of a gated stage."""

    def __init__(self, stage: StageSpec, slots: int, base: int = 0) -> None:
        super().__init__(base)
        size = ITEMSIZE[dtype_of(stage)]
        features, gate = features_of(stage), _gate(stage)
        self.partials = self.take(max(partials_bytes(p, slots) for p in _products(stage).values()))
        self.normed = self.take(slots * features * size)
        self.x = self.take(slots * features * size)
        self.opened = self.take(slots * gate * size)


class GatedKernels:
    """Kernels of all gated stages of a bundle, and the tables they read."""

    def __init__(self, stages: Iterable[StageSpec], device: Device, folder: Path) -> None:
        dtypes = {dtype_of(stage) for stage in stages}
        if len(dtypes) != 1:
            raise BundleError(f"gated stages of {', '.join(sorted(dtypes))}: one is served")
        (dtype,) = dtypes
        self.kernels = SmallKernels(SOURCE, dtype, device, folder)
        self._embed = self.kernels.function("gated_embed")
        self._count = self.kernels.function("count_ticks")
        self._held: list[DevicePtr] = []

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        """See `kernel_stages.Family.bind`."""
        assert bindable.step.stage.kernel is not None
        layer = _Layer(self.kernels, bindable)
        kind = bindable.step.stage.kernel.kind
        if kind == "gated_first":
            launches = [self._embedding(bindable), *layer.before()]
        elif kind == "gated_piece":
            launches = [*layer.after(), *layer.before()]
        else:
            launches = [*layer.after(), *layer.think(), self._counting(bindable)]
        return run_all(launches)

    def close(self) -> None:
        self.kernels.close()
        for pointer in self._held:
            cuda.release(pointer)
        self._held = []

    def _embedding(self, bindable: Bindable) -> Launch:
        stage, numbers = bindable.step.stage, numbers_of(bindable.step.stage)
        codes, tokens, offset = (bindable.address(b.buffer) for b in bindable.step.inputs)
        x, _, moved = (bindable.address(b.buffer) for b in bindable.step.outputs)
        streams, rows = stage.inputs[1].row_shape
        addresses = [bindable.weights[f"emb.{stream}"] for stream in range(streams)]
        tables = cuda.allocate(8 * streams)
        self._held.append(tables)
        cuda.write_device(tables, struct.pack(f"<{streams}Q", *addresses))
        params = EmbedParams(
            codes=codes,
            tokens=tokens,
            offset=offset,
            moved=moved,
            y=x,
            tables=tables,
            streams=streams,
            own=streams - stage.inputs[0].row_shape[0],
            rows=rows,
            features=features_of(stage),
            text_initial=int(numbers["initial.0"]),
            initial=int(numbers["initial.1"]),
        )
        for stream in range(streams):
            params.delays[stream] = int(numbers[f"delay.{stream}"])
        shape = LaunchShape((bindable.batch, 1, 1), (THREADS, 1, 1))
        return launch_of(self._embed, shape, params, bindable.stream)

    def _counting(self, bindable: Bindable) -> Launch:
        counter = bindable.address(bindable.step.inputs[2].buffer)
        moved = bindable.address(bindable.step.outputs[2].buffer)
        params = CountParams(counter, moved, bindable.batch, 0)
        shape = LaunchShape((-(-bindable.batch // THREADS), 1, 1), (THREADS, 1, 1))
        return launch_of(self._count, shape, params, bindable.stream)


class _Layer:
    """One stage's launches: the end of a layer, the beginning of the next."""

    def __init__(self, kernels: SmallKernels, bindable: Bindable) -> None:
        stage = bindable.step.stage
        self._features, gate = features_of(stage), _gate(stage)
        areas = _Areas(stage, bindable.batch, bindable.scratch.memory)
        products = _products(stage)
        self._products = StageProducts(
            kernels.linear,
            bindable,
            products,
            partials=areas.partials,
            normed=Rows(areas.normed, self._features),
            eps=numbers_of(stage)["eps"],
        )
        self._opened = Rows(areas.opened, gate)
        inputs = [bindable.address(bound.buffer) for bound in bindable.step.inputs]
        outputs = [bindable.address(bound.buffer) for bound in bindable.step.outputs]
        self._is_last = stage.kernel is not None and stage.kernel.kind == "gated_last"
        self._x = Rows(inputs[0], self._features)
        self._attended = Rows(inputs[1], self._features)
        self._y = Rows(areas.x if self._is_last else outputs[0], self._features)
        # What comes out last: QKV, or logits with the hidden rows before them.
        self._hidden = Rows(outputs[0], self._features)
        self._out = Rows(outputs[1], products["text" if self._is_last else "qkv"].outputs)

    def after(self) -> list[Launch]:
        """From what attention gave, and the layer's input, to its output in ``_y``."""
        product = self._products.product
        return [
            *product("out", self._attended, self._y, add=self._x),
            *product("gate", self._y, self._opened, norm="norm2"),
            *product("down", self._opened, self._y, add=self._y),
        ]

    def before(self) -> list[Launch]:
        """From ``_y`` to what the next attention takes."""
        return self._products.product("qkv", self._y, self._out, norm="norm1")

    def think(self) -> list[Launch]:
        """From ``_y`` to the stage's outputs."""
        return [
            self._products.norm("out_norm", self._features, self._y, self._hidden),
            *self._products.product("text", self._hidden, self._out),
        ]


def features_of(stage: StageSpec) -> int:
    assert stage.kernel is not None, stage.name
    role = "qkv" if "qkv" in stage.kernel.weights else "text"
    return stage.kernel.weights[role].shape[1]


def _gate(stage: StageSpec) -> int:
    return int(numbers_of(stage).get("gate", 0))


def _products(stage: StageSpec) -> dict[str, Product]:
    """By role, for the roles the stage has."""
    assert stage.kernel is not None, stage.name
    finishes = {"out": Finish.ADD, "down": Finish.ADD, "gate": Finish.GATE, "text": Finish.FLOAT}
    found: dict[str, Product] = {}
    for role in ("out", "gate", "down", "qkv", "text"):
        weight = stage.kernel.weights.get(role)
        if weight is not None:
            finish = finishes.get(role, Finish.STORE)
            halves = 2 if finish is Finish.GATE else 1
            found[role] = Product(weight.shape[0] // halves, weight.shape[1], finish)
    return found


def _scratch_bytes(stage: StageSpec, slots: int) -> int:
    return _Areas(stage, slots).nbytes


def _jobs(stages: Iterable[StageSpec], slots: int, device: Device) -> list[Job]:
    held = list(stages)
    products = {product for stage in held for product in _products(stage).values()}
    return jobs(products, slots, dtype_of(held[0]), device)


KINDS = {
    name: Kind("gated", GatedKernels, _scratch_bytes, _jobs)
    for name in ("gated_first", "gated_piece", "gated_last")
}
"""For `kernel_stages.kinds`."""
