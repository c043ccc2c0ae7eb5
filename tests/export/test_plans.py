"""What makes a plan stale, one cause at a time, and the profiles a stage gets."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engines import bundle, plans
from engines.bundle import StageSpec, TensorSpec
from engines.plans import MadeFrom, Profile
from export.plans import PREFILL_ROWS, Order, made_from, profiles_of, reason_to_build
from export.tensorrt_graph import prepare
from export.tensorrt_network import RECIPE
from tests.engines.plan_samples import VERSION, plans_of
from tests.small import SMALL

LM = "stages/weights/lm.bin"

MADE = MadeFrom(
    graph_sha256="a" * 64,
    constants={LM: "b" * 64},
    weights="inputs",
    profiles=plans.exact(4),
    version=VERSION,
    recipe=RECIPE,
)
PLAN = msgspec.structs.replace(plans_of(bundle.read(SMALL), 4).plans[0], made_from=MADE)


def test_a_plan_whose_inputs_are_what_they_were_is_current() -> None:
    assert reason_to_build(PLAN, MADE, "") == ""


def test_a_plan_that_does_not_exist_is_built() -> None:
    assert reason_to_build(None, MADE, "") == "there is no plan yet"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"graph_sha256": "c" * 64}, "its graph changed"),
        ({"constants": {LM: "c" * 64}}, f"weights it holds changed in {LM}"),
        ({"constants": {}}, f"it no longer holds weights of {LM}"),
        (
            {"constants": {LM: "b" * 64, "stages/weights/new.bin": "d" * 64}},
            "it now holds weights of stages/weights/new.bin",
        ),
        (
            {"weights": "constants", "constants": {LM: "b" * 64, "stages/weights/x.bin": "d" * 64}},
            "its large weights were inputs and shall be constants",
        ),
        ({"profiles": plans.exact(8)}, "its profiles were exactly 1..4 and shall be exactly 1..8"),
        ({"version": "2.0"}, f"it was built by version {VERSION} and this is 2.0"),
        ({"recipe": RECIPE + 1}, f"the builder's recipe was {RECIPE} and is {RECIPE + 1}"),
    ],
)
def test_one_change_is_one_reason(change: dict[str, Any], reason: str) -> None:
    assert reason_to_build(PLAN, msgspec.structs.replace(MADE, **change), "") == reason


def test_every_reason_is_named() -> None:
    now = msgspec.structs.replace(MADE, graph_sha256="c" * 64, profiles=plans.exact(1))
    assert reason_to_build(PLAN, now, "x.plan is missing") == (
        "its graph changed; its profiles were exactly 1..4 and shall be exactly 1; "
        "x.plan is missing"
    )


def test_every_field_a_plan_depends_on_is_compared() -> None:
    """So that a field added to MadeFrom cannot be forgotten where reasons are found."""
    other: dict[str, Any] = {
        "graph_sha256": "c" * 64,
        "constants": {},
        "weights": "constants",
        "profiles": (),
        "version": "0",
        "recipe": -1,
    }
    assert set(other) == set(MadeFrom.__struct_fields__)
    for name, value in other.items():
        assert reason_to_build(PLAN, msgspec.structs.replace(MADE, **{name: value}), ""), name


def test_weights_outside_the_plan_do_not_make_it_stale() -> None:
    manifest = bundle.read(SMALL).manifest
    stage = next(stage for stage in manifest.stages if stage.name == "temporal")
    order = Order(largest_batch=4, weights="inputs", version=VERSION)
    prepared = prepare(SMALL, stage.graph, "inputs")
    made = made_from(manifest, stage, prepared, plans.exact(4), order)
    # The small model has no large weight, so its file counts; with none inside, it must not.
    assert made.constants == {LM: manifest.files[LM].sha256}
    outside = replace(prepared, constant_files=())
    hollow = made_from(manifest, stage, outside, plans.exact(4), order)
    assert hollow.constants == {}


def stage(*shape: Any) -> StageSpec:
    return StageSpec("s", (TensorSpec("x", "float32", shape),), (), graph="stages/s.onnx")


def test_a_tick_gets_every_batch_and_a_prompt_its_rows() -> None:
    assert profiles_of(stage("B", 4), False, 3) == plans.exact(3)
    assert profiles_of(stage("B", 4), True, 3) == plans.exact(1)
    assert profiles_of(stage("R", 4), True, 3) == (Profile(1, PREFILL_ROWS, PREFILL_ROWS),)
