"""Has the SIP stack's media threads sleep as `sip_sleep.c` says, where that has been compiled.

Its names must be met before anybody else's, so a worker is started with it (LD_PRELOAD), and tells
none of the programs that it starts itself.
"""

from collections.abc import MutableMapping
from pathlib import Path

LIBRARY = Path(__file__).with_name("sip_sleep.so")
"""Compiled at installation, if there is a compiler. Not this module's name, which would hide it."""
PRELOAD = "LD_PRELOAD"


def preload(environ: MutableMapping[str, str], library: Path = LIBRARY) -> str:
    """Of a process that is started with ``environ``; why not, empty if it is asked for."""
    if not library.is_file():
        return (
            f"the stack's media threads wake as often as they like, which costs a third more of "
            f"the processor with many calls: there is no {library}. Install a C compiler (apt-get "
            f"install gcc libc6-dev), and duplexbox again"
        )
    environ[PRELOAD] = ":".join(filter(None, [str(library), environ.get(PRELOAD, "")]))
    return ""


def tell_nobody(environ: MutableMapping[str, str], library: Path = LIBRARY) -> None:
    """Undo `preload` for whatever this process starts."""
    others = [
        name for name in environ.pop(PRELOAD, "").split(":") if name not in ("", str(library))
    ]
    if others:
        environ[PRELOAD] = ":".join(others)
