"""What a tick writes down of one session's due frame, and what it says of it to the line. Pure.

Flags are plain numbers here: the tick would spend more time on an enum's members than on frames.
"""

from appliance import frame_ring
from appliance.frame_ring import UplinkHeader
from appliance.ledger import Flag, Kind
from appliance.scheduler import SlotPlan
from appliance.seat import Seat

U32_MAX = 2**32 - 1

TICK = Kind.TICK.value
HEARD = Flag.HEARD.value
CONCEALED = Flag.CONCEALED.value
GENERATED = Flag.GENERATED.value
WARMING = Flag.WARMING.value
MISSED = Flag.MISSED.value
LATE = Flag.LATE.value
UNREAD = Flag.UNREAD.value
FAULT = Flag.FAULT.value
LAST = Flag.LAST.value
BAD_INPUT = Flag.BAD_INPUT.value
RESET = Flag.RESET.value
PRIMING = Flag.PRIMING.value


def tick_record(
    seat: Seat,
    plan: SlotPlan,
    flags: int,
    heard: UplinkHeader | None,
    batch: int,
    tick: int,
    made_ns: int,
    margin_ns: int,
    step_ns: int,
    text: int,
) -> tuple[int, ...]:
    """The record of the due frame ``seat.frame_index``, which is thereby accounted for.

    The order of values is that of `ledger.TICK_FIELDS`; a test holds the two together.
    """
    return (
        TICK,
        0,
        flags,
        seat.generation,
        seat.session,
        seat.frame_index,
        tick,
        heard.captured_ns if heard is not None else 0,
        made_ns,
        margin_ns,
        step_ns,
        text,
        batch,
        plan.slot,
        plan.lag,
        plan.skip,
        min(seat.misses, U32_MAX),
        0,
        0,
        0,
    )


def downlink_flags(flags: int) -> int:
    """The ledger's flags in the words of `frame_ring`."""
    return (
        frame_ring.GENERATED
        | (frame_ring.WARMING if flags & WARMING else 0)
        | (frame_ring.CONCEALED if flags & CONCEALED else 0)
        | (frame_ring.FINAL if flags & LAST else 0)
    )
