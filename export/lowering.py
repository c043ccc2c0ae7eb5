"""Which standard ONNX operator stands for each torch operator a stage uses. A table, no more.

Every entry takes a `Writer` (which hands out names and constants) and one node of a graph that
`torch.export` has traced, and returns the name of its result, or a tuple of names. Only what the
models use is here: an operator that is missing is an error naming it, never a guess.

Two choices the executors depend on. A `*_like` of one value becomes a scalar, because whatever
uses it broadcasts. Limits are Min and Max rather than Clip, which not every builder has for int64.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import Node

from export.models.operators import E4M3_MOST, INT8_MOST

Names = str | tuple[str, ...]
"""Name of a result, or of each of several."""


class Writer(Protocol):
    """What a lowering needs of the graph being written."""

    def name(self, value: object) -> str:
        """Name of a traced value; of a constant if it is not a node."""

    def constant(self, value: object, dtype: torch.dtype = torch.int64) -> str:
        """Name of a small constant tensor."""

    def emit(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> Names:
        """Add one node and name its outputs."""


Lowering = Callable[[Writer, Node], Names]


def shape_of(node: Node) -> list[int]:
    """Shape of a traced value, -1 for the batch (or a multiple of it)."""
    return [length if isinstance(length, int) else -1 for length in node.meta["val"].shape]


def dtype_of(node: Node) -> torch.dtype:
    dtype = node.meta["val"].dtype
    assert isinstance(dtype, torch.dtype), node
    return dtype


def _elementwise(op: str) -> Lowering:
    def lower(writer: Writer, node: Node) -> Names:
        tensors = [arg for arg in node.args if isinstance(arg, Node)]
        mixed = {dtype_of(tensor) for tensor in tensors[op == "Where" :]}
        assert len(mixed) == 1, f"{node}: {op} of {mixed}; torch promotes, ONNX does not"
        dtype = dtype_of(tensors[0])
        names = []
        for arg in node.args:
            if isinstance(arg, Node):
                names.append(writer.name(arg))
                continue
            assert dtype.is_floating_point or isinstance(arg, int), (node, arg)
            names.append(writer.constant(arg, dtype))
        return writer.emit(op, *names)

    return lower


def _unary(op: str, *defaults: object) -> Lowering:
    """One tensor; further arguments must be the ones ONNX assumes."""

    def lower(writer: Writer, node: Node) -> Names:
        given = (*node.args[1:], *(v for k, v in node.kwargs.items() if k == "approximate"))
        assert given == defaults[: len(given)], (node, given)
        return writer.emit(op, writer.name(node.args[0]))

    return lower


def _reshape(writer: Writer, node: Node) -> Names:
    source = _node(node, 0)
    if shape_of(source) == shape_of(node):
        return writer.name(source)
    return writer.emit("Reshape", writer.name(source), writer.constant(shape_of(node)))


def _expand(writer: Writer, node: Node) -> Names:
    # ONNX broadcasts, so 1 leaves the batch as it is.
    target = [1 if length == -1 else length for length in shape_of(node)]
    return writer.emit("Expand", writer.name(node.args[0]), writer.constant(target))


def _unsqueeze(writer: Writer, node: Node) -> Names:
    axes = writer.constant([_axis(node, 1, extra=1)])
    return writer.emit("Unsqueeze", writer.name(node.args[0]), axes)


def _squeeze(writer: Writer, node: Node) -> Names:
    return writer.emit("Squeeze", writer.name(node.args[0]), writer.constant([_axis(node, 1)]))


def _transpose(writer: Writer, node: Node) -> Names:
    order = list(range(len(shape_of(node))))
    first, second = _axis(node, 1), _axis(node, 2)
    order[first], order[second] = order[second], order[first]
    return writer.emit("Transpose", writer.name(node.args[0]), perm=order)


def _slice(writer: Writer, node: Node) -> Names:
    if shape_of(node) == shape_of(_node(node, 0)):
        return writer.name(node.args[0])
    axis, start = _axis(node, 1), _int(node, 2)
    end = start + shape_of(node)[axis]
    bounds = [writer.constant([value]) for value in (start, end, axis)]
    return writer.emit("Slice", writer.name(node.args[0]), *bounds)


def _select(writer: Writer, node: Node) -> Names:
    index = writer.constant(_int(node, 2))
    return writer.emit("Gather", writer.name(node.args[0]), index, axis=_axis(node, 1))


def _concat(writer: Writer, node: Node) -> Names:
    axis = _int(node, 1) if len(node.args) > 1 else 0
    parts = [writer.name(part) for part in _nodes(node, 0)]
    return writer.emit("Concat", *parts, axis=axis % len(shape_of(node)))


def _stack(writer: Writer, node: Node) -> Names:
    axis = (_int(node, 1) if len(node.args) > 1 else 0) % len(shape_of(node))
    axes = writer.constant([axis])
    parts = [_one(writer.emit("Unsqueeze", writer.name(p), axes)) for p in _nodes(node, 0)]
    return writer.emit("Concat", *parts, axis=axis)


def _clamp(writer: Writer, node: Node) -> Names:
    name, dtype = writer.name(node.args[0]), dtype_of(node)
    for op, limit in zip(("Max", "Min"), node.args[1:], strict=False):
        if limit is not None:
            name = _one(writer.emit(op, name, writer.constant(limit, dtype)))
    return name


def _cast(writer: Writer, node: Node) -> Names:
    if dtype_of(_node(node, 0)) == dtype_of(node):
        return writer.name(node.args[0])
    return writer.emit("Cast", writer.name(node.args[0]), to=dtype_of(node))


def _filled(value: float | None) -> Lowering:
    def lower(writer: Writer, node: Node) -> Names:
        return writer.constant(node.args[1] if value is None else value, dtype_of(node))

    return lower


def _masked_fill(writer: Writer, node: Node) -> Names:
    value = writer.constant(node.args[2], dtype_of(node))
    return writer.emit("Where", writer.name(node.args[1]), value, writer.name(node.args[0]))


def _arg(op: str) -> Lowering:
    def lower(writer: Writer, node: Node) -> Names:
        keep = int(len(node.args) > 2 and bool(node.args[2]))
        return writer.emit(op, writer.name(node.args[0]), axis=_axis(node, 1), keepdims=keep)

    return lower


def _topk(writer: Writer, node: Node) -> Names:
    count = writer.constant([_int(node, 1)])
    return writer.emit("TopK", writer.name(node.args[0]), count, outputs=2, axis=-1)


def _gather_elements(writer: Writer, node: Node) -> Names:
    data, index = writer.name(node.args[0]), writer.name(node.args[2])
    return writer.emit("GatherElements", data, index, axis=_axis(node, 1))


def _embedding(writer: Writer, node: Node) -> Names:
    return writer.emit("Gather", writer.name(node.args[0]), writer.name(node.args[1]), axis=0)


def _silu(writer: Writer, node: Node) -> Names:
    x = writer.name(node.args[0])
    return writer.emit("Mul", x, _one(writer.emit("Sigmoid", x)))


def _layer_norm(writer: Writer, node: Node) -> Names:
    names = [writer.name(node.args[index]) for index in (0, 2, 3)]
    return writer.emit("LayerNormalization", *names, axis=-1, epsilon=node.args[4])


def _conv(op: str) -> Lowering:
    group_at = {"Conv": 6, "ConvTranspose": 6}[op]

    def lower(writer: Writer, node: Node) -> Names:
        names = [writer.name(arg) for arg in node.args[:3] if arg is not None]
        stride = node.args[3] if len(node.args) > 3 else [1]
        group = _int(node, group_at) if len(node.args) > group_at else 1
        kernel = [shape_of(_node(node, 1))[-1]]
        return writer.emit(op, *names, strides=stride, group=group, kernel_shape=kernel)

    return lower


def _elu(writer: Writer, node: Node) -> Names:
    # ONNX Runtime 1.31.1 has no CUDA kernel for Elu since opset 22. exp(x) - 1 lies above x.
    assert node.args[1:] in ((), (1.0,)), node
    x, dtype = writer.name(node.args[0]), dtype_of(node)
    low = _one(writer.emit("Min", x, writer.constant(0.0, dtype)))
    grown = _one(writer.emit("Exp", low))
    bent = _one(writer.emit("Sub", grown, writer.constant(1.0, dtype)))
    return writer.emit("Max", x, bent)


def _product(writer: Writer, node: Node) -> Names:
    return writer.emit("Gemm", *(writer.name(arg) for arg in node.args))


def _linear(writer: Writer, node: Node) -> Names:
    return writer.emit("Gemm", *(writer.name(arg) for arg in node.args), transB=1)


def _linear_bias(writer: Writer, node: Node) -> Names:
    names = [writer.name(arg) for arg in node.args[:3]]
    return writer.emit("Gemm", *names, transB=1, alpha=node.args[3])


def _rms_norm(writer: Writer, node: Node) -> Names:
    names = [writer.name(arg) for arg in node.args[:2]]
    return writer.emit("RMSNormalization", *names, axis=-1, epsilon=node.args[2])


def _rotate(writer: Writer, node: Node) -> Names:
    names = [writer.name(arg) for arg in node.args[:3]]
    return writer.emit("RotaryEmbedding", *names, interleaved=1, num_heads=node.args[3])


def _ring_write(writer: Writer, node: Node) -> Names:
    names = [writer.name(arg) for arg in node.args]
    return writer.emit("TensorScatter", *names, axis=2, mode="linear")


def _to_int8(writer: Writer, node: Node) -> Names:
    rounded = _one(writer.emit("Round", writer.name(node.args[0])))
    limited = _limited(writer, rounded, INT8_MOST)
    return writer.emit("Cast", limited, to=torch.int8)


def _to_e4m3(writer: Writer, node: Node) -> Names:
    """The code as a sum over the powers of two: how many steps of each lie below the value.

    ONNX has float8, but not one executor's TensorScatter takes it, and no operator gives its bits.
    """
    limited = _limited(writer, writer.name(node.args[0]), E4M3_MOST)
    size = _one(writer.emit("Abs", limited))
    size = _one(writer.emit("Unsqueeze", size, writer.constant([-1])))
    # Below 2^-5 steps are 2^-9, subnormals included; above they are an eighth of the power.
    first = [0.0, *(2.0**power for power in range(-5, 9))]
    after = [*first[1:], 2.0**9]
    steps = [2.0**9, *(2.0 ** (3 - power) for power in range(-5, 9))]
    low, high, per_unit = (writer.constant(x, torch.float32) for x in (first, after, steps))
    inside = _one(writer.emit("Min", _one(writer.emit("Max", size, low)), high))
    counted = _one(writer.emit("Mul", _one(writer.emit("Sub", inside, low)), per_unit))
    # All of this is exact up to here, and every power's steps before it are an even number.
    counted = _one(writer.emit("Round", counted))
    code = _one(writer.emit("ReduceSum", counted, writer.constant([-1]), keepdims=0))
    zero, sign = (writer.constant(value, torch.float32) for value in (0.0, 128.0))
    is_negative = _one(writer.emit("Less", _one(writer.emit("Reciprocal", limited)), zero))
    code = _one(writer.emit("Add", code, _one(writer.emit("Where", is_negative, sign, zero))))
    return writer.emit("Cast", code, to=torch.uint8)


def _of_e4m3(writer: Writer, node: Node) -> Names:
    table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    index = _one(writer.emit("Cast", writer.name(node.args[0]), to=torch.int32))
    return writer.emit("Gather", writer.constant(table.tolist(), torch.float32), index, axis=0)


def _limited(writer: Writer, name: str, most: float) -> str:
    for op, limit in (("Max", -most), ("Min", most)):
        name = _one(writer.emit(op, name, writer.constant(limit, torch.float32)))
    return name


def _attend(writer: Writer, node: Node) -> Names:
    *tensors, heads = node.args
    names = [writer.name(arg) for arg in tensors]
    if "attend_valid" in str(node.target):
        names[3:3] = ["", "", ""]  # no mask, no past: the length is the seventh input
    return writer.emit("Attention", *names, q_num_heads=heads, kv_num_heads=heads)


def _split(parts: int) -> Lowering:
    def lower(writer: Writer, node: Node) -> Names:
        x = writer.name(node.args[0])
        return writer.emit("Split", x, outputs=parts, axis=-1, num_outputs=parts)

    return lower


def _node(node: Node, index: int) -> Node:
    found = node.args[index]
    assert isinstance(found, Node), (node, index)
    return found


def _nodes(node: Node, index: int) -> list[Any]:
    found = node.args[index]
    assert isinstance(found, list | tuple), (node, index)
    return list(found)


def _int(node: Node, index: int) -> int:
    found = node.args[index]
    assert isinstance(found, int), (node, index)
    return found


def _axis(node: Node, index: int, extra: int = 0) -> int:
    """A dimension argument as a non-negative axis of the input (``extra`` axes larger)."""
    return _int(node, index) % (len(shape_of(_node(node, 0))) + extra)


def _one(names: Names) -> str:
    assert isinstance(names, str), names
    return names


TABLE: dict[str, Lowering] = {
    "aten.__and__.Tensor": _elementwise("And"),
    "aten.add.Tensor": _elementwise("Add"),
    "aten.argmax.default": _arg("ArgMax"),
    "aten.argmin.default": _arg("ArgMin"),
    "aten.cat.default": _concat,
    "aten.clamp.default": _clamp,
    "aten.conv1d.default": _conv("Conv"),
    "aten.conv_transpose1d.default": _conv("ConvTranspose"),
    "aten.cos.default": _unary("Cos"),
    "aten.div.Tensor": _elementwise("Div"),
    "aten.elu.default": _elu,
    "aten.embedding.default": _embedding,
    "aten.eq.Scalar": _elementwise("Equal"),
    "aten.eq.Tensor": _elementwise("Equal"),
    "aten.expand.default": _expand,
    "aten.full_like.default": _filled(None),
    "aten.gather.default": _gather_elements,
    "aten.ge.Scalar": _elementwise("GreaterOrEqual"),
    "aten.ge.Tensor": _elementwise("GreaterOrEqual"),
    "aten.gelu.default": _unary("Gelu", "none"),
    "aten.gt.Scalar": _elementwise("Greater"),
    "aten.layer_norm.default": _layer_norm,
    "aten.le.Scalar": _elementwise("LessOrEqual"),
    "aten.le.Tensor": _elementwise("LessOrEqual"),
    "aten.lt.Scalar": _elementwise("Less"),
    "aten.lt.Tensor": _elementwise("Less"),
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.mul.Tensor": _elementwise("Mul"),
    "aten.narrow.default": _slice,
    "aten.ones_like.default": _filled(1),
    "aten.remainder.Scalar": _elementwise("Mod"),
    "aten.reshape.default": _reshape,
    "aten.select.int": _select,
    "aten.silu.default": _silu,
    "aten.sin.default": _unary("Sin"),
    "aten.slice.Tensor": _slice,
    "aten.squeeze.dim": _squeeze,
    "aten.stack.default": _stack,
    "aten.sub.Tensor": _elementwise("Sub"),
    "aten.to.dtype": _cast,
    "aten.topk.default": _topk,
    "aten.transpose.int": _transpose,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.view.default": _reshape,
    "aten.where.self": _elementwise("Where"),
    "aten.zeros_like.default": _filled(0),
    "duplexbox.attend.default": _attend,
    "duplexbox.attend_seen.default": _attend,
    "duplexbox.attend_valid.default": _attend,
    "duplexbox.linear.default": _linear,
    "duplexbox.linear_bias.default": _linear_bias,
    "duplexbox.product.default": _product,
    "duplexbox.ring_write.default": _ring_write,
    "duplexbox.rms_norm.default": _rms_norm,
    "duplexbox.rotate.default": _rotate,
    "duplexbox.of_e4m3.default": _of_e4m3,
    "duplexbox.split2.default": _split(2),
    "duplexbox.split3.default": _split(3),
    "duplexbox.to_e4m3.default": _to_e4m3,
    "duplexbox.to_int8.default": _to_int8,
}
