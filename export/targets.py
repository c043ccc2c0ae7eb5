"""Which GPUs a bundle can be built for: a table, and what follows from a row. Pure.

A target is a GPU by name (`rtx-4090`) or a bare compute capability (`sm_89`). The row says which
flavour of TensorRT serves it and on which machine that builds; with a bundle's manifest it also
says how many sessions its memory holds and its bandwidth feeds.

    tensorrt_rtx   compute capability 7.5, 8.0, 8.6, 8.9, 12.0, 12.1; builds with no GPU present,
                   for the kind of machine it runs on: an x86-64 build opens on no aarch64 box
    tensorrt       the rest: data-centre parts and Jetson; times kernels, so builds on its target

Memory and bandwidth are the maker's published figures (`SOURCES`): GB/s, and memory as it is sold,
within two percent of the GiB that the driver shows before error correction; boxes that share their
memory with the processor (orin, thor, gb10) show less.
Not here: building (`tensorrt_build`), measuring.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from engines import caches
from engines.bundle import Manifest, RegionSpec
from engines.clocks import ClockKind
from engines.plans import INSTALL, Flavour, Machine, graph_stages, target_of
from export.mistake import Mistake

X86, ARM = "linux-x86_64", "linux-aarch64"
GIB = 1 << 30
NS_PER_S = 1_000_000_000

RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""Members of `ComputeCapability` in tensorrt_rtx 1.7.1; a test compares."""
TENSORRT_CAPABILITIES = ("8.7", "9.0", "10.0", "10.3", "11.0")
"""What is left of the GPUs below; TensorRT 11 runs on more, tensorrt_rtx then builds for them."""
NO_BFLOAT16 = ("7.5",)
"""tensorrt_rtx 1.7.1 refuses: "the model contains HW-specific" operators."""
ARM_CAPABILITIES = ("8.7", "11.0", "12.1")
"""Found in boxes with an ARM processor only."""


class UnknownTarget(Mistake):
    """A target that is not in the table; the operator's mistake."""


class CannotBuild(Mistake):
    """This machine cannot build for that target; says which one can."""


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU. memory_gib and gb_per_s are 0 for a bare compute capability."""

    name: str
    gpu: str
    compute_capability: str
    memory_gib: int = 0
    gb_per_s: float = 0
    platform: str = ""
    """The only platform this GPU comes with; empty: the one that builds."""

    @property
    def flavour(self) -> Flavour:
        return "tensorrt_rtx" if self.compute_capability in RTX_CAPABILITIES else "tensorrt"

    @property
    def folder(self) -> str:
        """Name below plans/: GPUs of one compute capability share their plans."""
        return target_of(self.compute_capability)


TARGETS = (
    Target("t4", "NVIDIA T4", "7.5", 16, 320),
    Target("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", "7.5", 11, 616),
    Target("a100", "NVIDIA A100 80GB", "8.0", 80, 2039),
    Target("a30", "NVIDIA A30", "8.0", 24, 933),
    Target("a10", "NVIDIA A10", "8.6", 24, 600),
    Target("a40", "NVIDIA A40", "8.6", 48, 696),
    Target("rtx-3090", "NVIDIA GeForce RTX 3090", "8.6", 24, 936),
    Target("rtx-a6000", "NVIDIA RTX A6000", "8.6", 48, 768),
    Target("orin", "NVIDIA Jetson AGX Orin 64GB", "8.7", 64, 204.8, ARM),
    Target("l4", "NVIDIA L4", "8.9", 24, 300),
    Target("l40s", "NVIDIA L40S", "8.9", 48, 864),
    Target("rtx-4080", "NVIDIA GeForce RTX 4080", "8.9", 16, 716.8),
    Target("rtx-4090", "NVIDIA GeForce RTX 4090", "8.9", 24, 1008),
    Target("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", "8.9", 48, 960),
    Target("h100", "NVIDIA H100 SXM", "9.0", 80, 3350),
    Target("h200", "NVIDIA H200 SXM", "9.0", 141, 4800),
    Target("b200", "NVIDIA B200", "10.0", 180, 7700),
    Target("thor", "NVIDIA Jetson AGX Thor", "11.0", 128, 273, ARM),
    Target("rtx-5080", "NVIDIA GeForce RTX 5080", "12.0", 16, 960),
    Target("rtx-5090", "NVIDIA GeForce RTX 5090", "12.0", 32, 1792),
    Target("rtx-pro-6000", "NVIDIA RTX PRO 6000 Workstation", "12.0", 96, 1792),
    Target("rtx-pro-6000-server", "NVIDIA RTX PRO 6000 Server", "12.0", 96, 1597),
    Target("gb10", "NVIDIA GB10 (DGX Spark)", "12.1", 128, 273, ARM),
)

CAPABILITY_SOURCE = "https://developer.nvidia.com/cuda-gpus"
"""Compared on 2026-11-30 from 8.6 up, Thor as its module T5000; 8.0 and 7.5 in copies of it."""

SOURCES = {
    "t4": "NVIDIA T4 product brief: 16 GB, 256 bit, up to 320 GB/s",
    "rtx-2080-ti": "huggingface.co/datasets/Fdddhhhill/Advanced_AI_GPU_Benchmark_Dataset.csv",
    "a100": "NVIDIA A100 data sheet (SXM; the PCIe card has 1935), by glennklockwood.com/garden",
    "a30": "",
    "a10": "huggingface.co/RajBhope/gpu-runtime-predictor (A10G)",
    "a40": "NVIDIA A40 data sheet, by ecer.com: 48 GB, 696 GB/s",
    "rtx-3090": "notebookcheck.com 495085: 936 GB/s",
    "rtx-a6000": "NVIDIA RTX A6000 data sheet, by servethehome.com: 48 GB, 384 bit, 768 GB/s",
    "orin": "",
    "l4": "store.sourcecode.com: 24 GB, 192 bit, 300 GB/s",
    "l40s": "store.sourcecode.com: 48 GB, 384 bit, 864 GB/s",
    "rtx-4080": "tweaktown.com 102205: 256 bit, 716 GB/s; 16 GB",
    "rtx-4090": "sipoch.com 300330022705642: 24 GB, 384 bit, 1008 GB/s",
    "rtx-6000-ada": "grafikkarten.com: 48 GB, 384 bit, 960 GB/s",
    "h100": "github.com/scaleway/docs-content/pull/5834: SXM, 3.35 TB/s (PCIe 2)",
    "h200": "NVIDIA's submission to MLPerf inference 4.1: 141 GB; hpc-ai.com: 4.8 TB/s",
    "b200": "hpc-ai.com: 180 GB, 7.7 TB/s; github.com/pytorch/ao/pull/4002: 7.67 by the driver",
    "thor": "huggingface.co/hardware/jetson-t5000: 128 GB",
    "rtx-5080": "tweaktown.com 102205: 16 GB, 256 bit, 960 GB/s",
    "rtx-5090": "sipoch.com 300330022705642: 32 GB, 512 bit, 1792 GB/s",
    "rtx-pro-6000": "videocardz by gpu.name: 96 GB, 512 bit, 1792 GB/s (workstation edition)",
    "rtx-pro-6000-server": "NVIDIA data sheet of December 2025, by others: 96 GB, 1597 GB/s",
    "gb10": "NVIDIA DGX Spark hardware guide, by ai-infrastructure.net: 128 GB, 273 GB/s",
}
"""Where the memory and bandwidth of each row were compared on 2026-11-30. Empty: no page was found
that states them; so too the bandwidth of thor. 3072 bit at 2.43 Gbit/s (a30), 256 at 6.4
(orin) and 256 at 8.533 (thor) give what the table says."""


def resolve(text: str) -> Target:
    """A GPU's name or "sm_89". Raises `UnknownTarget` naming what comes near."""
    wanted = text.lower().replace(" ", "-")
    for target in TARGETS:
        if target.name == wanted:
            return target
    match = re.fullmatch(r"sm_?(\d{1,2})(\d)", wanted)
    known = (*RTX_CAPABILITIES, *TENSORRT_CAPABILITIES)
    if match and (capability := f"{match[1]}.{match[2]}") in known:
        platform = ARM if capability in ARM_CAPABILITIES else ""
        gpu = f"any GPU of compute capability {capability}"
        return Target(target_of(capability), gpu, capability, platform=platform)
    names = [target.name for target in TARGETS] + [target_of(c) for c in known]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    hint = f"; near it: {', '.join(near)}" if near else ""
    raise UnknownTarget(
        f"--target {text}: no GPU of that name is known{hint}. See them all: "
        f"duplexbox export build --target list"
    )


def reason_not_to_build(target: Target, here: Machine) -> str:
    """Why this machine cannot build for ``target``, with the remedy; empty when it can. Pure."""
    if target.platform and target.platform != here.platform:
        return (
            f"{target.gpu} ({target.folder}) comes with {target.platform} only and this machine is "
            f"{here.platform}; TensorRT builds for the platform it runs on. Copy the bundle to "
            f"the box and run the same command there"
        )
    flavour = target.flavour
    if flavour == "tensorrt" and here.compute_capability != target.compute_capability:
        found = f"{here.gpu} ({target_of(here.compute_capability)})" if here.gpu else "no GPU"
        return (
            f"{target.gpu} ({target.folder}) is served by TensorRT, which times kernels on the "
            f"GPU it builds for; this machine has {found}. Run the same command on a box with "
            f"that GPU, or run the bundle there without plans: the CUDA executor needs none"
        )
    if not here.version_of(flavour):
        return f"{flavour} is not installed, and builds for {target.folder}. {INSTALL[flavour]}"
    return ""


def reason_not_to_fit(target: Target, manifest: Manifest) -> str:
    """Why ``target`` cannot compute this bundle whoever builds it; empty when it can. Pure."""
    wide = {spec.dtype for stage in graph_stages(manifest) for spec in stage.inputs}
    if "bfloat16" in wide and target.compute_capability in NO_BFLOAT16:
        return (
            f"{target.gpu} ({target.folder}) has no bfloat16 arithmetic and {manifest.model.name} "
            f"is exported in it. Export it again: duplexbox export build MODEL --dtype float16"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Room:
    """Sessions at full retention that a target could hold and feed; both are upper bounds."""

    by_memory: int
    by_bandwidth: int

    @property
    def sessions(self) -> int:
        return min(self.by_memory, self.by_bandwidth)


def room(manifest: Manifest, target: Target) -> Room:
    """What memory and bandwidth allow, every session at full retention.

    A tick reads the weights once and, per session, every ring as far as it is valid; other
    regions are read and written. Activations, caches of the run-time and everything that is not
    traffic are left out, so no box reaches this: it tells which boxes are out of the question.
    """
    weights = weights_bytes(manifest)
    period_bytes = target.gb_per_s * 1e9 * manifest.timing.period_ns / NS_PER_S
    moved = sum(tick_bytes(region) for region in manifest.regions)
    held = manifest.session_bytes(manifest.ticks_until_full())
    return Room(
        by_memory=max(0, (target.memory_gib * GIB - weights) // held),
        by_bandwidth=max(0, int((period_bytes - weights) // moved)),
    )


def weights_bytes(manifest: Manifest) -> int:
    """Bytes of every file a graph takes weights from."""
    graphs = {stage.graph for stage in manifest.stages}
    return sum(
        spec.bytes
        for name, spec in manifest.files.items()
        if name.startswith("stages/") and name not in graphs and not name.endswith(".onnx")
    )


def tick_bytes(region: RegionSpec) -> int:
    """Bytes of one session's region that a tick moves once the region is full."""
    if region.clock.kind is ClockKind.RING:
        row = region.whole_bytes // region.clock.retain
        return region.whole_bytes + int(row * region.clock.rows_per_tick)
    if region.clock.kind is ClockKind.CONSTANT:
        return region.whole_bytes
    return 2 * region.whole_bytes


def table(manifest: Manifest | None) -> Iterator[str]:
    """`--target list`. With a manifest, also the sessions each GPU has room for."""
    heading = f"{'target':<21}{'GPU':<34}{'':<8}{'GiB':>5}{'GB/s':>8}  {'served by':<14}"
    if manifest is not None:
        heading += f"{'memory holds':>13}{'bandwidth feeds':>17}"
    yield heading.rstrip()
    for target in TARGETS:
        line = (
            f"{target.name:<21}{target.gpu:<34}{target.folder:<8}{target.memory_gib:>5}"
            f"{target.gb_per_s:>8g}  {target.flavour:<14}"
        )
        if manifest is not None:
            found = room(manifest, target)
            line += f"{found.by_memory:>13,}{found.by_bandwidth:>17,}"
            if reason_not_to_fit(target, manifest):
                line += "  no bfloat16 arithmetic: export in float16"
        yield line.rstrip()
    rtx = ", ".join(target_of(c) for c in RTX_CAPABILITIES)
    other = ", ".join(target_of(c) for c in TENSORRT_CAPABILITIES)
    yield f"or a compute capability: {rtx} (tensorrt_rtx: builds anywhere, no GPU needed)"
    yield f"  {other} (tensorrt: builds on the target itself)"
    yield f"  {', '.join(t.name for t in TARGETS if t.platform == ARM)}: built on the box itself"
    if manifest is not None:
        yield (
            f"sessions of {manifest.model.name} at full retention, an upper bound from traffic and "
            f"size alone; only a measurement on the box says what it serves"
        )
        yield caches.sentence(manifest)
