"""Trace stages, and those that are one program only once.

Between two attentions the layers of a model differ in their weights and in nothing else, and
tracing asks for no weight. Such stages name their program (`StageGraph.program`) and say what a
weight of another is called in themselves (`StageGraph.own`); the rest goes by order. Of Moshi's 53
graphs, cut at attention, 10 are traced.

Not here: what is written of a program (`to_onnx`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.bundle import BATCH, ROWS, TensorSpec
from export.models.streaming import TORCH_DTYPES
from export.stages import StageGraph


@dataclass(frozen=True, slots=True)
class Traced:
    """The program of ``graph``, which may have been found in another: names in it are ``of``'s."""

    graph: StageGraph
    of: StageGraph
    program: torch.export.ExportedProgram

    def weight(self, name: str) -> tuple[str, Tensor]:
        """What ``graph`` has in the place of the program's ``name``, and what it is called."""
        own = self.graph.own(name, self.of)
        found = _weight(self.graph, own)
        expected = _weight(self.of, name)
        kinds = [(weight.shape, weight.dtype) for weight in (found, expected)]
        assert kinds[0] == kinds[1], (self.graph.name, own, self.of.name, name, kinds)
        return own, found


class Traces:
    """Programs of the stages of one model, which must stay as it is while they are used."""

    def __init__(self) -> None:
        self._found: dict[str, Traced] = {}

    def __contains__(self, graph: StageGraph) -> bool:
        return graph.program in self._found

    def of(self, graph: StageGraph) -> Traced:
        """Trace ``graph``, unless a stage of the same program has been."""
        if graph not in self:
            self._found[graph.program] = Traced(graph, graph, trace(graph))
        first = self._found[graph.program]
        for ours, theirs in (
            (graph.inputs, first.graph.inputs),
            (graph.outputs, first.graph.outputs),
        ):
            assert _kinds(ours) == _kinds(theirs), (graph.name, first.graph.name)
        return Traced(graph, first.graph, first.program)


def trace(graph: StageGraph) -> torch.export.ExportedProgram:
    """The stage over its symbolic first axis: sessions in the batch, or a prompt's rows."""
    lengths = {name: torch.export.Dim(name, min=1, max=4096) for name in (BATCH, ROWS)}
    # Traced at 3, so that no length of the model is taken for the batch.
    example = tuple(
        torch.empty(
            3 if spec.shape[0] in lengths else int(spec.shape[0]),
            *spec.row_shape,
            dtype=TORCH_DTYPES[spec.dtype],
        )
        for spec in graph.inputs
    )
    with torch.no_grad():
        shapes = (
            tuple({0: lengths.get(str(s.shape[0]), torch.export.Dim.STATIC)} for s in graph.inputs),
        )
        return torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)


def _kinds(tensors: tuple[TensorSpec, ...]) -> list[tuple[object, ...]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _weight(graph: StageGraph, name: str) -> Tensor:
    """A parameter or a buffer, also one that no checkpoint has."""
    module, _, leaf = name.rpartition(".")
    found = getattr(graph.get_submodule(module), leaf)
    assert isinstance(found, Tensor), (graph.name, name)
    return found
