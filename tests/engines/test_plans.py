"""plans.json: strict, and every reason why plans cannot run here is a sentence with a command."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import bundle, plans
from engines.bundle import Bundle, Dtype
from engines.plans import Machine, Plan, Plans, PlansError, Profile, WeightInput
from tests.engines.plan_samples import VERSION, plans_of, write
from tests.small import SMALL

BOX = Machine("linux-x86_64", "NVIDIA L4", "8.9", (("tensorrt_rtx", VERSION),))


@pytest.fixture
def demo(tmp_path: Path) -> Bundle:
    shutil.copytree(SMALL, tmp_path / "demo")
    return bundle.read(tmp_path / "demo")


@pytest.fixture
def recorded(demo: Bundle) -> Plans:
    return plans_of(demo, demo.manifest.largest_batch)


def test_plans_survive_writing_and_reading(demo: Bundle, recorded: Plans) -> None:
    folder = write(demo, recorded)
    assert plans.read(folder) == recorded
    assert plans.folders(demo.path) == [folder]
    assert [path.name for path in folder.glob("*unfinished*")] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 9, "novelty": 1}, r"format 9 at `\$.format`; this program reads 1"),
        ({"novelty": 1}, r"unknown field `novelty`"),
        ({"flavour": "onnx"}, r"Invalid enum value 'onnx' - at `\$.flavour`"),
        ({"plans": None}, r"Expected `array`, got `null` - at `\$.plans`"),
        ({"target": "sm_86"}, "it was renamed or copied there"),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_path_and_the_command(
    demo: Bundle, recorded: Plans, change: dict[str, Any], words: str
) -> None:
    folder = write(demo, recorded)
    tree = json.loads((folder / plans.FILE).read_text())
    (folder / plans.FILE).write_text(json.dumps(tree | change))
    with pytest.raises(PlansError, match=words) as caught:
        plans.read(folder)
    assert f"duplexbox export build {demo.path} --target sm_89" in str(caught.value)


def test_a_truncated_manifest_and_a_missing_one_are_refused(demo: Bundle, recorded: Plans) -> None:
    folder = write(demo, recorded)
    path = folder / plans.FILE
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PlansError, match="truncated"):
        plans.read(folder)
    path.unlink()
    with pytest.raises(PlansError, match="No such file"):
        plans.read(folder)


def test_a_plan_may_not_lead_out_of_its_folder(demo: Bundle, recorded: Plans) -> None:
    folder = write(demo, recorded)
    tree = json.loads((folder / plans.FILE).read_text())
    tree["plans"][1]["file"] = "../../bundle.json"
    (folder / plans.FILE).write_text(json.dumps(tree))
    with pytest.raises(PlansError, match=r"`\$.plans\[1\].file`: ../../bundle.json leads"):
        plans.read(folder)


def test_a_damaged_file_is_found(demo: Bundle, recorded: Plans) -> None:
    folder = write(demo, recorded)
    plan = recorded.plans[0]
    assert plans.file_fault(folder, plan, hashes=False) == ""
    assert "was changed after it was built" in plans.file_fault(folder, plan)
    (folder / plan.file).write_bytes(b"pla")
    assert plans.file_fault(folder, plan) == f"{plan.file} has 3 bytes and should have 5"
    (folder / plan.file).unlink()
    assert plans.file_fault(folder, plan) == f"{plan.file} is missing"


def test_the_machine_they_were_built_for_runs_them(demo: Bundle, recorded: Plans) -> None:
    assert list(plans.refusals(demo, recorded, BOX)) == []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (
            Machine("linux-x86_64", "NVIDIA H200", "9.0", BOX.versions),
            "built for NVIDIA L4 (sm_89) by tensorrt_rtx 1.7.1.116; this box has NVIDIA H200 "
            "(sm_90). Build them: duplexbox export build {} --target sm_90",
        ),
        (Machine("linux-x86_64", versions=BOX.versions), "this machine has no NVIDIA GPU"),
        (
            Machine("linux-x86_64", "NVIDIA L4", "8.9"),
            "tensorrt_rtx is not installed here. Install that version: pip install",
        ),
        (
            Machine("linux-x86_64", "NVIDIA L4", "8.9", (("tensorrt_rtx", "1.8.0.1"),)),
            "this machine has tensorrt_rtx 1.8.0.1, which cannot open them. Build them: "
            "duplexbox export build {} --target sm_89",
        ),
        (
            Machine("linux-aarch64", "NVIDIA L4", "8.9", BOX.versions),
            "built for linux-x86_64 and this is linux-aarch64. Build them here: "
            "duplexbox export build {} --target sm_89",
        ),
    ],
)
def test_another_machine_is_refused_with_the_remedy(
    demo: Bundle, recorded: Plans, machine: Machine, words: str
) -> None:
    (sentence,) = plans.refusals(demo, recorded, machine)
    assert words.format(demo.path) in sentence


def with_plan(recorded: Plans, index: int, **change: Any) -> Plans:
    changed = list(recorded.plans)
    changed[index] = msgspec.structs.replace(changed[index], **change)
    return msgspec.structs.replace(recorded, plans=tuple(changed))


def test_plans_of_another_graph_or_other_weights_are_refused(demo: Bundle, recorded: Plans) -> None:
    made = recorded.plans[1].made_from
    other = with_plan(recorded, 1, made_from=msgspec.structs.replace(made, graph_sha256="1" * 64))
    (sentence,) = plans.refusals(demo, other, BOX)
    assert "the plan of stage temporal was built from another stages/temporal.onnx" in sentence
    weights = "stages/weights/lm.bin"
    constants = made.constants | {weights: "1" * 64}
    other = with_plan(recorded, 1, made_from=msgspec.structs.replace(made, constants=constants))
    (sentence,) = plans.refusals(demo, other, BOX)
    assert f"the plan of stage temporal holds weights of another {weights}" in sentence
    other = msgspec.structs.replace(recorded, checkpoint_sha256="2" * 64)
    (sentence,) = plans.refusals(demo, other, BOX)
    assert "were built from checkpoint 222222222222…" in sentence


@pytest.mark.parametrize(
    ("file", "offset", "nbytes", "words"),
    [
        (
            "stages/weights/lm.bin",
            0,
            1 << 40,
            "to 1099511627776 of stages/weights/lm.bin, which has",
        ),
        ("stages/weights/lm.bin", -16, 16, "from bytes -16 to 0 of"),
        ("stages/weights/old.bin", 0, 16, "old.bin, which the bundle does not have"),
    ],
)
def test_weights_a_bundle_does_not_hold_are_refused(
    demo: Bundle, recorded: Plans, file: str, offset: int, nbytes: int, words: str
) -> None:
    """They would be copied to the device from wherever that leads."""
    weight = WeightInput("w", "float32", (4,), file, offset, nbytes)
    (sentence,) = plans.refusals(demo, with_plan(recorded, 1, weights=(weight,)), BOX)
    assert "the plan of stage temporal takes w from" in sentence
    assert words in sentence
    assert sentence.endswith(f"duplexbox export build {demo.path} --target sm_89")


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 12), ("bfloat16", 16), ("int8", 16)])
def test_weights_of_other_bytes_than_their_shape_has_are_refused(
    demo: Bundle, recorded: Plans, dtype: Dtype, nbytes: int
) -> None:
    """The engine would read what lies behind them, or miss their end."""
    file = next(name for name in demo.manifest.files if name.endswith(".bin"))
    weight = WeightInput("w", dtype, (4,), file, 0, nbytes)
    (sentence,) = plans.refusals(demo, with_plan(recorded, 1, weights=(weight,)), BOX)
    has = 4 * bundle.ITEMSIZE[dtype]
    assert f"takes {nbytes} bytes for w, and {dtype} [4] has {has}. Build it again" in sentence


def test_plans_with_other_tensors_are_refused(demo: Bundle, recorded: Plans) -> None:
    other = with_plan(recorded, 0, inputs=recorded.plans[0].inputs[1:])
    (sentence,) = plans.refusals(demo, other, BOX)
    assert "inputs or outputs of stage mimi_encode are not the bundle's" in sentence


def test_an_unfinished_build_names_the_stage_and_the_command(demo: Bundle, recorded: Plans) -> None:
    other = msgspec.structs.replace(recorded, plans=recorded.plans[:-1])
    (sentence,) = plans.refusals(demo, other, BOX)
    assert "no plan of stage mimi_decode: the build is unfinished" in sentence
    assert sentence.endswith(f"duplexbox export build {demo.path} --target sm_89")


def test_more_sessions_than_profiles_are_refused(demo: Bundle) -> None:
    few = plans_of(demo, 2)
    (sentence,) = plans.refusals(demo, few, BOX)
    assert "takes batches of exactly 1..2 and 8 sessions are wanted" in sentence
    assert sentence.endswith("--batches 1-8")
    assert list(plans.refusals(demo, few, BOX, largest=2)) == []


def plan_with(demo: Bundle, *profiles: Profile) -> Plan:
    return msgspec.structs.replace(plans_of(demo, 1).plans[0], profiles=profiles)


def test_a_batch_finds_its_own_profile_and_no_other(demo: Bundle) -> None:
    plan = plan_with(demo, *plans.exact(4))
    assert [plan.profile_of(size) for size in (1, 2, 3, 4)] == [0, 1, 2, 3]
    for size in (0, 5):
        with pytest.raises(PlansError, match=f"no profile for {size} rows; it takes exactly 1..4"):
            plan.profile_of(size)
    ranged = plan_with(demo, Profile(1, 64, 128))
    assert {ranged.profile_of(size) for size in (1, 77, 128)} == {0}


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ((), "nothing"),
        (plans.exact(1), "exactly 1"),
        (plans.exact(3), "exactly 1..3"),
        ((Profile(1, 64, 64),), "1 to 64"),
        ((Profile(2, 2, 2), Profile(4, 4, 4)), "exactly 2, exactly 4"),
    ],
)
def test_profiles_are_described(profiles: tuple[Profile, ...], words: str) -> None:
    assert plans.described(profiles) == words


def test_only_version_compatible_plans_open_under_another_version() -> None:
    assert not plans.opens("tensorrt_rtx", "1.7.1.116", "1.7.2.1")
    assert plans.opens("tensorrt", "11.4.0.106", "11.10.0.2")
    assert not plans.opens("tensorrt", "11.4.0.106", "11.3.9.9")
    assert not plans.opens("tensorrt", "11.4.0.106", "12.0.0.1")
