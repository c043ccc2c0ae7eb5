"""The small untrained model that tests and benchmarks run: built when wanted, not committed.

It is what `duplexbox export build small` writes, 3.5 MB in about half a minute, and is built again
when the code that writes bundles has changed.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "build" / "small"
"""The bundle's folder. Whole once `built` has returned; tests/conftest.py calls it first of all."""
WRITTEN_BY = ("export/*.py", "export/models/*.py", "engines/*.py")


def built() -> Path:
    """The bundle's folder, after building it if need be. Raises CalledProcessError."""
    SMALL.parent.mkdir(exist_ok=True)
    stamp = SMALL.parent / "small.sources"
    sources = _sources()
    with (SMALL.parent / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (SMALL / "bundle.json").is_file() or not _says(stamp, sources):
            shutil.rmtree(SMALL, ignore_errors=True)
            command = [sys.executable, "-m", "duplexbox", "export", "build", "small"]
            subprocess.run([*command, "-o", str(SMALL)], cwd=ROOT, check=True)
            stamp.write_text(sources)
    return SMALL


def _says(stamp: Path, sources: str) -> bool:
    return stamp.is_file() and stamp.read_text() == sources


def _sources() -> str:
    """Hash over the code that decides what is in a bundle."""
    found = hashlib.sha256()
    for pattern in WRITTEN_BY:
        for path in sorted(ROOT.glob(pattern)):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
            found.update(path.read_bytes())
    return found.hexdigest()
