"""Products of few rows with large weights, and the norm in front of them: plan and launches.

    y[b, o] = finish(sum of w[o, i] * x[b, i])       W (O, I) as in the file, B = 1, 2, 3, ...

At a handful of sessions a product is as slow as its weights are long, so nothing else may cost
much: norms and gates are folded in, and the next product's weights are already under way when
this one ends. `choose` says which kernel of `linear.cu` serves which batch, by what was measured
(LOG.md); a session's bits are the same under all of them, whatever its batch and neighbours.

Finishes: STORE rounds to the element; ADD then adds a row and rounds again; GATE takes a matrix
of twice the outputs and gives silu(first half) * second half; FLOAT rounds and stores float32.

Not here: memory, what the products are for (`gated`, `depth`), the reference (`linear_reference`).
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engines.bundle import Dtype
from engines.cuda import Device, DevicePtr, Function, LaunchShape, Module, Stream
from engines.kernels import nvrtc
from engines.kernels.nvrtc import Job

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
CLUSTER_WEIGHTS = 1 << 23
"""Up to so many weights, 1024 -> 1024 took 5.9 us at 64 sessions and not 10.2; 4096 -> 4096, which
has more, took 20.4 and not 18.8 (LOG.md)."""
STAGES = (3, 4, 5, 6, 8, 12)
"""Stages under way that kernels are compiled for."""
PLAIN_SHARED_BYTES = 42 << 10
"""Of a block that needs no asking, beside what it takes in any case."""
SWIZZLE_BYTES = 1 << 10
"""What the stages of `linear_many` are aligned to."""
STATIC_BYTES = 3 << 9
"""Shared memory that a block takes beside its stages, rounded up."""
OVERLAPS = True
"""Whether launches start before the one in front has ended; False to measure what that gains."""


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


class Rows(NamedTuple):
    """A row per session, ``stride`` elements apart."""

    address: int
    stride: int


class Room(NamedTuple):
    """What a device has; the default is an H200's."""

    multiprocessors: int = 132
    shared_bytes: int = 228 << 10
    """Of a multiprocessor."""
    block_bytes: int = 227 << 10

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
    """Of 8 sessions; 0: `linear_many` is not meant."""
    height: int = 0
    """Rows of a block of `linear_many`: 64, 128 or 256."""
    stages: int = STAGES[0]
    blocks_per_sum: int = 1
    is_cluster: bool = False
    """Blocks of one sum meet in a cluster, where the target has clusters, not in memory."""
    threads: int = THREADS


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
    stripes = product.outputs * (2 if product.finish is Finish.GATE else 1) / 64
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
    """`linear_many` of 64, 128 or 256 rows a block; split: a block has one part of their sums."""
    tiles = next(tiles for tiles in TILES if 8 * tiles >= batch)
    stripe = height // (2 if product.finish is Finish.GATE else 1)
    per_sum = product.slices if is_split else 1
    blocks = -(-product.outputs // stripe) * per_sum
    stage_bytes = (height + 8 * tiles) * 2 * STEP
    is_alone = blocks <= room.multiprocessors or tiles > 8
    fit = stages or _fitting((room.whole() if is_alone else room.half()) // stage_bytes)
    out_bytes = 8 * tiles * (height + 4) * 4
    shared = max(fit * stage_bytes, out_bytes) + SWIZZLE_BYTES
    # Clusters start together, which costs more than it saves where there is much to read.
    is_cluster = per_sum > 1 and product.outputs * product.inputs <= CLUSTER_WEIGHTS
    return Choice(
        "linear_many",
        (blocks, 1, 1),
        shared,
        tiles,
        height,
        fit,
        per_sum,
        is_cluster,
        2 * height,
    )


def _fitting(most: int) -> int:
    return max([stages for stages in STAGES if stages <= most], default=STAGES[0])


def partials_bytes(product: Product, batch: int) -> int:
    """Scratch that any choice for up to ``batch`` sessions stays within."""
    if not product.slices or batch <= FEW:
        return 0
    rows = product.outputs * (2 if product.finish is Finish.GATE else 1)
    tiles = next(tiles for tiles in TILES if 8 * tiles >= min(batch, MOST))
    return (-(-rows // 128) + 1) * 128 * 8 * tiles * 4 * product.slices


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
            launches.append(launch_of(function, shape, params, stream))
        return launches

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
        "LINEAR_STAGES": choice.stages,
        "LINEAR_PARTS": choice.blocks_per_sum,
        "LINEAR_CLUSTER": int(choice.is_cluster),
    }


def launch_of(
    function: Function, shape: LaunchShape, params: ctypes.Structure, stream: Stream
) -> Launch:
    """A launch whose kernel waits by itself for the one in front of it."""
    return lambda: function.launch(shape, params, stream, overlaps=OVERLAPS)
