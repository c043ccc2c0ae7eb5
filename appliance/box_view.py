"""How each session of a box has fared in its last ticks, for whoever watches the box.

Fed by the ledger's thread with the records it writes down anyway, read by the control thread for a
`Report` with details; the tick thread knows nothing of it. Remembers a few seconds per session and
how long ticks took since the start. Decides nothing and keeps nothing beyond a call's end.
"""

import threading
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS
from appliance.ledger import Flag

LATE, MISSED, CONCEALED = Flag.LATE.value, Flag.MISSED.value, Flag.CONCEALED.value

MARGINS = 32
"""Newest margins per session: 2.6 s at 80 ms; a watcher who asks every second misses none."""

MOST_SESSIONS = 256
"""Told of at once, worst first: what fits into one control message."""

SAME_TENTHS = 50
"""Margins within 5 ms of each other are as bad as each other."""

BINS = 20
"""Of the histogram of ticks: equal parts of a period, and one more for what took longer."""


class SessionView(msgspec.Struct, frozen=True, array_like=True):
    """One live session. Margins are deadline minus finish, in tenths of a millisecond."""

    session: int
    line: str
    age: int
    """Ticks it has been due."""
    bytes: int
    """What its state owns at this age, as the bundle declares it."""
    tick: int
    """Of the newest margin."""
    margins: tuple[int, ...]
    """Of the newest ticks, oldest first."""
    worst: int
    """Worst margin since it began."""
    late: int
    missed: int
    concealed: int
    """Ticks for which the model heard silence in the caller's place."""
    lag: int
    """Frames it has fallen behind."""


class BoxView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The live sessions, worst first, and what ticks took."""

    sessions: tuple[SessionView, ...]
    histogram: tuple[int, ...]
    """Ticks since the start by what they took: `BINS` equal parts of a period, then longer ones."""
    left_out: int = 0
    """Live sessions beyond `MOST_SESSIONS`."""


class _Fare:
    """One session."""

    __slots__ = ("age", "concealed", "lag", "late", "line", "margins", "missed", "tick", "worst")

    def __init__(self, line: str) -> None:
        self.line = line
        self.margins: deque[int] = deque(maxlen=MARGINS)
        self.age = self.tick = self.late = self.missed = self.concealed = self.lag = 0
        self.worst: int | None = None


class Watch:
    """What the ledger's thread saw. `add`, `begin`, `end` are its own; `view` is for any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fares: dict[int, _Fare] = {}
        self._histogram = np.zeros(BINS + 1, np.int64)

    def begin(self, session: int, line: str) -> None:
        with self._lock:
            self._fares[session] = _Fare(line)

    def end(self, session: int) -> None:
        with self._lock:
            self._fares.pop(session, None)

    def add(self, records: NDArray[np.void], period_ns: int) -> None:
        """Records of ticks, of any sessions, in the order they were made."""
        if not len(records):
            return
        tenths = (records["margin_ns"] // (NS_PER_MS // 10)).tolist()
        session, flags, index, tick, lag = (
            records[name].tolist() for name in ("session", "flags", "index", "tick", "lag")
        )
        ran = (records["flags"] & MISSED) == 0
        ticks = records["tick"][ran]
        took_ns = period_ns - records["margin_ns"][ran]
        with self._lock:
            for number, *row in zip(session, flags, index, tick, lag, tenths, strict=True):
                fare = self._fares.get(number)
                if fare is not None:
                    _enter(fare, *row)
            # Slots of one tick follow each other, and the last of them is when the tick was done.
            last = np.flatnonzero(np.diff(ticks, append=ticks[-1:] + 1)) if len(ticks) else ticks
            bins = np.clip(took_ns[last] * BINS // period_ns, 0, BINS)
            self._histogram += np.bincount(bins, minlength=BINS + 1)

    def view(self, bytes_at: Callable[[int], int]) -> BoxView:
        """bytes_at: what a session's state owns at an age in ticks."""
        with self._lock:
            found = [(session, fare, tuple(fare.margins)) for session, fare in self._fares.items()]
            histogram = tuple(self._histogram.tolist())
        live = [(s, f, m) for s, f, m in found if m]
        # Worst first, but not so finely that rows change places all the time.
        live.sort(key=lambda one: (min(one[2]) // SAME_TENTHS, one[0]))
        views = tuple(
            SessionView(
                session=session,
                line=fare.line,
                age=fare.age,
                bytes=bytes_at(fare.age),
                tick=fare.tick,
                margins=margins,
                worst=fare.worst if fare.worst is not None else 0,
                late=fare.late,
                missed=fare.missed,
                concealed=fare.concealed,
                lag=fare.lag,
            )
            for session, fare, margins in live[:MOST_SESSIONS]
        )
        return BoxView(views, histogram, len(live) - len(views))


def _enter(fare: _Fare, flags: int, index: int, tick: int, lag: int, margin: int) -> None:
    fare.age = index + 1
    fare.tick = tick
    fare.margins.append(margin)
    fare.worst = margin if fare.worst is None else min(fare.worst, margin)
    fare.late += bool(flags & LATE)
    fare.missed += bool(flags & MISSED)
    fare.concealed += bool(flags & CONCEALED)
    fare.lag = lag
