"""From the audio of a telephone call to exactly one frame per tick. Pure: times are arguments.

Decides what the model hears when a packet is lost, when the peer sends nothing, and how a clock
that runs faster or slower than the box's is followed. Does not know sockets, codecs or resamplers:
it is given samples at the model's rate as they come out of the stack, and says by how much they
should be stretched (`ppm`).

A SIP stack deletes lost audio: what follows moves up, and the call's timeline shrinks. Here every
tick gets a frame of the full length:

- A *hole* is where audio was due and did not come. Once it is clear that it was lost, what is
  missing is put in its place, so that everything after it keeps its time.
- A frame that is *short* at its tick is completed at its end; what comes late after all is heard
  late, and the surplus is worked off by stretching.
- What is put in repeats the last pitch periods for `REPEAT_NS`, fading out into *comfort noise* at
  the level of the call's own background; noise alone once nothing has come for `GONE_NS`.

How much waits is measured at each arrival as `spare`: how much later it could have come, if
samples were taken one by one, as in `jitter`. Its smallest value of the last seconds is kept
between two bounds around `SPARE_NS`; between them nothing is stretched, so that a clean line
reaches the model sample by sample.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S

SPARE_NS = 8 * NS_PER_MS
"""What a packet may be late by: the stack has smoothed the network's jitter already."""

LATE_NS = 12 * NS_PER_MS
"""A packet later than this against the ones before leaves a hole, if they came evenly; three times
what they were off by more if they did not."""

LOOKS_NS = 10 * NS_PER_MS
"""Audio that is found is as old as this at most, unless it was looked for later than it should."""

GONE_NS = 400 * NS_PER_MS
"""Nothing for so long is no loss: the peer is silent or on hold; what comes next begins anew."""

REPEAT_NS = 60 * NS_PER_MS
"""How long lost speech is repeated, fading; beyond that repeating is heard as a buzz."""

WINDOW_TAKES = 64
"""How long an arrival counts: 5 s at 80 ms."""

BAND_NS = 5 * NS_PER_MS
"""How far the smallest spare may be from `SPARE_NS` before anything is stretched."""

STEER_PPM, MOST_PPM = 2_500.0, 10_000.0
"""Stretching until the smallest spare is back in the middle, and while it is `FAR_NS` off or
more: at most a sixth of a semitone. It is hardly heard and soon over, since to stretch costs four
times as much as not to, and every new ratio a new filter: hence two and no more."""

FAR_NS = 30 * NS_PER_MS

CUT_NS = 100 * NS_PER_MS
"""What may wait beyond `SPARE_NS` before it is cut instead of worked off."""

CUT_TAKES = 12
"""Takes (about a second) for which it must have waited."""

MOST_NS = NS_PER_S
"""What is ever held; older samples are dropped at once."""

FADE_NS = 5 * NS_PER_MS
"""Length of the fade over a splice."""

NOISE_MOST = 0.003
"""Comfort noise is never louder: -50 dB of full scale."""

HISTORY_NS = 60 * NS_PER_MS
LONGEST_PITCH_NS = 15 * NS_PER_MS
SHORTEST_PITCH_NS = 2_500_000
"""Pitch of 66 to 400 Hz."""


@dataclass(slots=True)
class Counts:
    """What the model heard. Samples are at the model's rate."""

    frames: int = 0
    whole: int = 0
    """Frames of nothing but the caller's audio."""
    short: int = 0
    """Frames that were completed because their audio had not come."""
    holes: int = 0
    concealed_samples: int = 0
    """Put in for lost audio."""
    noise_samples: int = 0
    """Comfort noise, because the peer sent nothing."""
    cut_samples: int = 0
    """Never heard, because too many waited."""
    stretched: int = 0
    """Frames during which what waited was brought back to what should."""
    starts: int = 0
    """How often the peer's audio began, the first time and after silence."""


class ReceiveBuffer:
    """One caller's samples, in whenever the stack has them, out one frame per tick."""

    def __init__(self, samples: int, rate_hz: int, seed: int = 1) -> None:
        """samples: of a frame. seed: of the noise."""
        self.samples = samples
        self.rate_hz = rate_hz
        self.ppm = 0.0
        """Stretching that is wanted: positive makes more samples out of the same audio."""
        self.counts = Counts()
        self._period_ns = samples * NS_PER_S // rate_hz
        self._held: deque[NDArray[np.float32]] = deque()
        self._size = 0
        """Samples in it."""
        self._past: deque[NDArray[np.float32]] = deque()
        """What went into it last, `HISTORY_NS` or a little more."""
        self._past_size = 0
        self._due_ns: int | None = None
        """When the stream's next samples should come; None: nothing is streaming."""
        self._off_ns = 0
        """What arrivals are off by, on average."""
        self._last_ns = 0
        self._sizes: deque[int] = deque(maxlen=32)
        """Samples of the newest arrivals; the smallest is a packet."""
        self._standing_in = 0
        """Samples that stand in for audio that was due, since the newest arrival."""
        self._repeated = 0
        """Samples of the repetition that is going on."""
        self._cycle = np.zeros(1, np.float32)
        """What is being repeated."""
        self._noise = np.random.default_rng(seed)
        self._floor = NOISE_MOST / 10
        self._least: int | None = None
        self._spares: deque[int] = deque(maxlen=WINDOW_TAKES)
        """Less `_stretched_ns` of their time: as if nothing had been stretched ever."""
        self._stretched_ns = 0
        """By how much all that came has been made longer."""
        self._left: deque[int] = deque(maxlen=CUT_TAKES)
        self._steering = False

    @property
    def held_samples(self) -> int:
        """Samples that wait now."""
        return self._size

    @property
    def is_streaming(self) -> bool:
        """Audio comes; False before the first and after `GONE_NS` without any."""
        return self._due_ns is not None

    def push(
        self,
        pcm: NDArray[np.float32],
        now_ns: int,
        take_ns: int,
        looked_ns: int | None = None,
        ppm: float | None = None,
    ) -> None:
        """Samples have come. pcm: (n,) float32. take_ns: when `take` is due next, not before now.

        looked_ns: when there were none yet. ppm: by how much they are stretched, if not by what was
        wanted. Times must not run backwards. What is no number becomes silence.
        """
        if not pcm.size:
            return
        clean = pcm
        energy = float(np.vdot(pcm, pcm))  # which warns of nothing, unlike @
        if not math.isfinite(energy):
            clean = np.where(np.abs(pcm) <= 1.0, pcm, np.float32(0.0))
            energy = float(np.vdot(clean, clean))
        self._sizes.append(clean.size)
        packet = min(self._sizes)
        # Several packets read at once came one after the other: this is when the first one did.
        first_ns = now_ns - self._in_ns(clean.size - packet)
        if self._due_ns is None:
            self._begin(first_ns, take_ns)
        else:
            if looked_ns is not None:
                # Nobody looked in between: as late as it was due, and not as late as we are.
                first_ns = min(first_ns, max(self._due_ns, looked_ns + LOOKS_NS))
            self._close_hole(first_ns, packet)
        assert self._due_ns is not None
        spare_ns = take_ns - first_ns + self._in_ns(self._size - self.samples)
        spare_ns -= self._stretched_ns
        self._least = spare_ns if self._least is None else min(self._least, spare_ns)
        if self._repeated:
            clean = self._join(clean)
        self._append(clean)
        self._stretched_ns += int(
            self._in_ns(clean.size) * (self.ppm if ppm is None else ppm) / 1e6
        )
        self._listen(math.sqrt(energy / clean.size), clean.size)
        # The stream's own pace, and a twentieth of what this arrival was off by.
        self._due_ns += (first_ns - self._due_ns) // 20 + self._in_ns(clean.size)
        self._last_ns = now_ns
        self._standing_in = 0
        self._repeated = 0

    def take(self, now_ns: int) -> NDArray[np.float32]:
        """The frame of this tick, (S,) float32 of the caller's to keep. Call it once a tick."""
        if self._due_ns is not None and now_ns - self._last_ns > GONE_NS:
            self._due_ns = None
            self._forget()
        missing = self.samples - self._size
        self.counts.frames += 1
        if missing <= 0:
            self.counts.whole += 1
        elif self._due_ns is None:
            self.counts.noise_samples += missing
            self._append(self._comfort(missing))
        else:
            self.counts.short += 1
            self._stand_in(missing)
        frame = self._pop(self.samples)
        self._steer()
        self.counts.stretched += self.ppm != 0.0
        self._left.append(self._size)
        self._cut()
        return frame

    # --- arrivals

    def _begin(self, now_ns: int, take_ns: int) -> None:
        """The peer's audio begins: what the next frame needs before it is noise."""
        self.counts.starts += 1
        self._due_ns = now_ns
        self._forget()
        lead_ns = SPARE_NS + self._period_ns - (take_ns - now_ns)
        pad = self._in_samples(max(0, lead_ns)) - self._size
        if pad > 0:
            self.counts.noise_samples += pad
            self._append(self._comfort(pad))

    def _close_hole(self, first_ns: int, packet: int) -> None:
        """If audio is missing before what came at ``first_ns``, put something in its place.

        packet: samples of one.
        """
        assert self._due_ns is not None
        late_ns = first_ns - self._due_ns
        packet_ns = self._in_ns(packet)
        bound_ns = LATE_NS + 3 * self._off_ns
        if late_ns < bound_ns:
            self._off_ns += (abs(late_ns) - self._off_ns) // 16
            if late_ns < -packet_ns:  # a burst: the stack waits less than before
                self._due_ns = first_ns
            return
        # Whole packets are lost: half of one that is only late is no reason to insert one.
        lost = max(0, round((late_ns - bound_ns // 2) / packet_ns)) * packet
        self._due_ns += self._in_ns(lost)
        if first_ns - self._due_ns > packet_ns:
            self._due_ns = first_ns
        if lost > self._standing_in:
            self._stand_in(lost - self._standing_in)
        self.counts.holes += lost > 0

    def _append(self, pcm: NDArray[np.float32]) -> None:
        self._held.append(pcm)
        self._size += pcm.size
        self._past.append(pcm)
        self._past_size += pcm.size
        kept = self._in_samples(HISTORY_NS)
        while self._past_size - self._past[0].size >= kept:
            self._past_size -= self._past.popleft().size
        over = self._size - self._in_samples(MOST_NS)
        if over > 0:
            self.counts.cut_samples += over
            self._pop(over)

    def _pop(self, samples: int) -> NDArray[np.float32]:
        """The oldest of what is held, of which there must be as many."""
        out = np.empty(samples, np.float32)
        at = 0
        while at < samples:
            chunk = self._held.popleft()
            taken = min(samples - at, chunk.size)
            out[at : at + taken] = chunk[:taken]
            at += taken
            if taken < chunk.size:
                self._held.appendleft(chunk[taken:])
        self._size -= samples
        return out

    def _listen(self, level: float, samples: int) -> None:
        """Follow the level of the background: down at once, up by 1 dB a second."""
        rise = 1.0 + 0.12 * samples / self.rate_hz
        self._floor = min(max(level, 1e-5), self._floor * rise, NOISE_MOST)

    # --- what stands in

    def _stand_in(self, missing: int) -> None:
        self.counts.concealed_samples += missing
        self._standing_in += missing
        self._append(self._conceal(missing))

    def _conceal(self, missing: int) -> NDArray[np.float32]:
        """What a listener misses least: more of the same, fading into noise."""
        if not self._repeated:
            shortest, longest = map(self._in_samples, (SHORTEST_PITCH_NS, LONGEST_PITCH_NS))
            kept = self._in_samples(HISTORY_NS)
            past = np.concatenate([np.zeros(kept, np.float32), *self._past])[-kept:]
            self._cycle = past[-_pitch(past, shortest, longest) :]
        at = self._repeated + np.arange(missing)
        tiled = self._cycle[at % self._cycle.size]
        gain = np.clip(1.0 - at / self._in_samples(REPEAT_NS), 0.0, 1.0).astype(np.float32)
        self._repeated += missing
        noise = self._comfort(missing)
        out: NDArray[np.float32] = tiled * gain + noise * (1.0 - gain)
        return out

    def _join(self, pcm: NDArray[np.float32]) -> NDArray[np.float32]:
        """The beginning of ``pcm``, faded in over what would have been put in next."""
        fade = min(self._in_samples(FADE_NS), pcm.size)
        more = self._conceal(fade)
        rise = np.linspace(0.0, 1.0, fade, dtype=np.float32)
        joined = pcm.copy()
        joined[:fade] = more * (1.0 - rise) + pcm[:fade] * rise
        return joined

    def _comfort(self, samples: int) -> NDArray[np.float32]:
        return self._noise.normal(0.0, self._floor, samples).astype(np.float32)

    # --- how much waits

    def _steer(self) -> None:
        if self._least is not None:
            self._spares.append(self._least)
            self._least = None
        if not self._spares or self._due_ns is None:
            self.ppm = 0.0
            return
        error_ns = min(self._spares) + self._stretched_ns - SPARE_NS
        if abs(error_ns) > BAND_NS:
            self._steering = True
        elif abs(error_ns) < BAND_NS // 5 or error_ns * self.ppm > 0:
            self._steering = False
        if not self._steering:
            self.ppm = 0.0
            return
        # Too much to spare: make fewer samples, so that what is held shrinks.
        by_ppm = STEER_PPM if abs(error_ns) < FAR_NS else MOST_PPM
        self.ppm = -by_ppm if error_ns > 0 else by_ppm

    def _cut(self) -> None:
        """Take out what a stall left behind, once it is clear that it stays."""
        if len(self._left) < CUT_TAKES:
            return
        least = min(self._left)
        if least <= self._in_samples(SPARE_NS + CUT_NS):
            return
        drop = least - self._in_samples(SPARE_NS)
        before = self._pop(drop)
        rest = self._pop(self._size)
        fade = min(self._in_samples(FADE_NS), drop, rest.size)
        rise = np.linspace(0.0, 1.0, fade, dtype=np.float32)
        rest[:fade] = before[:fade] * (1.0 - rise) + rest[:fade] * rise
        self._held.append(rest)
        self._size = rest.size
        self.counts.cut_samples += drop
        self._forget()

    def _forget(self) -> None:
        """What was measured was measured of a buffer that is gone."""
        self._left.clear()
        self._spares.clear()
        self._least = None
        self._steering = False
        self.ppm = 0.0

    def _in_samples(self, ns: int) -> int:
        return ns * self.rate_hz // NS_PER_S

    def _in_ns(self, samples: int) -> int:
        return samples * NS_PER_S // self.rate_hz


def _pitch(past: NDArray[np.float32], shortest: int, longest: int) -> int:
    """The lag, in samples, at which the end of ``past`` is most like what came before it."""
    # Every third sample: what is left of a telephone's band is enough to find a pitch.
    coarse = past[::-3][::-1].astype(np.float64)
    width = coarse.size - longest // 3
    # products[k]: the end against what lies coarse.size - width - k before it.
    products = np.correlate(coarse, coarse[-width:], "valid")
    energies = np.convolve(coarse**2, np.ones(width), "valid")
    likeness = products / np.sqrt(energies + 1e-12)
    allowed = likeness[: likeness.size - -(-shortest // 3)]
    return 3 * (likeness.size - 1 - int(np.argmax(allowed)))
