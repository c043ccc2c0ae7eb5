"""Feed prompts on a GPU, in slots of a `CudaExecutor` that no tick steps, between two ticks.

Prefill is a library's graph and wants each ring as one tensor; the session's rings lie as the
arena has them. So there is one set of whole rings beside the arena, for whoever is fed: rows a
chunk has written are copied to the session's own place at once, and when somebody else is fed next
his rows are copied in first. It costs one session's memory at full retention, and with ONNX Runtime
the language model's weights a second time, because the tick's stages and this graph cannot share
them.

Small state of a slot beyond the batch is not touched by ticks, but belongs to nobody; what a
prompt leaves is handed out by `open` and written by `settle`, as on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines import cuda
from engines.bundle import NEXT, PromptSpec, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.cuda import DevicePtr
from engines.cuda_memory import write_ordered
from engines.executor import check_setting
from engines.ort_executor import STORAGE
from engines.ort_prefill import PromptGraphs, Rings, rings_of
from engines.prefill import Prompt

if TYPE_CHECKING:
    from engines.cuda_executor import CudaExecutor


class CudaParking:
    """`prefill.Parking` on a GPU. The executor's own thread uses it."""

    def __init__(self, executor: "CudaExecutor") -> None:
        self._executor = executor
        self._regions = {region.name: region for region in executor.bundle.manifest.regions}

    def clear(self, slot: int) -> None:
        """See `prefill.Parking.clear`: rows beyond what is written are never read."""
        self._executor.park(slot, 1)

    def leave(self, slot: int) -> None:
        """See `prefill.Parking.leave`."""
        self._executor.arena.leave(slot)

    def settle(
        self,
        source: int,
        target: int,
        settings: Mapping[str, float],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        """See `prefill.Parking.settle`."""
        for name, value in settings.items():
            check_setting(self._regions, name, value)
        self._executor.seat(source, target, self._ticks(values))
        for name, value in settings.items():
            self._put(name, target, np.array(value))
        for name, array in values.items():
            self._put(name, target, array)

    def read(self, slot: int, name: str, first: int = 0, rows: int | None = None) -> NDArray[Any]:
        """See `prefill.Parking.read`."""
        region = self._regions[name]
        storage = STORAGE[region.dtype][0]
        self._executor.stream.synchronize()
        if rows is None or not _by_rows(region):
            place = self._executor.state.whole_row(name, slot)
            whole = np.frombuffer(cuda.read_device(place, region.whole_bytes), storage)
            whole = whole.reshape(region.shape)
            return np.array(whole if rows is None else whole[_span(region, first, rows)])
        spans = self._executor.state.row_spans(name, slot, first, rows)
        raw = bytearray().join(cuda.read_device(address, nbytes) for address, nbytes in spans)
        return np.frombuffer(raw, storage).reshape(_rows_shape(region, rows))

    def write(self, slot: int, name: str, first: int, rows: NDArray[Any]) -> None:
        """See `prefill.Parking.write`."""
        region = self._regions[name]
        assert region.in_place, name
        length = rows.shape[region.clock.axis]
        if not _by_rows(region):
            whole = self.read(slot, name)
            whole[_span(region, first, length)] = rows
            rows, first, length = whole, 0, region.clock.retain
        self._executor.park(slot, _ticks_of(region, first + length))
        raw, done = np.ascontiguousarray(rows).tobytes(), 0
        for address, nbytes in self._executor.state.row_spans(name, slot, first, length):
            write_ordered(address, raw[done : done + nbytes], self._executor.stream)
            done += nbytes
        self._executor.stream.synchronize()

    def _ticks(self, values: Mapping[str, NDArray[Any]]) -> int:
        """Age of a session with these counters: what its rings have come to."""
        ages = [0]
        for name, value in values.items():
            clock = self._regions[name].clock
            if clock.kind is ClockKind.COUNTER:
                ages.append(int(int(np.max(value)) // clock.rows_per_tick))
        return max(ages)

    def _put(self, name: str, slot: int, value: NDArray[Any]) -> None:
        region = self._regions[name]
        raw = np.broadcast_to(value.astype(STORAGE[region.dtype][0]), region.shape).tobytes()
        write_ordered(self._executor.state.whole_row(name, slot), raw, self._executor.stream)


class CudaPrimer(CudaParking):
    """`prefill.Primer` on a GPU. The executor's own thread uses it."""

    def __init__(
        self, executor: "CudaExecutor", graphs: Callable[[Rings], PromptGraphs] | None = None
    ) -> None:
        """Load both stages. Raises `BundleError` when the bundle's calls have no prompt.

        graphs: what runs them on rings that lie where it is told; None: ONNX Runtime.
        """
        super().__init__(executor)
        if graphs is None:
            self._graphs = PromptGraphs(executor.bundle, executor.load, self._ring)
        else:
            self._graphs = graphs(self._ring)
        self.spec: PromptSpec = self._graphs.spec
        self._rings = rings_of(self.spec, self._regions)
        self._whole: dict[str, DevicePtr] = {}
        for ring in self._rings:
            self._whole[ring.name] = executor.room(ring.whole_bytes)
        self._inside: tuple[int, int] | None = None
        """Slot whose rows lie in the whole rings, and how many."""

    @property
    def retain(self) -> int:
        """See `prefill.Primer.retain`."""
        return self._graphs.retain

    def clear(self, slot: int) -> None:
        """See `prefill.Parking.clear`."""
        self._forget(slot)
        super().clear(slot)

    def leave(self, slot: int) -> None:
        """See `prefill.Parking.leave`."""
        self._forget(slot)
        super().leave(slot)

    def write(self, slot: int, name: str, first: int, rows: NDArray[Any]) -> None:
        """See `prefill.Parking.write`."""
        self._forget(slot)
        super().write(slot, name, first, rows)

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        """See `prefill.Primer.feed`."""
        stream, last = self._executor.stream, first + rows
        self._executor.park(slot, last)
        if self._inside != (slot, first):
            self._copy(slot, 0, min(first, self.retain), inwards=True)
        self._inside = None  # until it is true again
        self._graphs.feed(slot, prompt, first, rows)
        self._copy(slot, first % self.retain, rows, inwards=False)
        stream.synchronize()
        self._inside = (slot, last)

    def open(
        self, slot: int, prompt: Prompt, settings: Mapping[str, float]
    ) -> dict[str, NDArray[Any]]:
        """See `prefill.Primer.open`."""
        self.feed(slot, prompt, prompt.shared_rows, 1)
        return self._graphs.open(slot, prompt, settings)

    def answer(
        self,
        stage: StageSpec,
        given: Mapping[str, NDArray[Any]],
        rings: Mapping[str, NDArray[Any]],
        span: tuple[int, int],
    ) -> dict[str, NDArray[Any]]:
        """One run of a prompt's stage for golden data: what it made, and of rings the rows in
        ``span`` (first, rows). rings: what their first rows held before, as they are stored.
        """
        self._inside = None
        for name, rows in rings.items():
            cuda.write_device_from(self._whole[name], rows.ctypes.data, rows.nbytes)
        found = self._graphs.answer(stage, given)
        first, count = span
        for name in rings:
            region = self._regions[name]
            row_bytes = region.whole_bytes // region.clock.retain
            place = DevicePtr(self._whole[name] + first * row_bytes)
            raw = cuda.read_device(place, count * row_bytes)
            held = np.frombuffer(raw, STORAGE[region.dtype][0])
            found[name + NEXT] = held.reshape(_rows_shape(region, count))
        return found

    def _forget(self, slot: int) -> None:
        if self._inside is not None and self._inside[0] == slot:
            self._inside = None

    def _copy(self, slot: int, first: int, rows: int, *, inwards: bool) -> None:
        """Rows between the slot's rings and the whole ones."""
        for ring in self._rings:
            at = self._whole[ring.name] + first * (ring.whole_bytes // ring.clock.retain)
            for address, nbytes in self._executor.state.row_spans(ring.name, slot, first, rows):
                target, source = (at, address) if inwards else (address, at)
                cuda.copy_device(
                    DevicePtr(target), DevicePtr(source), nbytes, self._executor.stream
                )
                at += nbytes

    def _ring(self, name: str, slot: int) -> tuple[str, int, int]:
        from engines.cuda_sessions import MEMORY

        return MEMORY, self._executor.options.ordinal, int(self._whole[name])


def prompt_bytes(spec: PromptSpec, regions: Mapping[str, RegionSpec], weights: int) -> int:
    """Device memory that feeding prompts takes beside the tick's, at the most.

    weights: of the whole bundle; the model that is fed is nearly all of it.
    """
    return weights + sum(ring.whole_bytes for ring in rings_of(spec, regions))


def _by_rows(region: RegionSpec) -> bool:
    """Whether rows lie one after the other."""
    axis = region.clock.axis
    return region.in_place and all(length == 1 for length in region.shape[:axis])


def _rows_shape(region: RegionSpec, rows: int) -> tuple[int, ...]:
    axis = region.clock.axis
    return (*region.shape[:axis], rows, *region.shape[axis + 1 :])


def _span(region: RegionSpec, first: int, rows: int) -> tuple[slice, ...]:
    return (*[slice(None)] * region.clock.axis, slice(first, first + rows))


def _ticks_of(region: RegionSpec, rows: int) -> int:
    """Ticks after which a session has ``rows`` rows."""
    return int(-(-rows // region.clock.rows_per_tick))
