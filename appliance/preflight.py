"""Whether the paths of a config, and the disk, could be used, without using them.

For `duplexbox appliance check`, which is run beside the box it is about: it makes no folder and
binds no socket, and a box that listens at the config's socket is no fault. The box itself finds
out by doing it (`listener`, `ledger_writer`), and says the same.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from appliance.config import Config

SOCKET_BYTES = 107
"""What Linux leaves of sun_path for a name."""


def faults(config: Config) -> Iterator[str]:
    """What would keep a box from starting, or from keeping calls, a sentence each."""
    socket, folder = config.control.socket, config.ledger.folder
    if why := _socket_fault(socket):
        yield (
            f"[control] socket {socket}: {why}. Name a path of at most {SOCKET_BYTES} bytes in a "
            f"folder this user may write to"
        )
    if why := _folder_fault(folder):
        yield f"[ledger] folder {folder}: {why}. Name a folder this user may write to"
    elif why := disk_fault(folder, config.ledger.min_free_mb):
        yield why


def disk_fault(folder: Path, min_free_mb: int) -> str:
    """Why the ledger could keep no call at all, or "": no disk has so much to leave free."""
    if not min_free_mb:
        return ""
    try:
        disk_mb = shutil.disk_usage(_nearest(folder)).total // 2**20
    except OSError:
        return ""  # whoever makes the folder will say why it cannot
    if min_free_mb < disk_mb:
        return ""
    return (
        f"[ledger] min_free_mb = {min_free_mb}, but the disk of {folder} holds {disk_mb} MB in "
        f"all: every call would be removed once it has ended. Lower min_free_mb"
    )


def _socket_fault(path: Path) -> str:
    try:
        if len(os.fsencode(path)) > SOCKET_BYTES:
            return f"{len(os.fsencode(path))} bytes long"
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            return "it is there and is no socket"
    except OSError as err:
        return err.strerror or str(err)
    return _folder_fault(path.parent)


def _folder_fault(folder: Path) -> str:
    """Why nothing could be written into ``folder``, made first where it is not there; or ""."""
    try:
        there = _nearest(folder)
        if not there.is_dir():
            return f"{there} is no folder"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{there} cannot be written to"
    except OSError as err:
        return err.strerror or str(err)
    return ""


def _nearest(folder: Path) -> Path:
    """``folder``, or the nearest of those above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
