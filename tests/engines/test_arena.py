"""The arena on memory that faults and is late: no tick touches what is not there, or not yet."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engines.arena import Arena
from engines.clocks import ClockKind, NativeClock, Order
from engines.cuda_memory import OutOfPages
from engines.layout import ArenaLayout, Family

PAGE = 32
SLOTS = 6


class FaultyMemory:
    """Bytes that may be touched only where a page is mapped; new pages are full of junk.

    Fills and copies happen when somebody waits for them, and nobody may touch or unmap what is
    still to be done.
    """

    def __init__(self, nbytes: int, pages: int = 1 << 30) -> None:
        self.bytes = np.full(nbytes, 0xAA, np.uint8)
        self.mapped: set[int] = set()
        self.pages = pages
        self._under_way: list[tuple[Callable[[], None], set[int]]] = []
        """What to do, and the pages it touches."""

    @property
    def committed_bytes(self) -> int:
        return len(self.mapped) * PAGE

    def map_page(self, page: int) -> None:
        assert page not in self.mapped
        if len(self.mapped) >= self.pages:
            raise OutOfPages(f"{self.pages} pages are all there are")
        self.mapped.add(page)
        self.bytes[page * PAGE : (page + 1) * PAGE] = 0xAA

    def unmap_page(self, page: int) -> None:
        self._check_settled({page})
        self.mapped.remove(page)

    def fill(self, offset_bytes: int, nbytes: int, value: int) -> None:
        there, pages = self._mapped_at(offset_bytes, nbytes)
        self._under_way.append((lambda: there.fill(value), pages))

    def copy(self, target_bytes: int, source_bytes: int, nbytes: int) -> None:
        target, pages = self._mapped_at(target_bytes, nbytes)
        source, others = self._mapped_at(source_bytes, nbytes)
        self._under_way.append((lambda: np.copyto(target, source), pages | others))

    def settle(self) -> None:
        for work, _ in self._under_way:
            work()
        self._under_way.clear()

    def at(self, offset: int, nbytes: int) -> np.ndarray:
        there, pages = self._mapped_at(offset, nbytes)
        self._check_settled(pages)
        return there

    def _check_settled(self, pages: set[int]) -> None:
        for _, others in self._under_way:
            assert not pages & others, f"{pages & others} are touched before they are settled"

    def _mapped_at(self, offset: int, nbytes: int) -> tuple[np.ndarray, set[int]]:
        pages = set(range(offset // PAGE, (offset + nbytes - 1) // PAGE + 1))
        assert pages <= self.mapped, f"{pages - self.mapped} are touched and not mapped"
        return self.bytes[offset : offset + nbytes], pages


def rings(slots: int = SLOTS, in_places: bool = False) -> ArenaLayout:
    """Two families: one row a tick (3 rings of 20 rows of 5 bytes), two rows a tick.

    in_places: pieces of 8 rows, so that a session needs memory several times in its life.
    """
    families = []
    base = 0
    for count, advance, retain, row in ((3, "1", 20, 5), (2, "2", 18, 7)):
        clock = NativeClock(ClockKind.RING, 0, advance, retain=retain, order=Order.MODULO)
        names = tuple(f"{advance}.{i}" for i in range(count))
        plan = Family(names, clock, retain * row, PAGE, (), 0, in_places)
        pages = -(-slots * plan.slot_bytes // PAGE)
        copies = 1 if in_places else count
        bases = tuple(base + i * pages for i in range(copies))
        families.append(replace(plan, base_pages=bases, pages=pages))
        base += copies * pages
    placed = frozenset(name for f in families for name in f.names) if in_places else frozenset()
    return ArenaLayout(slots, PAGE, {}, 0, tuple(families), base * PAGE, placed)


@pytest.fixture(params=["by slot", "in places"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ArenaLayout:
    monkeypatch.setattr("engines.layout.PIECE_ROWS", 8)
    return rings(in_places=request.param == "in places")


class Sessions:
    """Runs ticks as a device would: every live session writes its rows and reads all of them."""

    def __init__(self, arena: Arena, memory: FaultyMemory) -> None:
        self.arena, self.memory = arena, memory
        self.stamps: list[int] = []
        self.started = 0

    def join(self) -> None:
        self.started += 1
        self.arena.begin(len(self.stamps))
        self.stamps.append(self.started)

    def leave(self, slot: int) -> None:
        last = len(self.stamps) - 1
        if slot != last:
            self.arena.move(last, slot)
            self.stamps[slot] = self.stamps[last]
        self.stamps.pop()

    def tick(self) -> None:
        batch = len(self.stamps)
        self.arena.before_tick(batch)
        for slot, stamp in enumerate(self.stamps):
            age = self.arena.age(slot)
            assert age is not None
            for family in self.arena.layout.families:
                for name in family.names:
                    self._step(family, name, slot, age, stamp)
        self.arena.after_launch(batch)

    def _step(self, family: Family, name: str, slot: int, age: int, stamp: int) -> None:
        clock, rows, place = family.clock, family.rows(name), self.arena.places[slot]
        value = stamp + family.names.index(name)

        def row(position: int) -> np.ndarray:
            ((offset, nbytes),) = rows.spans(place, clock.row_of(position), 1)
            return self.memory.at(offset, nbytes)

        for position in range(clock.position(age), clock.position(age + 1)):
            row(position)[:] = (value + position) % 251
        last = clock.position(age + 1)
        for position in range(max(0, last - clock.retain), last):
            assert (row(position) == (value + position) % 251).all(), (stamp, position)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead_ticks", [0, 1, 3, 40])
def test_callers_come_and_go_and_no_row_is_lost_or_without_memory(
    seed: int, ahead_ticks: int, layout: ArenaLayout
) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=ahead_ticks)
    sessions = Sessions(arena, memory)
    chance = random.Random(seed)
    for _ in range(150):
        if len(sessions.stamps) < SLOTS and chance.random() < 0.15:
            sessions.join()
        if sessions.stamps and chance.random() < 0.12:
            sessions.leave(chance.randrange(len(sessions.stamps)))
        sessions.tick()
    assert arena.counts.late == 0 or ahead_ticks == 0
    while sessions.stamps:
        sessions.leave(0)
    for _ in range(200):
        sessions.tick()
    first = min(max(1, min(ahead_ticks, f.growth_ticks)) for f in layout.families)
    place = arena.places[0]
    prepared = sum(len(f.pages_at(place, first)) * len(f.base_pages) for f in layout.families)
    assert len(memory.mapped) == prepared
    assert arena.counts.mapped - arena.counts.unmapped == prepared


def test_what_is_committed_is_what_was_predicted(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=0)
    sessions = Sessions(arena, memory)
    for tick in range(40):
        if tick in (0, 4, 11):
            sessions.join()
        sessions.tick()
        ages = [(arena.age(slot) or 0) + 1 for slot in range(len(sessions.stamps))]
        prepared = layout.committed_bytes([*ages, 1])
        assert layout.committed_bytes(ages) <= arena.committed_bytes <= prepared, tick
    assert arena.reserved_bytes == layout.growing_bytes


def test_a_prepared_slot_costs_a_joiner_nothing(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    sessions = Sessions(Arena(layout, memory, ahead_ticks=6), memory)
    sessions.join()
    first = sessions.arena.counts.joining
    assert first > 0
    for _ in range(8):
        sessions.tick()
    sessions.join()
    assert sessions.arena.counts.joining == first


def test_preparing_a_slot_never_delays_a_tick(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=6)
    arena.pace = 1  # far less than the next slot's first pages
    sessions = Sessions(arena, memory)
    sessions.join()
    before = arena.counts.mapped
    sessions.tick()
    sessions.tick()
    assert arena.counts.late == 0
    assert arena.counts.mapped - before == 2


def test_mapping_is_spread_over_the_ticks_before_it_is_needed(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=5)
    sessions = Sessions(arena, memory)
    for _ in range(SLOTS):
        sessions.join()
    for _ in range(30):
        before = arena.counts.mapped
        sessions.tick()
        assert arena.counts.mapped - before <= arena.pace
    assert arena.counts.late == 0


@pytest.mark.parametrize("over_after", [0, 1, 3])
def test_pages_are_given_back_while_the_device_is_busy_and_one_a_tick_in_any_case(
    layout: ArenaLayout, over_after: int
) -> None:
    """Mapping goes on: a session will need those."""
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=5)
    assert arena.pace > 5
    for slot in range(SLOTS):
        arena.begin(slot, 40)
    arena.map_all_due()
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return asked > over_after

    ticks = 0
    arena.before_tick(1)
    while not arena.is_settled:
        before, asked, ticks = arena.counts.unmapped, 0, ticks + 1
        arena.after_launch(1, is_over)
        arena.before_tick(1)
        given = arena.counts.unmapped - before
        assert given == over_after + 1 or arena.is_settled
    assert ticks > 5
    for slot in range(1, SLOTS):
        arena.begin(slot)
    mapped = arena.counts.mapped
    arena.before_tick(SLOTS)
    arena.after_launch(SLOTS, lambda: True)
    assert arena.counts.mapped - mapped > 1


def test_a_new_session_finds_nothing_of_the_one_before() -> None:
    layout = rings()
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=2)
    sessions = Sessions(arena, memory)
    for _ in range(3):
        sessions.join()
    for _ in range(25):
        sessions.tick()
    arena.begin(1)
    memory.settle()
    for family in layout.families:
        for base in family.base_pages:
            for page in family.span(1):
                if base + page in memory.mapped:
                    low = max(page * PAGE, family.slot_bytes)
                    high = min((page + 1) * PAGE, 2 * family.slot_bytes)
                    assert not memory.at(base * PAGE + low, high - low).any()


def test_a_session_that_is_made_old_has_all_its_pages_at_once(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    sessions = Sessions(Arena(layout, memory, ahead_ticks=6), memory)
    for ticks in (0, 13, 19, 5):
        sessions.arena.begin(0, ticks)
        memory.settle()
        for family in layout.families:
            for name in family.names:
                valid = family.clock.valid_rows(ticks + 1)
                for offset, nbytes in family.rows(name).spans(0, 0, valid):
                    memory.at(offset, nbytes)


def test_static_allocation_maps_everything_once(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, on_demand=False)
    sessions = Sessions(arena, memory)
    for _ in range(4):
        sessions.join()
    for _ in range(30):
        sessions.tick()
    sessions.leave(0)
    sessions.tick()
    assert memory.committed_bytes == layout.growing_bytes
    assert arena.counts.mapped == layout.growing_bytes // PAGE
    assert arena.counts.unmapped == 0


def test_a_tick_maps_as_many_pages_as_it_takes_if_all_sessions_need_theirs_at_once() -> None:
    layout = rings()
    # 6 rows of 5 bytes fill a page of 32: 6 ticks; 4 rows of 7, two a tick: 2 ticks.
    assert [family.growth_ticks for family in layout.families] == [6, 2]
    assert [family.growth_pages for family in layout.families] == [3, 2]
    memory = FaultyMemory(layout.growing_bytes)
    assert Arena(layout, memory, ahead_ticks=32).pace == 6 * 3 // 6 + 6 * 2 // 2
    assert Arena(layout, memory, ahead_ticks=1).pace == 6 * 3 + 6 * 2  # no tick to spare


def test_a_full_device_is_known_before_a_session_suffers() -> None:
    layout = rings()
    memory = FaultyMemory(layout.growing_bytes, pages=26)
    arena = Arena(layout, memory, ahead_ticks=5)
    sessions = Sessions(arena, memory)
    sessions.join()
    sessions.join()
    left: list[int] = []

    def run() -> None:
        for _ in range(40):
            sessions.tick()
            if (ticks := arena.short_in_ticks()) is not None:
                left.append(ticks)

    with pytest.raises(OutOfPages):
        run()
    assert left == list(range(len(left) - 1, -1, -1))  # and then one suffers
    assert len(left) >= 2
    sessions.leave(1)  # a hang-up gives its pages back, and the other goes on
    memory.pages = 30
    for _ in range(30):
        sessions.tick()
    assert not arena.is_short
    assert arena.short_in_ticks() is None


def test_moving_a_session_in_places_moves_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.layout.PIECE_ROWS", 8)
    layout = rings(in_places=True)
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=2)
    sessions = Sessions(arena, memory)
    for _ in range(3):
        sessions.join()
    for _ in range(15):
        sessions.tick()
    before, mapped = memory.bytes.copy(), set(memory.mapped)
    sessions.leave(0)
    assert arena.places == [2, 1, 0, 3, 4, 5]
    assert (memory.bytes == before).all()
    assert memory.mapped == mapped
    sessions.tick()  # prepares the slot after the last for a joiner: the leaver's place
    sessions.join()
    assert arena.places[2] == 0
    assert arena.counts.late == 0


def test_a_prompt_is_parked_through_the_ticks_of_others_and_seated(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=2)
    sessions = Sessions(arena, memory)
    sessions.join()
    sessions.tick()
    parked, rows = SLOTS - 1, 11
    for fed in (4, rows):
        arena.park(parked, fed)
        sessions.tick()
    stamp = 77
    for family in layout.families:
        for name in family.names:
            for position in range(family.clock.position(rows)):
                ((offset, nbytes),) = family.rows(name).spans(
                    arena.places[parked], family.clock.row_of(position), 1
                )
                memory.at(offset, nbytes)[:] = stamp + family.names.index(name) + position
    for _ in range(5):
        sessions.tick()
    arena.seat(parked, 1, rows)
    sessions.stamps.append(stamp)
    for _ in range(30):
        sessions.tick()  # checks every row
    assert arena.age(1) == rows + 30
    assert arena.counts.late == 0
    sessions.leave(1)
    for _ in range(200):
        sessions.tick()
    one = sum(len(f.pages_at(arena.places[0], 60)) * len(f.base_pages) for f in layout.families)
    next_one = layout.committed_bytes([1]) // PAGE
    assert len(memory.mapped) <= one + 2 * next_one


def test_a_prompt_nobody_waits_for_gives_its_pages_back(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=2)
    sessions = Sessions(arena, memory)
    sessions.join()
    for _ in range(60):
        sessions.tick()
    before = len(memory.mapped)
    arena.park(SLOTS - 1, 12)
    for _ in range(20):
        sessions.tick()
    assert len(memory.mapped) > before
    arena.leave(SLOTS - 1)
    for _ in range(60):
        sessions.tick()
    assert len(memory.mapped) == before


def test_what_is_mapped_at_once_can_be_used_at_once(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory)
    arena.begin(0)
    arena.map_all_due()
    for page in memory.mapped:
        assert not memory.at(page * PAGE, PAGE).any()


def test_a_page_that_is_still_being_filled_is_not_taken_away(layout: ArenaLayout) -> None:
    memory = FaultyMemory(layout.growing_bytes)
    arena = Arena(layout, memory, ahead_ticks=1)
    arena.park(SLOTS - 1, 12)
    arena.leave(SLOTS - 1)
    arena.begin(SLOTS - 1)  # wipes what it has, and needs less
    memory.pages = len(memory.mapped)
    arena.begin(0)
    assert arena.counts.unmapped > 0
