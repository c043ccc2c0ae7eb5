"""Graphs of a bundle in ONNX Runtime's CUDA provider, on a stream of ours and at addresses of ours.

Decides how ONNX Runtime is asked: no waiting inside a run, so that a whole tick can be captured
from outside; nothing on the CPU; float32 stays float32; no choice of algorithms by luck. Does not
know what a tick is made of, nor where tensors lie (`cuda_executor`).

Needs the cuda extra; imports neither torch nor onnx.
"""

from collections.abc import Callable, Iterable, Mapping

import onnxruntime as ort

from engines import cuda
from engines.bundle import Bundle, BundleError, Dtype, StageSpec
from engines.gpu import NotReady, open_gpu
from engines.kernel_stages import Address
from engines.ort_executor import STORAGE, check_ports
from engines.program import Step

PROVIDER = "CUDAExecutionProvider"
MEMORY = "cuda"
"""What ONNX Runtime calls the device that holds all bound tensors."""


class CudaSessions:
    """Sessions of graphs on one GPU. One thread uses it."""

    def __init__(
        self,
        bundle: Bundle,
        gpu: str,
        stream: cuda.Stream,
        *,
        ordinal: int,
        provider: Mapping[str, str],
    ) -> None:
        """gpu: its name, for errors; provider: further options of the CUDA provider."""
        self.bundle = bundle
        self._gpu, self._stream = gpu, stream
        self._ordinal, self._provider = ordinal, provider
        self._held: dict[str, ort.InferenceSession] = {}
        self._run_options = ort.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def open(self, stages: Iterable[StageSpec]) -> None:
        """Load those that are graphs. Raises `BundleError`."""
        self._held = {stage.name: self.load(stage) for stage in stages if stage.graph}

    def load(self, stage: StageSpec) -> ort.InferenceSession:
        """A session of one graph on this GPU. Raises `BundleError`."""
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        # A stage that falls back to the CPU would wait for the device in the middle of a tick.
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        provider = {
            "device_id": str(self._ordinal),
            "use_tf32": "0",
            "user_compute_stream": str(int(self._stream.handle)),
            # Trying algorithms out picks by luck, so that two boxes would differ in bits.
            "cudnn_conv_algo_search": "HEURISTIC",
            "cudnn_conv1d_pad_to_nc1d": "1",  # 21.7 ms a tick instead of 23.5 at 64 (LOG.md)
            "arena_extend_strategy": "kSameAsRequested",
        } | dict(self._provider)
        path = self.bundle.file(stage.graph)
        try:
            session = ort.InferenceSession(str(path), settings, providers=[(PROVIDER, provider)])
        except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
            reason = str(err).splitlines()[0]
            if "default CPU EP" in reason:
                reason = (
                    "it has operators without a CUDA kernel (older exports "
                    "wrote Elu). Build the bundle again: duplexbox export build --help"
                )
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load stage {stage.name} on "
                f"{self._gpu}: {reason}"
            ) from err
        check_ports(session, path, stage)
        return session

    def bind(self, step: Step, batch: int, address: Address) -> Callable[[], None]:
        """What enqueues a stage that was opened, for exactly ``batch`` sessions; see `open`."""
        session, run_options = self._held[step.stage.name], self._run_options
        binding = session.io_binding()
        for bind, side in ((binding.bind_input, step.inputs), (binding.bind_output, step.outputs)):
            for bound in side:
                tensor = bound.tensor
                bind(
                    tensor.name,
                    MEMORY,
                    self._ordinal,
                    _element(tensor.dtype),
                    (batch, *tensor.row_shape),
                    int(address(bound.buffer)),
                )
        return lambda: session.run_with_iobinding(binding, run_options)

    def close(self) -> None:
        self._held.clear()


def open_device(ordinal: int) -> cuda.Device:
    """The GPU, with everything around it checked. Raises `NotReady` with the remedy."""
    if PROVIDER not in ort.get_available_providers():
        raise NotReady(
            f"onnxruntime {ort.__version__} has no {PROVIDER}. Install the GPU build: "
            f"pip uninstall onnxruntime && pip install 'duplexbox[cuda]'"
        )
    device = open_gpu(ordinal)
    ort.preload_dlls()
    return device


def _element(dtype: Dtype) -> int:
    """ONNX TensorProto.DataType of a dtype."""
    return STORAGE[dtype][1]
