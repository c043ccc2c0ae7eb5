"""A line's view of one box or several: who is asked, who says yes, and what a lost one costs.

Carries messages between calls and boxes and remembers which call is where: a session's number is
its box's, so two boxes may both have a session 7. A newcomer is placed by `placement`: with more
than one box, all are asked for their headroom, and the Join goes to the best, then to the next
one if that has been filled meanwhile. It does not know what a call does (`call`, `synthetic`).
"""

import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from appliance import control
from appliance.admission import Reason
from appliance.clock import NS_PER_MS, Clock
from appliance.placement import ELSEWHERE, Offer, places

SOCKETS = "*.sock"
"""What boxes' sockets are called in a folder that is given instead of one socket."""

ASK_NS = 200 * NS_PER_MS
"""How long a box may take to say how it is before a newcomer is placed without it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The box is gone, and the call with it."""

    why: str


@dataclass(frozen=True, slots=True)
class News:
    """Something a call must hear."""

    call: int
    """Its number, the `request` of its Join."""
    message: (
        control.Admitted
        | control.Refused
        | control.Gone
        | control.WasReset
        | control.Transfer
        | Lost
    )
    t0_ns: int
    """Origin of the grid of the box it came from."""


class Hearer(Protocol):
    """A call, as far as its box has something to say to it."""

    def admitted(self, message: control.Admitted, now_ns: int, t0_ns: int) -> None: ...
    def refused(self, message: control.Refused, now_ns: int) -> None: ...
    def gone(self, message: control.Gone, now_ns: int) -> None: ...
    def lost(self, why: str, now_ns: int) -> None: ...


class Caller(Hearer, Protocol):
    """A call that also has something to do in each turn."""

    def advance(self, now_ns: int) -> list[control.ToBox]: ...


@dataclass(slots=True)
class _Placing:
    """A newcomer who has not been answered yet."""

    join: control.Join
    until_ns: int
    asked: set[int]
    """Boxes that have not said how they are."""
    offers: list[Offer] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Boxes still to be asked to let it in, best first."""
    refusal: control.Refused | None = None
    """What the last one that was asked said."""


class Boxes:
    """All boxes a line knows. One thread uses it."""

    def __init__(self, clients: Sequence[control.ControlClient], clock: Clock) -> None:
        """clients: at least one, all of the same model. Raises `ControlError` otherwise."""
        self.welcome = clients[0].welcome
        for client in clients[1:]:
            for name in ("model", "period_ns", "sample_rate_hz", "samples_per_frame"):
                mine, other = getattr(self.welcome, name), getattr(client.welcome, name)
                if mine != other:
                    raise control.ControlError(
                        f"two boxes differ in {name}: {mine} and {other}. "
                        f"A line can only be shared by boxes that run the same model"
                    )
        self._clients = dict(enumerate(clients))
        self._clock = clock
        self._placing: dict[int, _Placing] = {}
        self._at: dict[int, int] = {}
        """Box of each call that has asked to be let in."""
        self._session: dict[int, int] = {}
        """Its number there, once it was admitted."""
        self._news: list[News] = []

    @classmethod
    def connect(cls, path: Path, clock: Clock) -> Self:
        """Connect to the box at ``path``, or to all whose sockets lie in the folder ``path``.

        Of several, those that do not answer are left out. Raises `BoxGone` when none answers,
        `ControlError` when one speaks another version or runs another model.
        """
        if not path.is_dir():
            return cls([control.ControlClient.connect(path)], clock)
        clients: list[control.ControlClient] = []
        for found in sorted(path.glob(SOCKETS)):
            try:
                clients.append(control.ControlClient.connect(found))
            except control.BoxGone:
                continue  # a socket somebody left behind; the others are enough
        if not clients:
            raise control.BoxGone(
                f"no box answers in {path} ({SOCKETS}). "
                f"Start one: duplexbox appliance serve --config FILE"
            )
        return cls(clients, clock)

    def __len__(self) -> int:
        """Boxes that are there."""
        return len(self._clients)

    @property
    def processes(self) -> list[int]:
        """Theirs, as the kernel knows them."""
        return [client.process for client in self._clients.values()]

    def send(self, call: int, message: control.ToBox) -> None:
        """Say something for ``call``; a Join is placed first. Raises `BoxGone` when all are."""
        if isinstance(message, control.Join):
            self._place(message)
            return
        placing = self._placing.get(call)
        if isinstance(message, control.Withdraw) and placing is not None:
            placing.order.clear()  # it is not asked elsewhere any more
            if call not in self._at:
                del self._placing[call]
                refused = control.Refused(call, Reason.FAULT, "its line took it back")
                self._news.append(News(call, refused, 0))
        if call in self._at:
            self._send(self._at[call], message)

    def receive(self, timeout_s: float) -> list[News]:
        """What calls must hear, waiting up to ``timeout_s`` for something to happen.

        Raises `BoxGone` once the last box is lost and its calls have been told, `ControlError`
        when a box says what no box says.
        """
        if not self._clients and not self._news:
            raise control.BoxGone("all boxes are gone; their logs say why")
        until_ns = min((p.until_ns for p in self._placing.values() if p.asked), default=None)
        if until_ns is not None:
            timeout_s = min(timeout_s, max(0, until_ns - self._clock.now_ns()) / 1e9)
        if self._news:
            timeout_s = 0
        if timeout_s > 0:  # to a microsecond: a frame may be due. Such lines have few descriptors
            select.select(list(self._clients.values()), [], [], timeout_s)
        for box in list(self._clients):
            self._read(box)
        now_ns = self._clock.now_ns()
        for placing in list(self._placing.values()):
            if placing.asked and now_ns >= placing.until_ns:
                placing.asked.clear()
                self._decide(placing)
        news, self._news = self._news, []
        return news

    def deal(self, calls: Mapping[int, Caller]) -> list[News]:
        """One turn of ``calls``, by number: each hears its news, then does what is due.

        Waits for nothing. Returns what they heard; raises what `receive` does.
        """
        heard = [news for news in self.receive(0.0) if news.call in calls]
        for news in heard:
            tell(news, calls[news.call], self._clock.now_ns())
        for number, call in calls.items():
            for message in call.advance(self._clock.now_ns()):
                self.send(number, message)
        return heard

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    # --- newcomers

    def _place(self, join: control.Join) -> None:
        boxes = list(self._clients)
        if not boxes:
            raise control.BoxGone("all boxes are gone; their logs say why")
        placing = _Placing(join, self._clock.now_ns() + ASK_NS, set(boxes))
        self._placing[join.request] = placing
        if len(boxes) == 1:  # nothing to choose from
            placing.asked.clear()
            placing.order = boxes
            self._ask_next(placing)
            return
        for box in boxes:
            self._send(box, control.Status(join.request))

    def _decide(self, placing: _Placing) -> None:
        """All have said how they are, or had their time; those that have not come last."""
        silent = [box for box in self._clients if box not in {o.box for o in placing.offers}]
        placing.order = [b for b in places(placing.offers) if b in self._clients] + silent
        self._ask_next(placing)

    def _ask_next(self, placing: _Placing) -> None:
        call = placing.join.request
        while placing.order:
            box = placing.order.pop(0)
            if box in self._clients:
                self._at[call] = box
                self._send(box, placing.join)
                return
        del self._placing[call]
        self._at.pop(call, None)
        lost = Lost("all boxes are gone; their logs say why")
        self._news.append(News(call, placing.refusal or lost, 0))

    # --- what boxes say

    def _read(self, box: int) -> None:
        client = self._clients.get(box)
        if client is None:
            return  # lost in this very turn, by what was sent to it
        try:
            while (message := client.receive()) is not None:
                self._hear(box, message)
        except control.BoxGone as err:
            self._lose(box, str(err))

    def _hear(self, box: int, message: control.FromBox) -> None:
        t0_ns = self._clients[box].welcome.t0_ns
        match message:
            case control.Report():
                placing = self._placing.get(message.request)
                if placing is not None and box in placing.asked:
                    placing.asked.discard(box)
                    offer = Offer(box, message.sessions_free, message.leases_held)
                    placing.offers.append(offer)
                    if not placing.asked:
                        self._decide(placing)
            case control.Admitted() if self._at.get(message.request) == box:
                self._placing.pop(message.request, None)
                self._session[message.request] = message.session
                self._news.append(News(message.request, message, t0_ns))
            case control.Refused() if self._at.get(message.request) == box:
                placing = self._placing.get(message.request)
                if placing is not None and placing.order and message.reason in ELSEWHERE:
                    placing.refusal = message
                    self._ask_next(placing)
                    return
                self._placing.pop(message.request, None)
                del self._at[message.request]  # a line that serves for months is refused often
                self._news.append(News(message.request, message, t0_ns))
            case control.WasReset() | control.Transfer():
                for call, session in self._session.items():
                    if session == message.session and self._at[call] == box:
                        self._news.append(News(call, message, t0_ns))
            case control.Gone():
                for call, session in list(self._session.items()):
                    if session == message.session and self._at[call] == box:
                        del self._session[call], self._at[call]
                        self._news.append(News(call, message, t0_ns))
            case _:
                raise control.ControlError(f"the box said {message} to a line that never asked")

    def _send(self, box: int, message: control.ToBox) -> None:
        client = self._clients.get(box)
        if client is None:
            return  # its calls have been told
        try:
            client.send(message)
        except control.BoxGone as err:
            self._read(box)  # what it said before it went; a Gone knows why a call is over
            self._lose(box, str(err))

    def _lose(self, box: int, why: str) -> None:
        """One box less: its calls are over, those still being placed go elsewhere."""
        client = self._clients.pop(box, None)
        if client is None:
            return
        client.close()
        for call, at in self._at.items():
            if at == box and call in self._session:
                self._news.append(News(call, Lost(why), 0))
        for placing in list(self._placing.values()):
            if box in placing.asked:
                placing.asked.discard(box)
                if not placing.asked:
                    self._decide(placing)
            elif self._at.get(placing.join.request) == box:
                self._ask_next(placing)


def tell(news: News, call: Hearer, now_ns: int) -> None:
    """Hand news to the call it is for."""
    match news.message:
        case control.Admitted() as message:
            call.admitted(message, now_ns, news.t0_ns)
        case control.Refused() as message:
            call.refused(message, now_ns)
        case control.Gone() as message:
            call.gone(message, now_ns)
        case Lost() as lost:
            call.lost(lost.why, now_ns)
