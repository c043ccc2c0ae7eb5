"""Admit a newcomer or refuse it, and why. Pure: counts and bytes in, a decision out.

A session is charged at full retention from its first second, because that is what it will cost
if it lasts: what it owns when it is young says nothing. The memory follows from the native clocks
in the bundle; nothing is found out by trial. Not here yet: the time a tick at one session more
would take (the `time` reason), which needs measurements of this bundle on this machine.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from engines.bundle import Manifest
from engines.executor import SettingError, check_setting


class Reason(enum.Enum):
    """Why a newcomer is refused; each line translates it into its own protocol."""

    TIME = "time"
    """One session more would make ticks late."""
    MEMORY = "memory"
    """The state all sessions will own at full retention would not fit."""
    LINES = "lines"
    """Every slot is taken."""
    DRAINING = "draining"
    """The box is finishing its calls and will stop."""
    NOT_READY = "not_ready"
    """The engine is still warming up."""
    FAULT = "fault"
    """The request itself cannot be met, or the box failed to prepare the session."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, why, and a sentence with the numbers."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the box can give, as far as admission is concerned."""

    slots: int
    """Largest batch of the engine."""
    held: int
    """Leases that admitted sessions hold."""
    session_bytes: int
    """State of one session at full retention."""
    memory_bytes: int
    """What the state of all sessions together may take."""
    ready: bool
    draining: bool

    @property
    def free(self) -> int:
        """How many more sessions would be admitted now."""
        if not self.ready or self.draining:
            return 0
        fit = self.memory_bytes // self.session_bytes if self.session_bytes else self.slots
        return max(0, min(self.slots, fit) - self.held)


def session_bytes(manifest: Manifest) -> int:
    """Bytes of state one session owns once none of its regions grows any more."""
    return manifest.session_bytes(manifest.ticks_until_full())


def admit(room: Headroom, manifest: Manifest, settings: Mapping[str, float]) -> Refusal | None:
    """None: there is room. Otherwise the first reason that stands in the way."""
    if not room.ready:
        return Refusal(Reason.NOT_READY, "the engine is warming up; try again in a few seconds")
    if room.draining:
        return Refusal(Reason.DRAINING, f"the box stops once its {room.held} calls have ended")
    regions = {region.name: region for region in manifest.regions}
    try:
        for name, value in settings.items():
            check_setting(regions, name, value)
    except SettingError as err:
        return Refusal(Reason.FAULT, str(err))
    if room.held >= room.slots:
        return Refusal(Reason.LINES, f"all {room.slots} slots are taken")
    needed = (room.held + 1) * room.session_bytes
    if needed > room.memory_bytes:
        return Refusal(
            Reason.MEMORY,
            f"{room.held + 1} sessions would own {needed} bytes at full retention; "
            f"the limit is {room.memory_bytes}",
        )
    return None
