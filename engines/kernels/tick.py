"""Launches of `tick.cu`: noise, and rows of state that move or begin anew.

A row table lies on the device, one entry of four 64-bit words per buffer: address of slot 0,
address of its next value (0 if it is written in place), bytes per slot, fill repeated to 8 bytes.
All launches have a fixed shape for a given batch and allocate nothing, so they can be captured.

    gumbel_noise   in   seed, frame   (B,)       int64
                   out  noise         (B, R, K)  float32   `engines.noise` with logf
    rows_back      i/o  current rows 0..B-1 become the next rows
    rows_move      i/o  row of one slot copied to another
    rows_reset     i/o  row of one slot filled
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.cuda import DevicePtr, LaunchShape, Module, Stream
from engines.kernels import nvrtc

SOURCE = Path(__file__).with_name("tick.cu")
THREADS = 256
BLOCKS_PER_ROW = 16
"""Blocks that share one buffer; more only helps buffers of megabytes per slot."""


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a row table. Addresses and bytes as above; fill: 8 bytes."""

    current: int
    next: int
    row_bytes: int
    fill: bytes


@dataclass(frozen=True, slots=True)
class NoiseCall:
    """Addresses and shape of one `gumbel_noise` launch; out is (batch, rows, candidates)."""

    seed: DevicePtr
    frame: DevicePtr
    out: DevicePtr
    batch: int
    rows: int
    candidates: int


class _RowsParams(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class _NoiseParams(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("frame", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("batch", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("candidates", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _SpreadParams(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_uint64),
        ("words", ctypes.c_uint64),
        ("each", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
    )


class TickKernels:
    """The kernels of `tick.cu`, loaded on the current device."""

    def __init__(self, target: str, folder: Path) -> None:
        """target: "sm_90"; folder: where compiled kernels are kept.

        Raises `nvrtc.NoCompiler` if they have to be compiled and cannot be.
        """
        self._module = Module(nvrtc.compile_cached(SOURCE, {}, target, folder))
        self._noise = self._module.function("gumbel_noise")
        self._back = self._module.function("rows_back")
        self._move = self._module.function("rows_move")
        self._reset = self._module.function("rows_reset")
        self._spread = self._module.function("spread_values")

    def noise(self, call: NoiseCall, stream: Stream) -> None:
        threads = call.batch * call.rows * -(-call.candidates // 4)
        params = _NoiseParams(
            call.seed, call.frame, call.out, call.batch, call.rows, call.candidates, 0
        )
        grid = -(-threads // THREADS)
        self._noise.launch(LaunchShape((grid, 1, 1), (THREADS, 1, 1)), params, stream)

    def back(self, table: DevicePtr, rows: int, batch: int, stream: Stream) -> None:
        """Second buffers become the state of slots 0..batch-1. rows: entries of the table."""
        if rows:
            self._back.launch(_rows_shape(rows), _RowsParams(table, batch, 0), stream)

    def move(self, table: DevicePtr, rows: int, source: int, target: int, stream: Stream) -> None:
        if rows:
            self._move.launch(_rows_shape(rows), _RowsParams(table, source, target), stream)

    def reset(self, table: DevicePtr, rows: int, slot: int, stream: Stream) -> None:
        if rows:
            self._reset.launch(_rows_shape(rows), _RowsParams(table, slot, 0), stream)

    def spread(self, target: DevicePtr, nbytes: int, itemsize: int, stream: Stream) -> None:
        """Fill with values over -1..1, float32 or bfloat16; of itemsize 1, with any codes."""
        params = _SpreadParams(target, nbytes // 4, 4 // itemsize, int(target) & 0xFFFFFFFF)
        self._spread.launch(LaunchShape((512, 1, 1), (THREADS, 1, 1)), params, stream)

    def close(self) -> None:
        self._module.close()


def table_bytes(rows: Sequence[Row]) -> bytes:
    """A row table as the kernels read it."""
    return b"".join(struct.pack("<QQQ8s", r.current, r.next, r.row_bytes, r.fill) for r in rows)


def fill_bytes(value: float, storage: type[np.generic], is_bfloat16: bool = False) -> bytes:
    """``value`` as an element, repeated to 8 bytes. bfloat16: the upper half of a float32."""
    if is_bfloat16:
        element = np.float32(value).tobytes()[2:]
    else:
        element = np.array(value).astype(storage).tobytes()
    return element * (8 // len(element))


def _rows_shape(rows: int) -> LaunchShape:
    return LaunchShape((rows, BLOCKS_PER_ROW, 1), (THREADS, 1, 1))
