"""The built-in stage `ring_attention` as a manifest declares it and a CPU runs it. Pure.

A layer's attention between two graphs of the model: rotate, write the new rows into the ring,
attend over its valid rows. Tensors by position, C = heads x head dim:

    in   qkv        (B, P * (Hq + 2 Hkv) * D)   P rows, each query, key, value; not rotated
    in   position   (B,) int64                  rows written before this tick; a counter region
    i/o  k, v       (B, 1, T, Hkv * D)          rings, updated where they lie
    out  attended   (B, P * Hq * D)             as qkv

Executors with a kernel for it (`ring_launch`) use that; the CPU runs the twin the bundle carries,
one graph for all stages of one shape, whose tensors `as_twin` names. Not here: what it computes
(`kernels.ring_attention` for a GPU, `export.ring_stages` for the twin).
"""

from collections.abc import Iterator

import msgspec

from engines.bundle import NEXT, Manifest, StageSpec
from engines.clocks import ClockKind

INPUTS = ("qkv", "position", "ring.k", "ring.v")
OUTPUTS = ("attended", "ring.k" + NEXT, "ring.v" + NEXT)
"""What a twin calls its tensors, in the stage's order."""

FLOATS = ("float32", "bfloat16", "float16")


def as_twin(stage: StageSpec) -> StageSpec:
    """The stage with the twin as its graph, tensors named as there."""
    assert stage.ring is not None, stage.name
    return StageSpec(
        name=stage.name,
        inputs=tuple(
            msgspec.structs.replace(tensor, name=name)
            for tensor, name in zip(stage.inputs, INPUTS, strict=True)
        ),
        outputs=tuple(
            msgspec.structs.replace(tensor, name=name)
            for tensor, name in zip(stage.outputs, OUTPUTS, strict=True)
        ),
        graph=stage.ring.twin,
    )


def faults(manifest: Manifest, stage: StageSpec) -> Iterator[str]:
    """What is wrong with one such stage, each with its place within the stage."""
    ring = stage.ring
    assert ring is not None, stage.name
    if ring.twin not in manifest.files:
        yield f".ring.twin: {ring.twin} is not among `$.files`"
    numbers = (ring.query_heads, ring.kv_heads, ring.head_dim, ring.retain, ring.rows)
    if min(numbers) < 1 or ring.query_heads % ring.kv_heads:
        yield f".ring: {ring.query_heads} query heads on {ring.kv_heads} KV heads, or no rows"
        return
    if (len(stage.inputs), len(stage.outputs)) != (len(INPUTS), len(OUTPUTS)):
        yield f": takes {', '.join(INPUTS)} and gives {', '.join(OUTPUTS)}, in this order"
        return
    qkv, position, *rings = stage.inputs
    attended, *moved = stage.outputs
    width = (ring.query_heads + 2 * ring.kv_heads) * ring.head_dim
    asked = ring.query_heads * ring.head_dim
    for tensor, row in ((qkv, ring.rows * width), (attended, ring.rows * asked)):
        if tensor.row_shape != (row,) or tensor.dtype not in FLOATS or tensor.dtype != qkv.dtype:
            yield f" ({tensor.name}): must be {qkv.dtype} of shape [B, {row}]"
    regions = {region.name: region for region in manifest.regions}
    counter = regions.get(position.name)
    if (
        counter is None
        or counter.clock.kind is not ClockKind.COUNTER
        or counter.clock.rows_per_tick != ring.rows
    ):
        yield f" ({position.name}): must count {ring.rows} rows per tick"
    shape = (1, ring.retain, ring.kv_heads * ring.head_dim)
    for tensor, after in zip(rings, moved, strict=True):
        region = regions.get(tensor.name)
        if region is None or after.name != tensor.name + NEXT:
            yield f" ({tensor.name}): must be a region, and {after.name} its next value"
        elif region.shape != shape or not region.in_place or region.clock.pinned:
            yield f" ({tensor.name}): must be {list(shape)}, updated in place, with no row pinned"
        elif region.clock.rows_per_tick != ring.rows:
            yield f" ({tensor.name}): moves {region.clock.advance} rows per tick, not {ring.rows}"
