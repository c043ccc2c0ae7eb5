"""Has the SIP stack's media threads sleep as `sip_sleep.c` says, where that has been compiled.

Its names must be met before anybody else's, so a worker is started with it (LD_PRELOAD), and tells
none of the programs that it starts itself.
"""

import ctypes
from collections.abc import MutableMapping
from pathlib import Path

LIBRARY = Path(__file__).with_name("sip_sleep.so")
"""Compiled at installation, if there is a compiler. Not this module's name, which would hide it."""
PRELOAD = "LD_PRELOAD"
SEPARATORS = set(" :$")
"""Of names in it, and what the loader puts something else in place of; neither can be quoted."""


def preload(environ: MutableMapping[str, str], library: Path = LIBRARY) -> str:
    """Of a process that is started with ``environ``; why not, empty if it is asked for."""
    again = "install duplexbox again (pip install --force-reinstall --no-deps --no-cache-dir)"
    why = ""
    if not library.is_file():
        why = f"there is no {library}. Install a C compiler (apt-get install gcc libc6-dev), and "
        why += again
    elif set(str(library)) & SEPARATORS:
        why = f"no {library} can be preloaded. Install duplexbox where no name has one of ' :$'"
    else:
        try:
            ctypes.CDLL(str(library))
        except OSError as err:  # of another machine, or where nothing may be executed
            why = f"{err}. On this machine, {again}"
    if why:
        return (
            f"the stack's media threads wake as often as they like, which costs up to a third more "
            f"of the processor with many calls: {why}"
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
