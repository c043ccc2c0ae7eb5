"""Moshi's `/api/chat`: bytes <-> values, and what a request asks for. Pure.

One binary websocket message is one kind byte and a payload:

    0 handshake   1 Ogg/Opus   2 UTF-8 text   3 control   4 JSON metadata   5 error   6 ping

(server.py and client.py in kyutai-labs/moshi 0.2.13; protocol.md in its rust folder; kinds 3 to 6
are spoken by its web client.) Clients send 0, 1, 3 and 6; only audio means anything to a box
that steps on every tick whether or not anybody speaks. What is unknown is ignored, as the published
servers do: clients may be newer than this page.

Also here: which close code tells a client why it was refused or cut off, and what the query
parameters of the published pages mean for a `Join`. Not here: Ogg (`ogg`), sockets (`websocket`).
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from appliance.admission import Reason
from appliance.control import LONGEST_PERSONA, LONGEST_VOICE

LONGEST_REASON_BYTES = 123
"""Of a close frame: RFC 6455 §5.5 leaves 125 bytes, two of them the code."""

HANDSHAKE = b"\x00"
PING = b"\x06"


class Kind(enum.IntEnum):
    """First byte of a message."""

    HANDSHAKE = 0
    AUDIO = 1
    TEXT = 2
    CONTROL = 3
    METADATA = 4
    ERROR = 5
    PING = 6


class Ending(enum.Enum):
    """Why a connection is closed: the code of the close frame and the first word of its reason."""

    OVER = (1000, "over")
    FULL = (1013, "full")
    """No room now: every slot, the memory or the time of a tick is taken. Try again later."""
    LOADING = (1014, "loading")
    """The box behind this line is not there yet or is still warming up."""
    DRAINING = (1012, "draining")
    """The box finishes its calls and will stop."""
    FAULT = (1011, "fault")
    """The box failed, or cannot give this caller what it asks for."""
    RULES = (1008, "rules")
    """The client broke a limit."""
    MEDIA = (1003, "media")
    """The client sends audio that is no voice in Opus."""

    @property
    def code(self) -> int:
        """For the close frame."""
        return self.value[0]

    def reason(self, detail: str) -> str:
        """At most 123 bytes of UTF-8: the word, then as much of ``detail`` as fits."""
        text = f"{self.value[1]}: {detail}" if detail else self.value[1]
        return text.encode()[:LONGEST_REASON_BYTES].decode("utf-8", "ignore")


REFUSED: dict[Reason, Ending] = {
    Reason.TIME: Ending.FULL,
    Reason.MEMORY: Ending.FULL,
    Reason.LINES: Ending.FULL,
    Reason.DRAINING: Ending.DRAINING,
    Reason.NOT_READY: Ending.LOADING,
    Reason.FAULT: Ending.FAULT,
    Reason.OPERATOR: Ending.OVER,
}

GONE: dict[str, Ending] = {
    "finished": Ending.OVER,
    "left": Ending.OVER,
    "timeout": Ending.RULES,
    "fault": Ending.FAULT,
    "lost": Ending.FAULT,
    "stopped": Ending.DRAINING,
    "shed": Ending.FULL,
    "operator": Ending.OVER,
}
"""By the box's word in `Gone`."""


def audio_of(message: bytes) -> bytes | None:
    """Ogg bytes of a client's message; None if it carries none and is to be ignored."""
    return message[1:] if message[:1] == b"\x01" and len(message) > 1 else None


def audio(pages: bytes) -> bytes:
    """A message of whole Ogg pages."""
    return b"\x01" + pages


def text(words: str) -> bytes:
    """A message of what the model says. Surrogates, which no client could read, become '?'."""
    return b"\x02" + words.encode("utf-8", "replace")


def error(why: str) -> bytes:
    """A message that the web client shows, before a refusal's close frame."""
    return b"\x05" + why.encode("utf-8", "replace")


def metadata(values: Mapping[str, object]) -> bytes:
    """A message of JSON."""
    return b"\x04" + msgspec.json.encode(values)


# --- what a request asks for

SETTINGS: tuple[tuple[str, str], ...] = (
    ("text_temperature", "sampling.text_temperature"),
    ("audio_temperature", "sampling.temperature"),
    ("text_topk", "sampling.text_top_k"),
    ("audio_topk", "sampling.top_k"),
    # The pages know one seed per stream; ours has one. The last one given wins.
    ("text_seed", "sampling.seed"),
    ("audio_seed", "sampling.seed"),
    ("seed", "sampling.seed"),
)
"""Query parameter of the published pages -> setting of the bundle."""

WHOLE = frozenset({"sampling.seed", "sampling.top_k", "sampling.text_top_k"})
"""Settings that count something."""


class WishError(ValueError):
    """A request that no box could meet; the client's fault."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the box's model lets a caller choose."""

    bounds: Mapping[str, tuple[float, float]]
    """Of each setting, by name."""
    voices: tuple[str, ...] = ()
    takes_persona: bool = False
    memory: tuple[tuple[int, int], ...] = ()
    """What a session's state owns by its age: (ticks, bytes)."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one caller asks for, as a `Join` says it."""

    settings: dict[str, float]
    voice: str = ""
    persona: str = ""
    notes: tuple[str, ...] = ()
    """What was asked for and is not granted; told to the client, since its page will not."""


def read_wish(query: Mapping[str, str], model: Model) -> Wish:
    """A request's parameters for ``model``; unknown ones are ignored. Raises `WishError`.

    Numbers beyond a bound are brought to it (a page's default top-k may exceed a vocabulary),
    what is no number is left at the model's own value; negative seeds mean "any". A voice is a
    name, never a path: the published page sends ``NATF2.pt`` for the voice NATF2.
    """
    settings: dict[str, float] = {}
    notes: list[str] = []
    for parameter, name in SETTINGS:
        raw = query.get(parameter, "").strip()[:40]
        if not raw:
            continue
        value = _number(raw)
        if name in WHOLE and value is not None:
            value = math.floor(value)
        if value is None or (name == "sampling.seed" and value < 0):
            if value is None:
                notes.append(f"{parameter} is no number and was left out")
            continue
        if name not in model.bounds:
            notes.append(f"{parameter}: this model has no {name}")
            continue
        low, high = model.bounds[name]
        settings[name] = float(min(max(value, low), high))
    voice = _voice(query.get("voice_prompt", "") or query.get("voice", ""))
    persona = (query.get("text_prompt", "") or query.get("persona", "")).strip()
    if len(persona) > LONGEST_PERSONA:
        raise WishError(f"the persona has {len(persona)} characters; {LONGEST_PERSONA} are allowed")
    if voice and not model.voices:
        notes.append("this model has no voices to choose from")
        voice = ""
    if persona and not model.takes_persona:
        notes.append("this model takes no persona")
        persona = ""
    return Wish(settings, voice, persona, tuple(notes))


def _number(raw: str) -> float | None:
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _voice(raw: str) -> str:
    name = raw.strip().removesuffix(".pt").removesuffix(".wav")
    if len(name) > LONGEST_VOICE or not all(c.isalnum() or c in "-_. " for c in name):
        raise WishError("a voice is one of the model's voices, by name; no path and no file")
    return name
