"""What the box and its lines say to each other: messages, their bytes, and a line's end of it.

One Unix SOCK_SEQPACKET socket; one datagram is one message, msgpack with its type in the field
`type`. Audio never travels here, only who comes, who goes and where the shared memory lies.

    line -> box    Join  Withdraw  Leave  Status  Reset  HangUp
    box -> line    Welcome (first)  Admitted | Refused  Gone  Report  WasReset  HungUp
    both           Transfer  Transferred: passed on from whoever asks, and back

A line may carry many calls over one socket. The socket closing means that the line is lost, and
all its calls with it. Not here: deciding anything (`admission`), the box's end (`switchboard`).
"""

import select
import socket
import struct
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from appliance.admission import Reason
from appliance.box_view import BoxView
from engines.bundle import Bundle

PROTOCOL = 4
"""Raised when an older line would misunderstand the box."""

LIMIT_BYTES = 65_536
"""Longest message; a peer that sends more is not one of ours."""


LONGEST_CALLER = 200
"""Characters of a caller's name."""


LONGEST_PERSONA = 8000
"""Characters: more tokens than any model's window has frames."""
LONGEST_VOICE = 64
"""Characters of a name."""
LONGEST_TARGET = 200
"""Characters of an address to which somebody is transferred."""
OPERATOR = Reason.OPERATOR.value
"""Of `Gone`: an operator ended the session; a line then sends its caller on to nobody."""
LONGEST_WHY = 200
"""Characters of a reason: a line that sends more is cut off, so it cuts what it was told itself."""


class BoxGone(ConnectionError):
    """There is no box at the other end, or it closed the connection; the operator's business."""


class ControlError(ValueError):
    """The peer sent something that is not a message of this protocol; the peer's fault."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    pass


class Join(_Message, frozen=True):
    """May I bring a caller? Answered by `Admitted` or `Refused` with the same `request`."""

    request: int
    line: Annotated[str, Meta(max_length=32)]
    """Kind of line: file, local, websocket, sip."""
    caller: Annotated[str, Meta(max_length=LONGEST_CALLER)]
    """Who calls, as the line knows it; goes into the ledger."""
    settings: Annotated[dict[Annotated[str, Meta(max_length=100)], float], Meta(max_length=64)] = {}
    """Values of the bundle's `constant` regions by name, such as sampling.temperature."""
    voice: Annotated[str, Meta(max_length=LONGEST_VOICE)] = ""
    """One of `Welcome.voices`. The answer then comes once the model has been fed its prompt."""
    persona: Annotated[str, Meta(max_length=LONGEST_PERSONA)] = ""
    """Who the model is to be, in words; ditto."""
    transfers: bool = False
    """The line can have this caller called on elsewhere: it understands `Transfer`."""


class Withdraw(_Message, frozen=True):
    """The caller of a `Join` has gone before it was answered; it is then answered by `Refused`.

    Means nothing once `Admitted` is on its way: the line says `Leave` when it comes.
    """

    request: int


class Leave(_Message, frozen=True):
    """The caller hung up without a LAST frame: step the session no more, then settle it."""

    session: int
    why: Annotated[str, Meta(max_length=LONGEST_WHY)] = ""


class Reset(_Message, frozen=True):
    """Have a live session's model begin anew, keeping call, lease, persona and line; anybody's.

    Answered by `WasReset` once a tick steps it on the new state, or by `Refused`.
    """

    request: int
    session: int


class HangUp(_Message, frozen=True):
    """Have a session ended, whatever its line does; anybody's.

    Answered by `HungUp` once no tick steps it any more, or by `Refused`. Its line hears `Gone`, or
    `Refused` if its `Join` has not been answered yet, with the reason "operator".
    """

    request: int
    session: int
    why: Annotated[str, Meta(max_length=LONGEST_WHY)] = ""
    """In the operator's words; for the line, its records and its caller."""


class Transfer(_Message, frozen=True):
    """Have a session's caller called on elsewhere; anybody's, and the box passes it to its line.

    Answered by `Transferred`, which may take a minute, or by `Refused`.
    """

    request: int
    """0 on the way from the box to the line."""
    session: int
    target: Annotated[str, Meta(max_length=LONGEST_TARGET)]
    """Where to, such as "sip:desk@pbx.example". The line has a list of those it allows."""


class Transferred(_Message, frozen=True):
    """What became of a `Transfer`: from the line to the box, and on to whoever asked."""

    request: int
    session: int
    is_done: bool
    """False: the caller still talks to the model."""
    detail: Annotated[str, Meta(max_length=LONGEST_WHY)]
    """Where the caller went, or why not."""


class Status(_Message, frozen=True):
    """How is the box? Answered by `Report`."""

    request: int
    detail: bool = False
    """Also how each session is: `Report.view`."""


class Welcome(_Message, frozen=True):
    """The first message on every connection: what a line must know about the model."""

    version: int
    bundle: str
    """Path of the bundle's folder."""
    model: str
    trained: bool
    """False: weights from a seed; whatever the model says is noise."""
    notice: str
    period_ns: int
    sample_rate_hz: int
    samples_per_frame: int
    t0_ns: int
    """Tick n starts at t0_ns + n * period_ns of CLOCK_MONOTONIC."""
    pieces: str
    """Path of the JSON list that maps a text id to its piece."""
    silent_ids: tuple[int, ...]
    takes_persona: bool = False
    voices: tuple[str, ...] = ()
    """Voices a `Join` may name."""


class Prompted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt a state began with, as it was fed: all that it takes to make the state again."""

    key: str
    """sha256 over all that was fed, `prefill.Prompt.key`."""
    fed: tuple[int, ...]
    """How many rows at once, in order: on a CPU the last bits depend on it."""


class Admitted(_Message, frozen=True):
    """Come in: the channel exists; the session goes live with its first frame."""

    request: int
    session: int
    generation: int
    """Stamped on every frame of the session, and to be stamped on every receipt."""
    channel: str
    """Name of the shared memory, for `channel.Channel.attach`."""
    uplink: int
    """Frames the ring line -> box holds."""
    downlink: int
    """Frames the ring box -> line holds."""
    receipts: int
    """Receipts that ring holds."""
    prompt: Prompted | None = None
    """None: the session begins with nothing."""


class Refused(_Message, frozen=True):
    """No, and why."""

    request: int
    reason: Reason
    detail: str

    @property
    def words(self) -> str:
        """For whoever asked to be let in: an operator who ended that refused nobody."""
        is_ended = self.reason is Reason.OPERATOR
        return self.detail if is_ended else f"refused ({self.reason.value}): {self.detail}"


class Gone(_Message, frozen=True):
    """The session is over and its channel will be unlinked; nothing more will come of it.

    why: finished, left, timeout, fault, lost, stopped, shed or operator.
    """

    session: int
    why: str
    detail: str = ""
    """The same as a sentence, where there is more to say; empty: there is not."""


class HungUp(_Message, frozen=True):
    """To whoever asked: the session is stepped no more, and its line is being told."""

    request: int
    session: int
    due: int
    """Frames of it that were due."""


class WasReset(_Message, frozen=True):
    """To whoever asked, and to the session's line: its state began anew."""

    request: int
    """Of the `Reset`; 0: to the line, which did not ask."""
    session: int
    frame_index: int
    """The first frame of the downlink that comes of the new state."""
    held: int
    """Frames before it that were never made, while the session's prompt was fed again."""
    prompt: Prompted | None = None


class PersonaReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the personas of newcomers cost, since the start."""

    priming: int
    """Newcomers whose prompt is being fed in the margins of ticks, now."""
    primed: int
    rows: int
    """Frames of prompts that were fed."""
    spent_ns: int
    """Out of margins, altogether."""
    longest_ns: int
    """The longest piece: what a tick must leave for a persona to get on."""
    overruns: int
    """Pieces that ended after the next tick was due."""
    snapshot_hits: int
    snapshot_misses: int


class MemoryReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on the GPU."""

    gpu: str
    used: int
    """By everybody."""
    total: int
    weights: int
    committed: int
    """State of sessions, now."""
    full: int
    """And once every slot holds one at full retention."""
    session: int
    """Of one session at full retention."""
    for_sessions: int
    """What all sessions' state may come to: what it is, and what is free."""
    short_in_ticks: int = -1
    """There was no memory for what is needed in so many ticks; -1: there was."""


class SideState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model beside the voice, over all callers since the start; see `side_report`."""

    name: str
    contract: str
    records: int
    delivered: int
    alarms: int
    smallest_margin_ns: int
    """Of results in time; 0: there is none."""


class Report(_Message, frozen=True):
    """What the box is doing right now."""

    request: int
    ready: bool
    draining: bool
    tick: int
    sessions_live: int
    leases_held: int
    slots: int
    ticks_late: int
    """Ticks since the start that finished after their deadline."""
    ticks_missed: int
    """Ticks since the start that never ran."""
    last_margin_ns: int
    worst_margin_ns: int
    records_lost: int
    """Ledger records that found no room: 0, or the ledger cannot be trusted."""
    sessions_free: int = 0
    """How many more would be admitted now."""
    limited_by: str = ""
    """What would refuse the one after; a `Reason`."""
    forecast_ns: int = 0
    """The p99.9 tick with one session more; 0: nothing is forecast."""
    refusals: dict[str, int] = {}
    """Refusals since the start, by reason."""
    sessions_shed: int = 0
    """Sessions sent away since the start because ticks were late."""
    disk_errors: int = 0
    """Writes to the ledger's folder that failed since the start: anything but 0 is an alarm."""
    records_dropped: int = 0
    """Ledger records given up because the disk refused them for too long."""
    sessions_reset: int = 0
    """Times a session's state was made to begin anew since the start."""
    sessions_hung_up: int = 0
    """Sessions that an operator ended since the start."""
    lines_hung: int = 0
    """Sessions ended since the start because their line read nothing for [clock] hung_line_s."""
    personas: PersonaReport | None = None
    """None: this box feeds no prompts."""
    memory: MemoryReport | None = None
    """None: sessions live in the machine's own memory."""
    beside: tuple[SideState, ...] = ()
    beside_restarts: int = 0
    """Times the process of the models beside the voice died and was started again."""
    view: BoxView | None = None
    """Each session, if that was asked for."""


ToBox = Join | Withdraw | Leave | Status | Reset | HangUp | Transfer | Transferred
FromBox = Welcome | Admitted | Refused | Gone | Report | WasReset | HungUp | Transfer | Transferred

_to_box = msgspec.msgpack.Decoder(ToBox)
_from_box = msgspec.msgpack.Decoder(FromBox)


def encode(message: ToBox | FromBox) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_box(raw: bytes) -> ToBox:
    """What a line sent. Raises `ControlError`."""
    try:
        return _to_box.decode(raw)
    except msgspec.DecodeError as err:
        raise ControlError(f"not a control message of protocol {PROTOCOL}: {err}") from None


def decode_from_box(raw: bytes) -> FromBox:
    """What the box sent. Raises `ControlError`."""
    try:
        return _from_box.decode(raw)
    except msgspec.DecodeError as err:
        raise ControlError(f"not a control message of protocol {PROTOCOL}: {err}") from None


def welcome(bundle: Bundle, t0_ns: int, voices: tuple[str, ...], takes_persona: bool) -> Welcome:
    """What a box that runs ``bundle`` says first. t0_ns: start of its tick 0."""
    manifest = bundle.manifest
    return Welcome(
        version=PROTOCOL,
        bundle=str(bundle.path.resolve()),
        model=manifest.model.name,
        trained=manifest.model.trained,
        notice=manifest.model.notice,
        period_ns=manifest.timing.period_ns,
        sample_rate_hz=manifest.timing.sample_rate_hz,
        samples_per_frame=manifest.timing.samples_per_frame,
        t0_ns=t0_ns,
        pieces=str(bundle.file(manifest.text.pieces).resolve()),
        silent_ids=manifest.text.silent_ids,
        takes_persona=takes_persona,
        voices=voices,
    )


class ControlClient:
    """A line's end of the control socket. One thread uses it."""

    welcome: Welcome

    def __init__(self, connection: socket.socket, welcome: Welcome) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.welcome = welcome

    @classmethod
    def connect(cls, path: Path, timeout_s: float = 5.0) -> Self:
        """Connect to the box at ``path`` and wait for its `Welcome`.

        Raises `BoxGone` when nobody listens or nobody answers in time, `ControlError` when
        the box speaks another version.
        """
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as err:  # whoever looks for a box is to look again, and not to end by it
            raise BoxGone(f"the box at {path} cannot be reached: {err.strerror or err}") from None
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            raw = connection.recv(LIMIT_BYTES)
        except OSError as err:
            connection.close()
            raise BoxGone(
                f"no box answers at {path}: {err.strerror or err}. "
                f"Start one: duplexbox appliance serve --config FILE"
            ) from None
        try:
            if not raw:
                raise BoxGone(f"the box at {path} closed the connection at once; see its log")
            welcome = decode_from_box(raw)
            if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL:
                raise ControlError(
                    f"the box at {path} does not speak control protocol {PROTOCOL}; "
                    f"use the duplexbox it was started with"
                )
        except (BoxGone, ControlError):
            connection.close()
            raise
        return cls(connection, welcome)

    def fileno(self) -> int:
        """For `select` or an event loop: readable when `receive` has something."""
        return self._socket.fileno()

    @property
    def process(self) -> int:
        """The box's, as the kernel knows it; 0 if this process cannot see it."""
        credentials = struct.calcsize("3i")
        said = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials)
        return int(struct.unpack("3i", said)[0])

    def send(self, message: ToBox) -> None:
        """Send one message; messages are few and small, so a full socket means a dead box.

        Raises `BoxGone`.
        """
        try:
            self._socket.send(encode(message))
        except OSError as err:
            raise BoxGone(f"the box no longer listens: {err.strerror or err}") from None

    def receive(self, timeout_s: float | None = 0.0) -> FromBox | None:
        """The next message; None when none comes within ``timeout_s`` (None: wait for ever).

        Raises `BoxGone` when the box has closed the connection, `ControlError` when it sent
        something that is no message.
        """
        if timeout_s != 0 and not self._wait(timeout_s):
            return None
        try:
            raw = self._socket.recv(LIMIT_BYTES)
        except BlockingIOError:
            return None
        except OSError as err:
            raise BoxGone(f"the connection to the box broke: {err.strerror or err}") from None
        if not raw:
            raise BoxGone("the box closed the connection; its log says why")
        return decode_from_box(raw)

    def _wait(self, timeout_s: float | None) -> bool:
        """Whether there is something within that time; to a millisecond."""
        poll = select.poll()  # `select` takes no descriptor above 1023, and a line may have more
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Say goodbye by closing; calls still open are then lost."""
        self._socket.close()
