"""Token ids become words with times, whatever the model says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lines.transcript import PiecesError, Transcript, Word, read_pieces

PIECES = ["<unk>", "▁hel", "lo", "▁", "▁world", "!", "<0xE2>", "<0x82>", "<0xAC>", "▁\x1b[2J", "ö"]
SILENT = (0, 3)
PERIOD_NS = 80_000_000
CHARACTERS = "ö€₂⬂⬬\ufffd"
"""All that is not ASCII and that the pieces above, whole or byte by byte, can make."""


def transcript(*heard: tuple[int, int]) -> Transcript:
    result = Transcript(PIECES, SILENT)
    for frame_index, text in heard:
        result.hear(frame_index, text)
    return result


def test_pieces_join_into_words_and_words_into_lines() -> None:
    said = transcript((15, 1), (16, 2), (17, 0), (18, 3), (20, 4), (21, 5), (22, -1))
    assert said.words() == [Word(15, "hello"), Word(20, "world!")]
    assert said.lines(PERIOD_NS) == ["  1.2 s  hello world!"]


def test_a_pause_begins_a_new_line() -> None:
    said = transcript((0, 1), (1, 2), (14, 4), (5000, 4))
    assert said.lines(PERIOD_NS) == ["  0.0 s  hello", "  1.1 s  world", "400.0 s  world"]


def test_bytes_become_characters_across_frames_and_broken_ones_a_replacement() -> None:
    assert transcript((1, 4), (2, 6), (3, 7), (4, 8)).lines(PERIOD_NS) == ["  0.1 s  world€"]
    assert transcript((1, 4), (2, 6), (3, 5)).lines(PERIOD_NS) == ["  0.1 s  world\ufffd!"]
    assert transcript((1, 8), (2, 4)).lines(PERIOD_NS) == ["  0.1 s  \ufffd world"]
    assert transcript((2, 6), (3, 7)).lines(PERIOD_NS) == ["  0.0 s  \ufffd"]
    # A silent frame in between is not the end of a character.
    assert transcript((1, 6), (2, 0), (3, 7), (4, 8)).lines(PERIOD_NS) == ["  0.3 s  €"]


def test_unknown_ids_are_counted_and_say_nothing() -> None:
    said = transcript((1, 11), (2, 2**31 - 1), (3, 10))
    assert said.unknown_ids == 2
    assert said.lines(PERIOD_NS) == ["  0.2 s  ö"]


def test_nothing_said_gives_no_lines() -> None:
    assert transcript().lines(PERIOD_NS) == []
    assert transcript((1, 0), (2, 3)).lines(PERIOD_NS) == []
    assert Transcript([], ()).lines(PERIOD_NS) == []


@given(st.lists(st.integers(-1, 12), max_size=50))
def test_whatever_is_said_can_be_printed(ids: list[int]) -> None:
    said = transcript(*enumerate(ids))
    assert said.unknown_ids == sum(i > 10 for i in ids)
    for line in said.lines(PERIOD_NS):
        assert line.isprintable()
        assert "".join(char for char in line if char not in CHARACTERS).isascii(), line


def test_pieces_come_from_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "pieces.json"
    assert read_pieces("") == []
    with pytest.raises(PiecesError, match="cannot be read: No such file"):
        read_pieces(str(path))
    path.write_text('["a", 3]')
    with pytest.raises(PiecesError, match=r"not a JSON list of text pieces: .*\$\[1\]"):
        read_pieces(str(path))
    path.write_text('["a", "\\u2581b"]')
    assert read_pieces(str(path)) == ["a", "▁b"]
