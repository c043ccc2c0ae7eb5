# ruff: noqa: T201  (a script run by hand)
"""Are two runs of a bundle on the GPU equal bit for bit, and what does a neighbour change?

    python -m bench.cuda_bits isolated BUNDLE     # attention replaced by the identity, 620 ticks
    python -m bench.cuda_bits batches BUNDLE      # as it is: batch 1 against 32, and reruns, greedy

`isolated` writes a bundle beside the given one (its weights linked, not copied) in which every
Attention node hands its query on, and expects three things of four sessions that join one after
the other: run = rerun, memory on demand = memory in full, graph replay = eager run. It ends with
1 if one of them fails. `batches` reports how long one session is told the same in batches of other
sizes, and how far its logits are apart until then. Needs onnx beside the cuda extra.
"""

import argparse
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from engines import bundle, cuda
from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.program import Buffer

TICKS = 620
JOINS = (0, 7, 100, 260)
BATCH_TICKS = 120
LARGE = 32

Told = tuple[int, NDArray[np.float32], NDArray[np.float32]]
"""Text, text logits and sound of one tick."""


def isolate(given: Bundle) -> Bundle:
    """``given`` with Attention nodes replaced by the identity of their query."""
    folder = given.path.with_name(given.path.name + "-isolated")
    files = dict(given.manifest.files)
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if not name.endswith(".onnx"):
            os.link(given.file(name), target)
            continue
        model = onnx.load(given.file(name), load_external_data=False)
        for node in model.graph.node:
            if node.op_type == "Attention":
                node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
        target.write_bytes(model.SerializeToString(deterministic=True))
        files[name] = bundle.describe_file(target)
    return bundle.write(folder, msgspec.structs.replace(given.manifest, files=files))


def run_isolated(given: Bundle) -> int:
    return int(same_three_times(isolate(given)) > 0)


def same_three_times(opened: Bundle) -> int:
    """Run, rerun, in full and eagerly; returns how many of the three differ from the first."""
    options = CudaOptions(batches=range(1, len(JOINS) + 1))
    executor = CudaExecutor(opened, len(JOINS), options)
    first, again, eager = heard(executor), heard(executor), eagerly(executor)
    executor.close()
    in_full = once(opened, replace(options, on_demand=False))
    return compared(first, again, eager, in_full)


def compared(
    first: list[bytes], again: list[bytes], eager: list[bytes], in_full: list[bytes]
) -> int:
    """Say where each parts from the first; how many do."""
    faults = 0
    for name, other in (
        ("run = rerun", again),
        ("replay = eager", eager),
        ("on demand = in full", in_full),
    ):
        apart = [tick for tick, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        faults += bool(apart)
        print(f"{name}: {f'parts at tick {apart[0]}' if apart else f'{TICKS} ticks equal'}")
    print(f"{len(set(first))} of {TICKS} ticks differ from one another")
    return faults


def once(opened: Bundle, options: CudaOptions) -> list[bytes]:
    executor = CudaExecutor(opened, len(JOINS), options)
    found = heard(executor)
    executor.close()
    return found


def eagerly(executor: CudaExecutor) -> list[bytes]:
    """`heard` without graphs, by the same executor."""
    options = executor.options
    executor.options = replace(options, graphs=False)
    executor.bind_eager(range(1, len(JOINS) + 1))
    found = heard(executor)
    executor.options = options
    return found


def heard(executor: CudaExecutor) -> list[bytes]:
    """A hash of everything said in each tick."""
    rng = np.random.default_rng(1)
    found, batch = [], 0
    for tick in range(TICKS):
        if tick in JOINS:
            executor.join(batch, {"sampling.seed": tick + 1})
            batch += 1
        executor.audio_in[:batch] = 0.1 * rng.standard_normal(executor.audio_in[:batch].shape)
        executor.step(batch)
        said = executor.audio_out[:batch].tobytes() + executor.text[:batch].tobytes()
        found.append(hashlib.sha256(said).digest())
    return found


def run_batches(given: Bundle) -> int:
    executor = CudaExecutor(given, LARGE, CudaOptions(batches=(1, LARGE)))
    for one, other in ((1, LARGE), (1, 1), (LARGE, LARGE)):
        first, second = told(executor, one), told(executor, other)
        same = next(
            (
                tick
                for tick, (a, b) in enumerate(zip(first, second, strict=True))
                if a[0] != b[0] or np.abs(a[2] - b[2]).max() > 1e-2
            ),
            BATCH_TICKS,
        )
        apart = [
            np.abs(a[1] - b[1]).max() for a, b in zip(first[:same], second[:same], strict=True)
        ]
        print(
            f"batch {one} and {other}: told the same for {same} ticks of {BATCH_TICKS}; logits "
            f"up to {max(apart, default=0.0):.2g} apart until then, "
            f"of {np.abs(first[0][1]).max():.2g}"
        )
    executor.close()
    return 0


def told(executor: CudaExecutor, batch: int) -> list[Told]:
    """Text, text logits and sound of slot 0 in every tick."""
    rng = np.random.default_rng(1)
    found = []
    for slot in range(batch):
        executor.join(slot, {"sampling.temperature": 0.0, "sampling.text_temperature": 0.0})
    for _ in range(BATCH_TICKS):
        speech = 0.1 * rng.standard_normal((LARGE, executor.audio_in.shape[1]))
        executor.audio_in[:batch] = speech[:batch]
        executor.step(batch)
        place = executor.layout.whole[Buffer("text_logits", 0)]
        logits = cuda.read_device(executor.wire_address("text_logits"), place.row_bytes)
        row = np.frombuffer(logits, np.float32)
        found.append((int(executor.text[0]), row, executor.audio_out[0].copy()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("isolated", "batches"))
    parser.add_argument("bundle", type=Path)
    args = parser.parse_args()
    opened = bundle.read(args.bundle, hashes=False)
    return run_isolated(opened) if args.what == "isolated" else run_batches(opened)


if __name__ == "__main__":
    sys.exit(main())
