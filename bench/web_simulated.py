"""One websocket call on a clock that jumps: the line's own code, in a world as bad as asked.

The call (`WebCall`), its codecs and its buffers are the real ones; the box is a loop that echoes,
the client one of `web_players`. Who is late, and by how much, is drawn from a seed, so the same
figures come out on a busy machine and on an idle one. Decides nothing about what is measured
(`web_mouth_to_ear`), and leaves out what sockets and the interpreter cost.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS
from appliance.frame_ring import CONCEALED, GENERATED, DownlinkHeader
from appliance.lines.web_call import WebCall
from appliance.lines.web_figures import Figures
from appliance.lines.web_pace import TickTimes
from appliance.lines.wire import Wish
from bench.echo_box import PERIOD_MS, RATE_HZ, SAMPLES
from bench.web_players import Caller

SESSION, GENERATION = 9, 3
_names = itertools.count()


@dataclass(frozen=True)
class World:
    """How late everybody is, in ms. Exponential draws have the mean that is named."""

    step_ms: float = 15.0
    """A tick takes this, and a tenth of it times an exponential draw more."""
    slow_ticks: float = 0.0
    """Share of ticks that take ``slow_ms`` more."""
    slow_ms: float = 0.0
    wake_ms: float = 0.3
    """The line's loop wakes up later than it asked for by up to twice this."""
    stalls_per_s: float = 0.0
    """How often the line's loop does nothing for a while: others have its core."""
    stall_ms: float = 0.0
    longest_stall_ms: float = 0.0
    way_ms: float = 0.5
    """Mean of what the client's own lateness and the network take, each way, beyond the least."""


WORLDS = {
    "quiet": World(),
    "busy": World(
        slow_ticks=0.01,
        slow_ms=20,
        wake_ms=1,
        stalls_per_s=4,
        stall_ms=4,
        longest_stall_ms=25,
        way_ms=1.5,
    ),
}


class _Line:
    """When the line's loop runs: never in a stall."""

    def __init__(self, world: World, until_ms: float, rng: np.random.Generator) -> None:
        self._stalls: list[tuple[float, float]] = []
        at_ms = 0.0
        while world.stalls_per_s and at_ms < until_ms:
            at_ms += float(rng.exponential(1000 / world.stalls_per_s))
            length_ms = min(float(rng.exponential(world.stall_ms)), world.longest_stall_ms)
            self._stalls.append((at_ms, at_ms + length_ms))
            at_ms += length_ms

    def runs_ms(self, at_ms: float) -> float:
        """The first moment from ``at_ms`` on."""
        while self._stalls and self._stalls[0][1] <= at_ms:
            self._stalls.pop(0)
        if self._stalls and self._stalls[0][0] <= at_ms:
            return self._stalls[0][1]
        return at_ms


@dataclass(frozen=True, slots=True)
class Held:
    """What came of one call."""

    figures: Figures
    """What the line knows of it."""
    start_ms: float
    """When speech began."""
    heard: NDArray[np.float32]
    """What the model was given, frame by frame; zeros where nothing was."""


def hold(caller: Caller, world: World, seed: int) -> Held:
    """One call, said and heard to its end."""
    channel = Channel.create(f"dbx-simulated-{id(caller)}-{next(_names)}", SAMPLES)
    try:
        return _Call(caller, world, seed, channel).run()
    finally:
        channel.close()
        channel.unlink()


class _Call:
    def __init__(self, caller: Caller, world: World, seed: int, channel: Channel) -> None:
        self._caller, self._world, self._channel = caller, world, channel
        self._rng = np.random.default_rng(seed)
        self._t0_ms = float(self._rng.uniform(0, PERIOD_MS))
        self._until_ms = caller.due_ms(len(caller.payloads))
        self._line = _Line(world, self._until_ms, self._rng)
        self._events: list[tuple[float, int, bool, Callable[[float], None]]] = []
        """When, in which order, whether the line's loop does it, what."""
        self._order = itertools.count()
        self._sent_ms = 0.0
        self._made = 0
        self._heard: list[NDArray[np.float32]] = []
        self._before = np.zeros(SAMPLES, np.float32)
        welcome = control.Welcome(
            version=control.PROTOCOL,
            bundle="",
            model="echo",
            trained=False,
            notice="",
            period_ns=PERIOD_MS * NS_PER_MS,
            sample_rate_hz=RATE_HZ,
            samples_per_frame=SAMPLES,
            t0_ns=round(self._t0_ms * NS_PER_MS),
            pieces="",
            silent_ids=(0,),
        )
        times = TickTimes(welcome.period_ns)
        times.forecast_ns = round(1.5 * world.step_ms * NS_PER_MS)
        codec = caller.kind.subprotocol
        self._call = WebCall(1, Wish({}), "", welcome, ["", "a"], 0, codec, times)
        self._call.advance(0)
        admitted = control.Admitted(1, SESSION, GENERATION, channel.name, 16, 64, 256)
        self._call.admitted(admitted, 0, welcome.t0_ns)

    def run(self) -> Held:
        start_ms = 5.0
        came_ms = 0.0
        for index, payload in enumerate(self._caller.payloads):
            way_ms = float(self._rng.exponential(self._world.way_ms))
            came_ms = max(came_ms, start_ms + self._caller.due_ms(index) + way_ms)  # in order: TCP
            if payload:
                self._at(came_ms, partial(self._came, b"\x01" + payload), by_line=True)
        for tick in range(int((self._until_ms - self._t0_ms) / PERIOD_MS)):
            self._at(self._t0_ms + tick * PERIOD_MS, partial(self._tick, tick))
        self._at(0.0, self._turn, by_line=True)
        while self._events:
            now_ms, _, by_line, do = heapq.heappop(self._events)
            if now_ms > self._until_ms:
                break
            if by_line and (runs_ms := self._line.runs_ms(now_ms)) > now_ms:
                self._at(runs_ms, do, by_line=True)
                continue
            do(now_ms)
        return Held(self._call.figures(), start_ms, np.concatenate(self._heard))

    def _at(self, ms: float, do: Callable[[float], None], *, by_line: bool = False) -> None:
        heapq.heappush(self._events, (ms, next(self._order), by_line, do))

    def _came(self, message: bytes, now_ms: float) -> None:
        self._call.receive(message, round(now_ms * NS_PER_MS))

    def _turn(self, now_ms: float) -> None:
        now_ns = round(now_ms * NS_PER_MS)
        self._call.advance(now_ns)
        while self._call.outbox:
            self._sent_ms = max(
                self._sent_ms, now_ms + float(self._rng.exponential(self._world.way_ms))
            )
            message = self._call.outbox.popleft()
            self._at(self._sent_ms, partial(self._caller.hear, message))
        while self._channel.receipts.get() is not None:
            pass
        late_ms = 0.05 + float(self._rng.uniform(0, 2 * self._world.wake_ms))
        wake_ms = max(now_ms, self._call.wake_ns(now_ns) / NS_PER_MS)
        self._at(wake_ms + late_ms, self._turn, by_line=True)

    def _tick(self, tick: int, now_ms: float) -> None:
        world = self._world
        pcm: NDArray[np.float32] = np.zeros(SAMPLES, np.float32)
        got = self._channel.uplink.get(pcm)
        if got is None and not self._made:
            return
        took_ms = world.step_ms * (1 + 0.1 * float(self._rng.exponential()))
        took_ms += world.slow_ms * (self._rng.random() < world.slow_ticks)
        header = DownlinkHeader(
            SESSION,
            GENERATION,
            self._made,
            tick,
            deadline_ns=round((now_ms + PERIOD_MS) * NS_PER_MS),
            made_ns=round((now_ms + took_ms) * NS_PER_MS),
            text=0,
            flags=GENERATED | (CONCEALED if got is None else 0),
            heard=-1 if got is None else got.frame_index,
        )
        self._made += 1
        self._heard.append(pcm)
        frame, self._before = self._before, pcm
        self._at(now_ms + took_ms, lambda _: self._put(header, frame))

    def _put(self, header: DownlinkHeader, frame: NDArray[np.float32]) -> None:
        assert self._channel.downlink.put(header, frame)
