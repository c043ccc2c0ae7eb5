# ruff: noqa: T201  (a script run by hand)
"""What the tick thread does beside the engine's step: gather, scatter, records; with many callers.

    python -m bench.tick_thread [--sessions 1 40 80 160] [--ticks 300]

The engine is a stub that does nothing, the frame rings are real shared memory, written and read by
this process between ticks, so that the tick finds its caches as cold as it does in a box. Thread
time is what the tick costs; wall time has in it whatever else the machine does.
"""

import argparse
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.channel import Channel
from appliance.clock import NS_PER_MS, MonotonicClock, TickGrid
from appliance.frame_ring import UplinkHeader
from appliance.record_ring import RecordRing
from appliance.seat import Arrive, Seat
from appliance.session import SessionId
from appliance.tick_loop import TickLoop, TickPolicy
from engines import bundle as bundles
from engines.bundle import Bundle
from tests import small

PERIOD_NS = 40 * NS_PER_MS
WARM_TICKS = 20


class Stub:
    """An engine that takes no time and says what it heard one tick ago."""

    def __init__(self, bundle: Bundle, slots: int) -> None:
        samples = bundle.manifest.timing.samples_per_frame
        self.bundle, self.slots = bundle, slots
        self.audio_in: NDArray[np.float32] = np.zeros((slots, samples), np.float32)
        self.audio_out: NDArray[np.float32] = np.zeros((slots, samples), np.float32)
        self.text: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.valid: NDArray[np.bool_] = np.ones(slots, np.bool_)
        self.began_ns = self.ended_ns = 0

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        """Nothing to do."""

    def move(self, source: int, target: int) -> None:
        """Nothing to do."""

    def step(self, batch: int) -> None:
        self.began_ns = time.thread_time_ns()
        self.audio_out[:batch] = self.audio_in[:batch]
        self.ended_ns = time.thread_time_ns()

    def close(self) -> None:
        """Nothing to do."""


def measure(bundle: Bundle, sessions: int, ticks: int) -> NDArray[np.int64]:
    """(ticks, 3): thread time before the step and after it, wall time of both; nanoseconds."""
    clock, stub = MonotonicClock(), Stub(bundle, sessions)
    loop = TickLoop(
        executor=stub,
        clock=clock,
        grid=TickGrid(clock.now_ns() + PERIOD_NS, PERIOD_NS),
        policy=TickPolicy(2**60, 4),
        ring=RecordRing(2 * sessions),
    )
    pcm = np.zeros(bundle.manifest.timing.samples_per_frame, np.float32)
    names = [f"dbxbench-{uuid.uuid4().hex[:12]}" for _ in range(sessions)]
    ours = [Channel.create(name, len(pcm)) for name in names]
    theirs = [Channel.attach(name) for name in names]
    found = np.zeros((ticks + WARM_TICKS, 3), np.int64)
    try:
        for number, channel in enumerate(ours, 1):
            loop.inbox.append(Arrive(Seat(SessionId(number), number, channel, {}, 2**62)))
        tick = 0
        for row in found:
            for line in theirs:
                line.uplink.put(UplinkHeader(tick, 0, 1), pcm)
            tick = max(tick, loop.grid.tick_at(clock.now_ns()) + 1)
            clock.sleep_until(loop.grid.start_ns(tick))
            wall_ns, began_ns = clock.now_ns(), time.thread_time_ns()
            tick = loop.turn(tick)
            ended_ns, took_ns = time.thread_time_ns(), clock.now_ns() - wall_ns
            row[:] = stub.began_ns - began_ns, ended_ns - stub.ended_ns, took_ns
            for line in theirs:
                assert line.downlink.get(pcm) is not None
            loop.ring.take()
    finally:
        for channel in (*theirs, *ours):
            channel.close()
        for channel in ours:
            channel.unlink()
    return found[WARM_TICKS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 40, 80, 160])
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--bundle", type=Path, help="(build/small)")
    args = parser.parse_args()
    bundle = bundles.read(args.bundle or small.built())
    if True:
        for sessions in args.sessions:
            found = measure(bundle, sessions, args.ticks) / NS_PER_MS
            before, after, wall = np.median(found, axis=0)
            both = np.quantile(found[:, 0] + found[:, 1], (0.5, 0.99))
            print(
                f"{sessions} sessions: {before:.2f} ms before the step, {after:.2f} after it; both "
                f"p50 {both[0]:.2f}, p99 {both[1]:.2f} of the thread's time; p50 of the clock's "
                f"{wall:.2f}"
            )


if __name__ == "__main__":
    main()
