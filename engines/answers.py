"""How near what a GPU answered is to what golden data says: what is compared how, and the sentence.

Floats may be off by `TOLERANCE` of a tensor's largest value, as their stage's narrowest dtype
allows. What is counted must be equal. Of what is chosen, tokens and codes, a share may differ where
rounding turns close choices.

Pure. Not here: running anything (`parity`), what golden data holds (`golden`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import NEXT, BundleError, Dtype, GoldenSpec, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.ort_executor import STORAGE

Array = NDArray[Any]

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}
"""Of a tensor's largest value, or of 1 if that is larger. A wrong weight moves it by a multiple:
values are about 1. A temporal transformer of 32 layers and 512 features in bfloat16 is 2.5e-2 off,
of 2 layers 1.2e-2 (torch, random weights)."""

CHOICES: dict[Dtype, float] = {"float32": 0.1, "float16": 0.25, "bfloat16": 0.5}
"""Share of tokens and codes that may differ where a stage chooses: one choice turned by rounding
changes all that follow it in the same frame. A wrong stage agrees on one in hundreds."""

CODES_OFF = 1e-2
"""Share of 8-bit keys and values that may be others: on the edge between two codes a rounding error
decides."""


REMEDY = {
    "cuda": (
        "To tell the bundle from the machine: duplexbox export verify {bundle}. To serve "
        'meanwhile: [engine] executor = "cpu"'
    ),
    "tensorrt": (
        "Build the plans again: duplexbox export build {bundle} --target {target}. To serve "
        'meanwhile without plans: [engine] executor = "cuda"'
    ),
}
"""By what `--executor` calls it."""


class ParityFailed(BundleError):
    """What this machine computes is not what the bundle says; plans, kernels or the GPU."""


@dataclass(slots=True)
class Found:
    """What was asked, and how far the furthest answer was from being refused."""

    stages: int = 0
    full: int = 0
    """Stages of which sessions of every age were asked."""
    tensors: int = 0
    ticks: int = 0
    same_ticks: int = 0
    """Whose words were equal."""
    furthest: float = 0.0
    """Distance over what is allowed: refused above 1."""
    where: str = ""

    def __str__(self) -> str:
        if not self.stages:
            return "the bundle carries no golden data, so nothing was compared"
        said = f"{self.stages} stages answer as recorded, {self.full} at every age"
        if self.where:
            said += f", furthest {self.furthest:.0%} of what is allowed ({self.where})"
        if self.ticks:
            said += f"; words of {self.same_ticks} of {self.ticks} ticks are equal"
        return said


@dataclass(frozen=True, slots=True)
class Asked:
    """Who answers, for the sentence that says it is wrong."""

    bundle: Path
    kind: str
    """What `--executor` calls it."""
    what: str
    """GPU and library, with its version."""
    target: str
    """Such as sm_89."""

    @property
    def remedy(self) -> str:
        return REMEDY[self.kind].format(bundle=self.bundle, target=self.target)


@dataclass(slots=True)
class Answer:
    """Compares what one stage gave with what was recorded."""

    asked: Asked
    stage: StageSpec
    spec: GoldenSpec
    found: Found
    dtype: Dtype = field(init=False)
    """The narrowest float of the stage: what its floats may be off by follows from it."""
    chooses: bool = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = narrowest((self.stage,))
        wires = [t for t in self.stage.outputs if not t.name.endswith(NEXT)]
        self.chooses = any(t.dtype == "int64" for t in wires) or not wires

    def compare(
        self,
        name: str,
        dtype: Dtype,
        got: Array,
        recorded: Mapping[str, Array],
        region: RegionSpec | None,
    ) -> None:
        """Raise `ParityFailed` unless ``got`` (sessions, ...) is near what was recorded."""
        expected = recorded.get(f"out.{name}")
        if expected is None:
            self._fail(name, f"has {list(got.shape)} and was not recorded")
            return
        expected = expected[: len(got)].reshape(got.shape)
        self.found.tensors += 1
        if dtype in TOLERANCE:
            self._compare_floats(name, unpacked(got), expected)
        elif dtype in ("int8", "float8e4m3", "uint8"):
            self._compare_share(name, got, expected, CODES_OFF, "codes")
        elif self.chooses and dtype == "int64" and not _counts(region):
            chosen = np.ones(got.shape, np.bool_)
            if region is not None:  # tokens: most are those of the frames before
                before = recorded[f"in.{region.name}"][: len(got)]
                chosen = before.reshape(got.shape) != expected
                self._compare_share(name, np.where(chosen, 0, got), np.where(chosen, 0, expected))
            self._compare_share(name, got, expected, CHOICES[self.dtype], "choices", chosen)
        else:
            self._compare_share(name, got, expected)

    def _compare_floats(self, name: str, got: Array, expected: Array) -> None:
        allowed = TOLERANCE[self.dtype]
        for row, age in enumerate(self.spec.ages[: len(got)]):
            largest = max(1.0, float(np.abs(expected[row]).max(initial=0)))
            distance = float(np.abs(got[row] - expected[row]).max(initial=0)) / largest
            if not distance <= allowed:  # a NaN is not
                self._fail(
                    name,
                    f"is off by {distance * largest:.3g} at frame {age:,}, where {largest:.3g} is "
                    f"the largest value and {allowed * largest:.3g} is allowed for {self.dtype}",
                )
            self._see(name, distance / allowed)

    def _compare_share(
        self,
        name: str,
        got: Array,
        expected: Array,
        share: float = 0,
        what: str = "values",
        counted: Array | None = None,
    ) -> None:
        """counted: which of them the share is of; None: all."""
        size = got.size if counted is None else int(np.count_nonzero(counted))
        odd, most = int(np.count_nonzero(got != expected)), int(share * size)
        if odd > most:
            pairs = zip(self.spec.ages, got, expected, strict=False)
            ages = ", ".join(f"{age:,}" for age, x, y in pairs if not np.array_equal(x, y))
            self._fail(
                name, f"has {odd} of {size} {what} wrong at frame {ages}; {most or 'none'} may"
            )
        if most:
            self._see(name, odd / most)

    def _see(self, name: str, used: float) -> None:
        if used > self.found.furthest:
            self.found.furthest, self.found.where = used, f"{self.stage.name}: {name}"

    def _fail(self, name: str, what: str) -> None:
        raise ParityFailed(
            f"stage {self.stage.name} does not answer on {self.asked.what} what the golden data of "
            f"{self.asked.bundle} says: output {name} {what}. {self.asked.remedy}. To start all "
            f"the same: [engine] check_golden = false"
        )


def packed(values: Array, dtype: Dtype) -> Array:
    """Recorded or drawn values as a tensor of ``dtype`` is stored."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, STORAGE[dtype][0])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # To the nearest, ties to even: what is added carries into the bits that stay.
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def unpacked(stored: Array) -> Array:
    """Floats as they are stored -> float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def narrowest(stages: Sequence[StageSpec]) -> Dtype:
    """The narrowest float that these stages take or give."""
    dtypes = {t.dtype for stage in stages for t in (*stage.inputs, *stage.outputs)}
    return max(dtypes & TOLERANCE.keys() or {"float32"}, key=lambda dtype: TOLERANCE[dtype])


def _counts(region: RegionSpec | None) -> bool:
    return region is not None and region.clock.kind is ClockKind.COUNTER
