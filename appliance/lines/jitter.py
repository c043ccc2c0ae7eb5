"""From audio that comes when a network likes to one frame per tick. Pure: times are arguments.

Decides when a caller's samples are taken, how long they wait on purpose, and how a clock that
runs faster or slower than the box's is followed. Does not know sockets, codecs or resamplers: it
is given samples at the model's rate and says by how much they should be stretched.

What is held back is measured at each arrival as its *spare*: how much later it could have come,
if samples were taken one by one instead of a frame at a time.

    spare = (next take - now) + (samples held - one frame) / rate

The smallest spare of the last seconds, one outlier left aside, is what the network left of the
buffer. It is steered to `spare_ns` by stretching, slowly and by little (2 % at the very most),
which also absorbs the difference of two clocks. Only when a stall has left far too much behind is
anything cut out, with a short fade, and only after that much has waited for a whole second. So a
page of P ms is P + `spare_ns` old when it is taken, however its arrival lies to the tick.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S

SPARE_NS = 20 * NS_PER_MS
"""What a network may be late by without the caller losing a frame."""

WINDOW_TAKES = 64
"""How long an arrival counts: 5 s at 80 ms. Less forgets a hiccup before the next one comes."""

OUTLIERS = 1
"""Takes of the window whose spare does not count. A page that comes 100 ms late once in a while
costs the frame it is late for; without this it would also cost 100 ms of lag for seconds."""

PPM_PER_MS = 300.0
"""Stretching per ms of spare too much or too little: 0.3 ms/s, so an error halves in 2.3 s. That
is shorter than the window it is measured in, so what the window holds moves with the buffer."""

MOST_PPM = 20_000.0
"""A third of a semitone, for the seconds after a stall; sound cards have been seen 450 ppm off."""

CUT_TAKES = 12
"""Takes (about a second) for which too much must have waited before it is cut."""

CUT_NS = 160 * NS_PER_MS
"""What may wait beyond a frame without being cut: a page of 80 ms and as much again."""

MOST_NS = NS_PER_S
"""What is ever held; older samples are dropped at once."""

FADE_SAMPLES = 120
"""Length of the fade over a cut: 5 ms at 24 kHz, as long as no click takes."""


def proportional(surplus_ns: int) -> float:
    """Too much to spare: make fewer samples, so that what is held shrinks."""
    return float(np.clip(-surplus_ns / NS_PER_MS * PPM_PER_MS, -MOST_PPM, MOST_PPM))


class Intake:
    """One caller's samples, in at any time and any amount, out one frame per tick."""

    def __init__(
        self,
        samples: int,
        rate_hz: int,
        period_ns: int,
        spare_ns: int = SPARE_NS,
        steer: Callable[[int], float] | None = None,
        cut_ns: int = CUT_NS,
        keep_ns: int | None = None,
    ) -> None:
        """samples: of a frame. Nothing is taken before the first audio has come.

        steer: how many ppm for a spare that is too large by so many ns; None: `proportional`.
        cut_ns: what may wait beyond a frame without being cut; keep_ns: what a cut leaves of it,
        by default what a page of half a frame would.
        """
        self.samples = samples
        self.rate_hz = rate_hz
        self.period_ns = period_ns
        self.spare_ns = spare_ns
        self._ppm_for = steer or proportional
        self._cut_ns = cut_ns
        self._keep = samples // 2 if keep_ns is None else keep_ns * rate_hz // NS_PER_S
        self.started = False
        """A frame has been taken: from now on a missing one is missed."""
        self.short = 0
        """Takes that found less than a frame."""
        self.cut_samples = 0
        """Samples that were never taken, because too many waited."""
        self.ppm = 0.0
        """Stretching that is wanted: positive makes more samples out of the same audio."""
        self._held = np.zeros(0, np.float32)
        self._spares: deque[int] = deque(maxlen=WINDOW_TAKES)
        """Smallest spare between each two takes; no entry where nothing arrived."""
        self._least: int | None = None
        self._left: deque[int] = deque(maxlen=CUT_TAKES)
        """Samples left over after each take."""
        self._arrived_ns = 0
        self._before_newest = 0
        """Samples that were held when the newest ones came."""

    @property
    def held_samples(self) -> int:
        """Samples that wait now."""
        return int(self._held.size)

    @property
    def arrived_ns(self) -> int:
        """When the newest samples came."""
        return self._arrived_ns

    def push(self, pcm: NDArray[np.float32], now_ns: int, take_ns: int) -> None:
        """Samples have come. pcm: (n,) float32. take_ns: when `take` is due next, later than now.

        NaN and infinity become silence: a stranger's decoder state is none of the model's.
        """
        if not pcm.size:
            return
        spare_ns = self._spare_ns(now_ns, take_ns)
        self._least = spare_ns if self._least is None else min(self._least, spare_ns)
        self._arrived_ns = now_ns
        self._before_newest = int(self._held.size)
        clean = np.nan_to_num(pcm, nan=0.0, posinf=0.0, neginf=0.0)
        self._held = np.concatenate([self._held, clean])
        most = MOST_NS * self.rate_hz // NS_PER_S
        if self._held.size > most:
            self.cut_samples += self._held.size - most
            self._held = self._held[self._held.size - most :]

    @property
    def is_whole(self) -> bool:
        """A frame may be taken earlier than planned: there is one, and it is not the first."""
        return self.started and self._held.size >= self.samples

    def take(self, now_ns: int, early_ns: int = 0) -> NDArray[np.float32] | None:
        """The frame of this tick, (S,) float32 of the caller's to keep; None: there is none.

        Call it once a tick, at the time that `push` was told, or ``early_ns`` before it.
        """
        if not self.started and not self._begin(now_ns + early_ns):
            return None
        self._steer()
        if self._held.size < self.samples:
            self.short += 1
            self.skip()
            return None
        frame, self._held = self._held[: self.samples], self._held[self.samples :]
        # As much as will have been left at the time that was planned.
        self._left.append(int(self._held.size) + early_ns * self.rate_hz // NS_PER_S)
        self._cut()
        return frame.copy()

    def skip(self) -> None:
        """A tick takes nothing: what waits is taken a tick later than it would have been."""
        self._left.clear()
        for index, spare_ns in enumerate(self._spares):
            self._spares[index] = spare_ns + self.period_ns

    def _spare_ns(self, now_ns: int, take_ns: int) -> int:
        ahead = self._held.size - self.samples
        return take_ns - now_ns + ahead * NS_PER_S // self.rate_hz

    def _begin(self, take_ns: int) -> bool:
        """Whether enough waits to begin; what is more than enough is nobody's loss yet.

        take_ns: when frames will be taken from now on.
        """
        if self._held.size < self.samples:
            return False
        # What the newest arrival had to spare, if this is the first take.
        ahead = self._before_newest - self.samples
        spare_ns = take_ns - self._arrived_ns + ahead * NS_PER_S // self.rate_hz
        if spare_ns < self.spare_ns:
            return False
        extra = (spare_ns - self.spare_ns) * self.rate_hz // NS_PER_S
        extra = min(extra, self._held.size - self.samples)
        self._held = self._held[extra:]
        self._least = None  # measured against takes that never were
        self.started = True
        return True

    def _steer(self) -> None:
        # What was measured before the last take would be measured so much later now.
        moved_ns = round(self.ppm * self.period_ns / 1e6)
        for index, spare_ns in enumerate(self._spares):
            self._spares[index] = spare_ns + moved_ns
        if self._least is not None:
            self._spares.append(self._least)
            self._least = None
        if not self._spares:
            return
        counting = sorted(self._spares)[OUTLIERS if len(self._spares) > OUTLIERS else 0]
        self.ppm = self._ppm_for(counting - self.spare_ns)

    def _cut(self) -> None:
        """Take out what a stall left behind, once it is clear that it stays."""
        if len(self._left) < CUT_TAKES:
            return
        least = min(self._left)
        if least * NS_PER_S <= self._cut_ns * self.rate_hz:
            return
        drop = min(least - self._keep, self._held.size)  # the steering does the rest
        fade = min(FADE_SAMPLES, self._held.size - drop)
        rise = np.linspace(0.0, 1.0, fade, dtype=np.float32)
        rest = self._held[drop:].copy()
        rest[:fade] = self._held[:fade] * (1 - rise) + rest[:fade] * rise
        self._held = rest
        self.cut_samples += drop
        self._left.clear()
        # Spares from before the cut speak of a buffer that is gone.
        self._spares.clear()
        self._least = None
