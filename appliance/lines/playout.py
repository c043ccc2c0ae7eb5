"""When a frame of the model is heard, and what its receipt says. Pure: times are arguments.

Every line asks this file; it does not know where audio goes to, shared memory, or sockets. Frame k
of a session is due at ``first_ns + k · period``, where first_ns is the arrival of the first
frame plus a playout buffer. Each due frame gets exactly one outcome, in order:

    in hand, and the box had made it before its deadline    DELIVERED
    in hand, although the box made it after its deadline    LATE
    not in hand: the caller hears silence                   FILLED
    - and when it comes after all                           DISCARDED, its second receipt

Whether the box was late is judged by the box's own stamp, on the same clock: a line that looks
into its ring late has eaten its own playout buffer, and `buffer_ns` says so. A frame that bears
another session's or generation's stamp is DISCARDED under that stamp, and so is whatever has not
been heard when the caller hangs up. What cannot be (an index not beyond the one before, or absurdly
far ahead) gets no receipt and is counted in `strays`: a receipt would only garble the ledger.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from appliance.frame_ring import FINAL, DownlinkHeader, Outcome, Receipt

Frame = TypeVar("Frame")

HORIZON_FRAMES = 1024
"""A frame further ahead than this of the next one due is a stray. No ring holds as many."""


@dataclass(frozen=True, slots=True)
class Played(Generic[Frame]):
    """What the caller hears for one period."""

    frame_index: int
    outcome: Outcome
    """DELIVERED, LATE or FILLED."""
    playout_ns: int
    """When its first sample is due."""
    frame: Frame | None
    """What `arrive` was given with it; None when FILLED: play silence."""


@dataclass(frozen=True, slots=True)
class _Held(Generic[Frame]):
    header: DownlinkHeader
    arrived_ns: int
    frame: Frame


class Playout(Generic[Frame]):
    """The playout timeline of one session. Times must not run backwards from call to call."""

    def __init__(self, session: int, generation: int, period_ns: int, buffer_ns: int) -> None:
        """buffer_ns: how long the first frame waits, hence what later ones may be late by."""
        self.session = session
        self.generation = generation
        self.period_ns = period_ns
        self.buffer_ns = buffer_ns
        self.next_index = 0
        """The frame that is due next."""
        self.first_ns: int | None = None
        """When frame 0 is due; None until anything has arrived."""
        self.final_index: int | None = None
        """The session's last frame, once the box has said which that is."""
        self.hung_up = False
        self.strays = 0
        self._held: dict[int, _Held[Frame]] = {}
        # The ring hands frames out in the order the box made them.
        self._highest = -1

    @property
    def is_over(self) -> bool:
        """Nothing more will be heard: the last frame was due, or the caller hung up."""
        if self.hung_up:
            return True
        return self.final_index is not None and self.next_index > self.final_index

    @property
    def next_due_ns(self) -> int | None:
        """When `due` will have something; None if nothing is known to come."""
        if self.first_ns is None or self.is_over:
            return None
        return self.playout_ns(self.next_index)

    def playout_ns(self, frame_index: int) -> int:
        """When ``frame_index`` is due. Only once a frame has arrived."""
        assert self.first_ns is not None, "no frame has arrived yet"
        return self.first_ns + frame_index * self.period_ns

    @property
    def next_arrived_ns(self) -> int | None:
        """When the frame that is due next came; None: it is not in hand."""
        held = self._held.get(self.next_index)
        return None if held is None else held.arrived_ns

    def postpone(self, by_ns: int) -> None:
        """Move the whole timeline later, or earlier if negative. Only once a frame has arrived.

        For a line that would rather play late once than substitute; it bounds how far it goes.
        """
        assert self.first_ns is not None, "no frame has arrived yet"
        self.first_ns += by_ns

    def arrive(self, header: DownlinkHeader, frame: Frame, arrived_ns: int) -> Receipt | None:
        """Take a frame of the downlink; the receipt it earns at once, if any.

        Call `due` with the same time first or afterwards, as you like: the outcome depends on
        ``arrived_ns`` and the playout time alone.
        """
        if (header.session, header.generation) != (self.session, self.generation):
            return self._discarded(header, arrived_ns, 0)
        index = header.frame_index
        if not self._highest < index < self.next_index + HORIZON_FRAMES:
            self.strays += 1
            return None
        self._highest = index
        if header.flags & FINAL:
            self.final_index = index
        if self.first_ns is None:
            self.first_ns = arrived_ns + self.buffer_ns - index * self.period_ns
        if self.hung_up or index < self.next_index:
            return self._discarded(header, arrived_ns, self.playout_ns(index) - arrived_ns)
        self._held[index] = _Held(header, arrived_ns, frame)
        return None

    def due(
        self, now_ns: int, *, at_once: bool = False
    ) -> tuple[list[Played[Frame]], list[Receipt]]:
        """Everything whose playout time has come: what is heard, and the receipts of it.

        After a pause it returns all the frames that were due meanwhile, in order. at_once: those
        in hand whose turn it is as well; for a caller who keeps a playout buffer of its own, so
        that the playout time is only when a frame is given up.
        """
        played: list[Played[Frame]] = []
        receipts: list[Receipt] = []
        while (playout_ns := self.next_due_ns) is not None and (
            playout_ns <= now_ns or (at_once and self.next_index in self._held)
        ):
            index = self.next_index
            self.next_index += 1
            held = self._held.pop(index, None)
            if held is not None and held.arrived_ns <= playout_ns:
                header = held.header
                on_time = header.made_ns <= header.deadline_ns
                outcome = Outcome.DELIVERED if on_time else Outcome.LATE
                played.append(Played(index, outcome, playout_ns, held.frame))
                receipts.append(self._receipt(index, outcome, now_ns, playout_ns - held.arrived_ns))
                continue
            played.append(Played(index, Outcome.FILLED, playout_ns, None))
            receipts.append(self._receipt(index, Outcome.FILLED, now_ns, playout_ns - now_ns))
            if held is not None:  # it came between its playout time and now
                early_ns = playout_ns - held.arrived_ns
                receipts.append(self._discarded(held.header, held.arrived_ns, early_ns))
        return played, receipts

    def hang_up(self, now_ns: int) -> list[Receipt]:
        """Hear nothing more. The receipts of the frames in hand; later ones get theirs on arrival.

        Call `due` with the same time first, or frames that are due already count as not heard.
        """
        self.hung_up = True
        receipts = [
            self._discarded(held.header, now_ns, self.playout_ns(index) - held.arrived_ns)
            for index, held in sorted(self._held.items())
        ]
        self._held.clear()
        return receipts

    def _receipt(self, index: int, outcome: Outcome, at_ns: int, buffer_ns: int) -> Receipt:
        return Receipt(self.session, self.generation, index, outcome, at_ns, buffer_ns)

    def _discarded(self, header: DownlinkHeader, at_ns: int, buffer_ns: int) -> Receipt:
        return Receipt(
            header.session,
            header.generation,
            header.frame_index,
            Outcome.DISCARDED,
            at_ns,
            buffer_ns,
        )
