"""A box of a few dozen lines for the tests of lines: real socket, real shared memory, real time.

It admits callers, ticks on a grid in a thread of its own, and echoes: frame k of a session is the
caller's frame k-1, frame 0 is silence and WARMING. What goes wrong is chosen by the test. It
collects every receipt and checks nothing; tests do.
"""

import contextlib
import select
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.admission import Reason
from appliance.channel import Capacities, Channel
from appliance.clock import NS_PER_MS, MonotonicClock, TickGrid
from appliance.frame_ring import (
    CONCEALED,
    FINAL,
    GENERATED,
    LAST,
    WARMING,
    DownlinkHeader,
    Outcome,
    Receipt,
)

RATE_HZ = 24_000
PERIOD_NS = 80 * NS_PER_MS
SAMPLES = 1_920
PIECES = ["", "▁so", "▁it", "▁goes"]
GATHER_NS = 40 * NS_PER_MS
"""When in a tick the fake takes its callers' frames. The real box does so at once; here a line may
oversleep by this much more, so that tests of lines also pass on a busy machine."""
STEP_NS = 45 * NS_PER_MS
"""When in a tick the fake's frames are ready."""


@dataclass
class Trouble:
    """What the box does wrong, by frame_index of a session."""

    refuse: Reason | None = None
    lost: frozenset[int] = frozenset()
    """Frames that are due but never made."""
    late: dict[int, int] = field(default_factory=dict)
    """Frames that are handed out this many ns after their tick's start."""
    fault_at: int | None = None
    """The frame instead of which the session ends with FAULT."""
    falls_silent_at: int | None = None
    """The frame from which on the model says no word."""
    vanish_at: int | None = None
    """The frame instead of which the whole box closes its socket."""


@dataclass(eq=False)
class FakeSession:
    """What the box knows and remembers of one call."""

    join: control.Join
    number: int
    channel: Channel
    frame_index: int = 0
    captured_ns: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    before: NDArray[np.float32] = field(default_factory=lambda: np.zeros(SAMPLES, np.float32))
    pending: list[tuple[int, DownlinkHeader, NDArray[np.float32]]] = field(default_factory=list)
    draining: str = ""
    gone: str = ""

    def outcomes(self) -> dict[Outcome, list[int]]:
        """Frame indices by outcome."""
        return {
            outcome: [r.frame_index for r in self.receipts if r.outcome == outcome]
            for outcome in Outcome
        }

    def unaccounted(self) -> dict[int, int]:
        """Frames that have not one receipt each, and how many they have; empty if all is well.

        A frame that this busy machine made too late has two, silence and then itself; one it would
        have made, had its caller not gone before, has that of the silence in its place.
        """
        filled = set(self.outcomes()[Outcome.FILLED])
        fates = dict.fromkeys(range(self.frame_index), 0) | Counter(
            receipt.frame_index for receipt in self.receipts
        )
        for index in filled & set(self.outcomes()[Outcome.DISCARDED]):
            fates[index] -= 1
        index = self.frame_index
        while index in filled:
            fates[index] -= 1
            index += 1
        return {
            index: times for index, times in fates.items() if times != (index < self.frame_index)
        }


class FakeBox:
    """``with FakeBox(path) as box:`` runs until the block ends."""

    def __init__(self, folder: Path, trouble: Trouble | None = None) -> None:
        self.path = folder / "box.sock"
        self.trouble = trouble or Trouble()
        self.sessions: list[FakeSession] = []
        self.leaves: list[control.Leave] = []
        self.transferred: list[control.Transferred] = []
        self.failure: BaseException | None = None
        pieces = folder / "pieces.json"
        pieces.write_bytes(msgspec.json.encode(PIECES))
        self._clock = MonotonicClock()
        self._grid = TickGrid(self._clock.now_ns(), PERIOD_NS)
        self.welcome = control.Welcome(
            version=control.PROTOCOL,
            bundle=str(folder),
            model="echo",
            trained=False,
            notice="this box only echoes",
            period_ns=PERIOD_NS,
            sample_rate_hz=RATE_HZ,
            samples_per_frame=SAMPLES,
            t0_ns=self._grid.t0_ns,
            pieces=str(pieces),
            silent_ids=(0,),
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._peers: list[socket.socket] = []
        self._peer: socket.socket | None = None
        """The one whose calls these are; others only watch."""
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop = True
        self._thread.join()
        for session in self.sessions:
            session.channel.close()
            session.channel.unlink()
        self._listener.close()
        for peer in self._peers:
            peer.close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            tick = self._grid.tick_at(self._clock.now_ns()) + 1
            while not self._stop:
                self._talk()
                now_ns = self._clock.now_ns()
                if now_ns >= self._grid.start_ns(tick) + GATHER_NS:
                    for session in self.sessions:
                        self._step(session, tick)
                    tick += 1
                for session in self.sessions:
                    self._hand_out(session, now_ns)
        except BaseException as err:
            self.failure = err

    def _talk(self) -> None:
        for ready in select.select([self._listener, *self._peers], [], [], 0.001)[0]:
            if ready is self._listener:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                with contextlib.suppress(BrokenPipeError):  # it has gone again
                    peer.send(control.encode(self.welcome))
                continue
            try:
                raw = ready.recv(control.LIMIT_BYTES)
            except ConnectionResetError:  # killed before it had read everything
                raw = b""
            if not raw:
                ready.close()
                self._peers.remove(ready)
                if ready is self._peer:
                    self._peer = None
                    for session in self.sessions:
                        session.gone = session.gone or "lost"
                return
            message = control.decode_to_box(raw)
            if isinstance(message, control.Join):
                self._peer = ready
                self._join(message)
            elif isinstance(message, control.Status):
                with contextlib.suppress(BrokenPipeError):
                    ready.send(control.encode(self._report(message.request)))
            elif isinstance(message, control.Transferred):
                self.transferred.append(message)
            elif isinstance(message, control.Leave):
                self.leaves.append(message)
                self.sessions[message.session - 1].draining = "left"

    def transfer(self, session: int, target: str) -> None:
        """Pass on that somebody wants this session's caller elsewhere."""
        self._send(control.Transfer(0, session, target))

    def _report(self, request: int) -> control.Report:
        live = sum(not session.gone for session in self.sessions)
        forecast_ns = STEP_NS + 5 * NS_PER_MS
        return control.Report(
            *(request, True, False, 0, live, live, 99, 0, 0, 0, 0, 0),
            sessions_free=0 if self.trouble.refuse else 99 - live,
            limited_by=str(self.trouble.refuse or "lines"),
            forecast_ns=forecast_ns,
        )

    def _send(self, message: control.FromBox) -> None:
        if self._peer is not None:
            with contextlib.suppress(BrokenPipeError):  # it has gone, and is heard of next
                self._peer.send(control.encode(message))

    def _join(self, join: control.Join) -> None:
        if self.trouble.refuse is not None:
            self._send(control.Refused(join.request, self.trouble.refuse, "1 of 1 slots is taken"))
            return
        number = len(self.sessions) + 1
        sizes = Capacities(16, 64, 8)
        name = f"{self.path.parent.name}-{number}-{id(self)}"
        channel = Channel.create(name, SAMPLES, sizes)
        self.sessions.append(FakeSession(join, number, channel))
        self._send(control.Admitted(join.request, number, 7, name, sizes.uplink, sizes.downlink, 8))

    def _step(self, session: FakeSession, tick: int) -> None:
        if session.draining or session.gone:
            return
        waiting = session.channel.uplink.waiting
        if not session.frame_index and not waiting:
            return
        index = session.frame_index
        if index == self.trouble.fault_at:
            session.draining = "fault"
            return
        if index == self.trouble.vanish_at and self._peer is not None:
            for peer in self._peers:
                peer.close()
            self._listener.close()
            self._stop = True
            return
        session.frame_index += 1
        pcm = np.zeros(SAMPLES, np.float32)
        header = session.channel.uplink.get(pcm)
        flags = GENERATED | (WARMING if index == 0 else 0)
        if header is None:
            flags |= CONCEALED
        else:
            session.captured_ns.append(header.captured_ns)
            session.heard.append(header.frame_index)
            if header.flags & LAST:
                flags |= FINAL
                session.draining = "finished"
        reply, session.before = session.before, pcm
        if index in self.trouble.lost:
            return
        ready_ns = self._grid.start_ns(tick) + self.trouble.late.get(index, STEP_NS)
        silent_at = self.trouble.falls_silent_at
        says = index % len(PIECES) if silent_at is None or index < silent_at else 0
        out = DownlinkHeader(
            session.number,
            7,
            index,
            tick,
            self._grid.deadline_ns(tick),
            0,
            says,
            flags,
            -1 if header is None else header.frame_index,
        )
        session.pending.append((ready_ns, out, reply))

    def _hand_out(self, session: FakeSession, now_ns: int) -> None:
        while session.pending and session.pending[0][0] <= now_ns:
            _, header, pcm = session.pending.pop(0)
            assert session.channel.downlink.put(header._replace(made_ns=now_ns), pcm)
        while (receipt := session.channel.receipts.get()) is not None:
            session.receipts.append(receipt)
        if session.draining and not session.gone and not session.pending:
            fates = {r.frame_index for r in session.receipts}
            made = set(range(session.frame_index)) - self.trouble.lost
            if made <= fates:
                session.gone = session.draining
                self._send(control.Gone(session.number, session.draining))
