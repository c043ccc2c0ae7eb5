"""Stages of a bundle that kernels of ours compute on a GPU: their weights, scratch and launches.

A stage that names a kernel (`StageSpec.kernel`) has no graph loaded for it. Its weights go from
the bundle's files straight to the device, each distinct slice once whoever uses it. Scratch is
shared by all stages, as launches on one stream follow each other; its first part is counters
that every launch finds and leaves at zero. How much all of that takes is known before.

    plan = plan_kernels(stages, slots)          pure: bytes of weights and scratch
    kernels = KernelStages(bundle, plan, ...)   compiled or found, weights loaded
    kernels.bind(step, batch, address, stream)  what enqueues one stage, capturable

Not here: what a kind computes (`kernels`), what it must be told (`kernel_kinds`).
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engines import cuda
from engines.bundle import Bundle, BundleError, StageSpec, WeightSpec
from engines.cuda import Device, DevicePtr, Stream
from engines.kernels import nvrtc
from engines.kernels.nvrtc import Job
from engines.program import Buffer, Step

Address = Callable[[Buffer], DevicePtr]
"""Where slot 0 of a buffer lies."""

ALIGN_BYTES = 256
COUNTER_BYTES = 1 << 16
"""16,384 counters of 32 bits: more than any launch has blocks that wait for each other."""
CHUNK_BYTES = 64 << 20
"""Of a file, copied to the device at a time."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one launch after the other."""

    counters: DevicePtr
    """`COUNTER_BYTES` of zeros; every launch leaves them so."""
    memory: DevicePtr
    """What `Family.scratch_bytes` asked for, or more; contents do not matter."""


@dataclass(frozen=True, slots=True)
class Bindable:
    """One stage for one batch, with every address it needs."""

    step: Step
    batch: int
    weights: Mapping[str, DevicePtr]
    """By role."""
    address: Address
    scratch: Scratch
    stream: Stream


class Family(Protocol):
    """Compiled kernels of related kinds."""

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        """What enqueues the stage: launches alone, no allocation, no waiting."""

    def close(self) -> None:
        """Unload the kernels."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How stages of one kind come to run."""

    family: str
    """Kinds of one family share an instance."""
    load: Callable[[Iterable[StageSpec], Device, Path], Family]
    """Compile for the device what these stages of the family need, or find it in the folder.

    Raises `nvrtc.NoCompiler`, `BundleError` when there is no kernel for a stage's shape."""
    scratch_bytes: Callable[[StageSpec, int], int]
    """Of a stage of this kind and that many slots. Pure."""
    jobs: Callable[[Iterable[StageSpec], int, Device], list[Job]] = lambda stages, slots, device: []
    """What stages of the family will want compiled for that many slots: done at once, on all cores,
    where each on its own would keep a start waiting."""


def kinds() -> dict[str, Kind]:
    """By `KernelSpec.kind`. A kind that is not here runs as its graph."""
    from engines.kernels import codec, depth, gated  # families are written in this file's words

    return {**gated.KINDS, **depth.KINDS, **codec.CODEC_KINDS}


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What kernels of ours take on the device."""

    stages: tuple[StageSpec, ...]
    """Those computed by kernels."""
    offsets: dict[WeightSpec, int]
    """Of every distinct slice, in one allocation."""
    weights_bytes: int
    scratch_bytes: int
    slots: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.scratch_bytes


def plan_kernels(stages: Iterable[StageSpec], slots: int) -> KernelPlan:
    """Find the stages that name a kernel, and what they need for ``slots`` sessions. Pure."""
    known = kinds()
    ours = tuple(stage for stage in stages if stage.kernel and stage.kernel.kind in known)
    offsets: dict[WeightSpec, int] = {}
    end = scratch = 0
    for stage in ours:
        assert stage.kernel is not None, stage.name
        scratch = max(scratch, known[stage.kernel.kind].scratch_bytes(stage, slots))
        for weight in stage.kernel.weights.values():
            if weight not in offsets:
                offsets[weight] = end
                end += -(-weight.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return KernelPlan(ours, offsets, end, scratch + COUNTER_BYTES if ours else 0, slots)


class KernelStages:
    """Weights and scratch on the device, kernels loaded. One thread uses it."""

    def __init__(self, bundle: Bundle, plan: KernelPlan, device: Device, folder: Path) -> None:
        """Load everything ``plan`` says. Raises `BundleError`, `nvrtc.NoCompiler`."""
        self._plan = plan
        self._held: list[DevicePtr] = []
        self._families: dict[str, Family] = {}
        self._weights = DevicePtr(0)
        try:
            if plan.stages:
                self._load(bundle, device, folder)
        except BaseException:
            self.close()
            raise

    def bind(self, step: Step, batch: int, address: Address, stream: Stream) -> Callable[[], None]:
        """What enqueues one stage of the plan for exactly ``batch`` sessions, slots 0..batch-1."""
        kernel = step.stage.kernel
        assert kernel is not None, step.stage.name
        weights = {
            role: DevicePtr(self._weights + self._plan.offsets[weight])
            for role, weight in kernel.weights.items()
        }
        family = self._families[kinds()[kernel.kind].family]
        return family.bind(Bindable(step, batch, weights, address, self._scratch, stream))

    def close(self) -> None:
        for family in self._families.values():
            family.close()
        for pointer in self._held:
            cuda.release(pointer)
        self._families, self._held = {}, []

    def _load(self, bundle: Bundle, device: Device, folder: Path) -> None:
        plan, known = self._plan, kinds()
        members: dict[str, list[StageSpec]] = {}
        loaders: dict[str, Kind] = {}
        for stage in plan.stages:
            assert stage.kernel is not None, stage.name
            kind = known[stage.kernel.kind]
            members.setdefault(kind.family, []).append(stage)
            loaders[kind.family] = kind
        wanted = [
            job
            for name, stages in members.items()
            for job in loaders[name].jobs(stages, plan.slots, device)
        ]
        nvrtc.compile_all({str(job): job for job in wanted}.values(), folder)
        for name, stages in members.items():
            self._families[name] = loaders[name].load(stages, device, folder)
        scratch = self._allocate(plan.scratch_bytes)
        cuda.fill_bytes(scratch, 0, plan.scratch_bytes)
        self._scratch = Scratch(scratch, DevicePtr(scratch + COUNTER_BYTES))
        self._weights = self._allocate(plan.weights_bytes)
        load_weights(bundle, plan.offsets, self._weights)

    def _allocate(self, nbytes: int) -> DevicePtr:
        self._held.append(cuda.allocate(max(nbytes, 1)))
        return self._held[-1]


def load_weights(bundle: Bundle, offsets: Mapping[WeightSpec, int], base: DevicePtr) -> None:
    """Copy slices of the bundle's files to ``base`` plus their offsets, through mapped files."""
    files: dict[str, list[WeightSpec]] = {}
    for weight in offsets:
        files.setdefault(weight.file, []).append(weight)
    for name, slices in files.items():
        path = bundle.file(name)
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as err:
            raise BundleError(f"{path}: {err}. Copy the bundle again") from None
        with mapped:
            whole = np.frombuffer(mapped, np.uint8)
            for weight in sorted(slices, key=lambda weight: weight.offset):
                target = base + offsets[weight]
                for first in range(0, weight.nbytes, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, weight.nbytes - first)
                    source = whole.ctypes.data + weight.offset + first
                    cuda.write_device_from(DevicePtr(target + first), source, count)
            del whole
