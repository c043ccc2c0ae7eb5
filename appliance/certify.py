"""`duplexbox appliance certify`: find how many sessions hold on this machine, and prove it.

A shell: it runs a whole box in this process and synthetic callers in another, and reads what
happened back from the ledger's files. What counts as holding is decided in `certificate`. A search
has somewhat more callers come than the first forecast allows and sees whom the box lets in; the
measurement is made with as many, one caller more asks to come in, and should be refused.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from appliance import ledger, report
from appliance.admission import session_bytes
from appliance.box import Box
from appliance.calibration import calibrate, warm_up
from appliance.certificate import (
    FORMAT,
    Certificate,
    Machine,
    Model,
    Newcomer,
    Trial,
    fewer,
    problems,
    text,
    trial,
)
from appliance.certificate_page import page
from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock, wall_stamp
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
from appliance.lines.callers import Conditions
from appliance.lines.synthetic import SyntheticReport
from appliance.report import Summary
from appliance.seat import TickCounts
from appliance.step_model import BESIDE_SESSION_NS, StepSamples
from engines import bundle as bundles
from engines.bundle import Bundle
from engines.executor import Executor

PROBE_S = 20.0
"""How long all sessions are live in a trial of the search; the measurement itself is longer."""

RAMP_S = 60.0
"""How long all callers together take to come at the most. Faster, and a box lets in somebody before
its ticks have told it what the ones before him cost."""

RAISES = 3
"""How often it is measured again because one more was admitted, before slots are what refuses."""

STAGGER_S = 1.0
QUICK_S, QUICK_STAGGER_S, QUICK_SESSIONS = 6.0, 0.5, 2

KERNELS = Path.home() / ".cache" / "duplexbox" / "kernels"
"""Whoever certifies need not be who serves."""

Say = Callable[[str], None]


class UsageError(ValueError):
    """The command line asks for something that cannot be; the operator's to fix."""


class CertifyFailed(RuntimeError):
    """Nothing could be measured at all; the text names the log that says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for."""

    sessions: int | None
    """None: search."""
    seconds: float
    quick: bool
    speech: tuple[Path, ...]
    conditions: Conditions
    """callers, talk_s and extra are set trial by trial."""
    command: str
    executor: Literal["auto", "cpu", "cuda"] = "auto"
    gpu: int = 0


def plan(args: argparse.Namespace) -> Asked:
    """The command line, checked. Raises `UsageError`."""
    if args.sessions is not None and args.sessions < 1:
        raise UsageError(f"--sessions {args.sessions}: expected 1 or more")
    if not math.isfinite(args.minutes) or not 0 < args.minutes <= 24 * 60:
        raise UsageError(f"--minutes {args.minutes}: expected up to 1440")
    speech = tuple(args.speech or sorted(DATA.glob("caller_*.wav")))
    if not speech:
        raise UsageError(f"{DATA} holds no recordings; name some: --speech WAV ...")
    given = {
        name: value
        for name in ("jitter_ms", "loss", "skew_ppm")
        if (value := getattr(args, name)) is not None
    }
    return Asked(
        sessions=args.sessions or (QUICK_SESSIONS if args.quick and not args.find else None),
        seconds=QUICK_S if args.quick else args.minutes * 60,
        quick=args.quick,
        speech=speech,
        conditions=Conditions(1, 1, QUICK_STAGGER_S if args.quick else STAGGER_S, **given),
        command=" ".join(("duplexbox", *sys.argv[1:])),
        executor=args.executor,
        gpu=args.gpu,
    )


def run(bundle_path: Path, asked: Asked, out: Path, say: Say, progress: Say) -> int:
    """Measure, and leave certificate.json, certificate.html and all ledgers in ``out``.

    Returns 0 when the sessions hold, 1 when they do not. Raises `CertifyFailed` or `BundleError`.
    """
    bundle = bundles.read(bundle_path)
    slots = bundle.manifest.largest_batch
    if asked.sessions is not None and asked.sessions > slots:
        raise UsageError(
            f"--sessions {asked.sessions}: the largest batch of {bundle.path} is {slots}. "
            f"Build a larger one: duplexbox export build --help"
        )
    wanted = EngineConfig(bundle_path, executor=asked.executor, gpu=asked.gpu, kernels=KERNELS)
    engine = open_engine(bundle, wanted)
    found = measure(engine, asked, out, say, progress)
    write(found, out)
    for line in text(found):
        say(line)
    say(f"  {out / 'certificate.json'}  {out / 'certificate.html'}")
    return 0 if found.holds else 1


def measure(engine: Engine, asked: Asked, out: Path, say: Say, progress: Say) -> Certificate:
    """Search, if asked to, then measure; see the module's text."""
    executor = engine.executor
    out.mkdir(parents=True, exist_ok=True)
    started, load = wall_stamp(), _load()
    for line in _announcement(executor.bundle, asked):
        say(line)
    trials: list[Trial] = []
    guess, slots = asked.sessions, asked.sessions or executor.slots
    if guess is None:
        guess = _search(engine, asked, out, say, progress, trials)
    raised, too_many = 0, executor.slots + 1
    while True:
        seen = _hold(engine, asked, guess, asked.seconds, out, progress, slots, extra=1)
        trials.append(trial(seen.summary, seen.callers, guess, asked.seconds, seen.unreadable))
        say(_verdict(trials[-1]))
        if asked.sessions is not None or (guess == 1 and not trials[-1].held):
            break
        if not trials[-1].held:
            # Admission lets in fewer than at first, or the long run showed what the short did not.
            too_many = guess
            guess = fewer(guess, sum(not caller.refused for caller in seen.callers))
            slots = executor.slots if slots == executor.slots else guess
            continue
        if slots == guess or seen.extra is None or seen.extra.refused:
            break
        # It may hold, or not, with one more; what is promised is what refuses the next one.
        raised += 1
        guess, slots = (
            (guess + 1, slots) if raised <= RAISES and guess + 1 < too_many else (guess, guess)
        )
        how = f"with {guess}" if slots > guess else f"with [engine] slots = {slots}"
        say(f"one more was admitted: measured again {how}")
    return _certificate(engine, asked, trials, seen, guess, slots, started, load)


def _search(
    engine: Engine, asked: Asked, out: Path, say: Say, progress: Say, trials: list[Trial]
) -> int:
    """How many the box lets in and holds for a short while, beginning near its first forecast."""
    executor, seconds = engine.executor, min(asked.seconds, PROBE_S)
    guess = _guess(executor)
    callers = min(executor.slots, guess + guess // 8 + 2)
    while True:
        say(f"{callers} callers come; as a rule steps of {guess} fit into a tick")
        seen = _hold(engine, asked, callers, seconds, out, progress, executor.slots, extra=0)
        inside = [caller for caller in seen.callers if not caller.refused]
        count = max(1, len(inside))
        trials.append(trial(seen.summary, inside, count, seconds, seen.unreadable))
        say(_verdict(trials[-1]))
        if not trials[-1].held:
            return fewer(count, count)
        if len(inside) < callers or callers == executor.slots:
            return count
        callers = min(executor.slots, 2 * callers)


def _guess(executor: Executor) -> int:
    """How many the engine's own steps have room for, as a rule; the box will let in no more."""
    clock, samples, policy = MonotonicClock(), StepSamples(BESIDE_SESSION_NS), AdmissionConfig()
    warm_up(executor, lambda: False)
    calibrate(executor, clock, policy.calibrate_s * NS_PER_S, samples, lambda: False)
    model = samples.fit(clock.now_ns())
    room_ns = executor.bundle.manifest.timing.period_ns - policy.min_margin_ms * NS_PER_MS
    fit = 1
    while fit < executor.slots and (model is None or model.median_ns(fit + 1, fit + 1) <= room_ns):
        fit += 1
    return fit


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one trial left behind."""

    calls: list[ledger.Call]
    unreadable: list[str]
    """What is wrong with each call file that could not be read."""
    summary: Summary
    callers: list[SyntheticReport]
    """Without the extra one."""
    extra: SyntheticReport | None
    forecast_sessions: int
    forecast_ns: int
    conditions: Conditions


def _hold(
    engine: Engine,
    asked: Asked,
    count: int,
    seconds: float,
    out: Path,
    progress: Say,
    slots: int,
    extra: int,
) -> _Seen:
    """Run a box with ``count`` callers, all live for ``seconds``, and read back what happened.

    slots: of the box. extra: callers more who ask to come in when all the others talk.
    """
    executor = engine.executor
    conditions = msgspec.structs.replace(
        asked.conditions,
        callers=count,
        talk_s=seconds,
        stagger_s=min(asked.conditions.stagger_s, RAMP_S / count),
        extra=extra,
    )
    stamp = wall_stamp()
    folder = out / f"{stamp}-{count}"
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="dbx-") as socket_folder:
        config = Config(
            engine=EngineConfig(executor.bundle.path, slots),
            clock=ClockConfig(drain_s=5),
            control=ControlConfig(Path(socket_folder) / "control.sock"),
            ledger=LedgerConfig(folder),
            admission=AdmissionConfig(calibrate_s=0) if asked.quick else AdmissionConfig(),
        )
        box = Box(config, executor, MonotonicClock(), engine.memory_bytes)
        left, log = folder / "callers.json", folder / "callers.log"
        callers = LineProcess(
            box,
            _command(config.control.socket, conditions, asked.speech, left),
            log,
            lambda seconds, counts: progress(_progress_line(seconds, counts, conditions.callers)),
            config.clock.realtime_priority // 2,
        )
        callers.start()
        try:
            box.run()
        finally:
            callers.stop()
    progress("")
    reports = _reports(left, log)
    calls, unreadable = _read(folder)
    own = {caller.session for caller in reports[:count] if caller.session}
    kept = [call for call in calls if call.header.session in own]
    forecast = box.switchboard.foresight.forecast()
    return _Seen(
        calls=kept,
        unreadable=unreadable,
        summary=report.summarise(kept),
        callers=reports[:count],
        extra=reports[count] if len(reports) > count else None,
        forecast_sessions=forecast.most(executor.slots) if forecast else 0,
        forecast_ns=forecast.tick_ns(count) if forecast else 0,
        conditions=conditions,
    )


def _command(socket: Path, made: Conditions, speech: tuple[Path, ...], reports: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "duplexbox", "appliance", "callers", *map(str, speech)),
        *("--socket", str(socket), "--out", str(reports)),
        *("--count", str(made.callers), "--talk", str(made.talk_s)),
        *("--stagger", str(made.stagger_s), "--extra", str(made.extra)),
        *("--jitter-ms", str(made.jitter_ms), "--loss", str(made.loss)),
        *("--skew-ppm", str(made.skew_ppm), "--seed", str(made.seed)),
    ]


def _reports(path: Path, log: Path) -> list[SyntheticReport]:
    """What the callers saw. Raises `CertifyFailed` when they left nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[SyntheticReport])
    except (OSError, msgspec.DecodeError):
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
        last = said[-1] if said else "they said nothing"
        raise CertifyFailed(f"the callers' process failed ({log}): {last}") from None


def _progress_line(seconds: float, counts: TickCounts, callers: int) -> str:
    return (
        f"  {seconds:6.1f} s   sessions {counts.live} of {callers}   "
        f"margin {counts.margin_ns / 1e6:5.1f} ms, worst "
        f"{counts.worst_margin_ns / 1e6:5.1f} ms   late {counts.late}   "
        f"missed {counts.missed}"
    )


def write(found: Certificate, out: Path) -> None:
    """certificate.json and certificate.html; the page shows the last trial's ledger."""
    encoded = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    (out / "certificate.json").write_bytes(encoded)
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    shown = {session.session for session in found.calls}
    calls = [call for call in _read(folders[-1])[0] if call.header.session in shown]
    (out / "certificate.html").write_text(page(found, calls), encoding="utf-8")


def _read(folder: Path) -> tuple[list[ledger.Call], list[str]]:
    """The calls a trial left, and what is wrong with each file that cannot be read."""
    unreadable: list[ledger.LedgerError] = []
    try:
        calls = ledger.read_folder(folder, unreadable)
    except ledger.LedgerError as err:
        # There is none, or the only one is damaged; that there is none is found by counting.
        return [], [str(err)] if any(folder.glob(f"*{ledger.SUFFIX}")) else []
    return calls, [str(err) for err in unreadable]


def _certificate(
    engine: Engine,
    asked: Asked,
    trials: list[Trial],
    seen: _Seen,
    sessions: int,
    slots: int,
    started: str,
    load: float,
) -> Certificate:
    manifest = engine.executor.bundle.manifest
    found = problems(seen.summary, seen.callers, sessions, seen.unreadable)
    newcomer = None
    if seen.extra is not None:
        newcomer = Newcomer(not seen.extra.refused, seen.extra.refused, seen.extra.detail)
        if newcomer.admitted:
            found = (*found, f"a caller more than {sessions} was admitted")
    summary = seen.summary
    return Certificate(
        format=FORMAT,
        started=started,
        command=asked.command,
        machine=_machine(engine, load),
        model=Model(
            name=manifest.model.name,
            trained=manifest.model.trained,
            parameters=manifest.model.parameters,
            checkpoint_sha256=manifest.model.checkpoint_sha256,
            bundle=str(engine.executor.bundle.path),
            period_ns=manifest.timing.period_ns,
            full_retention_s=manifest.ticks_until_full() * manifest.timing.period_ns / NS_PER_S,
            session_bytes=session_bytes(manifest),
        ),
        path="synthetic line in a process of its own, shared memory, tick loop, engine, and back",
        quick=asked.quick,
        conditions=seen.conditions,
        sessions=0 if found else sessions,
        slots=slots,
        holds=not found,
        forecast_sessions=seen.forecast_sessions,
        forecast_ns=seen.forecast_ns,
        newcomer=newcomer,
        trials=tuple(trials),
        ticks=summary.ticks,
        calls=summary.sessions,
        failed=summary.failed + len(seen.unreadable),
        mean_on_time_share=summary.mean_on_time_share,
        worst_session=summary.worst_session,
        worst_on_time_share=summary.worst_on_time_share,
        smallest_margin_ns=min((s.worst_margin_ns for s in summary.sessions), default=0),
        smallest_buffer_ns=min((s.worst_buffer_ns for s in summary.sessions), default=0),
        longest_miss_run=max((s.longest_miss_run for s in summary.sessions), default=0),
        problems=found,
    )


def _announcement(bundle: Bundle, asked: Asked) -> list[str]:
    manifest = bundle.manifest
    full_s = manifest.ticks_until_full() * manifest.timing.period_ns / NS_PER_S
    wanted = asked.conditions
    lines = [
        f"{manifest.model.name}, a frame every {manifest.timing.period_ns / 1e6:g} ms; callers "
        f"with jitter up to {wanted.jitter_ms:g} ms, loss {wanted.loss:.2%}, clocks off by up to "
        f"{wanted.skew_ppm:g} ppm; {asked.seconds:g} s with all of them live."
    ]
    if asked.quick:
        lines.append("--quick: this shows that the path works. It is no evidence of capacity.")
    elif asked.seconds < full_s:
        lines.append(
            f"Sessions are at full retention only after {full_s:g} s: measure longer "
            f"(--minutes {math.ceil(full_s / 60)}) for what old calls cost."
        )
    return lines


def _verdict(one: Trial) -> str:
    verdict = "held" if one.held else f"did not hold: {one.why_not}"
    return f"{one.sessions} sessions for {one.seconds:g} s: {verdict}"


def _machine(engine: Engine, load_before: float) -> Machine:
    try:
        version = importlib.metadata.version("duplexbox")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=engine.gpu,
        driver=engine.driver,
        kernel=platform.release(),
        python=platform.python_version(),
        duplexbox=version,
        engine=engine.name,
        load_before=load_before,
        load_after=_load(),
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no procfs: what Python knows must do
    return platform.processor() or platform.machine()


def _load() -> float:
    return os.getloadavg()[0]
