"""The state golden data starts from: sessions of any age, without storing their rings.

A full-size session holds gigabytes of keys and values, so golden data does not carry them. Every
float region and 8-bit ring of a golden session is drawn from (seed, region, session) alone, by a
generator whose bits are fixed for ever (Philox, raw words): floats on a grid of 1/64 that bfloat16
and float16 represent exactly, 8-bit rings from all codes they are ever written with. Rows a session
of that age has not reached hold the region's fill. Counters, tokens and settings are small and are
stored.

Pure. Not here: what stages must answer (`export.golden` records it, `export.verify` compares).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import RegionSpec
from engines.clocks import ClockKind

STEP = np.float32(1 / 64)
"""Between two values; they run from -2 up to 2, about the spread of normalised activations."""


CODED: dict[str, type[np.generic]] = {"int8": np.int8, "float8e4m3": np.uint8}
"""Storage of 8-bit rings."""


def is_drawn(region: RegionSpec) -> bool:
    """Whether golden sessions draw this region rather than store it."""
    floats = region.dtype in ("float32", "float16", "bfloat16")
    return (floats or is_coded(region)) and region.clock.kind is not ClockKind.CONSTANT


def is_coded(region: RegionSpec) -> bool:
    """Whether it is a ring of 8-bit codes; float8 as bit patterns, in uint8."""
    return region.dtype in CODED and region.clock.kind is ClockKind.RING


def draw(seed: int, region: RegionSpec, ages: Sequence[int]) -> NDArray[Any]:
    """A region of sessions that have lived ``ages`` ticks, (len(ages), *region.shape)."""
    assert is_drawn(region), region
    kind = CODED.get(region.dtype, np.float32)
    out = np.full((len(ages), *region.shape), region.fill, kind)
    for row, age in enumerate(ages):
        if age:
            out[row][_reached(region, age)] = draw_reached(seed, region, row, age)
    return out


def draw_reached(seed: int, region: RegionSpec, row: int, age: int) -> NDArray[Any]:
    """The part of a region that session ``row`` has reached, ``age`` ticks old: of a ring its
    valid rows, else all of it. Costs what that part is long where rows follow one another.
    """
    levels = _levels(seed, region, row, age)
    if is_coded(region):
        return _codes(levels, CODED[region.dtype])
    return np.multiply(levels, STEP)


def stored_reached(
    seed: int, region: RegionSpec, row: int, age: int, store: Callable[[NDArray[Any]], NDArray[Any]]
) -> NDArray[Any]:
    """`draw_reached` as it lies in memory. store: what turns float32 values into that; it is asked
    once, for the 256 there are.
    """
    if is_coded(region):
        return draw_reached(seed, region, row, age)
    table = store(np.multiply(np.arange(256, dtype=np.uint8).view(np.int8), STEP))
    return np.take(table, _levels(seed, region, row, age).view(np.uint8))


def _levels(seed: int, region: RegionSpec, row: int, age: int) -> NDArray[np.int8]:
    key = np.frombuffer(_digest(seed, region.name, row), dtype="<u8")
    reached, shape = _reached(region, age), region.shape
    if all(length == 1 for length in shape[: region.clock.axis]):
        shape = np.empty(shape, np.bool_)[reached].shape  # nothing beyond it need be drawn
    values = math.prod(shape)
    words = np.random.Philox(key=key).random_raw(-(-values // 8)).astype("<u8", copy=False)
    return words.view(np.int8)[:values].reshape(shape)[reached]


def _reached(region: RegionSpec, age: int) -> tuple[slice, ...]:
    if region.clock.kind is not ClockKind.RING:
        return (slice(None),) * len(region.shape)
    return (*[slice(None)] * region.clock.axis, slice(0, region.clock.valid_rows(age)))


def _codes(levels: NDArray[np.int8], kind: type[np.generic]) -> NDArray[Any]:
    """Without -128, which no value is rounded to, and without the two NaNs of e4m3."""
    if kind is np.int8:
        return np.maximum(levels, -127)
    bits = levels.view(np.uint8)
    return np.where((bits & 0x7F) == 0x7F, bits ^ 1, bits)


def written_rows(region: RegionSpec, age: int, ticks: int = 1) -> list[int]:
    """Rows of a ring that the next ticks of a session of this age write, in order."""
    clock = region.clock
    first, after = clock.position(age), clock.position(age + ticks)
    return [clock.row_of(position) for position in range(first, after)]


def _digest(seed: int, name: str, row: int) -> bytes:
    return hashlib.sha256(f"{seed}/{name}/{row}".encode()).digest()[:16]
