"""What the control thread and the tick thread tell each other, and what is a session to the latter.

    control -> tick   Arrive  Depart  Restart          through `TickLoop.inbox`
    tick -> control   Primed  WentLive  Restarted  Left           through `TickLoop.outbox`

Values and one record per session, `Seat`, which control makes and the tick thread then owns; and
what the tick thread counts, for anybody to read. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.channel import Channel
from appliance.frame_ring import UplinkRing
from appliance.priming import Job
from appliance.session import Event, SessionId


@dataclass(eq=False, slots=True)
class Seat:
    """All the tick thread knows of one session. Made by control, owned by the tick thread."""

    session: SessionId
    generation: int
    channel: Channel
    settings: Mapping[str, float]
    wait_until_ns: int
    """When to give up on a caller who has been admitted and sends nothing."""
    job: Job | None = None
    """The prompt it begins with; it waits for its caller once that is done."""
    first_frame_ns: int = 0
    """With a job: how long to wait for the caller then."""
    tap: UplinkRing | None = None
    """Where a copy of what the caller says goes, for the models beside the voice."""
    slot: int = -1
    frame_index: int = 0
    """The next due frame: how many were due so far."""
    misses: int = 0
    unread: int = 0
    """Frames in a row that found no room, because the line reads none."""
    began: int = 0
    """The frame its state is as old as: 0, or where it was made to begin anew."""
    restart: "Restart | None" = None
    """Begin anew at the next tick boundary."""
    is_held: bool = False
    """Between two states: its prompt is fed again, no tick steps it, and its frames are due."""
    is_fresh: bool = False
    """The next step is the first of a state that began anew."""
    ending: Event | None = None
    """What ends the session at the next tick boundary."""

    @property
    def age(self) -> int:
        """Rows its state has lived through."""
        rows = self.job.prompt.rows if self.job is not None else 0
        return self.frame_index - self.began + rows


@dataclass(frozen=True, slots=True)
class Arrive:
    """Control -> tick: a session was admitted and may begin."""

    seat: Seat

    @property
    def job(self) -> Job | None:
        """Its prompt, to be fed first."""
        return self.seat.job


@dataclass(frozen=True, slots=True)
class Depart:
    """Control -> tick: end a session at the next tick boundary. Unknown ones are ignored."""

    session: SessionId
    event: Event


@dataclass(frozen=True, slots=True)
class Restart:
    """Control -> tick: a live session's state is to begin anew. Unknown ones are ignored."""

    session: SessionId
    job: Job | None
    """Its prompt, to be fed again; None: it begins with nothing."""


@dataclass(frozen=True, slots=True)
class Primed:
    """Tick -> control: the session's prompt is done, and its caller may speak."""

    session: SessionId
    job: Job
    """For its figures and its snapshot; the tick thread does not change either any more."""


@dataclass(frozen=True, slots=True)
class WentLive:
    """Tick -> control: the first frame came, and this tick steps the session for the first time."""

    session: SessionId
    tick: int
    slot: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """Tick -> control: this tick steps the session on a state that began anew."""

    session: SessionId
    tick: int
    frame_index: int
    """The first frame that comes of the new state."""
    held: int
    """Frames that were due meanwhile, while its prompt was fed."""
    job: Job | None


@dataclass(frozen=True, slots=True)
class Left:
    """Tick -> control, once per `Arrive`: the session's seat and channel are not used any more."""

    session: SessionId
    event: Event
    due: int
    """Frames that were due: each has its record in the ring."""


ToTick = Arrive | Depart | Restart
FromTick = Primed | WentLive | Restarted | Left


@dataclass(slots=True)
class TickCounts:
    """Read by other threads without a lock: each number is right, two may be a tick apart."""

    tick: int = -1
    live: int = 0
    late: int = 0
    missed: int = 0
    margin_ns: int = 0
    worst_margin_ns: int = 0
    steps: int = 0
    """Ticks that stepped at least one session."""
    late_run: int = 0
    """Steps in a row that finished late; ticks that never ran in between do not end the run."""
    slow_run: int = 0
    """Steps in a row that each took longer than the period."""
    hung: int = 0
    """Sessions that were ended because their line did not read."""
