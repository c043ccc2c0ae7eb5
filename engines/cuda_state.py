"""The state of all sessions on a GPU: where it lies, and how it begins, moves on and is read.

Two ranges, as `layout` plans them: what is whole from the start, in one allocation, and rings that
grow, page by page, in the `arena`. Small state moves by one kernel over a table of rows; rings in
places do not move at all. Buffer 0 of a region is what the next tick reads, whenever one looks
between two ticks.

Not here: stages, graphs and ticks (`cuda_executor`), prompts (`cuda_prefill`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines import cuda
from engines.arena import Arena
from engines.bundle import ITEMSIZE, Dtype, Manifest
from engines.clocks import ClockKind
from engines.cuda import DevicePtr, Stream
from engines.cuda_memory import Range, write_ordered
from engines.kernels.tick import Row, TickKernels, fill_bytes, table_bytes
from engines.layout import ArenaLayout
from engines.ort_executor import STORAGE
from engines.program import Buffer, Program

SPREAD: tuple[Dtype, ...] = ("bfloat16", "float32", "float8e4m3", "int8")
"""Rings of these `spread` fills with noise; others hold ids."""


class CudaState:
    """Memory of all slots. One thread uses it; a `cuda.Device` must be open."""

    def __init__(
        self,
        manifest: Manifest,
        program: Program,
        layout: ArenaLayout,
        kernels: TickKernels,
        stream: Stream,
        *,
        ordinal: int,
        on_demand: bool,
        poison: int,
    ) -> None:
        """on_demand, poison: as `cuda_executor.CudaOptions` has them."""
        self.layout = layout
        self._regions = {region.name: region for region in manifest.regions}
        self._kernels, self._stream = kernels, stream
        self._closing = contextlib.ExitStack()
        try:
            self._whole = cuda.allocate(layout.whole_bytes)
            self._closing.callback(cuda.release, self._whole)
            cuda.fill_bytes(self._whole, poison, layout.whole_bytes)
            self.range = Range(layout.growing_bytes, ordinal)
            self._closing.callback(self.range.close)
            self.arena = Arena(layout, self.range, on_demand=on_demand, poison=poison)
            self._tables(program)
        except BaseException:
            self._closing.close()
            raise

    def begin(self, slot: int) -> None:
        """First values of everything of ``slot`` that lies whole."""
        self._kernels.reset(*self._by_slot, slot, self._stream)
        self._kernels.reset(*self._by_place, self.arena.places[slot], self._stream)

    def begin_beside_rings(self, slot: int) -> None:
        """First values of everything of ``slot`` but rings that are written in place."""
        self._kernels.reset(*self._fresh, slot, self._stream)

    def move(self, source: int, target: int) -> None:
        """``target`` gets all that lies whole and by slot; the arena has moved the rest."""
        self._kernels.move(*self._by_slot, source, target, self._stream)

    def move_on(self, batch: int) -> None:
        """What stages wrote beside the state of slots 0..batch-1 becomes that state."""
        self._kernels.back(*self._moved, batch, self._stream)

    def set(self, name: str, slot: int, value: float) -> None:
        """Write one number over a region of ``slot``."""
        storage = STORAGE[self._regions[name].dtype][0]
        raw = np.array(value).astype(storage).tobytes()
        write_ordered(self.address(Buffer(name, 0), slot), raw, self._stream)

    def make_old(self, slot: int, ticks: int) -> None:
        """Counters of ``slot`` as after ``ticks`` ticks, and noise in the rows it then has."""
        for region in self._regions.values():
            if region.clock.kind is ClockKind.COUNTER:
                self.set(region.name, slot, region.clock.position(ticks))
        for address, nbytes, dtype in self._noise_spans(slot, ticks):
            if dtype in SPREAD:
                self._kernels.spread(address, nbytes, ITEMSIZE[dtype], self._stream)

    def region(self, name: str, slot: int) -> NDArray[Any]:
        """A copy of one session's region, valid rows only of one that grows."""
        region = self._regions[name]
        self._stream.synchronize()
        if self.layout.ring_rows(name) is None:
            raw = cuda.read_device(self.whole_row(name, slot), region.whole_bytes)
            return np.frombuffer(raw, STORAGE[region.dtype][0]).reshape(region.shape)
        valid = region.clock.valid_rows(self.arena.age(slot) or 0)
        spans = self.row_spans(name, slot, 0, valid)
        raw = bytearray().join(cuda.read_device(address, nbytes) for address, nbytes in spans)
        shape = (1, -1, *region.shape[region.clock.axis + 1 :])
        return np.frombuffer(raw, STORAGE[region.dtype][0]).reshape(shape)

    def address(self, buffer: Buffer, slot: int = 0) -> DevicePtr:
        """Where ``slot`` of a buffer lies; of a ring in places, place number ``slot``."""
        place = self.layout.whole.get(buffer)
        if place is not None:
            return DevicePtr(self._whole + place.offset_bytes + slot * place.row_bytes)
        rows = self.layout.ring_rows(buffer.name)
        assert rows is not None, buffer
        return DevicePtr(self.range.base + rows.first + slot * rows.slot_bytes)

    def row_spans(
        self, name: str, slot: int, first: int, count: int
    ) -> Iterator[tuple[DevicePtr, int]]:
        """(address, bytes) of rows of one session's ring, whatever way it lies.

        What the arena still does to rows is done first: it runs beside every other stream.
        """
        region = self._regions[name]
        rows = self.layout.ring_rows(name)
        if rows is not None:
            self.range.settle()
            for offset, nbytes in rows.spans(self._lies_at(name, slot), first, count):
                yield DevicePtr(self.range.base + offset), nbytes
            return
        row_bytes = region.whole_bytes // region.clock.retain
        yield DevicePtr(self.whole_row(name, slot) + first * row_bytes), count * row_bytes

    def whole_row(self, name: str, slot: int) -> DevicePtr:
        """Where one session's part of a region lies that is whole from the start."""
        return self.address(Buffer(name, 0), self._lies_at(name, slot))

    def close(self) -> None:
        self._closing.close()

    def _lies_at(self, name: str, slot: int) -> int:
        return self.arena.places[slot] if name in self.layout.placed else slot

    def _noise_spans(self, slot: int, ticks: int) -> Iterator[tuple[DevicePtr, int, Dtype]]:
        """(address, bytes, dtype) of all ring rows of a session that age; of a place in one go."""
        self.range.settle()  # as in `row_spans`
        done: set[str] = set()
        for family in self.layout.families:
            dtypes = {self._regions[name].dtype for name in family.names}
            if family.in_places and len(dtypes) == 1:
                start = family.base_pages[0] * family.page_bytes
                start += self.arena.places[slot] * family.slot_bytes
                yield DevicePtr(self.range.base + start), family.bytes_at(ticks), dtypes.pop()
                done.update(family.names)
        for region in self._regions.values():
            if region.clock.kind is ClockKind.RING and region.name not in done:
                valid = region.clock.valid_rows(ticks)
                for address, nbytes in self.row_spans(region.name, slot, 0, valid):
                    yield address, nbytes, region.dtype

    def _tables(self, program: Program) -> None:
        """Row tables on the device, of all regions that lie whole."""
        after = program.current[1]
        by_slot: list[Row] = []
        by_place: list[Row] = []
        fresh: list[Row] = []
        moved: list[Row] = []
        for region in self._regions.values():
            if Buffer(region.name, 0) not in self.layout.whole:
                assert region.fill == 0, f"{region.name}: a ring in pages begins with zeros"
                continue
            moves_on = after[region.name] == 1
            row = Row(
                self.address(Buffer(region.name, 0)),
                self.address(Buffer(region.name, 1)) if moves_on else 0,
                region.whole_bytes,
                fill_bytes(region.fill, STORAGE[region.dtype][0], region.dtype == "bfloat16"),
            )
            (by_place if region.name in self.layout.placed else by_slot).append(row)
            if not region.in_place:
                fresh.append(row)
            if moves_on:
                moved.append(row)
        self._by_slot, self._by_place = self._table(by_slot), self._table(by_place)
        self._fresh, self._moved = self._table(fresh), self._table(moved)

    def _table(self, rows: Sequence[Row]) -> tuple[DevicePtr, int]:
        """Where a table lies, and how many rows it has."""
        raw = table_bytes(rows) or bytes(32)
        table = cuda.allocate(len(raw))
        self._closing.callback(cuda.release, table)
        cuda.write_device(table, raw)
        return table, len(rows)
