"""The text pieces of a checkpoint: what each text id stands for.

Published checkpoints bring a SentencePiece model, `tokenizer_spm_32k_3.model`: a protocol buffer
whose first field repeats, once per id, a piece with its score and kind. That much is read and
written here by hand, because the pieces are all a bundle needs, and because a seeded checkpoint
should have the file too: its pieces are made-up syllables, but the sentencepiece library loads
them, so prompts can be encoded the way they are for the real model.

Not here: turning text into ids (the sentencepiece library), ids into what a caller reads.
"""

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

from export.checkpoint_file import CheckpointError

NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # sentencepiece_model.proto: SentencePiece.Type
SPECIAL = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<pad>", CONTROL))
"""Ids 0 to 3. For Moshi they mean: end of padding, begin, end, padding."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
PIECE_FIELD, TRAINER_FIELD, NORMALIZER_FIELD = 1, 2, 3  # of ModelProto
TEXT_FIELD, SCORE_FIELD, KIND_FIELD = 1, 2, 3  # of SentencePiece
LARGEST_BYTES = 64 << 20
"""The published model has half a megabyte."""


def read_pieces(path: Path, text_card: int) -> tuple[str, ...]:
    """Piece of every text id, "▁" for a space, "" for ids that are no text.

    Raises CheckpointError if it is not a SentencePiece model or has another number of pieces.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= LARGEST_BYTES else b""
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from None
    try:
        pieces = tuple(
            _piece(value)
            for field, value in _fields(raw)
            if field == PIECE_FIELD and isinstance(value, bytes)
        )
    except (ValueError, IndexError) as err:
        raise CheckpointError(
            f"{path} is not a SentencePiece model ({err}). Download it again."
        ) from None
    if len(pieces) != text_card:
        raise CheckpointError(
            f"{path} has {len(pieces):,} pieces, the model has {text_card:,} text ids: they do not "
            "belong together. Use the tokenizer of the same checkpoint."
        )
    return pieces


def seeded_pieces(text_card: int) -> list[str]:
    """As many pieces as there are ids: the special ones, letters, then made-up syllables."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    sounds = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    longer = (
        "".join(syllables)
        for length in itertools.count(1)
        for syllables in itertools.product(sounds, repeat=length)
    )
    words = (piece for text in longer for piece in (f"▁{text}", text))
    every = itertools.chain((text for text, _ in SPECIAL), ["▁"], letters, words)
    return list(itertools.islice(every, text_card))


def sentencepiece_model(pieces: list[str]) -> bytes:
    """A unigram SentencePiece model of these pieces; longer ones are preferred."""
    kinds = dict(SPECIAL)
    model = bytearray()
    for piece in pieces:
        kind = kinds.get(piece, NORMAL)
        # Less than linear in length, so that one long piece beats the short ones it is made of.
        score = -(len(piece) ** 0.5) if kind == NORMAL else 0.0
        entry = _bytes_field(TEXT_FIELD, piece.encode())
        entry += _varint(SCORE_FIELD << 3 | FIXED32) + struct.pack("<f", score)
        entry += _varint(KIND_FIELD << 3 | VARINT) + _varint(kind)
        model += _bytes_field(PIECE_FIELD, entry)
    trainer = _varint(3 << 3 | VARINT) + _varint(1)  # model_type: unigram
    trainer += _varint(4 << 3 | VARINT) + _varint(len(pieces))  # vocab_size
    trainer += _varint(43 << 3 | VARINT) + _varint(3)  # pad_id
    normalizer = _bytes_field(1, b"identity")
    model += _bytes_field(TRAINER_FIELD, trainer)
    return bytes(model + _bytes_field(NORMALIZER_FIELD, normalizer))


def _piece(entry: bytes) -> str:
    text, kind = "", NORMAL
    for field, value in _fields(entry):
        if field == TEXT_FIELD and isinstance(value, bytes):
            text = value.decode()
        elif field == KIND_FIELD and isinstance(value, int):
            kind = value
    return "" if kind in (UNKNOWN, CONTROL) else text


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protocol buffer. Raises ValueError or IndexError if torn."""
    at = 0
    while at < len(raw):
        tag, at = _read_varint(raw, at)
        wire = tag & 7
        if wire == VARINT:
            number, at = _read_varint(raw, at)
            yield tag >> 3, number
            continue
        if wire == BYTES:
            length, at = _read_varint(raw, at)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > len(raw):
            raise ValueError(f"cut off at byte {len(raw)}")
        yield tag >> 3, raw[at : at + length]
        at += length


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number without end at byte {at}")


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
