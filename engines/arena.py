"""The arena of growing rings: which pages have memory behind them, and when that changes.

Addresses never change; memory comes and goes. Before a tick runs, every row it writes has a page.
Pages are asked for `ahead_ticks` before they are needed and mapped a few per tick, earliest
deadline first, while the device is busy with the tick that was just launched. Pages of sessions
that left are given back only as long as it is busy: nobody waits for them, and beside nvidia-smi
such a call takes 10 ms and more (LOG.md). A tick finds a page missing only if the device ran out of
memory, which is why the executor refuses more slots than fit at full retention.

    begin(slot)   first pages at once, unless the slot was prepared
    before_tick   map what this tick needs and nobody has mapped yet (counted as late)
    after_launch  sessions grow older; map, and unmap, at most `pace` pages
    end           by running a smaller batch: slots beyond it are hung up, parked ones excepted
    park, seat    a slot beyond the batch is filled with a prompt; then it is a session's

The slot after the last live one is kept prepared, so that a joiner need not wait for memory. Where
the layout has places, a slot's rows lie in the place that `places` names: moving a session is an
exchange of two entries, and whoever comes next gets the leaver's place with the pages it has.
Not here: where rings lie (`layout`), the driver (`cuda_memory`), all other state (executor).
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engines.cuda_memory import OutOfPages
from engines.layout import NEVER, ArenaLayout, Family

UNHURRIED = NEVER >> 1
"""A deadline for what nobody waits for."""

AHEAD_TICKS = 32
"""Half a piece of 64 rows: 2.5 s of notice, and as much memory a session that is not used yet."""


class Memory(Protocol):
    """What the arena needs of `cuda_memory.Range`; tests bring their own."""

    @property
    def committed_bytes(self) -> int: ...
    def map_page(self, page: int) -> None: ...
    def unmap_page(self, page: int) -> None: ...
    def fill(self, offset_bytes: int, nbytes: int, value: int) -> None: ...
    def copy(self, target_bytes: int, source_bytes: int, nbytes: int) -> None: ...
    def settle(self) -> None: ...


@dataclass(slots=True)
class Counts:
    """What the arena did since it was made."""

    mapped: int = 0
    unmapped: int = 0
    joining: int = 0
    """Pages mapped while a session joined or moved, between two ticks."""
    late: int = 0
    """Pages mapped just before a tick because nothing had mapped them ahead of it."""


class Arena:
    """Pages of all growing rings of all slots. One thread uses it."""

    def __init__(
        self,
        layout: ArenaLayout,
        memory: Memory,
        *,
        ahead_ticks: int = AHEAD_TICKS,
        on_demand: bool = True,
        poison: int = 0,
    ) -> None:
        """on_demand False: everything is mapped now and for ever. poison: byte of new pages."""
        self.layout, self.memory = layout, memory
        self.counts = Counts()
        self.ahead_ticks = ahead_ticks
        self.on_demand = on_demand
        self.poison = poison
        lasts = [max(1, min(ahead_ticks, family.growth_ticks)) for family in layout.families]
        self._first_ticks = min(lasts, default=1)
        per_tick = zip(layout.families, lasts, strict=True)
        self.pace = math.ceil(sum(f.growth_pages * layout.slots / last for f, last in per_tick))
        """Pages mapped, and pages unmapped, per tick: enough if all slots need one at once."""
        self.is_short = False
        """The device had no memory for a page that will be needed: admit nobody."""
        self.tick = 0
        self.places = list(range(layout.slots))
        """By slot: where its rows lie; slot i in place i for ever unless the layout has places."""
        self._ages: list[int | None] = [None] * layout.slots
        self._parked: dict[int, int] = {}
        """Slot beyond the batch -> ticks it has memory for."""
        self._grows_at = [NEVER] * layout.slots
        self._live = 0
        self._prepared: int | None = None
        """Slot that has memory though nobody is there; the first to lose it."""
        none = range(0)
        self._held = [[none] * layout.slots for _ in layout.families]
        """By family and place."""
        self._users = [[0] * family.pages for family in layout.families]
        self._mapped: set[int] = set()
        self._wanted: set[int] = set()
        self._due: list[tuple[int, int]] = []
        """Heap of (tick before which it must be mapped, page)."""
        self._unneeded: list[int] = []
        if not on_demand:
            for page in range(layout.growing_bytes // layout.page_bytes):
                self._map(page)

    @property
    def committed_bytes(self) -> int:
        """Memory behind both ranges now, spare pages included."""
        return self.layout.whole_bytes + self.memory.committed_bytes

    @property
    def reserved_bytes(self) -> int:
        """Addresses of both ranges."""
        return self.layout.whole_bytes + self.layout.growing_bytes

    @property
    def is_settled(self) -> bool:
        """Nothing is left to map ahead or to give back."""
        return not self._unneeded and not self._due

    def age(self, slot: int) -> int | None:
        """Ticks since the session in ``slot`` began; None if there is none."""
        return self._ages[slot]

    def vacant(self, batch: int) -> list[int]:
        """Slots of 0..batch-1 without a session."""
        ages = self._ages[:batch]
        return [slot for slot in range(batch) if ages[slot] is None] if None in ages else []

    def begin(self, slot: int, ticks: int = 0) -> None:
        """A session begins in ``slot``, ``ticks`` ticks old; its rows are zero (or poison).

        Raises `OutOfPages`; `abandon` it then.
        """
        if slot == self._prepared:
            self._prepared = None
        self._parked.pop(slot, None)
        self._ages[slot] = ticks
        place = self.places[slot]
        self._wipe(place)
        for index, family in enumerate(self.layout.families):
            self._set_held(index, family, place, range(0), ticks)
        self._hold(slot, ticks)
        self.counts.joining += self._map_due(self._first_ticks)

    def move(self, source: int, target: int) -> None:
        """``target`` takes over the session of ``source``.

        Without places its valid rows are copied.
        """
        ticks = self._ages[source]
        assert ticks is not None, source
        if self.layout.has_places:
            self._exchange(source, target)
            self._ages[target], self._grows_at[target] = ticks, self._grows_at[source]
        else:
            self.begin(target, ticks)
            for family in self.layout.families:
                nbytes = family.bytes_at(ticks)
                for base in family.base_pages if nbytes else ():
                    start = base * family.page_bytes
                    self.memory.copy(
                        start + target * family.slot_bytes,
                        start + source * family.slot_bytes,
                        nbytes,
                    )
        self._parked.pop(target, None)
        self._ages[source] = None
        self._grows_at[source] = NEVER

    def park(self, slot: int, ticks: int) -> None:
        """Have memory for the first ``ticks`` ticks of ``slot``, which no tick steps. At once.

        Nothing is wiped: whoever parks writes every row before it is read, and settles before that,
        since pages are filled when they come.
        """
        self._ages[slot], self._grows_at[slot] = None, NEVER
        self._parked[slot] = ticks = max(ticks, self._parked.get(slot, 0))
        place = self.places[slot]
        for index, family in enumerate(self.layout.families):
            self._set_held(index, family, place, family.pages_at(place, ticks), ticks)
        self.counts.joining += self._map_due()

    def leave(self, slot: int) -> None:
        """Nobody is parked in ``slot`` any more; its pages go back in time."""
        if slot in self._parked:
            self._parked.pop(slot, None)
            self._let_go(slot, 0)

    def abandon(self, slot: int) -> None:
        """Nobody begins in ``slot`` after all; for when there was no memory."""
        self._parked.pop(slot, None)
        self._ages[slot], self._grows_at[slot] = None, NEVER
        self._let_go(slot, 0)

    def short_in_ticks(self) -> int | None:
        """Ticks until a session needs a page for which the device had no memory; None: it had."""
        first = self._due[:1]  # whoever asks may not be the thread that changes it
        if not self.is_short or not first or first[0][0] >= UNHURRIED:
            return None
        return max(0, first[0][0] - self.tick)

    def seat(self, source: int, target: int, ticks: int) -> None:
        """The prompt parked in ``source`` is ``target``'s session, ``ticks`` ticks old."""
        self._parked.pop(source, None)
        self._ages[source] = ticks
        self._hold(source, ticks)
        if source != target:
            self.move(source, target)
            self._let_go(source, 0)
        self.counts.joining += self._map_due(self._first_ticks)

    def map_all_due(self) -> None:
        """Map everything wanted by now, however far ahead of its need; it can be used at once."""
        while self._due:
            self._map_next()
        self.memory.settle()

    def before_tick(self, batch: int) -> None:
        """Make sure that no row which slots 0..batch-1 write in this tick lacks memory.

        Hangs up what lies beyond them. Raises `OutOfPages` if the device is full.
        """
        assert None not in self._ages[:batch], (batch, self._ages)
        if batch != self._live:
            self._close_up(batch)  # what left needs nothing any more
        try:
            self.counts.late += self._map_due()
        except OutOfPages:
            self.is_short = True
            if self._is_lacking(batch):
                raise
        self.memory.settle()

    def _is_lacking(self, batch: int) -> bool:
        """Whether a session of the batch writes where no memory is. (It was complete before.)"""
        for slot in range(batch):
            age, place = self._ages[slot] or 0, self.places[slot]
            for family in self.layout.families:
                held = len(family.pages_at(place, age))
                for page in family.pages_at(place, age + 1)[held:]:
                    if any(base + page not in self._mapped for base in family.base_pages):
                        return True
        return False

    def after_launch(self, batch: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Count the tick that was launched, and do a tick's share of mapping and unmapping.

        is_over: whether the device is done with that tick.
        """
        self.tick += 1
        ages, grows_at = self._ages, self._grows_at
        for slot in range(batch):
            age = ages[slot]
            assert age is not None, slot
            ages[slot] = age = age + 1
            if age + self.ahead_ticks >= grows_at[slot]:
                self._hold(slot, age)
        self._work(is_over)

    def _exchange(self, one: int, other: int) -> None:
        places = self.places
        places[one], places[other] = places[other], places[one]
        if other in self._parked:
            self._parked[one] = self._parked.pop(other)

    def _close_up(self, batch: int) -> None:
        """Hang up what lies beyond the batch, and prepare the slot after it."""
        for slot in range(batch, self.layout.slots):
            if slot in self._parked:
                continue
            self._ages[slot] = None
            self._grows_at[slot] = NEVER
            self._let_go(slot, self._first_ticks if slot == batch else 0)
        self._live = batch
        self._prepared = batch if batch < self.layout.slots else None

    def _let_go(self, slot: int, ticks: int) -> None:
        """Hold no more of ``slot`` than what the first ticks of a joiner need."""
        place = self.places[slot]
        for index, family in enumerate(self.layout.families):
            keep = family.pages_at(place, ticks)
            # A joiner maps what is missing, so this can wait for everything else.
            self._set_held(index, family, place, keep, ticks=-UNHURRIED)

    def _hold(self, slot: int, ticks: int) -> None:
        """Want the pages of ``slot`` for the tick at age ``ticks`` and `ahead_ticks` more."""
        until = ticks + 1 + self.ahead_ticks
        soonest, place = NEVER, self.places[slot]
        for index, family in enumerate(self.layout.families):
            pages = family.pages_at(place, until)
            self._set_held(index, family, place, pages, ticks)
            soonest = min(soonest, family.grows_at(place, until))
        self._grows_at[slot] = soonest if soonest == NEVER else soonest - 1

    def _set_held(self, index: int, family: Family, place: int, pages: range, ticks: int) -> None:
        """Replace what ``place``, at age ``ticks``, holds of a family by ``pages``.

        A negative age: its session will begin that many ticks from now at the earliest.
        """
        before = self._held[index][place]
        if before == pages:
            return
        users = self._users[index]
        for page in pages:
            if page in before:
                continue
            users[page] += 1
            deadline = self.tick + max(0, family.ticks_before(place, page) - ticks)
            for base in family.base_pages:
                self._wanted.add(base + page)
                if base + page not in self._mapped:
                    # Perhaps a second time: a neighbour may want the page, but later.
                    heapq.heappush(self._due, (deadline, base + page))
        for page in before:
            if page in pages:
                continue
            users[page] -= 1
            if users[page] == 0:
                for base in family.base_pages:
                    self._wanted.discard(base + page)
                    if self.on_demand:
                        self._unneeded.append(base + page)
        self._held[index][place] = pages

    def _wipe(self, place: int) -> None:
        """Nothing of an earlier session stays in the rows of ``place`` that have memory."""
        for family in self.layout.families:
            start, stop = place * family.slot_bytes, (place + 1) * family.slot_bytes
            span = family.span(place)
            for base in family.base_pages:
                for first, last in self._mapped_runs(base, span):
                    low = max(start, first * family.page_bytes)
                    high = min(stop, last * family.page_bytes)
                    self.memory.fill(base * family.page_bytes + low, high - low, self.poison)

    def _mapped_runs(self, base: int, span: range) -> list[tuple[int, int]]:
        """Neighbouring pages of ``span`` with memory, as (first, one past the last)."""
        runs: list[tuple[int, int]] = []
        for page in span:
            if base + page not in self._mapped:
                continue
            if runs and runs[-1][1] == page:
                runs[-1] = (runs[-1][0], page + 1)
            else:
                runs.append((page, page + 1))
        return runs

    def _map_due(self, ticks: int = 1) -> int:
        """Map everything the next ``ticks`` ticks need, at once; how many pages that were."""
        pages = 0
        while self._due and self._due[0][0] < self.tick + ticks:
            pages += self._map_next()
        return pages

    def _work(self, is_over: Callable[[], bool]) -> None:
        budget = self.pace
        try:
            while budget and self._due:
                budget -= self._map_next()
            self.is_short = False
        except OutOfPages:
            self.is_short = True  # tried again every tick; a tick that needs the page now fails
        for _ in range(self.pace):
            # One in any case, or a device that is always done would keep all pages for ever.
            if not self._unmap_next() or is_over():
                break

    def _map_next(self) -> bool:
        """Map the page that is due first; False if that had happened or is no longer wanted."""
        deadline, page = self._due[0]
        is_needed = page in self._wanted and page not in self._mapped
        if is_needed:
            self._map(page, deadline < UNHURRIED)  # first: if it fails, the page is still due
        heapq.heappop(self._due)
        return is_needed

    def _unmap_next(self) -> bool:
        """Take the memory from one page nobody wants; False if there is none."""
        while self._unneeded:
            page = self._unneeded.pop()
            if page in self._mapped and page not in self._wanted:
                self.memory.settle()
                self.memory.unmap_page(page)
                self._mapped.discard(page)
                self.counts.unmapped += 1
                return True
        return False

    def _map(self, page: int, is_urgent: bool = True) -> None:
        """Raises `OutOfPages` only when there is no page left to take from."""
        while True:
            try:
                self.memory.map_page(page)
                break
            except OutOfPages:
                if self._unmap_next():
                    continue
                if not is_urgent or self._prepared is None:
                    raise
                self._let_go(self._prepared, 0)
                self._prepared = None
        self._mapped.add(page)
        self.counts.mapped += 1
        size = self.layout.page_bytes
        self.memory.fill(page * size, size, self.poison)
