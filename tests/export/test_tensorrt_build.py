"""Real plans, built here without a GPU: every stage, three architectures, and what goes wrong.

A plan cannot be opened without its GPU. What is in it is checked on the network before it is
built (`test_tensorrt_network`), and each of these builds runs those checks on itself.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from bench.tensorrt_plans import write_full_width
from engines import bundle, plans
from engines.bundle import Bundle
from engines.machine import look
from engines.plans import Machine, Plans
from export import build as bundle_build
from export import cli, targets, tensorrt_build, tiny
from export.targets import CannotBuild
from export.tensorrt_build import Job, build, build_in_child, summary
from export.tensorrt_graph import prepare
from export.tensorrt_network import NotBuilt, Wanted
from export.tiny import PERSONA_SMALL
from tests.engines.plan_samples import plans_of
from tests.small import SMALL

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TARGETS = {"sm_86": "8.6", "sm_89": "8.9", "sm_120": "12.0"}
BATCH = 4
THIN = replace(
    PERSONA_SMALL,
    name="personaplex-thin",
    mimi=replace(PERSONA_SMALL.mimi, layers=1),
    lm=replace(PERSONA_SMALL.lm, layers=1, depth_layers=1),
)
"""What takes prompts has stages of its own; that layers may be many, the other bundle shows."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("plans")
    shutil.copytree(SMALL, folder / "moshi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MODELS, THIN.name, THIN)
        persona = bundle_build.build_seeded(THIN.name, folder / "personaplex")
    return {"moshi": bundle.read(folder / "moshi"), "personaplex": persona}


@pytest.fixture(scope="module")
def built(bundles: dict[str, Bundle]) -> dict[tuple[str, str], Plans]:
    """Every stage of both for every target. Two at a time: a build keeps one core busy."""
    wanted = [(name, target) for target in TARGETS for name in bundles]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(
            lambda key: build(bundles[key[0]], targets.resolve(key[1]), largest_batch=BATCH), wanted
        )
        return dict(zip(wanted, made, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["moshi", "personaplex"])
def test_every_stage_has_a_plan_with_exact_profiles(
    bundles: dict[str, Bundle], built: dict[tuple[str, str], Plans], name: str, target: str
) -> None:
    made, opened = built[name, target], bundles[name]
    stages = list(plans.graph_stages(opened.manifest))
    assert len(stages) == {"moshi": 4, "personaplex": 6}[name]
    assert [plan.stage for plan in made.plans] == [stage.name for stage in stages]
    assert (made.compute_capability, made.platform) == (TARGETS[target], look().platform)
    folder = opened.path / "plans" / target
    assert plans.read(folder) == made
    prompts = {"temporal_prefill", "opening"}
    for plan, stage in zip(made.plans, stages, strict=True):
        assert (plan.inputs, plan.outputs) == (stage.inputs, stage.outputs)
        assert plans.file_fault(folder, plan) == ""
        assert plan.bytes > 100_000
        assert plan.seconds > 0.1
        assert plan.peak_rss_bytes > 100 << 20
        if plan.stage not in prompts:
            assert plan.profiles == plans.exact(BATCH)
        regions = {r.name for r in opened.manifest.regions if r.in_place}
        assert set(plan.in_place) == regions & {spec.name for spec in stage.inputs}
    box = Machine(made.platform, "a GPU", TARGETS[target], ((made.flavour, made.version),))
    assert list(plans.refusals(opened, made, box, largest=BATCH)) == []


@pytest.mark.slow
def test_targets_differ_and_are_kept_apart(
    bundles: dict[str, Bundle], built: dict[tuple[str, str], Plans]
) -> None:
    assert [path.name for path in plans.folders(bundles["moshi"].path)] == sorted(TARGETS)
    for stage in ("temporal", "depth"):
        hashes = {getattr(built["moshi", t].plan(stage), "sha256", None) for t in TARGETS}
        assert len(hashes) == len(TARGETS)


def again(opened: Bundle, **change: Any) -> tuple[list[str], Plans]:
    """Build for sm_89 once more; the stages that were built, and what is then on disk."""
    said: list[str] = []
    options: dict[str, Any] = {"largest_batch": BATCH} | change
    made = build(opened, targets.resolve("sm_89"), say=said.append, **options)
    return [" ".join(line.split()) for line in said if " building: " in line], made


@pytest.mark.slow
def test_nothing_is_built_twice_and_only_what_is_stale_again(
    bundles: dict[str, Bundle], built: dict[tuple[str, str], Plans]
) -> None:
    opened, first = bundles["moshi"], built["moshi", "sm_89"]
    assert again(opened) == ([], first)
    folder = opened.path / "plans/sm_89"
    raw = (folder / "temporal.plan").read_bytes()
    (folder / "temporal.plan").write_bytes(raw[:-1])
    (folder / "retired.plan").write_bytes(b"of a stage the model no longer has")
    rebuilt, second = again(opened)
    assert rebuilt == [
        f"temporal building: temporal.plan has {len(raw) - 1} bytes and should have {len(raw)}"
    ]
    assert not (folder / "retired.plan").exists()
    kept = [plan for plan in second.plans if plan.stage != "temporal"]
    assert kept == [plan for plan in first.plans if plan.stage != "temporal"]


def build_and_kill(command: list[str], folder: Path) -> set[str]:
    """Kill a build once it has a plan; the stages it has plans for."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        for _ in range(3000):
            if (folder / plans.FILE).exists() or process.poll() is not None:
                break
            time.sleep(0.02)  # noqa: TID251 - waits for another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {plan.stage for plan in plans.read(folder).plans}


@pytest.mark.slow
def test_a_killed_build_continues_where_it_was(bundles: dict[str, Bundle]) -> None:
    opened = bundles["moshi"]
    folder = opened.path / "plans/sm_80"
    command = [sys.executable, str(ROOT / "duplexbox.py"), "export", "build", str(opened.path)]
    command += ["--target", "sm_80", "--batches", "1-1"]
    for _ in range(3):  # this machine may be too busy to look in time
        done = build_and_kill(command, folder)
        if len(done) < 4:
            break
        shutil.rmtree(folder)
    assert "mimi_encode" in done
    assert len(done) < 4, "killed too late to show anything"
    (folder / "depth.plan.unfinished").write_bytes(b"half")
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    for stage in plans.graph_stages(opened.manifest):
        (line,) = [
            line
            for line in finished.stderr.splitlines()
            if line.split()[:1] == [stage.name] and ("current:" in line or "building:" in line)
        ]
        assert ("current:" in line) == (stage.name in done), line
    assert {path.name for path in folder.iterdir()} == {
        plans.FILE,
        *(f"{stage.name}.plan" for stage in plans.graph_stages(opened.manifest)),
    }
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_full_width_stage_builds_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers of Moshi 7B in bfloat16: 1.6 GB of weights, of which only the norms exist."""
    stage = write_full_width(tmp_path, "temporal", layers=2)
    prepared = prepare(tmp_path, stage.spec.graph, "inputs")
    outside = sum(weight.bytes for weight in prepared.weights)
    assert outside > 1_500_000_000
    assert prepared.constant_bytes < 100_000
    assert len(prepared.lengths) == 2
    regions = stage.regions
    assert isinstance(regions, list)
    rings = frozenset(region.name for region in regions if region.in_place)
    wanted = Wanted(tmp_path, stage.spec, rings, prepared, plans.exact(BATCH), "8.9")
    job = Job("tensorrt_rtx", wanted, tmp_path / "temporal.plan")
    done = build_in_child(job, lambda *_: None)
    size = job.out.stat().st_size
    with capsys.disabled():
        sys.stdout.write(
            f"\nfull-width Moshi, 2 layers, {outside / 1e9:.2f} GB of weights outside, batches "
            f"1..{BATCH}: {size / 1e6:.1f} MB in {done.seconds:.1f} s, peak memory "
            f"{done.peak_rss_bytes / 1e6:.0f} MB\n"
        )
    assert done.attention == "strict"
    assert size < 64 << 20
    assert done.peak_rss_bytes < 1 << 30


@pytest.fixture
def demo(tmp_path: Path) -> Bundle:
    shutil.copytree(SMALL, tmp_path / "demo")
    return bundle.read(tmp_path / "demo")


def test_a_crash_of_the_builder_is_a_sentence(demo: Bundle) -> None:
    stage = next(plans.graph_stages(demo.manifest))
    prepared = prepare(demo.path, stage.graph, "inputs")
    wanted = Wanted(demo.path, stage, frozenset(), prepared, plans.exact(1), "8.9")
    flavour: Any = "tests.export.crashing"
    with pytest.raises(NotBuilt, match=r"ended with SIGKILL .* memory runs out.*run the command"):
        build_in_child(Job(flavour, wanted, demo.path / "x.plan"), lambda *_: None)


def test_an_operator_tensorrt_lacks_names_stage_and_node(demo: Bundle) -> None:
    path = demo.path / "stages/mimi_encode.onnx"
    model = onnx.load(path, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Cos")
    node.op_type, odd = "Det", node.output[0]
    node.ClearField("attribute")
    onnx.save(model, path)
    with pytest.raises(ValueError, match=rf"stage mimi_encode: .*Det \(node {odd}\)"):
        build(demo, targets.resolve("sm_89"), largest_batch=1)


def test_weights_too_large_for_this_machines_memory_are_refused_before_the_build(
    demo: Bundle,
) -> None:
    path = demo.path / "stages/temporal.onnx"
    model = onnx.load(path, load_external_data=False)
    external = [t for t in model.graph.initializer if t.external_data]
    for entry in external[0].external_data:
        if entry.key == "length":
            entry.value = str(1 << 42)
    onnx.save(model, path)
    with pytest.raises(CannotBuild, match=r"stage temporal has 4398\.. GB .*--weights inputs"):
        build(demo, targets.resolve("sm_89"), weights="constants")
    assert not (demo.path / "plans").exists()


def test_a_machine_that_cannot_build_says_so_before_anything_is_written(demo: Bundle) -> None:
    bare = Machine("linux-x86_64")
    with pytest.raises(CannotBuild, match="tensorrt_rtx is not installed"):
        build(demo, targets.resolve("l4"), machine=bare)
    with pytest.raises(CannotBuild, match="times kernels on the GPU it builds for"):
        build(demo, targets.resolve("h200"), machine=bare)
    assert not (demo.path / "plans").exists()


def test_unreadable_plans_are_replaced_and_said(demo: Bundle) -> None:
    folder = demo.path / "plans/sm_89"
    folder.mkdir(parents=True)
    (folder / plans.FILE).write_text('{"format": 1}')
    said: list[str] = []
    known = tensorrt_build.known_plans(folder, targets.resolve("sm_89"), look(), said.append)
    assert known == {}
    assert "missing required field" in said[0]


def test_a_plan_in_a_line_has_size_time_memory_and_profiles(demo: Bundle) -> None:
    line = summary(plans_of(demo, 3).plans[0])
    for words in ("0.0 MB in 1.0 s", "peak memory 0 MB", "exactly 1..3"):
        assert words in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{demo}", "--target", "4090"], "near it: rtx-4090"),
        (["{demo}", "--target", "h200"], "is served by TensorRT"),
        (["{demo}", "--target", "orin"], "linux-aarch64 only"),
        (["{demo}"], "is a bundle already"),
        (["{demo}", "--target", "l4", "-o", "x"], "is a bundle already"),
        (["{demo}", "--target", "l4", "--batches", "2-4"], "profiles run from 1 without gaps"),
        (["small", "--target", "l4"], "where to?"),
        ([], "which model?"),
        (["small", "-o", "x", "--target", "h200"], "is served by TensorRT"),
    ],
)
def test_every_wrong_command_is_one_line(
    demo: Bundle, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code = cli.main(["build", *(word.format(demo=demo.path) for word in words)])
    err = capsys.readouterr().err
    assert code == 1
    assert err.count("\n") == 1
    assert said in err
    assert not Path("x").exists()


def test_the_list_of_targets_needs_no_bundle_and_takes_one(
    demo: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", "--target", "list"]) == 0
    bare = capsys.readouterr().out
    assert "rtx-pro-6000" in bare
    assert cli.main(["build", str(demo.path), "--target", "list"]) == 0
    assert f"sessions of {demo.manifest.model.name}" in capsys.readouterr().out
