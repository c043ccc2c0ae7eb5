"""Whether a bundle's prompt section contradicts itself or the tick. Pure.

A prompt is fed by two stages of its own, outside the tick, which must leave a session's regions
such that the tick goes on from there: so every wire of both is followed here, before anything is
loaded, as strictly as `bundle` follows those of the tick. The section's types are in `bundle`.
"""

from collections.abc import Iterator

from engines.bundle import BATCH, NEXT, ROWS, Dtype, Manifest, PromptSpec, RegionSpec

Regions = dict[str, RegionSpec]
Wires = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape for one session."""

PREFILL_ROWS: dict[str, Dtype] = {"ids": "int64", "position": "int64", "is_embedded": "bool"}
"""Inputs of every prefill stage beside `embedded`, whose dtype is the model's own."""


def faults(manifest: Manifest, prompt: PromptSpec) -> Iterator[str]:
    """A prompt moves on regions of the tick, by stages of its own, to where ticks go on."""
    where = "`$.prompt`"
    regions = {region.name: region for region in manifest.regions}
    streams = len(prompt.delays)
    for field, region_shape in (("tokens", 2), ("counter", 0)):
        found = regions.get(getattr(prompt, field))
        if found is None or found.dtype != "int64" or len(found.shape) != region_shape:
            yield f"{where}.{field}: {getattr(prompt, field)} is no int64 region of that shape"
        elif region_shape and (
            found.shape[0] != streams or found.shape[1] <= max(prompt.delays, default=0)
        ):
            yield f"{where}.tokens: {list(found.shape)} does not hold {streams} streams' delays"
    if len(prompt.initial_ids) != streams or any(delay < 0 for delay in prompt.delays):
        yield f"{where}.initial_ids: one id per stream, and no negative delay"
    if 1 + len(prompt.silence_codes) + len(prompt.caller_codes) != streams:
        yield f"{where}.silence_codes: with text and caller_codes they are not {streams} streams"
    if min(prompt.pause_frames, prompt.longest_frames - 2 * prompt.pause_frames) < 0:
        yield f"{where}.longest_frames: {prompt.longest_frames} frames cannot hold two pauses"
    given: Wires = {}
    for stage, at in ((prompt.prefill, "prefill"), (prompt.opening, "opening")):
        if not stage.graph or stage.builtin or stage.graph not in manifest.files:
            yield f"{where}.{at}.graph: {stage.graph or 'nothing'} is not among `$.files`"
        if stage.name in {s.name for s in manifest.stages}:
            yield f"{where}.{at}.name: {stage.name} is the name of a stage of the tick"
    yield from _prefill_faults(prompt, regions, given)
    yield from _opening_faults(manifest, prompt, regions, given)
    names = [voice.name for voice in prompt.voices]
    if len(set(names)) != len(names):
        yield f"{where}.voices: a name is used twice"
    for name in (prompt.tokenizer, *(voice.file for voice in prompt.voices)):
        if name not in manifest.files:
            yield f"{where}: {name} is not among `$.files`"
    for voice in prompt.voices:
        if not 0 < voice.frames <= prompt.longest_frames - 2 * prompt.pause_frames:
            yield f"{where}.voices ({voice.name}): {voice.frames} frames leave no room"


def _prefill_faults(
    prompt: PromptSpec,
    regions: Regions,
    given: Wires,
) -> Iterator[str]:
    """Also enters what the stage gives into ``given``."""
    where, stage = "`$.prompt.prefill`", prompt.prefill
    inputs = {tensor.name: tensor for tensor in stage.inputs}
    for name, dtype in PREFILL_ROWS.items():
        row = (len(prompt.delays),) if name == "ids" else ()
        found = inputs.get(name)
        if found is None or (found.dtype, found.shape) != (dtype, (ROWS, *row)):
            yield f"{where}.inputs: {name} must be {dtype} {[ROWS, *row]}"
    embedded = inputs.get("embedded")
    if embedded is None or len(embedded.shape) != 2 or embedded.shape[0] != ROWS:
        yield f'{where}.inputs: embedded must be of shape ["{ROWS}", width]'
    moved = {t.name.removesuffix(NEXT) for t in stage.outputs if t.name.endswith(NEXT)}
    for tensor in stage.inputs:
        if tensor.name in PREFILL_ROWS or tensor.name == "embedded":
            continue
        region = regions.get(tensor.name)
        if region is None or (tensor.dtype, tensor.shape) != (region.dtype, (1, *region.shape)):
            yield f"{where}.inputs: {tensor.name} is no region, or not of its dtype and shape"
        elif not region.in_place or region.clock.rows_per_tick != 1:
            yield f"{where}.inputs: {tensor.name} is not a ring updated in place, one row per tick"
        elif tensor.name not in moved:
            yield f"{where}.outputs: {tensor.name} is read and not moved on"
    for tensor in stage.outputs:
        if tensor.name.endswith(NEXT):
            region = regions.get(tensor.name.removesuffix(NEXT))
            if region is None or tensor.name.removesuffix(NEXT) not in inputs:
                yield f"{where}.outputs: {tensor.name} moves on a region it never reads"
            elif (tensor.dtype, tensor.shape) != (region.dtype, (1, *region.shape)):
                yield f"{where}.outputs: {tensor.name} does not fit its region"
        elif not tensor.shape or tensor.shape[0] != 1:
            yield f"{where}.outputs: {tensor.name} must be of the last row alone, shape [1, ...]"
        else:
            given[tensor.name] = (tensor.dtype, tensor.row_shape)


def _opening_faults(
    manifest: Manifest,
    prompt: PromptSpec,
    regions: Regions,
    given: Wires,
) -> Iterator[str]:
    where, stage = "`$.prompt.opening`", prompt.opening
    known = given | {name: (region.dtype, region.shape) for name, region in regions.items()}
    known |= {
        tensor.name: (tensor.dtype, tensor.row_shape)
        for made in manifest.stages
        if made.builtin
        for tensor in made.outputs
    }
    for tensor in stage.inputs:
        if tensor.shape[:1] != (BATCH,) or known.get(tensor.name) != (
            tensor.dtype,
            tensor.row_shape,
        ):
            yield f"{where}.inputs: {tensor.name} is nothing that prefill, noise or a region gives"
    if [tensor.name for tensor in stage.outputs] != [prompt.tokens + NEXT]:
        yield f"{where}.outputs: must be {prompt.tokens}{NEXT} alone"
    elif known.get(prompt.tokens) != (stage.outputs[0].dtype, stage.outputs[0].row_shape):
        yield f"{where}.outputs: {prompt.tokens}{NEXT} does not fit its region"
    elif prompt.tokens not in {tensor.name for tensor in stage.inputs}:
        yield f"{where}.outputs: {prompt.tokens} is moved on and never read"
