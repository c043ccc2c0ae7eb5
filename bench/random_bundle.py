# ruff: noqa: T201  (a script run by hand)
"""A bundle of Moshi 7B's shape with random weights, made where it is measured.

    python -m bench.random_bundle graphs FOLDER [--batches 1-64] [--attention ring] [--cache int8]
    python -m bench.random_bundle weights FOLDER                    # on the GPU: 15.7 GB in 15 s
    python -m bench.random_bundle graphs FOLDER --persona [...]     # PersonaPlex's: with a prompt
    python -m bench.random_bundle hashes FOLDER                     # for certify, which reads them
    duplexbox engines bench FOLDER --executor cuda --no-hashes ...

Fifteen gigabytes need not travel: the graphs are written without weights and say which lie where;
the values are drawn on the machine that will run them, scaled so that activations stay near one.
For timings and bits only. A checkpoint with the published layout comes from `duplexbox export
seed-checkpoint`. Needs the export extra; `weights` uses the first GPU if torch sees one.
"""

import argparse
import json
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engines import bundle
from engines.bundle import AudioPorts, Dtype, FileSpec, Manifest, ModelInfo, TextPorts, Timing
from export import prompt, tiny
from export.build import PIECES, TOKENIZER
from export.caches import DTYPES, LARGEST_CODE, SCALES, Caches
from export.cli import largest_batch
from export.hollow import hollow_lm
from export.kernel_specs import kernels_of, with_kernel
from export.models.config import MOSHI_7B, PERSONAPLEX_7B
from export.models.mimi import Mimi
from export.prompt_stages import prompt_graphs
from export.stages import (
    PCM,
    PCM_OUT,
    TEXT,
    VALID,
    Attention,
    all_regions,
    graphs_of,
    noise_stage,
)
from export.to_onnx import INLINE_BYTES, Weights, write_graph
from export.traces import Traces

PLACES = "places.json"
UNKNOWN = "0" * 64
WRITERS = 8
REACH = 8.0


def write_graphs(
    folder: Path,
    batches: int,
    attention: Attention = "standard",
    cache: Dtype | None = None,
    *,
    prompted: bool = False,
) -> None:
    """Everything but the weights; ``folder``/places.json says where each of those lies.

    cache: dtype of 8-bit rings. prompted: calls begin with a prompt; there are no voices.
    """
    config = PERSONAPLEX_7B if prompted else MOSHI_7B
    weights = Weights(folder / "stages")
    weights.folder.mkdir(parents=True, exist_ok=True)
    lm, _ = hollow_lm(config.lm, "bfloat16", lambda name: torch.ones(1, 1, _norm(name)))
    mimi = Mimi(config.mimi).eval().requires_grad_(False)
    for tensor in mimi.parameters():
        if tensor.nbytes < INLINE_BYTES:
            tensor.zero_()  # these lie in the graphs, for kernels in the file: alike in both
    caches = None
    if cache is not None:  # random keys and values are near 1, and hardly one is beyond REACH
        scale = torch.full((config.lm.layers, 2, config.lm.heads), REACH / LARGEST_CODE[cache])
        caches = Caches(cache, scale)
        (folder / SCALES).parent.mkdir(parents=True, exist_ok=True)
        (folder / SCALES).write_bytes(caches.file())
    graphs = graphs_of(config, mimi, lm, "bfloat16", attention, caches)
    asks = prompt_graphs(config, lm, "bfloat16", caches) if prompted else ()
    written = (graph.written() for graph in (*graphs, *asks))
    shared = {graph.name: graph for graph in written}.values()
    traces = Traces()
    files = [str(write_graph(graph, weights, traces).relative_to(folder)) for graph in shared]
    kernels = kernels_of(graphs, weights)
    (folder / PIECES).write_bytes(msgspec.json.encode([""] * config.lm.text_card))
    places = [
        (name, placed.file, placed.offset, str(placed.tensor.dtype)[6:], list(placed.tensor.shape))
        for name, placed in weights.places.items()
    ]
    (folder / PLACES).write_text(json.dumps(places))
    sizes = {f"stages/{file}": FileSpec(UNKNOWN, size) for file, size in weights.files.items()}
    beside = [PIECES, *((SCALES,) if caches else ())]
    if asks:
        (folder / TOKENIZER).write_bytes(tiny.tokenizer(config))
        beside.append(TOKENIZER)
    manifest = Manifest(
        format=bundle.FORMAT,
        model=ModelInfo(
            f"{config.name}, random",
            parameters=sum(math.prod(place[4]) for place in places),
            checkpoint_sha256=UNKNOWN,
            trained=False,
            notice="random weights, for timings only",
        ),
        timing=Timing(config.period_ns, config.mimi.sample_rate_hz, config.mimi.samples_per_frame),
        largest_batch=batches,
        regions=all_regions(graphs, config),
        stages=(noise_stage(config), *(with_kernel(graph.spec, kernels) for graph in graphs)),
        audio=AudioPorts(PCM, PCM_OUT, VALID),
        text=TextPorts(TEXT, PIECES, config.silent_ids),
        files={name: bundle.describe_file(folder / name) for name in (*files, *beside)} | sizes,
        prompt=prompt.prompt_spec(config, mimi, asks, TOKENIZER) if asks else None,
    )
    bundle.write(folder, manifest)
    print(
        f"{folder}: graphs of {len(places)} weights, {sum(weights.files.values()):,} bytes to draw"
    )


def write_weights(folder: Path) -> None:
    """Draw every weight of ``folder``/places.json from seed 0, in that order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    handles: dict[str, int] = {}
    waiting: list[Future[int]] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for name, file, offset, dtype, shape in json.loads((folder / PLACES).read_text()):
            if file not in handles:
                path = folder / "stages" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                handles[file] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            values = _draw(name, torch.randn(shape, device=device, generator=generator))
            raw = values.to(getattr(torch, dtype)).cpu().contiguous().view(torch.uint8)
            if len(waiting) >= 3 * WRITERS:  # bounds what lies in memory
                waiting.pop(0).result()
            waiting.append(pool.submit(os.pwrite, handles[file], raw.numpy().data, offset))
        for left in waiting:
            left.result()
    for handle in handles.values():
        os.close(handle)
    print(f"{folder}: weights written")


def write_hashes(folder: Path) -> None:
    """Put into the manifest what the weights that were drawn are."""
    manifest = bundle.read(folder, hashes=False).manifest
    unknown = [name for name, spec in manifest.files.items() if spec.sha256 == UNKNOWN]
    with ThreadPoolExecutor(WRITERS) as pool:
        found = pool.map(bundle.describe_file, (folder / name for name in unknown))
        files = manifest.files | dict(zip(unknown, found, strict=True))
    bundle.write(folder, msgspec.structs.replace(manifest, files=files))
    print(f"{folder}: {len(unknown)} hashes written")


def _norm(name: str) -> int:
    """Features of a norm of the language model; all else that is not a matrix would be an error."""
    assert name.endswith("alpha") or name.endswith("norm.alpha"), name
    is_depth = name.startswith("depformer")
    return MOSHI_7B.lm.depth_dimension if is_depth else MOSHI_7B.lm.dimension


def _draw(name: str, noise: Tensor) -> Tensor:
    """Values of the weight called ``name``; noise: standard normal, of its shape."""
    if noise.nbytes < INLINE_BYTES and name.startswith("mimi."):
        return torch.zeros_like(noise)
    if name.endswith("alpha") or ("norm" in name and name.endswith("weight")):
        return torch.ones_like(noise)  # as the graphs have them, for which norms are ones
    if name.endswith("squared"):
        return 200 + noise.abs()  # of centroids of 256 features near one
    if "emb" in name:
        return noise
    if name.endswith(("bias", "scale")):
        return 0.05 * noise
    return noise / math.sqrt(max(1, math.prod(noise.shape[1:])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("graphs", "weights", "hashes"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", default="1-160")
    parser.add_argument("--attention", choices=("standard", "ring"), default="standard")
    parser.add_argument("--cache", choices=("e4m3", "int8"), help="8-bit rings")
    parser.add_argument("--persona", action="store_true", help="calls begin with a prompt")
    args = parser.parse_args()
    if args.what == "graphs":
        cache = DTYPES[args.cache] if args.cache else None
        batches = largest_batch(args.batches)
        write_graphs(args.folder, batches, args.attention, cache, prompted=args.persona)
    elif args.what == "weights":
        write_weights(args.folder)
    else:
        write_hashes(args.folder)


if __name__ == "__main__":
    main()
