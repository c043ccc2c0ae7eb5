"""`duplexbox engines <verb>`: measure what runs a bundle on this machine."""

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines import bundle

if TYPE_CHECKING:
    from engines import bench, cuda_executor


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (0 done, 1 a check failed, 2 usage)."""
    parser = argparse.ArgumentParser(prog="duplexbox engines", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    bench = verbs.add_parser("bench", help="time every stage and the tick, batch by batch")
    bench.add_argument("bundle", type=Path)
    bench.add_argument(
        "--executor",
        choices=("cpu", "cuda", "tensorrt"),
        default="cpu",
        help="what runs the stages (default: %(default)s)",
    )
    bench.add_argument("--batches", default="1,4", help="batch sizes (default: %(default)s)")
    bench.add_argument(
        "--fill", default="0", help="ages of the sessions, in ticks (default: %(default)s)"
    )
    bench.add_argument("--ticks", type=int, default=500, help="ticks each (default: %(default)s)")
    bench.add_argument(
        "--eager", action="store_true", help="cuda, tensorrt: stage by stage instead of one graph"
    )
    bench.add_argument(
        "--beside-kernels",
        action="store_true",
        help="tensorrt: kernels of ours where the bundle names them, plans for the rest",
    )
    bench.add_argument(
        "--peer", choices=("moshi",), help="then time the published package here, and compare"
    )
    bench.add_argument("--no-hashes", action="store_true", help="trust the bundle's files")
    bench.add_argument("--json", action="store_true", help="for another program")
    bench.add_argument("--plot", type=Path, metavar="SVG", help="draw tick time over the batch")
    bench.set_defaults(run=run_bench)

    check = verbs.add_parser("check", help="hold a GPU to the bundle's golden data")
    check.add_argument("bundle", type=Path)
    check.add_argument(
        "--executor",
        choices=("cuda", "tensorrt"),
        default="cuda",
        help="what runs the stages (default: %(default)s)",
    )
    check.add_argument(
        "--beside-kernels",
        action="store_true",
        help="tensorrt: kernels of ours where the bundle names them, plans for the rest",
    )
    check.add_argument("--no-hashes", action="store_true", help="trust the bundle's files")
    check.set_defaults(run=run_check)

    shown = verbs.add_parser("show", help="plans of a bundle, and which of them run here")
    shown.add_argument("bundle", type=Path)
    shown.add_argument("--no-hashes", action="store_true", help="trust the plans' files")
    shown.add_argument("--json", action="store_true", help="for another program")
    shown.set_defaults(run=run_show)

    args = parser.parse_args(argv)
    if getattr(args, "beside_kernels", False) and args.executor != "tensorrt":
        parser.error("--beside-kernels goes with --executor tensorrt")
    try:
        code: int = args.run(args)
    except (bundle.BundleError, ValueError) as err:
        print(f"duplexbox engines {args.verb}: {err}", file=sys.stderr)
        return 1
    return code


def run_bench(args: argparse.Namespace) -> int:
    from engines import bench, bench_peer, bench_plot

    batches, fills = batch_list(args.batches), fill_list(args.fill)
    if args.ticks < 1:
        raise ValueError(f"--ticks {args.ticks}: at least 1 tick must run")
    opened = bundle.read(args.bundle, hashes=not args.no_hashes)
    executor, about, rate = _open_executor(args, opened, batches)
    timings, loads = [], []
    for fill in fills:
        for batch in batches:
            timings += bench.measure(executor, batch, args.ticks, fill)
            loads.append(bench.load(opened.manifest, timings[-1], rate))
            if not args.json:
                print("\n".join(bench.table(timings[-len(executor.stage_names()) - 1 :])))
                print(_floor(loads[-1]), flush=True)
    executor.close()  # the peer needs the memory
    title = f"{args.bundle} on {about}, {args.ticks} ticks each"
    peer = bench_peer.run(batches, args.ticks, args.executor) if args.peer else None
    if args.json:
        found = {
            "about": title,
            "timings": [dataclasses.asdict(timing) for timing in timings],
            "loads": [dataclasses.asdict(load) for load in loads],
            "peer": [dataclasses.asdict(row) for row in peer] if peer else None,
        }
        print(json.dumps(found, indent=1))
    else:
        print("\n".join([title, *bench_peer.compared(timings, peer or ())]))
    if args.plot:
        period_us = opened.manifest.timing.period_ns / 1e3
        args.plot.write_text(bench_plot.plot(timings, loads, period_us, title))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """As a box does at its start, with as many slots as golden data has sessions."""
    from engines import cuda_executor, parity

    opened = bundle.read(args.bundle, hashes=not args.no_hashes)
    if not opened.manifest.golden:
        raise ValueError(f"{opened.path} carries no golden data: nothing to compare with")
    sessions = max(len(spec.ages) for spec in opened.manifest.golden)
    slots = min(sessions, opened.manifest.largest_batch)
    executor = _gpu_executor(args, opened, slots, cuda_executor.CudaOptions())
    try:
        print(f"{executor.gpu} through {executor.runs_on}: {parity.check(executor)}", flush=True)
        if opened.manifest.prompt is not None:
            print(f"prompts: {parity.check_prompt(executor, executor.primer())}")
    finally:
        executor.close()
    return 0


def run_show(args: argparse.Namespace) -> int:
    from engines import machine, memory_shown, plans, plans_shown

    opened = bundle.read(args.bundle, hashes=False)
    found = []
    for folder in plans.folders(opened.path):
        try:
            recorded = plans.read(folder)
        except plans.PlansError as err:
            found.append(plans_shown.Found(folder.name, None, str(err)))
            continue
        faults = {
            plan.stage: plans.file_fault(folder, plan, hashes=not args.no_hashes)
            for plan in recorded.plans
        }
        faults = {stage: fault for stage, fault in faults.items() if fault}
        found.append(plans_shown.Found(folder.name, recorded, file_faults=faults))
    here = machine.look()
    memory = memory_shown.needs(opened.manifest)
    if args.json:
        shown = plans_shown.describe(opened, found, here)
        print(json.dumps(shown | {"memory": dataclasses.asdict(memory)}, indent=1))
    else:
        for line in plans_shown.lines(opened, found, here):
            print(line)
        print(memory_shown.line(memory))
    return 0


def _open_executor(
    args: argparse.Namespace, opened: bundle.Bundle, batches: Sequence[int]
) -> "tuple[bench.Timed, str, float | None]":
    """The executor asked for, what it runs on, and the copy rate in bytes per microsecond."""
    if args.executor == "cpu":
        from engines.ort_executor import OrtExecutor

        return OrtExecutor(opened, max(batches)), f"{_cpu()}, ONNX Runtime CPU, one thread", None
    from engines import cuda_executor, gpu

    rate = gpu.copy_rate()
    options = cuda_executor.CudaOptions(batches=batches, graphs=not args.eager)
    executor = _gpu_executor(args, opened, max(batches), options)
    memory = executor.memory()
    how = "eager" if args.eager else f"graphs of {executor.nodes(max(batches))} nodes"
    about = (
        f"{executor.device.name}, {executor.runs_on}, {how}, copies at {rate / 1e6:.2f} TB/s, "
        f"{memory.device_used / 1e9:.1f} GB used after start-up"
    )
    return executor, about, rate


def _gpu_executor(
    args: argparse.Namespace,
    opened: bundle.Bundle,
    slots: int,
    options: "cuda_executor.CudaOptions",
) -> "cuda_executor.CudaExecutor":
    if args.executor == "tensorrt":
        from engines.tensorrt_executor import TensorrtExecutor

        return TensorrtExecutor(opened, slots, options, beside_kernels=args.beside_kernels)
    from engines.cuda_executor import CudaExecutor

    return CudaExecutor(opened, slots, options)


def _floor(load: "bench.Load") -> str:
    if load.floor_us is None or load.share is None:
        return f"reads at least {load.tick_bytes / 1e9:.3f} GB"
    return (
        f"reads at least {load.tick_bytes / 1e9:.2f} GB, {load.floor_us / 1e3:.2f} ms at the copy "
        f"rate: {load.share:.0%} of the tick"
    )


def batch_list(text: str) -> list[int]:
    """ "1,4" -> [1, 4]. Raises ValueError with the form that is wanted."""
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--batches {text}: write batch sizes with commas, such as 1,4")
    return [int(word) for word in words]


def fill_list(text: str) -> list[int]:
    """ "0,300" -> [0, 300]. Raises ValueError with the form that is wanted."""
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise ValueError(f"--fill {text}: write ages in ticks with commas, such as 0,300,3000")
    return [int(word) for word in words]


def _cpu() -> str:
    """The processor's own name; figures without it mean nothing."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
