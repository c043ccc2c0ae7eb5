"""Does an executor on this GPU answer what the bundle's golden data says? Asked before any call.

A plan or a kernel that is wrong on one GPU is not found anywhere else, and would be heard by
callers only. So at start-up the stages of a tick are run where calls will run them, on the sessions
of different ages that were recorded from torch in float32 (`bundle.GoldenSpec`), each alone, so
that the one that differs is named. Then the recorded call is run through whole ticks as they are
captured. What that may cost is bounded: full rings are drawn up to `DRAWN_VALUES`, and of stages
beyond that the session that has just begun is asked; a prompt's stages are asked when a primer is
opened.

Floats may be off by `TOLERANCE` of a tensor's largest value, as their stage's narrowest dtype
allows. What is counted must be equal. Of what is chosen, tokens and codes, a share may differ where
rounding turns close choices; words must be equal in float32 only.

Not here: whether golden data and bundle are right (`duplexbox export verify`), and time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines import cuda, tensor_file
from engines.bundle import NEXT, Bundle, BundleError, Dtype, GoldenSpec, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.golden import draw_reached, is_drawn, written_rows
from engines.ort_executor import STORAGE
from engines.program import Buffer, Step, plan_program

if TYPE_CHECKING:
    from engines.cuda_executor import CudaExecutor
    from engines.cuda_prefill import CudaPrimer

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

DRAWN_VALUES = 64 << 20
"""Of rings: a tenth of a second to draw and as long to copy."""

CALL_TICKS = 32
GREEDY = {"sampling.temperature": 0.0, "sampling.text_temperature": 0.0}
"""How the call was recorded."""

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
        executor.stream.synchronize()
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
            recorded = read(bundle, golden)
            answer = _Answer(executor, spec.opening, golden, found)
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
    recorded, stage, (age,) = read(executor.bundle, golden), primer.spec.prefill, golden.ages
    given = {
        t.name: packed(recorded[f"in.{t.name}"], t.dtype)
        for t in stage.inputs
        if t.name not in regions
    }
    rings = {
        t.name: packed(draw_reached(golden.seed, regions[t.name], 0, age), regions[t.name].dtype)
        for t in stage.inputs
        if t.name in regions
    }
    made = primer.answer(stage, given, rings, (age, golden.ticks))
    answer = _Answer(executor, stage, golden, found)
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
    recorded = read(bundle, spec)
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
                value = stored[row]
            elif age:
                value = draw_reached(spec.seed, region, row, age)
            elif region.in_place:
                continue  # no row of it is read before it is written
            else:
                value = np.full(region.shape, region.fill)
            state.put_region(bound.buffer, region, row, packed(value, region.dtype))
    executor.stage(stage.name, count)()
    executor.stream.synchronize()
    answer = _Answer(executor, stage, spec, found)
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
    if parted and _narrowest(manifest.stages) == "float32":
        raise ParityFailed(
            f"the recorded call of {bundle.path} goes otherwise on {_what(executor)}: {parted}; "
            f"none may in float32. Each stage alone answers as recorded, so it is in how a tick is "
            f"captured: duplexbox engines bench {bundle.path} --executor {executor.kind} --eager "
            f"runs them one by one. {_remedy(executor)}"
        )


@dataclass(slots=True)
class _Answer:
    """Compares what one stage gave with what was recorded."""

    executor: "CudaExecutor"
    stage: StageSpec
    spec: GoldenSpec
    found: Found
    dtype: Dtype = field(init=False)
    """The narrowest float of the stage: what its floats may be off by follows from it."""
    chooses: bool = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = _narrowest((self.stage,))
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
            f"stage {self.stage.name} does not answer on {_what(self.executor)} what the golden "
            f"data of {self.executor.bundle.path} says: output {name} {what}. "
            f"{_remedy(self.executor)}. To start all the same: [engine] check_golden = false"
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


def read(bundle: Bundle, spec: GoldenSpec) -> dict[str, Array]:
    """What was recorded of a stage, by "in." or "out." and the tensor's name."""
    return _read(bundle, spec.file)


def _read(bundle: Bundle, name: str) -> dict[str, Array]:
    path = bundle.file(name)
    try:
        held, _ = tensor_file.decode(memoryview(path.read_bytes()))
    except (OSError, tensor_file.TensorFileError) as err:
        raise BundleError(f"{path}: {err}. Copy the bundle again") from None
    return {key: tensor.array for key, tensor in held.items()}


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


def _narrowest(stages: Sequence[StageSpec]) -> Dtype:
    dtypes = {t.dtype for stage in stages for t in (*stage.inputs, *stage.outputs)}
    return max(dtypes & TOLERANCE.keys() or {"float32"}, key=lambda dtype: TOLERANCE[dtype])


def _counts(region: RegionSpec | None) -> bool:
    return region is not None and region.clock.kind is ClockKind.COUNTER


def _rows(ring: Array, region: RegionSpec, age: int) -> Array:
    return np.take(ring, written_rows(region, age), region.clock.axis)


def _reached_values(region: RegionSpec, age: int) -> int:
    if not age:
        return 0
    whole = int(np.prod(region.shape))
    if region.clock.kind is not ClockKind.RING:
        return whole
    return whole // region.clock.retain * region.clock.valid_rows(age)


def _what(executor: "CudaExecutor") -> str:
    return f"{executor.gpu} through {executor.runs_on}"


def _remedy(executor: "CudaExecutor") -> str:
    major, minor = executor.device.compute_capability
    names: Mapping[str, object] = {
        "bundle": executor.bundle.path,
        "target": f"sm_{major}{minor}",
    }
    return REMEDY[executor.kind].format_map(names)
