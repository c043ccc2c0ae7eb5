"""The codec's kernels on a GPU: loaded once, weights turned once, launches bound per batch.

Matrices come from the bundle as the checkpoint has them; before the first tick each is turned, in
place, into the (k, n) that products read. Every launch may begin before the one in front of it has
ended (it reads nothing but weights until then), which is most of the time of a tick at one session.

Not here: which launches (codec_net.py), what they compute (codec.cu), when stages use kernels of
ours (kernel_stages.py).
"""

import ctypes
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

from engines import cuda
from engines.bundle import StageSpec
from engines.cuda import Device, DevicePtr, Function, LaunchShape, Module, Stream
from engines.kernel_stages import Bindable, Kind
from engines.kernels import nvrtc
from engines.kernels.codec_gemm import DEEP
from engines.kernels.codec_kinds import KINDS, CodecShape, decoder_convs
from engines.kernels.codec_net import Tick, plan_stage
from engines.kernels.codec_params import Call

SOURCE = Path(__file__).with_name("codec.cu")
SHARED_BYTES = {f"codec_{blocks.name}": blocks.shared_bytes for blocks in DEEP}
MOST_EARLY_THREADS = 40_960
"""Of a launch that begins before the one in front of it has ended: a fifth of a large GPU."""
TURN_BLOCKS, TURN_THREADS = 512, 256


class TurnParams(ctypes.Structure):
    """`TurnParams` of codec.cu."""

    _fields_ = [
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        *[(name, ctypes.c_int) for name in "inputs outputs kernel stride".split()],
    ]


class CodecKernels:
    """`kernel_stages.Family` of the kinds in codec_kinds.py."""

    def __init__(self, image: bytes) -> None:
        self._module = Module(image)
        self._functions: dict[str, Function] = {}
        self._turned: set[DevicePtr] = set()
        self.overlaps: bool | None = None
        """Whether launches begin early; None: where it pays."""

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        stage, stream = bindable.step.stage, bindable.stream
        kernel = stage.kernel
        assert kernel is not None, stage.name
        shape = CodecShape.of_numbers(kernel.numbers)
        scratch = bindable.scratch
        for role, weight in kernel.weights.items():
            turn = turn_of(role, weight.shape, kernel.kind, shape)
            if turn is not None:
                self.turn(bindable.weights[role], turn, scratch.memory, stream)
        tick = Tick(shape, bindable.batch, bindable.weights, scratch.memory, scratch.counters)
        ins, outs = (
            [bindable.address(bound.buffer) for bound in side]
            for side in (bindable.step.inputs, bindable.step.outputs)
        )
        return self.launches(plan_stage(tick, kernel.kind, ins, outs), stream)

    def launches(self, calls: Iterable[Call], stream: Stream) -> Callable[[], None]:
        """What enqueues ``calls``."""
        bound = [
            (self._function(call.kernel), call.shape, call.params, self._overlaps(call.shape))
            for call in calls
        ]

        def enqueue() -> None:
            for function, shape, params, overlaps in bound:
                function.launch(shape, params, stream, overlaps=overlaps)

        return enqueue

    def turn(self, weight: DevicePtr, turn: TurnParams, memory: DevicePtr, stream: Stream) -> None:
        """Turn a matrix where it lies, the first time it is asked for. memory: as large as it."""
        if weight in self._turned:
            return
        self._turned.add(weight)
        nbytes = 4 * turn.inputs * turn.outputs * turn.kernel
        cuda.copy_device(memory, weight, nbytes, stream)
        turn.source, turn.target = memory, weight
        shape = LaunchShape((TURN_BLOCKS, 1, 1), (TURN_THREADS, 1, 1))
        self._function("codec_turn").launch(shape, turn, stream)

    def forget(self) -> None:
        """Hold no matrix for turned: other weights lie where they lay."""
        self._turned.clear()

    def close(self) -> None:
        self._module.close()

    def _overlaps(self, shape: LaunchShape) -> bool:
        """Blocks that wait take room from those that work: only small launches begin early."""
        if self.overlaps is None:
            return prod(shape.grid) * prod(shape.block) <= MOST_EARLY_THREADS
        return self.overlaps

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            self._functions[name] = self._module.function(name)
            if (most := SHARED_BYTES.get(name)) is not None:
                self._functions[name].allow_shared(most)
        return self._functions[name]


def turn_of(role: str, weight: tuple[int, ...], kind: str, shape: CodecShape) -> TurnParams | None:
    """How a weight is turned; None: it stays as it is."""
    if len(weight) < 2 or role == "upsample":
        return None
    for conv in decoder_convs(shape) if kind == "codec_decode_last" else ():
        if role == f"{conv.name}.weight" and conv.is_transposed:
            return TurnParams(0, 0, conv.inputs, conv.outputs, conv.kernel, conv.stride)
    outputs, inputs, *kernel = weight
    return TurnParams(0, 0, inputs, outputs, kernel[0] if kernel else 1, 0)


def scratch_bytes(stage: StageSpec, slots: int) -> int:
    """Of the largest batch, or of the largest weight while it is turned, whichever is more."""
    kernel = stage.kernel
    assert kernel is not None, stage.name
    shape = CodecShape.of_numbers(kernel.numbers)
    tick = Tick(shape, slots, dict.fromkeys(kernel.weights, 0), 0, 0)
    plan_stage(tick, kernel.kind, [0] * len(stage.inputs), [0] * len(stage.outputs))
    return max(tick.scratch_bytes, *(weight.nbytes for weight in kernel.weights.values()))


def load(stages: Iterable[StageSpec], device: Device, folder: Path) -> CodecKernels:
    """Compile for ``device``, or find in ``folder``. Raises `nvrtc.NoCompiler`."""
    major, minor = device.compute_capability
    return CodecKernels(nvrtc.compile_cached(SOURCE, {}, f"sm_{major}{minor}", folder))


CODEC_KINDS = {kind: Kind("codec", load, scratch_bytes) for kind in KINDS}
