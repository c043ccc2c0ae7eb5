"""What a file line says of a call when it is over: the JSON beside the recordings."""

import statistics

import msgspec

from appliance.clock import NS_PER_MS


class Span(msgspec.Struct, frozen=True):
    """Smallest, median and largest of a set of times."""

    min: float
    median: float
    max: float


class CallReport(msgspec.Struct, frozen=True):
    """How a call went, as its line saw it; written beside its recordings as JSON."""

    wav: str
    session: int
    generation: int
    ended: str
    """The box's word (finished, left, ...), or what kept the call from ending well."""
    settings: dict[str, float]
    rate_in_hz: int
    samples_in: int
    """Samples read of the caller's file, at its rate; a little ahead of what was said."""
    bad_samples_in: int
    frames_sent: int
    uplink_overflows: int
    """Frames the box had no room for: it was not taking any."""
    frames_heard: int
    """Periods the caller listened for: delivered + late + filled."""
    delivered: int
    late: int
    filled: int
    discarded: int
    concealed: int
    """Heard frames for which the model had been fed silence."""
    warming: int
    """Heard frames that are silence because the model's delays were filling."""
    strays: int
    receipts_unsent: int
    reply_samples: int
    clipped_samples: int
    unknown_tokens: int
    round_trip_ms: float | None
    """From a word of the caller to the answering frame's playout: what the caller feels."""
    captured_to_in_hand_ms: Span | None
    """From a frame captured to the frame the model made of it in hand."""


def span_ms(times_ns: list[int]) -> Span | None:
    """Of times in ns; None when there is none."""
    if not times_ns:
        return None
    ms = [round(time_ns / NS_PER_MS, 3) for time_ns in times_ns]
    return Span(min(ms), round(statistics.median(ms), 3), max(ms))
