"""Where callers may be sent on to, and how the one that is being sent on stands. Pure.

A transfer makes somebody's telephone exchange place a call, which can cost money, and some of what
asks for one (keys, a model's words) is in strangers' hands. So an address is taken apart strictly,
it must be in the operator's list, a call has one transfer at a time and `MOST` in all. A list's
entry is an address whose user may end with ``*``: sip:desk@pbx.example, sip:2*@pbx.example,
tel:+4930*.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

HANG_UP = "hang-up"
"""What a key or words may do besides."""

MOST = 5
"""Transfers one call may ask for."""

_SIP = re.compile(
    r"(?P<scheme>sips?):(?P<user>[A-Za-z0-9._+*#-]{1,64})@"
    r"(?P<host>[A-Za-z0-9.-]{1,100}(?::\d{1,5})?)(?P<rest>(?:;[A-Za-z0-9.=+-]{1,40}){0,4})",
    re.IGNORECASE,
)
_TEL = re.compile(r"(?P<scheme>tel):(?P<user>\+?[0-9*#.-]{1,32})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Somebody who can be called."""

    scheme: str
    user: str
    host: str = ""
    """With its port; empty: tel."""
    rest: str = ""
    """Parameters. They say where a call goes as much as the host does."""


def address(text: str) -> Address | None:
    """``text`` taken apart; None if it is no address of a kind we pass on."""
    if found := _SIP.fullmatch(text):
        host = found["host"].lower()
        return Address(found["scheme"].lower(), found["user"], host, found["rest"].lower())
    if found := _TEL.fullmatch(text):
        return Address("tel", found["user"])
    return None


def fault(target: str, allowed: Iterable[str]) -> str:
    """Why nobody is transferred to ``target``; empty: it is allowed."""
    wanted = address(target)
    if wanted is None:
        return f'"{target}" is no address such as sip:desk@pbx.example or tel:+4930123'
    if any(_covers(entry, wanted) for entry in map(address, allowed) if entry is not None):
        return ""
    return f'{target} is not allowed; add it to the list: [sip] transfer_to = ["{target}"]'


def _covers(entry: Address, wanted: Address) -> bool:
    if (entry.scheme, entry.host, entry.rest) != (wanted.scheme, wanted.host, wanted.rest):
        return False
    if entry.user == wanted.user:
        return True
    return entry.user.endswith("*") and wanted.user.startswith(entry.user[:-1])


@dataclass(slots=True)
class Transfer:
    """One call's transfers: the one under way, or the last."""

    target: str = ""
    """Empty: there has been none."""
    by: str = ""
    """Who wanted it: "key 0", "words ...", "operator"."""
    outcome: str = ""
    """What the peer said became of it; empty: not yet."""
    is_done: bool = False
    tries: int = 0

    @property
    def is_under_way(self) -> bool:
        return bool(self.target) and not self.outcome

    def ask(self, target: str, by: str, allowed: Iterable[str]) -> str:
        """Begin one; why not, or nothing."""
        why = fault(target, allowed)
        if self.is_under_way:
            why = f"the transfer to {self.target} is under way"
        elif self.tries >= MOST:
            why = f"this call has asked for {MOST} transfers"
        if not why:
            self.target, self.by, self.outcome = target, by, ""
            self.tries += 1
        return why

    def end(self, outcome: str, *, is_done: bool) -> bool:
        """What became of it. False: none was under way.

        Somebody may answer after it was given up: then the caller is there all the same.
        """
        if not self.target or self.is_done or (self.outcome and not is_done):
            return False
        self.outcome, self.is_done = outcome or "no reason was given", is_done
        return True
