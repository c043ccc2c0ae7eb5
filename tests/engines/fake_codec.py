"""The codec's kernels on the memory of `fake_driver`: launches carried out by their numpy twin.

Launches, weights and scratch lie at the very addresses a GPU would be given. Scratch is NaN when a
stage begins, so what a launch reads before anybody wrote it is heard.
"""

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import StageSpec
from engines.cuda import DevicePtr, Stream
from engines.kernel_stages import Bindable, Kind
from engines.kernels import codec
from engines.kernels.codec import CodecKernels, TurnParams
from engines.kernels.codec_params import Call
from engines.kernels.codec_reference import Memory, run, turned
from tests.engines.fake_driver import bytes_at, later


class HostMemory(Memory):
    """All there is."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def view(self, address: int, shape: tuple[int, ...], dtype: type = np.float32) -> NDArray[Any]:
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        found: NDArray[Any] = bytes_at(address, nbytes).view(dtype).reshape(shape)
        return found


class HostCodec(CodecKernels):
    """Everything but the kernels."""

    def __init__(self, stages: Iterable[StageSpec], device: object, folder: Path) -> None:
        self._turned = set()
        self.overlaps = None
        self.bound: list[str] = []

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        stage, batch = bindable.step.stage, bindable.batch
        self.bound.append(stage.name)
        enqueue = super().bind(bindable)

        def poison() -> None:
            bytes_at(bindable.scratch.memory, codec.scratch_bytes(stage, batch))[:] = 0xFF

        def poisoned() -> None:
            later(bindable.stream, poison)
            enqueue()

        return poisoned

    def launches(self, calls: Iterable[Call], stream: Stream) -> Callable[[], None]:
        listed = list(calls)
        return lambda: later(stream, lambda: run(listed, HostMemory()))

    def turn(self, weight: DevicePtr, turn: TurnParams, memory: DevicePtr, stream: Stream) -> None:
        if weight in self._turned:
            return
        self._turned.add(weight)

        def change() -> None:
            there = HostMemory().view(weight, (turn.inputs * turn.outputs * turn.kernel,))
            ends = (turn.inputs, turn.outputs) if turn.stride else (turn.outputs, turn.inputs)
            there[:] = turned(there.reshape(*ends, turn.kernel).copy(), turn.stride).reshape(-1)

        later(stream, change)

    def close(self) -> None:
        pass


KINDS = {
    name: Kind("codec", HostCodec, kind.scratch_bytes) for name, kind in codec.CODEC_KINDS.items()
}
