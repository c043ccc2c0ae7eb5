"""Run a bundle on one NVIDIA GPU: one graph replay per tick, state at addresses that never move.

Every stage of a tick runs in ONNX Runtime's CUDA provider on a stream of ours, captured from
outside (`tick_graph`) together with the copies in and out. There is one graph per exact batch, not
one per phase and batch: stages write the next value of small state into a second buffer, and the
last kernel of a tick copies it back over the first. That costs one small kernel and saves half of
the graphs. Rings are written in place: small ones lie whole in one allocation, large ones in the
`arena`, page by page.

    join    rows reset by one kernel, first pages there already if the slot was prepared
    step    map what is missing (nothing, if the arena keeps up) -> launch -> arena works while
            the device does -> wait
    move    one kernel for small state; rings that only `ring_attention` touches stay where they are
            and a table says so; of others one copy per ring, of valid rows only

Start-up refuses what cannot work, with the numbers: no GPU, an old driver, an ONNX Runtime without
CUDA, another box on the same GPU, more slots than fit at full retention. float32 stages compute in
float32: TF32 is off. Needs the cuda extra; imports neither torch nor onnx.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines import cuda, ring_stage
from engines.bundle import Bundle, BundleError, StageSpec
from engines.cuda import CudaFailed, DevicePtr
from engines.cuda_memory import HostArray, OutOfPages, page_bytes
from engines.cuda_sessions import CudaSessions
from engines.cuda_sessions import open_device as open_device  # also for who tests what starts
from engines.cuda_state import CudaState
from engines.executor import MemoryUse, NoRoom, check_setting
from engines.gpu import check_fits, check_room, hold_gpu
from engines.gpu import open_gpu as open_gpu  # also for `tensorrt_executor`
from engines.kernel_stages import KernelStages, plan_kernels
from engines.kernels.tick import NoiseCall, TickKernels
from engines.layout import plan_layout
from engines.ort_executor import StageFailed
from engines.program import Buffer, Step, plan_program
from engines.ring_launch import RingLauncher
from engines.tick_graph import Part, TickGraphs, run_eagerly

if TYPE_CHECKING:
    from engines.cuda_prefill import CudaPrimer

LOOK_TICKS = 12
"""How often free memory is looked at: about once a second."""
KEEP_FREE_BYTES = 256 << 20
"""Left alone when sessions are counted that would fit: libraries take some in passing."""
KERNELS = Path.home() / ".cache" / "duplexbox" / "kernels"


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How to run; the defaults serve calls, the rest is for tests and measurements."""

    ordinal: int = 0
    batches: Sequence[int] | None = None
    """Batches to capture; None: 1..slots."""
    graphs: bool = True
    """False: every tick runs eagerly, stage by stage."""
    on_demand: bool = True
    """False: all pages are mapped from the start."""
    poison: int = 0
    """Byte that new pages hold: 255 makes every unwritten value NaN."""
    exclusive: bool = True
    """Refuse a GPU on which another box runs."""
    provider: Mapping[str, str] | None = None
    """Further options of the CUDA provider."""
    kernels: Path = KERNELS
    """Where compiled kernels are kept."""
    kernel_stages: bool = True
    """False: stages that name a kernel of ours run as their graphs all the same."""


class CudaExecutor:
    """`executor.Executor` on a GPU. One thread at a time uses it."""

    runs_on = "ONNX Runtime CUDA"
    """What computes the stages, for reports."""
    kind = "cuda"
    """What `--executor` calls it."""

    def __init__(self, bundle: Bundle, slots: int, options: CudaOptions | None = None) -> None:
        """Load every stage, lay out state for ``slots`` sessions and capture every batch.

        Raises `BundleError` when a graph does not load or is not what the manifest says,
        `NotReady` when the machine is at fault, `tick_graph.CaptureFailed`.
        """
        self.options = options or CudaOptions()
        manifest = bundle.manifest
        if not 1 <= slots <= manifest.largest_batch:
            raise BundleError(
                f"{slots} slots were asked for and the batch profiles of {bundle.path} are "
                f"1..{manifest.largest_batch}. Build more: duplexbox export build --batches "
                f"1-{max(slots, 1)}"
            )
        self.bundle, self.slots = bundle, slots
        self._closing = contextlib.ExitStack()
        try:
            self._open(slots)
        except BaseException:
            self._closing.close()
            raise

    def _open(self, slots: int) -> None:
        options, manifest = self.options, self.bundle.manifest
        self.device = self._open_device()
        self.gpu = self.device.name
        self._thread = threading.get_ident()
        self._closing.callback(self.device.close)
        if options.exclusive:
            self._closing.callback(hold_gpu(self.device).close)
        self._program = plan_program(manifest)
        self._regions = {region.name: region for region in manifest.regions}
        self.layout = plan_layout(manifest, self._program, slots, page_bytes(options.ordinal))
        self._weights_bytes = sum(
            spec.bytes for name, spec in manifest.files.items() if "weights/" in name
        )
        plan = plan_kernels(manifest.stages if self._takes_kernels() else (), slots)
        check_fits(self.device, self.layout, self._weights_bytes + plan.scratch_bytes)
        self.stream = cuda.Stream()
        self._closing.callback(self.stream.close)
        major, minor = self.device.compute_capability
        self._kernels = TickKernels(f"sm_{major}{minor}", options.kernels)
        self._closing.callback(self._kernels.close)
        self.state = CudaState(
            manifest,
            self._program,
            self.layout,
            self._kernels,
            self.stream,
            ordinal=options.ordinal,
            on_demand=options.on_demand,
            poison=options.poison,
        )
        self._closing.callback(self.state.close)
        self.arena, self._address = self.state.arena, self.state.address
        self._rings = RingLauncher(
            manifest.stages,
            slots,
            self.device,
            options.kernels,
            lambda stage: ring_stage.read_scales(self.bundle, stage),
        )
        self._closing.callback(self._rings.close)
        self._kernel_stages = KernelStages(self.bundle, plan, self.device, options.kernels)
        self._closing.callback(self._kernel_stages.close)
        self._by_kernels = {stage.name for stage in plan.stages}
        self._ports()
        self._open_stages()
        self.device.synchronize()  # libraries load on streams of their own
        self._graphs = TickGraphs(self.stream, self.kind)
        self._closing.callback(self._graphs.close)
        self._parts: dict[int, list[Part]] = {}
        self._closing.callback(self.device.synchronize)  # before anything is given back
        for slot in range(slots):
            self.join(slot, {})
        self.arena.map_all_due()  # warming up writes a few rows
        for batch in options.batches or range(1, slots + 1):
            self._prepare(batch)
        for slot in range(slots):
            self.join(slot, {})
        self.device.synchronize()
        self._full_bytes = self.layout.full_bytes(slots)
        self._session_bytes = -(-(self._full_bytes - self.layout.whole_bytes) // slots)
        self._total_bytes, self._free_bytes = self.device.total_bytes, self.device.free_bytes

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        """See `executor.Executor.join`."""
        self._begin(slot, settings, ticks=0)

    def move(self, source: int, target: int) -> None:
        """See `executor.Executor.move`. Rings in places stay; of others valid rows are copied."""
        assert 0 <= source < self.slots, (source, self.slots)
        assert 0 <= target < self.slots, (target, self.slots)
        if source == target:
            return
        self._enter()
        self.arena.move(source, target)
        self.state.move(source, target)
        self._tell_places()

    def step(self, batch: int) -> None:
        """See `executor.Executor.step`. Raises `StageFailed`.

        A slot below ``batch`` that nobody joined since it was last left out begins anew.
        """
        self._enter()
        if batch == 0:
            self.arena.before_tick(0)
            self.arena.after_launch(0)
            return
        for slot in self.arena.vacant(batch):
            self.join(slot, {})
        try:
            self.arena.before_tick(batch)
            if self.options.graphs:
                self._graphs.replay(batch)
            else:
                run_eagerly(self._parts[batch])
            self.arena.after_launch(batch, self.stream.is_idle)
            if self.arena.tick % LOOK_TICKS == 0:
                self._free_bytes = self.device.free_bytes  # while the device is busy
            self.stream.synchronize()
        except CudaFailed as err:
            raise StageFailed(f"the tick failed at batch {batch}: {err}") from err
        except OutOfPages as err:
            raise StageFailed(
                f"the GPU has no memory for rows of this tick ({err}): another process took it "
                f"after start-up. nvidia-smi lists it"
            ) from err

    def stage_names(self) -> tuple[str, ...]:
        """Parts of a tick in order: copies in, the stages, state moved on, copies out."""
        stages = (stage.name for stage in self.bundle.manifest.stages)
        return ("copy_in", *stages, "state", "copy_out")

    def step_timed(
        self, batch: int, now_ns: Callable[[], int], spent_ns: NDArray[np.int64]
    ) -> None:
        """`step`, noting in ``spent_ns`` (parts,) the device time of each part.

        Captures a graph with time stamps on first use; ``now_ns`` is used when there are none.
        """
        self._enter()
        self.arena.before_tick(batch)
        if self.options.graphs:
            if not self._graphs.has_timed(batch):
                self._graphs.capture_timed(batch, self._bind(batch))
            self._graphs.replay_timed(batch, spent_ns)
        else:
            before = now_ns()
            for index, part in enumerate(self._parts[batch]):
                part.enqueue()
                self.stream.synchronize()
                after = now_ns()
                spent_ns[index] = after - before
                before = after
        self.arena.after_launch(batch)

    def age(self, slot: int, ticks: int) -> None:
        """See `executor.Ages.age`. Also maps the pages of that age, and fills rings with noise."""
        self._begin(slot, {}, ticks)
        self.state.make_old(slot, ticks)
        self.stream.synchronize()

    def memory(self) -> MemoryUse:
        """See `executor.OnDevice.memory`. The thread that ticks sees what is so now."""
        if threading.get_ident() == self._thread:
            self._free_bytes = self.device.free_bytes
        committed = self.state.range.committed_bytes
        return MemoryUse(
            weights=self._weights_bytes,
            whole=self.layout.whole_bytes,
            committed=committed,
            reserved=self.layout.growing_bytes,
            full=self._full_bytes,
            device_used=self._total_bytes - self._free_bytes,
            device_total=self._total_bytes,
            session=self._session_bytes,
            for_sessions=committed + max(0, self._free_bytes - KEEP_FREE_BYTES),
            short_in_ticks=self.arena.short_in_ticks(),
        )

    def stage(self, name: str, batch: int) -> Callable[[], None]:
        """What enqueues one stage on `stream`, without a graph; for tests and measurements."""
        (step,) = (step for step in self._program.steps[0] if step.stage.name == name)
        return self._bind_step(step, batch)

    def bind_eager(self, batches: Iterable[int]) -> None:
        """Make ticks of ``batches`` runnable without their graphs; for tests of graphs."""
        for batch in batches:
            self._parts[batch] = self._bind(batch)

    def nodes(self, batch: int) -> int:
        """Kernels, copies and fills in the graph of ``batch`` sessions."""
        return self._graphs.nodes(batch)

    def region(self, name: str, slot: int) -> NDArray[Any]:
        """A copy of one session's region, for tests. bfloat16 comes as uint16."""
        return self.state.region(name, slot)

    def wire_address(self, name: str) -> DevicePtr:
        """Where slot 0 of a tensor lies that one stage of a tick hands to another."""
        return self._address(Buffer(name, 0))

    def close(self) -> None:
        """See `executor.Executor.close`."""
        self._enter()
        self._parts = {}
        self._closing.close()

    def _enter(self) -> None:
        """Make the device current on this thread if the last call came from another."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.device.make_current()
            self._thread = thread

    def _begin(self, slot: int, settings: Mapping[str, float], ticks: int) -> None:
        assert 0 <= slot < self.slots, (slot, self.slots)
        self._enter()
        for name, value in settings.items():
            check_setting(self._regions, name, value)
        try:
            self.arena.begin(slot, ticks)
        except OutOfPages as err:
            self.arena.abandon(slot)
            raise NoRoom(f"the GPU has no memory for a session in slot {slot}: {err}") from None
        self.state.begin(slot)
        for name, value in settings.items():
            self.state.set(name, slot, value)

    def _tell_places(self) -> None:
        if self.layout.has_places:
            self._rings.place(self.arena.places, self.stream)

    def park(self, slot: int, ticks: int) -> None:
        """Have memory for a prompt of ``ticks`` rows in ``slot``, which no tick steps."""
        self._enter()
        try:
            self.arena.park(slot, ticks)
        except OutOfPages as err:
            self.arena.abandon(slot)
            raise NoRoom(f"the GPU has no memory for a prompt in slot {slot}: {err}") from None

    def seat(self, source: int, target: int, ticks: int) -> None:
        """Rings parked in ``source`` become ``target``'s; the rest of its state begins anew."""
        self._enter()
        try:
            self.arena.seat(source, target, ticks)
        except OutOfPages as err:
            for slot in (source, target):
                self.arena.abandon(slot)
            raise NoRoom(f"the GPU has no memory for a session in slot {target}: {err}") from None
        if source != target:
            self.state.move(source, target)
            self._tell_places()
        self.state.begin_beside_rings(target)

    def primer(self) -> "CudaPrimer":
        """See `executor.Primes.primer`. Raises `NotReady` if the GPU has no room for it."""
        from engines.cuda_prefill import CudaPrimer, prompt_bytes  # it is built on this file

        self._enter()
        spec = self.bundle.manifest.prompt
        if spec is not None:
            needed = prompt_bytes(spec, self._regions, self._weights_bytes)
            check_room(self.device, needed, "what feeds prompts")
        return CudaPrimer(self)

    def room(self, nbytes: int) -> DevicePtr:
        """Device memory full of zeros, given back by `close`."""
        pointer = cuda.allocate(nbytes)
        self._closing.callback(cuda.release, pointer)
        cuda.fill_bytes(pointer, 0, nbytes)
        return pointer

    def _ports(self) -> None:
        """Page-locked arrays the caller reads and writes."""
        manifest = self.bundle.manifest
        samples = manifest.timing.samples_per_frame
        self._pcm_in = self._host((self.slots, samples), np.float32)
        self._pcm_out = self._host((self.slots, samples), np.float32)
        self._text = self._host((self.slots,), np.int64)
        self._valid = self._host((self.slots,), np.bool_)
        self._valid.array[...] = True
        self.audio_in: NDArray[np.float32] = self._pcm_in.array
        self.audio_out: NDArray[np.float32] = self._pcm_out.array
        self.text: NDArray[np.int64] = self._text.array
        self.valid: NDArray[np.bool_] = self._valid.array

    def _host(self, shape: tuple[int, ...], dtype: type[np.generic]) -> HostArray:
        host = HostArray(shape, dtype)
        self._closing.callback(host.close)
        return host

    def _open_device(self) -> cuda.Device:
        """The GPU, checked for what runs the stages; `tensorrt_executor` asks for less."""
        return open_device(self.options.ordinal)

    def _takes_kernels(self) -> bool:
        """Whether kernels of ours stand in for graphs; `tensorrt_executor` has plans of them."""
        return self.options.kernel_stages

    def _open_stages(self) -> None:
        """Load every graph that no kernel stands in for; `tensorrt_executor` loads plans."""
        self._sessions = CudaSessions(
            self.bundle,
            self.gpu,
            self.stream,
            ordinal=self.options.ordinal,
            provider=self.options.provider or {},
        )
        self._closing.callback(self._sessions.close)
        self._sessions.open(
            stage for stage in self.bundle.manifest.stages if stage.name not in self._by_kernels
        )

    def load(self, stage: StageSpec) -> ort.InferenceSession:
        """A session of one graph on this GPU. Raises `BundleError`."""
        return self._sessions.load(stage)

    def _prepare(self, batch: int) -> None:
        """Bind ``batch``, and capture it unless ticks run eagerly."""
        parts = self._bind(batch)
        for slot in range(batch):
            self.state.begin(slot)
        if self.options.graphs:
            self._graphs.capture(batch, parts)
        else:
            self._parts[batch] = parts

    def _bind(self, batch: int) -> list[Part]:
        manifest, stream = self.bundle.manifest, self.stream
        frame_bytes = manifest.timing.samples_per_frame * 4
        hear = self._address(Buffer(manifest.audio.input, 0))
        out = [
            (self._pcm_out, manifest.audio.output, frame_bytes),
            (self._text, manifest.text.output, 8),
        ]
        if manifest.audio.valid:
            out.append((self._valid, manifest.audio.valid, 1))
        returns = [(host, self._address(Buffer(name, 0)), n * batch) for host, name, n in out]

        def copy_out() -> None:
            for host, source, nbytes in returns:
                host.from_device(source, nbytes, stream)

        return [
            Part("copy_in", lambda: self._pcm_in.to_device(hear, batch * frame_bytes, stream)),
            *(Part(s.stage.name, self._bind_step(s, batch)) for s in self._program.steps[0]),
            Part("state", lambda: self.state.move_on(batch)),
            Part("copy_out", copy_out),
        ]

    def _bind_step(self, step: Step, batch: int) -> Callable[[], None]:
        if step.stage.ring is not None:
            return self._rings.bind(step, batch, self._address, self.stream, self.layout.ring_rows)
        if step.stage.builtin:
            seed, frame = (self._address(bound.buffer) for bound in step.inputs)
            (noise,) = step.outputs
            rows, candidates = noise.tensor.row_shape
            call = NoiseCall(seed, frame, self._address(noise.buffer), batch, rows, candidates)
            return lambda: self._kernels.noise(call, self.stream)
        if step.stage.name in self._by_kernels:
            return self._kernel_stages.bind(step, batch, self._address, self.stream)
        return self._bind_graph(step, batch)

    def _bind_graph(self, step: Step, batch: int) -> Callable[[], None]:
        """What enqueues a stage that is a graph, for exactly ``batch`` sessions."""
        return self._sessions.bind(step, batch, self._address)
