"""The CUDA executor with TensorRT in place of ONNX Runtime: same state, same graphs, same copies.

Everything about sessions is inherited: rings and pages, joining and moving, one captured graph per
exact batch with the built-in stages between the engines. Only what a stage is differs: a plan that
was built for this very GPU (`tensorrt_stages`) instead of a graph that any GPU runs, in a tick as
for a prompt (`tensorrt_prompt`). Neither torch, onnx nor a builder is needed, and of TensorRT the
run-time alone. Where a bundle names kernels of ours a box may choose: plans for everything, or
plans for what has no kernel. Which is faster is not known: neither has run beside the other.

Has never run on a GPU: TensorRT-RTX supports none that was available. Its logic is tested on a
fake driver and a fake run-time.
"""

import dataclasses
from collections.abc import Callable

from engines import cuda, gpu, machine, tensorrt_stages
from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaPrimer
from engines.executor import MemoryUse
from engines.ort_prefill import rings_of
from engines.program import Step
from engines.tensorrt_stages import TensorrtStages


class TensorrtExecutor(CudaExecutor):
    """`executor.Executor` on a GPU, through plans. One thread uses it: the one that made it."""

    kind = "tensorrt"

    def __init__(
        self,
        bundle: Bundle,
        slots: int,
        options: CudaOptions | None = None,
        *,
        beside_kernels: bool = False,
    ) -> None:
        """See `CudaExecutor`. Also raises `plans.PlansError` when there are no plans for this GPU.

        beside_kernels: stages that name a kernel of ours run in it, and only the rest as plans.
        """
        self._beside_kernels = beside_kernels
        super().__init__(bundle, slots, options)

    def _open_device(self) -> cuda.Device:
        return gpu.open_gpu(self.options.ordinal)

    def _takes_kernels(self) -> bool:
        return self._beside_kernels

    def _open_stages(self) -> None:
        """Raises `plans.PlansError` when there are no plans for this GPU, or `PlanFailed`."""
        major, minor = self.device.compute_capability
        here = machine.with_gpu(self.device.name, f"{major}.{minor}")
        opened = tensorrt_stages.open_plans(self.bundle, here, self.slots)
        trt = tensorrt_stages.load_module(opened.plans.flavour)
        kernels = ", beside kernels of ours" if self._by_kernels else ""
        self.runs_on = f"{trt.__name__} {trt.__version__}{kernels}"
        self._stages = TensorrtStages(trt, self.bundle, opened, self.stream, self._by_kernels)
        self._closing.callback(self._stages.close)

    def _open(self, slots: int) -> None:
        super()._open(slots)
        self._stages.keep_caches()  # everything has been compiled by now

    def _bind_graph(self, step: Step, batch: int) -> Callable[[], None]:
        return self._stages.bind(step, batch, self._address)

    def primer(self) -> CudaPrimer:
        """See `executor.Primes.primer`. Raises `gpu.NotReady` if the GPU has no room for it."""
        from engines.tensorrt_prompt import PlanPrompts

        self._enter()
        stages, spec = self._stages, self.bundle.manifest.prompt
        if spec is not None:
            needed = stages.room_for((spec.prefill, spec.opening))
            needed += sum(ring.whole_bytes for ring in rings_of(spec, self._regions))
            gpu.check_room(self.device, needed, "what feeds prompts")
        primer = CudaPrimer(self, lambda rings: PlanPrompts(self.bundle, stages, rings))
        stages.keep_caches()
        return primer

    def memory(self) -> MemoryUse:
        """See `CudaExecutor.memory`; scratch of the engines counts with what is always there."""
        use = super().memory()
        return dataclasses.replace(use, whole=use.whole + self._stages.scratch_bytes)
