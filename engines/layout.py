"""Where every buffer of the arena lies, and which pages a session needs at which age. Pure.

Two ranges. The *whole* range holds everything that is as large at a session's first tick as at
its last: counters, windows, tails, wires between stages, and rings smaller than a page, one after
the other, so that pages of 2 MiB waste nothing. The *growing* range holds the rings that are
larger: each begins on a page, its slots lie side by side as a stage wants them (slots, 1, T, C),
and rows come in one after the other, so a young session needs only the first pages of its slot.

    growing   | ring 0: slot 0 | slot 1 | slot 2 ... | ring 1: slot 0 | slot 1 ...
    pages     |    |    |    |    |    |    |    |     a page may hold the end of one slot and the
                                                       start of the next: it is needed by both

Rings that move alike (same clock, same bytes) need the same pages relative to their start; such a
`Family` is planned once. Not here: what is mapped at the moment (`arena`), devices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from engines.bundle import ITEMSIZE, Manifest, RegionSpec
from engines.clocks import ClockKind, NativeClock
from engines.program import Buffer, Program

ALIGN_BYTES = 256
"""What cuMemAlloc aligns to, and enough for every vector load."""

NEVER = 1 << 62
"""An age no session reaches."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A buffer of (slots, row) that is there from the start."""

    offset_bytes: int
    row_bytes: int
    """Bytes of one slot."""


@dataclass(frozen=True, slots=True)
class Family:
    """Rings that grow by the same pages at the same time."""

    names: tuple[str, ...]
    clock: NativeClock
    slot_bytes: int
    """Bytes of one slot of one ring at full retention."""
    page_bytes: int
    base_pages: tuple[int, ...]
    """First page of each ring in the growing range."""
    pages: int
    """Pages of one ring, all slots."""
    row_bytes: int = field(init=False)
    advance: Fraction = field(init=False)
    """The clock's, decoded once: the arena asks in every tick."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_bytes", self.slot_bytes // self.clock.retain)
        object.__setattr__(self, "advance", self.clock.rows_per_tick)

    @property
    def page_ticks(self) -> int:
        """Ticks a full page lasts, at least one."""
        return max(1, int(self.page_bytes // self.row_bytes // self.advance))

    def bytes_at(self, ticks: int) -> int:
        """Bytes of one ring that hold something after ``ticks`` ticks."""
        rows = ticks * self.advance.numerator // self.advance.denominator
        return min(rows, self.clock.retain) * self.row_bytes

    def ticks_before(self, slot: int, page: int) -> int:
        """Age at which ``slot`` has yet to write its first row into ``page``."""
        rows = (page * self.page_bytes - slot * self.slot_bytes) // self.row_bytes
        return max(0, rows * self.advance.denominator // self.advance.numerator)

    def pages_at(self, slot: int, ticks: int) -> range:
        """Pages, counted from a ring's first, under what ``slot`` holds after ``ticks`` ticks."""
        start = slot * self.slot_bytes
        first, nbytes = start // self.page_bytes, self.bytes_at(ticks)
        return range(first, -(-(start + nbytes) // self.page_bytes) if nbytes else first)

    def span(self, slot: int) -> range:
        """Pages under the whole of ``slot``."""
        start = slot * self.slot_bytes
        last = start + self.slot_bytes
        return range(start // self.page_bytes, -(-last // self.page_bytes))

    def grows_at(self, slot: int, ticks: int) -> int:
        """First age beyond ``ticks`` at which ``slot`` needs a page more; `NEVER` if none."""
        held = self.pages_at(slot, ticks).stop
        if held == self.span(slot).stop:
            return NEVER
        age = max(ticks, self.ticks_before(slot, held)) + 1
        while self.pages_at(slot, age).stop == held:  # a row may end exactly with its page
            age += 1
        return age


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets of all buffers for a given number of slots."""

    slots: int
    page_bytes: int
    whole: dict[Buffer, Whole]
    whole_bytes: int
    families: tuple[Family, ...]
    growing_bytes: int
    """Addresses of the growing range: what all slots take at full retention."""

    def ring_offset(self, name: str) -> int | None:
        """Where ring ``name`` begins in the growing range; None if it does not lie there."""
        for family in self.families:
            if name in family.names:
                return family.base_pages[family.names.index(name)] * self.page_bytes
        return None

    def committed_bytes(self, ages: Sequence[int]) -> int:
        """Physical memory when slot i is ``ages[i]`` ticks old, in whole pages, both ranges."""
        pages = 0
        for family in self.families:
            held: set[int] = set()
            for slot, ticks in enumerate(ages):
                held.update(family.pages_at(slot, ticks))
            pages += len(held) * len(family.names)
        return self.whole_bytes + pages * self.page_bytes

    def full_bytes(self, sessions: int) -> int:
        """Physical memory when ``sessions`` sessions hold all they ever will."""
        oldest = max((f.clock.ticks_until_full() for f in self.families), default=0)
        return self.committed_bytes([oldest] * sessions)


def plan_layout(manifest: Manifest, program: Program, slots: int, page_bytes: int) -> ArenaLayout:
    """Lay out the buffers of the program's first phase for ``slots`` sessions."""
    growing = {r.name: r for r in manifest.regions if grows_by_pages(r, page_bytes)}
    whole: dict[Buffer, Whole] = {}
    end = 0
    for buffer, row_bytes in _buffers(manifest, program):
        if buffer.name in growing:
            continue
        whole[buffer] = Whole(end, row_bytes)
        end += -(-slots * row_bytes // ALIGN_BYTES) * ALIGN_BYTES
    families = _families(growing.values(), slots, page_bytes)
    pages = sum(family.pages * len(family.names) for family in families)
    whole_bytes = -(-end // page_bytes) * page_bytes
    return ArenaLayout(slots, page_bytes, whole, whole_bytes, families, pages * page_bytes)


def grows_by_pages(region: RegionSpec, page_bytes: int) -> bool:
    """True for rings whose slot is larger than a page and whose rows lie one after the other."""
    clock = region.clock
    return (
        clock.kind is ClockKind.RING
        and region.in_place
        and all(length == 1 for length in region.shape[: clock.axis])
        and region.whole_bytes > page_bytes
    )


def _buffers(manifest: Manifest, program: Program) -> Iterable[tuple[Buffer, int]]:
    """Every buffer of phase 0 once, with its bytes per slot."""
    rows: dict[Buffer, int] = {
        Buffer(region.name, 0): region.whole_bytes for region in manifest.regions
    }
    for step in program.steps[0]:
        for bound in (*step.inputs, *step.outputs):
            nbytes = ITEMSIZE[bound.tensor.dtype]
            for length in bound.tensor.row_shape:
                nbytes *= length
            rows.setdefault(bound.buffer, nbytes)
    return rows.items()


def _families(regions: Iterable[RegionSpec], slots: int, page_bytes: int) -> tuple[Family, ...]:
    alike: dict[tuple[NativeClock, int], list[str]] = {}
    for region in regions:
        alike.setdefault((region.clock, region.whole_bytes), []).append(region.name)
    families = []
    next_page = 0
    for (clock, slot_bytes), names in alike.items():
        pages = -(-slots * slot_bytes // page_bytes)
        bases = tuple(next_page + index * pages for index in range(len(names)))
        next_page += pages * len(names)
        families.append(Family(tuple(names), clock, slot_bytes, page_bytes, bases, pages))
    return tuple(families)
