"""Products of few rows with large weights, and the norm in front of them: memory and launches.

At a handful of sessions a product is as slow as its weights are long, so nothing else may cost
much: norms and gates are folded in, and the next product's weights are already under way when
this one ends.

Not here: which kernel serves which batch (`linear_choice`), what the products are for (`gated`,
`depth`), the reference (`lm_reference`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engines import cuda
from engines.bundle import Dtype
from engines.cuda import Device, DevicePtr, Function, LaunchShape, Module, Stream
from engines.kernels import nvrtc
from engines.kernels.linear_choice import (
    BARE,
    ELEMENTS,
    MOST,
    SOURCE,
    STEP,
    THREADS,
    Choice,
    Finish,
    Product,
    Room,
    choose,
    definitions,
    few,
    sessions_of,
    target_of,
)
from engines.kernels.nvrtc import Job

PLAIN_SHARED_BYTES = 42 << 10
"""Of a block that needs no asking, beside what it takes in any case."""
OVERLAPS = True
"""Whether launches start before the one in front has ended; False to measure what that gains."""


class Rows(NamedTuple):
    """A row per session, ``stride`` elements apart."""

    address: int
    stride: int


def jobs(products: Iterable[Product], slots: int, dtype: Dtype, device: Device) -> list[Job]:
    """Everything that batches of 1 to ``slots`` sessions may need compiled."""
    is_half, room = dtype != "float32", room_of(device)
    made = [definitions(ELEMENTS[dtype], BARE)]
    for product in products:
        for batch in range(1, min(slots, MOST) + 1):
            choices = [choose(product, batch, is_half=is_half, room=room)]
            if batch == 1 and is_half and product.slices:
                choices.append(few(product, 1, normed=True, room=room))
            made += [definitions(ELEMENTS[dtype], choice) for choice in choices]
    target = target_of(device.compute_capability)
    return [Job(SOURCE, one, target) for one in {str(one): one for one in made}.values()]


def room_of(device: Device) -> Room:
    return Room(
        device.attribute("MULTIPROCESSOR_COUNT"),
        device.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        has_wgmma=device.compute_capability == (9, 0),
    )


class LinearParams(ctypes.Structure):
    """Twin of ``LinearParams`` in linear.cu."""

    _fields_ = [
        *[(name, ctypes.c_uint64) for name in "w x alpha add y partials arrivals".split()],
        *[
            (name, ctypes.c_uint32)
            for name in ("outputs inputs batch x_stride add_stride y_stride slices finish").split()
        ],
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
    ]


class WideParams(ctypes.Structure):
    """Twin of ``WideParams`` in linear_wide.cuh."""

    _fields_ = [
        ("w", ctypes.c_uint64 * 16),
        ("x", ctypes.c_uint64 * 16),
        ("product", LinearParams),
        *[(name, ctypes.c_uint32) for name in "stages x_bytes lead unused".split()],
        ("reserved", ctypes.c_uint64 * 2),
    ]


class NormParams(ctypes.Structure):
    """Twin of ``NormParams`` in linear.cu."""

    _fields_ = [
        *[(name, ctypes.c_uint64) for name in "x alpha y".split()],
        *[(name, ctypes.c_uint32) for name in "inputs x_stride y_stride".split()],
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm of a product's rows. alpha: (I,) on the device."""

    alpha: int
    eps: float


Launch = Callable[[], None]


class LinearKernels:
    """`linear.cu` for one element type, loaded on the current device as batches ask for it."""

    def __init__(self, dtype: Dtype, device: Device, folder: Path) -> None:
        """Raises `nvrtc.NoCompiler` if kernels have to be compiled and cannot be."""
        self._target, self._folder = target_of(device.compute_capability), folder
        self._element = ELEMENTS[dtype]
        self.is_half = dtype != "float32"
        self.room = room_of(device)
        self._modules: dict[str, Module] = {}
        self._functions: dict[str, tuple[Function, int]] = {}
        self._norm = self._module(BARE).function("norm_rows")

    def product(
        self,
        product: Product,
        batch: int,
        *,
        w: int,
        x: Rows,
        y: Rows,
        scratch: tuple[DevicePtr, DevicePtr],
        stream: Stream,
        norm: Norm | None = None,
        normed: Rows | None = None,
        add: Rows | None = None,
        choice: Choice | None = None,
    ) -> list[Launch]:
        """Launches of one product. scratch: counters at zero, and `partials_bytes` of memory.

        normed: where rows go once normed, needed with ``norm``. add: of `Finish.ADD`; may be y.
        """
        launches: list[Launch] = []
        folds = norm is not None and self.is_half and product.slices > 0 and batch == 1
        if norm is not None and not folds:
            assert normed is not None, product
            launches.append(self.norm(norm, batch, product.inputs, x, normed, stream))
            x, norm = normed, None
        for first in range(0, batch, MOST):
            count = min(MOST, batch - first)
            chosen = choice or choose(
                product, count, is_half=self.is_half, normed=folds, room=self.room
            )
            function = self._function(chosen)
            width = 4 if product.finish is Finish.FLOAT else self._bytes
            params = LinearParams(
                w=w,
                x=x.address + first * x.stride * self._bytes,
                alpha=norm.alpha if norm else 0,
                add=add.address + first * add.stride * self._bytes if add else 0,
                y=y.address + first * y.stride * width,
                partials=scratch[1],
                arrivals=scratch[0],
                outputs=product.outputs,
                inputs=product.inputs,
                batch=count,
                x_stride=x.stride,
                add_stride=add.stride if add else 0,
                y_stride=y.stride,
                slices=product.slices,
                finish=product.finish,
                eps=norm.eps if norm else 0,
            )
            shape = LaunchShape(chosen.blocks, (chosen.threads, 1, 1), chosen.shared_bytes)
            asked = self._mapped(params, chosen) if chosen.kernel == "linear_wide" else params
            launches.append(launch_of(function, shape, asked, stream))
        return launches

    def _mapped(self, params: LinearParams, choice: Choice) -> WideParams:
        """With the boxes that a block of ``choice`` copies."""
        halves = 2 if params.finish == Finish.GATE else 1
        assert (params.y_stride | params.add_stride) % 2 == 0, "outputs go in pairs"
        w = cuda.matrix_map(
            DevicePtr(params.w),
            (params.outputs * halves, params.inputs),
            params.inputs * 2,
            (choice.height // halves, STEP),
        )
        x = cuda.matrix_map(
            DevicePtr(params.x),
            (params.batch, params.inputs),
            params.x_stride * 2,
            (sessions_of(params.batch), STEP),
        )
        x_bytes = sessions_of(params.batch) * STEP * 2
        return WideParams(w, x, params, choice.stages, x_bytes, choice.lead)

    def norm(
        self, norm: Norm, batch: int, features: int, x: Rows, y: Rows, stream: Stream
    ) -> Launch:
        """A launch that writes the norm of x, (B, features), to y."""
        params = NormParams(
            x.address, norm.alpha, y.address, features, x.stride, y.stride, norm.eps
        )
        shape = LaunchShape((batch, 1, 1), (THREADS, 1, 1))
        return launch_of(self._norm, shape, params, stream)

    def close(self) -> None:
        for module in self._modules.values():
            module.close()
        self._modules = {}

    @property
    def _bytes(self) -> int:
        return 2 if self.is_half else 4

    def _module(self, choice: Choice) -> Module:
        made = definitions(self._element, choice)
        key = str(made)
        if key not in self._modules:
            image = nvrtc.compile_cached(SOURCE, made, self._target, self._folder)
            self._modules[key] = Module(image)
        return self._modules[key]

    def _function(self, choice: Choice) -> Function:
        key = f"{choice.kernel} {definitions(self._element, choice)}"
        function, allowed = self._functions.get(key, (None, PLAIN_SHARED_BYTES))
        if function is None:
            function = self._module(choice).function(choice.kernel)
        if choice.shared_bytes > allowed:
            function.allow_shared(choice.shared_bytes)
        self._functions[key] = function, max(allowed, choice.shared_bytes)
        return function


def launch_of(
    function: Function, shape: LaunchShape, params: ctypes.Structure, stream: Stream
) -> Launch:
    """A launch whose kernel waits by itself for the one in front of it."""
    return lambda: function.launch(shape, params, stream, overlaps=OVERLAPS)
