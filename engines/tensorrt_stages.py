"""A bundle's stages as TensorRT engines, bound to addresses that never move and enqueued by us.

    plans.json  -- target, version, hashes, graph: all checked before TensorRT sees a byte
    engine      -- one per stage, deserialised; its tensors must be those the manifest names
    context     -- one per stage and batch, its profile chosen once, every address set once
    enqueue     -- `execute_async_v3`, which is all that a tick does, captured like anything else

Large weights are inputs of the plans: they are copied to the device once, from the bundle's mapped
files, each place of them once whatever stages call it, and shared by all batches. Contexts bring no
memory of their own: they run one after the other on one stream, so they share one scratch buffer of
the largest size any needs.
tensorrt_rtx compiles its kernels on the box; what it compiled is kept beside the plan.

Works with `tensorrt_rtx`, `tensorrt` and `tensorrt_lean`, handed in as a module: the same API. What
this file calls of it is held to the real modules' signatures by a test. No plan has been run yet
on a GPU that TensorRT-RTX supports: none was available. Not here: state, slots, graphs, a prompt's
stages (`tensorrt_prompt`).
"""

import importlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines import cuda, plans
from engines.bundle import NEXT, Bundle, BundleError, Dtype, StageSpec
from engines.cuda import DevicePtr
from engines.plans import RUN_TIMES, TENSORRT_DTYPES, Flavour, Machine, Plan, Plans, WeightInput
from engines.program import Bound, Buffer, Step

logger = logging.getLogger(__name__)

ALIGN_BYTES = 256
"""What TensorRT asks of device memory."""

Place = tuple[str, int, int]
"""File of the bundle, offset and bytes of a weight: graphs may call the same one differently."""


class PlanFailed(BundleError):
    """A plan that was accepted does not load or bind; says what TensorRT said."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Plans that this machine can run, checked down to the hashes."""

    folder: Path
    plans: Plans


def open_plans(bundle: Bundle, machine: Machine, largest: int) -> Opened:
    """The plans of ``bundle`` for this GPU and batches 1..largest.

    Raises `plans.PlansError` with every reason against them, one sentence each.
    """
    if not machine.gpu:
        raise plans.PlansError(
            "this machine has no NVIDIA GPU, or no driver for it (nvidia-smi shows it); TensorRT "
            "plans run on nothing else. Run the bundle on the CPU: --executor cpu"
        )
    target = plans.target_of(machine.compute_capability)
    folder = bundle.path / plans.FOLDER / target
    if not (folder / plans.FILE).exists():
        there = ", ".join(path.name for path in plans.folders(bundle.path)) or "none"
        raise plans.PlansError(
            f"bundle {bundle.path} has no plans for {machine.gpu} ({target}); it has: {there}. "
            f"Build them: {plans.remedy(bundle.path, target)} --batches 1-{largest}"
        )
    recorded = plans.read(folder)
    reasons = list(plans.refusals(bundle, recorded, machine, largest))
    if reasons:
        raise plans.PlansError("\n".join(reasons))
    for plan in recorded.plans:
        if fault := plans.file_fault(folder, plan):
            raise plans.PlansError(
                f"{folder}: {fault}. Copy the bundle again, or build the plan: "
                f"{plans.remedy(bundle.path, target)}"
            )
    return Opened(folder, recorded)


def load_module(flavour: Flavour) -> Any:
    """The run-time of a flavour. Raises `plans.PlansError` with the command that installs it."""
    for name in RUN_TIMES[flavour]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise plans.PlansError(
        f"{flavour} is not installed or does not load. Install it: {plans.INSTALL[flavour]}"
    )


@dataclass(frozen=True, slots=True)
class Alone:
    """A plan that is run on its own, between ticks; its weights are bound."""

    plan: Plan
    context: Any
    tensors: frozenset[str]
    """What its engine really takes and gives."""
    log: "_Log"


class TensorrtStages:
    """Engines, contexts, weights and scratch of one bundle. One thread uses it."""

    def __init__(
        self,
        trt: Any,
        bundle: Bundle,
        opened: Opened,
        stream: cuda.Stream,
        without: Collection[str] = (),
    ) -> None:
        """Load every plan of the tick and copy the weights. Raises `PlanFailed`.

        without: stages that something else computes.
        """
        self._trt, self._bundle, self._opened = trt, bundle, opened
        self.stream = stream
        self._log = _log(trt)
        self._runtime: Any = trt.Runtime(self._log.sink)
        self._engines: dict[str, Any] = {}
        self._tensors: dict[str, frozenset[str]] = {}
        """Stage -> what its engine really takes and gives."""
        self._configs: dict[str, Any] = {}
        self._caches: dict[str, Any] = {}
        self._contexts: dict[tuple[str, int], Any] = {}
        self._weights: dict[Place, DevicePtr] = {}
        self._held: list[DevicePtr] = []
        self._scratch, self._scratch_bytes = DevicePtr(0), 0
        try:
            for stage in bundle.manifest.stages:
                if stage.graph and stage.name not in without:
                    self._load(stage)
            self._copy_weights()
            self._scratch, self._scratch_bytes = self._take_scratch(self._engines)
        except BaseException:
            self.close()
            raise

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights that lie beside the plans."""
        return sum(weight.bytes for weight in self._all_weights(self._engines).values())

    @property
    def scratch_bytes(self) -> int:
        """Bytes all contexts share for what lives within one stage of one tick."""
        return self._scratch_bytes

    def bind(
        self, step: Step, batch: int, address: Callable[[Buffer], DevicePtr]
    ) -> Callable[[], None]:
        """Prepare ``step`` for exactly ``batch`` sessions; the result enqueues it once.

        Raises `PlanFailed` when the plan does not take the batch or an address.
        """
        name, plan = step.stage.name, self._plan(step.stage.name)
        self._check_in_place(plan, step, address)
        context = self._context(name, plan, batch)
        where = {bound.tensor.name: address(bound.buffer) for bound in _all(step)}
        where |= self._weights_of(plan)
        for tensor in self._tensors[name] & where.keys():
            self._set_address(context, plan, tensor, where[tensor])
        if missing := list(context.infer_shapes()):
            raise PlanFailed(f"stage {name} at batch {batch}: TensorRT misses {missing}")
        handle = int(self.stream.handle)
        capturable = getattr(context, "is_stream_capturable", None)
        if capturable is not None and not capturable(handle):
            raise PlanFailed(
                f"stage {name} at batch {batch} cannot be captured into a CUDA graph, says "
                f"{self._trt.__name__}{self._log.tail()}. Run it without plans: "
                f'--executor cuda, or [engine] executor = "cuda"'
            )

        def enqueue() -> None:
            if not context.execute_async_v3(handle):
                raise PlanFailed(f"stage {name} failed at batch {batch}{self._log.tail()}")

        return enqueue

    def room_for(self, stages: Iterable[StageSpec]) -> int:
        """Bytes of weights that plans of ``stages`` take beside those already on the device."""
        wanted = self._all_weights(stage.name for stage in stages)
        return sum(weight.bytes for place, weight in wanted.items() if place not in self._weights)

    def open_alone(self, stage: StageSpec) -> Alone:
        """Load the plan of a stage that is no part of a tick. Raises `PlanFailed`.

        Its kernels are compiled once for all sizes: a new size must not keep calls waiting.
        """
        self._load(stage, every_size=True)
        self._copy_weights()
        plan = self._plan(stage.name)
        scratch, nbytes = self._take_scratch([stage.name])
        context = self._new_context(stage.name, scratch, nbytes, profile=0)
        tensors = self._tensors[stage.name]
        for name, pointer in self._weights_of(plan).items():
            if name in tensors:
                self._set_address(context, plan, name, pointer)
        return Alone(plan, context, tensors, self._log)

    def room(self, nbytes: int) -> DevicePtr:
        """Device memory that `close` gives back."""
        pointer = cuda.allocate(-(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES)
        self._held.append(pointer)
        return pointer

    def keep_caches(self) -> None:
        """Write what the run-time compiled beside the plans, so that the next start is quick."""
        for stage, cache in self._caches.items():
            path = self._cache_path(stage)
            raw = bytes(memoryview(cache.serialize()))
            if path.exists() and path.read_bytes() == raw:
                continue
            unfinished = path.with_suffix(".unfinished")
            try:
                unfinished.write_bytes(raw)
                os.replace(unfinished, path)
                for old in path.parent.glob(f"{stage}-*.cache"):
                    if old != path:
                        old.unlink()
            except OSError as err:
                logger.info("compiled kernels not kept: %s: %s", path, err.strerror)
                return

    def close(self) -> None:
        """Give back memory; nothing that was bound may be enqueued afterwards."""
        # In this order: a context needs its engine, an engine its run-time.
        for held in (self._contexts, self._configs, self._caches, self._engines):
            held.clear()
        self._runtime = None
        for pointer in self._held:
            cuda.release(pointer)
        self._held = []

    def _plan(self, stage: str) -> Plan:
        plan = self._opened.plans.plan(stage)
        assert plan is not None, stage  # refusals() names a missing one
        return plan

    def _load(self, stage: StageSpec, *, every_size: bool = False) -> None:
        plan = self._plan(stage.name)
        path = self._opened.folder / plan.file
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise PlanFailed(
                f"{path}: {self._trt.__name__} {self._trt.__version__} cannot open the plan of "
                f"stage {stage.name}{self._log.tail()}. Build it again: "
                f"{plans.remedy(self._bundle.path, self._opened.plans.target)}"
            )
        if faults := engine_faults(self._trt, engine, plan):
            raise PlanFailed(
                f"{path}: the plan is not what plans.json says: {'; '.join(faults)}. Build it "
                f"again: {plans.remedy(self._bundle.path, self._opened.plans.target)}"
            )
        self._engines[stage.name] = engine
        self._tensors[stage.name] = frozenset(_tensors(engine))
        self._configs[stage.name] = self._configure(stage.name, engine, every_size)

    def _configure(self, stage: str, engine: Any, every_size: bool) -> Any:
        trt, config = self._trt, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if hasattr(config, "create_runtime_cache"):  # tensorrt_rtx: it compiles on this box
            cache = config.create_runtime_cache()
            path = self._cache_path(stage)
            if path.exists() and not cache.deserialize(path.read_bytes()):
                logger.info("compiled kernels of stage %s are of no use here: %s", stage, path)
            config.set_runtime_cache(cache)
            self._caches[stage] = cache
            # Kernels for our exact shapes now, at start-up, and no graphs but ours.
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = (
                strategies.NONE if every_size else strategies.EAGER
            )
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        return config

    def _cache_path(self, stage: str) -> Path:
        """Named after the plan, so that a new plan never meets an old cache."""
        return self._opened.folder / f"{stage}-{self._plan(stage).sha256[:12]}.cache"

    def _context(self, stage: str, plan: Plan, batch: int) -> Any:
        """The context of one stage and batch, with its profile and shapes set once."""
        key = (stage, batch)
        if key in self._contexts:
            return self._contexts[key]
        profile = plan.profile_of(batch)
        context = self._new_context(stage, self._scratch, self._scratch_bytes, profile)
        for spec in plan.inputs:
            if spec.name not in self._tensors[stage]:
                continue
            shape = tuple(length if isinstance(length, int) else batch for length in spec.shape)
            if not context.set_input_shape(spec.name, shape):
                raise PlanFailed(
                    f"stage {stage}: {spec.name} cannot be {shape} in profile {profile}"
                    f"{self._log.tail()}"
                )
        self._contexts[key] = context
        return context

    def _new_context(self, stage: str, scratch: DevicePtr, nbytes: int, profile: int) -> Any:
        engine = self._engines[stage]
        context = engine.create_execution_context(self._configs[stage])
        if context is None:
            raise PlanFailed(f"stage {stage}, profile {profile}: no context{self._log.tail()}")
        context.set_device_memory(int(scratch), nbytes)
        if not context.set_optimization_profile_async(profile, int(self.stream.handle)):
            raise PlanFailed(f"stage {stage}: no profile {profile}{self._log.tail()}")
        self.stream.synchronize()
        return context

    def _set_address(self, context: Any, plan: Plan, name: str, pointer: DevicePtr) -> None:
        if not context.set_tensor_address(name, int(pointer)):
            raise PlanFailed(
                f"stage {plan.stage}: {name} cannot lie at {int(pointer):#x}{self._log.tail()}"
            )

    def _check_in_place(
        self, plan: Plan, step: Step, address: Callable[[Buffer], DevicePtr]
    ) -> None:
        """A ring that a plan updates in place must be one piece of memory: a bug if it is not."""
        where: dict[str, DevicePtr] = {b.tensor.name: address(b.buffer) for b in _all(step)}
        for ring in plan.in_place:
            assert where[ring] == where[ring + NEXT], (plan.stage, ring)

    def _all_weights(self, stages: Iterable[str]) -> dict[Place, WeightInput]:
        return {_place(weight): weight for stage in stages for weight in self._plan(stage).weights}

    def _weights_of(self, plan: Plan) -> dict[str, DevicePtr]:
        return {weight.name: self._weights[_place(weight)] for weight in plan.weights}

    def _copy_weights(self) -> None:
        """Every weight once, whichever stages use it, straight from the mapped file."""
        for place, weight in self._all_weights(self._engines).items():
            if place in self._weights:
                continue
            pointer = self.room(weight.bytes)
            self._weights[place] = pointer
            file = np.memmap(self._bundle.file(weight.file), np.uint8, "r")
            part = file[weight.offset_bytes : weight.offset_bytes + weight.bytes]
            cuda.write_device_from(pointer, part.ctypes.data, weight.bytes)

    def _take_scratch(self, stages: Iterable[str]) -> tuple[DevicePtr, int]:
        """Memory for what lives within one run of any of ``stages``: what there is, or more."""
        needed = max(
            (
                engine.get_device_memory_size_for_profile_v2(profile)
                for engine in [self._engines[stage] for stage in stages]
                for profile in range(engine.num_optimization_profiles)
            ),
            default=0,
        )
        if needed <= self._scratch_bytes:
            return self._scratch, self._scratch_bytes
        return self.room(needed), needed


def _place(weight: WeightInput) -> Place:
    return weight.file, weight.offset_bytes, weight.bytes


def engine_faults(trt: Any, engine: Any, plan: Plan) -> list[str]:
    """In what an engine is not the plan that was recorded. Inputs it has no use for may be gone."""
    wanted: Mapping[str, tuple[Dtype, tuple[int, ...]]] = {
        spec.name: (spec.dtype, tuple(n if isinstance(n, int) else -1 for n in spec.shape))
        for spec in (*plan.inputs, *plan.outputs)
    } | {weight.name: (weight.dtype, weight.shape) for weight in plan.weights}
    outputs = {spec.name for spec in plan.outputs}
    found = _tensors(engine)
    faults = [f"{name} is no tensor of it" for name in found if name not in wanted]
    faults += [f"output {name} is missing" for name in sorted(outputs - set(found))]
    for name in found:
        if name not in wanted:
            continue
        dtype, shape = wanted[name]
        mode = trt.TensorIOMode.OUTPUT if name in outputs else trt.TensorIOMode.INPUT
        if engine.get_tensor_mode(name) != mode:
            faults.append(f"{name} is not an {mode.name.lower()}")
        if engine.get_tensor_dtype(name) != getattr(trt.DataType, TENSORRT_DTYPES[dtype]):
            faults.append(f"{name} is {engine.get_tensor_dtype(name)} and should be {dtype}")
        if tuple(engine.get_tensor_shape(name)) != shape:
            faults.append(f"{name} is {tuple(engine.get_tensor_shape(name))}, not {shape}")
    if engine.num_optimization_profiles != len(plan.profiles):
        faults.append(f"{engine.num_optimization_profiles} profiles, not {len(plan.profiles)}")
    for ring in plan.in_place:
        if engine.get_aliased_input_tensor(ring + NEXT) != ring:
            faults.append(f"{ring} is not updated in place")
    return faults


def _tensors(engine: Any) -> list[str]:
    return [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]


def _all(step: Step) -> Iterable[Bound]:
    return (*step.inputs, *step.outputs)


class _Log:
    """The run-time's last complaint, for error messages."""

    def __init__(self) -> None:
        self.last = ""
        self.sink: Any = None

    def tail(self) -> str:
        """The last error as the end of a sentence; empty when there was none."""
        return f": {self.last}" if self.last else ""


def _log(trt: Any) -> _Log:
    log = _Log()

    class Sink(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                log.last = message

    log.sink = Sink()
    return log
