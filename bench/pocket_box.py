"""Trials through the box itself: its real clock, its file line, its ledger.

Callers are WAV files that `duplexbox appliance call` plays into a box, one after the other, so many
at once, each at a place of its own. Nobody is refused for time, as in a search of `certify`: what
was late is told beside what was said. With a telephone's sound the files are 8 kHz mu-law, and the
line brings them to the model's rate as it does any such file. What came of a call is read from what
the line left: the reply, when its caller heard it, and the journal with the model's words.

Not here: what is asked and what an answer is worth (`export.pocket.trials`), the telephone and web
lines, which have protocols and playout buffers of their own.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import soundfile

from appliance import journal, ledger, report
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
from appliance.engine import open_engine
from appliance.line_process import LineProcess
from engines import bundle
from export.pocket.script import FRAME
from export.pocket.trials import Sound

SLOTS = 8
LOG = "calls.log"
DRAINS_S = 0.8
"""A slot is taken for longer than its caller talks: until the model's last words were heard."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's side of one call. sound: (frames * FRAME,), text: (frames,), -1 for none."""

    sound: Sound
    text: list[int]
    delay_s: float
    """From the caller's first sample to the first one of ``sound``, as the caller hears it."""
    concealed: int = 0
    """Frames the model was fed silence in place of; each makes it hear its caller a frame later."""


class Report(msgspec.Struct):
    """What is read of the line's report of a call."""

    ended: str
    round_trip_ms: float | None
    concealed: int


def converse(
    path: Path, callers: list[Path], settings: list[str], folder: Path, at_once: int = SLOTS
) -> tuple[list[Answer | str], dict[str, float]]:
    """Every caller's answer, or why there is none, and how the box kept its clock meanwhile."""
    length_s = max(soundfile.info(caller).duration for caller in callers)
    engine = open_engine(bundle.read(path), EngineConfig(path, SLOTS, "cpu"))
    config = Config(
        engine=EngineConfig(path, SLOTS),
        clock=ClockConfig(drain_s=5),
        control=ControlConfig(folder / "box.sock"),
        ledger=LedgerConfig(folder / "ledger"),
        admission=AdmissionConfig(calibrate_s=1),
    )
    box = Box(config, engine.executor, MonotonicClock(), engine.memory_bytes)
    box.switchboard.foresight.look_at_time = False
    command = [
        *(sys.executable, "-m", "duplexbox", "appliance", "call", *map(str, callers)),
        *("--socket", str(config.control.socket), "--out", str(folder), "--journal"),
        *("--stagger", f"{(length_s + DRAINS_S) / at_once:.3f}"),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    priority = config.clock.realtime_priority // 2
    lines = LineProcess(box, command, folder / LOG, lambda seconds, counts: None, priority)
    lines.start()
    try:
        box.run()
    finally:
        lines.stop()
        engine.executor.close()
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # the judge is in no hurry
    stems = [f"{number:02d}-{caller.stem}" for number, caller in enumerate(callers, 1)]
    return [answer(folder, stem) for stem in stems], kept(folder / "ledger")


def answer(folder: Path, stem: str) -> Answer | str:
    """What the line left of one call."""
    try:
        told = msgspec.json.decode((folder / f"{stem}.json").read_bytes(), type=Report)
        heard = journal.read(folder / f"{stem}{journal.SUFFIX}").heard
        sound, _ = soundfile.read(folder / f"{stem}.reply.wav", dtype="float32")
    except (OSError, journal.JournalError) as err:
        log = (folder / LOG).read_text(errors="replace") if (folder / LOG).is_file() else ""
        why = [line for line in log.splitlines() if line.startswith(stem)]
        return why[0] if why else f"{stem}: {err}"
    if told.ended != "finished" or told.round_trip_ms is None:
        return f"{stem}: {told.ended}"
    frames = len(sound) // FRAME
    text = [heard[n].text if n in heard else -1 for n in range(frames)]
    whole = sound[: frames * FRAME].astype(np.float32)
    return Answer(whole, text, told.round_trip_ms / 1e3, told.concealed)


def kept(folder: Path) -> dict[str, float]:
    """What the ledger says of the clock: frames, ticks, the worst session."""
    summary = report.summarise(ledger.read_folder(folder, []))
    ticks = summary.ticks
    return {
        "calls recorded": len(summary.sessions),
        "frames due": sum(s.due for s in summary.sessions),
        "frames on time": sum(s.on_time for s in summary.sessions),
        "frames concealed": sum(s.concealed for s in summary.sessions),
        "worst session on time": round(summary.worst_on_time_share, 4),
        "ticks late": ticks.late,
        "ticks missed": ticks.missed,
        "tick p50 ms": round(ticks.p50_ns / 1e6, 1),
        "tick p99.9 ms": round(ticks.p999_ns / 1e6, 1),
        "tick max ms": round(ticks.max_ns / 1e6, 1),
    }
