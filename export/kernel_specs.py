"""Which stages have a kernel of ours, and what it is told: `StageSpec.kernel` of every stage.

Asked for after the graphs have been traced, which is what gives most weights their places. Not
here: what each family of kernels needs (`codec_kernel_specs`, `lm_kernel_specs`), the kernels.
"""

from collections.abc import Iterable

import msgspec

from engines.bundle import KernelSpec, StageSpec
from export.codec_kernel_specs import codec_kernel
from export.lm_kernel_specs import depth_kernel, temporal_kernel
from export.ring_stages import DecodePiece, EncodePiece, TemporalPiece
from export.stages import Depth, StageGraph
from export.to_onnx import Weights

Kernels = dict[str, KernelSpec]
"""Name of a stage -> its kernel."""


def kernels_of(graphs: Iterable[StageGraph], weights: Weights) -> Kernels:
    """Of those stages that have one; weights that only kernels use get places in ``weights``."""
    found = ((graph.name, kernel_of(graph, weights)) for graph in graphs)
    return {name: kernel for name, kernel in found if kernel is not None}


def kernel_of(graph: StageGraph, weights: Weights) -> KernelSpec | None:
    if isinstance(graph, EncodePiece | DecodePiece):
        return codec_kernel(graph, weights)
    if isinstance(graph, TemporalPiece):
        return temporal_kernel(graph, weights)
    if isinstance(graph, Depth):
        return depth_kernel(graph, weights)
    return None


def with_kernel(spec: StageSpec, kernels: Kernels) -> StageSpec:
    """A stage as the manifest has it."""
    kernel = kernels.get(spec.name)
    return msgspec.structs.replace(spec, kernel=kernel) if kernel else spec
