"""Which of several boxes a newcomer is placed in. Pure.

Several GPUs mean one engine process each, a whole box with its own socket, clock, ledger and
admission. Nothing stands in front of them: a line asks each how it is and goes where headroom is
largest. So there is no part whose loss would cost more than one engine's sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.admission import Reason

ELSEWHERE = frozenset({Reason.TIME, Reason.MEMORY, Reason.LINES, Reason.DRAINING, Reason.NOT_READY})
"""Refusals that say something about a box, not about the caller: another box may say yes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one box said of itself."""

    box: int
    """Which, in the line's own numbering."""
    free: int
    """How many more sessions it would admit now."""
    held: int
    """Sessions it has admitted."""


def places(offers: Sequence[Offer]) -> list[int]:
    """Boxes in the order in which a newcomer should ask: most free first, then the emptiest.

    Boxes without room come last, not never: their answer is the reason the caller hears, and a
    session may have ended since they were asked.
    """
    return [o.box for o in sorted(offers, key=lambda o: (-o.free, o.held, o.box))]
