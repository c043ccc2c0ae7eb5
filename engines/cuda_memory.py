"""Device address ranges, the pages behind them, and host memory the device copies from.

A `Range` is addresses alone: reserved once, never moved. Pages of physical memory are put behind
parts of it (`map_page`) and taken away again while addresses, and graphs that use them, stay
valid. Touching an address with no page behind it is a fault that ends the process, so whoever
reads or writes must know what is mapped: that is `arena`'s business, not this file's.

A page taken away is kept in a small stock before it goes back to the driver: making one costs
more than mapping one. Needs an open `cuda.Device`. One thread at a time.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cuda import CudaFailed, DevicePtr, Stream, call, driver


class OutOfPages(Exception):
    """The device has no memory left for another page."""


class Range:
    """Reserved addresses, mapped page by page. Offsets are in bytes from its base."""

    def __init__(self, reserved_bytes: int, ordinal: int = 0, stock_pages: int = 256) -> None:
        """reserved_bytes: rounded up to whole pages. stock_pages: spare ones to keep."""
        cu = driver()
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = ordinal
        self._access = cu.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.page_bytes = page_bytes(ordinal)
        self.reserved_bytes = max(1, -(-reserved_bytes // self.page_bytes)) * self.page_bytes
        self._stock_pages = stock_pages
        self._stream = Stream()
        self._is_settled = True
        self._stock: list[Any] = []
        self._behind: dict[int, Any] = {}
        self.base = DevicePtr(
            int(call("cuMemAddressReserve", self.reserved_bytes, self.page_bytes, 0, 0))
        )

    @property
    def committed_bytes(self) -> int:
        """Physical memory this range holds, the stock included."""
        return (len(self._behind) + len(self._stock)) * self.page_bytes

    def map_page(self, page: int) -> None:
        """Put memory behind page number ``page``. Contents: whatever was there before.

        Raises `OutOfPages`; the range is then as it was.
        """
        assert page not in self._behind, page
        try:
            handle = self._stock.pop() if self._stock else self._create()
        except CudaFailed as err:
            raise OutOfPages(str(err)) from None
        address = self.base + page * self.page_bytes
        call("cuMemMap", address, self.page_bytes, 0, handle, 0)
        call("cuMemSetAccess", address, self.page_bytes, [self._access], 1)
        self._behind[page] = handle

    def unmap_page(self, page: int) -> None:
        """Take the memory behind ``page`` away; nothing on the device may be using it."""
        handle = self._behind.pop(page)
        call("cuMemUnmap", self.base + page * self.page_bytes, self.page_bytes)
        if len(self._stock) < self._stock_pages:
            self._stock.append(handle)
        else:
            call("cuMemRelease", handle)

    def fill(self, offset_bytes: int, nbytes: int, value: int) -> None:
        """Set every byte of a mapped part; done once `settle` returns."""
        call("cuMemsetD8Async", self.base + offset_bytes, value, nbytes, self._stream.handle)
        self._is_settled = False

    def copy(self, target_bytes: int, source_bytes: int, nbytes: int) -> None:
        """Copy between two mapped parts, after earlier fills; done once `settle` returns."""
        target, source = self.base + target_bytes, self.base + source_bytes
        call("cuMemcpyDtoDAsync", target, source, nbytes, self._stream.handle)
        self._is_settled = False

    def settle(self) -> None:
        """Wait for fills and copies, which run beside everything else on the device."""
        if not self._is_settled:
            self._stream.synchronize()
            self._is_settled = True

    def close(self) -> None:
        self.settle()
        self._stream.close()
        for page in list(self._behind):
            self.unmap_page(page)
        for handle in self._stock:
            call("cuMemRelease", handle)
        self._stock = []
        call("cuMemAddressFree", self.base, self.reserved_bytes)

    def _create(self) -> Any:
        return call("cuMemCreate", self.page_bytes, self._properties, 0)


def page_bytes(ordinal: int = 0) -> int:
    """Smallest unit of physical memory that can be mapped: 2 MiB on every GPU so far."""
    cu = driver()
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", properties, least))


def write_ordered(target: DevicePtr, source: bytes, stream: Stream) -> None:
    """Copy a few host bytes to the device after what ``stream`` was given before."""
    raw = (ctypes.c_char * len(source)).from_buffer_copy(source)
    call("cuMemcpyHtoDAsync", target, ctypes.addressof(raw), len(source), stream.handle)


class HostArray:
    """A numpy array in page-locked memory: the device copies from and to it on its own."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.address = int(call("cuMemHostAlloc", max(count, 1), 0))
        raw = (ctypes.c_ubyte * count).from_address(self.address)
        self.array: NDArray[Any] = np.frombuffer(memoryview(raw), dtype=dtype).reshape(shape)
        self.array[...] = 0

    def to_device(self, target: DevicePtr, nbytes: int, stream: Stream) -> None:
        """Enqueue copying the first ``nbytes`` bytes."""
        call("cuMemcpyHtoDAsync", target, self.address, nbytes, stream.handle)

    def from_device(self, source: DevicePtr, nbytes: int, stream: Stream) -> None:
        """Enqueue filling the first ``nbytes`` bytes."""
        call("cuMemcpyDtoHAsync", self.address, source, nbytes, stream.handle)

    def close(self) -> None:
        """Give the memory back. The array must not be used afterwards."""
        call("cuMemFreeHost", self.address)
