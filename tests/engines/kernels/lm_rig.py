"""Puts the language model's kernels on a GPU with weights of a test's own, without files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines import cuda
from engines.bundle import Dtype, KernelSpec, StageSpec, TensorSpec, WeightSpec
from engines.kernel_stages import COUNTER_BYTES, Bindable, Family, Kind, Scratch
from engines.kernels import lm_kinds
from engines.kernels import lm_reference as ref
from engines.kernels.linear import LinearKernels, Norm, Rows
from engines.kernels.linear_choice import Choice, Finish, Product
from engines.program import Bound, Buffer, Step

Array = NDArray[Any]
COMPILED = Path(__file__).parents[3] / "build" / "kernels"
POISON = 0xFF
"""Every byte of an output before it is written: NaN, or an id no model has."""


class LmRig:
    """A device, a stream, and memory that a test fills and forgets."""

    def __init__(self) -> None:
        self.device = cuda.Device()
        self.stream = cuda.Stream()
        self._owned: list[cuda.DevicePtr] = []
        self._linear: dict[Dtype, LinearKernels] = {}
        self.counters = cuda.allocate(COUNTER_BYTES)
        cuda.fill_bytes(self.counters, 0, COUNTER_BYTES)

    def linear(self, dtype: Dtype) -> LinearKernels:
        if dtype not in self._linear:
            self._linear[dtype] = LinearKernels(dtype, self.device, COMPILED)
        return self._linear[dtype]

    def put(self, array: Array) -> cuda.DevicePtr:
        pointer = self.room(array.nbytes)
        cuda.write_device(pointer, np.ascontiguousarray(array).tobytes())
        return pointer

    def room(self, nbytes: int) -> cuda.DevicePtr:
        self._owned.append(cuda.allocate(max(nbytes, 16)))
        cuda.fill_bytes(self._owned[-1], POISON, max(nbytes, 16))
        return self._owned[-1]

    def read(self, pointer: int, shape: tuple[int, ...], dtype: Any) -> Array:
        self.stream.synchronize()
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = cuda.read_device(cuda.DevicePtr(pointer), nbytes)
        return np.frombuffer(raw, dtype).reshape(shape)

    def forget(self) -> None:
        self.stream.synchronize()
        while self._owned:
            cuda.release(self._owned.pop())

    def is_clean(self) -> bool:
        """True if every launch left the counters at zero."""
        return not any(cuda.read_device(self.counters, COUNTER_BYTES))

    def product(
        self,
        dtype: Dtype,
        product: Product,
        x: Array,
        w: Array,
        *,
        add: Array | None = None,
        alpha: Array | None = None,
        choice: Choice | None = None,
    ) -> Array:
        """Stored rows in, stored rows out: x (B, I), w (O or 2 O, I). Forgets all memory."""
        self.device.synchronize()
        batch = len(x)
        out = np.float32 if product.finish is Finish.FLOAT else x.dtype
        # A row is wider than its elements, as where a step's rows lie between those of others.
        wide = product.outputs + 8
        y = self.room(batch * wide * np.dtype(out).itemsize)
        partials = self.room(4 * 256 * 4 * (-(-2 * product.outputs // 128) + 1) * 160)
        launches = self.linear(dtype).product(
            product,
            batch,
            w=self.put(w),
            x=Rows(self.put(x), x.shape[1]),
            y=Rows(y, wide),
            scratch=(self.counters, partials),
            stream=self.stream,
            norm=None if alpha is None else Norm(self.put(alpha), 1e-8),
            normed=Rows(self.room(x.nbytes), x.shape[1]),
            add=None if add is None else Rows(self.put(add), add.shape[1]),
            choice=choice,
        )
        self.device.synchronize()
        for launch in launches:
            launch()
        found = self.read(y, (batch, wide), out)[:, : product.outputs]
        self.forget()
        return found

    def stage(
        self,
        kind: Kind,
        stage: StageSpec,
        weights: Mapping[str, Array],
        inputs: Mapping[str, Array],
        times: int = 1,
    ) -> dict[str, Array]:
        """Outputs of one stage by name; inputs stored, (B, ...). Forgets all memory."""
        batch = len(next(iter(inputs.values())))
        placed = {name: self.put(array) for name, array in inputs.items()}
        stored = {t.name: NUMPY[t.dtype] for t in stage.outputs}
        rooms = {
            t.name: self.room(batch * int(np.prod(t.row_shape)) * np.dtype(NUMPY[t.dtype]).itemsize)
            for t in stage.outputs
        }
        scratch = Scratch(self.counters, self.room(kind.scratch_bytes(stage, batch)))
        family: Family = kind.load([stage], self.device, COMPILED)
        bindable = Bindable(
            step_of(stage),
            batch,
            {role: self.put(array) for role, array in weights.items()},
            lambda buffer: placed[buffer.name] if buffer.name in placed else rooms[buffer.name],
            scratch,
            self.stream,
        )
        run = family.bind(bindable)
        self.device.synchronize()
        for _ in range(times):
            run()
        found = {
            t.name: self.read(rooms[t.name], (batch, *t.row_shape), stored[t.name])
            for t in stage.outputs
        }
        family.close()
        self.forget()
        return found

    def close(self) -> None:
        for kernels in self._linear.values():
            kernels.close()
        cuda.release(self.counters)
        self.stream.close()
        self.device.close()


NUMPY: dict[Dtype, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "bool": np.bool_,
}


def step_of(stage: StageSpec) -> Step:
    return Step(
        stage,
        tuple(Bound(t, Buffer(t.name, 0)) for t in stage.inputs),
        tuple(Bound(t, Buffer(t.name, 0)) for t in stage.outputs),
    )


def tensor(name: str, dtype: Dtype, *row: int) -> TensorSpec:
    return TensorSpec(name, dtype, ("B", *row))


def with_weights(stage: StageSpec, dtype: Dtype, kind: str, numbers: dict[str, float]) -> StageSpec:
    """The stage with a kernel whose weights are those its kind needs, nowhere in particular."""
    bare = KernelSpec(kind, {}, numbers)
    wanted = lm_kinds.SHAPES[kind](stage, bare)
    weights = {role: WeightSpec("none", 0, dtype, shape) for role, shape in wanted.items()}
    return StageSpec(
        stage.name,
        stage.inputs,
        stage.outputs,
        graph="g",
        kernel=KernelSpec(kind, weights, numbers),
    )


def draw(dtype: Dtype, shape: tuple[int, ...], rng: np.random.Generator, scale: float) -> Array:
    """Normal values, as they are stored."""
    return ref.store(dtype, rng.normal(size=shape) * scale)


def draw_weights(stage: StageSpec, rng: np.random.Generator) -> dict[str, Array]:
    """By role; activations stay near one."""
    assert stage.kernel is not None
    found = {}
    for role, weight in stage.kernel.weights.items():
        is_plain = "emb" in role or len(weight.shape) == 1
        scale = 1.0 if is_plain else weight.shape[-1] ** -0.5
        found[role] = draw(weight.dtype, weight.shape, rng, scale)
    return found


def depth_stage(
    dtype: Dtype,
    *,
    hidden: int,
    features: int,
    gate: int,
    heads: int,
    steps: int = 4,
    layers: int = 2,
    card: int = 48,
    text_card: int = 70,
    candidates: int = 16,
) -> StageSpec:
    """A depth stage of that size, with the delays of a model of ``steps`` codebooks."""
    streams = 1 + 2 * steps
    numbers = {
        "steps": steps, "layers": layers, "features": features, "gate": gate, "card": card,
        "heads": heads, "eps": 1e-8, "text_padding": 3, "max_delay": 1,
    }  # fmt: skip
    numbers |= {f"delay.{stream}": int(stream > 1) for stream in range(1 + steps)}
    ring = tensor("tokens", "int64", streams, 3)
    stage = StageSpec(
        "depth",
        (
            tensor("hidden", dtype, hidden),
            tensor("text_logits", "float32", text_card),
            tensor("noise", "float32", 1 + steps, candidates),
            ring,
            tensor("offset", "int64"),
            tensor("temperature", "float32"),
            tensor("text_temperature", "float32"),
            tensor("top_k", "int64"),
            tensor("text_top_k", "int64"),
        ),
        (
            tensor("text", "int64"),
            tensor("codes", "int64", steps),
            tensor("valid", "bool"),
            tensor("tokens.next", "int64", streams, 3),
        ),
        graph="g",
    )
    return with_weights(stage, dtype, "depth", numbers)
