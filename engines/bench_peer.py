"""The published package beside our own figures: run it on this machine, read what it says, divide.

It runs in a process of its own, after ours has given its memory back, because it needs torch,
which nothing here may import. The script is `bench/peer_moshi.py` of this checkout. Not here: what
a tick of the package is (that script says).
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engines.bench import Timing

ROOT = Path(__file__).parents[1]
INSTALL = "pip install --no-deps moshi==0.2.13 && pip install 'duplexbox[peer]' torch"


class PeerRow(msgspec.Struct, frozen=True):
    """One batch of the peer. Microseconds; bytes on the device at the most."""

    batch: int
    encode_us: float
    lm_us: float
    decode_us: float
    p50_us: float
    max_us: float
    device_bytes: int


class _Said(msgspec.Struct):
    rows: tuple[PeerRow, ...]


def run(batches: Sequence[int], ticks: int, executor: str) -> tuple[PeerRow, ...]:
    """Time the peer at ``batches``. Raises ValueError with its last words and the remedy."""
    if not (ROOT / "bench" / "peer_moshi.py").is_file():
        raise ValueError(f"--peer: {ROOT} is no checkout of duplexbox, and the script lies in one")
    command = [sys.executable, "-m", "bench.peer_moshi", "--ticks", str(ticks)]
    command += ["--batches", ",".join(map(str, batches))]
    command += ["--device", "cuda" if executor == "cuda" else "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ValueError(
            f"--peer moshi ended with code {done.returncode}: {last}. It needs {INSTALL}"
        )
    return read(done.stdout)


def read(text: str) -> tuple[PeerRow, ...]:
    """The rows of what the script printed; its libraries may have printed before it."""
    try:
        return msgspec.json.decode(text[max(text.find("{"), 0) :], type=_Said).rows
    except msgspec.DecodeError as err:
        raise ValueError(f"--peer moshi said something else: {err}: {text[:200]!r}") from None


def compared(timings: Sequence[Timing], peer: Sequence[PeerRow]) -> list[str]:
    """Lines of text: for every tick of ours with a peer of the same batch, both and the ratio."""
    rows = {row.batch: row for row in peer}
    lines = [
        f"{t.batch:>6}{t.fill:>6}{t.p50_us / 1e3:>9.2f}{rows[t.batch].p50_us / 1e3:>9.2f}"
        f"{rows[t.batch].p50_us / t.p50_us:>8.2f}"
        for t in timings
        if t.name == "tick" and t.batch in rows
    ]
    return (
        [f"{'batch':>6}{'fill':>6}{'ours':>9}{'peer':>9}{'ratio':>8}  ms", *lines] if lines else []
    )
