"""The step program: which buffer is current, phase by phase."""

import msgspec

from engines.bundle import StageSpec, TensorSpec
from engines.program import Buffer, Step, plan_program
from tests.engines import toy


def buffers(step: Step, side: str) -> dict[str, int]:
    return {b.tensor.name: b.buffer.which for b in getattr(step, side)}


def test_a_region_alternates_and_an_in_place_ring_stays() -> None:
    program = plan_program(toy.manifest())
    first, second = program.steps
    assert buffers(first[0], "inputs")["hear.window"] == 0
    assert buffers(first[0], "outputs")["hear.window.next"] == 1
    assert buffers(second[0], "inputs")["hear.window"] == 1
    assert buffers(second[0], "outputs")["hear.window.next"] == 0
    for phase in program.steps:
        assert buffers(phase[0], "inputs")["hear.ring"] == 0
        assert buffers(phase[0], "outputs")["hear.ring.next"] == 0
    assert program.current[0]["frames"] == 0
    assert program.current[1]["frames"] == 1


def test_every_stage_of_a_tick_reads_what_the_stage_before_it_left() -> None:
    """`frames` moved on by two stages: the second reads the first one's buffer."""
    manifest = toy.manifest()
    again = StageSpec(
        "again",
        inputs=(TensorSpec("frames", "int64", ("B",)),),
        outputs=(TensorSpec("frames.next", "int64", ("B",)),),
        graph="stages/speak.onnx",
    )
    program = plan_program(msgspec.structs.replace(manifest, stages=(*manifest.stages, again)))
    for phase in program.steps:
        assert buffers(phase[2], "outputs")["frames.next"] == 1
        assert buffers(phase[3], "inputs")["frames"] == 1
        assert buffers(phase[3], "outputs")["frames.next"] == 0
    assert program.current[1]["frames"] == 0  # two updates a tick lead back


def test_wires_are_one_buffer() -> None:
    program = plan_program(toy.manifest())
    assert {b.buffer for step in program.steps[1] for b in step.outputs} >= {
        Buffer("heard", 0),
        Buffer("noise", 0),
    }
