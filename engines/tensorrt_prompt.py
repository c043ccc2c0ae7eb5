"""A prompt's two stages as TensorRT plans, run between ticks; `cuda_prefill` has the rings.

    prefill    rows of a prompt, 1 to as many as the plan's profile takes; more go in pieces
    opening    the first choice after them, batch 1

The arithmetic of a prompt is `PromptGraphs`', and only how a stage runs differs: what goes in and
comes out is a few rows, so it is copied to and from the device for every run. Weights are those of
the tick, wherever both graphs take them from one place of the bundle: feeding prompts by plans
costs a box its rings and little more, where ONNX Runtime wants the language model twice.
"""

import math
from typing import Any

import numpy as np

from engines import cuda
from engines.bundle import ITEMSIZE, NEXT, ROWS, Bundle, StageSpec, TensorSpec
from engines.cuda import DevicePtr
from engines.ort_executor import StageFailed
from engines.ort_prefill import PromptGraphs, Rings
from engines.prefill import Prompt
from engines.tensorrt_stages import Alone, TensorrtStages


class PlanPrompts(PromptGraphs):
    """`ort_prefill.PromptGraphs` by plans. One thread uses it: the executor's own."""

    def __init__(self, bundle: Bundle, stages: TensorrtStages, rings: Rings) -> None:
        """Load both plans. Raises `BundleError` when the bundle's calls have no prompt, or
        `PlanFailed`.
        """
        self._stages, self._places = stages, dict[str, DevicePtr]()
        super().__init__(bundle, stages.open_alone, rings)
        self._most = self._prefill.plan.profiles[0].largest
        for stage in (self.spec.prefill, self.spec.opening):
            for tensor in (*stage.inputs, *stage.outputs):
                if not self._is_ring(stage, tensor) and tensor.name not in self._places:
                    self._places[tensor.name] = stages.room(self._most_bytes(tensor))

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        """See `prefill.Primer.feed`."""
        for done in range(0, rows, self._most):
            super().feed(slot, prompt, first + done, min(self._most, rows - done))

    def run(self, session: Alone, stage: StageSpec, given: dict[str, Any], slot: int) -> None:
        """See `PromptGraphs.run`."""
        context, stream = session.context, self._stages.stream
        for tensor in stage.inputs:
            array = given.get(tensor.name, self._made.get(tensor.name))
            if array is None:
                self._bind(session, tensor.name, self._ring(tensor, slot))
                continue
            array = np.ascontiguousarray(array)
            place = self._places[tensor.name]
            cuda.write_device_from(place, array.ctypes.data, array.nbytes)
            self._bind(session, tensor.name, place)
            if tensor.name in session.tensors and not context.set_input_shape(
                tensor.name, tuple(array.shape)
            ):
                raise StageFailed(
                    f"stage {stage.name}: {tensor.name} cannot be {array.shape}{session.log.tail()}"
                )
        for tensor in stage.outputs:
            is_ring = self._is_ring(stage, tensor)
            place = self._ring(tensor, slot) if is_ring else self._places[tensor.name]
            self._bind(session, tensor.name, place)
        if not context.execute_async_v3(int(stream.handle)):
            raise StageFailed(f"stage {stage.name} failed in slot {slot}{session.log.tail()}")
        stream.synchronize()
        for tensor in stage.outputs:
            made = self._made.get(tensor.name)
            if made is not None and not self._is_ring(stage, tensor):
                raw = cuda.read_device(self._places[tensor.name], made.nbytes)
                made[...] = np.frombuffer(raw, made.dtype).reshape(made.shape)

    def _bind(self, session: Alone, name: str, place: DevicePtr) -> None:
        context = session.context
        if name in session.tensors and not context.set_tensor_address(name, int(place)):
            raise StageFailed(
                f"stage {session.plan.stage}: {name} cannot lie at {int(place):#x}"
                f"{session.log.tail()}"
            )

    def _is_ring(self, stage: StageSpec, tensor: TensorSpec) -> bool:
        region = self._regions.get(tensor.name.removesuffix(NEXT))
        return stage is self.spec.prefill and region is not None and region.in_place

    def _ring(self, tensor: TensorSpec, slot: int) -> DevicePtr:
        _, _, address = self._rings(tensor.name.removesuffix(NEXT), slot)
        return DevicePtr(address)

    def _most_bytes(self, tensor: TensorSpec) -> int:
        rows = self._most if ROWS in tensor.shape else 1
        return rows * math.prod(tensor.row_shape) * ITEMSIZE[tensor.dtype]
