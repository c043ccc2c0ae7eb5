"""Numpy twins of the kernels that stand in for graphs, on the memory of `fake_driver`.

They read weights, wires and state at the very addresses a GPU would be given, so a weight that
was loaded from elsewhere, or a tensor bound in another order, is heard. What the kernels compute is
tested beside them, on a GPU.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import ITEMSIZE, Dtype, StageSpec, TensorSpec
from engines.kernel_stages import Bindable, Kind
from engines.kernels import depth, gated, lm_stage
from engines.kernels import lm_reference as ref
from engines.kernels.linear_choice import Finish
from engines.program import Bound
from engines.tensor_file import STORED
from tests.engines.fake_driver import bytes_at, later

Array = NDArray[Any]
Weight = Callable[[str], Array]
"""Values by role; read when first asked for, which is after they were loaded."""


class HostFamily:
    """The twin of `kernel_stages.Family` for both kinds of language model stages."""

    def __init__(self, stages: Iterable[StageSpec], device: object, folder: Path) -> None:
        assert list(stages)

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        kernel = bindable.step.stage.kernel
        assert kernel is not None
        compute = _depth if kernel.kind == "depth" else _gated
        weight = functools.cache(_weight(bindable))
        return lambda: later(bindable.stream, lambda: compute(bindable, weight))

    def close(self) -> None:
        pass


KINDS = {
    **{name: Kind("gated", HostFamily, kind.scratch_bytes) for name, kind in gated.KINDS.items()},
    **{name: Kind("depth", HostFamily, kind.scratch_bytes) for name, kind in depth.KINDS.items()},
}


def _memory(bindable: Bindable, bound: Bound) -> Array:
    tensor: TensorSpec = bound.tensor
    shape = (bindable.batch, *tensor.row_shape)
    nbytes = int(np.prod(shape)) * ITEMSIZE[tensor.dtype]
    there = bytes_at(bindable.address(bound.buffer), nbytes)
    return there.view(STORED[tensor.dtype]).reshape(shape)


def _inputs(bindable: Bindable) -> list[Array]:
    return [_memory(bindable, bound).copy() for bound in bindable.step.inputs]


def _give(bindable: Bindable, *found: Array) -> None:
    for bound, values in zip(bindable.step.outputs, found, strict=True):
        there = _memory(bindable, bound)
        is_float = bound.tensor.dtype in ("float32", "bfloat16", "float16")
        there[...] = ref.store(bound.tensor.dtype, values) if is_float else values


def _weight(bindable: Bindable) -> Weight:
    kernel = bindable.step.stage.kernel
    assert kernel is not None

    def values(role: str) -> Array:
        spec = kernel.weights[role]
        stored = bytes_at(bindable.weights[role], spec.nbytes).view(STORED[spec.dtype])
        return ref.values(stored.reshape(spec.shape))

    return values


def _numbers(bindable: Bindable) -> tuple[Dtype, dict[str, float]]:
    kernel = bindable.step.stage.kernel
    assert kernel is not None
    return lm_stage.dtype_of(bindable.step.stage), kernel.numbers


def _gated(bindable: Bindable, weight: Weight) -> None:
    kernel = bindable.step.stage.kernel
    assert kernel is not None
    dtype, numbers = _numbers(bindable)
    eps, inputs = numbers["eps"], _inputs(bindable)
    if kernel.kind == "gated_first":
        codes, tokens, offset = inputs
        moved, y = ref.embed(dtype, weight, numbers, codes, tokens, offset)
    else:
        x, attended = (ref.values(rows) for rows in inputs[:2])
        y = ref.product(dtype, attended, weight("out"), Finish.ADD, x)
        normed = ref.norm(dtype, y, weight("norm2"), eps)
        opened = ref.product(dtype, normed, weight("gate"), Finish.GATE)
        y = ref.product(dtype, opened, weight("down"), Finish.ADD, y)
    if kernel.kind == "gated_last":
        hidden = ref.norm(dtype, y, weight("out_norm"), eps)
        _give(bindable, hidden, ref.product(dtype, hidden, weight("text")), inputs[2] + 1)
        return
    qkv = ref.product(dtype, ref.norm(dtype, y, weight("norm1"), eps), weight("qkv"))
    _give(bindable, y, qkv, *([moved] if kernel.kind == "gated_first" else []))


def _depth(bindable: Bindable, weight: Weight) -> None:
    dtype, numbers = _numbers(bindable)
    hidden, logits, noise, tokens, offset, heat, text_heat, top_k, text_top_k = _inputs(bindable)
    taste = ref.Taste(heat, text_heat, top_k, text_top_k)
    said = ref.depth(dtype, weight, numbers, ref.values(hidden), logits, noise, taste)
    ring, text, codes, valid = ref.speak(numbers, tokens, offset, said)
    _give(bindable, text, codes, valid, ring)
