"""Does an executor on this GPU answer what the bundle's golden data says? Asked before any call.

A plan or a kernel that is wrong on one GPU is not found anywhere else, and would be heard by
callers only. So at start-up the stages of a tick are run where calls will run them, on the sessions
of different ages that were recorded from torch in float32 (`bundle.GoldenSpec`), each alone, so
that the one that differs is named. Then the recorded call is run through whole ticks as they are
captured. What that may cost is bounded: full rings are drawn up to `DRAWN_VALUES`, and of stages
beyond that the session that has just begun is asked; a prompt's stages are asked when a primer is
opened.

Words must be equal in float32 only; how near the rest must be is said in `answers`. Not here:
whether golden data and bundle are right (`duplexbox export verify`), and time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines import cuda, tensor_file
from engines.answers import Answer, Asked, Found, ParityFailed, narrowest, packed
from engines.bundle import NEXT, Bundle, BundleError, Dtype, GoldenSpec, RegionSpec
from engines.clocks import ClockKind
from engines.golden import is_drawn, stored_reached, written_rows
from engines.ort_executor import STORAGE
from engines.program import Buffer, Step, plan_program

if TYPE_CHECKING:
    from engines.cuda_executor import CudaExecutor
    from engines.cuda_prefill import CudaPrimer

Array = NDArray[Any]

DRAWN_VALUES = 64 << 20
"""Of rings: a tenth of a second to draw and as long to copy."""

CALL_TICKS = 32
GREEDY = {"sampling.temperature": 0.0, "sampling.text_temperature": 0.0}
"""How the call was recorded."""


@dataclass(slots=True)
class _Budget:
    values: int = DRAWN_VALUES

    def sessions(self, regions: Sequence[RegionSpec], spec: GoldenSpec, most: int) -> int:
        """How many of a stage's sessions can be drawn, the first of which is always young."""
        for count, age in enumerate(spec.ages[:most]):
            needed = sum(_reached_values(region, age) for region in regions)
            if count and needed > self.values:
                return count
            self.values -= needed
        return min(most, len(spec.ages))


def check(executor: "CudaExecutor") -> Found:
    """Run golden data through ``executor``, whose slots are then empty again.

    Raises `ParityFailed` naming the first stage that differs, with the numbers and the remedy.
    """
    bundle, found = executor.bundle, Found()
    manifest = bundle.manifest
    ticking = {step.stage.name: step for step in plan_program(manifest).steps[0] if _asks(step)}
    specs = [spec for spec in manifest.golden if spec.stage in ticking]
    if not specs:
        return found
    slots = min(executor.slots, max(len(spec.ages) for spec in specs))
    try:
        for slot in range(slots):
            executor.age(slot, max(spec.ages[slot] for spec in specs if slot < len(spec.ages)))
        budget = _Budget()
        for spec in specs:
            _check_stage(executor, ticking[spec.stage], spec, budget, found)
        if manifest.golden_call:
            _check_call(executor, found)
    finally:
        for slot in range(slots):
            executor.join(slot, {})
    return found


def check_prompt(executor: "CudaExecutor", primer: "CudaPrimer") -> Found:
    """Run golden data of a prompt's stages through ``primer``, before anything was fed.

    Raises `ParityFailed`.
    """
    bundle, found = executor.bundle, Found()
    spec, regions = primer.spec, {region.name: region for region in bundle.manifest.regions}
    for golden in bundle.manifest.golden:
        if golden.stage == spec.prefill.name:
            _check_prefill(executor, primer, golden, regions, found)
        elif golden.stage == spec.opening.name:
            recorded = _read(bundle, golden.file)
            answer = Answer(_asked(executor), spec.opening, golden, found)
            rows = [
                primer.answer(
                    spec.opening,
                    {
                        t.name: packed(recorded[f"in.{t.name}"][row : row + 1], t.dtype)
                        for t in spec.opening.inputs
                    },
                    {},
                    (0, 0),
                )
                for row in range(len(golden.ages))
            ]
            for t in spec.opening.outputs:
                got = np.concatenate([row[t.name] for row in rows])
                region = regions.get(t.name.removesuffix(NEXT))
                answer.compare(t.name, t.dtype, got, recorded, region)
            found.stages, found.full = found.stages + 1, found.full + 1
    return found


def _check_prefill(
    executor: "CudaExecutor",
    primer: "CudaPrimer",
    golden: GoldenSpec,
    regions: Mapping[str, RegionSpec],
    found: Found,
) -> None:
    """Rows of one session's prompt, behind as many as its age."""
    recorded, stage, (age,) = _read(executor.bundle, golden.file), primer.spec.prefill, golden.ages
    given = {
        t.name: packed(recorded[f"in.{t.name}"], t.dtype)
        for t in stage.inputs
        if t.name not in regions
    }
    rings = {
        t.name: _drawn(golden, regions[t.name], 0, age) for t in stage.inputs if t.name in regions
    }
    made = primer.answer(stage, given, rings, (age, golden.ticks))
    answer = Answer(_asked(executor), stage, golden, found)
    for t in stage.outputs:
        region = regions.get(t.name.removesuffix(NEXT))
        got = made[t.name] if region is None else made[t.name][None]
        answer.compare(t.name, t.dtype, got, recorded, region)
    found.stages, found.full = found.stages + 1, found.full + 1


def _asks(step: Step) -> bool:
    return bool(step.stage.graph or step.stage.ring)


def _check_stage(
    executor: "CudaExecutor", step: Step, spec: GoldenSpec, budget: _Budget, found: Found
) -> None:
    bundle, stage = executor.bundle, step.stage
    recorded = _read(bundle, spec.file)
    regions = {region.name: region for region in bundle.manifest.regions}
    drawn = [
        regions[tensor.name]
        for tensor in stage.inputs
        if tensor.name in regions and f"in.{tensor.name}" not in recorded
    ]
    count = budget.sessions(drawn, spec, min(executor.slots, len(spec.ages)))
    state = _State(executor)
    for bound in step.inputs:
        region, stored = regions.get(bound.tensor.name), recorded.get(f"in.{bound.tensor.name}")
        if region is None:
            assert stored is not None, (stage.name, bound.tensor.name)
            state.put(bound.buffer, packed(stored[:count], bound.tensor.dtype))
            continue
        for row, age in enumerate(spec.ages[:count]):
            if stored is not None:
                value = packed(stored[row], region.dtype)
            elif age:
                value = _drawn(spec, region, row, age)
            elif region.in_place:
                continue  # no row of it is read before it is written
            else:
                value = packed(np.full(region.shape, region.fill), region.dtype)
            state.put_region(bound.buffer, region, row, value)
    executor.stage(stage.name, count)()
    executor.stream.synchronize()
    answer = Answer(_asked(executor), stage, spec, found)
    for bound in step.outputs:
        name, region = bound.tensor.name, regions.get(bound.tensor.name.removesuffix(NEXT))
        shape = (count, *bound.tensor.row_shape)
        if region is not None and region.in_place:
            pairs = enumerate(spec.ages[:count])
            got = np.stack([state.written(bound.buffer, region, row, age) for row, age in pairs])
        else:
            got = state.get(bound.buffer, bound.tensor.dtype, shape)
            if region is not None and region.clock.kind is ClockKind.RING and is_drawn(region):
                both = zip(got, spec.ages[:count], strict=True)
                got = np.stack([_rows(ring, region, age) for ring, age in both])
        answer.compare(name, bound.tensor.dtype, got, recorded, region)
    found.stages += 1
    found.full += count == len(spec.ages)


def _check_call(executor: "CudaExecutor", found: Found) -> None:
    bundle = executor.bundle
    manifest = bundle.manifest
    recorded = _read(bundle, manifest.golden_call)
    pcm = recorded[manifest.audio.input][:CALL_TICKS]
    wires = {tensor.name: tensor for stage in manifest.stages for tensor in stage.outputs}
    told = [name for name in recorded if name in wires and wires[name].dtype == "int64"]
    settable = {region.name for region in manifest.regions if region.bounds}
    executor.join(0, {name: value for name, value in GREEDY.items() if name in settable})
    parted = ""
    for tick, frame in enumerate(pcm):
        executor.audio_in[0] = frame.reshape(-1)
        executor.step(1)
        found.ticks += 1
        for name in told:
            place = executor.wire_address(name)
            expected = recorded[name][tick]
            got = np.frombuffer(cuda.read_device(place, expected.nbytes), np.int64)
            if not parted and not np.array_equal(got, expected.reshape(-1)):
                odd = int(np.count_nonzero(got != expected.reshape(-1)))
                parted = f"{odd} of {got.size} {name} differ at tick {tick}"
        found.same_ticks += not parted
    asked = _asked(executor)
    if parted and narrowest(manifest.stages) == "float32":
        raise ParityFailed(
            f"the recorded call of {bundle.path} goes otherwise on {asked.what}: {parted}; "
            f"none may in float32. Each stage alone answers as recorded, so it is in how a tick is "
            f"captured: duplexbox engines bench {bundle.path} --executor {executor.kind} --eager "
            f"runs them one by one. {asked.remedy}"
        )


class _State:
    """Sessions' tensors where the executor has them, while nothing runs there."""

    def __init__(self, executor: "CudaExecutor") -> None:
        self._state = executor.state

    def put(self, buffer: Buffer, rows: Array) -> None:
        """Write (sessions, ...) from slot 0 on."""
        cuda.write_device_from(self._state.address(buffer), rows.ctypes.data, rows.nbytes)

    def put_region(self, buffer: Buffer, region: RegionSpec, slot: int, value: Array) -> None:
        """Write the whole of one session's region, or the first rows of a ring."""
        done, rows = 0, value.shape[region.clock.axis] if region.in_place else 0
        for address, nbytes in self._spans(buffer, region, slot, 0, rows):
            cuda.write_device_from(address, value.ctypes.data + done, nbytes)
            done += nbytes

    def get(self, buffer: Buffer, dtype: Dtype, shape: tuple[int, ...]) -> Array:
        """Read (sessions, ...) from slot 0 on, as it is stored."""
        storage = np.dtype(STORAGE[dtype][0])
        nbytes = int(np.prod(shape)) * storage.itemsize
        raw = cuda.read_device(self._state.address(buffer), nbytes)
        return np.frombuffer(raw, storage).reshape(shape)

    def written(self, buffer: Buffer, region: RegionSpec, slot: int, age: int) -> Array:
        """Rows of a ring that the tick after ``age`` wrote where it lies."""
        raw = bytearray()
        for at in written_rows(region, age):
            for address, nbytes in self._spans(buffer, region, slot, at, 1):
                raw += cuda.read_device(address, nbytes)
        axis = region.clock.axis
        shape = (*region.shape[:axis], -1, *region.shape[axis + 1 :])
        return np.frombuffer(raw, STORAGE[region.dtype][0]).reshape(shape)

    def _spans(
        self, buffer: Buffer, region: RegionSpec, slot: int, first: int, rows: int
    ) -> Iterator[tuple[cuda.DevicePtr, int]]:
        """(address, bytes) of rows of a ring in place, or of the whole of another region."""
        if not region.in_place:
            yield self._state.address(buffer, slot), region.whole_bytes
            return
        assert all(length == 1 for length in region.shape[: region.clock.axis]), region
        yield from self._state.row_spans(region.name, slot, first, rows)


def _read(bundle: Bundle, name: str) -> dict[str, Array]:
    """What was recorded: of a stage by "in." or "out." and the tensor's name."""
    path = bundle.file(name)
    try:
        held, _ = tensor_file.decode(memoryview(path.read_bytes()))
    except (OSError, tensor_file.TensorFileError) as err:
        raise BundleError(f"{path}: {err}. Copy the bundle again") from None
    return {key: tensor.array for key, tensor in held.items()}


def _drawn(spec: GoldenSpec, region: RegionSpec, row: int, age: int) -> Array:
    """What session ``row`` has reached of a region, as it is stored."""
    return stored_reached(spec.seed, region, row, age, lambda x: packed(x, region.dtype))


def _rows(ring: Array, region: RegionSpec, age: int) -> Array:
    return np.take(ring, written_rows(region, age), region.clock.axis)


def _reached_values(region: RegionSpec, age: int) -> int:
    if not age:
        return 0
    whole = int(np.prod(region.shape))
    if region.clock.kind is not ClockKind.RING:
        return whole
    return whole // region.clock.retain * region.clock.valid_rows(age)


def _asked(executor: "CudaExecutor") -> Asked:
    major, minor = executor.device.compute_capability
    what = f"{executor.gpu} through {executor.runs_on}"
    return Asked(executor.bundle.path, executor.kind, what, f"sm_{major}{minor}")
