"""Build a bundle's TensorRT plans for one target: what is stale, one process per plan, on disk.

    plans/<target>/plans.json   rewritten after every plan, so a killed build continues
    plans/<target>/<stage>.plan
    plans/<target>/timing.cache  what `tensorrt` measured, so that the next build is quicker

Every plan is built in a process of its own: TensorRT does not give back its memory, a crash in it
must not take the finished plans along, and peak memory is a figure per plan only then. The parent
decides, prints and writes the manifest; the child builds, writes its plan under a name that does
not count yet, and reports.

Not here: what is stale (`plans`), the network (`tensorrt_network`), GPUs (`targets`).
"""

import importlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import plans as recorded
from engines.bundle import Bundle, StageSpec, describe_file
from engines.machine import look
from engines.plans import Flavour, Machine, Plan, Plans, WeightsForm
from export import plans, targets
from export.plans import Order
from export.targets import CannotBuild, Target
from export.tensorrt_graph import prepare
from export.tensorrt_network import Built, NetworkDiffers, NotBuilt, NotParsed, Wanted
from export.tensorrt_network import build as build_network

UNFINISHED, TIMINGS = ".unfinished", "timing.cache"
CONSTANT_MEMORY = 4.7
"""Peak resident bytes per byte of weights inside a plan: 7.3 GB for 1.64 GB, measured on
tensorrt_rtx 1.7.1 with MatMul weights, the worst case."""

Say = Callable[[str], None]
Progress = Callable[[str, str, int, int], None]
"""(stage, phase, step, steps)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a child process is given."""

    flavour: Flavour
    wanted: Wanted
    out: Path
    """The plan; what was timed goes to `TIMINGS` beside it."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a child process reports."""

    attention: str
    seconds: float
    peak_rss_bytes: int


def build(
    bundle: Bundle,
    target: Target,
    *,
    largest_batch: int = 0,
    weights: WeightsForm = "inputs",
    machine: Machine | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda stage, phase, step, steps: None,
) -> Plans:
    """Build every stale plan of ``bundle`` for ``target`` and return what is then on disk.

    largest_batch: exact profiles 1..that; 0 takes the bundle's. machine: this one, unless given.
    Raises `CannotBuild`, `NotParsed`, `NotBuilt`; plans built before that stay.
    """
    here = look() if machine is None else machine
    for reason in (
        targets.reason_not_to_build(target, here),
        targets.reason_not_to_fit(target, bundle.manifest),
    ):
        if reason:
            raise CannotBuild(reason)
    order = Order(
        largest_batch=largest_batch or bundle.manifest.largest_batch,
        weights=weights,
        version=here.version_of(target.flavour),
    )
    folder = bundle.path / recorded.FOLDER / target.folder
    known = known_plans(folder, target, here, say)
    say(
        f"{folder}: {target.gpu}, {target.flavour} {order.version}, batches exactly "
        f"1..{order.largest_batch}, large weights as {order.weights}"
    )
    in_tick = {stage.name for stage in bundle.manifest.stages}
    kept: dict[str, Plan] = {}
    jobs: list[tuple[StageSpec, Job, recorded.MadeFrom, str]] = []
    rings = {region.name for region in bundle.manifest.regions if region.in_place}
    for stage in recorded.graph_stages(bundle.manifest):
        prepared = prepare(bundle.path, stage.graph, weights)
        profiles = plans.profiles_of(stage, stage.name not in in_tick, order.largest_batch)
        made = plans.made_from(bundle.manifest, stage, prepared, profiles, order)
        plan = known.get(stage.name)
        fault = recorded.file_fault(folder, plan) if plan else ""
        if reason := plans.reason_to_build(plan, made, fault):
            _check_memory(stage, prepared.constant_bytes)
            wanted = Wanted(
                bundle.path,
                stage,
                frozenset(rings & {spec.name for spec in stage.inputs}),
                prepared,
                profiles,
                target.compute_capability,
            )
            job = Job(target.flavour, wanted, folder / f"{stage.name}.plan{UNFINISHED}")
            jobs.append((stage, job, made, reason))
        else:
            assert plan is not None, stage.name
            kept[stage.name] = plan
            say(f"  {stage.name:<16} current: {plan.file}, {plan.bytes / 1e6:.1f} MB")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_strangers(folder, {*kept, *(job.wanted.stage.name for _, job, _, _ in jobs)}, say)
    for stage, job, made, reason in jobs:
        say(f"  {stage.name:<16} building: {reason}")
        done = build_in_child(job, progress)
        kept[stage.name] = _take(folder, job, made, done)
        _record(bundle, target, here, folder, kept)
        say(f"  {stage.name:<16} {summary(kept[stage.name])}")
    return _record(bundle, target, here, folder, kept)


def summary(plan: Plan) -> str:
    """One plan in a line: size, time, memory, and what was found on its network."""
    inputs = sum(weight.bytes for weight in plan.weights)
    parts = [
        f"built: {plan.bytes / 1e6:.1f} MB in {plan.seconds:.1f} s",
        f"peak memory {plan.peak_rss_bytes / 1e6:.0f} MB",
        recorded.described(plan.profiles),
    ]
    if plan.weights:
        parts.append(f"{len(plan.weights)} weights of {inputs / 1e6:.0f} MB stay outside")
    if plan.in_place:
        parts.append(f"{len(plan.in_place)} rings in place")
    if plan.attention != "none":
        parts.append(f"attention {plan.attention}")
    return ", ".join(parts)


def known_plans(folder: Path, target: Target, here: Machine, say: Say) -> dict[str, Plan]:
    """Plans that may be current; none when what is there was made for something else."""
    if not (folder / recorded.FILE).exists():
        return {}
    try:
        found = recorded.read(folder)
    except recorded.PlansError as err:
        say(f"{err}")
        return {}
    if (found.flavour, found.platform) != (target.flavour, here.platform):
        say(f"{folder} was built by {found.flavour} for {found.platform}: building all again")
        return {}
    return {plan.stage: plan for plan in found.plans}


def _record(
    bundle: Bundle, target: Target, here: Machine, folder: Path, kept: dict[str, Plan]
) -> Plans:
    order = [stage.name for stage in recorded.graph_stages(bundle.manifest)]
    found = Plans(
        format=recorded.FORMAT,
        target=target.folder,
        compute_capability=target.compute_capability,
        gpu=target.gpu,
        platform=here.platform,
        flavour=target.flavour,
        version=here.version_of(target.flavour),
        checkpoint_sha256=bundle.manifest.model.checkpoint_sha256,
        plans=tuple(kept[name] for name in order if name in kept),
    )
    recorded.write(folder, found)
    return found


def _take(folder: Path, job: Job, made: recorded.MadeFrom, done: Done) -> Plan:
    """Let the child's file count."""
    wanted, name = job.wanted, job.out.name.removesuffix(UNFINISHED)
    os.replace(job.out, folder / name)
    described = describe_file(folder / name)
    return Plan(
        stage=wanted.stage.name,
        file=name,
        sha256=described.sha256,
        bytes=described.bytes,
        inputs=wanted.stage.inputs,
        outputs=wanted.stage.outputs,
        weights=wanted.prepared.weights,
        in_place=tuple(sorted(wanted.rings)),
        profiles=wanted.profiles,
        attention=done.attention,  # type: ignore[arg-type]
        made_from=made,
        seconds=round(done.seconds, 3),
        peak_rss_bytes=done.peak_rss_bytes,
    )


def _remove_strangers(folder: Path, stages: set[str], say: Say) -> None:
    """Plans of stages the bundle no longer has, and what a killed build left behind."""
    for path in sorted(folder.glob("*.plan*")):
        if path.name.partition(".")[0] not in stages or path.name.endswith(UNFINISHED):
            say(f"  removing {path.name}: no plan of this bundle")
            path.unlink()


def _check_memory(stage: StageSpec, constant_bytes: int) -> None:
    """Refuse weights inside a plan that this machine cannot build, before an hour is lost."""
    needed = int(constant_bytes * CONSTANT_MEMORY)
    if needed > (free := available_bytes()):
        raise CannotBuild(
            f"stage {stage.name} has {constant_bytes / 1e9:.1f} GB of weights to put into its "
            f"plan, which takes about {needed / 1e9:.0f} GB of memory; {free / 1e9:.1f} GB are "
            f"free. Leave large weights outside: --weights inputs"
        )


def available_bytes() -> int:
    """Memory a new process may take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def build_in_child(job: Job, progress: Progress) -> Done:
    """Build in a fresh process. Raises what the child raised, or `NotBuilt` if it crashed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_build_one, args=(job, theirs), name=job.wanted.stage.name)
    child.start()
    theirs.close()
    try:
        while True:
            kind, *rest = ours.recv()
            if kind == "progress":
                progress(job.wanted.stage.name, *rest)
            elif kind == "failed":
                error, message = rest
                raise error(message)
            else:
                done = rest[0]
                assert isinstance(done, Done), done
                return done
    except EOFError:
        child.join()
        code = child.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise NotBuilt(
            f"stage {job.wanted.stage.name}: the process that builds it ended with {died}"
            + (" (SIGKILL is what the kernel sends when memory runs out)" if code == -9 else "")
            + ". The plans built so far are kept; run the command again"
        ) from None
    finally:
        if child.is_alive():
            child.terminate()
        child.join()


def _build_one(job: Job, pipe: Connection) -> None:
    """Body of the child process."""
    began = time.monotonic()
    try:
        trt: Any = importlib.import_module(job.flavour)
        timings = job.out.parent / TIMINGS
        wanted = replace(job.wanted, timings=timings.read_bytes() if timings.exists() else b"")
        built: Built = build_network(
            trt, wanted, lambda phase, step, steps: pipe.send(("progress", phase, step, steps))
        )
        _write(job.out, built.plan)
        if built.timings:
            timings.write_bytes(built.timings)
    except (NotParsed, NotBuilt, NetworkDiffers, CannotBuild) as err:
        pipe.send(("failed", type(err), str(err)))
        return
    seconds = time.monotonic() - began
    pipe.send(("done", Done(built.attention, seconds, _peak_rss_bytes())))


def _write(path: Path, plan: memoryview) -> None:
    free = shutil.disk_usage(path.parent).free
    if plan.nbytes > free:
        raise CannotBuild(
            f"{path.parent} has {free / 1e6:.0f} MB left and the plan takes "
            f"{plan.nbytes / 1e6:.0f} MB. Make room, and run the command again"
        )
    path.write_bytes(plan)


def _peak_rss_bytes() -> int:
    """Of this process alone: `getrusage` would count what its parent had when it was started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")
