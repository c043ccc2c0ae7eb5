"""What the model's own words do to its call: end it, or send the caller on. Pure.

An account's rules are phrases. The model is taken at its word at the first pause after a phrase:
when it has added no word for `grace_ns`, so that what it was saying has been heard, and not more
than `MOST_AFTER` words after the phrase ("goodbye, and have a nice day"). If it talks on without a
pause, or because the caller asked one more thing, it did not mean to end. Case and punctuation do
not count. Only words that the caller was sent are looked at.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.lines.transcript import PieceText

MOST_AFTER = 12
"""Words the model may add to a phrase before it pauses."""

KEPT = 400
"""Characters of what was said that are remembered: longer than a phrase and what may follow it."""

_NO_WORD = re.compile(r"[^\w']+")


@dataclass(frozen=True, slots=True)
class Meant:
    """A phrase that was followed by a pause."""

    phrase: str
    what: str
    """"hang-up", or an address."""


def plain(text: str) -> str:
    """Words in lower case with single spaces, such as "have a nice day"."""
    return _NO_WORD.sub(" ", text.lower().replace("\u2019", "'")).strip()


class Words:
    """One call's rules."""

    def __init__(
        self,
        rules: Mapping[str, str],
        pieces: Sequence[str],
        silent_ids: Iterable[int],
        grace_ns: int,
    ) -> None:
        """rules: what each phrase does. pieces: of the model's text, by id."""
        self._rules = {plain(phrase): (phrase, what) for phrase, what in rules.items()}
        self._text = PieceText(pieces, silent_ids)
        self._grace_ns = grace_ns
        self._said = ""
        self._paused_ns: int | None = None
        """When the pause after the last word is long enough; None: it has been looked at."""

    def hear(self, token: int, now_ns: int) -> None:
        """The caller is sent a frame with the text id ``token``, -1 for none."""
        if self._rules and (said := self._text.hear(token)):
            self._said = (self._said + said)[-KEPT:]
            self._paused_ns = now_ns + self._grace_ns

    def due(self, now_ns: int) -> Meant | None:
        """The rule whose time has come; each phrase that is said counts once."""
        if self._paused_ns is None or now_ns < self._paused_ns:
            return None
        self._paused_ns = None
        said = f" {plain(self._said)} "
        for phrase, (shown, what) in self._rules.items():
            _, found, after = said.rpartition(f" {phrase} ")
            if found and len(after.split()) <= MOST_AFTER:
                self._said = ""
                return Meant(shown, what)
        return None

    def forget(self) -> None:
        """The model began anew: it said nothing yet."""
        self._said, self._paused_ns = "", None
