# ruff: noqa: T201  (a script run by hand)
"""Time, size and memory of TensorRT plans for full-size stages, built with no GPU and no weights.

    python -m bench.tensorrt_plans                       every stage of Moshi 7B, batches 1..4
    python -m bench.tensorrt_plans --stage temporal --layers 2 --batches 16
    python -m bench.tensorrt_plans --weights constants   weights inside; needs them in memory

The matrices of the language model are holes in a sparse file: they are inputs of the plan, so the
builder never reads them. The codec's values are drawn at random, because equal weights would be
stored once. Each plan is built as `duplexbox export build --target` does, in a process of its own.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from engines import plans
from engines.plans import WeightsForm
from export import targets
from export.hollow import Hollow, hollow_lm, nothing_hollow
from export.models.config import MOSHI_7B, ModelConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.stages import Depth, MimiDecode, MimiEncode, StageGraph, Temporal
from export.tensorrt_build import Job, build_in_child
from export.tensorrt_graph import prepare
from export.tensorrt_network import Wanted
from export.to_onnx import Weights, write_graph

STAGES = ("mimi_encode", "temporal", "depth", "mimi_decode")


def write_full_width(folder: Path, stage: str, layers: int) -> StageGraph:
    """Write the graph of a full-size stage below ``folder``, and weights where they are needed.

    layers: of the temporal transformer; everything else has its full size.
    """
    config = replace(MOSHI_7B, lm=replace(MOSHI_7B.lm, layers=layers))
    graph, hollow = _language(config, stage) if stage in STAGES[1:3] else _codec(config, stage)
    (folder / "stages").mkdir(parents=True)
    weights = Weights(folder / "stages", hollow)
    write_graph(graph, weights)
    for file, size in weights.files.items():
        path = folder / "stages" / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as stream:
            stream.truncate(size)
            for placed in weights.places.values():
                if placed.file == file and placed.tensor not in hollow:
                    raw = placed.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                    stream.seek(placed.offset)
                    stream.write(raw.numpy().tobytes())
    return graph


def _language(config: ModelConfig, stage: str) -> tuple[StageGraph, Hollow]:
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LanguageModel(config.lm).state_dict().items()}
    lm, hollow = hollow_lm(config.lm, "bfloat16", lambda name: torch.ones(shapes[name]))
    made = Temporal if stage == "temporal" else Depth
    return made(config, lm, "bfloat16"), hollow


def _codec(config: ModelConfig, stage: str) -> tuple[StageGraph, Hollow]:
    torch.manual_seed(0)
    mimi = Mimi(config.mimi).eval()
    with torch.no_grad():
        for name, tensor in mimi.state_dict().items():
            if name.endswith("cluster_usage"):
                tensor.fill_(1.0)
            elif tensor.is_floating_point():
                tensor.normal_(0, 0.02)
    mimi.quantizer.prepare()
    made = MimiEncode if stage == "mimi_encode" else MimiDecode
    return made(config, mimi), nothing_hollow()


def measure(
    stage: str, layers: int, batches: int, form: WeightsForm, target: targets.Target
) -> str:
    """Build one plan and say in a line what it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = write_full_width(folder, stage, layers)
        prepared = prepare(folder, graph.spec.graph, form)
        regions = graph.regions
        assert isinstance(regions, list), stage
        rings = frozenset(region.name for region in regions if region.in_place)
        exact = plans.exact(batches)
        wanted = Wanted(folder, graph.spec, rings, prepared, exact, target.compute_capability)
        job = Job(target.flavour, wanted, folder / "stage.plan")
        done = build_in_child(job, lambda *_: None)
        size = job.out.stat().st_size
    outside = sum(weight.bytes for weight in prepared.weights)
    shown = f"{stage} ({layers} layers)" if stage == "temporal" else stage
    return (
        f"| {shown} | 1..{batches} | {outside / 1e9:.2f} | {prepared.constant_bytes / 1e9:.2f} | "
        f"{size / 1e6:.1f} | {done.seconds:.1f} | {done.peak_rss_bytes / 1e6:.0f} | "
        f"{done.attention} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=STAGES, help="(default: all of them)")
    parser.add_argument("--layers", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="1..N (default: %(default)s)")
    parser.add_argument("--weights", choices=("inputs", "constants"), default="inputs")
    parser.add_argument("--target", default="sm_89", help="(default: %(default)s)")
    args = parser.parse_args()
    target = targets.resolve(args.target)
    print("| stage | batches | GB outside | GB inside | plan MB | s | peak MB | attention |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for stage in [args.stage] if args.stage else STAGES:
        print(measure(stage, args.layers, args.batches, args.weights, target), flush=True)


if __name__ == "__main__":
    main()
