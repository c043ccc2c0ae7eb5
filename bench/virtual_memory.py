# ruff: noqa: T201  (a script run by hand)
"""What it costs to put memory behind an address range and to take it away, per page.

    python -m bench.virtual_memory        # on a GPU; two seconds

Each driver call is timed on the host over 768 pages, twice with the device idle and once while
kernels fill 8 GiB over and over, because the arena maps pages while a tick runs.
"""

import time
from collections.abc import Callable
from pathlib import Path

from engines import cuda
from engines.cuda import call, driver
from engines.cuda_memory import page_bytes
from engines.kernels.tick import TickKernels

PAGES = 768
LOAD_BYTES = 1 << 33
LOAD_LAUNCHES = 60
TOGETHER = 12
"""Pages that one call is given where it takes several: a slot of a ring of Moshi's."""


def main() -> None:
    device = cuda.Device(0)
    major, minor = device.compute_capability
    kernels = TickKernels(f"sm_{major}{minor}", Path("build/kernels"))
    stream, load = cuda.Stream(), cuda.allocate(LOAD_BYTES)
    print(f"{device.name}, pages of {page_bytes()} bytes, microseconds per page")

    def keep_busy() -> None:
        for _ in range(LOAD_LAUNCHES):
            kernels.spread(load, LOAD_BYTES, 2, stream)

    for name, before in (("idle", None), ("idle", None), ("busy", keep_busy)):
        costs = measure(stream, before)
        print(f"{name:5}", *(f"{what} {us:.1f}" for what, us in costs.items()), sep="  ")
    cuda.release(load)
    cuda.close_all([device, kernels, stream])


def measure(stream: cuda.Stream, before: Callable[[], None] | None) -> dict[str, float]:
    """Microseconds per page of each call; ``before`` enqueues work it runs beside."""
    cu, size = driver(), page_bytes()
    properties, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location = properties.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    base = int(call("cuMemAddressReserve", PAGES * size, size, 0, 0))
    costs: dict[str, float] = {}
    handles: list[object] = []

    def timed(name: str, work: Callable[[int], object], step: int = 1) -> None:
        stream.synchronize()
        if before is not None:
            before()
        began = time.perf_counter()  # noqa: TID251  (a measurement)
        for page in range(0, PAGES, step):
            work(page)
        costs[name] = (time.perf_counter() - began) / PAGES * 1e6  # noqa: TID251

    def at(page: int) -> int:
        return base + page * size

    timed("create", lambda page: handles.append(call("cuMemCreate", size, properties, 0)))
    timed("map", lambda page: call("cuMemMap", at(page), size, 0, handles[page], 0))
    timed("access", lambda page: call("cuMemSetAccess", at(page), size, [access], 1))
    timed("unmap", lambda page: call("cuMemUnmap", at(page), size))
    for page in range(PAGES):
        call("cuMemMap", at(page), size, 0, handles[page], 0)
    many = TOGETHER * size
    timed(
        f"access of {TOGETHER}",
        lambda page: call("cuMemSetAccess", at(page), many, [access], 1),
        TOGETHER,
    )
    timed(f"unmap of {TOGETHER}", lambda page: call("cuMemUnmap", at(page), many), TOGETHER)
    timed("release", lambda page: call("cuMemRelease", handles[page]))
    call("cuMemAddressFree", base, PAGES * size)
    return costs


if __name__ == "__main__":
    main()
