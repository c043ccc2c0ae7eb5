"""`duplexbox export show`: what a bundle is made of, and what a session of it will cost.

Pure: a manifest in, lines of text or a JSON-ready dict out. Bytes come from the native clocks,
so they are what the arena will commit, not an estimate. No torch, no onnx.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from engines import caches
from engines.bundle import Manifest, PromptSpec, RegionSpec, TensorSpec

AGES_S = (0, 60)
"""Ages at which a session's bytes are shown, besides full retention."""

NS_PER_S = 1_000_000_000


def ages_in_ticks(manifest: Manifest) -> dict[str, int]:
    """Label -> age in ticks: the fixed ages, then the age at which nothing grows any more."""
    period_ns = manifest.timing.period_ns
    ages = {f"{age} s": age * NS_PER_S // period_ns for age in AGES_S}
    ages["full"] = manifest.ticks_until_full()
    return ages


def describe(manifest: Manifest) -> dict[str, Any]:
    """The same facts as `lines`, for another program."""
    ages = ages_in_ticks(manifest)
    return {
        "model": manifest.model.name,
        "parameters": manifest.model.parameters,
        "trained": manifest.model.trained,
        "period_ns": manifest.timing.period_ns,
        "largest_batch": manifest.largest_batch,
        "stages": [stage.name for stage in manifest.stages],
        "prompt": msgspec.to_builtins(manifest.prompt),
        "regions": {
            region.name: {label: region.bytes_at(ticks) for label, ticks in ages.items()}
            for region in manifest.regions
        },
        "session_bytes": {label: manifest.session_bytes(ticks) for label, ticks in ages.items()},
        "full_after_ticks": manifest.ticks_until_full(),
        "bundle_bytes": sum(file.bytes for file in manifest.files.values()),
    }


def lines(manifest: Manifest) -> Iterator[str]:
    """The bundle as a page of text."""
    model, timing = manifest.model, manifest.timing
    weights = "trained weights" if model.trained else "UNTRAINED weights, it speaks noise"
    size = sum(file.bytes for file in manifest.files.values())
    yield f"{model.name}: {model.parameters:,} parameters, {weights}"
    yield f"  checkpoint sha256 {model.checkpoint_sha256}"
    if model.notice:
        yield f"  {model.notice}"
    yield (
        f"  a frame of {timing.samples_per_frame:,} samples at {timing.sample_rate_hz:,} Hz every "
        f"{timing.period_ns / 1e6:g} ms; batch profiles 1..{manifest.largest_batch}"
    )
    yield f"  {len(manifest.files)} files, {binary(size)}"
    yield ""
    yield "stages of one tick"
    regions = {region.name for region in manifest.regions}
    for stage in manifest.stages:
        wires_in = [t for t in stage.inputs if t.name not in regions]
        wires_out = [t for t in stage.outputs if t.name.removesuffix(".next") not in regions]
        held = len(stage.inputs) - len(wires_in)
        yield (
            f"  {stage.name:<12} {stage.graph or 'built in: ' + stage.builtin}, "
            f"{held} region{'s' if held != 1 else ''}"
        )
        yield f"  {'':<12} {_tensors(wires_in)} -> {_tensors(wires_out)}"
    if manifest.prompt is not None:
        yield from _prompt(manifest.prompt)
    yield ""
    yield from _region_table(manifest)


def _prompt(prompt: PromptSpec) -> Iterator[str]:
    voices = ", ".join(f"{voice.name} ({voice.frames})" for voice in prompt.voices) or "none"
    yield ""
    yield f"before a call: a voice and a persona, {prompt.longest_frames:,} frames at most"
    yield f"  {prompt.prefill.name:<17} {prompt.prefill.graph}, any number of rows"
    yield f"  {prompt.opening.name:<17} {prompt.opening.graph}, once"
    yield f"  voices (frames)   {voices}"


def binary(count: int) -> str:
    """A number of bytes for people: "2.4 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _region_table(manifest: Manifest) -> Iterator[str]:
    ages = ages_in_ticks(manifest)
    full_s = ages["full"] * manifest.timing.period_ns / NS_PER_S
    heading = "".join(f"{label:>11}" for label in ages)
    yield f"regions of one session{'':<22}{'clock':<26}{heading}"
    for group in _families(manifest.regions):
        first = group[0]
        many = f" (x {len(group)})" if len(group) > 1 else ""
        name = f"{first.name}{many}"
        cells = "".join(
            f"{binary(sum(region.bytes_at(ticks) for region in group)):>11}"
            for ticks in ages.values()
        )
        yield f"  {name:<42}{_clock(first):<26}{cells}"
    total = "".join(f"{binary(manifest.session_bytes(ticks)):>11}" for ticks in ages.values())
    yield f"  {'one session':<42}{'':<26}{total}"
    yield f"  a session stops growing {full_s:g} s into its call"
    yield f"  {caches.sentence(manifest)}"


def _families(regions: tuple[RegionSpec, ...]) -> Iterator[list[RegionSpec]]:
    """Regions that differ in a layer number only, so that 32 layers take one line."""
    families: dict[tuple[Any, ...], list[RegionSpec]] = {}
    for region in regions:
        stem = tuple("#" if part.isdigit() else part for part in region.name.split("."))
        families.setdefault((stem, region.shape, region.dtype, region.clock), []).append(region)
    yield from families.values()


def _clock(region: RegionSpec) -> str:
    clock = region.clock
    if not clock.retain:
        return clock.kind.value
    pinned = f", {clock.pinned} pinned" if clock.pinned else ""
    return f"{clock.kind.value} {clock.retain}, +{clock.advance}/tick{pinned}"


def _tensors(tensors: list[TensorSpec]) -> str:
    return ", ".join(
        f"{t.name} {t.dtype}[{','.join(str(length) for length in t.shape)}]" for t in tensors
    )
