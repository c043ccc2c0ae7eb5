"""`duplexbox engines show`: the plans of a bundle, and what this machine can run and why not.

Pure: what was read and looked at goes in, lines of text or a JSON-ready dict come out. Reasons are
those the executors refuse with (`plans.refusals`), so the page and the box cannot disagree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines import caches, plans
from engines.bundle import Bundle
from engines.plans import Machine, Plan, Plans

MB = 1e6


@dataclass(frozen=True, slots=True)
class Found:
    """One folder of plans, as it was read."""

    target: str
    plans: Plans | None
    """None: plans.json cannot be read, and `fault` says why."""
    fault: str = ""
    file_faults: Mapping[str, str] | None = None
    """Stage -> what is wrong with its plan's file; only stages with a fault."""


def reasons(bundle: Bundle, found: Found, machine: Machine) -> list[str]:
    """Why this machine cannot run the bundle on these plans; empty when it can."""
    if found.plans is None:
        return [found.fault]
    build = plans.remedy(bundle.path, found.target)
    broken = [f"{fault}. Build it again: {build}" for fault in (found.file_faults or {}).values()]
    # Fewer profiles than the bundle's own limit only limits how many sessions run: not a reason.
    most = batches(bundle, found.plans)
    return [*broken, *plans.refusals(bundle, found.plans, machine, largest=most or 1)]


def batches(bundle: Bundle, recorded: Plans) -> int:
    """Largest batch that every plan of the tick has a profile for; a prompt's run at batch 1."""
    ticks = [recorded.plan(stage.name) for stage in bundle.manifest.stages]
    return min((len(plan.profiles) for plan in ticks if plan is not None), default=0)


def describe(bundle: Bundle, found: list[Found], machine: Machine) -> dict[str, Any]:
    """The same facts as `lines`, for another program."""
    return {
        "bundle": str(bundle.path),
        "model": bundle.manifest.model.name,
        "largest_batch": bundle.manifest.largest_batch,
        "caches": {
            cache.dtype: {"rings": cache.rings, "bytes": cache.bytes}
            for cache in caches.caches(bundle.manifest)
        },
        "session_bytes": bundle.manifest.session_bytes(bundle.manifest.ticks_until_full()),
        "machine": {
            "platform": machine.platform,
            "gpu": machine.gpu,
            "compute_capability": machine.compute_capability,
            "versions": dict(machine.versions),
        },
        "plans": [
            {
                "target": one.target,
                "gpu": one.plans.gpu if one.plans else "",
                "flavour": one.plans.flavour if one.plans else "",
                "version": one.plans.version if one.plans else "",
                "largest_batch": batches(bundle, one.plans) if one.plans else 0,
                "bytes": sum(plan.bytes for plan in one.plans.plans) if one.plans else 0,
                "reasons_not_to_run": reasons(bundle, one, machine),
            }
            for one in found
        ],
    }


def lines(bundle: Bundle, found: list[Found], machine: Machine) -> Iterator[str]:
    """A page of text."""
    manifest = bundle.manifest
    yield f"{bundle.path}: {manifest.model.name}, batch profiles 1..{manifest.largest_batch}"
    yield caches.sentence(manifest)
    gpu = f"{machine.gpu} ({plans.target_of(machine.compute_capability)})" if machine.gpu else ""
    has = ", ".join(f"{flavour} {version}" for flavour, version in machine.versions)
    yield f"this machine: {machine.platform}, {gpu or 'no NVIDIA GPU'}, {has or 'no TensorRT'}"
    if kernels := sum(stage.kernel is not None for stage in manifest.stages):
        yield (
            f"{kernels} of {len(manifest.stages)} stages name kernels of ours: executor cuda runs "
            f"those, executor tensorrt the plans unless [engine] kernels_beside_plans = true"
        )
    if not found:
        yield (
            "no plans. Build some: "
            f"{plans.remedy(bundle.path, 'TARGET')} (--target list shows every GPU)"
        )
    for one in found:
        yield ""
        yield from _folder(bundle, one, machine)


def _folder(bundle: Bundle, one: Found, machine: Machine) -> Iterator[str]:
    recorded, why = one.plans, reasons(bundle, one, machine)
    if recorded is not None:
        total = sum(plan.bytes for plan in recorded.plans)
        outside = {w.name: w.bytes for plan in recorded.plans for w in plan.weights}
        yield (
            f"{plans.FOLDER}/{one.target}: {recorded.gpu}, {recorded.flavour} {recorded.version}, "
            f"{recorded.platform}, batches 1..{batches(bundle, recorded)}, {total / MB:.1f} MB"
            + (f" and {sum(outside.values()) / MB:.0f} MB of the bundle" if outside else "")
        )
        for plan in recorded.plans:
            yield f"  {plan.stage:<16}{plan.bytes / MB:>8.1f} MB  {_facts(plan)}"
    else:
        yield f"{plans.FOLDER}/{one.target}"
    if not why:
        yield "  runs here"
    for reason in why:
        yield f"  not here: {reason}"


def _facts(plan: Plan) -> str:
    facts = [plans.described(plan.profiles)]
    if plan.weights:
        facts.append(f"{len(plan.weights)} weights outside")
    if plan.in_place:
        facts.append(f"{len(plan.in_place)} rings in place")
    if plan.attention != "none":
        facts.append(f"attention {plan.attention}")
    facts.append(f"built in {plan.seconds:.1f} s with {plan.peak_rss_bytes / MB:.0f} MB")
    return ", ".join(facts)
