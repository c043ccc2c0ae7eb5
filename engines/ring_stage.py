"""The built-in stage `ring_attention` as a manifest declares it and a CPU runs it. Pure.

A layer's attention between two graphs of the model: rotate, write the new rows into the ring,
attend over its valid rows. Tensors by position, C = heads x head dim:

    in   qkv        (B, P * (Hq + 2 Hkv) * D)   P rows, each query, key, value; not rotated
    in   position   (B,) int64                  rows written before this tick; a counter region
    i/o  k, v       (B, 1, T, Hkv * D)          rings, updated where they lie: as qkv, or 8 bits
    out  attended   (B, P * Hq * D)             as qkv

8-bit rings need scales, one per KV head (`read_scales`); a twin takes them as its last two inputs,
(1, Hkv) float32 each.

Executors with a kernel for it (`ring_launch`) use that; the CPU runs the twin the bundle carries,
one graph for all stages of one shape, whose tensors `as_twin` names. Not here: what it computes
(`kernels.ring_attention` for a GPU, `export.ring_stages` for the twin).
"""

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.bundle import (
    NEXT,
    REBUILD,
    Bundle,
    BundleError,
    Dtype,
    Manifest,
    StageSpec,
    TensorSpec,
)
from engines.clocks import ClockKind

INPUTS = ("qkv", "position", "ring.k", "ring.v")
OUTPUTS = ("attended", "ring.k" + NEXT, "ring.v" + NEXT)
"""What a twin calls its tensors, in the stage's order."""

SCALES = ("ring.k_scale", "ring.v_scale")
"""What a twin of 8-bit rings takes beside them."""

FLOATS = ("float32", "bfloat16", "float16")
SCALED = ("int8", "float8e4m3")
"""Dtypes of rings that hold value / scale."""


def cache_of(stage: StageSpec) -> Dtype:
    """In what its rings are kept."""
    return stage.inputs[2].dtype


def as_twin(stage: StageSpec) -> StageSpec:
    """The stage with the twin as its graph, tensors named as there; scales are inputs."""
    assert stage.ring is not None, stage.name
    per_head = (1, stage.ring.kv_heads)
    scales = SCALES if stage.ring.scales else ()
    return StageSpec(
        name=stage.name,
        inputs=(
            *(
                msgspec.structs.replace(tensor, name=name)
                for tensor, name in zip(stage.inputs, INPUTS, strict=True)
            ),
            *(TensorSpec(name, "float32", per_head) for name in scales),
        ),
        outputs=tuple(
            msgspec.structs.replace(tensor, name=name)
            for tensor, name in zip(stage.outputs, OUTPUTS, strict=True)
        ),
        graph=stage.ring.twin,
    )


def read_scales(bundle: Bundle, stage: StageSpec) -> NDArray[np.float32] | None:
    """(2, Hkv) float32: of the keys, then of the values; None where rings are not of 8 bits.

    Raises `BundleError` when one is no scale.
    """
    assert stage.ring is not None, stage.name
    place = stage.ring.scales
    if place is None:
        return None
    with bundle.file(place.file).open("rb") as file:
        file.seek(place.offset)
        raw = file.read(place.nbytes)
    scales = np.frombuffer(raw, "<f4").astype(np.float32).reshape(place.shape)
    if not bool((np.isfinite(scales) & (scales > 0)).all()):
        raise BundleError(
            f"{bundle.file(place.file)}: scales of stage {stage.name} run from {scales.min()} to "
            f"{scales.max()}, and none may be 0 or less. {REBUILD}"
        )
    return scales


def scale_inputs(bundle: Bundle, stage: StageSpec) -> dict[str, NDArray[np.float32]]:
    """What a twin takes beside the stage's own inputs, by name; (1, Hkv) each.

    Raises `BundleError` as `read_scales`.
    """
    scales = read_scales(bundle, stage)
    if scales is None:
        return {}
    return {name: scales[at : at + 1].copy() for at, name in enumerate(SCALES)}


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
    caches = {tensor.dtype for tensor in rings}
    if len(caches) > 1 or not caches <= {qkv.dtype, *SCALED}:
        yield f": rings of {', '.join(sorted(caches))}; both are {qkv.dtype}, or both of 8 bits"
        return
    yield from _scale_faults(manifest, stage)


def _scale_faults(manifest: Manifest, stage: StageSpec) -> Iterator[str]:
    ring, cache = stage.ring, cache_of(stage)
    assert ring is not None, stage.name
    if (ring.scales is not None) != (cache in SCALED):
        yield f".ring.scales: rings of {cache}; those of 8 bits have scales, others have none"
        return
    if ring.scales is None:
        return
    place = ring.scales
    file, end = manifest.files.get(place.file), place.offset + place.nbytes
    if (place.dtype, place.shape) != ("float32", (2, ring.kv_heads)):
        yield f".ring.scales: {place.dtype} {list(place.shape)}, not float32 [2, {ring.kv_heads}]"
    elif file is None or place.offset < 0 or end > file.bytes:
        yield f".ring.scales: bytes {place.offset} to {end} are not in {place.file}"
