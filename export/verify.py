"""Hold a bundle to its golden data, and to torch: every stage alone, then a call.

Each stage is run on ONNX Runtime's CPU provider, as its float32 twin where it has to be (`twin`),
on the inputs its golden data was recorded with. Given the checkpoint, torch answers the same
inputs anew and must agree as well; so a bundle of another checkpoint, or one whose golden data
went wrong with it, is found out. Then a greedy call runs stage after stage, and every token must
be equal.

What is compared: tokens, codes, counters and flags exactly, floats to `TOLERANCE`; of a ring the
rows that were written, and that no other row changed by a bit.

Not here: what went in and what must come out (`golden`), printing (`cli`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from engines.bundle import NEXT, Bundle, GoldenSpec, Manifest, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.golden import CODED, draw, is_coded, is_drawn, written_rows
from export import golden
from export.caches import caches_of
from export.golden import IN, OUT
from export.prompt_stages import prompt_graphs
from export.source import Source
from export.stages import (
    CODES,
    NOISE,
    PCM,
    TEXT,
    USER_CODES,
    VALID,
    Attention,
    StageGraph,
    graphs_of,
)
from export.twin import PIECE_BYTES, Array, Twin, TwinFailed

TOLERANCE = 1e-4
"""Of the largest value of a tensor, or of 1 if that is larger. Float32 sums in another order
differ by some 1e-6 after one matrix and by less than 2e-5 after all layers of the full-size
models; a wrong weight moves its tensor by a multiple of this."""

CODED_TOLERANCE = 1e-2
"""The same where 8-bit rings lie between input and output, of which CODED_SHARE may be off."""
CODED_SHARE = 1e-2
"""Of codes: so many may be the neighbour of the expected one. Where a value lies on the edge
between two codes, a rounding error decides; a wrong scale or rounding puts most of them elsewhere.
An attention stage alone is recorded off the edges, and none may be."""
CODED_CLOSE = 1e-2
"""A call with 8-bit rings may part where two choices are nearer than this."""

MOST_SAID = 4
"""Differences told of one stage: what goes wrong early is wrong in everything after it."""

TOKENS = (USER_CODES, TEXT, CODES, VALID)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked, in a sentence."""

    sentence: str
    is_failure: bool = False


def findings(
    bundle: Bundle,
    reference: Source | None = None,
    *,
    frames: int | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Finding]:
    """Check everything; go on after a failure, so that one run tells the whole story.

    reference: the checkpoint the bundle was built from, opened with its precision and context.
    frames: length of the greedy call that is run with it; None: the recorded one.
    """
    manifest = bundle.manifest
    if not manifest.golden:
        yield Finding(
            f"{bundle.path} carries no golden data, so nothing can be verified. "
            "Build it again: duplexbox export build --help",
            is_failure=True,
        )
        return
    stages = {
        stage.name: msgspec.structs.replace(stage, kernel=None)  # the graph is what is verified
        for stage in manifest.every_stage()
    }
    twins = {spec.stage: Twin(bundle, stages[spec.stage], piece_bytes) for spec in manifest.golden}
    graphs: dict[str, StageGraph] = {}
    if reference is not None:
        graphs = {graph.name: graph for graph in _graphs(reference, bundle)}
        yield from _same_checkpoint(bundle, reference)
        for name, graph in graphs.items():
            if graph.spec != stages.get(name):
                yield Finding(
                    f"stage {name}: the checkpoint's has other inputs or outputs than the bundle's"
                    ", so they are different models. Name the checkpoint it was built from.",
                    is_failure=True,
                )
                return
    for spec in manifest.golden:
        yield from _stage_findings(
            bundle, spec, twins[spec.stage], graphs.get(spec.stage), reference
        )
    if manifest.golden_call:
        ticking = tuple(graphs[stage.name] for stage in manifest.stages if stage.name in graphs)
        yield from _call_findings(bundle, twins, ticking, reference, frames)


def _attention(manifest: Manifest) -> Attention:
    return "ring" if any(stage.ring for stage in manifest.stages) else "standard"


def _graphs(source: Source, bundle: Bundle) -> tuple[StageGraph, ...]:
    """Those of a tick, then those of a prompt, with the rings and scales of ``bundle``."""
    caches, config = caches_of(bundle), source.config
    attention = _attention(bundle.manifest)
    ticking = graphs_of(config, source.mimi, source.lm, source.dtype, attention, caches)
    if config.prompt is None:
        return ticking
    return (*ticking, *prompt_graphs(config, source.lm, source.dtype, caches))


def _same_checkpoint(bundle: Bundle, reference: Source) -> Iterator[Finding]:
    built, given = bundle.manifest.model.checkpoint_sha256, reference.checkpoint_sha256()
    if built == given:
        yield Finding(f"checkpoint: sha256 {given[:12]}…, the one the bundle was built from")
    else:
        yield Finding(
            f"checkpoint: sha256 {given[:12]}… over names, shapes and values, the bundle was built "
            f"from {built[:12]}…. Name that checkpoint, or build again: duplexbox export build",
            is_failure=True,
        )


def _stage_findings(
    bundle: Bundle,
    spec: GoldenSpec,
    twin: Twin,
    graph: StageGraph | None,
    reference: Source | None,
) -> Iterator[Finding]:
    held = safetensors.torch.load_file(bundle.file(spec.file))
    inputs = {n.removeprefix(IN): x for n, x in held.items() if n.startswith(IN)}
    answers = {
        "its golden data": {n.removeprefix(OUT): x for n, x in held.items() if n.startswith(OUT)}
    }
    if graph is not None and reference is not None:
        answers["torch"] = golden.answer(graph, reference, spec, inputs)
    check = _Check(bundle, spec, {who: _arrays(named) for who, named in answers.items()})
    try:
        twin.run(_Given(spec, check.regions, _arrays(inputs)), check.take)
    except TwinFailed as err:
        yield Finding(f"{err}. Build the bundle again: duplexbox export build --help", True)
        return
    yield from check.failures[:MOST_SAID]
    if len(check.failures) > MOST_SAID:
        more = len(check.failures) - MOST_SAID
        yield Finding(f"stage {spec.stage}: {more} more such differences", is_failure=True)
    if not check.failures:
        ages = ", ".join(f"{age:,}" for age in spec.ages)
        how = "as it is" if twin.is_whole else f"float32 twin in {len(twin.pieces)} pieces"
        yield Finding(
            f"stage {spec.stage}: {check.compared} tensors of sessions at frames {ages} equal "
            f"{' and '.join(answers)}, {check.distance}; {how}"
        )


class _Given(dict[str, Array]):
    """Stored inputs, and drawn ones when they are asked for."""

    def __init__(
        self, spec: GoldenSpec, regions: Mapping[str, RegionSpec], stored: Mapping[str, Array]
    ) -> None:
        super().__init__(stored)
        self.spec, self.regions = spec, regions

    def __missing__(self, name: str) -> Array:
        return draw(self.spec.seed, self.regions[name], self.spec.ages)


class _Check:
    """Compares the outputs of one stage as they come."""

    def __init__(
        self, bundle: Bundle, spec: GoldenSpec, answers: Mapping[str, Mapping[str, Array]]
    ) -> None:
        self.bundle, self.spec, self.answers = bundle, spec, answers
        self.regions = {region.name: region for region in bundle.manifest.regions}
        self.failures: list[Finding] = []
        self.compared = 0
        stage = next(s for s in bundle.manifest.every_stage() if s.name == spec.stage)
        coded = (self.regions[t.name] for t in stage.inputs if t.name in self.regions)
        self.is_coded_inside = not stage.ring and any(is_coded(region) for region in coded)
        self.tolerance = CODED_TOLERANCE if self.is_coded_inside else TOLERANCE
        self.furthest, self.where = 0.0, ""

    @property
    def distance(self) -> str:
        if not self.where:
            return "exactly"
        return f"furthest {self.furthest:.1e} of {self.tolerance:.0e} ({self.where})"

    def take(self, name: str, found: Array) -> None:
        region = self.regions.get(name.removesuffix(NEXT))
        self.compared += 1
        if region is not None and region.clock.kind is ClockKind.RING and is_drawn(region):
            found = self._rows(name, region, found)
        for who, expected in self.answers.items():
            self._compare(name, found, expected.get(name), who)

    def _rows(self, name: str, region: RegionSpec, ring: Array) -> Array:
        """The rows written; all others must be what they were."""
        before, axis = draw(self.spec.seed, region, self.spec.ages), region.clock.axis
        rows = []
        for row, age in enumerate(self.spec.ages):
            written = written_rows(region, age, self.spec.ticks)
            rows.append(np.take(ring[row], written, axis))
            index = [slice(None)] * ring[row].ndim
            for at in written:
                index[axis] = slice(at, at + 1)
                before[row][tuple(index)] = ring[row][tuple(index)]
            odd = int(np.count_nonzero(before[row] != ring[row]))
            if odd:
                self._fail(f"{name} at frame {age:,}: {odd:,} values of rows it must not touch")
        return np.stack(rows)

    def _compare(self, name: str, found: Array, expected: Array | None, who: str) -> None:
        if expected is None or expected.shape != found.shape:
            shape = "nothing" if expected is None else list(expected.shape)
            self._fail(f"{name} is {list(found.shape)}, {who} has {shape}")
            return
        for row, age in enumerate(self.spec.ages):
            if found.dtype in (np.int8, np.uint8) and self.is_coded_inside:
                self._compare_codes(name, age, found[row], expected[row], who)
                continue
            if found.dtype != np.float32:
                odd = np.flatnonzero(found[row] != expected[row])
                if len(odd):
                    places = ", ".join(str(place) for place in odd[:5])
                    self._fail(
                        f"{name} differs from {who} at frame {age:,}: {len(odd)} of "
                        f"{found[row].size} ({places}{', ...' if len(odd) > 5 else ''}); none may"
                    )
                continue
            largest = max(1.0, float(np.abs(expected[row]).max()))
            distance = float(np.abs(found[row] - expected[row]).max()) / largest
            if not distance <= self.tolerance:  # a NaN is not
                self._fail(
                    f"{name} differs from {who} at frame {age:,}: largest distance "
                    f"{distance * largest:.3g}, allowed {self.tolerance * largest:.3g}"
                )
            elif distance >= self.furthest:
                self.furthest, self.where = distance, name

    def _compare_codes(self, name: str, age: int, found: Array, expected: Array, who: str) -> None:
        steps = np.abs(_ordered(found) - _ordered(expected))
        odd, far = int(np.count_nonzero(steps)), int(np.count_nonzero(steps > 1))
        if far or odd > max(1, CODED_SHARE * found.size):
            self._fail(
                f"{name} differs from {who} at frame {age:,}: {odd} of {found.size} codes, {far} "
                f"by more than one step; {max(1, int(CODED_SHARE * found.size))} may, by one"
            )

    def _fail(self, what: str) -> None:
        self.failures.append(
            Finding(
                f"stage {self.spec.stage}: output {what}. To tell a wrong graph from wrong golden "
                f"data: duplexbox export verify {self.bundle.path} --checkpoint CHECKPOINT",
                is_failure=True,
            )
        )


def _call_findings(
    bundle: Bundle,
    twins: Mapping[str, Twin],
    graphs: tuple[StageGraph, ...],
    reference: Source | None,
    frames: int | None,
) -> Iterator[Finding]:
    recorded = safetensors.torch.load_file(bundle.file(bundle.manifest.golden_call))
    answers = {"its golden data": recorded}
    pcm = recorded[PCM]
    if reference is not None and frames is not None:
        pcm = golden.sound((frames, 1, 1, pcm.shape[-1]), seed=frames)
        answers = {}
    if reference is not None:
        margins: list[float] = []
        answers["torch"] = golden.call(graphs, reference, pcm, margins=margins)
        if any(is_coded(region) for region in bundle.manifest.regions):
            answers["torch"][golden.MARGIN] = torch.tensor(margins)
    try:
        said = call(bundle, twins, pcm.numpy())
    except TwinFailed as err:
        yield Finding(f"{err}. Build the bundle again: duplexbox export build --help", True)
        return
    failed = False
    for who, expected in answers.items():
        odd_at = {
            name: np.flatnonzero(
                (said[name] != expected[name].numpy()).reshape(len(pcm), -1).any(-1)
            )
            for name in TOKENS
        }
        parted = min((int(odd[0]) for odd in odd_at.values() if len(odd)), default=None)
        if parted is None:
            continue
        failed = True
        margin = float(expected[golden.MARGIN][parted]) if golden.MARGIN in expected else 1.0
        if margin < CODED_CLOSE:
            yield Finding(
                f"greedy call: equals {who} for {parted} of {len(pcm)} frames; at frame {parted} "
                f"two choices are {margin:.1e} apart, and 8-bit rings may turn what is nearer "
                f"than {CODED_CLOSE:g}"
            )
            continue
        for name, odd in odd_at.items():
            if len(odd):
                yield Finding(
                    f"greedy call: {name} differs from {who} at {len(odd)} of {len(pcm)} frames, "
                    f"first at frame {odd[0]}; none may. To see which stage: the findings above",
                    is_failure=True,
                )
    if not failed:
        yield Finding(
            f"greedy call: every token of {len(pcm)} frames equals {' and '.join(answers)}"
        )


def call(bundle: Bundle, twins: Mapping[str, Twin], pcm: Array) -> dict[str, Array]:
    """A greedy call of twins: pcm (ticks, B, 1, samples) -> tokens by name, (ticks, B, ...)."""
    manifest = bundle.manifest
    batch = pcm.shape[1]
    state = {region.name: _first(region, batch) for region in manifest.regions}
    rings = {region.name for region in manifest.regions if region.in_place}
    for name, value in golden.GREEDY.items():
        state[name][...] = value
    noise = next((t for s in manifest.stages for t in s.outputs if t.name == NOISE), None)
    said: dict[str, list[Array]] = {name: [] for name in TOKENS}
    for frame in pcm:
        named: dict[str, Array] = {PCM: frame}
        if noise is not None:
            named[NOISE] = np.zeros((batch, *noise.row_shape), np.float32)
        for stage in manifest.stages:
            if stage.name in twins:
                _step(stage, twins[stage.name], named, state, rings)
        for name, column in said.items():
            column.append(named[name])
    return {name: np.stack(column) for name, column in said.items()}


def _step(
    stage: StageSpec,
    twin: Twin,
    named: dict[str, Array],
    state: dict[str, Array],
    rings: set[str],
) -> None:
    given = {t.name: state[t.name] if t.name in state else named[t.name] for t in stage.inputs}

    def take(name: str, value: Array) -> None:
        region = name.removesuffix(NEXT)
        if region in state:
            state[region] = value
            if region in rings:
                del given[region]  # nobody reads it again: one copy of the rings is enough
        else:
            named[name] = value

    twin.run(given, take)


def _ordered(codes: Array) -> NDArray[np.int64]:
    """8-bit codes as numbers that follow one another as their values do; uint8 is e4m3."""
    wide = codes.astype(np.int64)
    return wide if codes.dtype == np.int8 else np.where(wide < 128, wide, 128 - wide)


def _first(region: RegionSpec, batch: int) -> Array:
    kinds = {"int64": np.int64, "bool": np.bool_} | CODED
    shape, kind = (batch, *region.shape), kinds.get(region.dtype, np.float32)
    # Zeros cost no memory until they are written to.
    return np.full(shape, region.fill, kind) if region.fill else np.zeros(shape, kind)


def _arrays(named: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in named.items()}
