"""SentencePiece models, read and written by hand, held to the library."""

from pathlib import Path

import pytest
import sentencepiece

from export.checkpoint_file import CheckpointError
from export.checkpoint_text import read_pieces, seeded_pieces, sentencepiece_model

pytestmark = pytest.mark.torch

PROMPT = "<system> You enjoy having a good conversation. <system>"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(seeded_pieces(512)))
    return path


def test_the_library_loads_what_is_written(model: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(str(model))
    ids = library.encode(PROMPT)
    assert library.vocab_size() == 512
    assert library.decode(ids) == PROMPT
    assert 0 not in ids
    assert len(ids) < len(PROMPT)
    assert [library.id_to_piece(k) for k in range(4, 512)] == list(read_pieces(model, 512)[4:])


def test_ids_that_are_no_text_have_no_piece(model: Path) -> None:
    assert read_pieces(model, 512)[:5] == ("", "", "", "", "▁")


def test_pieces_are_distinct() -> None:
    assert len(set(seeded_pieces(32_000))) == 32_000


def test_another_number_of_pieces_is_refused(model: Path) -> None:
    with pytest.raises(CheckpointError, match="has 512 pieces, the model has 32,000 text ids"):
        read_pieces(model, 32_000)


@pytest.mark.parametrize("cut", [1, 2, 300])
def test_a_cut_off_model_is_refused(model: Path, cut: int) -> None:
    model.write_bytes(model.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="is not a SentencePiece model"):
        read_pieces(model, 512)


@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x0f", b"\x0a\x05abc", b"\x0a\x03\x0a\x01\xff"])
def test_other_bytes_are_refused(model: Path, raw: bytes) -> None:
    model.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is not a SentencePiece model"):
        read_pieces(model, 512)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pieces(tmp_path / "none.model", 512)
