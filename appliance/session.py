"""The life of one session.

Everything that changes a session's state is in `TRANSITIONS`. The file does not know about
sockets, slots, shared memory or time; it is told that something happened and says what state
that leads to.

             FirstFrame           LastFrame             Flushed
    ADMITTED -----------> LIVE --------------> DRAINING --------> GONE
       |                   | Leave, Fault, Shed  |                 ^
       |                   +--- Lost -------------|-----------------+
       +-- Leave, Shed, Lost, Timeout ------------+- Lost, Timeout -+

A LIVE session that is Reset is RESETTING until a tick has stepped it on a state as new as a
newcomer's (Restarted); meanwhile everything happens to it that happens to one that is LIVE.

A session with a persona is PRIMING before that: it holds a slot that no tick steps, its prompt is
fed in the margins of ticks, and its line has not been answered yet; Primed makes it ADMITTED.

ADMITTED holds a lease but no slot: nobody has spoken yet, and it costs no tick. LIVE steps once
on every tick, whether or not a frame of the caller came. DRAINING has left the batch and waits
until the line has said what became of every frame; a line that does not is given up after a
timeout. LOST means that the line itself vanished: nobody is left to ask.
"""

import enum
from dataclasses import dataclass
from typing import NewType

SessionId = NewType("SessionId", int)
"""Never reused while the box runs; what every frame, record and receipt is stamped with."""


class IllegalTransition(RuntimeError):
    """An event arrived in a state that has no place for it: a bug of ours."""


class State(enum.Enum):
    """Where a session is in its life; see the picture above."""

    PRIMING = "priming"
    ADMITTED = "admitted"
    LIVE = "live"
    RESETTING = "resetting"
    DRAINING = "draining"
    GONE = "gone"


class Event(enum.Enum):
    """What can happen to a session."""

    PRIMED = "primed"
    """The session's prompt has been fed."""
    FIRST_FRAME = "first_frame"
    """A tick found the caller's first frame waiting."""
    RESET = "reset"
    """Its model is to begin anew; the call, its lease, its persona and its line stay."""
    RESTARTED = "restarted"
    """A tick steps it on the new state."""
    LAST_FRAME = "last_frame"
    """The frame that was just consumed is the caller's last."""
    LEAVE = "leave"
    """The line, or the box, ends the call; the line is there to settle its frames."""
    FAULT = "fault"
    """The session's row is broken: its frames can no longer be trusted."""
    LOST = "lost"
    """The line's process or socket is gone."""
    SHED = "shed"
    """The box is late, and this session is the newest: it goes so that the others keep time."""
    TIMEOUT = "timeout"
    """No first frame came, or the receipts never did, or nobody read what the model said."""
    FLUSHED = "flushed"
    """Every frame that was handed out has its receipt."""


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.PRIMING: {
        Event.PRIMED: State.ADMITTED,
        Event.LEAVE: State.GONE,
        Event.LOST: State.GONE,
        Event.TIMEOUT: State.GONE,
    },
    State.ADMITTED: {
        Event.FIRST_FRAME: State.LIVE,
        Event.LEAVE: State.GONE,
        Event.FAULT: State.GONE,
        Event.SHED: State.GONE,
        Event.LOST: State.GONE,
        Event.TIMEOUT: State.GONE,
    },
    State.LIVE: {
        Event.RESET: State.RESETTING,
        Event.LAST_FRAME: State.DRAINING,
        Event.LEAVE: State.DRAINING,
        Event.FAULT: State.DRAINING,
        Event.SHED: State.DRAINING,
        Event.TIMEOUT: State.DRAINING,
        Event.LOST: State.GONE,
    },
    State.RESETTING: {
        Event.RESTARTED: State.LIVE,
        Event.LAST_FRAME: State.DRAINING,
        Event.LEAVE: State.DRAINING,
        Event.FAULT: State.DRAINING,
        Event.SHED: State.DRAINING,
        Event.TIMEOUT: State.DRAINING,
        Event.LOST: State.GONE,
    },
    State.DRAINING: {
        Event.FLUSHED: State.GONE,
        Event.TIMEOUT: State.GONE,
        Event.LOST: State.GONE,
    },
    State.GONE: {},
}


@dataclass(slots=True)
class Session:
    """Who a call is. Its slot is somebody else's business: a slot changes, a session does not."""

    id: SessionId
    generation: int
    """Number of the lease it holds; stamped on frames, so a former tenant's can be told."""
    state: State = State.ADMITTED

    def on(self, event: Event) -> State:
        """Apply ``event`` and return the new state. Raises `IllegalTransition`."""
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            expected = ", ".join(e.name for e in TRANSITIONS[self.state]) or "nothing"
            raise IllegalTransition(
                f"session {self.id} is {self.state.name} and got {event.name}; "
                f"it expects {expected}"
            ) from None
        return self.state
