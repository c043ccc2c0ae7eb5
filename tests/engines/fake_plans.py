"""Plans that the fake run-time opens: a stage's graph, with the weights that are given apart."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from engines import bundle, plans
from engines.bundle import NEXT, Bundle
from engines.plans import TENSORRT_DTYPES, Plan, Plans, WeightInput
from tests.engines.plan_samples import plans_of

LARGEST = 4
WEIGHT, WEIGHTS_FILE, OFFSET = "row_shape_weight", "stages/weights/toy.bin", 4096


def plan_bytes(bundle: Bundle, plan: Plan, moved: dict[str, onnx.TensorProto]) -> bytes:
    """A plan for the fake: the stage's graph with the weights in ``moved`` as inputs."""
    stage = next(s for s in bundle.manifest.every_stage() if s.name == plan.stage)
    model = onnx.load(bundle.file(stage.graph))
    for weight in plan.weights:
        tensor = moved[weight.name]
        model.graph.initializer.remove(
            next(t for t in model.graph.initializer if t.name == weight.name)
        )
        described = onnx.helper.make_tensor_value_info(
            weight.name, tensor.data_type, list(weight.shape)
        )
        model.graph.input.append(described)

    def tensors(specs: Any) -> dict[str, Any]:
        return {
            spec.name: [
                TENSORRT_DTYPES[spec.dtype],
                [n if isinstance(n, int) else -1 for n in spec.shape],
            ]
            for spec in specs
        }

    tree = {
        "model": base64.b64encode(model.SerializeToString()).decode(),
        "inputs": tensors((*plan.inputs, *plan.weights)),
        "outputs": tensors(plan.outputs),
        "aliases": {ring + NEXT: ring for ring in plan.in_place},
        "profiles": [[profile.smallest, profile.largest] for profile in plan.profiles],
    }
    return json.dumps(tree).encode()


def add_weight(folder: Path) -> None:
    """Give stage `speak` a weight: what it multiplies noise with besides the session's gain."""
    path = folder / "stages/speak.onnx"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.output[0] == "scaled")
    node.input[0], node.output[0] = "first", "scaled_once"
    values = np.array([[[0.25, 1.5, -2.0, 3.0]]], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, WEIGHT))
    index = list(model.graph.node).index(node) + 1
    more = onnx.helper.make_node("Mul", ["scaled_once", WEIGHT], ["scaled"])
    model.graph.node.insert(index, more)
    onnx.save(model, path)
    (folder / "stages/weights").mkdir()
    (folder / WEIGHTS_FILE).write_bytes(bytes(OFFSET) + values.tobytes())


def write_plans(opened: Bundle, change: Callable[[Plans], Plans] = lambda plans: plans) -> Plans:
    """plans/sm_90, which is what the fake GPU is, with files the fake run-time opens."""
    recorded = msgspec.structs.replace(
        plans_of(opened, LARGEST), target="sm_90", compute_capability="9.0"
    )
    folder = opened.path / plans.FOLDER / recorded.target
    folder.mkdir(parents=True, exist_ok=True)
    regions = {region.name for region in opened.manifest.regions if region.in_place}
    made = []
    for plan in recorded.plans:
        stage = next(s for s in opened.manifest.every_stage() if s.name == plan.stage)
        initializers = {t.name: t for t in onnx.load(opened.file(stage.graph)).graph.initializer}
        weights = (WeightInput(WEIGHT, "float32", (1, 1, 4), WEIGHTS_FILE, OFFSET, 16),)
        whole = msgspec.structs.replace(
            plan,
            weights=weights if WEIGHT in initializers else (),
            in_place=tuple(sorted(regions & {spec.name for spec in plan.inputs})),
        )
        path = folder / plan.file
        path.write_bytes(plan_bytes(opened, whole, initializers))
        spec = bundle.describe_file(path)
        made.append(msgspec.structs.replace(whole, sha256=spec.sha256, bytes=spec.bytes))
    recorded = change(msgspec.structs.replace(recorded, plans=tuple(made)))
    plans.write(folder, recorded)
    return recorded
