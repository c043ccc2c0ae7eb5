"""What the telephone line knows of one of its calls: counts, and what each part of the way took.

Written into the call's record and the log. Does not decide anything. Times are between moments of
one machine's clock; the network's, the peer's and the stack's own are not in them.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from appliance.clock import NS_PER_MS

KEPT = 1024
"""Frames of the past that the times are of: 82 s at 80 ms."""


class Parts(msgspec.Struct, frozen=True):
    """Median, 99th percentile and maximum of what one part of the way took, in ms."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class Figures(msgspec.Struct, frozen=True):
    """How a call is going. Counts are frames unless they say otherwise."""

    number: int
    session: int
    account: str
    caller: str
    call_id: str
    state: str
    rate_hz: int
    """Of the caller's audio, as the codec gives it."""
    digits: str
    frames: int
    """Handed to the box."""
    whole: int
    """Of nothing but the caller's audio."""
    short: int
    holes: int
    concealed_ms: int
    noise_ms: int
    cut_ms: int
    stretch_ppm: float
    stretched: int
    """Frames that were stretched by anything."""
    overslept: int
    """Ticks without a frame, because this process was late."""
    paid_back: int
    """Ticks without a frame, because the box had one waiting."""
    not_taken: int
    """Frames that the box had no room for: it was stopping, or stuck."""
    delivered: int
    late: int
    filled: int
    discarded: int
    underruns: int
    """How often the sender had run dry when a frame was handed over."""
    phase_moved: int
    """How often frames had to be waited for longer than before, because ticks took longer."""
    held_ms: int
    """On hold, altogether."""
    arrived_to_tick: Parts | None
    """From a frame's last sample in hand until its tick: the receive buffer and the lead."""
    tick_to_made: Parts | None
    """The box."""
    made_to_queued: Parts | None
    """From a frame made until the sender has it."""
    queued: Parts | None
    """What then waits in the sender before it."""
    arrived_to_queued: Parts | None


class Took:
    """Times of the parts, as they are taken, in ns."""

    def __init__(self) -> None:
        self.arrived_to_tick: deque[int] = deque(maxlen=KEPT)
        self.tick_to_made: deque[int] = deque(maxlen=KEPT)
        self.made_to_queued: deque[int] = deque(maxlen=KEPT)
        self.queued: deque[int] = deque(maxlen=KEPT)
        self.arrived_to_queued: deque[int] = deque(maxlen=KEPT)

    def parts(self) -> dict[str, Parts | None]:
        """By the names of `Figures`."""
        return {name: _parts(times) for name, times in vars(self).items()}


def _parts(took_ns: Sequence[int]) -> Parts | None:
    if not took_ns:
        return None
    p50, p99, most = np.percentile(np.array(took_ns), [50, 99, 100]) / NS_PER_MS
    return Parts(round(float(p50), 1), round(float(p99), 1), round(float(most), 1))
