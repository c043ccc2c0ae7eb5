# ruff: noqa: T201  (a script run by hand)
"""Golden data and prompts on a GPU that another process keeps busy: who waits for nothing is found.

    python -m bench.beside_products BUNDLE --checks 20         # ends with 1 if one failed
    python -m bench.beside_products BUNDLE --checks 20 --alone
    python -m bench.beside_products LARGE --take-up 300 --checks 30
    python -m bench.beside_products --only-products --seconds 300

A copy to the device may arrive after the call that made it, and fills run on streams of their own;
on a GPU that has nothing else to do both are there in time, whether anybody waits or not. So
another process multiplies large matrices, one after the other and never idle, while this one opens
the bundle again and again, asks all its golden data, and of a bundle with prompts feeds one, seats
it and reads its rows, which must be the same bits every time. Needs torch for the products.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from engines import bundle, parity
from engines.answers import ParityFailed
from engines.bundle import Bundle
from engines.cuda_executor import CudaExecutor, CudaOptions
from engines.cuda_prefill import CudaParking, CudaPrimer
from engines.ort_executor import STORAGE
from engines.ort_prefill import rings_of
from engines.prefill import chunk_rows, make_prompt

SIDE = 8192
"""Of the matrices: 1.4 ms a product on an H200."""
AHEAD = 64
"""Products given to the device at once, so that it never waits for its host."""
ROUNDS = 5
"""Checks in one process of one executor: what is mapped anew each time."""
POISON = 255
"""Byte of new pages, which nothing else that is asked here is full of."""
GREEDY = parity.GREEDY


def products(seconds: float) -> None:
    """Multiply until then, or until killed."""
    import torch

    x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    until, done = time.monotonic() + seconds, 0  # noqa: TID251  (a measurement)
    print("busy", flush=True)
    while time.monotonic() < until:  # noqa: TID251
        for _ in range(AHEAD):
            torch.mm(x, y)
        torch.cuda.synchronize()
        done += AHEAD
    print(f"{done} products of {SIDE} x {SIDE}")


def once(opened: Bundle) -> tuple[list[str], str]:
    """Open, ask everything; faults, and a digest of what a prompt left."""
    slots = min(4, opened.manifest.largest_batch)
    executor = CudaExecutor(opened, slots, CudaOptions(poison=POISON))
    faults, left = [], ""
    try:
        for _ in range(ROUNDS):
            try:
                parity.check(executor)
            except ParityFailed as err:
                faults.append(str(err).split(". ")[0])
        if opened.manifest.prompt is not None and slots > 1:
            primer = executor.primer()
            try:
                parity.check_prompt(executor, primer)
            except ParityFailed as err:
                faults.append(str(err).split(". ")[0])
            digests = {fed(executor, primer) for _ in range(ROUNDS)}
            if len(digests) > 1:
                faults.append(f"a prompt left {len(digests)} different states in {ROUNDS} runs")
            left = digests.pop()
    finally:
        executor.close()
    return faults, left


def fed(executor: CudaExecutor, primer: CudaPrimer) -> str:
    """Feed two newcomers in turns beside a session's ticks, seat one; a digest of all he has."""
    spec, last = primer.spec, executor.slots - 1
    rows = min(primer.retain, spec.longest_frames)
    frames = np.random.default_rng(1).integers(0, 8, (rows, len(spec.delays)))
    (width,) = {t.row_shape[0] for t in spec.prefill.inputs if t.name == "embedded"}
    kinds = {t.dtype for t in spec.prefill.inputs if t.name == "embedded"}
    empty = np.zeros((0, width), np.float32 if kinds == {"float32"} else np.uint16)
    prompt = make_prompt(spec, frames, empty)
    executor.join(0, GREEDY)
    executor.audio_in[:] = 0
    done = dict.fromkeys((last, last - 1) if last > 1 else (last,), 0)
    for slot in done:
        primer.clear(slot)
    while any(count < prompt.shared_rows for count in done.values()):
        for slot, count in done.items():
            if left := prompt.shared_rows - count:
                chunk = chunk_rows(count, left, 7, primer.retain)
                primer.feed(slot, prompt, count, chunk)
                done[slot] += chunk
        executor.step(1)
    primer.settle(last, 1, GREEDY, primer.open(last, prompt, GREEDY))
    found = hashlib.sha256()
    for ring in rings_of(
        spec, {region.name: region for region in executor.bundle.manifest.regions}
    ):
        found.update(primer.read(1, ring.name, 0, prompt.shared_rows).tobytes())
    executor.step(2)
    found.update(executor.text[1:2].tobytes())
    for slot in done:
        if slot != 1:
            primer.leave(slot)
    return found.hexdigest()


def taken_up(opened: Bundle, rows: int, count: int) -> str:
    """Write and age ``count`` times each; says what read back wrong, or nothing."""
    executor = CudaExecutor(opened, 3, CudaOptions(batches=(1,), poison=POISON))
    parking, rng = CudaParking(executor), np.random.default_rng(0)
    rings = [r for r in opened.manifest.regions if r.name.startswith("temporal.") and r.in_place]
    some = rings[:2] + rings[-2:]
    executor.join(0, {})
    wrong = late = 0
    for index in range(count):
        slot = 1 + index % 2
        parking.clear(slot)
        given = []
        for ring in some:
            kind = STORAGE[ring.dtype][0]
            shape = [rows if n == ring.clock.axis else d for n, d in enumerate(ring.shape)]
            raw = rng.integers(1, 100, (*shape, np.dtype(kind).itemsize), dtype=np.uint8)
            given.append(raw.view(kind).reshape(shape))
            parking.write(slot, ring.name, 0, given[-1])
        pairs = zip(some, given, strict=True)
        read = [parking.read(slot, r.name, 0, rows).tobytes() == g.tobytes() for r, g in pairs]
        wrong += not all(read)
        parking.leave(slot)
        while not executor.arena.is_settled:  # so that the next one's pages are new
            executor.step(1)
    for _ in range(count):
        executor.age(1, rows)
        held = [executor.region(ring.name, 1).view(np.uint8) for ring in some]
        late += any(bool((ring == POISON).all(-1).any()) for ring in held)
    executor.close()
    if not wrong and not late:
        return ""
    return f"{wrong} of {count} snapshots read back wrong, {late} of {count} aged sessions"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--checks", type=int, default=20, help="how often it is opened")
    parser.add_argument("--take-up", type=int, default=0, metavar="ROWS", help="of a snapshot")
    parser.add_argument("--alone", action="store_true", help="without the other process")
    parser.add_argument("--only-products", action="store_true", help="be the other process")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for how long")
    args = parser.parse_args()
    if args.only_products:
        products(args.seconds)
        return 0
    if args.bundle is None:
        parser.error("name a bundle")
    opened = bundle.read(args.bundle, hashes=False)
    command = [sys.executable, "-m", "bench.beside_products", "--only-products"]
    other = None
    if not args.alone:
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        other.stdout.readline()
    faults: Counter[str] = Counter()
    states, failed = set(), 0
    try:
        if args.take_up:
            found_wrong = taken_up(opened, args.take_up, args.checks)
            faults.update([found_wrong] if found_wrong else [])
            failed += bool(found_wrong)
        for _ in range(0 if args.take_up else args.checks):
            found, left = once(opened)
            failed += bool(found)
            faults.update(found)
            states.add(left)
        if other is not None:
            assert other.poll() is None, "the products ended before the checks"
    finally:
        if other is not None:
            other.kill()
            other.wait()
    for fault, count in faults.most_common():
        print(f"{count:>4} x {fault}")
    if len(states) > 1:
        print(f"prompts left {len(states)} different states in {args.checks} runs")
    where = "alone" if args.alone else f"beside products of {SIDE} x {SIDE}"
    of = "1" if args.take_up else args.checks
    print(f"{args.bundle} {where}: {failed} of {of} openings with a fault")
    return int(failed > 0 or len(states) > 1)


if __name__ == "__main__":
    sys.exit(main())
