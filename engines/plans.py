"""TensorRT plans in a bundle: the format of `plans/<target>/plans.json`, and who may run them.

    plans/sm_89/plans.json      what is here, for which GPU, made by what and from what
    plans/sm_89/temporal.plan   one plan per graph, with every batch profile in it

A plan is made for one compute capability by one version of one builder, from one graph, for a
list of profiles, and opens nowhere else: TensorRT itself says so late and badly. So the reader is
strict, and `refusals` compares all of it with the bundle and the machine beforehand, in sentences.

Large weights need not lie in a plan: they are inputs of it, and `WeightInput` says where in the
bundle's files their bytes are. Not here: building (`export`), running, looking at the machine.
No torch, no onnx, no TensorRT.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from engines.bundle import (
    ITEMSIZE,
    Bundle,
    Dtype,
    FileSpec,
    Manifest,
    StageSpec,
    TensorSpec,
    describe_file,
)

FORMAT = 1
"""Raised whenever an older reader would misunderstand a plans.json."""

FOLDER, FILE = "plans", "plans.json"

Flavour = Literal["tensorrt_rtx", "tensorrt"]
"""The Python module that builds and runs a plan. Their API is the same; their GPUs are not."""

WeightsForm = Literal["inputs", "constants"]
"""Large weights as inputs bound to the bundle's own memory, or inside the plan."""

TENSORRT_DTYPES: dict[Dtype, str] = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8e4m3": "FP8",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}
"""Bundle dtype -> member of TensorRT's `DataType`."""

RUN_TIMES: dict[Flavour, tuple[str, ...]] = {
    "tensorrt_rtx": ("tensorrt_rtx",),
    "tensorrt": ("tensorrt_lean", "tensorrt"),
}
"""Modules that run plans of a flavour, best first. Plans of `tensorrt` are built
version-compatible, so that its lean run-time, which cannot build, runs them."""

INSTALL = {
    "tensorrt_rtx": "pip install 'duplexbox[tensorrt]'",
    "tensorrt": "pip install tensorrt-cu13 --extra-index-url https://pypi.nvidia.com",
}


class PlansError(ValueError):
    """Plans that cannot be used here; the operator's fault, or of whoever copied the bundle."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Profile(_Strict, frozen=True):
    """Sizes of the symbolic dimension that one profile takes; exact where all three agree."""

    smallest: int
    likeliest: int
    largest: int


class WeightInput(_Strict, frozen=True):
    """A weight the plan takes as an input: where its bytes lie, row-major and little-endian."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    file: str
    """Path inside the bundle."""
    offset_bytes: int
    bytes: int

    @property
    def shape_bytes(self) -> int:
        """Bytes of such a tensor, which `bytes` must be: what lies behind belongs to another."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class MadeFrom(_Strict, frozen=True):
    """Everything a plan's content depends on. Equal values: the plan need not be built again."""

    graph_sha256: str
    constants: dict[str, str]
    """File of the bundle -> sha256, of files with weights that are inside the plan."""
    weights: WeightsForm
    profiles: tuple[Profile, ...]
    version: str
    """Of the flavour that built it."""
    recipe: int
    """Raised when the builder's own settings or remedies change."""


class Plan(_Strict, frozen=True):
    """One stage, built."""

    stage: str
    file: str
    """Beside plans.json."""
    sha256: str
    bytes: int
    inputs: tuple[TensorSpec, ...]
    """Of the tick; the weights are not among them."""
    outputs: tuple[TensorSpec, ...]
    weights: tuple[WeightInput, ...]
    in_place: tuple[str, ...]
    """Regions the plan updates where they lie: input and output must have one address."""
    profiles: tuple[Profile, ...]
    """In the plan's own order: profile 0 is the first."""
    attention: Literal["none", "strict", "decomposable"]
    """strict: TensorRT had to find kernels of attention's own. decomposable: where it has none it
    may spell attention out, which reads and writes more."""
    made_from: MadeFrom
    seconds: float
    """Wall time of the build."""
    peak_rss_bytes: int
    """Largest resident memory of the process that built it."""

    def profile_of(self, size: int) -> int:
        """Index of the profile for ``size`` rows. Raises `PlansError` when there is none."""
        for index, profile in enumerate(self.profiles):
            if profile.smallest <= size <= profile.largest:
                return index
        raise PlansError(
            f"the plan of stage {self.stage} has no profile for {size} rows; it takes "
            f"{described(self.profiles)}"
        )


class Plans(_Strict, frozen=True):
    """`plans.json`, decoded."""

    format: int
    target: str
    """Name of the folder: sm_ and the compute capability without its dot."""
    compute_capability: str
    gpu: str
    """The GPU it was asked for or built on: any of the same compute capability may run it."""
    platform: str
    """System and processor, such as linux-x86_64."""
    flavour: Flavour
    version: str
    checkpoint_sha256: str
    plans: tuple[Plan, ...]

    def plan(self, stage: str) -> Plan | None:
        return next((plan for plan in self.plans if plan.stage == stage), None)


class _FormatOnly(msgspec.Struct):
    format: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has that plans ask for. `engines.machine` looks; this is only the result."""

    platform: str
    gpu: str = ""
    """Empty: no NVIDIA GPU, or no driver."""
    compute_capability: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    """(module, version) of every builder and run-time that is installed."""

    def version_of(self, module: str) -> str:
        """Empty when it is not installed."""
        return dict(self.versions).get(module, "")

    def run_time_of(self, flavour: Flavour) -> str:
        """Version of what would run plans of ``flavour``; empty when nothing would."""
        found = (self.version_of(module) for module in RUN_TIMES[flavour])
        return next((version for version in found if version), "")


def graph_stages(manifest: Manifest) -> Iterator[StageSpec]:
    """Every stage with a graph: those of a tick in order, then those of a prompt."""
    prompt = (manifest.prompt.prefill, manifest.prompt.opening) if manifest.prompt else ()
    for stage in (*manifest.stages, *prompt):
        if stage.graph:
            yield stage


def exact(largest: int) -> tuple[Profile, ...]:
    """One exact profile per batch, 1..largest."""
    return tuple(Profile(size, size, size) for size in range(1, largest + 1))


def described(profiles: tuple[Profile, ...]) -> str:
    """Profiles for people: "exactly 1..4", "1 to 64", "nothing"."""
    if not profiles:
        return "nothing"
    if len(profiles) > 1 and profiles == exact(len(profiles)):
        return f"exactly 1..{len(profiles)}"
    return ", ".join(
        f"exactly {p.largest}" if p.smallest == p.largest else f"{p.smallest} to {p.largest}"
        for p in profiles
    )


def remedy(bundle_path: Path, target: str) -> str:
    """The command that builds what is missing or wrong."""
    return f"duplexbox export build {bundle_path} --target {target}"


def read(folder: Path) -> Plans:
    """Decode ``folder``/plans.json strictly. Raises `PlansError` with the path of what is wrong."""
    path = folder / FILE
    again = f"Build the plans again: {remedy(folder.parent.parent, folder.name)}"
    try:
        raw = path.read_bytes()
        # Looked at first, so that newer plans say so rather than "unknown field".
        if (found := msgspec.json.decode(raw, type=_FormatOnly).format) != FORMAT:
            raise PlansError(
                f"{path}: format {found} at `$.format`; this program reads {FORMAT}. {again}"
            )
        plans = msgspec.json.decode(raw, type=Plans)
    except OSError as err:
        raise PlansError(f"{path}: {err.strerror or err}. {again}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise PlansError(f"{path}: {err}. {again}") from None
    if plans.target != folder.name:
        raise PlansError(
            f"{path}: `$.target` is {plans.target}, but the folder is {folder.name}: it was "
            f"renamed or copied there. {again}"
        )
    for index, plan in enumerate(plans.plans):
        if Path(plan.file).name != plan.file:
            raise PlansError(f"{path}: `$.plans[{index}].file`: {plan.file} leads elsewhere")
    return plans


def folders(bundle_path: Path) -> list[Path]:
    """Every folder of plans in a bundle, by name."""
    return sorted(path.parent for path in (bundle_path / FOLDER).glob(f"*/{FILE}"))


def write(folder: Path, plans: Plans) -> None:
    """Write plans.json at once or not at all, so that a killed build leaves the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.unfinished"
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(plans), indent=1) + b"\n")
    os.replace(unfinished, folder / FILE)


def file_fault(folder: Path, plan: Plan, *, hashes: bool = True) -> str:
    """What is wrong with a plan's file, in a clause; empty when nothing is."""
    path = folder / plan.file
    try:
        size = path.stat().st_size
    except OSError:
        return f"{plan.file} is missing"
    if size != plan.bytes:
        return f"{plan.file} has {size} bytes and should have {plan.bytes}"
    if hashes and describe_file(path) != FileSpec(plan.sha256, plan.bytes):
        return f"{plan.file} was changed after it was built"
    return ""


def refusals(bundle: Bundle, plans: Plans, machine: Machine, largest: int = 0) -> Iterator[str]:
    """Every reason why ``machine`` cannot run ``bundle`` on ``plans``, each with its remedy. Pure.

    largest: the largest batch that is wanted; 0 means the bundle's own. The first sentence is the
    one to show when there is room for one.
    """
    build = remedy(bundle.path, plans.target)
    where = f"{FOLDER}/{plans.target} in bundle {bundle.path}"
    yield from _machine_refusals(plans, machine, where, bundle.path)
    yield from _bundle_refusals(bundle.manifest, plans, where, build)
    wanted = largest or bundle.manifest.largest_batch
    for stage in bundle.manifest.stages:
        plan = plans.plan(stage.name)
        if plan is not None and len(plan.profiles) < wanted:
            yield (
                f"{where}: stage {stage.name} takes batches of {described(plan.profiles)} and "
                f"{wanted} sessions are wanted. Build a larger one: {build} --batches 1-{wanted}"
            )
            return


def _machine_refusals(plans: Plans, machine: Machine, where: str, path: Path) -> Iterator[str]:
    made = f"{where} were built for {plans.gpu} ({plans.target}) by {plans.flavour} {plans.version}"
    installed = machine.run_time_of(plans.flavour)
    if not machine.gpu:
        yield f"{made}; this machine has no NVIDIA GPU, or no driver for it (nvidia-smi shows it)"
    elif machine.compute_capability != plans.compute_capability:
        here = target_of(machine.compute_capability)
        yield f"{made}; this box has {machine.gpu} ({here}). Build them: {remedy(path, here)}"
    if machine.platform != plans.platform:
        yield (
            f"{where} were built for {plans.platform} and this is {machine.platform}. "
            f"Build them here: {remedy(path, plans.target)}"
        )
    if not installed:
        yield (
            f"{made}; {plans.flavour} is not installed here. "
            f"Install that version: {INSTALL[plans.flavour]}"
        )
    elif not opens(plans.flavour, plans.version, installed):
        yield (
            f"{made}; this machine has {plans.flavour} {installed}, which cannot open them. "
            f"Build them: {remedy(path, plans.target)}"
        )


def _bundle_refusals(manifest: Manifest, plans: Plans, where: str, build: str) -> Iterator[str]:
    if plans.checkpoint_sha256 != manifest.model.checkpoint_sha256:
        yield (
            f"{where} were built from checkpoint {plans.checkpoint_sha256[:12]}… and the bundle "
            f"holds {manifest.model.checkpoint_sha256[:12]}…. Build them again: {build}"
        )
    for stage in graph_stages(manifest):
        plan = plans.plan(stage.name)
        if plan is None:
            yield f"{where} have no plan of stage {stage.name}: the build is unfinished. {build}"
            continue
        if plan.made_from.graph_sha256 != manifest.files[stage.graph].sha256:
            yield (
                f"{where}: the plan of stage {stage.name} was built from another {stage.graph}. "
                f"Build it again: {build}"
            )
        for name, sha256 in plan.made_from.constants.items():
            if name not in manifest.files or manifest.files[name].sha256 != sha256:
                yield (
                    f"{where}: the plan of stage {stage.name} holds weights of another {name}. "
                    f"Build it again: {build}"
                )
        for weight in plan.weights:
            file = manifest.files.get(weight.file)
            end = weight.offset_bytes + weight.bytes
            if file is None or not 0 <= weight.offset_bytes <= end <= file.bytes:
                yield (
                    f"{where}: the plan of stage {stage.name} takes {weight.name} from bytes "
                    f"{weight.offset_bytes} to {end} of {weight.file}, which "
                    + (f"has {file.bytes}" if file else "the bundle does not have")
                    + f". Build it again: {build}"
                )
            elif weight.bytes != weight.shape_bytes:
                yield (
                    f"{where}: the plan of stage {stage.name} takes {weight.bytes} bytes for "
                    f"{weight.name}, and {weight.dtype} {list(weight.shape)} has "
                    f"{weight.shape_bytes}. Build it again: {build}"
                )
        if (plan.inputs, plan.outputs) != (stage.inputs, stage.outputs):
            yield (
                f"{where}: inputs or outputs of stage {stage.name} are not the bundle's. "
                f"Build it again: {build}"
            )


def opens(flavour: Flavour, built: str, installed: str) -> bool:
    """Whether a run-time opens a plan. tensorrt_rtx: its own version only. tensorrt: plans are
    built version-compatible, so any later version of the same major number does."""
    if flavour == "tensorrt_rtx":
        return built == installed
    was, now = (tuple(int(part) for part in text.split(".")) for text in (built, installed))
    return was[0] == now[0] and was <= now


def target_of(compute_capability: str) -> str:
    """ "8.9" -> "sm_89"."""
    return "sm_" + compute_capability.replace(".", "")
