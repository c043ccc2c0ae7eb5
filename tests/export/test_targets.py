"""The table of GPUs: what is found, what is refused, and the arithmetic of room."""

import msgspec
import pytest

from engines import bundle
from engines.bundle import Manifest
from engines.plans import INSTALL, Machine
from export import targets
from export.targets import ARM, RTX_CAPABILITIES, TARGETS, X86, Target, UnknownTarget
from tests.small import SMALL

DESK = Machine(platform=X86, versions=(("tensorrt_rtx", "1.7.1.116"),))
"""A machine with the builder and no GPU."""


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return bundle.read(SMALL, hashes=False).manifest


def test_names_are_found_however_they_are_written() -> None:
    assert targets.resolve("rtx-4090").compute_capability == "8.9"
    assert targets.resolve("RTX 4090") is targets.resolve("rtx-4090")
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert {t.name for t in TARGETS} >= set("rtx-4090 rtx-pro-6000 l4 l40s h200 orin gb10".split())


@pytest.mark.parametrize("capability", RTX_CAPABILITIES)
def test_a_bare_compute_capability_is_a_target(capability: str) -> None:
    found = targets.resolve("sm_" + capability.replace(".", ""))
    assert (found.compute_capability, found.flavour) == (capability, "tensorrt_rtx")
    assert found.folder == found.name


def test_gpus_of_one_compute_capability_share_a_folder() -> None:
    assert {t.folder for t in TARGETS if t.compute_capability == "8.9"} == {"sm_89"}
    assert targets.resolve("rtx-pro-6000").folder == targets.resolve("sm120").folder == "sm_120"


@pytest.mark.parametrize("text", ["rtx4090", "sm_88", "sm_9", "4090", "", "sm_999"])
def test_an_unknown_target_is_refused_with_the_command_that_lists_them(text: str) -> None:
    with pytest.raises(UnknownTarget, match=r"--target list"):
        targets.resolve(text)


def test_a_slip_of_the_pen_is_answered_with_what_comes_near() -> None:
    with pytest.raises(UnknownTarget, match="rtx-4090"):
        targets.resolve("rtx4090")


def test_the_capabilities_are_those_the_builder_has() -> None:
    import tensorrt_rtx

    names = set(tensorrt_rtx.ComputeCapability.__members__) - {"NONE", "CURRENT"}
    assert names == {"SM" + capability.replace(".", "") for capability in RTX_CAPABILITIES}


def test_every_gpu_has_a_flavour_and_figures() -> None:
    known = (*RTX_CAPABILITIES, *targets.TENSORRT_CAPABILITIES)
    assert not set(RTX_CAPABILITIES) & set(targets.TENSORRT_CAPABILITIES)
    for target in TARGETS:
        assert target.compute_capability in known, target
        assert target.memory_gib > 0, target
        assert target.gb_per_s > 0, target
        arm = target.compute_capability in targets.ARM_CAPABILITIES
        assert (target.platform == ARM) == arm, target


def test_every_row_says_where_its_figures_were_compared() -> None:
    assert list(targets.SOURCES) == [target.name for target in TARGETS]
    unsourced = {name for name, source in targets.SOURCES.items() if not source}
    assert unsourced == {"a30", "orin"}, "found a page? then say which, and take it out here"


def test_a_desk_without_a_gpu_builds_for_every_rtx_gpu() -> None:
    for target in TARGETS:
        reason = targets.reason_not_to_build(target, DESK)
        assert (reason == "") == (target.flavour == "tensorrt_rtx" and not target.platform), target


@pytest.mark.parametrize(
    ("name", "here", "words"),
    [
        ("gb10", DESK, ["linux-aarch64 only", "linux-x86_64", "on", "the box"]),
        ("orin", DESK, ["linux-aarch64 only", "the box"]),
        ("sm_121", DESK, ["linux-aarch64 only"]),
        ("h200", DESK, ["sm_90", "no GPU", "Run the same command on a box with that GPU"]),
        (
            "h200",
            Machine(X86, "NVIDIA L4", "8.9", (("tensorrt", "11.4"),)),
            ["NVIDIA L4 (sm_89)", "sm_90"],
        ),
        ("h200", Machine(X86, "NVIDIA H200", "9.0"), ["tensorrt is not", INSTALL["tensorrt"]]),
        ("l4", Machine(X86), ["tensorrt_rtx is not installed", INSTALL["tensorrt_rtx"]]),
    ],
)
def test_what_cannot_be_built_here_says_why_and_where(
    name: str, here: Machine, words: list[str]
) -> None:
    reason = targets.reason_not_to_build(targets.resolve(name), here)
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("gb10", Machine(ARM, "NVIDIA GB10", "12.1", (("tensorrt_rtx", "1.7.1.116"),))),
        ("gb10", Machine(ARM, versions=(("tensorrt_rtx", "1.7.1.116"),))),
        ("orin", Machine(ARM, "Orin", "8.7", (("tensorrt", "11.4"),))),
        ("h200", Machine(X86, "NVIDIA H200", "9.0", (("tensorrt", "11.4"),))),
    ],
)
def test_the_box_itself_builds_for_itself(name: str, here: Machine) -> None:
    assert targets.reason_not_to_build(targets.resolve(name), here) == ""


def test_room_is_memory_over_state_and_bandwidth_over_traffic(manifest: Manifest) -> None:
    held = manifest.session_bytes(manifest.ticks_until_full())
    weights = sum(s.bytes for name, s in manifest.files.items() if name.endswith(".bin"))
    assert targets.weights_bytes(manifest) == weights > 0
    box = Target("x", "X", "8.9", memory_gib=1, gb_per_s=1)
    found = targets.room(manifest, box)
    assert found.by_memory == ((1 << 30) - weights) // held
    # 80 ms of 1 GB/s are 80 MB; rings are read whole and get a tick's rows, the rest moves twice.
    rings = [r for r in manifest.regions if r.clock.kind.value == "ring"]
    ring_bytes = sum(r.whole_bytes for r in rings)
    rows = sum(r.whole_bytes // r.clock.retain * int(r.clock.rows_per_tick) for r in rings)
    constant = sum(r.whole_bytes for r in manifest.regions if r.clock.kind.value == "constant")
    others = held - ring_bytes - constant
    moved = ring_bytes + rows + 2 * others + constant
    assert found.by_bandwidth == (80_000_000 - weights) // moved
    assert found.sessions == min(found.by_memory, found.by_bandwidth) > 0


def test_a_gpu_without_bfloat16_is_refused_such_a_bundle(manifest: Manifest) -> None:
    t4, l4 = targets.resolve("t4"), targets.resolve("l4")
    assert targets.reason_not_to_fit(t4, manifest) == ""
    temporal = manifest.stages[2]
    half = msgspec.structs.replace(temporal.inputs[-1], dtype="bfloat16")
    stage = msgspec.structs.replace(temporal, inputs=(*temporal.inputs[:-1], half))
    other = msgspec.structs.replace(manifest, stages=(*manifest.stages[:2], stage))
    assert "no bfloat16 arithmetic" in targets.reason_not_to_fit(t4, other)
    assert "--dtype float16" in targets.reason_not_to_fit(t4, other)
    assert targets.reason_not_to_fit(l4, other) == ""
    marked = [line for line in targets.table(other) if "no bfloat16 arithmetic" in line]
    assert [line.split()[0] for line in marked] == ["t4", "rtx-2080-ti"]


def test_a_gpu_too_small_for_the_weights_has_room_for_none(manifest: Manifest) -> None:
    big = msgspec.structs.replace(
        manifest, files={"stages/weights/lm.bin": bundle.FileSpec("0" * 64, 1 << 40)}
    )
    found = targets.room(big, targets.resolve("rtx-4090"))
    assert (found.by_memory, found.by_bandwidth) == (0, 0)


def test_the_table_has_a_line_per_gpu_and_sessions_only_with_a_bundle(manifest: Manifest) -> None:
    bare, full = list(targets.table(None)), list(targets.table(manifest))
    for target in TARGETS:
        (line,) = [line for line in full if line.startswith(f"{target.name} ")]
        assert target.folder in line
        assert target.flavour in line
        assert f"{targets.room(manifest, target).by_memory:,}" in line
    assert not any("memory holds" in line for line in bare)
    assert all(len(line) <= 120 for line in bare)
