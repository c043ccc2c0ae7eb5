"""The few CUDA driver calls we use, every status checked.

Decides how device memory, modules, streams, graphs and events are owned: each is a small object
with ``close``. Does not know what a kernel computes, nor what the memory holds.

Needs ``cuda-bindings`` and a driver; importing this file needs neither, opening a `Device` does.
One thread at a time: the context is current on the thread that opens the device, and on another
once that calls `Device.make_current`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType

DevicePtr = NewType("DevicePtr", int)

DEFAULT_STREAM = 0
"""Where the driver's calls without a stream are ordered."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY: no error."""

_driver: Any = None


class CudaFailed(Exception):
    """A driver call returned an error: ours if the arguments are wrong, else the machine's."""


class NoCuda(Exception):
    """This machine has no usable CUDA device, or ``cuda-bindings`` is not installed."""


def call(name: str, *args: Any) -> Any:
    """Call driver function ``name``; return its value, its tuple of values, or None.

    For the modules of `engines` that own a kind of driver object; a `Device` must be open.
    """
    status, *values = getattr(_driver, name)(*args)
    if int(status) != 0:
        raise CudaFailed(f"{name} failed: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values) if values else None


def driver() -> Any:
    """The bindings' module, for its structures and enumerations; a `Device` must be open."""
    return _driver


def _load_driver() -> Any:
    global _driver
    if _driver is None:
        try:
            from cuda.bindings import driver
        except ImportError as err:
            raise NoCuda(f"{err}. Install the bindings: pip install 'duplexbox[cuda]'") from None
        _driver = driver
    return _driver


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Blocks and threads of one launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


class Stream:
    """An ordered queue of device work. ``handle`` is the driver's stream."""

    def __init__(self) -> None:
        self.handle = call("cuStreamCreate", int(_driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self.handle)

    def is_idle(self) -> bool:
        """Whether all it was given is over, without waiting. How it ended, `synchronize` says."""
        (status,) = _driver.cuStreamQuery(self.handle)
        return int(status) != NOT_READY

    def capture_is_broken(self) -> bool:
        """True while capturing if something was called that cannot be captured."""
        broken = _driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        return bool(call("cuStreamIsCapturing", self.handle) == broken)

    def capture(self, record: Callable[[], None]) -> Graph:
        """Capture what ``record`` enqueues here; nothing runs until the graph is replayed."""
        mode = _driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.handle, mode)
        try:
            record()
        except BaseException:
            _driver.cuStreamEndCapture(self.handle)  # its error would say less than this one
            raise
        return Graph(call("cuStreamEndCapture", self.handle))

    def close(self) -> None:
        call("cuStreamDestroy", self.handle)


class Graph:
    """A captured and instantiated graph; addresses and shapes are fixed."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._exec = call("cuGraphInstantiate", graph, 0)

    @property
    def nodes(self) -> int:
        """Kernels, copies and fills of one replay."""
        return int(call("cuGraphGetNodes", self._graph, 0)[1])

    def upload(self, stream: Stream) -> None:
        """Send the graph to the device now, so that the first replay costs what the next do."""
        call("cuGraphUpload", self._exec, stream.handle)

    def replay(self, stream: Stream) -> None:
        call("cuGraphLaunch", self._exec, stream.handle)

    def close(self) -> None:
        call("cuGraphExecDestroy", self._exec)
        call("cuGraphDestroy", self._graph)


class Event:
    """A point in a stream's work, with a time."""

    def __init__(self) -> None:
        self.handle = call("cuEventCreate", 0)

    def record(self, stream: Stream) -> None:
        call("cuEventRecord", self.handle, stream.handle)

    def record_in_graph(self, stream: Stream) -> None:
        """Record while ``stream`` is captured: every replay then records the event anew."""
        external = _driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        call("cuEventRecordWithFlags", self.handle, stream.handle, int(external))

    def elapsed_us(self, since: Event) -> float:
        """Microseconds of device time from ``since`` to this event; waits for both."""
        call("cuEventSynchronize", self.handle)
        return float(call("cuEventElapsedTime", since.handle, self.handle)) * 1e3

    def close(self) -> None:
        call("cuEventDestroy", self.handle)


class Function:
    """One kernel of a loaded module."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self.name = name

    def launch(
        self,
        shape: LaunchShape,
        params: ctypes.Structure,
        stream: Stream,
        *,
        overlaps: bool = False,
    ) -> None:
        """Enqueue one launch. ``params`` is the kernel's single argument, copied by this call.

        overlaps: the kernel may start before the launch in front of it has ended, and itself waits
        for that before it reads what others wrote (sm_90 and later; others wait as always).
        """
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        if overlaps and _has_overlap():
            call(
                "cuLaunchKernelEx",
                _overlapping(shape, stream),
                self._handle,
                ctypes.addressof(argument),
                0,
            )
            return
        call(
            "cuLaunchKernel",
            self._handle,
            *shape.grid,
            *shape.block,
            shape.shared_bytes,
            stream.handle,
            ctypes.addressof(argument),
            0,
        )

    def attribute(self, name: str) -> int:
        """A ``CUfunction_attribute`` by name, for example ``NUM_REGS`` or ``LOCAL_SIZE_BYTES``."""
        which = getattr(_driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(call("cuFuncGetAttribute", which, self._handle))

    def allow_shared(self, nbytes: int) -> None:
        """Let launches ask for up to ``nbytes`` of shared memory; 48 KiB need no asking."""
        attributes = _driver.CUfunction_attribute
        which = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self._handle, which, nbytes)

    def resident_blocks(self, threads: int) -> int:
        """Blocks of ``threads`` threads that one multiprocessor holds at a time."""
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(call(name, self._handle, threads, 0))


@functools.cache
def _has_overlap() -> bool:
    """Whether the device in use lets launches overlap; others refuse to be asked."""
    major = _driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    return int(call("cuDeviceGetAttribute", major, call("cuCtxGetDevice"))) >= 9


def _overlapping(shape: LaunchShape, stream: Stream) -> Any:
    """The configuration of a launch with programmatic stream serialization."""
    config = _driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream.handle
    attribute = _driver.CUlaunchAttribute()
    ids = _driver.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


class Module:
    """Machine code (cubin or PTX) loaded on the device."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._handle = call("cuModuleLoadData", image)

    def function(self, name: str) -> Function:
        return Function(call("cuModuleGetFunction", self._handle, name.encode()), name)

    def close(self) -> None:
        call("cuModuleUnload", self._handle)


class Device:
    """One GPU and its primary context, current on the thread that opened it until ``close``."""

    def __init__(self, ordinal: int = 0) -> None:
        driver = _load_driver()
        try:
            status = driver.cuInit(0)[0]
        except RuntimeError as err:
            raise NoCuda(f"no CUDA driver: {err}. Run this on a machine with a GPU") from None
        if int(status) != 0:
            raise NoCuda(f"cuInit failed: {status.name}. Run this on a machine with a GPU")
        self._handle = call("cuDeviceGet", ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        self.make_current()

    def make_current(self) -> None:
        """Let the calling thread use the device; whoever opened it can already."""
        call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        """A ``CUdevice_attribute`` by name, for example ``MULTIPROCESSOR_COUNT``."""
        which = getattr(_driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", which, self._handle))

    @property
    def name(self) -> str:
        raw: bytes = call("cuDeviceGetName", 128, self._handle)
        return raw.split(b"\0")[0].decode()

    @property
    def uuid(self) -> str:
        """32 hexadecimal digits, the same after a reboot."""
        return bytes(call("cuDeviceGetUuid", self._handle).bytes).hex()

    @property
    def compute_capability(self) -> tuple[int, int]:
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return major, self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def free_bytes(self) -> int:
        return int(call("cuMemGetInfo")[0])

    @property
    def total_bytes(self) -> int:
        return int(call("cuMemGetInfo")[1])

    def synchronize(self) -> None:
        call("cuCtxSynchronize")

    def close(self) -> None:
        call("cuDevicePrimaryCtxRelease", self._handle)


def allocate(nbytes: int) -> DevicePtr:
    """Uninitialised device memory, aligned to 256 bytes; give it back with `release`."""
    return DevicePtr(int(call("cuMemAlloc", nbytes)))


def release(pointer: DevicePtr) -> None:
    call("cuMemFree", pointer)


def fill_bytes(pointer: DevicePtr, value: int, nbytes: int) -> None:
    """Set every byte to ``value`` and wait for it."""
    call("cuMemsetD8", pointer, value, nbytes)
    _arrive()


def write_device(pointer: DevicePtr, source: bytes | bytearray) -> None:
    """Copy host bytes to the device and wait for it."""
    raw = (ctypes.c_char * len(source)).from_buffer_copy(source)
    write_device_from(pointer, ctypes.addressof(raw), len(source))


def write_device_from(pointer: DevicePtr, address: int, nbytes: int) -> None:
    """Copy host bytes at ``address`` to the device and wait for it."""
    call("cuMemcpyHtoD", pointer, address, nbytes)
    _arrive()


def _arrive() -> None:
    """Wait for what the default stream was given.

    A copy from pageable memory returns when the driver has taken the bytes, not when they are on
    the device, and our streams do not wait for the default one. Beside other work on the same GPU
    a launch was seen to read what had been there before.
    """
    call("cuStreamSynchronize", DEFAULT_STREAM)


def read_device(pointer: DevicePtr, nbytes: int) -> bytearray:
    """Copy ``nbytes`` from the device and wait for it."""
    out = bytearray(nbytes)
    raw = (ctypes.c_ubyte * nbytes).from_buffer(out)
    call("cuMemcpyDtoH", ctypes.addressof(raw), pointer, nbytes)
    return out


def copy_device(target: DevicePtr, source: DevicePtr, nbytes: int, stream: Stream) -> None:
    """Enqueue a copy within the device."""
    call("cuMemcpyDtoDAsync", target, source, nbytes, stream.handle)


def close_all(things: Sequence[Any]) -> None:
    """Close in reverse order of opening."""
    for thing in reversed(things):
        thing.close()


def matrix_map(
    pointer: DevicePtr, shape: tuple[int, int], row_bytes: int, box: tuple[int, int]
) -> ctypes.Array[ctypes.c_uint64]:
    """A ``CUtensorMap``: how a kernel copies boxes of a matrix of 16-bit elements, sm_90 and later.

    shape, box: (rows, columns). Box rows of 128 bytes come with their pieces of 16 swapped, as
    ``CU_TENSOR_MAP_SWIZZLE_128B`` says; what lies outside of the matrix comes as zeros.
    """
    large, small = _driver.cuuint64_t, _driver.cuuint32_t
    made = call(
        "cuTensorMapEncodeTiled",
        _driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        2,
        int(pointer),
        [large(shape[1]), large(shape[0])],
        [large(row_bytes)],
        [small(box[1]), small(box[0])],
        [small(1), small(1)],
        _driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        _driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        _driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(int(made.getPtr()), 128))
