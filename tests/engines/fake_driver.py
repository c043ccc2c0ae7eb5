"""Enough of a CUDA driver, on host memory, to run `CudaExecutor` eagerly without a GPU.

Device memory is numpy arrays, kernels are their numpy twins, and ONNX Runtime runs on the CPU. What
a stream is given happens at once. What the default stream is given happens as late as a driver
may leave it: when somebody waits for that stream, or reads on it. Pages without memory read as
zeros, because its attention reads all of a ring; mapping one that was written to is an error. What
this cannot show is everything else about graphs, streams and speed; tests marked `gpu` do.
"""

import ctypes
import os
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
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

PAGE = 4096
TOTAL_BYTES = 1 << 32


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The memory itself, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))


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
        self._default: list[tuple[int, bytes]] = []
        """(address, bytes) on their way there."""

    def _take(self, nbytes: int, value: int) -> tuple[Any, ...]:
        array = np.full(nbytes + PAGE, value, np.uint8)
        address = -(-array.ctypes.data // PAGE) * PAGE
        self.held[address] = array
        return Status.CUDA_SUCCESS, address

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        return self._take(nbytes, 0xFF)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        return self._take(nbytes, 0xFF)

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[Any, ...]:
        return self._take(nbytes, 0)

    def _give(self, address: int, *_: int) -> tuple[Any, ...]:
        del self.held[int(address)]
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
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        bytes_at(address, nbytes)[:] = 0
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, *_: Any) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, *_: Any) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, PAGE

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple[Any, ...]:
        self._default.append((address, bytes([value]) * nbytes))
        return (Status.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, _: Any) -> tuple[Any, ...]:
        bytes_at(address, nbytes)[:] = value
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        self._default.append((target, ctypes.string_at(source, nbytes)))
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> tuple[Any, ...]:
        self._arrive()
        return self._copy(target, source, nbytes)

    def _arrive(self) -> None:
        for address, raw in self._default:
            ctypes.memmove(int(address), raw, len(raw))
        self._default.clear()

    def _copy(self, target: int, source: int, nbytes: int, *_: Any) -> tuple[Any, ...]:
        ctypes.memmove(int(target), int(source), nbytes)
        return (Status.CUDA_SUCCESS,)

    cuMemcpyDtoDAsync = cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = _copy

    def cuStreamCreate(self, _: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 1

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        if stream == cuda.DEFAULT_STREAM:
            self._arrive()
        return (Status.CUDA_SUCCESS,)

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
        self._arrive()
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
        pass

    def close(self) -> None:
        pass


class HostKernels:
    """The numpy twins of `TickKernels`."""

    def __init__(self, target: str, folder: object) -> None:
        assert target == "sm_90"

    def noise(self, call: NoiseCall, stream: object) -> None:
        shape = (call.batch, call.rows, call.candidates)
        out = np.empty(shape, np.float32)
        seed, frame = (
            bytes_at(at, call.batch * 8).view(np.int64) for at in (call.seed, call.frame)
        )
        gumbel(seed, frame, out)
        bytes_at(call.out, out.nbytes)[:] = out.reshape(-1).view(np.uint8)

    def back(self, table: int, rows: int, batch: int, stream: object) -> None:
        for current, following, nbytes, _ in self._rows(table, rows):
            ctypes.memmove(int(current), int(following), int(nbytes) * batch)

    def move(self, table: int, rows: int, source: int, target: int, stream: object) -> None:
        for current, _, nbytes, _ in self._rows(table, rows):
            ctypes.memmove(
                int(current) + target * int(nbytes),
                int(current) + source * int(nbytes),
                int(nbytes),
            )

    def reset(self, table: int, rows: int, slot: int, stream: object) -> None:
        for current, _, nbytes, fill in self._rows(table, rows):
            row = bytes_at(int(current) + slot * int(nbytes), int(nbytes))
            row[:] = np.resize(np.frombuffer(int(fill).to_bytes(8, "little"), np.uint8), row.size)

    def spread(self, target: int, nbytes: int, itemsize: int, stream: object) -> None:
        bytes_at(target, nbytes)[:] = 0x3C

    def close(self) -> None:
        pass

    def _rows(self, table: int, rows: int) -> NDArray[np.uint64]:
        return bytes_at(table, rows * 32).view(np.uint64).reshape(rows, 4)


class HostRings:
    """The numpy twin of `RingKernels`, with what its ABI asks of addresses."""

    def __init__(self, shape: RingShape, device: object, folder: object) -> None:
        self.shape = shape
        self.io = np.float32 if shape.cache is CacheType.FLOAT32 else np.uint16

    def launch(self, params: RingParams, stream: object) -> None:
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
        return ort_executor.load_stage(sessions.bundle, stage)

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
