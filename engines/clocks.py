"""Native clocks: how far a region moves per tick, how much it keeps, and what follows from that.

Everything here is arithmetic on a declaration. Before anything runs it answers: how many rows of
a region are valid at a given age, where the next row goes, how many bytes a session owns at that
age, and which pages must be committed by when. It knows neither tensors nor devices; the arena,
admission and `duplexbox export show` all ask the same functions, so they cannot disagree.

    kind       moves           keeps                              example
    ring       advance / tick  the last `retain` rows (and the    keys and values of attention
                               first `pinned`, for ever)
    window     advance / tick  the last `retain` rows, shifted    left context of a convolution
    tail       advance / tick  `retain` rows still to be added    overlap-add of a transposed one
    counter    advance / tick  one number                         frames seen
    constant   never           what was set when the call began   temperature, seed
    scratch    every tick      nothing across ticks               depth transformer's keys

Only a ring grows with age: its rows are written one after the other, so the rows a young session
has not reached need no memory yet. All other kinds are whole from the first tick.
"""

import enum
from fractions import Fraction

import msgspec


class ClockKind(enum.Enum):
    """The ways a region can live across ticks; see the table above."""

    RING = "ring"
    WINDOW = "window"
    TAIL = "tail"
    COUNTER = "counter"
    CONSTANT = "constant"
    SCRATCH = "scratch"


class Order(enum.Enum):
    """Which row lies first in memory."""

    MODULO = "modulo"
    """Row of position p lies at p mod retain: a ring."""
    OLDEST_FIRST = "oldest_first"
    """Rows are shifted as they come in: a convolution's window, an overlap-add tail."""


class NativeClock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one region lives across ticks.

    Values are not checked here: `check` says what is wrong with one, so that the bundle
    reader can name the place.
    """

    kind: ClockKind
    axis: int = 0
    """Time axis of the region's shape per session (the batch axis does not count)."""
    advance: str = "0"
    """Rows per tick, a rational such as "2" or "1/2"."""
    retain: int = 0
    """Rows kept along `axis`, the pinned ones included."""
    pinned: int = 0
    """Rows at the start of a ring that are never overwritten (a persona's prefix)."""
    order: Order = Order.OLDEST_FIRST

    @property
    def rows_per_tick(self) -> Fraction:
        return Fraction(self.advance)

    def position(self, ticks: int) -> int:
        """Rows written since the session began, after ``ticks`` ticks."""
        return int(ticks * self.rows_per_tick)

    def valid_rows(self, ticks: int) -> int:
        """Rows that hold something after ``ticks`` ticks: what attention reads."""
        if self.kind is ClockKind.RING:
            return min(self.position(ticks), self.retain)
        return self.retain

    def row_of(self, position: int) -> int:
        """Row at which a ring stores ``position``; pinned rows are never chosen again."""
        assert self.kind is ClockKind.RING, self.kind
        if position < self.retain:
            return position
        return self.pinned + (position - self.pinned) % (self.retain - self.pinned)

    def ticks_until_full(self) -> int:
        """Ticks after which a session owns all this region will ever hold."""
        if self.kind is not ClockKind.RING or self.rows_per_tick == 0:
            return 0
        return -(-self.retain // self.rows_per_tick)


GROWS = frozenset({ClockKind.RING})
"""Kinds whose memory follows the session's age."""

MOVES = frozenset({ClockKind.RING, ClockKind.WINDOW, ClockKind.TAIL, ClockKind.COUNTER})
"""Kinds that must advance by something each tick."""


def check(clock: NativeClock, shape: tuple[int, ...]) -> str | None:
    """What is wrong with ``clock`` for a region of ``shape`` per session; None if nothing is."""
    try:
        advance = clock.rows_per_tick
    except (ValueError, ZeroDivisionError):
        return f'advance "{clock.advance}" is not a rational such as "2" or "1/2"'
    if advance < 0:
        return f"advance {clock.advance} runs backwards"
    if (clock.kind in MOVES) != (advance > 0):
        return f"a {clock.kind.value} region cannot advance by {clock.advance} rows per tick"
    if clock.kind not in (ClockKind.RING, ClockKind.WINDOW, ClockKind.TAIL):
        return None
    if not 0 <= clock.axis < len(shape):
        return f"axis {clock.axis} is not an axis of shape {list(shape)}"
    if clock.retain != shape[clock.axis]:
        return f"retain {clock.retain} is not the length {shape[clock.axis]} of axis {clock.axis}"
    if not 0 <= clock.pinned <= clock.retain:
        return f"pinned {clock.pinned} is not within retain {clock.retain}"
    if clock.kind is ClockKind.RING:
        if clock.order is not Order.MODULO:
            return 'a ring is stored in order "modulo"'
        if clock.pinned == clock.retain:
            return f"all {clock.retain} rows are pinned, none is left to write"
        if advance.denominator == 1 and (clock.retain - clock.pinned) % advance.numerator:
            return (
                f"{clock.retain - clock.pinned} rows cannot be written {clock.advance} at a time "
                f"without one write straddling the end of the ring"
            )
    return None


def bytes_at(
    clock: NativeClock, shape: tuple[int, ...], itemsize: int, ticks: int, page_bytes: int = 1
) -> int:
    """Bytes a session owns of a region ``ticks`` ticks into its call, in whole pages.

    shape: per session, without the batch axis. A ring grows row by row along its axis; the
    axes before it must be 1 for its rows to lie one after the other, otherwise it is whole
    from the start, like everything else.
    """
    whole = itemsize
    for length in shape:
        whole *= length
    if clock.kind in GROWS and all(length == 1 for length in shape[: clock.axis]):
        owned = whole // clock.retain * clock.valid_rows(ticks)
    else:
        owned = whole
    return -(-owned // page_bytes) * page_bytes


def pages_due(
    clock: NativeClock,
    shape: tuple[int, ...],
    itemsize: int,
    ticks: int,
    page_bytes: int,
    ahead_ticks: int,
) -> int:
    """Pages that must be committed now so that none is missing ``ahead_ticks`` ticks later."""
    return bytes_at(clock, shape, itemsize, ticks + ahead_ticks, page_bytes) // page_bytes
