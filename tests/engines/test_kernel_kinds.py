"""What a manifest says of kernels is held to what they need, before anything is loaded."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from engines import kernel_kinds
from engines.bundle import FileSpec, KernelSpec, StageSpec, WeightSpec
from engines.kernel_stages import COUNTER_BYTES, plan_kernels
from engines.kernels import lm_kinds
from tests.engines.kernels.lm_rig import depth_stage, tensor

BYTES = 1 << 20


@dataclass
class Files:
    """As much of a manifest as is asked for."""

    files: dict[str, FileSpec] = field(default_factory=lambda: {"w.bin": FileSpec("0", BYTES)})


def stage() -> StageSpec:
    """A depth stage whose weights lie one after the other in w.bin."""
    bare = depth_stage("bfloat16", hidden=16, features=8, gate=12, heads=2, steps=2, layers=1)
    assert bare.kernel is not None
    at, placed = 0, {}
    for role, weight in bare.kernel.weights.items():
        placed[role] = WeightSpec("w.bin", at, weight.dtype, weight.shape)
        at += -(-weight.nbytes // 64) * 64
    return msgspec.structs.replace(
        bare, kernel=msgspec.structs.replace(bare.kernel, weights=placed)
    )


def faults(change: Callable[[Any], object]) -> list[str]:
    """After ``change`` of the kernel, as JSON has it."""
    whole = stage()
    tree = msgspec.to_builtins(whole.kernel)
    change(tree)
    changed = msgspec.structs.replace(whole, kernel=msgspec.convert(tree, KernelSpec))
    return list(kernel_kinds.faults(Files(), changed))  # type: ignore[arg-type]


def test_a_sound_kernel_has_no_fault() -> None:
    assert faults(lambda tree: None) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.update(kind="deep"), r"\.kind: there is no 'deep'; .*depth, gated_first"),
        (lambda t: t["weights"].pop("1.0.out"), r"\.weights: depth needs 1\.0\.out of .*\[8, 8\]"),
        (
            lambda t: t["weights"]["0.head"].update(shape=[8, 48]),
            r"\.weights \(0\.head\): is \[8, 48\] and should be \[48, 8\]",
        ),
        (
            lambda t: t["weights"].update(more=t["weights"]["0.head"]),
            r"\.weights \(more\): depth has no such role",
        ),
        (lambda t: t["weights"]["0.in"].update(file="v.bin"), r"\(0\.in\)\.file: v\.bin is not"),
        (lambda t: t["weights"]["0.in"].update(offset=32), r"offset: 32 is not a multiple of 64"),
        (lambda t: t["weights"]["0.in"].update(offset=-64), r"offset: -64 is not a multiple"),
        (
            lambda t: t["weights"]["0.in"].update(offset=BYTES - 64),
            r"\(0\.in\): bytes 1048512 to 1048768 lie outside w\.bin, which has 1048576",
        ),
        (lambda t: t["numbers"].pop("delay.2"), r"\.numbers: depth needs delay\.2"),
        (lambda t: t["numbers"].update(steps=3), r": .* has 3 rows for 3 steps and text"),
        (lambda t: t["numbers"].update(heads=3), r": 2 steps, 1 layers, 3 heads on 8 features"),
        (
            lambda t: t["weights"]["0.in"].update(dtype="float16"),
            r": weights and rows of bfloat16, float16; they must be of one",
        ),
    ],
)
def test_what_contradicts_the_kind_is_said_with_its_place(
    change: Callable[[Any], object], expected: str
) -> None:
    found = faults(change)
    assert any(re.search(expected, fault) for fault in found), found


def test_a_built_in_stage_names_no_kernel() -> None:
    built = msgspec.structs.replace(stage(), graph="", builtin="gumbel_noise")
    (fault,) = kernel_kinds.faults(Files(), built)  # type: ignore[arg-type]
    assert fault == ": a built-in stage has no graph that a kernel could stand in for"


def test_a_stage_with_other_tensors_is_refused() -> None:
    x = tensor("x", "bfloat16", 8)
    kernel = KernelSpec("gated_piece", {}, {"eps": 1e-8, "gate": 12})
    short = StageSpec("s", (x,), (x, x), graph="g", kernel=kernel)
    (fault,) = kernel_kinds.faults(Files(), short)  # type: ignore[arg-type]
    assert fault == ": 1 tensors where this kind has 2"


def test_every_kind_of_the_language_model_can_be_named() -> None:
    assert set(lm_kinds.SHAPES) <= set(kernel_kinds.KINDS)


def test_a_slice_that_two_stages_use_is_loaded_once() -> None:
    whole = stage()
    once, twice = plan_kernels([whole], 4), plan_kernels([whole, whole], 4)
    assert once.weights_bytes == twice.weights_bytes
    assert once.scratch_bytes == twice.scratch_bytes > COUNTER_BYTES
    assert whole.kernel is not None
    assert once.weights_bytes >= sum(w.nbytes for w in set(whole.kernel.weights.values()))
    ends = sorted((at, at + weight.nbytes) for weight, at in once.offsets.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    none = plan_kernels([msgspec.structs.replace(whole, kernel=None)], 4)
    assert (none.stages, none.total_bytes) == ((), 0)
