"""What says what time it is, and when ticks are due; the only reader of time in the appliance.

All times are CLOCK_MONOTONIC in nanoseconds, which is one clock for every process of a machine:
a line and the box may compare theirs. Ticks lie on a grid from an origin; the grid does not know
when anybody woke up. Wall-clock time is read in one place, to name a call's file and to tell how
old one is.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

SPIN_NS = 150_000
"""How long before its time a sleeper wakes up and spins: Linux's default timer slack is 50 µs
(prctl(2), PR_SET_TIMERSLACK) and a wake-up on an idle core takes about as long again."""


class Clock(Protocol):
    """Time as a thing that can be handed in, so that tests need not wait."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin; never runs backwards."""

    def sleep_until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns`` or, when that has passed, at once; never before it."""


class MonotonicClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        """Sleep most of the way, then spin for the last `SPIN_NS`.

        The deadline is absolute and looked at again after each sleep, so neither a signal nor
        an early wake-up moves it. The spin holds the interpreter lock, hence its shortness.
        """
        while (left := deadline_ns - time.monotonic_ns()) > SPIN_NS:
            time.sleep((left - SPIN_NS) / NS_PER_S)
        while time.monotonic_ns() < deadline_ns:
            pass


@dataclass(frozen=True, slots=True)
class TickGrid:
    """Tick ``n`` starts at ``t0_ns + n * period_ns`` and must be done when the next one starts.

    Starts are computed from the origin, never from the last wake-up, so a late tick does not
    delay the ones after it.
    """

    t0_ns: int
    period_ns: int

    def start_ns(self, tick: int) -> int:
        return self.t0_ns + tick * self.period_ns

    def deadline_ns(self, tick: int) -> int:
        return self.start_ns(tick + 1)

    def margin_ns(self, tick: int, finished_ns: int) -> int:
        """Time to spare when ``tick`` finished. Negative means it missed its deadline."""
        return self.deadline_ns(tick) - finished_ns

    def tick_at(self, now_ns: int) -> int:
        """The tick whose period ``now_ns`` lies in; negative before the origin."""
        return (now_ns - self.t0_ns) // self.period_ns


def wall_ns() -> int:
    """UTC since 1970. Unlike all other times here it may be set, forwards and backwards."""
    return time.time_ns()


def stamp(at_ns: int) -> str:
    """A `wall_ns` to the millisecond, as it stands in file names: 20260131T120000.250Z."""
    seconds, rest_ns = divmod(max(at_ns, 0), NS_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y%m%dT%H%M%S}.{rest_ns // NS_PER_MS:03d}Z"


def stamped_ns(name: str) -> int | None:
    """The `wall_ns`, in whole seconds, of a name that begins with a `stamp`; None: it does not."""
    try:
        return int(datetime.strptime(f"{name[:15]}+0000", "%Y%m%dT%H%M%S%z").timestamp()) * NS_PER_S
    except ValueError:
        return None


def wall_stamp(ago_s: float = 0) -> str:
    """The `stamp` of now, or of so long ago."""
    return stamp(wall_ns() - int(ago_s * NS_PER_S))
