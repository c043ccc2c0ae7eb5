"""Which old calls must go so that the ledger's disk use stays bounded.

`plan_removal` decides, purely; `remove` does it. Oldest first, and never a call that is on. Runs
in the ledger's thread, seldom.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.ledger import SUFFIX


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


def remove(folder: Path, keep: Keep, is_on: Collection[str], oldest: str) -> list[str]:
    """Remove what `plan_removal` says; returns the names. Raises `OSError`."""
    with os.scandir(folder) as entries:
        files = [
            Stored(entry.name, entry.stat().st_size)
            for entry in entries
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        ]
    needed = keep.free_bytes - shutil.disk_usage(folder).free if keep.free_bytes else 0
    gone = plan_removal(files, is_on, oldest, keep.bytes, needed)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    return gone
