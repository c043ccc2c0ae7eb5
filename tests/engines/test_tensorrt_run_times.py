"""The fake run-time has the real ones' names and arguments, and so has what the executor asks for.

The real modules are imported by the tests, not by the file: machines that have other tests to run
may have none.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest

from engines import tensorrt_prompt, tensorrt_stages
from tests.engines import fake_tensorrt
from tests.tensorrt_api import Api, Use, describe, fault, forms, tensorrt_eleven, uses

OWNERS = {
    "_runtime": "Runtime",
    "engine": "ICudaEngine",
    "config": "IRuntimeConfig",
    "context": "IExecutionContext",
    "cache": "IRuntimeCache",
}
"""Name of a variable or field in `tensorrt_stages` and `tensorrt_prompt` -> its class."""

ONLY_RTX: dict[str, set[str] | None] = {
    "IRuntimeCache": None,
    "IRuntimeConfig": {
        "create_runtime_cache",
        "set_runtime_cache",
        "cuda_graph_strategy",
        "dynamic_shapes_kernel_specialization_strategy",
    },
    "IExecutionContext": {"is_stream_capturable"},
    "DynamicShapesKernelSpecializationStrategy": None,
    "CudaGraphStrategy": None,
}
"""What `tensorrt_stages` asks for with hasattr, or only after having found it; None: the class."""


def members(cls: type) -> dict[str, Any]:
    own = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    if "__init__" in vars(cls) and cls.__name__ in ("ILogger", "Runtime"):
        own["__init__"] = vars(cls)["__init__"]
    return own


CLASSES = [
    cls
    for name, cls in inspect.getmembers(fake_tensorrt, inspect.isclass)
    if cls.__module__ == fake_tensorrt.__name__
]


RUN_TIMES = ("tensorrt_rtx", "tensorrt_lean", "tensorrt")


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Api]:
    import tensorrt_lean
    import tensorrt_rtx

    return {
        "tensorrt_rtx": describe(tensorrt_rtx),
        "tensorrt_lean": describe(tensorrt_lean),
        "tensorrt": tensorrt_eleven(tmp_path_factory.mktemp("eleven")),
    }


@pytest.mark.parametrize("module", RUN_TIMES)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_fake_has_the_names_and_arguments_of_the_real_run_time(
    apis: dict[str, Api], cls: type, module: str
) -> None:
    api = apis[module]
    lacks = ONLY_RTX.get(cls.__name__, set()) if module != "tensorrt_rtx" else set()
    if lacks is None:
        assert cls.__name__ not in api, "the other flavour has it now: use it"
        return
    theirs = api[cls.__name__]
    for name, ours in members(cls).items():
        if name in lacks:
            assert name not in theirs, f"{name}: the other flavour has it now: use it"
            continue
        assert name in theirs, f"{cls.__name__}.{name}"
        if inspect.isfunction(ours):
            wanted = [n for n in inspect.signature(ours).parameters if n != "self"]
            assert wanted in [form.names for form in forms(name, theirs[name])], (name, wanted)


@pytest.mark.parametrize("module", RUN_TIMES)
def test_everything_the_executor_uses_exists_with_these_arguments(
    apis: dict[str, Api], module: str
) -> None:
    files = (tensorrt_stages.__file__, tensorrt_prompt.__file__)
    found = [use for file in files for use in uses(Path(file).read_text(), OWNERS)]
    assert {use.attribute for use in found if use.owner == "IExecutionContext"} >= {
        "execute_async_v3",
        "infer_shapes",
        "set_device_memory",
        "set_input_shape",
        "set_optimization_profile_async",
        "set_tensor_address",
    }
    wrong = [fault(use, apis[module]) for use in found if not is_only_rtx(use, module)]
    assert [line for line in wrong if line] == []


def is_only_rtx(use: Use, module: str) -> bool:
    if module == "tensorrt_rtx":
        return False
    names = ONLY_RTX.get(use.owner or use.attribute, set())
    return names is None or use.attribute in names


def test_what_the_executor_sets_are_properties_of_the_real_run_time() -> None:
    """Python lets a fake take any attribute, and lets a typo pass."""
    import tensorrt_lean
    import tensorrt_rtx

    for name in ("dynamic_shapes_kernel_specialization_strategy", "cuda_graph_strategy"):
        assert isinstance(vars(tensorrt_rtx.IRuntimeConfig)[name], property)
    for name in ("num_io_tensors", "num_optimization_profiles"):
        for real in (tensorrt_rtx, tensorrt_lean):
            assert isinstance(vars(real.ICudaEngine)[name], property)
