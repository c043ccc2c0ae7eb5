"""Compiles the one C file at installation, if there is a compiler; nothing is missing without it.

`appliance/lines/sip_sleep.c` needs nothing of Python, so one wheel does for every version of it.
An editable installation has the library beside its source; for a wheel nothing is written there,
since a source folder may be another user's, and what lies in it another machine's.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "appliance/lines/sip_sleep.c"
LIBRARY = "appliance/lines/sip_sleep.so"
# What this machine's C library does not have is missed here, not when the first call comes.
FLAGS = "-O2 -Wall -Wextra -Werror=implicit-function-declaration -shared -fPIC -pthread -Wl,-z,defs"


def compile_library(source: Path, library: Path, compiler: str) -> str:
    """compiler: its command. Why there is no library; empty: there is."""
    try:
        command = [*shlex.split(compiler), *FLAGS.split(), "-o", str(library), str(source)]
        subprocess.run(command, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as err:
        with contextlib.suppress(OSError):
            library.unlink()  # of an older source
        return str(err)
    return ""


class CompilePace(BuildHookInterface):  # type: ignore[misc]
    """What hatchling runs before and after it packs a wheel, an editable one too."""

    _folder: Path | None = None
    """Of what only the wheel has."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: standard or editable."""
        if sys.platform != "linux":
            return
        root = Path(self.root)
        library = root / LIBRARY
        if version != "editable":
            self._folder = Path(tempfile.mkdtemp())
            library = self._folder / library.name
        why = compile_library(root / SOURCE, library, os.environ.get("CC") or "cc")
        if why:
            self.app.display_warning(f"{SOURCE} is left out: {why}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
