"""From token ids to what was said, and when. Pure.

Decides how pieces become words, words become lines, and what an id without a piece does. Does not
know where the ids come from; a line hands it the frames its caller heard, so that the transcript
does not claim what was never played.

A piece is a string of the model's vocabulary: U+2581 begins a word and stands for a space,
``<0xE2>`` is one byte of UTF-8. Silent ids say nothing. An id beyond the list is counted.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

NS_PER_S = 1_000_000_000
WORD_START = "\u2581"
"""SentencePiece's visible space."""
PAUSE_NS = 1_000_000_000
"""A pause this long between two words begins a new line of the transcript."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PiecesError(ValueError):
    """The list of text pieces cannot be used; the bundle's fault."""


@dataclass(slots=True)
class Word:
    """One word and the frame in which it began."""

    frame_index: int
    text: str


class Transcript:
    """What one session's model said, as far as the caller heard it."""

    def __init__(self, pieces: Sequence[str], silent_ids: Iterable[int]) -> None:
        self._pieces = pieces
        self._silent = frozenset(silent_ids)
        self._words: list[Word] = []
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self.unknown_ids = 0
        """Tokens that are neither silent nor in the list of pieces."""

    def hear(self, frame_index: int, text: int) -> None:
        """The caller heard frame ``frame_index``, whose token is ``text``; -1 for none."""
        if text < 0 or text in self._silent:
            return
        if text >= len(self._pieces):
            self.unknown_ids += 1
            return
        piece = self._pieces[text]
        if byte := _BYTE_PIECE.fullmatch(piece):
            # Bytes wait until they make a character, however many frames that takes.
            self._append(frame_index, self._bytes.decode(bytes.fromhex(byte[1])))
            return
        self._append(frame_index, self._bytes.decode(b"", final=True))
        starts_word = piece.startswith(WORD_START)
        self._append(frame_index, piece.replace(WORD_START, " ").lstrip(), new=starts_word)

    def words(self) -> list[Word]:
        """The words so far; bytes still waiting for their character are not in them."""
        return [word for word in self._words if word.text.strip()]

    def lines(self, period_ns: int) -> list[str]:
        """One line per stretch of speech, such as ``  1.2 s  hello there``.

        The time is that of the frame in which the line's first word began, from the session's
        first frame.
        """
        rest = self._bytes.decode(b"", final=True)
        if rest:
            self._append(self._words[-1].frame_index if self._words else 0, rest)
        lines: list[str] = []
        last_ns = 0
        for word in self.words():
            at_ns = word.frame_index * period_ns
            text = " ".join(word.text.split())
            if lines and at_ns - last_ns < PAUSE_NS:
                lines[-1] += f" {text}"
            else:
                lines.append(f"{at_ns / NS_PER_S:5.1f} s  {text}")
            last_ns = at_ns
        return lines

    def _append(self, frame_index: int, text: str, *, new: bool = False) -> None:
        # A model can say anything, and somebody will print this on a terminal.
        clean = "".join(char if char.isprintable() else " " for char in text)
        if new or (clean and not self._words):
            self._words.append(Word(frame_index, clean))
        elif clean:
            self._words[-1].text += clean


class PieceText:
    """The same pieces as running text, for a client that is shown words as they are said."""

    def __init__(self, pieces: Sequence[str], silent_ids: Iterable[int]) -> None:
        self._pieces = pieces
        self._silent = frozenset(silent_ids)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def hear(self, text: int) -> str:
        """What token ``text`` adds, -1 for none: whole characters, a word's first after a space.

        Empty for silent and unknown ids, and while bytes wait for the rest of their character.
        """
        if not 0 <= text < len(self._pieces) or text in self._silent:
            return ""
        piece = self._pieces[text]
        if byte := _BYTE_PIECE.fullmatch(piece):
            said = self._bytes.decode(bytes.fromhex(byte[1]))
        else:
            said = self._bytes.decode(b"", final=True) + piece.replace(WORD_START, " ")
        return "".join(char if char.isprintable() else " " for char in said)


def read_pieces(path: str) -> list[str]:
    """The JSON list of pieces at ``path``, by id; an empty path is a model without text.

    Raises `PiecesError`.
    """
    if not path:
        return []
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[str])
    except OSError as err:
        raise PiecesError(
            f"the list of text pieces {path} cannot be read: {err.strerror}. "
            "Does this process see the box's bundle?"
        ) from None
    except msgspec.DecodeError as err:
        raise PiecesError(f"{path} is not a JSON list of text pieces: {err}") from None
