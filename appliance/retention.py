"""Which old calls must go so that the ledger's disk use stays bounded.

`plan_removal` decides, purely; `remove` does it. Oldest first, and never a call that is on. Runs
in the ledger's thread, seldom.

How old a call is, is the wall clock's business, and that clock can be wrong: set to next year by
mistake, or read from a board whose battery is empty. Every call would be too old at once. So
`BelievedTime` lets a step forward count only after it has stood for a while.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.clock import NS_PER_S, stamp, stamped_ns
from appliance.ledger import SUFFIX

HOUR_NS = 3600 * NS_PER_S
DAY_NS = 24 * HOUR_NS

STEP_NS = DAY_NS
"""A smaller step of the wall clock is believed at once: ages are kept in whole days, and a laptop
that slept has one every morning."""
STEADY_NS = 12 * HOUR_NS
"""A larger one must have stood for so long. It is less than a day, so that calls also go from a
box that is restarted every night."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How much is kept; 0 means without bound."""

    days: int = 0
    bytes: int = 0
    """All call files together."""
    free_bytes: int = 0
    """What the disk must have left, whoever fills it; old calls go first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One call file."""

    name: str
    """Begins with its start, so names sort by age."""
    bytes: int


class BelievedTime:
    """The wall clock's time, as far as calls may be removed by it. Pure: told what clocks show.

    While a step is not believed, time goes on from where it was. The first look has only the
    newest call to compare with, so a box that was off for a week also waits `STEADY_NS` before
    that week counts. What it cannot know: the true time, if the box is restarted with calls that
    were named by a wrong clock. A step backwards counts at once; it removes less.
    """

    def __init__(self) -> None:
        self.doubted_ns = 0
        """How far the wall clock is ahead of what is believed; 0: it is believed."""
        self._offset_ns: int | None = None
        """Believed time less the monotonic clock's; None: before the first look."""
        self._doubted_since_ns = 0
        self._was_said = False

    def look(self, wall_ns: int, now_ns: int, newest_ns: int | None = None) -> int:
        """The time to go by. newest_ns: when the newest call began; only the first look asks."""
        if self._offset_ns is None:
            self._offset_ns = (wall_ns if newest_ns is None else newest_ns) - now_ns
        ahead_ns = wall_ns - now_ns - self._offset_ns
        if ahead_ns > STEP_NS and not self.doubted_ns:
            self._doubted_since_ns = now_ns
        if ahead_ns <= STEP_NS or now_ns - self._doubted_since_ns >= STEADY_NS:
            self._offset_ns, self.doubted_ns = wall_ns - now_ns, 0
            self._was_said = False
        else:
            self.doubted_ns = ahead_ns
        return now_ns + self._offset_ns

    def oldest(
        self, days: int, names: Collection[str], is_on: Collection[str], wall_ns: int, now_ns: int
    ) -> str:
        """The stamp before which ``names`` are more than so many days old; 0 days: empty."""
        if not days:
            return ""
        ended = (stamped_ns(name) for name in names if name not in is_on)
        newest_ns = max((ns for ns in ended if ns is not None), default=None)
        return stamp(self.look(wall_ns, now_ns, newest_ns) - days * DAY_NS)

    def doubt(self) -> str:
        """What the operator should know, once, when time is no longer believed; else empty."""
        if not self.doubted_ns or self._was_said:
            return ""
        self._was_said = True
        return (
            f"the wall clock is {self.doubted_ns / DAY_NS:.1f} days ahead of the newest call and "
            f"the time since. No call is removed for its age by it until it has stood for "
            f"{STEADY_NS // HOUR_NS} hours. If it is wrong, set it right before then: timedatectl"
        )


def plan_removal(
    files: Sequence[Stored], is_on: Collection[str], oldest: str, keep_bytes: int, needed_bytes: int
) -> list[str]:
    """The files to remove, oldest first. Pure.

    is_on: names that must stay. oldest: names before this stamp go; empty: none does for its age.
    keep_bytes: most that all may take; 0: any. needed_bytes: at least this much must be freed, as
    far as there are calls to remove.
    """
    total = sum(file.bytes for file in files)
    freed = 0
    gone = []
    for file in sorted(files, key=lambda file: file.name):
        if file.name in is_on:
            continue
        too_old = bool(oldest) and file.name < oldest
        too_much = 0 < keep_bytes < total - freed
        if too_old or too_much or freed < needed_bytes:
            gone.append(file.name)
            freed += file.bytes
    return gone


def remove(
    folder: Path,
    keep: Keep,
    is_on: Collection[str],
    time: BelievedTime,
    wall_ns: int,
    now_ns: int,
) -> list[str]:
    """Remove what `plan_removal` says; returns the names. Raises `OSError`.

    wall_ns, now_ns: what the wall's clock and the monotonic one show.
    """
    with os.scandir(folder) as entries:
        files = [
            Stored(entry.name, entry.stat().st_size)
            for entry in entries
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        ]
    needed = keep.free_bytes - shutil.disk_usage(folder).free if keep.free_bytes else 0
    oldest = time.oldest(keep.days, [file.name for file in files], is_on, wall_ns, now_ns)
    gone = plan_removal(files, is_on, oldest, keep.bytes, needed)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    return gone
