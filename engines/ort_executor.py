"""Run a bundle on ONNX Runtime's CPU provider, with state that never moves.

Every region is an array of (slots, ...) allocated once. Slots 0..B-1 are live, so batch B is the
first B rows of each array: no gather, no padding, and the addresses a stage is bound to depend on
the batch and the phase alone. All bindings are made at load; a tick is one `run_with_iobinding`
per stage.

One thread per session graph, always: with two, or without prepacking, the bits of a session
depend on how many others are in the batch.

Not here: which buffer is current (`program`), who sits in a slot (the appliance), GPUs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines import ring_stage
from engines.bundle import Bundle, BundleError, Dtype, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.executor import check_setting
from engines.noise import gumbel
from engines.prefill import Primer
from engines.program import PHASES, Buffer, Step, plan_program

STORAGE: dict[Dtype, tuple[type[np.generic], int, str]] = {
    "float32": (np.float32, 1, "tensor(float)"),
    "uint8": (np.uint8, 2, "tensor(uint8)"),
    "int8": (np.int8, 3, "tensor(int8)"),
    "int32": (np.int32, 6, "tensor(int32)"),
    "int64": (np.int64, 7, "tensor(int64)"),
    "bool": (np.bool_, 9, "tensor(bool)"),
    "float16": (np.float16, 10, "tensor(float16)"),
    "bfloat16": (np.uint16, 16, "tensor(bfloat16)"),
    "float8e4m3": (np.uint8, 2, "tensor(uint8)"),
}
"""dtype -> numpy storage, ONNX TensorProto.DataType, ONNX Runtime's name for it. numpy has no
bfloat16 or float8: their bits travel in unsigned integers. In graphs too float8 is uint8: no
TensorScatter of ONNX Runtime 1.32 takes float8 on a CPU."""

Run = Callable[[], None]


class StageFailed(RuntimeError):
    """A stage raised while running: a broken graph or a machine out of memory; not a caller."""


class OrtExecutor:
    """`executor.Executor` on the CPU. One thread uses it."""

    def __init__(self, bundle: Bundle, slots: int) -> None:
        """Load every stage, allocate state for ``slots`` sessions and bind all batch profiles.

        Raises `BundleError` when a graph does not load, does not have the tensors the manifest
        says, or when ``slots`` is more than the bundle's largest batch profile.
        """
        manifest = bundle.manifest
        if not 1 <= slots <= manifest.largest_batch:
            raise BundleError(
                f"{slots} slots were asked for and the batch profiles of {bundle.path} are "
                f"1..{manifest.largest_batch}. Build more: duplexbox export build --batches "
                f"1-{max(slots, 1)}"
            )
        self.bundle = bundle
        self.slots = slots
        self._phase = 0
        self._program = plan_program(manifest)
        self._regions = {region.name: region for region in manifest.regions}
        self._arrays = _allocate(manifest.regions, self._program.steps[0], slots)
        self._sessions = load_stages(bundle)
        self._scales = {
            stage.name: ring_stage.scale_inputs(bundle, stage)
            for stage in manifest.stages
            if stage.ring is not None
        }
        self._runs = [
            [self._bind(phase, batch) for batch in range(slots + 1)] for phase in range(PHASES)
        ]
        self.audio_in: NDArray[np.float32] = self.wire(manifest.audio.input)[:, 0, :]
        self.audio_out: NDArray[np.float32] = self.wire(manifest.audio.output)[:, 0, :]
        self.text: NDArray[np.int64] = self.wire(manifest.text.output)
        self.valid: NDArray[np.bool_] = (
            self.wire(manifest.audio.valid)
            if manifest.audio.valid
            else np.ones(slots, dtype=np.bool_)
        )
        for slot in range(slots):
            self.join(slot, {})

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        """See `executor.Executor.join`."""
        assert 0 <= slot < self.slots, (slot, self.slots)
        for name, value in settings.items():
            check_setting(self._regions, name, value)
        for region in self._regions.values():
            row = self._current(region.name)[slot : slot + 1]
            row[...] = settings.get(region.name, region.fill)

    def move(self, source: int, target: int) -> None:
        """See `executor.Executor.move`. Copies every byte of one session's state."""
        assert 0 <= source < self.slots, (source, self.slots)
        assert 0 <= target < self.slots, (target, self.slots)
        for name in self._regions:
            array = self._current(name)
            array[target] = array[source]

    def age(self, slot: int, ticks: int) -> None:
        """See `executor.Ages.age`."""
        for region in self._regions.values():
            if region.clock.kind is ClockKind.COUNTER:
                self._current(region.name)[slot] = region.clock.position(ticks)

    def primer(self) -> Primer:
        """See `executor.Primes.primer`."""
        from engines.ort_prefill import OrtPrimer  # it is built on this file

        return OrtPrimer(self)

    def step(self, batch: int) -> None:
        """See `executor.Executor.step`. Raises `StageFailed` naming the stage."""
        for run in self._runs[self._phase][batch]:
            run()
        if batch:
            self._phase = (self._phase + 1) % PHASES

    def stage_names(self) -> tuple[str, ...]:
        """Stages in the order a tick runs them."""
        return tuple(stage.name for stage in self.bundle.manifest.stages)

    def step_timed(
        self, batch: int, now_ns: Callable[[], int], spent_ns: NDArray[np.int64]
    ) -> None:
        """`step`, noting in ``spent_ns`` (stages,) how long each stage took."""
        before = now_ns()
        for index, run in enumerate(self._runs[self._phase][batch]):
            run()
            after = now_ns()
            spent_ns[index] = after - before
            before = after
        if batch:
            self._phase = (self._phase + 1) % PHASES

    def close(self) -> None:
        """See `executor.Executor.close`."""
        self._runs = []
        self._sessions = {}

    def region(self, name: str) -> NDArray[Any]:
        """The live array (slots, ...) of a region as the next tick will read it."""
        return self._current(name)

    def wire(self, name: str) -> NDArray[Any]:
        """The array (slots, ...) of a tensor that one stage of a tick hands to another."""
        return self._arrays[Buffer(name, 0)]

    def _current(self, name: str) -> NDArray[Any]:
        return self._arrays[Buffer(name, self._program.current[self._phase][name])]

    def _bind(self, phase: int, batch: int) -> tuple[Run, ...]:
        if batch == 0:
            return ()
        return tuple(self._bind_step(step, batch) for step in self._program.steps[phase])

    def _bind_step(self, step: Step, batch: int) -> Run:
        if step.stage.builtin == "gumbel_noise":
            seed, frame = (self._arrays[bound.buffer][:batch] for bound in step.inputs)
            (noise,) = (self._arrays[bound.buffer][:batch] for bound in step.outputs)
            return lambda: gumbel(seed, frame, noise)
        session = self._sessions[step.stage.name]
        graph = ring_stage.as_twin(step.stage) if step.stage.ring else step.stage
        binding = session.io_binding()
        for name, scale in self._scales.get(step.stage.name, {}).items():
            element = STORAGE["float32"][1]
            binding.bind_input(name, "cpu", 0, element, scale.shape, scale.ctypes.data)
        for bind, tensors, side in (
            (binding.bind_input, graph.inputs, step.inputs),
            (binding.bind_output, graph.outputs, step.outputs),
        ):
            for tensor, bound in zip(tensors, side, strict=False):  # scales come after
                array = self._arrays[bound.buffer]
                element = STORAGE[tensor.dtype][1]
                shape = (batch, *array.shape[1:])
                bind(tensor.name, "cpu", 0, element, shape, array.ctypes.data)
        name = step.stage.name

        def run() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
                raise StageFailed(f"stage {name} failed at batch {batch}: {err}") from err

        return run


def _allocate(
    regions: tuple[RegionSpec, ...], steps: tuple[Step, ...], slots: int
) -> dict[Buffer, NDArray[Any]]:
    """All regions (one or two buffers each) and all wires, as (slots, ...) arrays."""
    arrays: dict[Buffer, NDArray[Any]] = {}

    def allocate(buffer: Buffer, dtype: Dtype, shape: tuple[int, ...]) -> None:
        if buffer not in arrays:
            arrays[buffer] = np.zeros((slots, *shape), dtype=STORAGE[dtype][0])

    for region in regions:
        moves = not region.in_place and region.clock.kind is not ClockKind.CONSTANT
        for which in range(2 if moves else 1):
            allocate(Buffer(region.name, which), region.dtype, region.shape)
    for step in steps:
        for bound in (*step.inputs, *step.outputs):
            allocate(bound.buffer, bound.tensor.dtype, bound.tensor.row_shape)
    return arrays


def load_stages(bundle: Bundle) -> dict[str, ort.InferenceSession]:
    """Every stage of a tick that ONNX Runtime runs, by name; those of one twin share a session."""
    sessions: dict[str, ort.InferenceSession] = {}
    twins: dict[str, ort.InferenceSession] = {}
    for stage in bundle.manifest.stages:
        if stage.ring is not None:
            twin = ring_stage.as_twin(stage)
            if twin.graph not in twins:
                twins[twin.graph] = load_stage(bundle, twin)
            sessions[stage.name] = twins[twin.graph]
        elif stage.graph:
            sessions[stage.name] = load_stage(bundle, stage)
    return sessions


def load_stage(bundle: Bundle, stage: StageSpec) -> ort.InferenceSession:
    """One graph of the bundle. Raises `BundleError` when it is not what the manifest says."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # more, and a session's bits depend on the batch
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    path = bundle.file(stage.graph)
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
        raise BundleError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load stage {stage.name}: "
            f"{str(err).splitlines()[0]}"
        ) from err
    check_ports(session, path, stage)
    return session


def check_ports(session: ort.InferenceSession, path: Path, stage: StageSpec) -> None:
    """Raise `BundleError` unless the graph's inputs and outputs are those of the manifest."""
    for kind, wanted, found in (
        ("input", stage.inputs, session.get_inputs()),
        ("output", stage.outputs, session.get_outputs()),
    ):
        declared = {t.name: (STORAGE[t.dtype][2], tuple(t.shape)) for t in wanted}
        actual = {t.name: (t.type, tuple(t.shape)) for t in found}
        if declared != actual:
            odd = sorted(
                name
                for name in declared.keys() | actual.keys()
                if declared.get(name) != actual.get(name)
            )
            raise BundleError(
                f"{path}: {kind} {odd[0]} of stage {stage.name} is {actual.get(odd[0], 'missing')} "
                f"in the graph and {declared.get(odd[0], 'missing')} in bundle.json "
                f"({len(odd)} differ)"
            )
