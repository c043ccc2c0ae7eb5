"""Which files of a bundle are already as they should be: what makes a killed build continue.

While a build runs, `building.json` in its folder says what it was given and lists every finished
file with its sha256; `bundle.json` takes over at the end. A later build of the same thing keeps
what still has its hash; when something changed, it says what, and begins again. A file is written
under a name of its own and renamed when whole.

Not here: what the files hold (`build`).
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engines import bundle
from engines.bundle import FileSpec
from export.mistake import Mistake

BUILDING = "building.json"
BUNDLE = "bundle.json"


class FolderTaken(Mistake):
    """The folder to write holds something that is not a bundle; the operator's fault."""


class _Record(msgspec.Struct, frozen=True):
    """The part of both files that is read here; bundle.json has more."""

    made_from: dict[str, str] = {}
    files: dict[str, FileSpec] = {}


class Journal:
    """The files of one folder, as far as they are finished."""

    def __init__(self, folder: Path, made_from: dict[str, str]) -> None:
        """Look at what lies in ``folder``, which is made if there is none.

        Raises `FolderTaken` if it holds anything but a bundle or the beginning of one.
        """
        self.folder, self.made_from = folder, made_from
        self.files: dict[str, FileSpec] = {}
        self.whole = False
        """A finished bundle of the same thing lies there, every byte of it."""
        self.note = ""
        """What was found, in a sentence, if there was anything."""
        if folder.exists():
            self._look()
        folder.mkdir(parents=True, exist_ok=True)
        if not self.whole:
            self._save()

    def has(self, name: str) -> bool:
        return name in self.files

    def bytes_kept(self) -> int:
        return sum(spec.bytes for spec in self.files.values())

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file, hash it, and note that it is finished."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part, digest, length = path.with_name(f"{path.name}.part"), hashlib.sha256(), 0
        with part.open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
                digest.update(chunk)
                length += len(chunk)
        part.rename(path)
        self.files[name] = FileSpec(sha256=digest.hexdigest(), bytes=length)
        self._save()

    def finish(self) -> None:
        """The bundle is whole and bundle.json says all that building.json did."""
        (self.folder / BUILDING).unlink(missing_ok=True)

    def _save(self) -> None:
        record = _Record(self.made_from, self.files)
        part = self.folder / f"{BUILDING}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        part.rename(self.folder / BUILDING)

    def _look(self) -> None:
        folder = self.folder
        if not folder.is_dir():
            raise FolderTaken(f"{folder} is a file, so nothing was written. {OTHER}")
        names = [name for name in (BUILDING, BUNDLE) if (folder / name).is_file()]
        if not names:
            if any(folder.iterdir()):
                raise FolderTaken(
                    f"{folder} exists and is not a bundle, so nothing was written. {OTHER}"
                )
            return
        try:
            record = msgspec.json.decode((folder / names[0]).read_bytes(), type=_Record)
        except (msgspec.DecodeError, UnicodeDecodeError):
            record = _Record()
        changed = _changes(record.made_from, self.made_from)
        if changed:
            self.note = f"{folder} is built again: {changed}"
            shutil.rmtree(folder)
            return
        for name, spec in record.files.items():
            if _is_inside(name) and _is_whole(folder / name, spec):
                self.files[name] = spec
        damaged = len(record.files) - len(self.files)
        if names[0] == BUNDLE and not damaged:
            self.whole = True
            self.note = f"{folder} is already built from the same input; nothing to do"
        elif names[0] == BUNDLE:
            self.note = f"{folder}: {damaged} of {len(record.files)} files changed since; repaired"
        else:
            self.note = f"{folder} was begun before; {len(self.files)} files of it are kept"
        if not self.whole:
            (folder / BUNDLE).unlink(missing_ok=True)


OTHER = "Choose another folder: duplexbox export build MODEL -o FOLDER"


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    """What differs, in words; "" if nothing does."""
    if not before:
        return "it does not say what it was made from"
    return ", ".join(
        f"{key} changed from {_short(before.get(key, 'nothing'))} to "
        f"{_short(now.get(key, 'nothing'))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    )


def _short(value: str) -> str:
    return f"{value[:12]}…" if len(value) == 64 else value


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in Path(name).parts


def _is_whole(path: Path, spec: FileSpec) -> bool:
    return (
        path.is_file() and path.stat().st_size == spec.bytes and bundle.describe_file(path) == spec
    )
