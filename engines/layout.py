"""Where every buffer of the arena lies, and which pages a session needs at which age. Pure.

Two ranges. The *whole* range holds everything that is as large at a session's first tick as at
its last: counters, windows, tails, wires between stages, and rings smaller than a page, one after
the other, so that pages of 2 MiB waste nothing. The *growing* range holds the rings that are
larger, whose rows come in one after the other, so a young session needs only the first pages.

Rings that a graph reads must lie as it wants them, (slots, 1, T, C), each ring on pages of its own:

    growing   | ring 0: slot 0 | slot 1 | slot 2 ... | ring 1: slot 0 | slot 1 ...
    pages     |    |    |    |    |    |    |    |     a page may hold the end of one slot and the
                                                       start of the next: it is needed by both

Rings that only `ring_attention` touches may lie anywhere, and lie so that little is lost: per
session one *place*, which begins on a page; in it rows 0..63 of every ring side by side, then rows
64..127 of every ring, and so on. Which place is whose is a table (`arena`), so nobody is copied.

    growing   | place 0: ring 0, 1, 2 .. rows 0-63 | ring 0, 1, 2 .. rows 64-127 | .. | place 1 ..

Rings that move alike (same clock, same bytes) need the same pages relative to their start; such a
`Family` is planned once. Not here: what is mapped at the moment (`arena`), devices.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from engines.bundle import ITEMSIZE, NEXT, Manifest, RegionSpec
from engines.clocks import ClockKind, NativeClock
from engines.program import Buffer, Program

ALIGN_BYTES = 256
"""What cuMemAlloc aligns to, and enough for every vector load."""

NEVER = 1 << 62
"""An age no session reaches."""

PIECE_ROWS = 64
"""Rows of a ring that lie together in a place: what `ring_attention` reads at a stretch."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A buffer of (slots, row) that is there from the start."""

    offset_bytes: int
    row_bytes: int
    """Bytes of one slot."""


@dataclass(frozen=True, slots=True)
class RingRows:
    """Where the rows of one ring lie, in bytes from the base of its range."""

    first: int
    """Row 0 of slot, or place, 0."""
    slot_bytes: int
    row_bytes: int
    piece_rows: int
    """Rows that lie one after the other; a power of two, or all there are."""
    piece_bytes: int
    """From the first row of a piece to the first of the next."""

    def spans(self, slot: int, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each stretch of rows ``first``.. that lie one after the other."""
        row, end = first, first + rows
        while row < end:
            piece, within = divmod(row, self.piece_rows)
            count = min(end - row, self.piece_rows - within)
            start = self.first + slot * self.slot_bytes + piece * self.piece_bytes
            yield start + within * self.row_bytes, count * self.row_bytes
            row += count


@dataclass(frozen=True, slots=True)
class Family:
    """Rings that grow by the same pages at the same time."""

    names: tuple[str, ...]
    clock: NativeClock
    ring_bytes: int
    """Bytes of one session's rows in one ring at full retention."""
    page_bytes: int
    base_pages: tuple[int, ...]
    """First page of each ring in the growing range; of all of them together if in places."""
    pages: int
    """Pages of one ring, all slots; of all rings if in places."""
    in_places: bool = False
    row_bytes: int = field(init=False)
    advance: Fraction = field(init=False)
    """The clock's, decoded once: the arena asks in every tick."""
    piece_rows: int = field(init=False)
    unit_rows: int = field(init=False)
    """Rows that need memory together: a piece of every ring, or a single row."""
    unit_bytes: int = field(init=False)
    slot_bytes: int = field(init=False)
    """From slot to slot, or place to place."""

    def __post_init__(self) -> None:
        retain = self.clock.retain
        row_bytes = self.ring_bytes // retain
        piece = piece_rows(retain) if self.in_places else retain
        unit_rows = piece if self.in_places else 1
        unit_bytes = unit_rows * row_bytes * (len(self.names) if self.in_places else 1)
        slot_bytes = self.ring_bytes
        if self.in_places:
            slot_bytes = _up(-(-retain // piece) * unit_bytes, self.page_bytes)
        for name, value in (
            ("row_bytes", row_bytes),
            ("advance", self.clock.rows_per_tick),
            ("piece_rows", piece),
            ("unit_rows", unit_rows),
            ("unit_bytes", unit_bytes),
            ("slot_bytes", slot_bytes),
        ):
            object.__setattr__(self, name, value)

    @property
    def growth_ticks(self) -> int:
        """Ticks between two ages at which a session needs more memory, at least one."""
        rows = max(1, self.page_bytes // self.unit_bytes) * self.unit_rows
        return max(1, int(rows // self.advance))

    @property
    def growth_pages(self) -> int:
        """Pages a session needs then, of all rings."""
        return max(1, -(-self.unit_bytes // self.page_bytes)) * len(self.base_pages)

    def bytes_at(self, ticks: int) -> int:
        """Bytes from a slot's start that hold something after ``ticks`` ticks."""
        rows = ticks * self.advance.numerator // self.advance.denominator
        units = -(-min(rows, self.clock.retain) // self.unit_rows)
        return min(units * self.unit_bytes, self.slot_bytes)

    def ticks_before(self, slot: int, page: int) -> int:
        """Age at which ``slot`` has yet to write its first row into ``page``."""
        units = (page * self.page_bytes - slot * self.slot_bytes) // self.unit_bytes
        rows = units * self.unit_rows
        return max(0, rows * self.advance.denominator // self.advance.numerator)

    def pages_at(self, slot: int, ticks: int) -> range:
        """Pages, counted from a base, under what ``slot`` holds after ``ticks`` ticks."""
        start = slot * self.slot_bytes
        first, nbytes = start // self.page_bytes, self.bytes_at(ticks)
        return range(first, -(-(start + nbytes) // self.page_bytes) if nbytes else first)

    def span(self, slot: int) -> range:
        """Pages under the whole of ``slot``."""
        start = slot * self.slot_bytes
        last = start + self.bytes_at(self.clock.ticks_until_full())
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

    def rows(self, name: str) -> RingRows:
        """Where the rows of ring ``name`` lie in the growing range."""
        index = self.names.index(name)
        if self.in_places:
            piece = self.piece_rows * self.row_bytes
            first = self.base_pages[0] * self.page_bytes + index * piece
            return RingRows(
                first, self.slot_bytes, self.row_bytes, self.piece_rows, self.unit_bytes
            )
        first = self.base_pages[index] * self.page_bytes
        return RingRows(first, self.slot_bytes, self.row_bytes, self.clock.retain, self.slot_bytes)


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
    placed: frozenset[str] = frozenset()
    """Rings, growing and whole, that only `ring_attention` touches: indexed by place."""

    @property
    def has_places(self) -> bool:
        """True: rows of a session lie where a table says; its slot says nothing about it."""
        return bool(self.placed)

    def ring_rows(self, name: str) -> RingRows | None:
        """Where the rows of ring ``name`` lie in the growing range; None: it is not there."""
        for family in self.families:
            if name in family.names:
                return family.rows(name)
        return None

    def committed_bytes(self, ages: Sequence[int]) -> int:
        """Physical memory when slot i is ``ages[i]`` ticks old, in whole pages, both ranges."""
        pages = 0
        for family in self.families:
            held: set[int] = set()
            for slot, ticks in enumerate(ages):
                held.update(family.pages_at(slot, ticks))
            pages += len(held) * len(family.base_pages)
        return self.whole_bytes + pages * self.page_bytes

    def full_bytes(self, sessions: int) -> int:
        """Physical memory when ``sessions`` sessions hold all they ever will."""
        oldest = max((f.clock.ticks_until_full() for f in self.families), default=0)
        return self.committed_bytes([oldest] * sessions)


def plan_layout(manifest: Manifest, program: Program, slots: int, page_bytes: int) -> ArenaLayout:
    """Lay out the buffers of the program's first phase for ``slots`` sessions."""
    growing = {r.name: r for r in manifest.regions if grows_by_pages(r, page_bytes)}
    placed = ring_only(manifest)
    if not placed.issuperset(growing):
        placed = frozenset()  # a graph reads some of them, so all lie by slot
    whole: dict[Buffer, Whole] = {}
    end = 0
    for buffer, row_bytes in _buffers(manifest, program):
        if buffer.name in growing:
            continue
        whole[buffer] = Whole(end, row_bytes)
        end += _up(slots * row_bytes, ALIGN_BYTES)
    families = _families(growing.values(), slots, page_bytes, bool(placed))
    pages = sum(family.pages * len(family.base_pages) for family in families)
    whole_bytes = _up(end, page_bytes)
    return ArenaLayout(slots, page_bytes, whole, whole_bytes, families, pages * page_bytes, placed)


def ring_only(manifest: Manifest) -> frozenset[str]:
    """Rings of a tick that no stage touches but `ring_attention`."""
    ringed: set[str] = set()
    others: set[str] = set()
    for stage in manifest.stages:
        for tensor in (*stage.inputs, *stage.outputs):
            (others if stage.ring is None else ringed).add(tensor.name.removesuffix(NEXT))
    return frozenset(
        region.name
        for region in manifest.regions
        if region.clock.kind is ClockKind.RING and region.name in ringed - others
    )


def piece_rows(retain: int) -> int:
    """Rows of a piece: a power of two, no more than a short ring needs."""
    return min(PIECE_ROWS, 1 << (retain - 1).bit_length())


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


def _families(
    regions: Iterable[RegionSpec], slots: int, page_bytes: int, in_places: bool
) -> tuple[Family, ...]:
    alike: dict[tuple[NativeClock, int], list[str]] = {}
    for region in regions:
        alike.setdefault((region.clock, region.whole_bytes), []).append(region.name)
    families = []
    next_page = 0
    for (clock, ring_bytes), names in alike.items():
        plan = Family(tuple(names), clock, ring_bytes, page_bytes, (), 0, in_places)
        pages = -(-slots * plan.slot_bytes // page_bytes)
        copies = 1 if in_places else len(names)
        bases = tuple(next_page + index * pages for index in range(copies))
        next_page += pages * copies
        families.append(replace(plan, base_pages=bases, pages=pages))
    return tuple(families)


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
