"""The step program: which buffers each stage of a tick reads and writes. Pure.

A ring whose stage writes in place has one buffer. Every other region has two: a stage reads the
current one and writes the other, which is then current. Nothing is copied per tick. A region
that one stage updates is at its second buffer after one tick and back at its first after two, so
there are two *phases*, and the tick after phase 0 runs phase 1. All addresses of both phases are
known before the first tick; that is what makes binding once, and capturing graphs, possible.

Not here: memory, ONNX Runtime, slots. See `ort_executor`.
"""

from dataclasses import dataclass

from engines.bundle import NEXT, Manifest, StageSpec, TensorSpec

PHASES = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where a tensor lives: a region's buffer 0 or 1, or a wire of the tick (always 0)."""

    name: str
    which: int


@dataclass(frozen=True, slots=True)
class Bound:
    """One tensor of a stage and the buffer it is bound to."""

    tensor: TensorSpec
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Step:
    """One stage in one phase."""

    stage: StageSpec
    inputs: tuple[Bound, ...]
    outputs: tuple[Bound, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A tick in both phases, and which buffer of each region is current before each."""

    steps: tuple[tuple[Step, ...], ...]
    """By phase, then in order."""
    current: tuple[dict[str, int], ...]
    """By phase: region -> buffer that holds its value before the tick."""


def plan_program(manifest: Manifest) -> Program:
    """Lay out both phases of ``manifest``, which must be free of faults."""
    in_place = {region.name: region.in_place for region in manifest.regions}
    current = dict.fromkeys(in_place, 0)
    steps: list[tuple[Step, ...]] = []
    before: list[dict[str, int]] = []
    for _ in range(PHASES):
        before.append(dict(current))
        steps.append(tuple(_plan_step(stage, current, in_place) for stage in manifest.stages))
    assert current == before[0], "two phases must lead back to the first"
    return Program(tuple(steps), tuple(before))


def _plan_step(stage: StageSpec, current: dict[str, int], in_place: dict[str, bool]) -> Step:
    """Bind one stage and move ``current`` on to what it leaves behind."""
    inputs = tuple(Bound(t, Buffer(t.name, current.get(t.name, 0))) for t in stage.inputs)
    outputs: list[Bound] = []
    for tensor in stage.outputs:
        region = tensor.name.removesuffix(NEXT)
        if not tensor.name.endswith(NEXT) or region not in current:
            outputs.append(Bound(tensor, Buffer(tensor.name, 0)))
            continue
        if not in_place[region]:
            current[region] = 1 - current[region]
        outputs.append(Bound(tensor, Buffer(region, current[region])))
    return Step(stage, inputs, tuple(outputs))
