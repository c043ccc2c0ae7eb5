"""What a websocket line knows of one of its calls: counts, and what each part of the way took.

Shown at `/api/line` while a call lasts and written into the log when it ends. Does not decide
anything. Times are between moments of one machine's clock: networks and clients are not in them.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from appliance.clock import NS_PER_MS

PULSE_FRAMES = 6
"""How many frames a page is told of at once: twice a second at 80 ms."""

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
    phase_ms: float
    """How long after a tick's start its frame leaves; it moves later when frames come late."""
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


class Told(msgspec.Struct, frozen=True):
    """What a page of ours is told of its own call, every `PULSE_FRAMES`."""

    session: int
    frames: int
    """Sent so far."""
    margins_ms: tuple[float, ...]
    """Of the newest frames, oldest first: deadline minus finish."""
    ways_ms: tuple[float, ...]
    """From the arrival of a frame's last sample until the model's answer to it left."""
    lag_frames: int
    """The most that one of them was heard later than the tick it was meant for."""
    concealed: int
    """Frames so far for which the model heard silence in the caller's place."""
    filled: int
    """Frames so far that were silence in the model's place."""
    late: int
    """Frames so far that the model finished after their deadline."""


class Pulse:
    """Collects `Told`."""

    def __init__(self) -> None:
        self._margins: list[float] = []
        self._ways: list[float] = []
        self._lag = 0
        self._frames = self._concealed = self._filled = self._late = self._waiting = 0

    def frame(self, margin_ns: int, way_ns: int | None, lag: int, concealed: bool) -> None:
        """One was sent. way_ns: None when it answers nothing the caller said."""
        self._margins.append(round(margin_ns / NS_PER_MS, 1))
        if way_ns is not None:
            self._ways.append(round(way_ns / NS_PER_MS, 1))
        self._lag = max(self._lag, lag)
        self._concealed += concealed
        self._late += margin_ns < 0
        self._count()

    def missed(self) -> None:
        """Silence was sent in a frame's place."""
        self._filled += 1
        self._count()

    def take(self, session: int) -> Told | None:
        """What has come together, if it is enough to tell."""
        if self._waiting < PULSE_FRAMES:
            return None
        told = Told(
            session=session,
            frames=self._frames,
            margins_ms=tuple(self._margins),
            ways_ms=tuple(self._ways),
            lag_frames=self._lag,
            concealed=self._concealed,
            filled=self._filled,
            late=self._late,
        )
        self._margins, self._ways, self._lag, self._waiting = [], [], 0, 0
        return told

    def _count(self) -> None:
        self._frames += 1
        self._waiting += 1
