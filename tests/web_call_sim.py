"""One websocket call on a fake clock: a box that ticks and a client that talks.

The box is a channel and a loop over milliseconds: on each tick it takes a frame, and hands out an
echo a chosen time later. Nothing here waits, and every time is exact.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.frame_ring import CONCEALED, GENERATED, DownlinkHeader, Outcome
from appliance.lines.opus import OpusOut
from appliance.lines.web_call import WebCall
from appliance.lines.web_pace import TickTimes
from appliance.lines.wire import Wish

SAMPLES, PERIOD_MS, T0_MS = 1920, 80, 40
WELCOME = control.Welcome(
    version=control.PROTOCOL,
    bundle="b",
    model="echo",
    trained=False,
    notice="",
    period_ns=PERIOD_MS * MS,
    sample_rate_hz=24_000,
    samples_per_frame=SAMPLES,
    t0_ns=T0_MS * MS,
    pieces="",
    silent_ids=(0,),
)
PIECES = ["", "\u2581so", "\u2581it", "<0xC3>", "<0xA9>"]
_names = itertools.count()


@dataclass
class Sim:
    """A call, its box and its client, a millisecond at a time."""

    call: WebCall
    channel: Channel
    made_ms: Callable[[int], float] = lambda tick: 5
    """How long after its start a tick's frame is there."""
    reads: bool = True
    """Whether the client takes what is sent."""
    sends: bool = True
    at_ms: int = 0
    admitted: bool = False
    heard: list[tuple[int, bytes]] = field(default_factory=list)
    """What the client got, and when (ms)."""
    said: list[control.ToBox] = field(default_factory=list)
    receipts: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By frame_index and outcome."""
    uplink: list[int] = field(default_factory=list)
    concealed: int = 0
    made: int = 0
    live: bool = False
    left: bool = False
    backlog: int = 0
    """Uplink frames that the box leaves lying, as after ticks it missed."""
    _ready: list[tuple[float, DownlinkHeader, NDArray[np.float32]]] = field(default_factory=list)
    _opus: OpusOut = field(default_factory=OpusOut)
    _before: NDArray[np.float32] = field(default_factory=lambda: np.zeros(SAMPLES, np.float32))

    def admit(self) -> None:
        message = control.Admitted(1, 9, 3, self.channel.name, 16, 64, 256)
        self.call.admitted(message, self.at_ms * MS, T0_MS * MS)
        self.admitted = True

    def run(self, until_ms: int) -> None:
        while self.at_ms < until_ms:
            self.at_ms += 1
            if self.sends and self.at_ms % 40 == 13:  # a page of 40 ms
                tone = np.sin(np.arange(960, dtype=np.float32) / 9) * 0.3
                pages = self._opus.encode(tone.astype(np.float32))
                self.call.receive(b"\x01" + pages, self.at_ms * MS)
            if self.admitted and (self.at_ms - T0_MS) % PERIOD_MS == 0:
                self._tick((self.at_ms - T0_MS) // PERIOD_MS)
            while self._ready and self._ready[0][0] <= self.at_ms:
                _, header, pcm = self._ready.pop(0)
                now = header._replace(made_ns=self.at_ms * MS)
                assert self.channel.downlink.put(now, pcm)
            self.turn()

    def turn(self) -> None:
        self.said += self.call.advance(self.at_ms * MS)
        self.left |= any(isinstance(m, control.Leave) for m in self.said)
        while self.reads and self.call.outbox:
            self.heard.append((self.at_ms, self.call.outbox.popleft()))
        self.settle()

    def settle(self) -> None:
        while (receipt := self.channel.receipts.get()) is not None:
            assert (receipt.session, receipt.generation) == (9, 3)
            self.receipts[receipt.frame_index, receipt.outcome] += 1

    def gone(self, why: str = "left") -> None:
        self.call.gone(control.Gone(9, why), self.at_ms * MS)
        self.settle_after()

    def settle_after(self) -> None:
        self.settle()
        while self.call.outbox:
            self.heard.append((self.at_ms, self.call.outbox.popleft()))

    def _tick(self, tick: int) -> None:
        waiting = self.channel.uplink.waiting
        if self.left or (not self.live and not waiting):
            return
        self.live = True
        pcm = np.zeros(SAMPLES, np.float32)
        got = self.channel.uplink.get(pcm) if waiting > self.backlog else None
        flags = GENERATED
        if got is None:
            flags |= CONCEALED
            self.concealed += 1
        else:
            self.uplink.append(got.frame_index)
        start_ms = T0_MS + tick * PERIOD_MS
        header = DownlinkHeader(
            9,
            3,
            self.made,
            tick,
            (start_ms + PERIOD_MS) * MS,
            0,
            self.made % len(PIECES),
            flags,
            -1 if got is None else got.frame_index,
        )
        self._ready.append((start_ms + self.made_ms(tick), header, self._before))
        self._before = pcm
        self.made += 1

    def kinds(self) -> list[int]:
        return [message[0] for _, message in self.heard]

    def audio_ms(self) -> list[int]:
        return [at for at, message in self.heard if message[0] == 1]

    def outcomes(self) -> dict[int, list[int]]:
        return {outcome: sorted(i for i, o in self.receipts if o == outcome) for outcome in Outcome}


def start(wish: Wish | None = None, subprotocol: str = "", times: TickTimes | None = None) -> Sim:
    call = WebCall(1, wish or Wish({}), "127.0.0.1", WELCOME, PIECES, 0, subprotocol, times)
    channel = Channel.create(f"dbx-test-web-{id(call)}-{next(_names)}", SAMPLES)
    return Sim(call, channel)


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = start()
    yield sim
    sim.channel.close()
    sim.channel.unlink()
