"""What a local line knows of its call: counts, and what each part of the way took.

The parts add up to the way from mouth to ear beyond the one frame that the model has to wait for.
Between two moments of this machine's clock they are measured; what lies inside the sound device
is what the sound library says of it, and what the filters hold back is known (`FILTER_*`).
Does not decide anything.

    device in ▸ filters ▸ waits for its tick ▸ tick ▸ waits for its time ▸ loudspeaker ▸ device out
"""

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from appliance.clock import NS_PER_MS
from appliance.frame_ring import DownlinkHeader, Outcome
from appliance.lines.local_sound import Microphone, Speaker

KEPT = 4096
"""Frames of the past that the times are of: 5 minutes at 80 ms."""


class Part(msgspec.Struct, frozen=True):
    """What one part of the way took, in ms."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class Figures(msgspec.Struct, frozen=True):
    """How a call is going, as its line sees it. Counts are frames unless they say otherwise."""

    sent: int
    short: int
    """Ticks without a frame, because the microphone's samples had not come."""
    overslept: int
    """Ticks without a frame, because this process was late."""
    paid_back: int
    """Ticks without a frame, because the box had one waiting."""
    silent: int
    """Frames of silence, because there was no sound card."""
    concealed: int
    """Frames for which the model had been fed silence."""
    delivered: int
    late: int
    filled: int
    discarded: int
    parts: dict[str, Part]
    """By name, in the order of the way; empty until something has been heard."""


class Took:
    """Times of the parts, as they are taken."""

    def __init__(self) -> None:
        self.arrived_to_tick: deque[int] = deque(maxlen=KEPT)
        self.tick_to_made: deque[int] = deque(maxlen=KEPT)
        self.made_to_played: deque[int] = deque(maxlen=KEPT)
        self.speaker: deque[int] = deque(maxlen=KEPT)
        self.device_in: deque[int] = deque(maxlen=KEPT)
        self.device_out: deque[int] = deque(maxlen=KEPT)
        self.whole: deque[int] = deque(maxlen=KEPT)

    def played(
        self, header: DownlinkHeader, now_ns: int, arrived_ns: int | None, speaker: Speaker
    ) -> None:
        """A frame was put into the loudspeaker's ring. arrived_ns: of what the model heard."""
        device_in_ns, held_ns, device_out_ns = speaker.way_ns
        self.made_to_played.append(now_ns - header.made_ns)
        self.speaker.append(held_ns)
        self.device_in.append(device_in_ns)
        self.device_out.append(device_out_ns)
        if arrived_ns is not None:
            self.whole.append(now_ns - arrived_ns + device_in_ns + held_ns + device_out_ns)

    def figures(
        self,
        outcomes: Mapping[Outcome, int],
        counts: Mapping[str, int],
        sent: int,
        microphone: Microphone | None,
    ) -> Figures:
        parts = {
            "device in": _part(self.device_in),
            "echo and rate filters, and the wait for the tick": _part(self.arrived_to_tick),
            "tick": _part(self.tick_to_made),
            "wait for its time": _part(self.made_to_played),
            "loudspeaker's buffer and rate filter": _part(self.speaker),
            "device out": _part(self.device_out),
            "all, beyond the model's one frame": _part(self.whole),
        }
        return Figures(
            sent=sent,
            short=0 if microphone is None else microphone.intake.short,
            delivered=outcomes[Outcome.DELIVERED],
            late=outcomes[Outcome.LATE],
            filled=outcomes[Outcome.FILLED],
            discarded=outcomes[Outcome.DISCARDED],
            parts={name: part for name, part in parts.items() if part is not None},
            **counts,
        )


def text(figures: Figures) -> list[str]:
    """For a terminal."""
    lines = [
        f"{figures.sent} frames said, {figures.delivered} heard, {figures.late} late, "
        f"{figures.filled} filled, {figures.discarded} discarded, {figures.concealed} concealed"
    ]
    missed = {
        "the microphone was late": figures.short,
        "this process was late": figures.overslept,
        "the box had one waiting": figures.paid_back,
    }
    if any(missed.values()):
        why = ", ".join(f"{times} because {reason}" for reason, times in missed.items() if times)
        lines.append(f"ticks without a frame: {why}")
    if figures.parts:
        lines.append("from mouth to ear, ms:                                   p50    p99    max")
        lines += [
            f"  {name:50s} {part.p50_ms:6.1f} {part.p99_ms:6.1f} {part.max_ms:6.1f}"
            for name, part in figures.parts.items()
        ]
    return lines


def _part(took_ns: Sequence[int]) -> Part | None:
    if not took_ns:
        return None
    p50, p99, most = np.percentile(np.array(took_ns), [50, 99, 100]) / NS_PER_MS
    return Part(round(float(p50), 1), round(float(p99), 1), round(float(most), 1))
