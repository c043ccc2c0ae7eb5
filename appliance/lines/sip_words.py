"""What the model's own words do to its call: end it, or send the caller on. Pure.

An account's rules are phrases. The model is taken at its word at the first pause after a phrase:
when neither side has said anything for `grace_ns`, so that what it was saying has been heard, and
the model no more than `MOST_AFTER` words after the phrase ("goodbye, and have a nice day"). If it
talks on without a pause, or answers a caller who has one more thing to ask, it did not mean to end.
A line is never quite silent, so a caller who seems to speak is waited for no longer than
`PATIENCE_NS`. Case and punctuation do not count. Only words that the caller was sent are looked at.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.clock import NS_PER_S
from appliance.lines.transcript import PieceText

MOST_AFTER = 12
"""Words the model may add to a phrase before it pauses."""

PATIENCE_NS = 5 * NS_PER_S

TURN_NS = NS_PER_S
"""A pause of the model's as long as this, in which the caller spoke, ends its turn: what it said
before does not count any more."""

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
        self._word_ns = 0
        """When it was last added to."""
        self._is_open = False
        """The pause after that has not been looked at."""

    def hear(self, token: int, now_ns: int, spoke_ns: int) -> None:
        """The caller is sent a frame with the text id ``token``, -1 for none.

        spoke_ns: when the caller was last heard to speak.
        """
        if not self._rules or not (said := self._text.hear(token)):
            return
        if now_ns - self._word_ns >= TURN_NS and spoke_ns > self._word_ns:
            self._said = ""
        self._said = (self._said + said)[-KEPT:]
        self._word_ns, self._is_open = now_ns, True

    def due(self, now_ns: int, spoke_ns: int) -> Meant | None:
        """The rule whose time has come; each phrase that is said counts once."""
        if not self._is_open:
            return None
        longest_ns = self._word_ns + PATIENCE_NS + self._grace_ns
        quiet_ns = max(self._word_ns, spoke_ns) + self._grace_ns
        if now_ns < min(quiet_ns, longest_ns):
            return None
        self._is_open = False
        said = f" {plain(self._said)} "
        for phrase, (shown, what) in self._rules.items():
            _, found, after = said.rpartition(f" {phrase} ")
            if found and len(after.split()) <= MOST_AFTER:
                self._said = ""
                return Meant(shown, what)
        return None

    def forget(self) -> None:
        """The model began anew: it said nothing yet."""
        self._said, self._is_open = "", False
