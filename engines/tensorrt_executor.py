"""The CUDA executor with TensorRT in place of ONNX Runtime: same state, same graphs, same copies.

Everything about sessions is inherited: rings and pages, joining and moving, one captured graph per
exact batch with the built-in stages between the engines. Only what a stage is differs: a plan that
was built for this very GPU (`tensorrt_stages`) instead of a graph that any GPU runs. Neither torch,
onnx nor a builder is needed, and of TensorRT the run-time alone. Prompts are still fed by graphs.

Has never run on a GPU: TensorRT-RTX supports none that was available. Its logic is tested on a
fake driver and a fake run-time.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import onnxruntime as ort

from engines import cuda, gpu, machine, tensorrt_stages
from engines.cuda_executor import PROVIDER, CudaExecutor
from engines.executor import MemoryUse
from engines.program import Step
from engines.tensorrt_stages import TensorrtStages

if TYPE_CHECKING:
    from engines.cuda_prefill import CudaPrimer


class TensorrtExecutor(CudaExecutor):
    """`executor.Executor` on a GPU, through plans. One thread uses it: the one that made it."""

    kind = "tensorrt"

    def _open_device(self) -> cuda.Device:
        return gpu.open_gpu(self.options.ordinal)

    def _takes_kernels(self) -> bool:
        return False

    def _open_stages(self) -> None:
        """Raises `plans.PlansError` when there are no plans for this GPU, or `PlanFailed`."""
        major, minor = self.device.compute_capability
        here = machine.with_gpu(self.device.name, f"{major}.{minor}")
        opened = tensorrt_stages.open_plans(self.bundle, here, self.slots)
        trt = tensorrt_stages.load_module(opened.plans.flavour)
        self.runs_on = f"{trt.__name__} {trt.__version__}"
        self._stages = TensorrtStages(trt, self.bundle, opened, self.stream)
        self._closing.callback(self._stages.close)

    def _open(self, slots: int) -> None:
        super()._open(slots)
        self._stages.keep_caches()  # everything has been compiled by now

    def _bind_graph(self, step: Step, batch: int) -> Callable[[], None]:
        return self._stages.bind(step, batch, self._address)

    def primer(self) -> "CudaPrimer":
        """See `CudaExecutor.primer`: a prompt's graphs run in ONNX Runtime, not as plans."""
        if (
            self.bundle.manifest.prompt is not None
            and PROVIDER not in ort.get_available_providers()
        ):
            raise gpu.NotReady(
                f"prompts of {self.bundle.path} are fed by ONNX Runtime, and onnxruntime "
                f"{ort.__version__} has no {PROVIDER}. Install the GPU build beside TensorRT: "
                f"pip uninstall onnxruntime && pip install 'duplexbox[cuda]'"
            )
        return super().primer()

    def memory(self) -> MemoryUse:
        """See `CudaExecutor.memory`; scratch of the engines counts with what is always there."""
        use = super().memory()
        return dataclasses.replace(use, whole=use.whole + self._stages.scratch_bytes)
