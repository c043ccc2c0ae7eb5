"""Bring newcomers to the end of their prompt, in pieces that fit between two ticks.

    tick n  |- join, leave - gather - step - scatter -|- a piece - a piece -|.. guard ..| tick n+1

A job owns a slot that no tick steps. Its work is cut into pieces: rows of the prompt to feed, rings
to copy out of a snapshot or into one, the model's first choice. After every tick `PrimingDesk.work`
does the pieces of the oldest job that will end before the guard, going by what such a piece took
lately, and none that might not. So a persona costs the newcomer time and nobody else a frame; in a
box whose ticks leave no margin it is not fed at all, and given up after a while.

Decisions are `plan_piece` and `Costs`, both pure. The desk belongs to the tick thread and is bound
by its rules (`tick_loop`); slots 0..live-1 belong to the live sessions, jobs sit above them.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from appliance.clock import Clock
from engines import snapshot as snapshots
from engines.bundle import Manifest
from engines.executor import NoRoom
from engines.prefill import Primer, Prompt, chunk_rows
from engines.snapshot import Age, Piece, Snapshot

PIECE_BYTES = 4 << 20
"""Of a ring, copied at once: a millisecond at memory speeds of 4 GB/s."""

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Rows that may be fed at once: few sizes, so that each is measured and an engine can be prepared
for it; any number of rows is a sum of them."""

FORGET = 16
"""A hiccup raises a piece's expected time at once; each later piece takes a sixteenth of the excess
away."""

GUARD_SHARE = 8
"""One eighth of a period stays free before the next tick: what a piece may be late by."""


class Kind(enum.Enum):
    """What a job can need next."""

    CLEAR = "clear"
    """Empty the slot's rings."""
    FEED = "feed"
    """Feed rows of the prompt."""
    COPY = "copy"
    """Copy some rows from or to a snapshot."""
    OPEN = "open"
    """Feed the last row and let the model choose."""


@dataclass(slots=True)
class Costs:
    """What pieces took lately, in nanoseconds, per kind and rows: the largest, slowly forgotten."""

    of: dict[tuple[Kind, int], int] = field(default_factory=dict)

    def expect(self, kind: Kind, rows: int = 0) -> int:
        """How long such a piece may take. Rows never fed at once: twice what half of them took."""
        known = self.of.get((kind, rows))
        if known is None:
            return 2 * self.expect(kind, rows // 2) if rows > 1 else 0
        return known

    def saw(self, kind: Kind, rows: int, took_ns: int) -> None:
        """Learn from a piece that was done."""
        before = self.of.get((kind, rows), 0)
        self.of[kind, rows] = max(took_ns, before - max(0, before - took_ns) // FORGET)


@dataclass(frozen=True, slots=True)
class Need:
    """What a job needs next: a kind, and for FEED how many rows may be fed at most."""

    kind: Kind
    rows: int = 0


def plan_piece(need: Need, left_ns: int, costs: Costs) -> Need | None:
    """The largest piece towards ``need`` that ends within ``left_ns``; None: not now."""
    if left_ns <= 0:
        return None
    if need.kind is not Kind.FEED:
        return need if costs.expect(need.kind) <= left_ns else None
    for rows in reversed(CHUNKS):
        if rows <= need.rows and costs.expect(Kind.FEED, rows) <= left_ns:
            return Need(Kind.FEED, rows)
    return None


@dataclass(eq=False, slots=True)
class Job:
    """One newcomer's prompt. Made by control, owned by the tick thread until it is handed back."""

    prompt: Prompt
    settings: Mapping[str, float]
    loaded: Snapshot | None
    """State of the prompt from an earlier caller; None: it must be fed."""
    keep: bool
    """Take a snapshot for later callers, when it had to be fed."""
    until_ns: int
    """When to give up."""
    slot: int = -1
    cleared: bool = False
    fed: int = 0
    chunks: list[int] = field(default_factory=list)
    """How many rows were fed at once, in order."""
    kept: Snapshot | None = None
    pieces: Iterator[Piece] | None = None
    piece: Piece | None = None
    values: dict[str, NDArray[Any]] | None = None
    """What `open` gave; the session can be seated."""
    spent_ns: int = 0
    ticks: int = 0
    """Ticks whose margin it used."""

    used_snapshot: bool = False

    @property
    def done(self) -> bool:
        return self.values is not None


@dataclass(frozen=True, slots=True, eq=False)
class Lifted:
    """A job between two slots, with what was fed so far."""

    job: Job
    rows: list[tuple[Piece, NDArray[Any]]]


@dataclass(slots=True)
class PrimingCounts:
    """Read by other threads without a lock."""

    waiting: int = 0
    """Sessions not done."""
    done: int = 0
    rows: int = 0
    spent_ns: int = 0
    """Of the margins of ticks, altogether."""
    longest_ns: int = 0
    """One piece."""
    overruns: int = 0
    """Times a piece ended after the next tick was due."""


class PrimingDesk:
    """The jobs of one box. The tick thread uses it."""

    def __init__(self, primer: Primer, manifest: Manifest, slots: int, clock: Clock) -> None:
        self.counts = PrimingCounts()
        self.costs = Costs()
        self.guard_ns = manifest.timing.period_ns // GUARD_SHARE
        self._primer = primer
        self._manifest = manifest
        self._regions = {region.name: region for region in manifest.regions}
        self._slots = slots
        self._clock = clock
        self._parked: list[Job] = []
        """Every job that holds a slot, done or not."""

    def take(self, job: Job, live: int) -> None:
        """Give a newcomer the highest slot nobody holds; admission has seen to it that one is.

        live: slots 0..live-1 belong to sessions that talk.
        """
        job.slot = self._free_slot(live)
        self._parked.append(job)
        self._count()

    def drop(self, job: Job) -> None:
        """The session is over before it began."""
        self._parked.remove(job)
        if job.slot >= 0:
            self._primer.leave(job.slot)
        job.slot = -1
        self._count()

    def seat(self, job: Job, slot: int) -> None:
        """Make ``slot``, from which others were lifted, the session of a job that is done.

        Raises `SettingError`; drop it then.
        """
        assert job.values is not None, job.slot
        self._primer.settle(job.slot, slot, job.settings, job.values)
        self.drop(job)

    def lift(self, slot: int, besides: Job | None) -> Lifted | None:
        """The next live session needs ``slot``: take up whoever is being primed there, if anybody.

        What was fed so far is copied out: no more than the prompt's own rows.
        """
        for job in self._parked:
            if job.slot == slot and job is not besides:
                age = Age(job.prompt.key, job.fed + job.done, 0, whole=False)
                found = snapshots.pieces(self._manifest, age, 1 << 62)
                rows = [(p, self._primer.read(slot, p.region, p.first, p.rows)) for p in found]
                job.slot = -1
                if job.loaded is not None and not job.fed:
                    job.pieces = job.piece = None  # a snapshot half written begins anew
                return Lifted(job, rows)
        return None

    def put_down(self, lifted: Lifted, live: int) -> None:
        """Give whoever was lifted another slot, once the live session has its own."""
        lifted.job.slot = self._free_slot(live)
        self._primer.clear(lifted.job.slot)
        for piece, rows in lifted.rows:
            self._primer.write(lifted.job.slot, piece.region, piece.first, rows)

    def work(self, next_tick_ns: int) -> list[Job]:
        """Do what fits before ``next_tick_ns``; returns jobs that are now done."""
        done: list[Job] = []
        until_ns, worked_ns = next_tick_ns - self.guard_ns, 0
        for job in self._parked:
            if job.done:
                continue
            began_ns = now_ns = self._clock.now_ns()
            while not job.done:
                planned = plan_piece(self._need(job), until_ns - now_ns, self.costs)
                if planned is None:
                    break
                try:
                    self._do(job, planned)
                except NoRoom:  # the newcomer's trouble; it is told that its time is over
                    job.until_ns = 0
                    break
                after_ns = self._clock.now_ns()
                self.costs.saw(planned.kind, planned.rows, after_ns - now_ns)
                self.counts.longest_ns = max(self.counts.longest_ns, after_ns - now_ns)
                self.counts.rows += planned.rows
                now_ns = after_ns
            worked_ns += now_ns - began_ns
            job.ticks += now_ns > began_ns
            job.spent_ns += now_ns - began_ns
            if not job.done:
                break  # the oldest first: finishing one beats starting two
            done.append(job)
            self.counts.done += 1
        if done:
            self._count()
        self.counts.spent_ns += worked_ns
        self.counts.overruns += worked_ns > 0 and self._clock.now_ns() > next_tick_ns
        return done

    def calibrate(self, prompt: Prompt) -> None:
        """Time every kind of piece on slot 0 before anybody is let in. ``prompt``: any."""
        job = Job(prompt, {}, None, keep=True, until_ns=0, slot=0)
        for size in CHUNKS:
            if size <= prompt.shared_rows:
                for _ in range(3):  # the first run of a shape allocates
                    self._timed(job, Need(Kind.CLEAR))
                    job.fed = 0
                    self._timed(job, Need(Kind.FEED, size))
        while self._need(job).kind is Kind.FEED:
            left = prompt.shared_rows - job.fed
            self._do(job, Need(Kind.FEED, max(s for s in CHUNKS if s <= left)))
        while not job.done:
            self._timed(job, self._need(job))

    def _timed(self, job: Job, need: Need) -> None:
        before_ns = self._clock.now_ns()
        self._do(job, need)
        self.costs.saw(need.kind, need.rows, self._clock.now_ns() - before_ns)

    # --- one job

    def _need(self, job: Job) -> Need:
        if not job.cleared:
            return Need(Kind.CLEAR)
        if job.loaded is not None and self._next_piece(job, job.loaded.age):
            return Need(Kind.COPY)
        left = job.prompt.shared_rows - job.fed
        if left > 0:
            return Need(Kind.FEED, chunk_rows(job.fed, left, left, self._primer.retain))
        if job.keep and job.loaded is None and self._next_piece(job, self._kept(job).age):
            return Need(Kind.COPY)
        return Need(Kind.OPEN)

    def _do(self, job: Job, piece: Need) -> None:
        match piece.kind:
            case Kind.CLEAR:
                self._primer.clear(job.slot)
                job.cleared = True
            case Kind.FEED:
                self._primer.feed(job.slot, job.prompt, job.fed, piece.rows)
                job.fed += piece.rows
                job.chunks.append(piece.rows)
            case Kind.COPY:
                self._copy(job)
            case Kind.OPEN:
                job.values = self._primer.open(job.slot, job.prompt, job.settings)
                if job.loaded is not None:
                    job.chunks = list(job.loaded.fed)
                job.used_snapshot, job.loaded = job.loaded is not None, None

    def _copy(self, job: Job) -> None:
        assert job.piece is not None
        region = self._regions[job.piece.region]
        if job.loaded is not None:
            snapshots.put_piece(self._primer, job.slot, region, job.loaded, job.piece)
        else:
            snapshots.take_piece(self._primer, job.slot, region, self._kept(job), job.piece)
        job.piece = None

    def _next_piece(self, job: Job, age: Age) -> bool:
        """Have the job's next piece to copy at hand; False: there is none left."""
        if job.pieces is None:
            job.pieces = snapshots.pieces(self._manifest, age, PIECE_BYTES)
        if job.piece is None:
            job.piece = next(job.pieces, None)
            if job.piece is None and job.loaded is not None:
                job.fed = job.prompt.shared_rows
        return job.piece is not None

    def _kept(self, job: Job) -> Snapshot:
        if job.kept is None:
            age = snapshots.prompt_age(job.prompt)
            job.kept = snapshots.empty_snapshot(self._manifest, age, tuple(job.chunks))
        return job.kept

    def _free_slot(self, live: int) -> int:
        taken = {job.slot for job in self._parked}
        free = [slot for slot in range(live, self._slots) if slot not in taken]
        assert free, (live, taken, self._slots)
        return free[-1]

    def _count(self) -> None:
        self.counts.waiting = sum(not job.done for job in self._parked)
