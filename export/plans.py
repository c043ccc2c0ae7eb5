"""Which plans of a bundle must be built again, and why. Pure.

A plan is current while everything it was made from is what it was (`MadeFrom`) and its file is
whole. Anything else is a reason, in a clause that the operator reads before the build begins.
Not here: building (`tensorrt_build`), the format on disk (`engines.plans`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engines.bundle import BATCH, ROWS, Manifest, StageSpec
from engines.plans import MadeFrom, Plan, Profile, WeightsForm, described, exact
from export.tensorrt_graph import Prepared
from export.tensorrt_network import RECIPE

PREFILL_ROWS = 128
"""Rows of a prompt one run takes at most. One profile from 1 row on: a prompt's length is not
known when its plan is built, and no prompt is worth a profile of its own."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the operator asked for."""

    largest_batch: int
    weights: WeightsForm
    version: str
    """Of the flavour that will build."""


def profiles_of(stage: StageSpec, prompt: bool, largest_batch: int) -> tuple[Profile, ...]:
    """Profiles of one stage: exact batches in the tick, batch 1 or a range of rows in a prompt."""
    symbols = {length for spec in stage.inputs for length in spec.shape}
    if ROWS in symbols:
        return (Profile(1, PREFILL_ROWS, PREFILL_ROWS),)
    assert BATCH in symbols, stage.name
    return exact(1 if prompt else largest_batch)


def made_from(
    manifest: Manifest,
    stage: StageSpec,
    prepared: Prepared,
    profiles: tuple[Profile, ...],
    order: Order,
) -> MadeFrom:
    """What a plan of ``stage`` would be made from now."""
    return MadeFrom(
        graph_sha256=manifest.files[stage.graph].sha256,
        constants={name: manifest.files[name].sha256 for name in prepared.constant_files},
        weights=order.weights,
        profiles=profiles,
        version=order.version,
        recipe=RECIPE,
    )


def reason_to_build(plan: Plan | None, wanted: MadeFrom, file_fault: str) -> str:
    """Why a plan must be built, in a clause; empty when the one that exists is current.

    file_fault: what is wrong with its file (`engines.plans.file_fault`).
    """
    if plan is None:
        return "there is no plan yet"
    return "; ".join([*_changes(plan.made_from, wanted), *([file_fault] if file_fault else [])])


def _changes(was: MadeFrom, now: MadeFrom) -> Iterator[str]:
    if was.graph_sha256 != now.graph_sha256:
        yield "its graph changed"
    for name in sorted(was.constants.keys() | now.constants.keys()):
        if name in was.constants and name in now.constants:
            if was.constants[name] != now.constants[name]:
                yield f"weights it holds changed in {name}"
        elif was.weights == now.weights:
            verb = "no longer holds" if name in was.constants else "now holds"
            yield f"it {verb} weights of {name}"
    if was.weights != now.weights:
        yield f"its large weights were {was.weights} and shall be {now.weights}"
    if was.profiles != now.profiles:
        yield f"its profiles were {described(was.profiles)} and shall be {described(now.profiles)}"
    if was.version != now.version:
        yield f"it was built by version {was.version} and this is {now.version}"
    if was.recipe != now.recipe:
        yield f"the builder's recipe was {was.recipe} and is {now.recipe}"
