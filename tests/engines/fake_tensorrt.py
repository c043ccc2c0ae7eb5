"""The part of TensorRT's run-time that `engines.tensorrt_stages` uses, over ONNX Runtime's CPU.

Stands where `tensorrt_rtx` would: names and arguments are the real module's, which
`test_tensorrt_stages` compares. A plan is JSON with an ONNX model in it; device memory is host
memory (`fake_driver`). It is as strict as it can be about order and addresses, and computes, so a
wrong address is a wrong sound. What it cannot show is whether TensorRT computes the same.
"""

import base64
import ctypes
import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import onnxruntime as ort

from engines import cuda
from engines.ort_executor import STORAGE

__version__ = "1.7.1.116"

SCRATCH_BYTES = 1024
"""Of profile 0; every further profile needs as much more."""
COMPILED = b"kernels"


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def __init__(self) -> None:
        pass

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    BF16 = 2
    INT64 = 3
    INT32 = 4
    INT8 = 5
    UINT8 = 6
    BOOL = 7
    FP8 = 8


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(IntEnum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class CudaGraphStrategy(IntEnum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class IRuntimeCache:
    def __init__(self) -> None:
        self._blob = b""

    def serialize(self) -> bytes:
        return self._blob or COMPILED

    def deserialize(self, blob: bytes) -> bool:
        self._blob = bytes(blob)
        return self._blob == COMPILED


class IRuntimeConfig:
    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self._cache: IRuntimeCache | None = None
        self.dynamic_shapes_kernel_specialization_strategy = (
            DynamicShapesKernelSpecializationStrategy.LAZY
        )
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED

    def set_execution_context_allocation_strategy(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True


class ICudaEngine:
    """tree: {"model", "inputs", "outputs", "aliases", "profiles"}; see `plan_bytes`.

    profiles: [smallest, largest] each."""

    def __init__(self, tree: dict[str, Any], logger: ILogger) -> None:
        self._tree, self._logger = tree, logger
        self._io: dict[str, Any] = tree["inputs"] | tree["outputs"]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        model = base64.b64decode(tree["model"])
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.num_io_tensors = len(self._io)
        self.num_optimization_profiles = len(tree["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self._io)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._tree["inputs"] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._io[name][0]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._io[name][1])

    def get_aliased_input_tensor(self, name: str) -> str:
        return str(self._tree["aliases"].get(name, ""))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH_BYTES * (profile_index + 1)

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig) -> "IExecutionContext":
        return IExecutionContext(self, runtime_config)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._engine, self._config = engine, config
        self._profile = -1
        self._scratch = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self._config._strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        assert memory % 256 == 0, memory
        self._scratch = size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self._profile < 0 or name not in self._engine._tree["inputs"]:
            return self._complain(f"setInputShape: {name} before its profile, or unknown")
        dims = self._engine._io[name][1]
        smallest, largest = self._engine._tree["profiles"][self._profile]
        self._shapes[name] = tuple(shape)
        fits = len(shape) == len(dims) and all(
            smallest <= length <= largest if dim == -1 else length == dim
            for length, dim in zip(shape, dims, strict=True)
        )
        return fits or self._complain(f"{name}: {shape} outside {dims} of {smallest}..{largest}")

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._io or memory == 0:
            return self._complain(f"setTensorAddress: {name} at {memory}")
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        inputs = self._engine._tree["inputs"]
        return [n for n, (_, dims) in inputs.items() if -1 in dims and n not in self._shapes]

    def is_stream_capturable(self, stream: int) -> bool:
        return stream != 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        needed = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        if self._scratch < needed:
            return self._complain(f"enqueueV3: {self._scratch} bytes of scratch, {needed} needed")
        if missing := self._engine._io.keys() - self._addresses.keys():
            return self._complain(f"enqueueV3: no address for {sorted(missing)}")
        for output, ring in self._engine._tree["aliases"].items():
            if self._addresses[output] != self._addresses[ring]:
                return self._complain(f"enqueueV3: {output} must lie where {ring} lies")
        sizes = {
            length
            for name, (_, dims) in self._engine._tree["inputs"].items()
            for length, dim in zip(self._shapes.get(name, ()), dims, strict=False)
            if dim == -1
        }
        if len(sizes) != 1:
            return self._complain(f"enqueueV3: inputs of {sorted(sizes)} rows at once")
        (size,) = sizes
        binding = self._engine._session.io_binding()
        for name, (dtype, dims) in self._engine._io.items():
            bundle_dtype = _BUNDLE_DTYPES[dtype]
            bind = (
                binding.bind_input if name in self._engine._tree["inputs"] else binding.bind_output
            )
            shape = tuple(size if length == -1 else length for length in dims)
            _touch(self._addresses[name], shape, STORAGE[bundle_dtype][0])
            bind(name, "cpu", 0, STORAGE[bundle_dtype][1], shape, self._addresses[name])
        session = self._engine._session
        cuda.driver().streams.give(stream_handle, lambda: session.run_with_iobinding(binding))
        return True

    def _complain(self, message: str) -> bool:
        self._engine._logger.log(ILogger.Severity.ERROR, message)
        return False


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            return ICudaEngine(json.loads(serialized_engine), self._logger)
        except (ValueError, KeyError) as err:
            message = f"deserializeCudaEngine: {err!r}"
            self._logger.log(ILogger.Severity.ERROR, message)
            return None


_BUNDLE_DTYPES: dict[str, Any] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
    "FP8": "float8e4m3",
}


def _touch(address: int, shape: tuple[int, ...], storage: type[np.generic]) -> None:
    """Read the last byte, so that an address that is not memory ends the test here."""
    nbytes = int(np.prod(shape)) * np.dtype(storage).itemsize
    ctypes.string_at(address + max(nbytes, 1) - 1, 1)
