"""What this line needs of a SIP stack, or of whatever else brings telephone calls; and no more.

Decides the words between a stack and the calls. A stack takes care of signalling and packets, on
threads of its own that do not wait for Python; it tells what happened, carries out what it is
asked to, and gives each call's audio as samples. `sip_baresip` is one,
`audiosocket` and `chan_websocket` are others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Incoming:
    """Somebody calls; answered by `Stack.answer` or `Stack.reject`."""

    leg: int
    """The stack's number of the call, never used twice."""
    account: str
    """Who was called: the name of one of our accounts."""
    caller: str
    """Who calls, as the peer says; not to be trusted."""
    call_id: str
    """What the peer calls this call, for comparing with its own records."""
    source: str = ""
    """The address it came from, as far as the stack knows."""
    name: str = ""
    """What the caller is called, as the peer says."""
    called: str = ""
    """The address the caller dialled, as the peer says: of a trunk, which of its numbers."""
    number: str = ""
    """The caller's as it may be shown; empty: the one in `caller`."""
    diverted: str = ""
    """The number that the caller had dialled, of a call that was diverted to us."""


@dataclass(frozen=True, slots=True)
class Established:
    """The peer knows that the call is answered; audio may flow."""

    leg: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The call is over, whoever ended it."""

    leg: int
    why: str
    stats: dict[str, float] = field(default_factory=dict)
    """What the stack counted, by the stack's own names."""


@dataclass(frozen=True, slots=True)
class Digit:
    """The peer pressed a key."""

    leg: int
    digit: str


@dataclass(frozen=True, slots=True)
class Held:
    """The peer put us on hold, or took us back."""

    leg: int
    is_held: bool


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """What became of a transfer. One that is done closes the call, and is said before that."""

    leg: int
    why: str
    """In the peer's words, such as "486 Busy Here"."""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Registration:
    """How an account stands with its registrar."""

    account: str
    is_registered: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Dead:
    """The stack can do nothing more; this process has to be replaced."""

    why: str


Event = Incoming | Established | Closed | Digit | Held | TransferEnded | Registration | Dead


@dataclass(frozen=True, slots=True)
class Format:
    """How a call's sender is right now."""

    out_hz: int
    queued_samples: int
    """Given to `write` and not sent yet."""


class Media(Protocol):
    """One call's audio: mono, 16 bits. Nothing here waits."""

    in_hz: int
    """Rate of what `read` gave last; 0 before there was anything."""

    @property
    def codec(self) -> str:
        """What the call's audio travels in, as far as it is known; empty: it is not."""

    def format(self) -> Format | None:
        """None while there is no audio: before it begins, while it is negotiated anew, after."""

    def read(self) -> NDArray[np.int16]:
        """What has come since the last time, at `in_hz`; empty if nothing has."""

    def write(self, pcm: NDArray[np.int16]) -> int:
        """Queue samples at `Format.out_hz`; how many were taken."""


class Stack(Protocol):
    """Where calls come from. One event loop uses it."""

    async def start(self, hear: Callable[[Event], None]) -> None:
        """Begin to take calls. hear: called on the event loop. Raises `StackError`."""

    def answer(self, leg: int) -> None:
        """Accept; `Established` or `Closed` follows. Nothing happens if the call is gone."""

    def reject(self, leg: int) -> None:
        """Refuse, in the words of the protocol for "busy"."""

    def hang_up(self, leg: int) -> None:
        """End an answered call; `Closed` follows."""

    def transfer(self, leg: int, target: str) -> None:
        """Ask the peer to call ``target`` instead; `TransferEnded` or `Closed` follows."""

    def media(self, leg: int) -> Media:
        """The call's audio."""

    async def close(self) -> None:
        """Stop; calls that are on are cut off."""


class StackError(RuntimeError):
    """The stack does not start, or has died; the message says what to change."""


class NotYet(StackError):
    """It may start in a while, though nobody changes anything."""
