"""One stage as one ONNX graph: opset 24, standard operators, weights beside it.

`torch.export` traces the stage over a symbolic batch; this file walks the trace once and writes a
node for each operator by the table in `lowering`. Whatever depends on no input is worked out here
(a view of a weight stays a view, so a fused, step-major weight costs nothing), the rest goes into
the graph. Names are stable: weights are called what the checkpoint calls them, tensors of the tick
what the stage calls them, everything between after its operator and a running number. No names of
files, no stack traces, no time: the same model gives the same bytes.

Why not `torch.onnx.export`: it spells out reshapes as arithmetic on shapes and wraps every scalar
in casts (1,350 nodes for a depth stage that needs 700), and its optimiser renames the weights.

Weights of 1 KiB and more go into external files, by part of the model, shared by the stages that
use them and aligned so that they can be mapped. A model need not be loaded for it: weights may be
hollow (`hollow`). Not here: which stages there are (`stages`), hashing and the manifest (`build`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.fx import Node

from engines.bundle import TensorSpec
from export.hollow import Hollow, nothing_hollow
from export.lowering import TABLE, Names
from export.models.streaming import TORCH_DTYPES
from export.stages import StageGraph
from export.traces import Traced, Traces

OPSET = 24
IR_VERSION = 11
INLINE_BYTES = 1024
"""Smaller tensors live in the graph: an entry in the external file costs more than it saves."""
PAGE_BYTES = 4096
WIDE_BYTES = 1 << 20
"""Tensors at least this large start on a page, so that mapping one touches no other."""
ALIGN_BYTES = 64
FILE_BYTES = 1 << 30
"""Of a file of weights, unless one weight is larger: a killed build repeats at most this much."""
CHUNK_BYTES = 8 << 20

ONNX_DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}

IGNORED = frozenset({"aten._assert_tensor_metadata.default"})
"""Checks of the tracer's own; they have no effect."""
SAME = frozenset(
    {"aten.lift_fresh_copy.default", "aten.detach_.default", "aten.contiguous.default"}
)
"""Operators that hand on their input."""


class NotLowered(NotImplementedError):
    """A stage uses a torch operator the table does not have; the model's author's fault."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one weight lies: bytes ``offset`` to ``offset + length`` of a file."""

    tensor: Tensor
    file: str
    """Relative to the folder of the graphs."""
    offset: int
    length: int


class Weights:
    """External files below ``folder``/weights, named after the first part of a weight's name.

    Places are given while graphs are written; the bytes follow file by file, so that whoever
    writes them can show progress, stop and continue. No file grows beyond `FILE_BYTES` unless
    one weight alone does.

    folder: where the graphs lie; ONNX Runtime reads external data only below that.
    """

    def __init__(self, folder: Path, hollow: Hollow | None = None, halved: bool = False) -> None:
        """hollow: knows the values of tensors that have none of their own.

        halved: float32 weights whose every value float16 can hold are stored as that, and the
        graph widens them when it is loaded: half the bytes, the same numbers.
        """
        self.folder, self.halved = folder, halved
        self.hollow = hollow or nothing_hollow()
        self.places: dict[str, Placed] = {}
        self.files: dict[str, int] = {}
        """File, relative to ``folder`` -> its bytes."""
        self._numbers: dict[str, int] = {}

    def place(self, name: str, tensor: Tensor) -> Placed:
        """Give ``tensor`` a place, the same one if a stage before asked for it."""
        if name not in self.places:
            part, length = name.partition(".")[0], tensor.numel() * tensor.element_size()
            align = PAGE_BYTES if length >= WIDE_BYTES else ALIGN_BYTES
            number = self._numbers.setdefault(part, 0)
            offset = -(-self.files.get(_weights_file(part, number), 0) // align) * align
            if offset and offset + length > FILE_BYTES:
                number = self._numbers[part] = number + 1
                offset = 0
            file = _weights_file(part, number)
            self.files[file] = offset + length
            self.places[name] = Placed(tensor, file, offset, length)
        return self.places[name]

    def chunks(self, file: str) -> Iterator[memoryview]:
        """The bytes of one file, in order, a few megabytes at a time."""
        end = 0
        for placed in self.places.values():
            if placed.file == file:
                yield memoryview(bytes(placed.offset - end))
                flat = self.hollow.values(placed.tensor).detach().contiguous().reshape(-1)
                raw = flat.view(torch.uint8)
                for first in range(0, placed.length, CHUNK_BYTES):
                    yield raw[first : first + CHUNK_BYTES].numpy().data
                end = placed.offset + placed.length

    def write(self) -> None:
        """Write every file at once, for models that are in memory."""
        for file in self.files:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as stream:
                for chunk in self.chunks(file):
                    stream.write(chunk)


def _weights_file(part: str, number: int) -> str:
    return f"weights/{part}.{number}.bin" if number else f"weights/{part}.bin"


def write_graph(graph: StageGraph, weights: Weights, traces: Traces | None = None) -> Path:
    """Write ``graph`` as ``weights.folder``/<stage>.onnx; its weights get places in ``weights``.

    traces: of stages before it, of the same model. Raises `NotLowered` naming the operator the
    table lacks.
    """
    path = weights.folder / f"{graph.name}.onnx"
    path.write_bytes(graph_bytes(graph, weights, traces))
    return path


def graph_bytes(graph: StageGraph, weights: Weights, traces: Traces | None = None) -> bytes:
    """What `write_graph` writes."""
    model = _GraphWriter((traces or Traces()).of(graph), weights).write()
    raw: bytes = model.SerializeToString(deterministic=True)
    return raw


def raw_bytes(tensor: Tensor) -> bytes:
    """Little-endian bytes of a tensor of any dtype, row-major."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@dataclass
class _Constant:
    """A value known now, and what to call it if it comes from a weight."""

    tensor: Tensor
    name: str | None


class _GraphWriter:
    """`lowering.Writer` over one traced stage."""

    def __init__(self, traced: Traced, weights: Weights) -> None:
        self.traced, self.graph, self.weights = traced, traced.graph, weights
        self.program = traced.program
        self.values: dict[Node, str | tuple[str, ...] | _Constant] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.small: dict[tuple[torch.dtype, tuple[int, ...], bytes], str] = {}
        self.counts: dict[str, int] = {}
        self.widened: list[onnx.NodeProto] = []

    def write(self) -> onnx.ModelProto:
        signature = self.program.graph_signature
        lifted = signature.inputs_to_parameters | signature.inputs_to_buffers
        constants = signature.inputs_to_lifted_tensor_constants
        given = iter(self.graph.inputs)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in lifted:
                    if not node.users:  # the program lists every weight of the model
                        continue
                    name, weight = self.traced.weight(lifted[node.name])
                    self.values[node] = _Constant(weight, name)
                elif node.name in constants:
                    tensor = self.program.constants[constants[node.name]]
                    assert isinstance(tensor, Tensor), node
                    self.values[node] = _Constant(tensor, None)
                else:
                    self.values[node] = next(given).name
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._finish(node)
        return self._model()

    def name(self, value: object) -> str:
        if not isinstance(value, Node):
            raise NotLowered(f"stage {self.graph.name}: {value!r} is not a tensor of the trace")
        known = self.values[value]
        if isinstance(known, _Constant):
            return self._initializer(known)
        assert isinstance(known, str), value
        return known

    def constant(self, value: object, dtype: torch.dtype = torch.int64) -> str:
        return self._initializer(_Constant(torch.tensor(value, dtype=dtype), None))

    def emit(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> Names:
        number = self.counts[op] = self.counts.get(op, 0) + 1
        stem = f"{op.lower()}_{number}"
        names = (stem,) if outputs == 1 else tuple(f"{stem}_{i}" for i in range(outputs))
        plain: dict[str, Any] = {
            key: ONNX_DTYPES[value] if isinstance(value, torch.dtype) else value
            for key, value in attributes.items()
        }
        self.nodes.append(helper.make_node(op, inputs, names, **plain))
        return names if outputs > 1 else stem

    def _call(self, node: Node) -> None:
        target = str(node.target)
        if target in IGNORED:
            return
        if "getitem" in target:
            source, index = node.args
            assert isinstance(source, Node), node
            assert isinstance(index, int), node
            found = self.values[source]
            assert isinstance(found, tuple), node
            self.values[node] = found[index]
        elif target in SAME:
            source = node.args[0]
            assert isinstance(source, Node), node
            self.values[node] = self.values[source]
        elif all(isinstance(self.values[arg], _Constant) for arg in node.all_input_nodes):
            self.values[node] = self._folded(node)
        elif target in TABLE:
            self.values[node] = TABLE[target](self, node)
        else:
            raise NotLowered(
                f"stage {self.graph.name} uses {target}, for which export/lowering.py has no "
                f"ONNX operator. Add one to its TABLE, or write the model without it"
            )

    def _folded(self, node: Node) -> _Constant:
        """Work out a node that depends on no input; a view of a weight keeps its name."""
        source = next(iter(node.all_input_nodes), None)
        args = torch.fx.node.map_arg(node.args, self._tensor_of)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
        assert callable(node.target), node
        with torch.no_grad():
            result = node.target(*args, **kwargs)
        assert isinstance(result, Tensor), node
        self._check_hollow(node, result)
        name = None
        if source is not None and len(node.all_input_nodes) == 1:
            known = self.values[source]
            assert isinstance(known, _Constant), node
            shares = (
                result.untyped_storage().data_ptr() == known.tensor.untyped_storage().data_ptr()
            )
            if known.name is not None and shares:
                moved = result.storage_offset() - known.tensor.storage_offset()
                part = moved // max(result.numel(), 1)
                is_whole = result.numel() == known.tensor.numel()
                name = known.name if is_whole else f"{known.name}.{part}"
        return _Constant(result, name)

    def _check_hollow(self, node: Node, result: Tensor) -> None:
        """Views of a weight that is not loaded are fine, sums of its values are not."""
        hollow = self.weights.hollow
        if any(self._tensor_of(arg) in hollow for arg in node.all_input_nodes):
            assert result in hollow, f"{node} would calculate with weights that are not loaded"

    def _tensor_of(self, node: Node) -> Tensor:
        known = self.values[node]
        assert isinstance(known, _Constant), node
        return known.tensor

    def _initializer(self, constant: _Constant) -> str:
        tensor, name = constant.tensor.detach(), constant.name
        if name is not None and self.weights.halved and _halves(tensor):
            return self._widened(name, tensor)
        size = tensor.numel() * tensor.element_size()
        if name is None or size < INLINE_BYTES:
            raw = raw_bytes(self.weights.hollow.values(tensor))
            key = (tensor.dtype, tuple(tensor.shape), raw)
            if name is None and key in self.small:
                return self.small[key]
            if name is None:
                name = self.small[key] = f"constant_{len(self.small) + 1}"
            proto = TensorProto(name=name, data_type=ONNX_DTYPES[tensor.dtype], raw_data=raw)
        else:
            placed = self.weights.place(name, tensor)
            proto = TensorProto(name=name, data_type=ONNX_DTYPES[tensor.dtype])
            proto.data_location = TensorProto.EXTERNAL
            where = {"location": placed.file, "offset": placed.offset, "length": placed.length}
            for key_name, value in where.items():
                proto.external_data.add(key=key_name, value=str(value))
        if name not in self.initializers:
            proto.dims.extend(tensor.shape)
            self.initializers[name] = proto
        assert list(self.initializers[name].dims) == list(tensor.shape), name
        return name

    def _widened(self, name: str, tensor: Tensor) -> str:
        """A weight stored in half its bytes, and the node that gives it back."""
        if all(made.output[0] != name for made in self.widened):
            stored = self._initializer(_Constant(tensor.half(), f"{name}.half"))
            self.widened.append(helper.make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
        return name

    def _finish(self, node: Node) -> None:
        """Give every output the stage's name for it."""
        (results,) = node.args
        assert isinstance(results, tuple | list), node
        taken = {spec.name for spec in self.graph.inputs}
        renamed: dict[str, str] = {}
        extra: list[onnx.NodeProto] = []
        for spec, result in zip(self.graph.outputs, results, strict=True):
            name = self.name(result)
            if name in taken or name in renamed or name in self.initializers:
                extra.append(helper.make_node("Identity", [name], [spec.name]))
            else:
                renamed[name] = spec.name
        for made in self.nodes:
            for side in (made.input, made.output):
                side[:] = [renamed.get(name, name) for name in side]
        for made in extra:
            made.input[:] = [renamed.get(name, name) for name in made.input]
        self.nodes.extend(extra)

    def _model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            [*self.widened, *self.nodes],
            self.graph.name,
            [_described(spec) for spec in self.graph.inputs],
            [_described(spec) for spec in self.graph.outputs],
            list(self.initializers.values()),
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="duplexbox",
        )


def _halves(tensor: Tensor) -> bool:
    """Whether a weight of more than a few values is the same in float16."""
    if tensor.dtype != torch.float32 or tensor.numel() * tensor.element_size() < INLINE_BYTES:
        return False
    return torch.equal(tensor.half().float(), tensor)


def _described(spec: TensorSpec) -> onnx.ValueInfoProto:
    dtype = ONNX_DTYPES[TORCH_DTYPES[spec.dtype]]
    return helper.make_tensor_value_info(spec.name, dtype, list(spec.shape))
