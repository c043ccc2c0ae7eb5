"""A prompt as rows of ids: what to feed, in which pieces, and what ring of tokens it leaves. Pure.

A prompt is N frames, one id per stream. Frame p lands at position p + delay of each stream, and
the model is fed position after position, so what it is fed at a time is a matter of arithmetic:
`fed_ids`. So is the token ring afterwards (`tokens_after`), because a prompt leaves the model no
choice before its last row. Where rows may be cut is `chunk_rows`.

        frame                0    1    2  ...  N-1
        without delay        -   f1   f2      fN-1   (chosen)     a stream begins with its initial
        delay 1              -    -   f1      fN-2    fN-1        id, up to position = delay
        position             0    1    2       N-1      N

Rows 0..N-2 depend on the prompt alone, so their state can be kept and given to the next caller
(`snapshot`); row N-1 and the first choice are every session's own. Not here: running a graph
(`ort_prefill`), making frames of a text (the appliance), time.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.bundle import PromptSpec


class PromptError(ValueError):
    """A prompt that this bundle cannot be given; whoever asked for it is at fault."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a session is fed before it hears its caller."""

    ids: NDArray[np.int64]
    """(N, streams): the input of each position, delays in place."""
    frames: NDArray[np.int64]
    """(N, streams): the same undelayed, as `make_prompt` was given them."""
    embedded: NDArray[Any]
    """(E, C) in the model's own dtype: what positions 0..E-1 are fed instead of their ids."""
    key: str
    """sha256 over all that is fed: two prompts with the same key are the same prompt."""

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def shared_rows(self) -> int:
        """Rows whose state every session with this prompt shares: all but the last."""
        return len(self.ids) - 1


def make_prompt(spec: PromptSpec, frames: NDArray[np.int64], embedded: NDArray[Any]) -> Prompt:
    """frames: (N, streams) int64, N >= 1; embedded: (E, C), E < N.

    Raises `PromptError` when it is longer than the bundle allows.
    """
    rows, streams = frames.shape
    assert streams == len(spec.delays), (streams, spec.delays)
    assert len(embedded) < rows, (len(embedded), rows)
    if rows > spec.longest_frames:
        raise PromptError(
            f"the prompt is {rows} frames long and this bundle takes {spec.longest_frames}; "
            f"shorten the persona: every token of it is a frame"
        )
    digest = hashlib.sha256(f"{frames.shape} {embedded.dtype} {embedded.shape}\n".encode())
    digest.update(np.ascontiguousarray(frames).tobytes())
    digest.update(np.ascontiguousarray(embedded).tobytes())
    return Prompt(fed_ids(spec, frames), frames, embedded, digest.hexdigest())


def fed_ids(spec: PromptSpec, frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N, streams) undelayed -> the model's input at positions 0..N-1, (N, streams)."""
    ids = np.empty_like(frames)
    for stream, (delay, initial) in enumerate(zip(spec.delays, spec.initial_ids, strict=True)):
        ids[: delay + 1, stream] = initial
        # Position `delay` holds the initial id still: frame 0 of a stream is never heard.
        ids[delay + 1 :, stream] = frames[1 : max(len(frames) - delay, 1), stream]
    return ids


def tokens_after(
    spec: PromptSpec, frames: NDArray[np.int64], count: int, rows: int, fill: float
) -> NDArray[np.int64]:
    """The token ring (streams, rows) once ``count`` frames were fed; ``fill`` where none is yet."""
    ring = np.full((len(spec.delays), rows), fill, np.int64)
    for stream, delay in enumerate(spec.delays):
        for frame in range(max(0, count - rows), count):
            ring[stream, (frame + delay) % rows] = frames[frame, stream]
    return ring


def chunk_rows(position: int, left: int, most: int, retain: int) -> int:
    """How many of the ``left`` rows from ``position`` on may be fed at once, at least 1.

    Up to the end of a ring of ``retain`` rows any number; beyond, a second row would overwrite
    a key that the first still sees, so one by one.
    """
    assert position >= 0, position
    assert min(left, most, retain) >= 1, (left, most, retain)
    return max(1, min(left, most, retain - position))


class Parking(Protocol):
    """Prepares sessions in slots that no tick steps yet: all calls fall between two ticks.

    Of such a slot only the rings that are written in place outlast a tick of the others; the rest
    is handed out by `Primer.open` or a snapshot, kept by the caller, and given back to `settle`.
    """

    def clear(self, slot: int) -> None:
        """Empty every in-place ring of ``slot``, whoever sat there before."""

    def leave(self, slot: int) -> None:
        """Nobody is prepared in ``slot`` any more: what it holds beside its rows may go."""

    def settle(
        self,
        source: int,
        target: int,
        settings: Mapping[str, float],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        """Make ``target`` a session that the next tick can step: rings of ``source``, ``values``,
        ``settings``, and the first value of everything else.

        Raises `SettingError`; the slot must then be joined again.
        """

    def read(self, slot: int, name: str, first: int = 0, rows: int | None = None) -> NDArray[Any]:
        """Copy of a region as the next tick would read it; of a ring, ``rows`` from ``first``."""

    def write(self, slot: int, name: str, first: int, rows: NDArray[Any]) -> None:
        """Write rows of an in-place ring from row ``first`` on."""


class Primer(Parking, Protocol):
    """Feeds prompts to sessions in such slots."""

    spec: PromptSpec

    @property
    def retain(self) -> int:
        """Rows of the rings a prompt is written into; for `chunk_rows`."""

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        """Feed rows first..first+rows-1 of ``prompt``, which `chunk_rows` must allow.

        The slot must have been cleared, and the rows before fed, or written from a snapshot.
        """

    def open(
        self, slot: int, prompt: Prompt, settings: Mapping[str, float]
    ) -> dict[str, NDArray[Any]]:
        """Feed the last row and make the model's first choice, with the session's own sampling.

        Returns the values of regions that are not in place, for `settle`.
        """
