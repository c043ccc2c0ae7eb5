"""The demo: a box in this process, three callers in another, on the real 80 ms clock of this CPU.

It decides who calls, when, and who hangs up early, and whether what came of it may be called a
success. Nothing in it is staged: the callers are `duplexbox appliance call` over a control socket,
and the summary is read back from the ledger's files like any other. It prints through `say` and
`progress`, which the command line hands in.

(The folder `demo/` beside this file holds the audio and the bundle.)
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance import ledger, report
from appliance.box import Box
from appliance.clock import MonotonicClock
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from appliance.engine import available_memory_bytes
from appliance.line_process import LineProcess
from appliance.plot import margin_plot
from appliance.seat import TickCounts
from engines.bundle import Bundle
from engines.executor import Executor

DATA = Path(__file__).parent / "demo"
POCKET = DATA / "pocket"
"""The trained model of a front desk (`docs/pocket.md`): what a newcomer talks to."""
SAID = ".said.txt"
"""Behind a recording's name: what its caller says, and when."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Script:
    """Who calls, and when."""

    callers: tuple[Path, ...]
    """WAV files of any format."""
    stagger_s: float = 2
    hangs_up: tuple[int, float] = (3, 10.4)
    """A caller, from 1, and when it hangs up: its audio is longer."""


class DemoFailed(RuntimeError):
    """The demo could not be held at all; its text names the log that says why."""


def script(bundle: Path) -> Script:
    """The three callers of `make demo`: of the front desk, or for any other model.

    Raises `DemoFailed` when the installation lacks them.
    """
    is_desk = bundle == POCKET
    folder = DATA / "desk" if is_desk else DATA
    found = sorted(folder.glob("caller_*.wav"))
    if len(found) < 3:
        raise DemoFailed(f"{folder} holds {len(found)} of 3 recordings; reinstall duplexbox")
    return Script(tuple(found[:3]), hangs_up=(3, 15.4) if is_desk else (3, 10.4))


def run_demo(executor: Executor, script: Script, out: Path, say: Say, progress: Say) -> int:
    """Hold the demo; everything lands in ``out``. Returns 0, or 1 when a check failed.

    say: a line for the user. progress: a line that replaces the one before it.
    Raises `DemoFailed`, and whatever breaks the box.
    """
    bundle = executor.bundle
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise DemoFailed(
            f"{out} cannot be made a folder: {err.strerror}. Name one: --out DIR"
        ) from None
    calls_folder = out / "ledger"
    for line in announcement(bundle, script):
        say(line)
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        config = Config(
            engine=EngineConfig(bundle.path, executor.slots),
            clock=ClockConfig(drain_s=5, realtime_priority=0),
            control=ControlConfig(Path(folder) / "control.sock"),
            ledger=LedgerConfig(calls_folder),
            admission=AdmissionConfig(calibrate_s=1),
        )
        box = Box(config, executor, MonotonicClock(), available_memory_bytes())
        lines = LineProcess(
            box,
            _command(config.control.socket, out, script),
            out / "calls.log",
            lambda seconds, counts: progress(_progress_line(seconds, counts)),
        )
        lines.start()
        try:
            box.run()
        finally:
            lines.stop()
    progress("")
    t0_ns = box.loop.grid.t0_ns
    try:
        # The folder may hold the calls of an earlier demo, which had another grid.
        calls = [c for c in ledger.read_folder(calls_folder, []) if c.header.t0_ns == t0_ns]
    except ledger.LedgerError:
        calls = []
    if not calls:
        raise DemoFailed(f"nobody called: {_last_line(out / 'calls.log')}")
    for line in conversations(script.callers, out):
        say(line)
    return _conclude(bundle, calls, len(script.callers), lines.exit_code, out, say)


def announcement(bundle: Bundle, script: Script) -> list[str]:
    """What the user must know before hearing anything."""
    model, timing = bundle.manifest.model, bundle.manifest.timing
    lines = [
        f"{model.name}, {model.parameters:,} parameters, one frame every "
        f"{timing.period_ns / 1e6:g} ms, on this CPU; {len(script.callers)} callers join "
        f"{script.stagger_s:g} s apart; one hangs up early.",
    ]
    if not model.trained:
        lines.append(
            "This model is UNTRAINED: its weights come from a seed. What it says is an untrained "
            "network's noise, not speech; the demo shows the path and the clock."
        )
    if model.notice:
        lines.append(model.notice)
    return lines


def _command(socket: Path, out: Path, script: Script) -> list[str]:
    who, seconds = script.hangs_up
    return [
        *(sys.executable, "-m", "duplexbox", "appliance", "call"),
        *map(str, script.callers),
        *("--socket", str(socket), "--out", str(out), "--stagger", str(script.stagger_s)),
        *("--hang-up-after", f"{who}={seconds}"),
    ]


def _progress_line(seconds: float, counts: TickCounts) -> str:
    return (
        f"  {seconds:5.1f} s   sessions {counts.live}   margin "
        f"{counts.margin_ns / 1e6:5.1f} ms, worst {counts.worst_margin_ns / 1e6:5.1f} ms   "
        f"late {counts.late}   missed {counts.missed}"
    )


def conversations(callers: tuple[Path, ...], out: Path) -> list[str]:
    """What both sides of every call said, as far as it is written down."""
    lines = []
    for number, wav in enumerate(callers, 1):
        known = wav.parent / f"{wav.stem}{SAID}"
        heard = out / f"{number:02}-{wav.stem}.txt"
        if known.is_file() and heard.is_file():
            lines += ["", f"{wav.stem}:", *conversation(known.read_text(), heard.read_text())]
    return lines


def conversation(caller: str, model: str) -> list[str]:
    """Two transcripts of lines such as ``  1.2 s  hello`` as one, by time. Pure."""
    sides = (("caller", caller), ("model", model))
    lines = [
        (float(line.split()[0]), f"  {line.partition(' s  ')[0]} s  {who:>6}  {words}")
        for who, text in sides
        for line in text.splitlines()
        if (words := line.partition(" s  ")[2])
    ]
    return [line for _, line in sorted(lines)]


def _conclude(
    bundle: Bundle,
    calls: list[ledger.Call],
    expected: int,
    exit_code: int | None,
    out: Path,
    say: Say,
) -> int:
    """Print and write the summary; decide whether it counts as a success."""
    summary = report.summarise(calls)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    title = f"{bundle.manifest.model.name}: margin of {len(calls)} calls"
    (out / "margin.svg").write_text(margin_plot(calls, title), encoding="utf-8")
    say(report.text(summary))
    say("")
    for path in sorted([*out.glob("*.wav"), *out.glob("*.txt"), *out.glob("*/*.wav")]):
        say(f"  {path}")
    say(f"  {out / 'summary.json'}  {out / 'margin.svg'}")
    problems = shortcomings(summary, expected, exit_code, out / "calls.log")
    for problem in problems:
        say(f"FAILED: {problem}")
    return 1 if problems else 0


def shortcomings(
    summary: report.Summary, expected: int, exit_code: int | None, log: Path
) -> list[str]:
    """Why the demo was no success; empty if it was. Pure.

    Late and filled frames are none: they are recorded, and tell of the machine.
    """
    problems = []
    if exit_code != 0:
        problems.append(f"the callers' process ended with {exit_code}: see {log}")
    if len(summary.sessions) != expected:
        problems.append(f"{len(summary.sessions)} of {expected} calls have a ledger file")
    if summary.failed:
        problems.append(f"{summary.failed} calls failed")
    if summary.unexplained:
        problems.append(f"{summary.unexplained} frames were lost without a record")
    return problems


def _last_line(log: Path) -> str:
    """What the callers' process said last, which is why it gave up."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return lines[-1] if lines else "its process said nothing"
