"""Certificates of the telephone line: whether they can be read, and whether ours is still one.

Decides what is said of them before the stack is started, which says little; and when ours, which
peers look at, ends. A certificate that has ended is no reason to take no calls: who connects
without TLS needs none, and some peers do not look. Dates are read from the file itself, so that
nothing has to be installed for them.
"""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from appliance.lines.sip_config import SipConfig

SOON = timedelta(days=14)
LOOK_S = 3600.0
"""Between two looks at how long ours is good for."""

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME, _TIME = 0xA0, 0x17, 0x18


def check(config: SipConfig) -> None:
    """Raises `ValueError` if one cannot be used at all."""
    name, path = "tls_ca", config.tls_ca
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if path is not None:
            context.load_verify_locations(path)
        name, path = "tls_certificate", config.tls_certificate
        if path is not None:
            context.load_cert_chain(path, password="")  # or it would be asked for at the terminal
    except OSError as err:
        why = err.strerror if err.filename or not isinstance(err, ssl.SSLError) else err
        raise ValueError(f"[sip] {name} = {path}: {why}. Both are PEM files") from None


def trouble(path: Path, begins: datetime, ends: datetime, now: datetime) -> str:
    """What an operator must know of ours, which was read from ``path``; empty: nothing. The same
    words as long as it is the same trouble. Pure."""
    if now >= ends:
        what = f"has expired on {_day(ends)}: peers that look refuse it"
    elif now < begins:
        what = f"is not valid before {_day(begins)}: peers that look refuse it. Is the clock right?"
    elif now >= ends - SOON:
        what = f"expires on {_day(ends)}"
    else:
        return ""
    return f"[sip] tls_certificate = {path} {what}. Put a new one there and restart this line"


def validity(pem: str) -> tuple[datetime, datetime]:
    """From when to when the first certificate in ``pem``, the owner's, is one. Pure.

    Raises `ValueError`.
    """
    body, end, _ = pem.partition(_BEGIN)[2].partition(_END)
    if not end:
        raise ValueError("there is no certificate in it")
    der = ssl.PEM_cert_to_DER_cert(f"{_BEGIN}{body}{_END}\n")
    signed = _first(_first(der))
    fields = [part for part in _parts(signed) if part[0] != _VERSION]
    if len(fields) < 4:  # serial number, algorithm, issuer, validity
        raise ValueError("its certificate has no dates")
    times = [_time(kind, value) for kind, value in _parts(fields[3][1])]
    if len(times) != 2:
        raise ValueError("its certificate has no dates")
    return times[0], times[1]


def _first(der: bytes) -> bytes:
    for _, content in _parts(der):
        return content
    raise ValueError("its certificate is empty")


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of what follows one another in ``der``; of tags of one byte."""
    while der:
        if len(der) < 2:
            raise ValueError("its certificate is cut off")
        kind, size, at = der[0], der[1], 2
        if size & 0x80:
            at = 2 + (size & 0x7F)
            size = int.from_bytes(der[2:at])
        if len(der) < at + size:
            raise ValueError("its certificate is cut off")
        yield kind, der[at : at + size]
        der = der[at + size :]


def _time(kind: int, value: bytes) -> datetime:
    text = value.decode("ascii", "replace")
    if kind == _UTC_TIME:  # two digits: RFC 5280 4.1.2.5.1
        text = ("19" if text[:2] >= "50" else "20") + text
    elif kind != _TIME:
        raise ValueError("its certificate has dates of a kind that is not known")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _day(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")
