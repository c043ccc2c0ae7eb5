"""Enough of a CUDA driver, on host memory, to run `CudaExecutor` eagerly without a GPU.

Device memory is numpy arrays, kernels are their numpy twins, and ONNX Runtime runs on the CPU. What
a stream is given happens as late as a driver may leave it (`fake_streams`): copies, fills, kernels,
runs of graphs and plans. Copies from page-locked memory read it then; other memory is read, or
filled, by the call. Pages without memory read as zeros, because the toy's attention reads all of a
ring. Everything else that touches a page must find it mapped, since it was given to its stream;
mapping a page that was written to, and freeing memory while anything is under way, are errors. What
this cannot show is everything else about graphs, streams and speed; tests marked `gpu` do.
"""

import ctypes
import os
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines import (
    cuda,
    cuda_executor,
    cuda_sessions,
    gpu,
    kernel_stages,
    ort_executor,
    ring_launch,
)
from engines.bundle import StageSpec
from engines.kernels import ring_reference
from engines.kernels.ring_attention import CacheType, RingParams, RingShape
from engines.kernels.ring_reference import STORED_DTYPES
from engines.kernels.tick import NoiseCall
from engines.noise import gumbel
from tests.engines.fake_streams import LateStreams, Span, Work

PAGE = 4096
TOTAL_BYTES = 1 << 32


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NOT_READY = 600


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The memory itself, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))


def later(stream: cuda.Stream, work: Work, *spans: Span) -> None:
    """Give ``work`` to a stream of the fake driver that is installed."""
    cuda.driver().streams.give(stream.handle, work, *spans)


class FakeDriver:
    """The functions `engines` calls, each returning (status, values...)."""

    CUmemAllocationProp = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAccessDesc = staticmethod(SimpleNamespace)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=2,
    )

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self.total_bytes = total_bytes
        self.held: dict[int, NDArray[np.uint8]] = {}
        self.pages = 0
        self.version = 13000
        self.gpus = 2
        self.foreign_bytes = 0
        """Taken by another process."""
        self.streams = LateStreams()
        self._pinned: dict[int, int] = {}
        """Page-locked memory: address -> bytes."""
        self._reserved: dict[int, int] = {}
        """Addresses that need pages: first -> bytes."""
        self._mapped: dict[int, int] = {}
        """Address of a page with memory -> what streams had been given when it got it."""

    def _take(self, nbytes: int, value: int) -> tuple[Any, ...]:
        array = np.full(nbytes + PAGE, value, np.uint8)
        address = -(-array.ctypes.data // PAGE) * PAGE
        self.held[address] = array
        return Status.CUDA_SUCCESS, address

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        return self._take(nbytes, 0xFF)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        status, address = self._take(nbytes, 0xFF)
        self._pinned[address] = nbytes
        return status, address

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[Any, ...]:
        status, address = self._take(nbytes, 0)
        self._reserved[address] = nbytes
        return status, address

    def _give(self, address: int, *_: int) -> tuple[Any, ...]:
        assert self.streams.is_idle, "memory is given back while work is under way"
        del self.held[int(address)]
        for kind in (self._pinned, self._reserved):
            kind.pop(int(address), None)
        return (Status.CUDA_SUCCESS,)

    cuMemFree = cuMemFreeHost = cuMemAddressFree = _give

    def cuMemCreate(self, nbytes: int, *_: Any) -> tuple[Any, ...]:
        if self.free_bytes < PAGE:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.pages += 1
        return Status.CUDA_SUCCESS, object()

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        self.pages -= 1
        return (Status.CUDA_SUCCESS,)

    def cuMemMap(self, address: int, nbytes: int, *_: Any) -> tuple[Any, ...]:
        page = bytes_at(address, nbytes)
        assert not page.any(), "something was written where no page was mapped"
        page[:] = 0xAA
        self._mapped[address] = self.streams.given
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        self.streams.touch(Span(address, nbytes, is_written=True))
        bytes_at(address, nbytes)[:] = 0
        del self._mapped[address]
        return (Status.CUDA_SUCCESS,)

    def touch(self, *spans: Span) -> None:
        """What runs now uses this: its pages must have been there when it was given."""
        for span in spans:
            self.streams.touch(span)
            for first, length in self._reserved.items():
                if not first <= span.address < first + length:
                    continue
                for page in range(span.address - (span.address - first) % PAGE, span.end, PAGE):
                    since = self._mapped.get(page)
                    assert since is not None, f"{page - first:#x} has no page, and is touched"
                    assert since < self.streams.doing, f"{page - first:#x} got its page too late"

    def cuMemSetAccess(self, *_: Any) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, *_: Any) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, PAGE

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:
        return self.cuMemsetD8Async(address, value, nbytes, cuda.DEFAULT_STREAM)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, at: int) -> tuple[Any, ...]:
        span = Span(address, nbytes, True)

        def fill() -> None:
            self.touch(span)
            bytes_at(address, nbytes)[:] = value

        self.streams.give(at, fill, span)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        return self.cuMemcpyHtoDAsync(target, source, nbytes, cuda.DEFAULT_STREAM)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        return self.cuMemcpyDtoHAsync(target, source, nbytes, cuda.DEFAULT_STREAM)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, at: int) -> tuple[Any, ...]:
        if self._is_pinned(source):
            self._give_copy(target, source, nbytes, at)
            return (Status.CUDA_SUCCESS,)
        staged, span = ctypes.string_at(source, nbytes), Span(target, nbytes, True)

        def copy() -> None:
            self.touch(span)
            ctypes.memmove(target, staged, nbytes)

        self.streams.give(at, copy, span)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, at: int) -> tuple[Any, ...]:
        self._give_copy(target, source, nbytes, at)
        if not self._is_pinned(target):
            self.streams.wait(at)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, at: int) -> tuple[Any, ...]:
        self._give_copy(target, source, nbytes, at)
        return (Status.CUDA_SUCCESS,)

    def _give_copy(self, target: int, source: int, nbytes: int, at: int) -> None:
        spans = Span(target, nbytes, True), Span(source, nbytes)

        def copy() -> None:
            self.touch(*spans)
            ctypes.memmove(target, source, nbytes)

        self.streams.give(at, copy, *spans)

    def _is_pinned(self, address: int) -> bool:
        return any(first <= address < first + n for first, n in self._pinned.items())

    def cuStreamCreate(self, _: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.streams.create()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.streams.wait(stream)
        return (Status.CUDA_SUCCESS,)

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        is_done = self.streams.is_done(stream)
        return (Status.CUDA_SUCCESS if is_done else Status.CUDA_ERROR_NOT_READY,)

    def cuStreamDestroy(self, _: int) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.version

    def cuInit(self, _: int) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if ordinal >= self.gpus:
            return Status.CUDA_ERROR_INVALID_DEVICE, None
        return Status.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, device

    def cuCtxSetCurrent(self, *_: int) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    cuDevicePrimaryCtxRelease = cuCtxSetCurrent

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self.streams.wait_for_all()
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGetName(self, _: int, device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, f"Fake GPU {device}".encode()

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        unique = f"{os.getpid():08d}{id(self) % 10**6:06d}{device:02d}".encode()
        return Status.CUDA_SUCCESS, SimpleNamespace(bytes=unique)

    def cuDeviceGetAttribute(self, name: int, _: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, {0: 9, 1: 0}.get(name, 4)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.free_bytes, self.total_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.pages * PAGE - self.foreign_bytes


class FakeDevice:
    """What `open_device` returns."""

    name, compute_capability = "Fake GPU", (9, 0)

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.threads = [threading.get_ident()]
        self.uuid = f"fake-{os.getpid()}-{id(driver)}"

    @property
    def total_bytes(self) -> int:
        return self.driver.total_bytes

    @property
    def free_bytes(self) -> int:
        return self.driver.free_bytes

    def make_current(self) -> None:
        self.threads.append(threading.get_ident())

    def synchronize(self) -> None:
        self.driver.streams.wait_for_all()

    def close(self) -> None:
        pass


class HostSession:
    """A graph on a stream of ours: its runs are under way when they return, unless told to wait."""

    def __init__(self, session: ort.InferenceSession, stream: cuda.Stream) -> None:
        self._session, self._stream = session, stream

    def io_binding(self) -> ort.IOBinding:
        return self._session.io_binding()

    def run_with_iobinding(
        self, binding: ort.IOBinding, options: ort.RunOptions | None = None
    ) -> None:
        later(self._stream, lambda: self._session.run_with_iobinding(binding))
        waits_not = "disable_synchronize_execution_providers"
        if options is None or options.get_run_config_entry(waits_not) != "1":
            self._stream.synchronize()


class HostKernels:
    """The numpy twins of `TickKernels`."""

    def __init__(self, target: str, folder: object) -> None:
        assert target == "sm_90"

    def noise(self, call: NoiseCall, stream: cuda.Stream) -> None:
        def draw() -> None:
            out = np.empty((call.batch, call.rows, call.candidates), np.float32)
            seed, frame = (
                bytes_at(at, call.batch * 8).view(np.int64) for at in (call.seed, call.frame)
            )
            gumbel(seed, frame, out)
            bytes_at(call.out, out.nbytes)[:] = out.reshape(-1).view(np.uint8)

        later(stream, draw)

    def back(self, table: int, rows: int, batch: int, stream: cuda.Stream) -> None:
        def copy() -> None:
            for current, following, nbytes, _ in self._rows(table, rows):
                ctypes.memmove(int(current), int(following), int(nbytes) * batch)

        later(stream, copy)

    def move(self, table: int, rows: int, source: int, target: int, stream: cuda.Stream) -> None:
        def copy() -> None:
            for current, _, nbytes, _ in self._rows(table, rows):
                ctypes.memmove(
                    int(current) + target * int(nbytes),
                    int(current) + source * int(nbytes),
                    int(nbytes),
                )

        later(stream, copy)

    def reset(self, table: int, rows: int, slot: int, stream: cuda.Stream) -> None:
        def fill() -> None:
            for current, _, nbytes, value in self._rows(table, rows):
                row = bytes_at(int(current) + slot * int(nbytes), int(nbytes))
                raw = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)
                row[:] = np.resize(raw, row.size)

        later(stream, fill)

    def spread(self, target: int, nbytes: int, itemsize: int, stream: cuda.Stream) -> None:
        span = Span(target, nbytes, True)

        def fill() -> None:
            cuda.driver().touch(span)
            bytes_at(target, nbytes)[:] = 0x3C

        later(stream, fill, span)

    def close(self) -> None:
        pass

    def _rows(self, table: int, rows: int) -> NDArray[np.uint64]:
        return bytes_at(table, rows * 32).view(np.uint64).reshape(rows, 4)


class HostRings:
    """The numpy twin of `RingKernels`, with what its ABI asks of addresses."""

    def __init__(self, shape: RingShape, device: object, folder: object) -> None:
        self.shape = shape
        self.io = np.float32 if shape.cache is CacheType.FLOAT32 else np.uint16

    def launch(self, params: RingParams, stream: cuda.Stream) -> None:
        copied = RingParams.from_buffer_copy(params)
        later(stream, lambda: self._run(copied))

    def _run(self, params: RingParams) -> None:
        shape, batch = self.shape, params.batch
        pointers = "q k_new v_new out k_cache v_cache positions slots partials arrivals".split()
        pointers += ["k_scale", "v_scale"] if shape.cache.is_scaled else []
        odd = [name for name in pointers if not getattr(params, name)]
        odd += [field[0] for field in RingParams._fields_ if _misaligned(params, *field[:2])]
        assert odd == [], odd
        assert not bytes_at(params.arrivals, shape.arrivals_bytes(batch)).any()
        bytes_at(params.partials, shape.partials_bytes(batch))[:] = 0xFF
        slots = bytes_at(params.slots, 4 * batch).view(np.int32)
        positions = bytes_at(params.positions, 8 * batch).view(np.int64)
        frequency = None
        if params.rope_frequency:
            frequency = bytes_at(params.rope_frequency, shape.head_dim * 2).view(np.float32)
        rows = np.arange(shape.capacity)
        assert params.piece_shift >= 30 or 1 << params.piece_shift >= min(64, shape.capacity)
        lie = rows * params.row_stride_bytes + (rows >> params.piece_shift) * params.piece_gap_bytes
        places = slots.copy()
        slots = np.arange(batch)  # in the copies made here
        starts = (places[:, None] * params.slot_stride_bytes + lie).reshape(-1)
        for b, position in enumerate(positions):
            valid = min(int(position) + shape.rows_per_step, shape.capacity)
            for start in starts[b * shape.capacity :][:valid].tolist():
                for at in (params.k_cache, params.v_cache):
                    cuda.driver().touch(Span(at + start, shape.row_bytes, is_written=True))
        k_cache, v_cache = (
            np.stack([bytes_at(at + int(start), shape.row_bytes) for start in starts])
            .view(STORED_DTYPES[shape.cache])
            .reshape(-1, shape.kv_heads, shape.head_dim)
            for at in (params.k_cache, params.v_cache)
        )
        k_scale, v_scale = (
            bytes_at(at, 4 * shape.kv_heads).view(np.float32) if at else np.ones(1, np.float32)
            for at in (params.k_scale, params.v_scale)
        )
        k_new = self._rows(params.k_new, params.k_stride, shape.kv_heads, batch)
        v_new = self._rows(params.v_new, params.v_stride, shape.kv_heads, batch)
        q = self._rows(params.q, params.q_stride, shape.query_heads, batch)
        held = (positions, slots, k_cache, v_cache, k_scale, v_scale, frequency)
        ring_reference.write(shape, k_new, v_new, *held)
        for at, cache in ((params.k_cache, k_cache), (params.v_cache, v_cache)):
            for b, position in enumerate(positions):
                for row in ring_reference.new_rows(shape, int(position)):
                    index = b * shape.capacity + row
                    there = bytes_at(at + int(starts[index]), shape.row_bytes)
                    there[:] = np.ascontiguousarray(cache[index]).reshape(-1).view("u1")
        found = ring_reference.attend(shape, q, *held).astype(np.float32)
        stored = found if self.io is np.float32 else ring_reference.bf16_bits(found)
        assert params.out_stride == shape.query_heads * shape.head_dim
        bytes_at(params.out, stored.nbytes)[:] = np.ascontiguousarray(stored).reshape(-1).view("u1")

    def close(self) -> None:
        pass

    def _rows(self, at: int, stride: int, heads: int, batch: int) -> NDArray[np.float32]:
        """(B, P, heads, D) float32 of rows that lie ``stride`` elements apart."""
        rows, width = batch * self.shape.rows_per_step, heads * self.shape.head_dim
        flat = bytes_at(at, ((rows - 1) * stride + width) * self.shape.cache.io_bytes).view(self.io)
        taken = np.stack([flat[row * stride : row * stride + width] for row in range(rows)])
        values = taken if self.io is np.float32 else ring_reference.bf16_values(taken)
        return values.reshape(batch, self.shape.rows_per_step, heads, self.shape.head_dim)


def _misaligned(params: RingParams, name: str, kind: object) -> bool:
    """True unless pointers and strides are multiples of 16 bytes, as the kernel loads them."""
    if kind is ctypes.c_void_p:
        return bool((getattr(params, name) or 0) % 16)
    if not name.endswith(("_stride", "_bytes")):
        return False
    size = 1 if name.endswith("_bytes") else 2
    return bool(getattr(params, name) * size % 16)


def install(
    monkeypatch: pytest.MonkeyPatch, total_bytes: int = TOTAL_BYTES, *, real_opening: bool = False
) -> FakeDriver:
    """Make `CudaExecutor` run on this file until the test ends; use ``graphs=False``.

    real_opening: the device is opened by `engines.gpu`, as on a machine that has one.
    """
    driver = FakeDriver(total_bytes)

    def load(sessions: cuda_sessions.CudaSessions, stage: StageSpec) -> object:
        return HostSession(ort_executor.load_stage(sessions.bundle, stage), sessions._stream)

    monkeypatch.setattr(cuda, "_driver", driver)
    monkeypatch.setattr(cuda_sessions, "MEMORY", "cpu")
    monkeypatch.setattr(gpu, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(cuda_executor, "KEEP_FREE_BYTES", 0)
    if real_opening:
        monkeypatch.setattr(cuda_executor, "open_device", gpu.open_gpu)
    else:
        monkeypatch.setattr(cuda_executor, "open_device", lambda ordinal: FakeDevice(driver))
    monkeypatch.setattr(cuda_executor, "TickKernels", HostKernels)
    monkeypatch.setattr(ring_launch, "load_kernels", HostRings)
    from tests.engines import fake_kernels  # it reads this file's memory

    monkeypatch.setattr(kernel_stages, "kinds", lambda: fake_kernels.KINDS)
    monkeypatch.setattr(cuda_sessions.CudaSessions, "load", load)
    return driver
