"""A stage's graph as TensorRT gets it: nodes with names, large weights as inputs. Pure ONNX.

The bundle's graphs stay as they are; this is done in memory on the way to the parser. A node is
called after its first output, so that a layer of the network can be traced back. A weight that
lies in an external file and is at least `LARGE_BYTES` becomes an input of the graph: it then
stays in the bundle's own memory, the plan holds kernels only, and building needs no weights at
all. Otherwise a plan of a 15 GB model would hold them up to twice and need 50 GB to build.

What the parser is known to lose is listed here, so that the network can be held to it: the
lengths of attention (`Prepared.lengths`). Not here: TensorRT (`tensorrt_network`).
"""

import posixpath
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx
from onnx import TensorProto

from engines.bundle import Dtype
from engines.plans import WeightInput, WeightsForm

LARGE_BYTES = 1 << 20
"""The size from which the exporter puts a weight on a page of its own (`to_onnx.WIDE_BYTES`)."""

DTYPES: dict[int, Dtype] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT8E4M3FN: "float8e4m3",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
}

LENGTHS_INPUT = 6
"""Position of `nonpad_kv_seqlen` among the inputs of Attention, opset 24."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph ready for the parser, and what its network must have."""

    model: bytes
    """Serialised; external weights that stayed are relative to the graph's own folder."""
    weights: tuple[WeightInput, ...]
    """Inputs after the stage's own, in this order."""
    constant_files: tuple[str, ...]
    """Files of the bundle whose weights go into the plan."""
    constant_bytes: int
    """Bytes of those weights."""
    attentions: frozenset[str]
    """Names of the attention nodes."""
    lengths: dict[str, str]
    """Attention node -> the int64 (B,) tensor that says how many of its keys are valid."""


def prepare(path: Path, graph: str, form: WeightsForm) -> Prepared:
    """Read graph ``graph`` of the bundle in ``path``; weights are not read, only where they lie."""
    model = onnx.load(path / graph, load_external_data=False)
    folder = PurePosixPath(graph).parent
    for node in model.graph.node:
        node.name = node.output[0]
    weights: list[WeightInput] = []
    kept: list[TensorProto] = []
    files: set[str] = set()
    constant_bytes = 0
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        place = _place(tensor, folder)
        if form == "inputs" and place.bytes >= LARGE_BYTES:
            weights.append(place)
            continue
        kept.append(tensor)
        files.add(place.file)
        constant_bytes += place.bytes
    moved = {weight.name for weight in weights}
    for tensor in model.graph.initializer:
        if tensor.name in moved:
            described = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, list(tensor.dims)
            )
            model.graph.input.append(described)
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    attentions = [node for node in model.graph.node if node.op_type == "Attention"]
    return Prepared(
        model=model.SerializeToString(),
        weights=tuple(weights),
        constant_files=tuple(sorted(files)),
        constant_bytes=constant_bytes,
        attentions=frozenset(node.name for node in attentions),
        lengths={
            node.name: node.input[LENGTHS_INPUT]
            for node in attentions
            if len(node.input) > LENGTHS_INPUT and node.input[LENGTHS_INPUT]
        },
    )


def _place(tensor: TensorProto, folder: PurePosixPath) -> WeightInput:
    """Where an external weight lies, with the file's path inside the bundle."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return WeightInput(
        name=tensor.name,
        dtype=DTYPES[tensor.data_type],
        shape=tuple(tensor.dims),
        file=posixpath.normpath(folder / entries["location"]),
        offset_bytes=int(entries.get("offset", 0)),
        bytes=int(entries["length"]),
    )
