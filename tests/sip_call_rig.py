"""One telephone call on a fake clock, between a fake stack and a fake box."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Capacities, Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import DownlinkHeader, Outcome, Receipt
from appliance.lines.sip_call import Extras, Limits, PhoneCall, Verb, Want
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_hear import HandIn
from appliance.lines.sip_stack import Format, Incoming
from appliance.lines.web_pace import TickTimes

PERIOD_NS = 80 * NS_PER_MS
SAMPLES = 1_920
TURN_NS = 10 * NS_PER_MS
T0_NS = 3 * NS_PER_S
LIMITS = Limits(40 * NS_PER_MS, 5 * NS_PER_S, 20 * NS_PER_S, ("sip:d@p", "sip:2*@p"))
WELCOME = control.Welcome(
    control.PROTOCOL, "b", "echo", False, "", PERIOD_NS, 24_000, SAMPLES, T0_NS, "", (0,)
)


class FakeMedia:
    """A stack's audio: what the test says comes, what is written is taken 20 ms at a time."""

    codec = "g711"

    def __init__(self) -> None:
        self.in_hz = 8_000
        self.incoming: list[NDArray[np.int16]] = []
        self.queued = 0
        self.written: list[NDArray[np.int16]] = []
        self.is_active = True
        self.gaps = 0

    def format(self) -> Format | None:
        return Format(8_000, self.queued) if self.is_active else None

    def read(self) -> NDArray[np.int16]:
        ready, self.incoming = self.incoming, []
        return np.concatenate(ready) if ready else np.zeros(0, np.int16)

    def write(self, pcm: NDArray[np.int16]) -> int:
        self.written.append(pcm)
        self.queued += pcm.size
        return int(pcm.size)

    def send_packet(self) -> None:
        self.gaps += bool(self.written) and self.queued < 160
        self.queued = max(0, self.queued - 160)


class Rig:
    """A call, its stack, and a box that echoes `STEP_NS` after each tick's start."""

    def __init__(
        self,
        folder: Path,
        account: SipAccount,
        extras: Extras | None = None,
        hand_in: HandIn | None = None,
    ) -> None:
        self.media = FakeMedia()
        self.now_ns = T0_NS + 7 * NS_PER_MS
        self.call = PhoneCall(
            1,
            Incoming(1, "bot", "sip:ann@pbx", "c1", "10.0.0.1"),
            account,
            LIMITS,
            self.media,
            WELCOME,
            TickTimes(PERIOD_NS),
            self.now_ns,
            extras=extras,
            hand_in=hand_in,
        )
        self.grid = TickGrid(T0_NS, PERIOD_NS)
        self.channel = Channel.create(f"sip-{id(self)}", SAMPLES, Capacities(16, 64, 256))
        self.said: list[control.ToBox] = []
        self.wants: list[Want] = []
        self.heard: list[int] = []
        """Per tick since the session is live: how many frames the box found."""
        self.receipts: list[Receipt] = []
        self.frame = 0
        self.is_gone = False
        self.talks = True
        self.level = 1000
        """Of the caller's audio: a voice's."""
        self.step_ns = 5 * NS_PER_MS
        self.skip: Callable[[int], bool] = lambda frame: False
        self.token: Callable[[int], int] = lambda frame: 0
        self._tick = self.grid.tick_at(self.now_ns) + 1
        self._ready: list[tuple[int, DownlinkHeader]] = []

    def close(self) -> None:
        self.channel.close()
        self.channel.unlink()

    def turn(self) -> None:
        self.said += self.call.advance(self.now_ns)
        while self.call.wants:
            self.wants.append(self.call.wants.popleft())

    def run(self, seconds: float) -> None:
        """Let time pass, 10 ms at a time."""
        end_ns = self.now_ns + int(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.now_ns += TURN_NS
            if self.now_ns % (2 * TURN_NS) < TURN_NS:
                self.media.send_packet()
                if self.talks:
                    self.media.incoming.append(np.full(160, self.level, np.int16))
            self._box()
            self.turn()
            while (receipt := self.channel.receipts.get()) is not None:
                self.receipts.append(receipt)

    def _box(self) -> None:
        pcm = np.zeros(SAMPLES, np.float32)
        while self.grid.start_ns(self._tick) <= self.now_ns:
            tick, self._tick = self._tick, self._tick + 1
            if self.is_gone or (not self.frame and not self.channel.uplink.waiting):
                continue
            self.heard.append(self.channel.uplink.waiting)
            header = self.channel.uplink.get(pcm)
            heard = -1 if header is None else header.frame_index
            made_ns = self.grid.start_ns(tick) + self.step_ns
            out = DownlinkHeader(
                *(1, 7, self.frame, tick, self.grid.deadline_ns(tick), made_ns),
                text=self.token(self.frame),
                heard=heard,
            )
            if not self.skip(self.frame):
                self._ready.append((made_ns, out))
            self.frame += 1
        while self._ready and self._ready[0][0] <= self.now_ns:
            assert self.channel.downlink.put(self._ready.pop(0)[1], pcm)

    def admit(self) -> None:
        self.turn()
        admitted = control.Admitted(1, 1, 7, self.channel.name, 16, 64, 256)
        self.call.admitted(admitted, self.now_ns, T0_NS)
        self.turn()

    def answer(self) -> None:
        """Up to the moment when both talk."""
        self.admit()
        assert self.wants == [Want(Verb.ANSWER)]
        self.wants.clear()
        self.call.established(self.now_ns)

    def bye(self) -> None:
        self.call.closed("bye", {"rx_packets": 5.0}, self.now_ns)
        self.turn()

    def gone(self, why: str = "left") -> None:
        self.is_gone = True
        self.run(0.2)
        self.call.gone(control.Gone(1, why), self.now_ns)
        while (receipt := self.channel.receipts.get()) is not None:
            self.receipts.append(receipt)
        self.turn()

    def outcomes(self) -> dict[Outcome, list[int]]:
        return {o: [r.frame_index for r in self.receipts if r.outcome == o] for o in Outcome}
