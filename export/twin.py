"""Run a stage of a bundle on this CPU in float32, whatever its precision and however large it is.

ONNX Runtime's CPU provider does not compute in bfloat16, and a language model of 15 GB does not
fit a small machine twice. So a stage is run as its *twin*: the same graph with every bfloat16 or
float16 turned into float32, mechanically, and cut where the weights of a piece would grow beyond
`PIECE_BYTES`. Between pieces only the tensors later ones need are kept; the weights of a piece are
read, widened and let go of again. A stage that is float32 and small runs as it is, the very file
a box would load.

Not here: what to compare with (`verify`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engines import ring_stage
from engines.bundle import Bundle, StageSpec

Array = NDArray[Any]
Take = Callable[[str, Array], None]
"""(output, value) -> nothing; called for each output as soon as it is there."""

PIECE_BYTES = 512 << 20
"""Weights of one piece, in float32: what is in memory at a time, once."""
NARROW = {TensorProto.BFLOAT16, TensorProto.FLOAT16}
DTYPES: dict[int, type[np.generic]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.INT64: np.int64,
    TensorProto.BOOL: np.bool_,
}


class TwinFailed(RuntimeError):
    """ONNX Runtime cannot load or run a stage: a broken graph; the exporter's fault."""


@dataclass(frozen=True)
class Piece:
    """Some nodes in a row, what they take from before, and what others take from them."""

    nodes: list[onnx.NodeProto]
    takes: list[str]
    gives: list[str]
    weights: list[str]


class Twin:
    """One stage, ready to run."""

    def __init__(self, bundle: Bundle, stage: StageSpec, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises TwinFailed when the graph cannot be loaded."""
        self._own = stage
        self.stage = ring_stage.as_twin(stage) if stage.ring else stage
        """With tensors named as in the graph, which stages of one shape share."""
        self._scales = ring_stage.scale_inputs(bundle, stage) if stage.ring else {}
        self.path = bundle.file(self.stage.graph)
        model = onnx.load(self.path, load_external_data=False)
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        total = sum(_float32_bytes(tensor) for tensor in self._weights.values())
        self.is_whole = total <= piece_bytes and not _is_narrow(model)
        self.pieces = [] if self.is_whole else list(_cut(model, self._weights, piece_bytes))
        self._types = {} if self.is_whole else _types(model)
        self._sessions: dict[int, ort.InferenceSession] = {}

    def run(self, given: Mapping[str, Array], take: Take) -> None:
        """One tick. given: floats in float32; asked for an input when it is needed, not before.

        take: gets every output, floats in float32, and should not keep large ones.
        """
        if self.stage is not self._own:
            given, take = self._renamed(given, take)
        wanted = [tensor.name for tensor in self.stage.outputs]
        try:
            if self.is_whole:
                inputs = {tensor.name: given[tensor.name] for tensor in self.stage.inputs}
                for name, value in zip(wanted, self._session(0).run(wanted, inputs), strict=True):
                    take(name, value)
                return
            self._run_pieces(given, set(wanted), take)
        except (ort.capi.onnxruntime_pybind11_state.Fail, RuntimeError, ValueError) as err:
            raise TwinFailed(f"stage {self.stage.name} failed: {str(err).splitlines()[0]}") from err

    def _renamed(self, given: Mapping[str, Array], take: Take) -> tuple[Mapping[str, Array], Take]:
        """The same by the graph's names rather than the stage's."""
        ports = zip(self._own.inputs, self.stage.inputs, strict=False)  # scales come after
        inputs = {theirs.name: given[own.name] for own, theirs in ports} | self._scales
        outputs = zip(self._own.outputs, self.stage.outputs, strict=True)
        names = {theirs.name: own.name for own, theirs in outputs}
        return inputs, lambda name, value: take(names[name], value)

    def _run_pieces(self, given: Mapping[str, Array], wanted: set[str], take: Take) -> None:
        last_use = {name: i for i, piece in enumerate(self.pieces) for name in piece.takes}
        live: dict[str, Array] = {}
        for index, piece in enumerate(self.pieces):
            inputs = {name: live[name] if name in live else given[name] for name in piece.takes}
            inputs |= {name: self._value(name) for name in piece.weights}
            outputs = self._session(index).run(piece.gives, inputs)
            del inputs
            for name, value in zip(piece.gives, outputs, strict=True):
                if name in wanted:
                    take(name, value)
                if last_use.get(name, -1) > index:
                    live[name] = value
            live = {name: x for name, x in live.items() if last_use.get(name, -1) > index}

    def _session(self, index: int) -> ort.InferenceSession:
        if index not in self._sessions:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            # An arena would keep what a piece needed once, and there are dozens of pieces.
            options.enable_cpu_mem_arena = self.is_whole
            options.enable_mem_pattern = self.is_whole
            source = str(self.path) if self.is_whole else self._model(self.pieces[index])
            try:
                self._sessions[index] = ort.InferenceSession(
                    source, options, providers=["CPUExecutionProvider"]
                )
            except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
                raise TwinFailed(
                    f"stage {self.stage.name} does not load: {str(err).splitlines()[0]}"
                ) from err
        return self._sessions[index]

    def _model(self, piece: Piece) -> bytes:
        """A graph of one piece; its weights are inputs, so that none of them is copied."""
        inputs = [self._described(name) for name in piece.takes]
        inputs += [
            helper.make_tensor_value_info(
                name, _widened(self._weights[name].data_type), list(self._weights[name].dims)
            )
            for name in piece.weights
        ]
        outputs = [self._described(name) for name in piece.gives]
        small = [
            onnx.numpy_helper.from_array(self._value(name), name)
            for name in sorted({n for node in piece.nodes for n in node.input} & set(self._weights))
            if name not in piece.weights
        ]
        graph = helper.make_graph(piece.nodes, self.stage.name, inputs, outputs, small)
        raw: bytes = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11
        ).SerializeToString()
        return raw

    def _described(self, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, _widened(self._types[name]), None)

    def _value(self, name: str) -> Array:
        return read_weight(self._weights[name], self.path.parent)


def read_weight(tensor: onnx.TensorProto, folder: Path) -> Array:
    """An initializer's values, floats in float32; read from its external file if it has one."""
    if tensor.data_location == TensorProto.EXTERNAL:
        place = {entry.key: entry.value for entry in tensor.external_data}
        raw = np.fromfile(
            folder / place["location"], np.uint8, int(place["length"]), offset=int(place["offset"])
        )
    else:
        raw = np.frombuffer(tensor.raw_data, np.uint8)
    if tensor.data_type == TensorProto.BFLOAT16:
        values: Array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif tensor.data_type == TensorProto.FLOAT16:
        values = raw.view(np.float16).astype(np.float32)
    else:
        values = raw.view(DTYPES[tensor.data_type])
    return values.reshape(list(tensor.dims))


def _cut(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], piece_bytes: int
) -> Iterator[Piece]:
    """Nodes in order, a new piece where the weights of one would become too many."""
    groups: list[list[onnx.NodeProto]] = [[]]
    held: dict[str, int] = {}
    for node in model.graph.node:
        wide = _wide_node(node)
        new = {n: _float32_bytes(weights[n]) for n in node.input if n in weights and n not in held}
        if groups[-1] and new and sum(held.values()) + sum(new.values()) > piece_bytes:
            groups.append([])
            held = {}
        groups[-1].append(wide)
        held |= {n: _float32_bytes(weights[n]) for n in node.input if n in weights}
    outputs = {value.name for value in model.graph.output}
    for index, nodes in enumerate(groups):
        made = {name for node in nodes for name in node.output if name}
        used = {name for node in nodes for name in node.input if name}
        later = {name for group in groups[index + 1 :] for node in group for name in node.input}
        yield Piece(
            nodes=nodes,
            takes=sorted(used - made - set(weights)),
            gives=sorted(made & (later | outputs)),
            weights=sorted(n for n in used & set(weights) if _is_external(weights[n])),
        )


def _wide_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node in float32: casts to a narrow type become casts to float32."""
    wide = onnx.NodeProto()
    wide.CopyFrom(node)
    if wide.op_type == "Cast":
        for attribute in wide.attribute:
            if attribute.name == "to" and attribute.i in NARROW:
                attribute.i = TensorProto.FLOAT
    return wide


def _types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model)
    graph = inferred.graph
    return {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def _is_narrow(model: onnx.ModelProto) -> bool:
    graph = model.graph
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    types |= {tensor.data_type for tensor in graph.initializer}
    return bool(types & NARROW)


def _is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _float32_bytes(tensor: onnx.TensorProto) -> int:
    size = 8 if tensor.data_type == TensorProto.INT64 else 4
    return size * int(np.prod(list(tensor.dims), dtype=np.int64))


def _widened(kind: int) -> int:
    return int(TensorProto.FLOAT) if kind in NARROW else kind
