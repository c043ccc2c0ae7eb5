"""Kernels that stand in for graphs, held to the golden data of a bundle without ONNX Runtime.

Here by their numpy twins on a fake driver, which shows that the bundle says the right weights; on a
GPU (`make test-gpu`) by the kernels themselves.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines import cuda, golden, tensor_file
from engines.bundle import Bundle, GoldenSpec, StageSpec
from engines.cuda import DevicePtr
from engines.kernel_stages import KernelStages, plan_kernels
from engines.program import Bound, Buffer, Step
from tests.engines import fake_driver
from tests.engines.fake_driver import FakeDevice

pytestmark = pytest.mark.torch

Synchronize = Callable[[], None]


LM_KINDS = ("gated_first", "gated_piece", "gated_last", "depth")


def kernel_stages_of(bundle: Bundle, kinds: Collection[str]) -> list[StageSpec]:
    stages = [s for s in bundle.manifest.stages if s.kernel and s.kernel.kind in kinds]
    assert {stage.kernel.kind for stage in stages if stage.kernel} == set(kinds)
    return stages


def drawn(bundle: Bundle, spec: GoldenSpec, name: str) -> NDArray[Any]:
    """State that golden data does not store."""
    return golden.draw(spec.seed, bundle.manifest.region(name), spec.ages)


def check(
    bundle: Bundle,
    device: cuda.Device,
    stream: cuda.Stream,
    folder: Path,
    kinds: Collection[str] = LM_KINDS,
) -> None:
    """Every stage of these kinds answers what was recorded of it."""
    stages = kernel_stages_of(bundle, kinds)
    specs = {spec.stage: spec for spec in bundle.manifest.golden}
    kernels = KernelStages(bundle, plan_kernels(stages, 3), device, folder)
    held: list[DevicePtr] = []
    for stage in stages:
        spec = specs[stage.name]
        raw = memoryview(bundle.file(spec.file).read_bytes())
        recorded, _ = tensor_file.decode(raw)
        places: dict[str, DevicePtr] = {}
        for side, tensors in (("in.", stage.inputs), ("out.", stage.outputs)):
            for t in tensors:
                stored = recorded.get(side + t.name)
                array = stored.array if stored else drawn(bundle, spec, t.name)
                places[t.name] = cuda.allocate(array.nbytes)
                content = array.tobytes() if side == "in." else b"\xff" * array.nbytes
                cuda.write_device(places[t.name], content)
        held += places.values()
        step = Step(
            stage,
            tuple(Bound(t, Buffer(t.name, 0)) for t in stage.inputs),
            tuple(Bound(t, Buffer(t.name, 0)) for t in stage.outputs),
        )
        kernels.bind(step, len(spec.ages), lambda b, at=places: at[b.name], stream)()  # type: ignore[misc]
        stream.synchronize()
        for t in stage.outputs:
            expected = recorded["out." + t.name].array
            found = np.frombuffer(cuda.read_device(places[t.name], expected.nbytes), expected.dtype)
            message = f"{stage.name}: {t.name}"
            if expected.dtype.kind == "f":
                np.testing.assert_allclose(
                    found.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5, err_msg=message
                )
            else:
                np.testing.assert_array_equal(found.reshape(expected.shape), expected, message)
    kernels.close()
    for pointer in held:
        cuda.release(pointer)


def test_a_bundle_says_the_weights_with_which_golden_data_comes_true(
    ring_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = fake_driver.install(monkeypatch)
    check(ring_bundle, FakeDevice(driver), cuda.Stream(), tmp_path)  # type: ignore[arg-type]
    assert driver.held == {}


@pytest.mark.gpu
def test_kernels_answer_what_was_recorded(ring_bundle: Bundle, tmp_path: Path) -> None:
    device = cuda.Device()
    stream = cuda.Stream()
    check(ring_bundle, device, stream, tmp_path)
    stream.close()
    device.close()
