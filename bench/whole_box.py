# ruff: noqa: T201  (a script run by hand)
"""The whole box at its real clock, with many callers: late ticks, the worst session, memory left.

    python -m bench.whole_box BUNDLE --sessions 80 --minutes 9 --json out/whole_box.json
    python -m bench.whole_box out/small --executor cpu --sessions 3 --minutes 0.3

Callers are a process of their own that plays real speech (WAV files, the demo's by default) with
jitter, losses and clocks that are off, through shared memory into a box that is wired as `serve`
wires it; what happened is read back from the ledger's files. Nothing is told to admission but what
it measures itself, except with --by-memory: then time is not looked at, as in a search.

Nobody waits four minutes for a full window: a session's state is made as old as if it had lived
`--ages` windows at its first tick (2 by default: full context from the first tick on), in such a
way that windows wrap all through the run, one session after the other, not all at once. What its
rings then hold is noise, so nothing is to be said about what such a model says; time and memory do
not depend on it. Ends with 1 if a tick was late, a frame was filled or a session failed.
"""

import argparse
import dataclasses
import json
import logging
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from appliance import ledger, report
from appliance.box import Box
from appliance.certificate import problems
from appliance.clock import NS_PER_S, MonotonicClock, wall_stamp
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from appliance.demonstration import DATA
from appliance.engine import Engine, open_engine
from appliance.line_process import LineProcess
from appliance.lines.synthetic import SyntheticReport
from appliance.notify import Notify
from appliance.seat import TickCounts
from engines import bundle as bundles
from engines.bundle import Manifest
from engines.clocks import ClockKind
from engines.executor import Ages, Executor, OnDevice

KERNELS = Path.home() / ".cache" / "duplexbox" / "kernels"
SAY_EVERY = 40
"""Progress lines of the line's process, which come four times a second."""


def make_old(executor: Executor, ages: list[int]) -> None:
    """From now on whoever joins a slot is as old as ``ages`` says.

    On a GPU all rows have their memory before anybody comes: that is what a box that has been
    full for minutes looks like, and a joiner then costs what a joiner costs.
    """
    begin, manifest = executor.join, executor.bundle.manifest
    assert isinstance(executor, Ages)
    park: Callable[[int, int], None] | None = getattr(executor, "park", None)
    if park is not None:
        from engines.cuda_prefill import CudaParking

        parking = CudaParking(executor)  # type: ignore[arg-type]
        for slot, ticks in enumerate(ages):
            executor.age(slot, ticks)
            park(slot, ticks)

    def join(slot: int, settings: Mapping[str, float]) -> None:
        if park is None:
            begin(slot, settings)
            executor.age(slot, ages[slot])
        else:
            parking.settle(slot, slot, settings, positions(manifest, ages[slot]))

    executor.join = join  # type: ignore[method-assign]


def positions(manifest: Manifest, ticks: int) -> dict[str, np.ndarray]:
    """Every counter of a session of that age."""
    return {
        region.name: np.array(region.clock.position(ticks))
        for region in manifest.regions
        if region.clock.kind is ClockKind.COUNTER
    }


def staggered(manifest: Manifest, sessions: int, ticks: int, windows: float) -> list[int]:
    """Ages to begin with, so that windows wrap evenly over a run of ``ticks`` ticks. Pure."""
    full = manifest.ticks_until_full()
    if not full or not windows:
        return [0] * sessions
    last = round(windows * full)
    return [max(0, last - 1 - index * min(ticks, full) // sessions) for index in range(sessions)]


class Armed(Notify):
    """Makes sessions old when the box is ready: after it timed its steps, before anybody talks."""

    def __init__(self, executor: Executor, ages: list[int]) -> None:
        super().__init__({})
        self.box: Box | None = None
        self.forecast_ns = 0
        """What the calibration alone promises for all of them."""
        self._executor, self._ages = executor, ages

    def ready(self, status: str) -> None:
        assert self.box is not None
        sight = self.box.switchboard.foresight
        kept, sight.look_at_time = sight.look_at_time, True
        if found := sight.forecast():
            self.forecast_ns = found.tick_ns(len(self._ages))
        sight.look_at_time = kept
        if all(self._ages):
            self.box.loop.full_frames = 1  # whoever joins is full, and forecasts must know
        make_old(self._executor, self._ages)
        print(f"ready: {status}", flush=True)


def hold(engine: Engine, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the box with its callers; what it came to."""
    manifest = engine.executor.bundle.manifest
    period_ns = manifest.timing.period_ns
    ticks = round(args.minutes * 60 * NS_PER_S / period_ns)
    ages = staggered(manifest, args.sessions, ticks, args.ages)
    executor = engine.executor
    least: list[int] = []
    speech = args.speech or sorted(DATA.glob("caller_*.wav"))
    with tempfile.TemporaryDirectory(prefix="dbx-") as sockets:
        config = Config(
            engine=EngineConfig(executor.bundle.path, args.sessions),
            clock=ClockConfig(drain_s=5),
            control=ControlConfig(Path(sockets) / "control.sock"),
            ledger=LedgerConfig(folder),
            admission=AdmissionConfig(min_margin_ms=args.guard_ms, calibrate_s=args.calibrate),
        )
        armed = Armed(executor, ages)
        armed.box = box = Box(config, executor, MonotonicClock(), engine.memory_bytes, armed)
        box.switchboard.foresight.look_at_time = not args.by_memory
        said = 0

        def progress(seconds: float, counts: TickCounts) -> None:
            nonlocal said
            use = box.switchboard.foresight.memory()
            if use is not None:
                least.append(use.device_total - use.device_used)
            said += 1
            if said % SAY_EVERY == 0:
                print(
                    f"  {seconds:6.1f} s  live {counts.live}  late {counts.late}  missed "
                    f"{counts.missed}  margin {counts.margin_ns / 1e6:.1f}, worst "
                    f"{counts.worst_margin_ns / 1e6:.1f} ms"
                    + (f"  left {least[-1] / 1e9:.1f} GB" if least else ""),
                    flush=True,
                )

        left = folder / "callers.json"
        command = [
            *(("taskset", "-c", args.callers_on) if args.callers_on else ()),
            *(sys.executable, "-m", "duplexbox", "appliance", "callers", *map(str, speech)),
            *("--socket", str(config.control.socket), "--out", str(left)),
            *("--count", str(args.sessions), "--talk", str(args.minutes * 60)),
            *("--stagger", str(args.stagger), "--jitter-ms", str(args.jitter_ms)),
        ]
        priority = config.clock.realtime_priority // 2
        lines = LineProcess(box, command, folder / "callers.log", progress, priority)
        lines.start()
        try:
            box.run()
        finally:
            lines.stop()
        box.switchboard.foresight.look_at_time = True
        forecast = box.switchboard.foresight.forecast()
    unreadable: list[ledger.LedgerError] = []
    calls = ledger.read_folder(folder, unreadable)
    summary = report.summarise(calls)
    callers = msgspec.json.decode(left.read_bytes(), type=list[SyntheticReport])
    damage = [str(err) for err in unreadable]
    found = problems(summary, callers, args.sessions, damage)
    return {
        "problems": found,
        "ticks": dataclasses.asdict(summary.ticks),
        "worst_session": summary.worst_session,
        "worst_on_time_share": summary.worst_on_time_share,
        "mean_on_time_share": summary.mean_on_time_share,
        "smallest_margin_ns": min((s.worst_margin_ns for s in summary.sessions), default=0),
        "due": sum(s.due for s in summary.sessions),
        "on_time": sum(s.on_time for s in summary.sessions),
        "concealed": sum(s.concealed for s in summary.sessions),
        "ages": [min(ages), max(ages)],
        "wrapped": sum(_wraps(manifest, age, ticks) for age in ages),
        "steps": steps(calls, args.sessions),
        "first_forecast_ns": armed.forecast_ns,
        "forecast_ns": forecast.tick_ns(args.sessions) if forecast else 0,
        "least_memory_left_bytes": min(least, default=None),
        "pages": dataclasses.asdict(executor.arena.counts) if hasattr(executor, "arena") else None,
    }


def steps(calls: list[ledger.Call], sessions: int) -> dict[str, float]:
    """What ticks of all ``sessions`` took, and the engine's step in them, ms."""
    ticks = np.concatenate([call.ticks for call in calls]) if calls else np.zeros(0, ledger.TICK)
    ticks = ticks[(ticks["batch"] == sessions) & (ticks["slot"] == sessions - 1)]
    ticks = ticks[(ticks["flags"] & (ledger.Flag.MISSED | ledger.Flag.PRIMING).value) == 0]
    if not len(ticks):
        return {}
    period_ns = calls[0].header.period_ns
    found = {"ticks": float(len(ticks))}
    for name, took_ns in (("step", ticks["step_ns"]), ("tick", period_ns - ticks["margin_ns"])):
        for word, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
            found[f"{name}_{word}_ms"] = round(float(np.quantile(took_ns, share)) / 1e6, 2)
    return found


def _wraps(manifest: Manifest, age: int, ticks: int) -> bool:
    """Whether a session of that age writes its first row again within ``ticks`` ticks."""
    full = manifest.ticks_until_full()
    return bool(full) and (age + ticks) // full > age // full


def text(found: dict[str, Any], sessions: int) -> list[str]:
    ticks = found["ticks"]
    left = found["least_memory_left_bytes"]
    first, last = found["first_forecast_ns"] / 1e6, found["forecast_ns"] / 1e6
    milliseconds = [ticks[name] / 1e6 for name in ("p50_ns", "p99_ns", "p999_ns", "max_ns")]
    return [
        f"{sessions} sessions, {ticks['ticks']} ticks: {ticks['late']} late, {ticks['missed']} "
        f"missed; p50 {milliseconds[0]:.1f}, p99 {milliseconds[1]:.1f}, p99.9 "
        f"{milliseconds[2]:.1f}, max {milliseconds[3]:.1f} of {ticks['period_ns'] / 1e6:g} ms",
        f"{found['on_time']} of {found['due']} frames on time; worst session "
        f"{found['worst_session']}: {found['worst_on_time_share']:.2%}; concealed "
        f"{found['concealed']}; ages {found['ages'][0]} to {found['ages'][1]} ticks at the start, "
        f"{found['wrapped']} windows wrapped; the forecast of the p99.9 was "
        f"{first:.1f} ms from calibration, {last:.1f} at the end"
        + (f"; at least {left / 1e9:.1f} GB left" if left is not None else ""),
        f"ticks of all of them: {found['steps']}",
        *(f"DOES NOT HOLD: {problem}" for problem in found["problems"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="all sessions at once (9)")
    parser.add_argument("--executor", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--ages", type=float, default=2.0, help="windows lived before (2)")
    parser.add_argument("--stagger", type=float, default=0.1, help="seconds between callers (0.1)")
    parser.add_argument("--jitter-ms", type=float, default=15.0)
    parser.add_argument("--guard-ms", type=int, default=8, help="as [admission] min_margin_ms")
    parser.add_argument("--calibrate", type=int, default=3, help="as [admission] calibrate_s")
    parser.add_argument("--by-memory", action="store_true", help="admit whatever the time")
    parser.add_argument("--callers-on", metavar="CORES", help="as taskset has them; all of them")
    parser.add_argument("--speech", type=Path, nargs="+", metavar="WAV")
    parser.add_argument("--no-hashes", action="store_true", help="trust the bundle's files")
    parser.add_argument("--out", type=Path, help="default: out/whole-box-<time>")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    folder: Path = args.out or Path("out") / f"whole-box-{wall_stamp()}"
    folder.mkdir(parents=True)
    opened = bundles.read(args.bundle, hashes=not args.no_hashes)
    wanted = EngineConfig(args.bundle, args.sessions, args.executor, args.gpu, kernels=KERNELS)
    engine = open_engine(opened, wanted)
    found = hold(engine, args, folder)
    found |= {
        "sessions": args.sessions,
        "minutes": args.minutes,
        "command": " ".join(("python -m bench.whole_box", *sys.argv[1:])),
        "engine": engine.name,
        "gpu": engine.gpu,
        "driver": engine.driver,
        "machine": platform.processor() or platform.machine(),
        "memory": dataclasses.asdict(engine.executor.memory())
        if isinstance(engine.executor, OnDevice)
        else None,
    }
    engine.executor.close()
    for line in text(found, args.sessions):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
