"""Time the published `moshi` package on this machine: the figures ours are compared with.

    python -m bench.peer_moshi --batches 1,8,32,64 [--ticks 40] [--device cuda] [--layers 32]

Also run by `duplexbox engines bench --peer moshi`, after its own measurement, on the same machine.
A tick is `mimi.encode`, `LMGen.step` and `mimi.decode`, each waited for; weights are random, of
Moshi 7B's shape in bfloat16, and its own CUDA graphs are on. It reads its whole window at every
age, so no age is asked for. Prints one JSON object. Needs torch and

    pip install --no-deps moshi==0.2.13 && pip install 'duplexbox[peer]'
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

WARM_UPS = 15
"""Ticks that are not counted; the package captures its graphs in the first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32, help="fewer, to try the script")
    args = parser.parse_args()
    os.environ.setdefault("NO_TORCH_COMPILE", "1")  # read when the package is imported
    loaders: Any = importlib.import_module("moshi.models.loaders")
    models: Any = importlib.import_module("moshi.models")
    torch.manual_seed(0)
    mimi = loaders.get_mimi(None, device=args.device, num_codebooks=8).eval()
    loaders._lm_kwargs["num_layers"] = args.layers
    lm = loaders.get_moshi_lm(None, device=args.device, dtype=torch.bfloat16).eval()
    for parameter in lm.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    rows = []
    for batch in (int(word) for word in args.batches.split(",")):
        generator = models.LMGen(lm, use_sampling=True, support_out_of_sync=True)
        rows.append(measure(mimi, generator, batch, args.ticks, args.device))
        del generator
    found = {
        "peer": "moshi 0.2.13",
        "torch": torch.__version__,
        "layers": args.layers,
        "rows": rows,
    }
    json.dump(found, sys.stdout, indent=1)
    return 0


@torch.no_grad()
def measure(mimi: Any, generator: Any, batch: int, ticks: int, device: str) -> dict[str, Any]:
    """Medians in microseconds, and bytes on the device, of ``batch`` sessions."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    spent: list[list[float]] = []
    with mimi.streaming(batch), generator.streaming(batch):
        for _ in range(WARM_UPS + ticks):
            pcm = 0.1 * torch.randn(batch, 1, mimi.frame_size, device=device)
            wait()
            marks = [time.perf_counter()]  # noqa: TID251  (a measurement)
            codes = mimi.encode(pcm)
            wait()
            marks.append(time.perf_counter())  # noqa: TID251
            spoken = generator.step(codes)
            wait()
            marks.append(time.perf_counter())  # noqa: TID251
            if spoken is not None:
                mimi.decode(spoken[:, 1:9].clamp(0, 2047))
            wait()
            marks.append(time.perf_counter())  # noqa: TID251
            spent.append([1e6 * (later - mark) for mark, later in pairwise(marks)])
    counted = torch.tensor(spent[WARM_UPS:])
    encode, step, decode = counted.median(0).values.tolist()
    return {
        "batch": batch,
        "encode_us": encode,
        "lm_us": step,
        "decode_us": decode,
        "p50_us": float(counted.sum(1).median()),
        "max_us": float(counted.sum(1).max()),
        "device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


if __name__ == "__main__":
    sys.exit(main())
