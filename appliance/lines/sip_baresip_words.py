"""What baresip says of calls, in our words. Pure.

Decides why a call ended, what its figures are called, and whose an event is that had no room for
what it says.
"""

import errno
import json
import os
from typing import Any

NEVER_CONFIRMED = "the caller never confirmed that the call was answered"
NO_ANSWER = "the STUN server, or the caller's side, does not answer any more"
WHY = {
    "Connection reset by peer": "the caller hung up",
    "Connection timed out": NEVER_CONFIRMED,
}

LASTING = (errno.EACCES, errno.EPERM, errno.EINVAL)
"""Errors of a start that are the same at the next one. Others pass: a port is free again once
somebody else's process has ended, and a machine may get its address after it has booted."""

OVERFLOW = b',"overflow":true}'
"""How the payload of an event ends that would have been longer than 16 kB: nothing else is in it.
A peer's own words cannot look so, for their quotes are escaped."""


def why(text: str, confirmed: bool) -> str:
    """Why a call ended, from what the stack says: of SIP what a socket would say of itself."""
    for theirs, ours in WHY.items():
        if text.startswith(theirs):
            if confirmed and ours == NEVER_CONFIRMED:
                return NO_ANSWER
            return ours
    return text or "closed"


def passes(err: Exception) -> bool:
    """Whether the stack may start later, though nobody changes anything."""
    return not any(os.strerror(number) in str(err) for number in LASTING)


def stats(groups: dict[str, Any]) -> dict[str, float]:
    """What the stack counted of a call: ``{"rx": {"lost": 3}}`` -> ``{"rx_lost": 3}``."""
    found: dict[str, float] = {}
    for name, value in groups.items():
        if isinstance(value, dict):
            found |= {f"{name}_{k}": v for k, v in value.items() if isinstance(v, int | float)}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def whose(handle: int, payload: bytes | None, agents: dict[int, int]) -> bytes | None:
    """``payload``, of an event of ``handle``; if that is all that is known of it, with the call in
    it. agents: of each call that is known. Otherwise its end would be nobody's."""
    if payload is None or not payload.endswith(OVERFLOW):
        return payload
    return json.dumps({"call": handle, "ua": agents.get(handle, 0)}).encode()
