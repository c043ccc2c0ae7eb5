"""`duplexbox <folder> <verb>`: the only module that knows all three folders.

It decides which folder's `cli` a command goes to, and what a missing extra, Ctrl-C or a closed
pipe look like to the caller. It does not know the verbs, nor what can go wrong in them: each
`cli.main(argv)` turns its own errors into one line on stderr and returns an exit code (0 done,
1 a check failed, 2 usage or a missing extra, 78 bad config).
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__version__ = "0.1.0"

FOLDERS = {
    "export": "checkpoint -> bundle: build, verify and show bundles",
    "engines": "bundle -> one tick: show and measure what runs",
    "appliance": "the box: serve callers, run the demo, read the ledger",
}
# Which extra brings a module that the base install lacks.
EXTRA_OF = {
    "ml_dtypes": "[export]",
    "onnx": "[export]",
    "onnx_ir": "[export]",
    "onnxscript": "[export]",
    "safetensors": "[export]",
    "torch": "[export]",
    "cuda": "[cuda]",
    "tensorrt_lean": "[tensorrt-lean]",
    "tensorrt_rtx": "[tensorrt]",
    "sounddevice": "[lines]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to one folder; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["-V"]):
        print(f"duplexbox {__version__}")
        return 0
    if not words or words[0] not in FOLDERS:
        return _usage(words)
    folder, rest = words[0], words[1:]
    try:
        # Late, so that `duplexbox appliance` never loads what only export needs.
        code: int = importlib.import_module(f"{folder}.cli").main(rest)
        sys.stdout.flush()
    except ModuleNotFoundError as err:
        missing = (err.name or "").partition(".")[0]
        if missing in FOLDERS or not missing:
            raise  # one of our own modules: a bug or a broken install, wanted with its traceback
        print(
            f"duplexbox {folder} needs {missing}, which is not installed. "
            f"Install it with: pip install '{_source()}{EXTRA_OF.get(missing, '')}'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130  # what a shell reports for SIGINT
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python would complain once more when it
        # flushes stdout at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for SIGPIPE
    return code


def _source() -> str:
    """What pip should install us from: the checkout that this file lies in, if it lies in one."""
    root = Path(__file__).resolve().parent
    return str(root) if (root / "pyproject.toml").exists() else "duplexbox"


def _usage(words: Sequence[str]) -> int:
    """Print how to call us: to stdout when asked for, else to stderr with exit code 2."""
    asked = words[:1] in (["-h"], ["--help"])
    out = sys.stdout if asked else sys.stderr
    if words and not asked:
        print(f"duplexbox has no folder {words[0]!r}; it has {', '.join(FOLDERS)}.", file=out)
    print("usage: duplexbox <folder> <verb> ...", file=out)
    for folder, what in FOLDERS.items():
        print(f"  {folder:<10} {what}", file=out)
    print("More: duplexbox <folder> --help, duplexbox <folder> <verb> --help", file=out)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
