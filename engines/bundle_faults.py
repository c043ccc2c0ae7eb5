"""Whether a manifest contradicts itself: everything wrong with it, each with its path. Pure.

Timing, regions, stages, the wires between them followed through one tick, files, golden data. A
part with a file of its own is asked there: prompts (`bundle_prompt`), ring attention
(`ring_stage`), kernels that stand in for graphs (`kernel_kinds`).

Not here: the format itself and reading it (`bundle`), whether files are what they should be.
"""

from collections.abc import Iterator
from pathlib import Path

from engines import bundle_prompt, clocks, kernel_kinds, ring_stage
from engines.bundle import (
    BATCH,
    LARGEST_BATCH,
    LARGEST_TEXT_ID,
    NEXT,
    Manifest,
)
from engines.clocks import ClockKind


def faults(manifest: Manifest) -> Iterator[str]:
    """Everything in ``manifest`` that contradicts itself, each with its path. Pure."""
    yield from _timing_faults(manifest)
    yield from _region_faults(manifest)
    yield from _stage_faults(manifest)
    yield from _wire_faults(manifest)
    if manifest.prompt is not None:
        yield from bundle_prompt.faults(manifest, manifest.prompt)
    for name in manifest.files:
        if name.startswith("/") or ".." in Path(name).parts:
            yield f"`$.files`: {name} leads out of the bundle"
        elif not name.isprintable():
            yield f"`$.files`: {name!r} is no name of a file"
    names = {stage.name for stage in manifest.every_stage()}
    for index, golden in enumerate(manifest.golden):
        if golden.stage not in names:
            yield f"`$.golden[{index}].stage`: there is no stage {golden.stage}"
        if golden.file not in manifest.files:
            yield f"`$.golden[{index}].file`: {golden.file} is not among `$.files`"
        if not golden.ages or min(golden.ages) < 0:
            yield f"`$.golden[{index}].ages`: {list(golden.ages)} are no ages"
    if manifest.golden_call and manifest.golden_call not in manifest.files:
        yield f"`$.golden_call`: {manifest.golden_call} is not among `$.files`"
    if manifest.cache_report and manifest.cache_report not in manifest.files:
        yield f"`$.cache_report`: {manifest.cache_report} is not among `$.files`"
    for index, silent in enumerate(manifest.text.silent_ids):
        if not 0 <= silent <= LARGEST_TEXT_ID:
            yield f"`$.text.silent_ids[{index}]`: {silent} is no text id"
    if manifest.text.pieces not in manifest.files:
        yield f"`$.text.pieces`: {manifest.text.pieces} is not among `$.files`"


def _timing_faults(manifest: Manifest) -> Iterator[str]:
    timing = manifest.timing
    if min(timing.period_ns, timing.sample_rate_hz, timing.samples_per_frame) <= 0:
        yield "`$.timing`: every value must be positive"
    elif timing.samples_per_frame * 1_000_000_000 != timing.period_ns * timing.sample_rate_hz:
        yield (
            f"`$.timing`: {timing.samples_per_frame} samples at {timing.sample_rate_hz} Hz do not "
            f"last {timing.period_ns} ns"
        )
    if not 1 <= manifest.largest_batch <= LARGEST_BATCH:
        yield f"`$.largest_batch`: {manifest.largest_batch} is no batch (1..{LARGEST_BATCH})"


def _region_faults(manifest: Manifest) -> Iterator[str]:
    seen: set[str] = set()
    for index, region in enumerate(manifest.regions):
        where = f"`$.regions[{index}]` ({region.name})"
        if region.name in seen:
            yield f"{where}: the name is used twice"
        seen.add(region.name)
        if any(length < 1 for length in region.shape):
            yield f"{where}.shape: {list(region.shape)} has an empty axis"
        elif fault := clocks.check(region.clock, region.shape):
            yield f"{where}.clock: {fault}"
        if region.in_place and region.clock.kind is not ClockKind.RING:
            yield f"{where}.in_place: only a ring may be updated in place"
        if region.bounds is None:
            continue
        if region.clock.kind is not ClockKind.CONSTANT:
            yield f"{where}.bounds: only a constant region can be set by a caller"
        elif not region.bounds[0] <= region.fill <= region.bounds[1]:
            yield f"{where}.fill: {region.fill} is outside {list(region.bounds)}"


def _stage_faults(manifest: Manifest) -> Iterator[str]:
    seen: set[str] = set()
    for index, stage in enumerate(manifest.stages):
        where = f"`$.stages[{index}]` ({stage.name})"
        if stage.name in seen:
            yield f"{where}: the name is used twice"
        seen.add(stage.name)
        if bool(stage.graph) == bool(stage.builtin):
            yield f"{where}: a stage is either a graph or a builtin"
        if stage.graph and stage.graph not in manifest.files:
            yield f"{where}.graph: {stage.graph} is not among `$.files`"
        if (stage.builtin == "ring_attention") != (stage.ring is not None):
            yield f"{where}.ring: a ring_attention has one, no other stage does"
        elif stage.ring is not None:
            yield from (f"{where}{fault}" for fault in ring_stage.faults(manifest, stage))
        if stage.kernel is not None:
            yield from (f"{where}.kernel{f}" for f in kernel_kinds.faults(manifest, stage))
        for side in ("inputs", "outputs"):
            for tensor in getattr(stage, side):
                if not tensor.shape or tensor.shape[0] != BATCH or BATCH in tensor.shape[1:]:
                    yield f'{where}.{side} ({tensor.name}): shape must begin with "{BATCH}"'


def _wire_faults(manifest: Manifest) -> Iterator[str]:
    """Follow the names through one tick, as the step program will."""
    samples = manifest.timing.samples_per_frame
    known: dict[str, tuple[str, tuple[int, ...]]] = {
        region.name: (region.dtype, region.shape) for region in manifest.regions
    }
    regions = set(known)
    constants = {r.name for r in manifest.regions if r.clock.kind is ClockKind.CONSTANT}
    known[manifest.audio.input] = ("float32", (1, samples))
    produced: dict[str, tuple[str, tuple[int, ...]]] = {}
    used: set[str] = set()
    updated: set[str] = set()
    for index, stage in enumerate(manifest.stages):
        where = f"`$.stages[{index}]` ({stage.name})"
        for tensor in stage.inputs:
            expected = known.get(tensor.name)
            if expected is None:
                yield f"{where}.inputs: {tensor.name} is neither a region nor made before it"
            elif expected != (tensor.dtype, tensor.row_shape):
                yield (
                    f"{where}.inputs: {tensor.name} is {tensor.dtype} {list(tensor.row_shape)} "
                    f"here and {expected[0]} {list(expected[1])} where it comes from"
                )
            used.add(tensor.name)
        for tensor in stage.outputs:
            name = tensor.name.removesuffix(NEXT)
            if tensor.name.endswith(NEXT) and name in regions:
                updated.add(name)
                if name in constants:
                    yield f"{where}.outputs: {name} is constant and must not be updated"
                if known[name] != (tensor.dtype, tensor.row_shape):
                    yield f"{where}.outputs: {tensor.name} does not fit region {name}"
                if name not in {t.name for t in stage.inputs}:
                    yield f"{where}.outputs: {tensor.name} moves on a region it never reads"
            elif tensor.name in known:
                yield f"{where}.outputs: {tensor.name} is already the name of something else"
            else:
                known[tensor.name] = produced[tensor.name] = (tensor.dtype, tensor.row_shape)
    for region in manifest.regions:
        if region.name not in used:
            yield f"`$.regions` ({region.name}): no stage reads it"
        if region.clock.kind in clocks.MOVES and region.name not in updated:
            yield f"`$.regions` ({region.name}): no stage moves it on"
    if manifest.audio.input not in used:
        yield f"`$.audio.input`: no stage hears {manifest.audio.input}"
    ports: list[tuple[str, str, tuple[str, tuple[int, ...]]]] = [
        ("audio.output", manifest.audio.output, ("float32", (1, samples))),
        ("text.output", manifest.text.output, ("int64", ())),
    ]
    if manifest.audio.valid:
        ports.append(("audio.valid", manifest.audio.valid, ("bool", ())))
    for port, name, expected in ports:
        if produced.get(name) != expected:
            yield f"`$.{port}`: no stage makes {name} as {expected[0]} {list(expected[1])}"
