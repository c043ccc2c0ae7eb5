"""Compiles the one C file at installation, if there is a compiler; nothing is missing without it.

`appliance/lines/sip_sleep.c` needs nothing of Python, so one wheel does for every version of it.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "appliance/lines/sip_sleep.c"


class CompilePace(BuildHookInterface):  # type: ignore[misc]
    """What hatchling runs before it packs a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: standard or editable."""
        if sys.platform != "linux":
            return
        source = Path(self.root, SOURCE)
        library = source.with_suffix(".so")
        command = [
            *shlex.split(os.environ.get("CC", "cc")),
            "-O2",
            "-Wall",
            "-Wextra",
            "-shared",
            "-fPIC",
        ]
        try:
            subprocess.run([*command, "-o", str(library), str(source)], check=True)
        except (OSError, subprocess.CalledProcessError) as err:
            self.app.display_warning(f"{SOURCE} is left out: {err}")
            library.unlink(missing_ok=True)  # of another version, maybe
            return
        build_data["artifacts"].append(f"/{library.relative_to(self.root)}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
