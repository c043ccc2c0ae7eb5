"""Prompts that were fed once, kept on disk for the next caller who asks for the same.

A file per (bundle, prompt), named by a hash of both; what lies in it is `engines.snapshot`'s
business. A file that is damaged or of something else is removed with one line in the log, and the
prompt is fed again: a snapshot saves time and decides nothing. When the folder grows beyond its
limit, what was used longest ago goes first.

Files are read by one thread and written by another, because a disk may take a second and nobody
should wait for it but the caller whose prompt it is. Boxes may share a folder: what one is writing
is locked as long as it does, and left alone by the others.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from engines import snapshot as snapshots
from engines.bundle import Manifest
from engines.prefill import Prompt
from engines.snapshot import Snapshot, SnapshotError

logger = logging.getLogger(__name__)

Deliver = Callable[[Snapshot | None], None]

WAITING = 4
"""Snapshots that may wait for the disk; one more is not kept, and its prompt fed again."""


class SnapshotStore:
    """The snapshots of one bundle in one folder."""

    def __init__(self, folder: Path, manifest: Manifest, limit_bytes: int) -> None:
        """Makes the folder, for this user alone. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        snapshots.remove_abandoned(folder)
        self._folder = folder
        self._manifest = manifest
        self._limit_bytes = limit_bytes
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(WAITING)
        self._asked: queue.SimpleQueue[tuple[Prompt, Deliver] | None] = queue.SimpleQueue()
        # Daemons: a disk that does not answer must not keep a box from stopping.
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._reader = threading.Thread(target=self._answer, name="snapshots-read", daemon=True)
        self.hits = 0
        self.misses = 0

    def start(self) -> None:
        self._thread.start()
        self._reader.start()

    def stop(self) -> None:
        """Write what waits, then end both threads."""
        self._asked.put(None)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def ask(self, prompt: Prompt, deliver: Deliver) -> None:
        """`load`, some time later; ``deliver`` is called in the thread that reads."""
        self._asked.put((prompt, deliver))

    def load(self, prompt: Prompt) -> Snapshot | None:
        """The state after ``prompt``, if it is kept; None: feed it."""
        path = self._path(prompt)
        found = self._read(path, prompt)
        self.hits += found is not None
        self.misses += found is None
        if found is not None:
            with contextlib.suppress(OSError):  # gone by now to make room, or not ours to touch
                os.utime(path)  # used now: the last to go
        return found

    def keep(self, snapshot: Snapshot) -> None:
        """Have it written soon, or not at all when the disk cannot follow."""
        try:
            self._queue.put_nowait(snapshot)
        except queue.Full:
            logger.warning("a prompt's snapshot is not kept: %d wait for the disk", WAITING)

    def write(self, snapshot: Snapshot) -> None:
        """Write one, and make room for it. Failures are logged: nobody depends on it."""
        path = self._folder / snapshots.file_name(self._manifest, snapshot.age)
        if snapshot.bytes > self._limit_bytes:
            logger.warning(
                "a prompt's snapshot is not kept: bytes=%d limit=%d; raise [persona] keep_mb",
                snapshot.bytes,
                self._limit_bytes,
            )
            return
        try:
            self._make_room(snapshot.bytes)
            snapshots.write(path, self._manifest, snapshot)
        except OSError as err:
            logger.warning("a prompt's snapshot is not kept: %s: %s", path, err.strerror or err)

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            prompt, deliver = asked
            deliver(self.load(prompt))

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            self.write(snapshot)

    def _read(self, path: Path, prompt: Prompt) -> Snapshot | None:
        try:
            return snapshots.read(path, self._manifest, snapshots.prompt_age(prompt))
        except FileNotFoundError:
            return None
        except (SnapshotError, OSError) as err:
            logger.warning("%s is removed and its prompt fed again: %s", path, err)
            try:
                path.unlink(missing_ok=True)
            except OSError as left:
                logger.warning("%s cannot be removed: %s", path, left.strerror or left)
            return None

    def _make_room(self, needed_bytes: int) -> None:
        kept = []
        for path in self._folder.glob(f"*{snapshots.SUFFIX}"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            kept.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total + needed_bytes <= self._limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, prompt: Prompt) -> Path:
        return self._folder / snapshots.file_name(self._manifest, snapshots.prompt_age(prompt))
