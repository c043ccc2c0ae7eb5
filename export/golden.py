"""Golden data: what every stage must answer, recorded from the torch modules in float32.

Each stage is recorded alone, one tick of a few sessions of different ages: one whose call has
just begun, one whose longest ring is about to wrap, one whose rings have wrapped five times. Their
state is drawn (`engines.golden`), so that full rings cost no space; what a tick adds to a ring is
recorded, the ring is not. And one call is recorded from its first tick, stage after stage, greedy:
sound in, tokens out.

Weights are the bundle's own (a bfloat16 bundle has rounded ones), arithmetic is float32: then the
bundle's float32 twin must agree to a rounding error, whatever the precision of the bundle.

An argmax between two values that differ by a rounding error proves nothing and fails at random,
so inputs are drawn again until no choice is that close. A model larger than memory is recorded
with one matrix of it loaded at a time (`hollow`).

Not here: comparing (`verify`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.bundle import NEXT, ROWS, GoldenSpec, RegionSpec, TensorSpec
from engines.clocks import ClockKind
from engines.golden import draw, is_drawn, written_rows
from export.hollow import Wide
from export.mistake import Mistake
from export.models.streaming import State, fresh_state
from export.models.transformer import RingAttention
from export.prompt_stages import IS_EMBEDDED, POSITION, Prefill
from export.ring_stages import RingStage
from export.source import Source
from export.stages import (
    CODES,
    NOISE,
    PCM,
    TEMPERATURE,
    TEXT,
    TEXT_TEMPERATURE,
    TEXT_TOP_K,
    TOP_K,
    USER_CODES,
    VALID,
    StageGraph,
    all_regions,
)

FOLDER = "golden"
CALL = f"{FOLDER}/call.safetensors"
IN, OUT = "in.", "out."
MARGIN = "margin"
"""In the recorded call of a bundle with 8-bit rings: (ticks,) float32, how close the closest of a
tick's choices was."""

SEED = 11
"""Of the sessions' state; any would do."""
WRAPS = 5
"""How often the rings of the oldest session have wrapped."""
CALL_TICKS = 32
LARGE_PARAMETERS = 10**9
LARGE_CALL_TICKS = 3
"""Of a model that is read from the disk once per tick."""
CLOSE = 1e-5
"""Two candidates nearer than this, relative to the largest, are too close to call: float32 sums
of a few thousand terms differ by some 1e-6 between two libraries."""
NEAR_EDGE = 1e-5
"""Of the length of a rotary pair: a hundred times what float32 leaves uncertain of a key."""
TRIES = 8
PROMPT_ROWS = 5
"""Of a prompt, fed at once."""
PROMPT_AGE = 40
"""Rows that lie before them, if the window has room."""
GREEDY = {TEMPERATURE: 0.0, TEXT_TEMPERATURE: 0.0}


class NotFinite(Mistake):
    """A model whose answers are no numbers; nothing could be held to them."""


OnTick = Callable[[int, int], None]
"""(tick, ticks) -> nothing; before each tick of a call."""


def spec_of(graph: StageGraph, source: Source) -> GoldenSpec:
    """Which sessions are recorded for a stage."""
    file = f"{FOLDER}/{graph.name}.safetensors"
    if isinstance(graph, Prefill):
        # One session, whose rows must not straddle the end of its rings.
        age = min(source.config.lm.context - PROMPT_ROWS, PROMPT_AGE)
        return GoldenSpec(graph.name, file, (age,), SEED, PROMPT_ROWS)
    ticks = max((region.clock.ticks_until_full() for region in _regions(graph).values()), default=0)
    ticks = max(ticks, source.config.lm.token_rows)
    ages = (0, ticks - 1, WRAPS * ticks + 3)
    return GoldenSpec(graph.name, file, ages, SEED)


def record(graph: StageGraph, source: Source, spec: GoldenSpec) -> bytes:
    """Run one tick of a stage; returns a safetensors file of what went in and what came out.

    Raises `NotFinite`.
    """
    best: tuple[float, dict[str, Tensor]] = (-1.0, {})
    for attempt in range(TRIES):
        inputs = _inputs(graph, source, spec, attempt)
        with Margins() as margins:
            outputs = answer(graph, source, spec, inputs)
        _check_finite(graph, outputs)
        if margins.closest > best[0]:
            held = {IN + name: x for name, x in inputs.items()}
            best = (margins.closest, held | {OUT + name: x for name, x in outputs.items()})
        if margins.closest > CLOSE:
            break
    return _saved(best[1])


def _check_finite(graph: StageGraph, outputs: Mapping[str, Tensor]) -> None:
    odd = [name for name, x in outputs.items() if not bool(torch.isfinite(x).all())]
    if odd:
        raise NotFinite(
            f"stage {graph.name} answers values that are not finite ({', '.join(odd[:5])}): the "
            f"checkpoint holds NaN, or more than its dtype can. Download it again, or build with "
            f"--dtype float32"
        )


def answer(
    graph: StageGraph, source: Source, spec: GoldenSpec, inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs of a stage for stored inputs and drawn state; of rings the rows that were written.

    Names as the stage's outputs have them, floats in float32.
    """
    drawn = _Drawn(spec, _regions(graph), inputs)
    with torch.no_grad(), _rings_cut(graph, spec), Wide(source.hollow):
        found = graph.run(drawn)
    outputs = {spec.name: found[spec.name.removesuffix(NEXT)] for spec in graph.outputs}
    return {name: _plain(_rows_only(name, x, graph, spec)) for name, x in outputs.items()}


def record_call(
    graphs: tuple[StageGraph, ...], source: Source, on_tick: OnTick = lambda tick, ticks: None
) -> bytes:
    """A greedy call of one session from its first tick, as a safetensors file."""
    is_large = source.parameters > LARGE_PARAMETERS
    ticks = LARGE_CALL_TICKS if is_large else CALL_TICKS
    coded = any(isinstance(graph, RingStage) and graph.coded for graph in graphs)
    best: tuple[float, dict[str, Tensor]] = (-1.0, {})
    for attempt in range(1 if is_large else TRIES):
        pcm = sound((ticks, 1, 1, source.config.mimi.samples_per_frame), 100 + attempt)
        margins: list[float] = []
        said = call(graphs, source, pcm, on_tick, margins)
        if min(margins) > best[0]:
            held = {PCM: pcm} | ({MARGIN: torch.tensor(margins)} if coded else {})
            best = (min(margins), said | held)
        if min(margins) > CLOSE:
            break
    return _saved(best[1])


def call(
    graphs: tuple[StageGraph, ...],
    source: Source,
    pcm: Tensor,
    on_tick: OnTick = lambda tick, ticks: None,
    margins: list[float] | None = None,
) -> dict[str, Tensor]:
    """A greedy call: pcm (ticks, B, 1, samples) -> tokens by name, (ticks, B, ...) each.

    margins: is given the closest choice of every tick.
    """
    ticks, batch = pcm.shape[:2]
    config = source.config
    regions = [_shortened(region, ticks) for region in all_regions(graphs, config)]
    state = {
        name: x.float() if x.is_floating_point() else x
        for name, x in fresh_state(regions, batch).items()
    }
    for name, value in GREEDY.items():
        state[name].fill_(value)
    shape = (batch, 1 + config.lm.depth_codebooks, config.sampling.candidates)
    said: dict[str, list[Tensor]] = {USER_CODES: [], TEXT: [], CODES: [], VALID: []}
    for tick, frame in enumerate(pcm):
        on_tick(tick, ticks)
        named = state | {PCM: frame, NOISE: torch.zeros(shape)}
        with torch.no_grad(), Margins() as seen, Wide(source.hollow):
            for graph in graphs:
                named |= graph.run(named)
        if margins is not None:
            margins.append(seen.closest)
        state = {name: named[name] for name in state}
        for name, column in said.items():
            column.append(named[name].clone())
    return {name: torch.stack(column) for name, column in said.items()}


class Margins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every choice, and remembers how close the closest was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.closest = float("inf")
        self._ranked: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name == "aten.topk.default":
            self._ranked = found[0]
        elif name == "aten.argmin.default":
            self._see(-args[0])
        elif name == "aten.argmax.default":
            self._see(args[0])
            self._see_rank(found)
        return found

    def _see(self, scores: Tensor) -> None:
        """scores (B, N): the best and the one after it."""
        first, second = scores.topk(2, dim=-1).values.unbind(-1)
        finite = scores.masked_fill(scores.isinf(), 0).abs().amax(-1).clamp(min=1)
        self.closest = min(self.closest, float(((first - second) / finite).min()))

    def _see_rank(self, winner: Tensor) -> None:
        """Noise goes by rank, so the winner must not change places with its neighbours either."""
        if self._ranked is None:
            return
        ranked, rank = self._ranked, winner.view(-1, 1)
        scale = ranked.abs().amax(-1, keepdim=True).clamp(min=1)
        own = ranked.gather(-1, rank)
        for step in (-1, 1):
            other = ranked.gather(-1, (rank + step).clamp(0, ranked.shape[-1] - 1))
            exists = (rank + step >= 0) & (rank + step < ranked.shape[-1])
            gaps = ((own - other).abs() / scale)[exists]
            self.closest = min(self.closest, float(gaps.amin())) if len(gaps) else self.closest


class _Drawn(dict[str, Tensor]):
    """The stored inputs of a stage; its float regions are drawn when asked for, and not kept."""

    def __init__(
        self, spec: GoldenSpec, regions: Mapping[str, RegionSpec], stored: Mapping[str, Tensor]
    ) -> None:
        super().__init__(stored)
        self.spec, self.regions = spec, regions

    def __missing__(self, name: str) -> Tensor:
        drawn = torch.from_numpy(draw(self.spec.seed, self.regions[name], self.spec.ages))
        if self.spec.ticks == 1:
            return drawn
        # A prompt's rows see no ring row after their own, so rings of that length will do.
        return drawn[:, :, : self.spec.ages[0] + self.spec.ticks].clone()


def _inputs(graph: StageGraph, source: Source, spec: GoldenSpec, attempt: int) -> dict[str, Tensor]:
    regions = _regions(graph)
    found = {
        given.name: _input(given, regions.get(given.name), source, spec, attempt)
        for given in graph.inputs
        if given.name not in regions or not is_drawn(regions[given.name])
    }
    if isinstance(graph, RingStage) and graph.coded is not None:
        rows, position = found[graph.wires.qkv], found[graph.regions[0].name]
        found[graph.wires.qkv] = steady_rows(graph, rows, position)
    return found


def _input(
    given: TensorSpec, region: RegionSpec | None, source: Source, spec: GoldenSpec, attempt: int
) -> Tensor:
    """Something a stage may well be given, for every session of ``spec``."""
    lm = source.config.lm
    batch = spec.ticks if given.shape[0] == ROWS else len(spec.ages)
    shape = (batch, *given.row_shape)
    generator = np.random.default_rng([attempt, *given.name.encode()])
    if region is not None and region.clock.kind is ClockKind.COUNTER:
        return torch.tensor([region.clock.position(age) for age in spec.ages])
    if given.name == POSITION:
        return torch.arange(batch) + spec.ages[0]
    if given.name == IS_EMBEDDED:
        return torch.arange(batch) % 2 == 1
    if given.name == PCM:
        return sound(shape, attempt)
    if given.name == NOISE:
        return torch.from_numpy(generator.gumbel(size=shape).astype(np.float32))
    if given.name in _SETTINGS:
        assert region is not None, given
        first, others, last = _SETTINGS[given.name]
        row = [first, *[region.fill if others is None else others] * (batch - 2), last]
        return torch.tensor(row, dtype=torch.int64 if given.dtype == "int64" else torch.float32)
    if given.dtype == "bool":
        return torch.tensor([age > 0 for age in spec.ages]).view(batch, *[1] * (len(shape) - 1))
    if given.dtype == "int64":
        ids = torch.from_numpy(generator.integers(0, min(lm.card, lm.text_card), shape))
        if region is None:
            return ids
        young = torch.tensor([age == 0 for age in spec.ages]).view(batch, *[1] * (len(shape) - 1))
        return torch.where(young, torch.full_like(ids, int(region.fill)), ids)
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def steady_rows(graph: RingStage, qkv: Tensor, position: Tensor) -> Tensor:
    """The rows with those keys and values drawn again that lie so near to the edge between two
    8-bit codes that another library's sine may put them on the other side of it.
    """
    assert graph.coded is not None, graph.name
    generator = torch.Generator().manual_seed(SEED)
    qkv = qkv.clone()
    for _ in range(TRIES):
        near = graph.near_edges(qkv, position, NEAR_EDGE)
        if not bool(near.any()):
            break
        qkv[near] = torch.randn(int(near.sum()), generator=generator)
    return qkv


_SETTINGS: dict[str, tuple[float, float | None, float]] = {
    TEMPERATURE: (0.0, None, 1.5),
    TEXT_TEMPERATURE: (0.0, None, 1.5),
    TOP_K: (0, None, 3),
    TEXT_TOP_K: (0, None, 3),
}
"""Of the first session, those between (None: the default) and the last."""


def sound(shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise (..., samples) of changing loudness, rougher and smoother, about as loud as speech."""
    generator = np.random.default_rng([seed, 24_000])
    white = generator.standard_normal(shape, dtype=np.float32)
    loudness = 0.3 * generator.random((*shape[:-1], 1), dtype=np.float32) ** 2
    rough = generator.random((*shape[:-1], 1), dtype=np.float32)
    smooth = white.cumsum(-1, dtype=np.float32) / 30
    return torch.from_numpy(loudness * (rough * white + (1 - rough) * smooth))


def _regions(graph: StageGraph) -> dict[str, RegionSpec]:
    regions = graph.regions
    assert isinstance(regions, list), graph.name
    return {region.name: region for region in regions}


def _shortened(region: RegionSpec, ticks: int) -> RegionSpec:
    """A ring that a call of so few ticks never fills need not be whole: attention sees the same."""
    clock = region.clock
    if clock.kind is not ClockKind.RING or not region.in_place or clock.pinned:
        return region
    rows = clock.position(ticks)
    if rows >= clock.retain:
        return region
    shape = (*region.shape[: clock.axis], rows, *region.shape[clock.axis + 1 :])
    return RegionSpec(region.name, region.dtype, shape, clock, region.fill)


@contextmanager
def _rings_cut(graph: StageGraph, spec: GoldenSpec) -> Iterator[None]:
    """Let attention hand on the rows it wrote rather than whole rings, which would fill memory."""
    regions = _regions(graph)

    def cut(module: Any, given: Any, result: tuple[Tensor, State]) -> tuple[Tensor, State]:
        y, rings = result
        return y, {name: rows_of(x, regions[name], spec) for name, x in rings.items()}

    with ExitStack() as stack:
        for module in graph.modules():
            if isinstance(module, RingAttention):
                stack.callback(module.register_forward_hook(cut).remove)
        yield


def rows_of(ring: Tensor, region: RegionSpec, spec: GoldenSpec) -> Tensor:
    """The rows that were written, of a ring (B, *shape) as a stage left it."""
    written = [torch.tensor(written_rows(region, age, spec.ticks)) for age in spec.ages]
    axis = region.clock.axis
    return torch.stack([ring[row].index_select(axis, at) for row, at in enumerate(written)])


def _rows_only(name: str, found: Tensor, graph: StageGraph, spec: GoldenSpec) -> Tensor:
    """Of a ring that attention has not cut already, the rows that were written."""
    region = _regions(graph).get(name.removesuffix(NEXT))
    if region is None or region.clock.kind is not ClockKind.RING or not is_drawn(region):
        return found
    is_cut = found.shape[1 + region.clock.axis] == int(spec.ticks * region.clock.rows_per_tick)
    return found if is_cut else rows_of(found, region, spec)


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.float() if tensor.is_floating_point() else tensor
    return plain.contiguous().clone()


def _saved(held: dict[str, Tensor]) -> bytes:
    raw: bytes = safetensors.torch.save({name: held[name].contiguous() for name in sorted(held)})
    return raw
