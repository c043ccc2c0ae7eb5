"""Fakes that implement the real protocols: a clock that jumps, an executor that echoes.

`FakeClock` sleeps by moving on. `FakeExecutor` plays back what it heard one frame ago, so that
content can be checked through every layer, and poisons a slot's state until somebody joins it.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import TickGrid
from appliance.frame_ring import LAST, DownlinkHeader, Outcome, Receipt, UplinkHeader
from appliance.record_ring import RecordRing
from appliance.seat import Arrive, Seat
from appliance.session import SessionId
from appliance.tick_loop import TickLoop, TickPolicy
from engines.bundle import (
    FORMAT,
    AudioPorts,
    Bundle,
    Manifest,
    ModelInfo,
    RegionSpec,
    TextPorts,
    Timing,
    describe_file,
)
from engines.clocks import ClockKind, NativeClock, Order
from engines.executor import SettingError, check_setting

SAMPLES = 1920
PERIOD_NS = 80 * MS


class FakeClock:
    """Time that passes when somebody sleeps, or when a test says so."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)

    def advance(self, ns: int) -> None:
        self._now_ns += ns


def make_bundle(folder: Path, largest_batch: int = 4, samples: int = SAMPLES) -> Bundle:
    """A bundle whose model is `FakeExecutor`: a manifest and text pieces, no graphs.

    One session owns 1,000 float32 in a ring at full retention, 4 bytes of `gain`, 8 of `seed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = folder / "pieces.json"
    pieces.write_text(json.dumps(["\u2581zero", "\u2581one", "two", "<pad>"]))
    constant = NativeClock(ClockKind.CONSTANT)
    return Bundle(
        folder,
        Manifest(
            format=FORMAT,
            model=ModelInfo("echo", 0, "0" * 64, trained=False, notice="an echo, for tests"),
            timing=Timing(PERIOD_NS, samples * 1_000_000_000 // PERIOD_NS, samples),
            largest_batch=largest_batch,
            regions=(
                RegionSpec(
                    "memory",
                    "float32",
                    (1000,),
                    NativeClock(ClockKind.RING, advance="1", retain=1000, order=Order.MODULO),
                ),
                RegionSpec("gain", "float32", (), constant, fill=1, bounds=(0, 2)),
                RegionSpec("seed", "int64", (), constant, fill=0, bounds=(0, 2**31)),
            ),
            stages=(),
            audio=AudioPorts("audio", "reply"),
            text=TextPorts("text", "pieces.json", (3,)),
            files={"pieces.json": describe_file(pieces)},
        ),
    )


class FakeExecutor:
    """Echo with a delay of one frame: frame k out is gain * frame k-1 in; frame 0 is silence.

    text: frames the session has seen, modulo 3. work: called on every step, in its place; it may
    advance a clock, or raise. break_slot: make that slot's next output NaN.
    """

    def __init__(
        self,
        bundle: Bundle,
        slots: int = 4,
        work: Callable[[int], None] = lambda batch: None,
    ) -> None:
        samples = bundle.manifest.timing.samples_per_frame
        self.bundle = bundle
        self.slots = slots
        self.audio_in: NDArray[np.float32] = np.zeros((slots, samples), np.float32)
        self.audio_out: NDArray[np.float32] = np.zeros((slots, samples), np.float32)
        self.text: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.valid: NDArray[np.bool_] = np.ones(slots, np.bool_)
        self.break_slot = -1
        self.batches: deque[int] = deque(maxlen=8)
        self.work = work
        # NaN until somebody joins: a slot that steps on what it never was given is heard.
        self._heard = np.full((slots, samples), np.nan, np.float32)
        self._gain = np.full(slots, np.nan, np.float32)
        self._frames = np.zeros(slots, np.int64)

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        regions = {region.name: region for region in self.bundle.manifest.regions}
        for name, value in settings.items():
            check_setting(regions, name, value)
        if settings.get("seed") == 13:
            raise SettingError("seed = 13 is refused late, for tests")
        self._heard[slot] = 0
        self._gain[slot] = settings.get("gain", 1.0)
        self._frames[slot] = 0

    def move(self, source: int, target: int) -> None:
        for state in (self._heard, self._gain, self._frames):
            state[target] = state[source]
        self._heard[source] = np.nan

    def step(self, batch: int) -> None:
        self.work(batch)
        self.batches.append(batch)
        np.multiply(self._heard[:batch], self._gain[:batch, None], out=self.audio_out[:batch])
        self._heard[:batch] = self.audio_in[:batch]
        np.remainder(self._frames[:batch], 3, out=self.text[:batch])
        self.valid[:batch] = self._frames[:batch] > 0
        self._frames[:batch] += 1
        if 0 <= self.break_slot < batch:
            self.audio_out[self.break_slot] = np.nan
            self.break_slot = -1

    def close(self) -> None:
        pass


def make_loop(
    executor: FakeExecutor,
    clock: FakeClock,
    catch_up_ns: int = 80 * MS,
    lag_limit_frames: int = 4,
    records: int = 4096,
    unread_limit_frames: int = 2**31,
) -> TickLoop:
    """A tick loop whose tick 0 starts at time 0."""
    return TickLoop(
        executor=executor,
        clock=clock,
        grid=TickGrid(0, PERIOD_NS),
        policy=TickPolicy(catch_up_ns, lag_limit_frames, unread_limit_frames),
        ring=RecordRing(records),
    )


class FakeCaller:
    """A line with one call, on the other end of a real channel; sample values tell frames apart."""

    def __init__(self, loop: TickLoop, name: str, number: int, **settings: float) -> None:
        self.session = SessionId(number)
        self.generation = number
        self.channel = Channel.create(name, loop.executor.bundle.manifest.timing.samples_per_frame)
        self._loop = loop
        self._line = Channel.attach(name)
        self._settings = settings
        self._sent = 0
        self._pcm = np.zeros(self.channel.samples, np.float32)

    def arrive(self, wait_until_ns: int = 2**62) -> Seat:
        seat = Seat(self.session, self.generation, self.channel, self._settings, wait_until_ns)
        self._loop.inbox.append(Arrive(seat))
        return seat

    def value(self, frame: int) -> float:
        """What every sample of the caller's frame ``frame`` is."""
        return float(np.float32(self.session + frame / 1024))

    def speak(self, frames: int = 1, last: bool = False, value: float | None = None) -> None:
        """Put frames into the uplink; ``last`` flags the last of them."""
        for n in range(frames):
            self._pcm.fill(self.value(self._sent) if value is None else value)
            flags = LAST if last and n == frames - 1 else 0
            assert self._line.uplink.put(UplinkHeader(self._sent, flags, 1), self._pcm)
            self._sent += 1

    def hear(self) -> list[tuple[DownlinkHeader, float]]:
        """Take all that came back: headers, and the value of the frame's samples."""
        heard = []
        while (header := self._line.downlink.get(self._pcm)) is not None:
            assert (self._pcm == self._pcm[0]).all() or np.isnan(self._pcm).all()
            heard.append((header, float(self._pcm[0])))
        return heard

    def receipt(self, index: int, outcome: Outcome = Outcome.DELIVERED, buffer_ns: int = 0) -> None:
        receipt = Receipt(self.session, self.generation, index, outcome, 1, buffer_ns)
        assert self._line.receipts.put(receipt)

    def close(self) -> None:
        self._line.close()
        self.channel.close()
        self.channel.unlink()
