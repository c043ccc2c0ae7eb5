"""One stage of the codec laid out in memory, to be run by numpy or on a GPU, for tests.

Everything lies in one `Memory`: weights turned as the kernels want them, inputs, outputs, scratch.
The same bytes can be sent to a device whose buffer begins at the memory's base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels import codec_gemm
from engines.kernels.codec_kinds import CodecShape, Conv, decoder_convs, encoder_convs
from engines.kernels.codec_net import Choose, Tick, plan_stage
from engines.kernels.codec_params import Call
from engines.kernels.codec_reference import Memory, turned

Array = NDArray[Any]
COUNTERS = 16_384

SMALL = CodecShape(
    filters=8,
    dimension=64,
    ratios=(4, 2, 3),
    positions=2,
    kernel=7,
    last_kernel=3,
    residual_kernel=3,
    compress=2,
    feedforward=96,
    features=16,
    bins=64,
    levels=5,
    eps=1e-5,
)
MIMI = CodecShape(
    filters=64,
    dimension=512,
    ratios=(8, 6, 5, 4),
    positions=2,
    kernel=7,
    last_kernel=3,
    residual_kernel=3,
    compress=2,
    feedforward=2048,
    features=256,
    bins=2048,
    levels=8,
    eps=1e-5,
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A stage in memory."""

    calls: list[Call]
    ins: list[int]
    outs: list[int]


def place(
    memory: Memory,
    kind: str,
    shape: CodecShape,
    weights: Mapping[str, Array],
    ins: Sequence[Array],
    outs: Sequence[Array],
    choose: Choose = codec_gemm.choose,
) -> Placed:
    """Lay a stage out. weights: as the checkpoint has them; ins, outs: (B, ...), in order.

    What ``outs`` hold is laid out too, so that what is not written shows.
    """
    addresses = {role: memory.put(turn(role, kind, shape, w)) for role, w in weights.items()}
    return place_beside(memory, kind, shape, addresses, ins, outs, choose)


def place_beside(
    memory: Memory,
    kind: str,
    shape: CodecShape,
    addresses: Mapping[str, int],
    ins: Sequence[Array],
    outs: Sequence[Array],
    choose: Choose = codec_gemm.choose,
) -> Placed:
    """`place` with weights that lie there already."""
    in_at, out_at = [memory.put(x) for x in ins], [memory.put(x) for x in outs]
    counters = memory.put(np.zeros(COUNTERS, np.uint32))
    batch = len(ins[0])
    dry = Tick(shape, batch, addresses, 0, counters, choose)
    plan_stage(dry, kind, in_at, out_at)
    scratch = memory.take(dry.scratch_bytes)
    tick = Tick(shape, batch, addresses, scratch, counters, choose)
    return Placed(plan_stage(tick, kind, in_at, out_at), in_at, out_at)


def results(memory: Memory, placed: Placed, outs: Sequence[Array]) -> list[Array]:
    """Copies of the outputs as they are now."""
    return [
        memory.view(at, like.shape, like.dtype.type).copy()
        for at, like in zip(placed.outs, outs, strict=True)
    ]


def turn(role: str, kind: str, shape: CodecShape, weight: Array) -> Array:
    """A weight as it lies on the device."""
    if weight.ndim < 2 or role == "upsample":
        return weight
    return turned(weight, strides(kind, shape).get(role, 0))


def strides(kind: str, shape: CodecShape) -> dict[str, int]:
    """Role of a transposed convolution -> its stride."""
    convs: list[Conv] = decoder_convs(shape) if kind == "codec_decode_last" else []
    return {f"{conv.name}.weight": conv.stride for conv in convs if conv.is_transposed}


def tensors(kind: str, shape: CodecShape, batch: int) -> tuple[list[Array], list[Array]]:
    """Random inputs and outputs of a stage, in the manifest's order; outputs hold 7."""
    rng = np.random.default_rng([batch, len(kind)])
    s = shape
    wide = s.positions * s.dimension

    def floats(*row: int) -> Array:
        return rng.standard_normal((batch, *row)).astype(np.float32)

    position = (s.positions * rng.integers(0, 3, batch)).astype(np.int64)
    valid = rng.integers(0, 3, batch) > 0
    kept = floats(s.dimension, s.positions)
    codes = rng.integers(0, s.bins, (batch, s.levels)).astype(np.int64)
    layer, given = [floats(wide), floats(wide)], [floats(wide), floats(3 * wide)]
    ins: list[Array]
    outs: list[Array]
    if kind == "codec_encode_first":
        regions = [floats(c.inputs, c.remembered) for c in encoder_convs(s) if c.remembered]
        ins, outs = [floats(1, s.samples), *regions], [*given, *regions]
    elif kind == "codec_piece":
        ins, outs = layer, given
    elif kind == "codec_encode_last":
        ins, outs = [*layer, position, kept], [codes, position, kept]
    elif kind == "codec_decode_first":
        ins, outs = [codes, valid, kept], [*given, kept]
    else:
        regions = [
            floats(c.outputs if c.is_transposed else c.inputs, c.remembered)
            for c in decoder_convs(s)
            if c.remembered
        ]
        ins, outs = [*layer, valid, position, *regions], [floats(1, s.samples), position, *regions]
    return ins, [np.full_like(x, 7) for x in outs]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    """Values that keep activations near one."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for role, shape in sorted(shapes.items()):
        noise = rng.standard_normal(shape, dtype=np.float32)
        if role.startswith("norm") and role.endswith("weight"):
            noise = 1 + np.float32(0.2) * noise
        elif len(shape) == 1:
            noise *= np.float32(0.1)
        elif not role.startswith("book"):
            noise *= np.float32(np.prod(shape[1:]) ** -0.5)
        found[role] = noise
    for role in shapes:
        if role.startswith("squared"):
            book = found[role.replace("squared", "book")]
            found[role] = (book**2).sum(-1)
    return found
