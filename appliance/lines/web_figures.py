"""What a websocket line knows of one of its calls: counts, and what each part of the way took.

Shown at `/api/line` while a call lasts and written into the log when it ends. Does not decide
anything. Times are between moments of one machine's clock: networks and clients are not in them.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from appliance.clock import NS_PER_MS

KEPT = 1024
"""Frames of the past that the times are of: 82 s at 80 ms."""


class Parts(msgspec.Struct, frozen=True):
    """Median and 99th percentile of what one part of the way took, in ms."""

    p50_ms: float
    p99_ms: float


class Figures(msgspec.Struct, frozen=True):
    """How a call is going, as its line sees it. Counts are frames unless they say otherwise."""

    number: int
    session: int
    state: str
    sent: int
    short: int
    """Ticks without a frame, because the caller's audio had not come."""
    overslept: int
    """Ticks without a frame, because this process was late."""
    paid_back: int
    """Ticks without a frame, because the box had one waiting."""
    delivered: int
    late: int
    filled: int
    discarded: int
    cut_samples: int
    junk_bytes: int
    dropped_pages: int
    """Pages before the handshake, beyond twice real time, or not decodable."""
    stretch_ppm: float
    arrived_to_tick: Parts | None
    """From the arrival of a frame's last sample until its tick: jitter buffer and lead."""
    tick_to_made: Parts | None
    """The box."""
    made_to_sent: Parts | None
    """From a frame made until it leaves: encoding, and waiting for its time."""
    arrived_to_sent: Parts | None
    """All of it: the way from a word of the caller to the answering frame, without networks."""


class Took:
    """Times of the parts, as they are taken."""

    def __init__(self) -> None:
        self.arrived_to_tick: deque[int] = deque(maxlen=KEPT)
        self.tick_to_made: deque[int] = deque(maxlen=KEPT)
        self.made_to_sent: deque[int] = deque(maxlen=KEPT)
        self.arrived_to_sent: deque[int] = deque(maxlen=KEPT)


def parts(took_ns: Sequence[int]) -> Parts | None:
    if not took_ns:
        return None
    p50, p99 = np.percentile(np.array(took_ns), [50, 99]) / NS_PER_MS
    return Parts(round(float(p50), 1), round(float(p99), 1))
