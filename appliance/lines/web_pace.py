"""When a websocket caller's replies leave, and how much is held back on purpose. Pure.

A frame of the model may leave as soon as it is made, or at its tick's deadline, or in between.
Sooner is less delay; but what leaves unevenly is dropped or stutters at the other end, so every
frame of a call leaves at the same *phase*, the time since its tick's start:

    |- tick n: gather, step -|                                              | deadline
    0                        made                phase: it leaves           period

The phase begins at what ticks have been seen or are forecast to take, and moves later when a
frame is not in hand in time, up to the deadline and `GUARD_NS`: the client hears a gap of some
milliseconds once, and no frame is lost. It moves earlier only for clients that follow (`GIVE_NS`
a frame, which a page takes up by playing a little faster): the published ones would drop audio.

`Cushion` is for the way in: a reserve that grows when it was too small, and shrinks again.
"""

from collections import deque
from dataclasses import dataclass

from appliance.clock import NS_PER_MS, NS_PER_S

GUARD_NS = 10 * NS_PER_MS
"""How long after its deadline a frame may leave at the latest."""

STEADY_NS = 5 * NS_PER_MS
"""How long after what ticks take a frame leaves: polling (2 ms), encoding (1.4 ms on the machine
this was written on), and an event loop that is a little late. A frame that is later than all that
comes out of the 10 ms that the published page keeps beside its 80."""

EASE_NS = 4 * NS_PER_MS
"""What every frame should have to spare, so that the next slightly slower one moves nothing. A
client that follows begins with no more: it has a reserve of its own, and steers it."""

GIVE_NS = 400_000
"""By how much a frame leaves earlier than the one before, while all have more than they need."""

LOOKED_AT = 128
"""Frames that must all have had more to spare than they need before anything is given back."""


KEPT, OUTLIERS = 1024, 3
"""Frames of the past that the next call's phase goes by, and how many of them may be later."""


class Phase:
    """When the frames of one call leave. Times are of one clock, all of them arguments."""

    def __init__(self, period_ns: int, expected_ns: int, follows: bool) -> None:
        """expected_ns: what a tick takes. follows: the client may be sent frames earlier."""
        self.latest_ns = period_ns + GUARD_NS
        ease_ns = EASE_NS if follows else STEADY_NS
        self.phase_ns = min(max(0, expected_ns) + ease_ns, self.latest_ns)
        """From a tick's start until its frame leaves."""
        self.moved = 0
        """How often it had to move later."""
        self._follows = follows
        self._spare: deque[int] = deque(maxlen=LOOKED_AT)
        """With `_given_ns` of their time: they move with all that is given back."""
        self._given_ns = 0

    def miss(self, by_ns: int) -> int:
        """A frame was not in hand at its time; by how much everything moves, 0: not any further."""
        shift_ns = min(by_ns, self.latest_ns - self.phase_ns)
        if shift_ns > 0:
            self.phase_ns += shift_ns
            self.moved += 1
            self._spare.clear()
        return max(0, shift_ns)

    def sent(self, in_hand_ns: int) -> int:
        """A frame left that had been in hand for so long; by how much the next leave earlier."""
        self._spare.append(in_hand_ns + self._given_ns)
        if not self._follows or len(self._spare) < LOOKED_AT:
            return 0
        if min(self._spare) - self._given_ns <= EASE_NS + GIVE_NS:
            return 0
        give_ns = min(GIVE_NS, self.phase_ns)
        self.phase_ns -= give_ns
        self._given_ns += give_ns
        return give_ns


@dataclass(slots=True)
class Cushion:
    """A reserve of time between ``least_ns`` and ``most_ns``."""

    least_ns: int
    most_ns: int
    step_ns: int = 5 * NS_PER_MS
    """By how much it grows when it was too small."""
    calm_ns: int = 20 * NS_PER_S
    """How long it must have been enough before a millisecond is given back."""
    held_ns: int = 0
    _since_ns: int = 0

    def __post_init__(self) -> None:
        self.held_ns = self.least_ns

    def too_small(self, now_ns: int) -> None:
        self.held_ns = min(self.most_ns, self.held_ns + self.step_ns)
        self._since_ns = now_ns

    def at(self, now_ns: int) -> int:
        """What to hold back now."""
        if self.held_ns > self.least_ns and now_ns - self._since_ns >= self.calm_ns:
            self.held_ns = max(self.least_ns, self.held_ns - NS_PER_MS)
            self._since_ns = now_ns
        return self.held_ns


class TickTimes:
    """What ticks of one box took lately, as all calls of a line saw them."""

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._made: deque[int] = deque(maxlen=KEPT)
        self.forecast_ns: int | None = None
        """What the box says one tick in a thousand takes; None: it has not said."""

    def saw(self, made_ns: int) -> None:
        """A frame was made so long after its tick's start."""
        self._made.append(made_ns)

    @property
    def expected_ns(self) -> int:
        """At most a period, and that as long as nothing is known."""
        if len(self._made) >= LOOKED_AT:
            return min(self._period_ns, sorted(self._made)[-OUTLIERS - 1])
        if self.forecast_ns:
            return min(self._period_ns, max(self.forecast_ns, *self._made, 0))
        return self._period_ns
