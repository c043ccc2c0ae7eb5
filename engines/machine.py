"""What this machine has that decides which plans it can run: GPU, platform, TensorRT versions.

Looks once and returns a `plans.Machine`; what follows from it is decided elsewhere. Neither
TensorRT nor CUDA is loaded unless it is there, and nothing is kept open.
"""

import importlib.metadata
import platform

from engines import cuda
from engines.plans import Machine

DISTRIBUTIONS = {
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    "tensorrt": ("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    "tensorrt_lean": ("tensorrt-lean-cu13", "tensorrt-lean-cu12", "tensorrt-lean"),
}
"""Module -> wheels that bring it."""


def look() -> Machine:
    """This machine, with its first GPU."""
    return with_gpu(*_gpu())


def with_gpu(gpu: str, capability: str) -> Machine:
    """This machine, for whoever has looked at its GPU already."""
    return Machine(
        platform=f"{platform.system().lower()}-{platform.machine()}",
        gpu=gpu,
        compute_capability=capability,
        versions=tuple(_versions()),
    )


def _gpu() -> tuple[str, str]:
    try:
        device = cuda.Device()
    except cuda.NoCuda:
        return "", ""
    try:
        major, minor = device.compute_capability
        return device.name, f"{major}.{minor}"
    finally:
        device.close()


def _versions() -> list[tuple[str, str]]:
    """Asked of the installer's records: loading the libraries would take seconds and 200 MB."""
    found: list[tuple[str, str]] = []
    for module, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                found.append((module, importlib.metadata.version(name)))
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found
