"""The GPU as found at start-up: there, driven by a new enough driver, ours alone, large enough.

Whatever is wrong is one sentence with the numbers and the remedy, before anything is loaded. What
is measured here is the rate everything else is held against. Not here: driver calls (`cuda`), what
runs on the GPU (the executors).
"""

import fcntl
import math
import os
import tempfile
from pathlib import Path
from typing import IO

from engines import cuda
from engines.bundle import BundleError
from engines.cuda import CudaFailed
from engines.layout import ArenaLayout

LEAST_DRIVER = 13000
"""cuDriverGetVersion of CUDA 13.0, which the wheels are built for."""
WORKSPACE_BYTES = 5 << 29
"""What contexts, graphs, ONNX Runtime and its libraries take beside weights and state: 2.0 GB were
seen at 64 slots and 2.7 at 80, of Moshi's size."""
FOREIGN_BYTES = 1 << 30
"""More than an empty context takes: somebody else is on the GPU."""


class NotReady(BundleError):
    """This machine cannot run the bundle as asked; the operator's to fix."""


class Taken(NotReady):
    """Another box runs on this GPU."""


class DoesNotFit(NotReady):
    """The GPU has too little memory for so many slots."""

    def __init__(self, text: str, most: int) -> None:
        super().__init__(text)
        self.most = most
        """Slots that would fit; 0: not even one."""


def open_gpu(ordinal: int) -> cuda.Device:
    """The GPU and its driver, whatever will run there. Raises `NotReady` with the remedy."""
    try:
        device = cuda.Device(ordinal)
    except (cuda.NoCuda, CudaFailed) as err:
        raise NotReady(
            f"GPU {ordinal} cannot be used: {err}. nvidia-smi lists the GPUs of this machine"
        ) from None
    version = int(cuda.call("cuDriverGetVersion"))
    if version < LEAST_DRIVER:
        device.close()
        raise NotReady(
            f"the driver speaks CUDA {version // 1000}.{version % 1000 // 10} and "
            f"{LEAST_DRIVER // 1000}.0 is needed. Install a driver of the 580 series or later"
        )
    return device


def copy_rate(ordinal: int = 0, nbytes: int = 1 << 31) -> float:
    """Bytes read plus bytes written per microsecond by a large copy on the device."""
    device = open_gpu(ordinal)
    stream, began, ended = cuda.Stream(), cuda.Event(), cuda.Event()
    source, target = cuda.allocate(nbytes), cuda.allocate(nbytes)
    rates = []
    for _ in range(6):  # the first is slower
        began.record(stream)
        cuda.copy_device(target, source, nbytes, stream)
        ended.record(stream)
        rates.append(2 * nbytes / ended.elapsed_us(began))
    cuda.release(source)
    cuda.release(target)
    cuda.close_all([device, stream, began, ended])
    return sorted(rates)[len(rates) // 2]


def hold_gpu(device: cuda.Device) -> IO[str]:
    """Lock the GPU against a second box; closing the file lets go of it."""
    path = Path(tempfile.gettempdir()) / f"duplexbox-gpu-{device.uuid}.lock"
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise Taken(
            f"process {holder} already runs a box on {device.name}. Stop it first "
            f"(kill {holder}), or give this one another GPU"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def check_fits(device: cuda.Device, layout: ArenaLayout, weights: int) -> None:
    """Raise `NotReady` unless all slots fit at full retention, beside the weights."""
    free, total = device.free_bytes, device.total_bytes
    needed = weights + layout.full_bytes(layout.slots) + WORKSPACE_BYTES
    if needed <= free:
        return
    per_session = (layout.full_bytes(layout.slots) - layout.full_bytes(0)) / layout.slots
    left = free - weights - WORKSPACE_BYTES - layout.whole_bytes
    fit = max(0, math.floor(left / max(per_session, 1)))
    foreign = total - free
    others = (
        f" (other processes hold about {foreign / 1e9:.1f} GB: nvidia-smi lists them)"
        if foreign > FOREIGN_BYTES
        else ""
    )
    remedy = f"Run at most {fit} slots" if fit else "Use a larger GPU"
    raise DoesNotFit(
        f"{layout.slots} slots need {needed / 1e9:.1f} GB on {device.name}: weights "
        f"{weights / 1e9:.1f}, sessions at full retention "
        f"{layout.full_bytes(layout.slots) / 1e9:.1f}, workspace {WORKSPACE_BYTES / 1e9:.1f}; "
        f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free{others}. {remedy}",
        fit,
    )


def check_room(device: cuda.Device, nbytes: int, what: str) -> None:
    """Raise `NotReady` unless ``nbytes`` more are free."""
    free = device.free_bytes
    if nbytes > free:
        raise NotReady(
            f"{what} needs {nbytes / 1e9:.1f} GB more on {device.name} and {free / 1e9:.1f} of "
            f"{device.total_bytes / 1e9:.1f} GB are free. Run fewer slots ([engine] slots), or "
            f"use a larger GPU"
        )
