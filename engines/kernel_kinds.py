"""Which kernels of ours a stage may name, and what each needs to be told. Pure.

A kind says which weights it wants, by role and shape, and which numbers. A manifest is held to
that before anything is loaded: kernels read device memory by these shapes and check nothing.

    gated_first    before the first attention of the temporal transformer
    gated_piece    between two attentions of it
    gated_last     after the last
    depth          the depth transformer, choosing and delays included
    codec_encode_first, codec_encode_last    around the encoder's transformer
    codec_decode_first, codec_decode_last    around the decoder's
    codec_piece    between two attentions of either

(`kernels.lm_kinds`, `kernels.codec_kinds`.)

Not here: the kernels (`kernels`), binding them (`kernel_stages`), the format (`bundle`).
"""

from collections.abc import Callable, Iterator, Mapping

from engines.bundle import KernelSpec, Manifest, StageSpec, WeightSpec
from engines.kernels import codec_kinds, lm_kinds

ALIGN_BYTES = 64
"""Of a slice in its file: what export aligns to, and more than any vector load needs."""

Shapes = Mapping[str, tuple[int, ...]]
"""Role -> shape."""
Kind = Callable[[StageSpec, KernelSpec], Shapes]
"""What weights a stage of this kind needs, from its tensors and numbers.

Raises KeyError naming a number that is missing, ValueError with what else contradicts the kind."""

KINDS: dict[str, Kind] = {**lm_kinds.SHAPES, **codec_kinds.KINDS}


def faults(manifest: Manifest, stage: StageSpec) -> Iterator[str]:
    """What is wrong with one stage's `kernel`, each with its place within it."""
    kernel = stage.kernel
    assert kernel is not None, stage.name
    if stage.builtin:
        yield ": a built-in stage has no graph that a kernel could stand in for"
    kind = KINDS.get(kernel.kind)
    if kind is None:
        yield f".kind: there is no {kernel.kind!r}; this program knows {', '.join(sorted(KINDS))}"
        return
    for role, weight in kernel.weights.items():
        yield from (f".weights ({role}){fault}" for fault in _outside(manifest, weight))
    try:
        wanted = kind(stage, kernel)
    except KeyError as err:
        yield f".numbers: {kernel.kind} needs {err.args[0]}"
        return
    except ValueError as err:
        yield f": {err}"
        return
    for role, shape in wanted.items():
        found = kernel.weights.get(role)
        if found is None:
            yield f".weights: {kernel.kind} needs {role} of shape {list(shape)}"
        elif found.shape != shape:
            yield f".weights ({role}): is {list(found.shape)} and should be {list(shape)}"
    for role in kernel.weights:
        if role not in wanted:
            yield f".weights ({role}): {kernel.kind} has no such role"


def _outside(manifest: Manifest, weight: WeightSpec) -> Iterator[str]:
    file = manifest.files.get(weight.file)
    if file is None:
        yield f".file: {weight.file} is not among `$.files`"
    elif min(weight.offset, *weight.shape, 0) < 0 or weight.offset % ALIGN_BYTES:
        yield f".offset: {weight.offset} is not a multiple of {ALIGN_BYTES}"
    elif weight.offset + weight.nbytes > file.bytes:
        yield (
            f": bytes {weight.offset} to {weight.offset + weight.nbytes} lie outside "
            f"{weight.file}, which has {file.bytes}"
        )
