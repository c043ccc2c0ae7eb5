"""`duplexbox engines show`: what is there, what runs here, and why the rest does not."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from engines import bundle, cli, machine, plans, plans_shown
from engines.bundle import Bundle, KernelSpec
from engines.plans import Machine
from engines.plans_shown import Found
from tests.engines.plan_samples import VERSION, plans_of, write
from tests.small import SMALL

BOX = Machine("linux-x86_64", "NVIDIA L4", "8.9", (("tensorrt_rtx", VERSION),))


@pytest.fixture
def demo(tmp_path: Path) -> Bundle:
    shutil.copytree(SMALL, tmp_path / "demo")
    return bundle.read(tmp_path / "demo", hashes=False)


def test_plans_for_this_gpu_run_here_and_others_say_why_not(demo: Bundle) -> None:
    mine = plans_of(demo, 3)
    other = msgspec.structs.replace(mine, target="sm_90", compute_capability="9.0")
    page = "\n".join(plans_shown.lines(demo, [Found("sm_89", mine), Found("sm_90", other)], BOX))
    first, second = page.split("plans/sm_90: ")
    assert "this machine: linux-x86_64, NVIDIA L4 (sm_89), tensorrt_rtx 1.7.1.116" in first
    assert "batches 1..3" in first
    assert "  runs here" in first
    assert "runs here" not in second
    assert f"this box has NVIDIA L4 (sm_89). Build them: duplexbox export build {demo.path}" in page
    for stage in plans.graph_stages(demo.manifest):
        assert f"  {stage.name} " in first


def test_fewer_profiles_than_the_bundle_has_is_no_reason_but_none_is(demo: Bundle) -> None:
    assert plans_shown.reasons(demo, Found("sm_89", plans_of(demo, 1)), BOX) == []
    empty = msgspec.structs.replace(plans_of(demo, 1), plans=())
    assert len(plans_shown.reasons(demo, Found("sm_89", empty), BOX)) == 4
    assert plans_shown.batches(demo, empty) == 0


def test_the_smallest_plan_of_the_tick_limits_the_batch(demo: Bundle) -> None:
    large, small = plans_of(demo, 8), plans_of(demo, 2)
    mixed = msgspec.structs.replace(large, plans=(*large.plans[:3], small.plans[3]))
    assert plans_shown.batches(demo, mixed) == 2


def test_a_damaged_file_and_an_unreadable_manifest_are_shown_with_the_command(
    demo: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(demo, plans_of(demo, 2))
    assert cli.main(["show", str(demo.path), "--no-hashes"]) == 0
    assert "was changed" not in capsys.readouterr().out
    assert cli.main(["show", str(demo.path)]) == 0
    assert "not here: depth.plan was changed after it was built" in capsys.readouterr().out
    (folder / plans.FILE).write_text("{")
    assert cli.main(["show", str(demo.path)]) == 0
    out = capsys.readouterr().out
    assert "not here: " in out
    assert f"Build the plans again: duplexbox export build {demo.path} --target sm_89" in out


def test_a_bundle_without_plans_says_how_to_build_some(
    demo: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", str(demo.path)]) == 0
    assert f"duplexbox export build {demo.path} --target TARGET" in capsys.readouterr().out


def test_who_runs_the_stages_that_name_a_kernel_is_said(demo: Bundle) -> None:
    def with_kernels(named: str) -> Bundle:
        kernel = KernelSpec("depth", {}, {})
        stages = tuple(
            msgspec.structs.replace(stage, kernel=kernel if stage.name == named else None)
            for stage in demo.manifest.stages
        )
        return Bundle(demo.path, msgspec.structs.replace(demo.manifest, stages=stages))

    words = (
        "1 of 5 stages name kernels of ours: executor cuda runs those, executor tensorrt the plans"
    )
    assert words in "\n".join(plans_shown.lines(with_kernels("depth"), [], BOX))
    said = "\n".join(plans_shown.lines(with_kernels("none"), [], BOX))
    assert "kernels of ours" not in said


def test_the_page_is_also_there_for_programs(
    demo: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    write(demo, plans_of(demo, 2))
    assert cli.main(["show", str(demo.path), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    (one,) = tree["plans"]
    assert (one["target"], one["largest_batch"], one["flavour"]) == ("sm_89", 2, "tensorrt_rtx")
    assert one["reasons_not_to_run"]
    assert tree["machine"]["platform"] == machine.look().platform


def test_looking_finds_what_this_environment_has() -> None:
    import tensorrt_lean
    import tensorrt_rtx

    here = machine.look()
    assert here.version_of("tensorrt_rtx") == tensorrt_rtx.__version__
    assert here.run_time_of("tensorrt_rtx") == tensorrt_rtx.__version__
    lean = Machine("linux-x86_64", versions=(("tensorrt_lean", "11.4.0.106"),))
    assert (lean.run_time_of("tensorrt"), lean.version_of("tensorrt")) == ("11.4.0.106", "")
    assert here.version_of("tensorrt_lean") == tensorrt_lean.__version__
