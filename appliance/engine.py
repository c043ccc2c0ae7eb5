"""What runs a bundle on this machine: which executor, on which GPU, for how many sessions.

Chosen once at start-up and said in the log. `auto` takes the GPU where ONNX Runtime was built for
one and the bundle fits on it, else the CPU with the reason why; a GPU that another box holds is no
reason to be slow in silence, so that is an error, as everything is when the config names a kind.
One process serves one GPU: several GPUs take several boxes (`[engine] gpu`, a socket each), and a
line that is given their folder places each caller.

Nothing of an engine is imported before it is known to be wanted: lines need none.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.config import EngineConfig
from engines.bundle import Bundle, BundleError
from engines.executor import Executor, OnDevice, Primes
from engines.prefill import Primer

if TYPE_CHECKING:
    from engines.cuda_executor import CudaExecutor

logger = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor that is ready, and what a certificate says of it."""

    executor: Executor
    name: str
    """What computes, with its version."""
    memory_bytes: int
    """What the state of all sessions may take when the box starts."""
    gpu: str = "none"
    driver: str = "none"


def open_engine(bundle: Bundle, config: EngineConfig, slots: int = 0) -> Engine:
    """Open what ``config`` asks for. slots: sessions at once; 0: as the config says.

    Where neither says, the largest batch of the bundle, or on a GPU as many as fit in its memory.
    Raises `engines.bundle.BundleError`: the bundle's fault, or the machine's with the remedy.
    """
    slots = slots or config.slots
    if config.executor != "cpu":
        opened = _open_gpu(bundle, config, slots)
        if opened is not None:
            return opened
    from engines.ort_executor import OrtExecutor

    available = available_memory_bytes()  # before the state is allocated
    executor = OrtExecutor(bundle, slots or bundle.manifest.largest_batch)
    return Engine(executor, f"ONNX Runtime {_version()}, CPU, one thread", available)


def _open_gpu(bundle: Bundle, config: EngineConfig, slots: int) -> Engine | None:
    """None: `auto`, and the CPU must do; the log says why."""
    from engines.gpu import NotReady, Taken

    try:
        return _cuda(bundle, config, slots)
    except Taken:
        raise
    except NotReady as err:
        if config.executor != "auto":
            raise
        logger.info("engine: the CPU, because: %s", err)
        return None


def _cuda(bundle: Bundle, config: EngineConfig, slots: int) -> Engine:
    from engines.cuda_executor import CudaExecutor, CudaOptions
    from engines.gpu import DoesNotFit
    from engines.plans import PlansError

    make: Callable[[Bundle, int, CudaOptions], CudaExecutor] = CudaExecutor
    if config.executor == "tensorrt":
        from engines.tensorrt_executor import TensorrtExecutor

        make = partial(TensorrtExecutor, beside_kernels=config.kernels_beside_plans)
    options = CudaOptions(ordinal=config.gpu, kernels=config.kernels)
    wanted = slots or bundle.manifest.largest_batch
    try:
        executor = make(bundle, wanted, options)
    except DoesNotFit as err:
        if slots or not err.most:
            raise
        logger.info("engine: %d slots, because: %s", err.most, err)
        executor = make(bundle, err.most, options)
    except PlansError as err:
        raise BundleError(str(err)) from None
    _check(executor, config)
    use = executor.memory()
    logger.info(
        "engine: %s on %s, gpu=%d slots=%d used_mb=%d of_mb=%d full_mb=%d",
        *(executor.runs_on, executor.gpu, config.gpu, executor.slots),
        *(use.device_used >> 20, use.device_total >> 20, (use.weights + use.full) >> 20),
    )
    name = executor.runs_on if config.executor == "tensorrt" else f"{executor.runs_on} {_version()}"
    return Engine(executor, name, use.for_sessions, executor.gpu, driver_version())


def open_primer(executor: Primes, config: EngineConfig) -> Primer:
    """What feeds prompts, held to golden data like the ticks. Raises `ParityFailed`."""
    primer = executor.primer()
    if isinstance(executor, OnDevice) and config.check_golden:
        from engines import parity
        from engines.cuda_executor import CudaExecutor
        from engines.cuda_prefill import CudaPrimer

        if isinstance(executor, CudaExecutor) and isinstance(primer, CudaPrimer):
            _say("golden data of prompts", lambda: parity.check_prompt(executor, primer))
    return primer


def _check(executor: "CudaExecutor", config: EngineConfig) -> None:
    """Hold what was opened to golden data, or say that nobody did. Raises `ParityFailed`."""
    from engines import parity
    from engines.answers import ParityFailed

    if not config.check_golden:
        logger.info("golden data: not compared, because [engine] check_golden = false")
        return
    try:
        _say("golden data", lambda: parity.check(executor))
    except ParityFailed:
        executor.close()
        raise


def _say(what: str, check: Callable[[], object]) -> None:
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    found = check()
    logger.info("%s: %s; in %d ms", what, found, (clock.now_ns() - began_ns) // NS_PER_MS)


def available_memory_bytes() -> int:
    """What Linux says could be allocated without swapping; else all physical memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no procfs: fall through to what POSIX offers
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def driver_version(path: Path = DRIVER) -> str:
    """The kernel driver's version as `nvidia-smi` says it, or "unknown"."""
    try:
        found = re.search(r"Module\s.*?(\d+\.\d+(?:\.\d+)?)", path.read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)  # of what was imported: both wheels may be there
