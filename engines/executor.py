"""What the tick loop needs of whatever runs a bundle; `ort_executor` is the CPU's answer.

An executor owns the state of every slot and the arrays frames travel in. It knows slots, not
sessions: who sits in a slot, and for how long, is the appliance's business. Live slots are always
0..batch-1; the appliance fills a leaver's hole with `move`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engines.bundle import Bundle, RegionSpec
from engines.prefill import Primer


class SettingError(ValueError):
    """A session asked for a setting the bundle does not have, or a value it cannot be."""


class NoRoom(SettingError):
    """The device has no memory for the session; the others have theirs."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the device, as far as was last looked."""

    weights: int
    whole: int
    """State and wires that are there from the start."""
    committed: int
    """Rings: pages mapped now, spare ones included."""
    reserved: int
    """Rings: addresses."""
    full: int
    """Whole and rings when every slot holds a session at full retention."""
    device_used: int
    """Everything on the GPU, whoever owns it."""
    device_total: int = 0
    session: int = 0
    """Rings of one session at full retention."""
    for_sessions: int = 0
    """What the rings of all sessions may come to: what they have, and what is free."""
    short_in_ticks: int | None = None
    """The device had no memory for a page that will be needed in so many ticks; None: it had."""


class Executor(Protocol):
    """All live sessions, one tick at a time. One thread uses it."""

    bundle: Bundle
    slots: int
    """Largest batch; at most the bundle's largest profile."""
    audio_in: NDArray[np.float32]
    """(slots, S): the caller writes the frames of slots 0..batch-1 here before `step`."""
    audio_out: NDArray[np.float32]
    """(slots, S): the model's frames after `step`; overwritten by the next one."""
    text: NDArray[np.int64]
    """(slots,): the token the model spoke beside the frame."""
    valid: NDArray[np.bool_]
    """(slots,): False while the model's delays warm up; `audio_out` is silence then."""

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        """Begin a session in ``slot``: every region gets its first value, nothing is inherited.

        settings: values of `constant` regions by name; the rest take the bundle's defaults.
        Raises `SettingError` for an unknown name, `NoRoom`; the slot is then still clean.
        """

    def move(self, source: int, target: int) -> None:
        """Give ``target`` the session of ``source``, bit for bit; ``source`` is then free."""

    def step(self, batch: int) -> None:
        """Run one tick for slots 0..batch-1, exactly; 0 is allowed and does nothing."""

    def close(self) -> None:
        """Give back memory. The arrays must not be used afterwards."""


@runtime_checkable
class Primes(Protocol):
    """An executor whose sessions can begin with a prompt, where the bundle has one."""

    def primer(self) -> Primer:
        """What feeds prompts to slots beyond the batch. Raises `BundleError` where there are none.

        Loads graphs: call it before the first tick.
        """


@runtime_checkable
class Ages(Protocol):
    """An executor whose steps can be timed at an age without living through it."""

    def age(self, slot: int, ticks: int) -> None:
        """Make ``slot`` cost what a session of ``ticks`` ticks does: its counters move on.

        What its rings hold is whatever they held, so its output means nothing until `join`.
        """


@runtime_checkable
class OnDevice(Protocol):
    """An executor whose sessions live in a memory of its own, not in the machine's."""

    gpu: str
    """The device's name."""

    def memory(self) -> MemoryUse:
        """How much of it is used and left; any thread may ask, none waits."""


def check_setting(regions: Mapping[str, RegionSpec], name: str, value: float) -> None:
    """Raise `SettingError` unless a caller may set region ``name`` to ``value``."""
    region = regions.get(name)
    if region is None or region.bounds is None:
        settable = sorted(r.name for r in regions.values() if r.bounds is not None)
        raise SettingError(
            f"{name} is not a setting of this bundle; it has: {', '.join(settable) or 'none'}"
        )
    low, high = region.bounds
    if not low <= value <= high:  # also refuses NaN
        raise SettingError(f"{name} = {value} is outside {low:g}..{high:g}")
    if region.dtype in ("int64", "int32") and value != math.floor(value):
        raise SettingError(f"{name} = {value} must be a whole number")
