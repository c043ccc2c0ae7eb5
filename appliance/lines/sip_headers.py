"""What the headers of an INVITE say of a call: whom it is from, and for whom it was. Pure.

Decides which of them is believed, and what is not to be written down. A carrier vouches for a
caller in P-Asserted-Identity (RFC 3325) and sends From as the caller wants to be seen; who wants
to be seen by nobody says so in Privacy (RFC 3323). Knows no stack but for what it hands out:
the first value of each header, cut at 1,024 characters, by the name that the peer wrote.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

NAMES = (
    *("Via", "From", "To", "v", "f", "t"),  # the stack takes each short form for another header
    *("P-Asserted-Identity", "Privacy", "Diversion", "History-Info"),
)
"""What has to be asked of the stack."""

WITHHELD = "anonymous"
"""The number of whoever does not want it known, as it also stands in From then."""

SECRET = {"id", "user", "full"}
"""Words in Privacy by which a caller asks not to be named to us; we are whom it is kept from."""
SECRET_HISTORY = {"history", "header", "session"}
"""And not to have it told how the call came here."""

NOBODY = {"", "anonymous", "unknown", "unavailable", "restricted"}
"""Users in From that are nobody's name."""

LONGEST_HOST = LONGEST_NAME = 100

_SENT_BY = re.compile(r"\s*SIP\s*/\s*2\.0\s*/\s*\w+\s+(\[[^\]]*\]|[^\s;:,]+)", re.IGNORECASE)
_VALUE = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|<[^>]*>?|[^,"<])+', re.DOTALL)
_NAMED = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\s*|([^<"]*))<([^>]*)', re.DOTALL)
_USER = re.compile(r"(?:sips?|tel):([^@;>?]+)", re.IGNORECASE)
_HIDDEN = re.compile(r';\s*privacy\s*=\s*"?\s*(?:full|uri)\b', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Said:
    """What the headers of one INVITE come to."""

    source: str
    """Host of the peer, as it says in Via."""
    name: str
    number: str
    """The caller's; `WITHHELD` if it is not to be known."""
    called: str
    """The address in To."""
    diverted: str
    """The number that the caller dialled before the call was diverted to us; empty: it was not."""


def read(headers: Mapping[str, str]) -> Said:
    """headers: by their names, in any case."""
    found = {name.lower(): value for name, value in headers.items()}
    name, caller = _parts(found.get("from") or found.get("f", ""))
    wants = _words(found.get("privacy", ""))
    if wants & SECRET:
        name, number = "", WITHHELD
    else:
        number = number_of(caller)
        for value in values(found.get("p-asserted-identity", "")):
            its_name, address = _parts(value)
            if _USER.match(address):
                name = its_name or ("" if number.lower() in NOBODY else name)
                number = number_of(address)
                break
    return Said(
        source=sent_by(found.get("via") or found.get("v", "")),
        name=name,
        number=number,
        called=_parts(found.get("to") or found.get("t", ""))[1],
        diverted=_diverted(
            found.get("diversion", ""), found.get("history-info", ""), bool(wants & SECRET_HISTORY)
        ),
    )


def number_of(caller: str) -> str:
    """The user part of an address: "sip:+4930@pbx;user=phone" -> "+4930"."""
    found = _USER.match(caller)
    return _printable(unquote(found[1]) if found else caller)


def values(header: str) -> list[str]:
    """Of a header that may list several: cut at commas that are not in quotes or brackets."""
    return [value.strip() for value in _VALUE.findall(header) if value.strip()]


def sent_by(via: str) -> str:
    """Of a Via header, the host: "SIP/2.0/UDP 10.0.0.5:5060;branch=x" -> "10.0.0.5". The port may
    be left out. No longer than an address: it is a stranger's, and kept of many."""
    found = _SENT_BY.match(via)
    return found[1][:LONGEST_HOST] if found else ""


def _parts(value: str) -> tuple[str, str]:
    """Name and address: ``"Ann B." <sip:30@pbx;x=1>;tag=2`` -> ``Ann B.``, ``sip:30@pbx;x=1``."""
    value = value.strip()
    if found := _NAMED.match(value):
        quoted, plain, address = found.groups()
        name = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    elif "<" in value:  # a quote that does not end
        name, _, rest = value.partition("<")
        name, address = name.strip('" '), rest.partition(">")[0]
    else:
        name, address = "", value.partition(";")[0]
    return _printable(name).strip()[:LONGEST_NAME], address.strip()


def _diverted(diversion: str, history: str, is_secret: bool) -> str:
    """RFC 5806 has the latest diversion first; RFC 7044 the address that was dialled, and why it
    was left in its own headers. A number that was only mapped to another is no diversion."""
    for value in reversed(values(diversion)):
        if _USER.match(address := _parts(value)[1]):
            is_hidden = is_secret or _HIDDEN.search(value.rpartition(">")[2]) is not None
            return WITHHELD if is_hidden else number_of(address)
    for value in values(history)[:1]:
        address, _, why = _parts(value)[1].partition("?")
        if _USER.match(address) and "reason=" in why.lower():
            is_hidden = is_secret or "privacy=" in why.lower()
            return WITHHELD if is_hidden else number_of(address)
    return ""


def _words(header: str) -> set[str]:
    return {word.strip().lower() for word in re.split("[;,]", header)}


def _printable(text: str) -> str:
    return "".join(char for char in text if char.isprintable())
