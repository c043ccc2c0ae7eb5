"""From a sound card's blocks to the model's frames and back, on the card's own clock.

Decides how much is held between the two, what a microphone that is muted sends, and what happens
to a loudspeaker that ran dry. Does not know devices or libraries (`local_card`), calls, or when
frames are due (`local_call`); times are arguments.

    heard ─▶ echo taken out, at the card's rate ─▶ stretched to the model's ─▶ `Intake` ─▶ frame
    frame ─▶ stretched to the card's ─▶ speaker ring

Both buffers are measured by their *spare*: how much later samples could have come without being
missed, as if they were taken one by one and not in blocks or frames; so blocks and frames that
slide past each other change nothing. `Drift` holds it where it should be.
"""

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.jitter import Intake
from appliance.lines.local_drift import Drift
from appliance.lines.local_rings import Exchange
from appliance.lines.resample import Quality, most_held_samples
from appliance.lines.stretch import Stretcher

MICROPHONE_SPARE_NS = 10 * NS_PER_MS
"""What the microphone's samples may be late by: callbacks of a busy machine, and our own look
every 2 ms."""

WORST_NS = 15 * NS_PER_MS
"""A lateness beyond that costs a frame and is over; to hold back more from then on would be delay
for the next minute."""

SPEAKER_SPARE_NS = 12 * NS_PER_MS
"""What this process may be late by with a frame before the loudspeaker runs dry."""

SURPLUS_NS = 40 * NS_PER_MS
"""What is held beyond that for half a second (the loudspeaker) or a second (the microphone) is cut
out at once: what a sound server leaves behind when it begins or stumbles is lag for minutes."""

SURPLUS_FRAMES = 6

FADE_NS = 5 * NS_PER_MS
"""Over a seam that cannot be avoided: as long as no click takes."""

STANDING_NS = 200 * NS_PER_MS
"""A loudspeaker that has fetched nothing for so long stands still; it asks every 10 ms."""

REFERENCE_LAG_NS = 20 * NS_PER_MS
OFFSETS = 31
"""Looks at callbacks that their median is of: a third of a second."""

QUIETEST_DB = -100.0


class Cleaner(Protocol):
    """What the microphone's samples go through."""

    delay_ns: int
    """How much later they come out."""

    def clean(
        self, heard: NDArray[np.float32], played: NDArray[np.float32], delay_ns: int
    ) -> NDArray[np.float32]:
        """One block of 10 ms, (n,) float32 both; returns (n,) of the caller's to keep.

        delay_ns: from a sample given to the loudspeaker until its echo is in hand, without the
        room, as far as anybody knows.
        """


class Untouched:
    """In place of an `EchoCanceller` where nothing is wanted of it."""

    delay_ns = 0

    def clean(
        self, heard: NDArray[np.float32], played: NDArray[np.float32], delay_ns: int
    ) -> NDArray[np.float32]:
        return heard.copy()


class Level:
    """The loudest sample since it was last looked at."""

    def __init__(self) -> None:
        self._peak = 0.0

    def hear(self, pcm: NDArray[np.float32]) -> None:
        if pcm.size:
            self._peak = max(self._peak, float(np.abs(pcm).max()))

    def look(self) -> float:
        """In dB of full scale."""
        peak, self._peak = self._peak, 0.0
        return max(QUIETEST_DB, 20 * float(np.log10(max(peak, 1e-9))))


class Reference:
    """What the loudspeaker was given while a block was heard.

    Two streams count samples of their own, and callbacks come when they like: what belongs together
    is the median of what callbacks say. `REFERENCE_LAG_NS` later than that, so that a late callback
    of the loudspeaker leaves no hole; its device takes longer than that until it sounds. Two cards
    whose clocks differ slide past each other a sample at a time, which a canceller follows.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._offsets: deque[int] = deque(maxlen=OFFSETS)
        self._offset: int | None = None
        """From the number of a sample heard to that of the sample played at that time."""
        self._lag = REFERENCE_LAG_NS * exchange.rate_hz // NS_PER_S

    def notice(self) -> None:
        """Callbacks have run: what do they say? Call it before the blocks are read."""
        exchange = self._exchange
        if not exchange.heard_ns or not exchange.played_ns:
            return
        ahead_ns = exchange.heard_ns - exchange.played_ns
        between = exchange.played.written - exchange.heard.written
        self._offsets.append(between + ahead_ns * exchange.rate_hz // NS_PER_S)
        middle = sorted(self._offsets)[len(self._offsets) // 2]
        if self._offset is None or abs(middle - self._offset) > self._lag:
            self._offset = middle
        elif abs(middle - self._offset) > self._lag // 8:
            self._offset += 1 if middle > self._offset else -1

    def copy(self, heard: int, out: NDArray[np.float32]) -> None:
        """What belongs to the samples heard.. (a number) into (n,) ``out``."""
        if self._offset is None:
            out[:] = 0.0
        else:
            self._exchange.played.copy(heard + self._offset - self._lag, out)


class Microphone:
    """A card's input as frames of the model's."""

    def __init__(
        self, exchange: Exchange, cleaner: Cleaner, rate_hz: int, samples: int, period_ns: int
    ) -> None:
        """rate_hz, samples, period_ns: of the model's frames."""
        self.muted = False
        self.level = Level()
        self.drift = Drift(period_ns)
        self.intake = Intake(
            samples,
            rate_hz,
            period_ns,
            spare_ns=MICROPHONE_SPARE_NS,
            steer=self._steer,
            cut_ns=SURPLUS_NS,
            keep_ns=MICROPHONE_SPARE_NS,
        )
        self._exchange = exchange
        self._cleaner = cleaner
        self._stretch = Stretcher(exchange.rate_hz, rate_hz)
        self._filter_ns = cleaner.delay_ns + _held_ns(exchange.rate_hz, rate_hz, exchange.block)
        self._reference = Reference(exchange)
        self._heard = np.zeros(exchange.block, np.float32)
        self._played = np.zeros(exchange.block, np.float32)
        self._gain = 1.0

    def _steer(self, surplus_ns: int) -> float:
        return self.drift.steer(max(surplus_ns, -WORST_NS))

    def listen(self, now_ns: int, take_ns: int) -> None:
        """Fetch whatever blocks have come. take_ns: when `take` is due next, later than now."""
        exchange = self._exchange
        if exchange.heard.waiting >= exchange.block:
            self._reference.notice()
        while exchange.heard.waiting >= exchange.block:
            self._reference.copy(exchange.heard.read, self._played)
            exchange.heard.read_into(self._heard)
            delay_ns = exchange.in_latency_ns + exchange.out_latency_ns - REFERENCE_LAG_NS
            pcm = self._cleaner.clean(self._heard, self._played, delay_ns)
            self.level.hear(pcm)
            wanted = 0.0 if self.muted else 1.0
            if wanted != self._gain:
                pcm *= np.linspace(self._gain, wanted, pcm.shape[0], dtype=np.float32)
                self._gain = wanted
            elif not wanted:
                pcm[:] = 0.0
            self.intake.push(self._stretch.push(pcm, self.intake.ppm), now_ns, take_ns)

    def take(self, take_ns: int) -> tuple[NDArray[np.float32] | None, int]:
        """The frame of a tick, (S,) float32, and when its last sample was in hand."""
        arrived_ns = self.intake.arrived_ns - self._filter_ns
        pcm = self.intake.take(take_ns)
        # What is still held came later than the frame's own last sample, as the sound flies.
        return pcm, arrived_ns - self.intake.held_samples * NS_PER_S // self.intake.rate_hz


class Speaker:
    """Frames of the model's into a card's output."""

    def __init__(self, exchange: Exchange, rate_hz: int, samples: int, period_ns: int) -> None:
        """rate_hz, samples, period_ns: of the model's frames."""
        self.level = Level()
        self.drift = Drift(period_ns)
        self.padded = 0
        """Times that silence was put in, because the loudspeaker had nothing left."""
        self.cut_samples = 0
        """Of the card's rate, dropped because far too many waited."""
        self.spare_ns = 0
        """What the last frame could have been late by."""
        self._exchange = exchange
        self._surplus_ns: deque[int] = deque(maxlen=SURPLUS_FRAMES)
        self._samples = samples
        self._period_ns = period_ns
        self._stretch = Stretcher(rate_hz, exchange.rate_hz)
        self._filter_ns = _held_ns(rate_hz, exchange.rate_hz, samples)
        self._fade = FADE_NS * rate_hz // NS_PER_S
        self._has_begun = False
        self._dry = 0
        """What `Exchange.dry` was when the last frame came."""
        self._last = 0.0
        """The last sample of the last frame: what must not break off."""
        self._silent = True
        """The last frame was none."""

    def runs(self, now_ns: int) -> bool:
        """Whether somebody fetches samples; what is handed in otherwise would never be heard."""
        return now_ns - self._exchange.played_ns < STANDING_NS

    @property
    def way_ns(self) -> tuple[int, int, int]:
        """What the last frame's way takes besides the line: in the device until it is heard, in
        the buffer here, in the device until it sounds."""
        exchange = self._exchange
        # The library speaks of a block's first sample; its last one is a block younger.
        device_in_ns = max(0, exchange.in_latency_ns - exchange.block_ns)
        held_ns = max(0, self.spare_ns) + exchange.block_ns + self._filter_ns
        return device_in_ns, held_ns, exchange.out_latency_ns

    def play(self, frame: NDArray[np.float32] | None, now_ns: int, earlier_ns: int = 0) -> None:
        """The next frame, (S,) float32, now that its time has come; None: there is none.

        earlier_ns: by how much the frames after it come sooner, which is no drift of the card's.
        """
        self.spare_ns = self._spare_ns(now_ns)
        surplus_ns = self.spare_ns - SPEAKER_SPARE_NS
        ran_dry = not self._has_begun or self.spare_ns < 0 or self._dry != self._exchange.dry
        self._dry = self._exchange.dry
        pcm = self._smooth(frame)
        self.level.hear(pcm)
        if ran_dry:
            # What the rate filter holds back at first is missing as well.
            held_ns = 0 if self._has_begun else self._filter_ns
            self._pad(SPEAKER_SPARE_NS - max(self.spare_ns, 0) + held_ns)
        else:
            self.drift.steer(surplus_ns)
            self._surplus_ns.append(surplus_ns)
        ppm = self.drift.ppm - earlier_ns * 1_000_000 // self._period_ns
        out = self._stretch.push(pcm, ppm)
        if ran_dry:
            # What the rate filter still held of the frame before comes first.
            head = out[: FADE_NS * self._exchange.rate_hz // NS_PER_S]
            head *= np.linspace(0.0, 1.0, head.shape[0], dtype=np.float32)
        if len(self._surplus_ns) == SURPLUS_FRAMES and min(self._surplus_ns) > SURPLUS_NS:
            out = self._cut(out, min(self._surplus_ns))
        self._exchange.speaker.write(out)
        self._has_begun = True

    def _smooth(self, frame: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """A frame that can be heard, without a step where one is missing."""
        rise = np.linspace(0.0, 1.0, self._fade, dtype=np.float32)
        if frame is None:
            pcm = np.zeros(self._samples, np.float32)
            pcm[: self._fade] = self._last * (1 - rise)
        else:
            pcm = np.clip(np.nan_to_num(frame), -1.0, 1.0).astype(np.float32)
            if self._silent:
                pcm[: self._fade] *= rise
        self._silent = frame is None
        self._last = float(pcm[-1])
        return pcm

    def _spare_ns(self, now_ns: int) -> int:
        """How much later than now samples could come without being missed; negative: too late."""
        exchange = self._exchange
        waiting_ns = exchange.speaker.waiting * NS_PER_S // exchange.rate_hz
        return waiting_ns - (now_ns - exchange.played_ns)

    def _pad(self, missing_ns: int) -> None:
        """Silence in front, so that the next frame is not late as well."""
        self.padded += self._has_begun
        self._exchange.speaker.write(
            np.zeros(max(0, missing_ns) * self._exchange.rate_hz // NS_PER_S, np.float32)
        )
        self._surplus_ns.clear()
        self.drift.forget_error()

    def _cut(self, out: NDArray[np.float32], surplus_ns: int) -> NDArray[np.float32]:
        """Leave out what a stall of the card has left too much, with a fade over the seam."""
        fade = FADE_NS * self._exchange.rate_hz // NS_PER_S
        drop = surplus_ns * self._exchange.rate_hz // NS_PER_S
        drop = max(0, min(drop, out.shape[0] - fade))
        rise = np.linspace(0.0, 1.0, fade, dtype=np.float32)
        rest = out[drop:].copy()
        rest[:fade] = out[:fade] * (1 - rise) + rest[:fade] * rise
        self.cut_samples += drop
        self.drift.forget_error()
        # What is still too much goes with the next frame: one that is cut short says little anyway.
        left_ns = drop * NS_PER_S // self._exchange.rate_hz
        for index, surplus in enumerate(self._surplus_ns):
            self._surplus_ns[index] = surplus - left_ns
        return rest


def _held_ns(rate_in_hz: int, rate_out_hz: int, chunk: int) -> int:
    """How far the rate filter's output is behind its input."""
    held = most_held_samples(rate_in_hz, rate_out_hz, Quality.LIVE, chunk)
    return int(held * NS_PER_S / rate_out_hz)
