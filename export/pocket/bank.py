"""The bank: every chunk as every voice says it, kept small enough to travel to another machine.

    bank.json     voices and chunks: kind, text, where it lies in its voice's sound
    VOICE.opus    all chunks of one voice, one after the other, 24 kHz, some 20 kbit/s

`make` fills one (some minutes of CPU; the voices' programs must be installed), `Bank` reads one.
The list of chunks depends on the seed alone; sounds also on the versions of the programs.

Not here: the voices (`voices`), what is said (`world`).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import soundfile

from export.pocket.world import CALLER, DESK_PHRASES, DIGITS, NAMES, Kind

if TYPE_CHECKING:  # voices needs packages that training does not
    from export.pocket.voices import Speak, Voice

RATE_HZ = 24_000
COMPRESSION, COMPRESSION_DESK = 0.95, 0.9
"""Of Opus, as libsndfile counts it: about 18 kbit/s for callers, who are many, and 30 for the desk,
whose sound is learnt."""

GAP_SAMPLES = 1_200
"""Of silence between two chunks of a voice."""
INDEX = "bank.json"
NUMBERS_PER_VOICE = 24
RENDITIONS = 2
"""Of each of the desk's chunks; the Piper voice says nothing twice in the same way."""
WITHIN, AT_END = "within", "end"
"""Where in a number a digit is: its pitch says whether more will come."""

Say = Callable[[str], None]
Asked = Iterable[tuple[str, str, str]]
"""(kind, text, form)."""


class Chunk(msgspec.Struct, frozen=True):
    """One chunk in the bank."""

    voice: str
    kind: str
    """A `Kind` of callers, or "phrase", "digit" or "name" of the desk."""
    text: str
    form: str
    """`WITHIN` or `AT_END` for digits, otherwise empty."""
    start: int
    samples: int
    word_starts_s: tuple[float, ...] = ()


class Index(msgspec.Struct, frozen=True):
    """bank.json."""

    rate_hz: int
    seed: int
    callers: tuple[str, ...]
    """Those who have said everything; `make` may have been cut short."""
    desk: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Cast:
    """Who speaks in a bank (`voices.cast`)."""

    desk: "Voice"
    callers: "Sequence[Voice]"
    speak: "Speak"


@dataclass(frozen=True)
class Bank:
    """All sounds in one array, and the chunks with their places in it."""

    index: Index
    sound: npt.NDArray[np.int16]

    def of(self, voice: str) -> Iterator[Chunk]:
        return (chunk for chunk in self.index.chunks if chunk.voice == voice)


def read(folder: Path) -> Bank:
    """Decode a bank; chunks' places are then those in the one array."""
    index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    voices = [*index.callers, index.desk]
    with ThreadPoolExecutor(16) as pool:
        sounds = list(pool.map(lambda voice: _decoded(folder / f"{voice}.opus"), voices))
    offsets = np.cumsum([0, *(len(sound) for sound in sounds)])
    first = dict(zip(voices, offsets.tolist(), strict=False))
    moved = tuple(
        msgspec.structs.replace(chunk, start=chunk.start + first[chunk.voice])
        for chunk in index.chunks
    )
    return Bank(msgspec.structs.replace(index, chunks=moved), np.concatenate(sounds))


def _decoded(path: Path) -> npt.NDArray[np.int16]:
    sound, _ = soundfile.read(path, dtype="int16")
    return np.asarray(sound)


def make(folder: Path, seed: int, cast: Cast, every: bool, say: Say) -> Index:
    """Let everybody say everything, and write their bank; go on where it stopped.

    every: all callers make background speech, and not every third.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(voice.name for voice in cast.callers)
    index = _kept(folder, Index(RATE_HZ, seed, names, cast.desk.name, ()))
    there = len(index.callers)
    for n, voice in enumerate([cast.desk, *cast.callers]):
        if not any(chunk.voice == voice.name for chunk in index.chunks):
            asked = caller_chunks(seed, n - 1, every) if n else desk_chunks()
            compression = COMPRESSION if n else COMPRESSION_DESK
            chunks = _spoken(voice, cast.speak, asked, folder, compression)
            index = msgspec.structs.replace(index, chunks=(*index.chunks, *chunks))
            say(f"{voice.name}: {len(chunks)} chunks, {chunks[-1].start / RATE_HZ:.0f} s")
        # Whatever stops it, what is done is a bank.
        index = msgspec.structs.replace(index, callers=names[: max(n, there)])
        (folder / INDEX).write_bytes(msgspec.json.encode(index) + b"\n")
    return index


def _spoken(
    voice: "Voice", speak: "Speak", asked: Asked, folder: Path, compression: float
) -> list[Chunk]:
    """Let one voice say everything asked, and write its sound."""
    chunks: list[Chunk] = []
    sounds, at = [], 0
    for kind, text, form in asked:
        spoken = speak(voice, text + {WITHIN: ",", AT_END: "."}.get(form, ""))
        starts = spoken.word_starts_s
        chunks.append(Chunk(voice.name, kind, text, form, at, len(spoken.sound), starts))
        sounds += [spoken.sound, np.zeros(GAP_SAMPLES, np.float32)]
        at += len(spoken.sound) + GAP_SAMPLES
    path = folder / f"{voice.name}.opus"
    sound = np.concatenate(sounds)
    soundfile.write(
        path, sound, RATE_HZ, format="OGG", subtype="OPUS", compression_level=compression
    )
    return chunks


def _kept(folder: Path, wanted: Index) -> Index:
    """What an earlier run of the same seed got done: its desk, and callers up to the first that
    is somebody else, since a caller's place says which numbers it reads."""
    old = wanted
    if (folder / INDEX).is_file():
        old = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    spoken = {chunk.voice for chunk in old.chunks} if old.seed == wanted.seed else set()
    pairs = zip(wanted.callers, old.callers, strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1] and pair[0] in spoken, pairs)
    callers = tuple(mine for mine, _ in same)
    kept = {*callers, wanted.desk} & spoken
    chunks = tuple(chunk for chunk in old.chunks if chunk.voice in kept)
    return msgspec.structs.replace(wanted, callers=callers, chunks=chunks)


def caller_chunks(seed: int, voice: int, every: bool) -> Asked:
    """What one caller says; background speech by every third voice, or by ``every`` one."""
    for kind, phrases in CALLER.items():
        if kind is not Kind.CHATTER or every or voice % 3 == 0:
            yield from ((kind, phrase, "") for phrase in phrases)
    for form in (WITHIN, AT_END):
        yield from ((Kind.DIGIT, digit, form) for digit in DIGITS)
    rng = random.Random(f"{seed} {voice}")
    for _ in range(NUMBERS_PER_VOICE):
        digits = rng.choices(DIGITS, k=rng.choice((2, 3, 4, 4)))
        yield Kind.DIGITS, " ".join(digits), ""


def desk_chunks() -> Asked:
    """What the desk says."""
    for _ in range(RENDITIONS):
        yield from (("phrase", phrase, "") for phrase in DESK_PHRASES)
        for form in (WITHIN, AT_END):
            yield from (("digit", digit, form) for digit in DIGITS)
        yield from (("name", name, AT_END) for name in NAMES)
