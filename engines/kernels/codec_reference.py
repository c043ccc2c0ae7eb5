"""What every launch of the codec's kernels computes, in numpy over one stretch of memory.

`Memory` stands for the device: addresses are bytes from its base. `run` carries out launches as
codec_net.py lists them, in float64 where sums are long, rounding what is written to float32. So a
plan can be checked against the model on any machine, and a kernel against its launch on a GPU.

Not here: the order in which kernels sum.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels.codec_gemm import GemmParams
from engines.kernels.codec_params import (
    BookParams,
    Call,
    KeptWindow,
    RowsParams,
    SoundParams,
    WindowParams,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Memory:
    """A device's memory as bytes; unwritten floats are NaN."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = base
        self.raw = np.full(nbytes, 0xFF, np.uint8)
        self._next = base

    def take(self, nbytes: int) -> int:
        """Room that nobody else has, aligned as the device's allocator does it."""
        address = self._next
        self._next += -(-nbytes // 256) * 256
        assert self._next <= self.base + len(self.raw), "the memory is too small"
        return address

    def put(self, values: NDArray[Any]) -> int:
        """A copy of ``values``; returns where."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        address = self.take(len(raw))
        self.raw[address - self.base : address - self.base + len(raw)] = raw
        return address

    def view(self, address: int, shape: tuple[int, ...], dtype: type = np.float32) -> NDArray[Any]:
        """The array at ``address``; writing to it writes the memory."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        first = address - self.base
        assert 0 <= first <= len(self.raw) - nbytes, (address, shape)
        found: NDArray[Any] = self.raw[first : first + nbytes].view(dtype).reshape(shape)
        return found

    def strided(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Floats:
        """float32 with strides in numbers; overlapping windows are fine to read."""
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self.view(address, (last + 1,))
        found: Floats = np.lib.stride_tricks.as_strided(flat, shape, [4 * s for s in strides])
        return found


def run(calls: Iterable[Call], memory: Memory) -> None:
    """Carry out launches one after the other."""
    for call in calls:
        _of(call.kernel)(memory, call)


def written(memory: Memory, call: Call) -> list[tuple[int, int]]:
    """(address, bytes) that a launch of the products or rows writes results to, for comparing."""
    p: Any = call.params
    if isinstance(p, GemmParams):
        results = [(p.out, p.out_session, p.out_row), (p.out_elu, p.elu_session, p.elu_row)]
        batch = p.total_rows // p.rows
        rows = p.rows - (1 if p.tail else 0)
        found = [
            (at + b * session * 4, ((rows - 1) * row + p.n) * 4)
            for at, session, row in results
            if at
            for b in range(batch)
        ]
        return found + ([(p.tail_next, batch * p.n * 4)] if p.tail else [])
    return []


def _of(kernel: str) -> Callable[[Memory, Call], None]:
    if kernel.startswith(("codec_wide", "codec_deep")):
        return _gemm
    return {
        "codec_windows_in": _windows_in,
        "codec_windows_out": _windows_out,
        "codec_sound_in": _sound_in,
        "codec_sound_out": _sound_out,
        "codec_meet": _meet,
        "codec_rows": _rows,
        "codec_upsample": _upsample,
        "codec_level": _level,
        "codec_gather": _gather,
    }[kernel]


def elu(x: Doubles) -> Doubles:
    found: Doubles = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
    return found


def gelu(x: Doubles) -> Doubles:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    found: Doubles = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    return found


def _gemm(memory: Memory, call: Call) -> None:
    p: Any = call.params
    assert isinstance(p, GemmParams), call
    batch = p.total_rows // p.rows
    a = memory.strided(p.a, (batch, p.rows, p.k), (p.a_session, p.a_row, 1)).astype(np.float64)
    w = memory.view(p.w, (p.k, p.n)).astype(np.float64)
    if p.parts:
        parts = call.shape.grid[2]
        out = memory.view(p.parts, (parts, batch * p.rows, p.n))
        step = p.part
        for part in range(parts):
            k = slice(part * step, min(p.k, (part + 1) * step))
            out[part] = (a[:, :, k] @ w[k]).reshape(-1, p.n)
        return
    _emit(memory, p, a @ w)


def _meet(memory: Memory, call: Call) -> None:
    p: Any = call.params
    parts = memory.view(p.parts, (p.parts_count, p.total_rows // p.rows, p.rows, p.n))
    _emit(memory, p, parts.astype(np.float64).sum(axis=0))


def _emit(memory: Memory, p: Any, y: Doubles) -> None:
    batch, rows = p.total_rows // p.rows, p.rows
    if p.tail:
        rows -= 1
        shape = (batch, p.bias_n, p.stride)
        tail, after = memory.view(p.tail, shape), memory.view(p.tail_next, shape)
        y[:, 0] += tail.transpose(0, 2, 1).reshape(batch, p.n)
        made = y[:, p.steps].reshape(batch, p.stride, p.bias_n).transpose(0, 2, 1)
        live = _live(memory, p.live, batch)
        after[...] = np.where(live[:, None, None], made, tail)
        y = y[:, :rows]
    if p.bias:
        y = y + np.tile(memory.view(p.bias, (p.bias_n,)), p.n // p.bias_n)
    shape = (batch, rows, p.n)
    if p.add:
        y = y + memory.strided(p.add, shape, (p.add_session, p.add_row, 1))
    if p.gelu:
        y = gelu(y)
    if p.out:
        memory.strided(p.out, shape, (p.out_session, p.out_row, 1))[...] = y
    if p.out_elu:
        memory.strided(p.out_elu, shape, (p.elu_session, p.elu_row, 1))[...] = elu(y)


def _windows_in(memory: Memory, call: Call) -> None:
    for window, batch in _found(call):
        c, rows = window.channels, window.rows
        front = memory.strided(window.buffer, (batch, rows, c), (window.session, c, 1))
        front[...] = (
            memory.view(window.current, (batch, c, rows)).transpose(0, 2, 1)
            if window.current
            else 0
        )


def _windows_out(memory: Memory, call: Call) -> None:
    p: Any = call.params
    batch = call.shape.grid[1]
    live = _live(memory, p.live, batch)
    for window, _ in _found(call):
        c, rows = window.channels, window.rows
        at = window.buffer + window.tail_row * c * 4
        tail = memory.strided(at, (batch, rows, c), (window.session, c, 1)).transpose(0, 2, 1)
        before = memory.view(window.current, (batch, c, rows))
        after = memory.view(window.next, (batch, c, rows))
        after[...] = np.where(live[:, None, None], tail, before)
    if p.position:
        position = memory.view(p.position, (batch,), np.int64)
        memory.view(p.position_next, (batch,), np.int64)[:] = position + np.where(
            live, p.advance, 0
        )


def _found(call: Call) -> Iterable[tuple[KeptWindow, int]]:
    assert isinstance(call.params, WindowParams), call
    count, batch, _ = call.shape.grid
    windows: Any = call.params.windows
    return [(windows[i], batch) for i in range(count)]


def _sound_in(memory: Memory, call: Call) -> None:
    p: Any = call.params
    assert isinstance(p, SoundParams), call
    batch, before = call.shape.grid[1], p.kernel - 1
    kept = memory.view(p.kept, (batch, before))
    joined = np.concatenate([kept, memory.view(p.sound, (batch, p.steps))], axis=1)
    memory.view(p.kept_next, (batch, before))[...] = joined[:, p.steps :]
    windows = np.lib.stride_tricks.sliding_window_view(joined, p.kernel, axis=1)
    w = memory.view(p.w, (p.kernel, p.channels)).astype(np.float64)
    y = windows.astype(np.float64) @ w + memory.view(p.bias, (p.channels,))
    memory.view(p.out, y.shape)[...] = y
    strides = (p.elu_session, p.channels, 1)
    memory.strided(p.out_elu, y.shape, strides)[...] = elu(y)


def _sound_out(memory: Memory, call: Call) -> None:
    p: Any = call.params
    batch = call.shape.grid[1]
    shape = (batch, p.steps, p.kernel * p.channels)
    x = memory.strided(p.sound, shape, (p.elu_session, p.channels, 1)).astype(np.float64)
    y = x @ memory.view(p.w, (p.kernel * p.channels,)).astype(np.float64)
    y += memory.view(p.bias, (1,))
    live = _live(memory, p.live, batch)
    memory.view(p.out, (batch, p.steps))[...] = np.where(live[:, None], y, 0)


def _rows(memory: Memory, call: Call) -> None:
    p: Any = call.params
    assert isinstance(p, RowsParams), call
    c, batch = p.channels, p.total_rows // p.steps
    x = memory.view(p.parts, (p.count, p.total_rows, c)).astype(np.float64).sum(axis=0)
    if p.bias:
        x += memory.view(p.bias, (c,))
    if p.scale:
        x *= memory.view(p.scale, (c,))
    if p.add:
        x += memory.view(p.add, (p.total_rows, c))
    shape, strides = (batch, p.steps, c), (p.x_session, c, 1)
    memory.strided(p.x, shape, strides)[...] = x.reshape(shape)
    if p.kept:
        wide = x.reshape(shape)
        first = memory.view(p.position, (batch,), np.int64) == 0
        kept = memory.view(p.kept, (batch, c, p.steps)).transpose(0, 2, 1)
        front = np.where(first[:, None, None], wide[:, :1], kept)
        memory.strided(p.front, shape, strides)[...] = front
        memory.view(p.kept_next, (batch, c, p.steps))[...] = wide.transpose(0, 2, 1)
    if p.position:
        position = memory.view(p.position, (batch,), np.int64)
        memory.view(p.position_next, (batch,), np.int64)[:] = position + p.steps
    _norm(memory, p, x)


def _upsample(memory: Memory, call: Call) -> None:
    p: Any = call.params
    c, batch = p.channels, p.total_rows // p.steps
    latent = memory.view(p.parts, (p.count, batch, c)).astype(np.float64).sum(axis=0)
    w = memory.view(p.w, (c, 2, p.steps))
    made = latent[:, :, None, None] * w
    kept = memory.view(p.kept, (batch, c, p.steps))
    live = _live(memory, p.live, batch)
    x = (made[:, :, 0] + kept).transpose(0, 2, 1)
    memory.view(p.kept_next, kept.shape)[...] = np.where(live[:, None, None], made[:, :, 1], kept)
    memory.strided(p.x, x.shape, (p.x_session, c, 1))[...] = x
    _norm(memory, p, x.reshape(-1, c))


def _norm(memory: Memory, p: Any, x: Doubles) -> None:
    if not p.normed:
        return
    c = p.channels
    x = x.astype(np.float32).astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + p.eps)
    gain, shift = memory.view(p.gain, (c,)), memory.view(p.shift, (c,))
    memory.view(p.normed, x.shape)[...] = scaled * gain + shift


def _level(memory: Memory, call: Call) -> None:
    p: Any = call.params
    assert isinstance(p, BookParams), call
    left = memory.view(p.left, (p.sessions, 2, p.features))
    codes = memory.view(p.codes, (p.sessions, p.levels), np.int64)
    levels = [0, p.level] if call.shape.grid[1] == 2 else [p.level]
    for level in levels:
        rest = left[:, min(level, 1)]
        book = memory.view(p.books[level], (p.features, p.bins))
        squared = memory.view(p.squared[level], (p.bins,))
        distance = squared - 2 * (rest.astype(np.float64) @ book.astype(np.float64))
        codes[:, level] = np.where(np.isnan(distance), np.inf, distance).argmin(axis=1)
        if 0 < level < p.levels - 1:
            rest -= book[:, codes[:, level]].T


def _gather(memory: Memory, call: Call) -> None:
    p: Any = call.params
    left = memory.view(p.left, (p.sessions, 2, p.features))
    codes = memory.view(p.codes, (p.sessions, p.levels), np.int64).clip(0, p.bins - 1)
    rows = [
        memory.view(p.books[level], (p.features, p.bins))[:, codes[:, level]].T
        for level in range(p.levels)
    ]
    left[:, 0] = rows[0]
    left[:, 1] = np.sum(rows[1:], axis=0, dtype=np.float32)


def _live(memory: Memory, address: int, batch: int) -> NDArray[np.bool_]:
    if not address:
        return np.ones(batch, np.bool_)
    found: NDArray[np.bool_] = memory.view(address, (batch,), np.bool_)
    return found


def turned(weight: Floats, stride: int = 0) -> Floats:
    """A matrix as products want it; stride: of a transposed convolution, else 0."""
    if stride:
        inputs, outputs, _ = weight.shape
        taps = weight.reshape(inputs, outputs, 2, stride)[:, :, ::-1]  # the step before first
        return np.ascontiguousarray(taps.transpose(2, 0, 3, 1)).reshape(2 * inputs, -1)
    wide = weight.reshape(*weight.shape[:2], -1)
    return np.ascontiguousarray(wide.transpose(2, 1, 0)).reshape(-1, wide.shape[0])
