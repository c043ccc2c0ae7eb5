"""TensorRT's real lean run-time on a real GPU refuses what is no plan of it, in our sentence.

Everything before the run-time has been made to agree: plans.json names this GPU, the installed
version, every hash. So what is refused here is refused by `deserialize_cuda_engine`, and the
process that asked goes on.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from engines import bundle, cuda, plans
from engines.machine import look
from engines.tensorrt_executor import TensorrtExecutor
from engines.tensorrt_stages import PlanFailed, load_module
from tests.engines import foreign_plan
from tests.engines.plan_samples import plans_of
from tests.small import SMALL

pytestmark = pytest.mark.gpu

FOREIGN = foreign_plan.read()
PLANS = {
    "of tensorrt_rtx": FOREIGN,
    "cut short": FOREIGN[: len(FOREIGN) // 2],
    "with its middle zeroed": FOREIGN[:64] + bytes(len(FOREIGN) - 128) + FOREIGN[-64:],
    "of another program": b"\x7fELF" * 4096,
    "damaged behind TensorRT's own first word": b"ftrt" + FOREIGN[4:],
    "empty": b"",
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_is_none_is_refused_by_stage_and_command(tmp_path: Path, kind: str) -> None:
    opened = bundle.read(shutil.copytree(SMALL, tmp_path / "demo"))
    trt = load_module("tensorrt")
    assert trt.__name__ == "tensorrt_lean", "the run-time that boxes have"
    device = cuda.Device()
    major, minor = device.compute_capability
    gpu = device.name
    device.close()
    capability = f"{major}.{minor}"
    target = plans.target_of(capability)
    recorded = msgspec.structs.replace(
        plans_of(opened, opened.manifest.largest_batch),
        target=target,
        compute_capability=capability,
        gpu=gpu,
        platform=look().platform,
        flavour="tensorrt",
        version=trt.__version__,
    )
    folder = opened.path / plans.FOLDER / target
    folder.mkdir(parents=True)
    made = []
    for plan in recorded.plans:
        (folder / plan.file).write_bytes(PLANS[kind])
        spec = bundle.describe_file(folder / plan.file)
        made.append(msgspec.structs.replace(plan, sha256=spec.sha256, bytes=spec.bytes))
    plans.write(folder, msgspec.structs.replace(recorded, plans=tuple(made)))
    first = next(plans.graph_stages(opened.manifest)).name
    with pytest.raises(PlanFailed) as caught:
        TensorrtExecutor(opened, 1)
    said = str(caught.value)
    print(said)  # noqa: T201  TensorRT's own words differ from version to version
    assert f"{trt.__name__} {trt.__version__} cannot open the plan of stage {first}" in said
    assert said.endswith(f"duplexbox export build {opened.path} --target {target}")
