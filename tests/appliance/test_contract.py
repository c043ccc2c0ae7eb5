"""The contract as a whole, on a fake clock: real loop, real rings, real playout, real ledger.

What one overrun costs, what four cost, who notices, and what the ledger says about it.
"""

import uuid
from pathlib import Path

import numpy as np
import pytest

from appliance import ledger, report
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.frame_ring import DownlinkHeader, UplinkHeader
from appliance.ledger import Flag, Settled, Why
from appliance.ledger_writer import LedgerWriter
from appliance.lines.playout import Playout
from appliance.seat import Left
from appliance.session import Event, SessionId
from tests.appliance.test_ledger import header
from tests.fakes import FakeCaller, FakeClock, FakeExecutor, make_bundle, make_loop

PERIOD_NS = 80 * MS
USUAL_NS = 75 * MS


class House:
    """A box without threads: loop, ledger and lines, one after the other on one clock."""

    def __init__(self, folder: Path, sessions: int, buffer_ns: int, catch_up_ns: int) -> None:
        self.clock = FakeClock()
        self.took_ns: dict[int, int] = {}
        self.executor = FakeExecutor(make_bundle(folder / "bundle", sessions, 64), sessions)
        self.executor.work = self._work
        self.loop = make_loop(self.executor, self.clock, catch_up_ns)
        self.folder = folder / "calls"
        self.ledger = LedgerWriter(self.folder, self.loop.ring, self.clock)
        self.callers = [
            FakeCaller(self.loop, f"dbxtest-{uuid.uuid4().hex[:12]}", n + 1)
            for n in range(sessions)
        ]
        self.lines: list[Playout[float]] = [
            Playout(c.session, c.generation, PERIOD_NS, buffer_ns) for c in self.callers
        ]
        self.stalled: set[int] = set()
        """Callers (from 0) who hand in nothing."""
        self.deaf: set[int] = set()
        """Callers who read nothing and return no receipts."""
        self.tick = 0
        self._sent = 0
        for caller in self.callers:
            self.ledger.open(header(caller.session), caller.channel.receipts)
            caller.arrive()

    def _work(self, batch: int) -> None:
        self.clock.advance(self.took_ns.get(self.loop.counts.tick, USUAL_NS))

    def run(self, ticks: int) -> None:
        while self.tick < ticks:
            self.clock.sleep_until(self.loop.grid.start_ns(self.tick))
            self._speak()
            self.tick = self.loop.turn(self.tick)
            self._listen()
            self.ledger.pump()

    def _speak(self) -> None:
        while self._sent * PERIOD_NS - 20 * MS <= self.clock.now_ns():
            for number, caller in enumerate(self.callers):
                if number not in self.stalled or self._sent == 0:
                    caller.speak()
            self._sent += 1

    def _listen(self) -> None:
        for number, (caller, line) in enumerate(zip(self.callers, self.lines, strict=True)):
            if number in self.deaf:
                continue
            for head, value in caller.hear():
                receipt = line.arrive(head, value, head.made_ns)
                if receipt is not None:
                    assert caller._line.receipts.put(receipt)
            for receipt in line.due(self.clock.now_ns())[1]:
                assert caller._line.receipts.put(receipt)

    def close(self) -> list[ledger.Call]:
        """Everybody hangs up; what is on disk."""
        self.clock.advance(NS_PER_S)
        self._listen()
        for seat_due, caller in zip(self._due(), self.callers, strict=True):
            self.ledger.finish(caller.session, seat_due, Why.LEFT)
        self.ledger.stop()
        self.ledger.pump()
        for caller in self.callers:
            caller.close()
        return ledger.read_folder(self.folder)

    def _due(self) -> list[int]:
        left = {m.session: m.due for m in self.loop.outbox if isinstance(m, Left)}
        live = {seat.session: seat.frame_index for seat in self.loop._slots}
        return [(left | live)[caller.session] for caller in self.callers]


def test_a_30_ms_buffer_survives_one_overrun_of_20_ms(tmp_path: Path) -> None:
    house = House(tmp_path, 1, buffer_ns=30 * MS, catch_up_ns=80 * MS)
    house.took_ns = {10: USUAL_NS + 20 * MS}
    house.run(20)
    (call,) = house.close()
    heard = report.first_outcomes(call, 20)
    late = np.flatnonzero(call.ticks["flags"] & Flag.LATE)
    # Tick 10 ends 15 ms late; 11 starts late and ends 10 ms late, 12 ends 5 ms late. The buffer
    # covers them all: the caller hears every frame, and the ledger says which had been late.
    assert late.tolist() == [10, 11, 12]
    assert (call.ticks["margin_ns"][late] // MS).tolist() == [-15, -10, -5]
    assert np.flatnonzero(heard == Settled.LATE).tolist() == [10, 11, 12]
    assert (heard == Settled.FILLED).sum() == 0
    assert report.summarise([call]).unexplained == 0


def test_a_30_ms_buffer_does_not_survive_four_overruns_in_a_row(tmp_path: Path) -> None:
    house = House(tmp_path, 1, buffer_ns=30 * MS, catch_up_ns=80 * MS)
    house.took_ns = dict.fromkeys(range(10, 14), USUAL_NS + 20 * MS)
    house.run(40)
    (call,) = house.close()
    heard = report.first_outcomes(call, 40)
    # Each overrun adds 15 ms of lateness: 15, 30, 45, 60, then 5 ms less with every usual tick.
    # A frame is heard while that is at most the 30 ms of the buffer less the 5 ms of usual margin.
    margins = (call.ticks["margin_ns"] // MS).tolist()
    assert margins[10:14] == [-15, -30, -45, -60]
    filled = np.flatnonzero(heard == Settled.FILLED).tolist()
    assert filled == [n for n, margin in enumerate(margins) if margin < -25]
    assert filled[0] == 11
    assert filled == list(range(11, filled[-1] + 1))
    assert np.flatnonzero(heard == Settled.LATE).tolist() == [
        n for n, margin in enumerate(margins) if -25 <= margin < 0
    ]
    # Why: each of them was made, only too late for its playout, by as much as its receipt says.
    too_late = call.receipts[call.receipts["outcome"] == Settled.DISCARDED]
    assert too_late["index"].tolist() == filled
    assert (too_late["buffer_ns"] // MS).tolist() == [25 + margins[n] for n in filled]
    assert report.summarise([call]).unexplained == 0


@pytest.mark.parametrize("trouble", ["stalls", "reads nothing", "sends garbage"])
def test_one_of_sixteen_in_trouble_costs_the_others_no_frame(tmp_path: Path, trouble: str) -> None:
    house = House(tmp_path, 16, buffer_ns=80 * MS, catch_up_ns=80 * MS)
    house.took_ns = dict.fromkeys(range(200), 20 * MS)
    odd = 5
    house.run(10)
    if trouble == "stalls":
        house.stalled.add(odd)
    elif trouble == "reads nothing":
        house.deaf.add(odd)
    else:
        line = house.callers[odd]._line
        junk = np.full(64, np.nan, np.float32)
        while line.uplink.put(UplinkHeader(-(2**62), 0xFFFFFFFE, -1), junk):
            pass
        # Scribble over everything the line can reach: counters, magics and entries.
        rng = np.random.default_rng(1)
        memory = line._memory
        memory[:] = rng.integers(0, 256, len(memory), dtype=np.uint8).tobytes()
        house.deaf.add(odd)
        house.stalled.add(odd)
    house.run(150)
    calls = house.close()
    summary = report.summarise(calls)
    assert [s.session for s in summary.sessions] == list(range(1, 17))
    for session in summary.sessions:
        if session.session != odd + 1:
            assert (session.due, session.on_time, session.concealed) == (150, 150, 0)
            assert session.unexplained == 0
    if trouble == "stalls":
        assert summary.sessions[odd].concealed == 140
    elif trouble == "reads nothing":
        assert summary.sessions[odd].unread == 150 - 10 - 64


@pytest.mark.parametrize("injected", ["state of another slot", "frame of a previous tenant"])
def test_what_belongs_to_another_tenant_is_told_by_its_stamp(tmp_path: Path, injected: str) -> None:
    house = House(tmp_path, 3, buffer_ns=80 * MS, catch_up_ns=80 * MS)
    house.took_ns = dict.fromkeys(range(200), 20 * MS)
    house.run(10)
    if injected == "state of another slot":
        # A bug moves slot 2's state, and its stamp with it, over slot 1.
        house.executor.move(2, 1)
        house.executor.join(2, {})
        house.loop._stamps[1] = house.loop._stamps[2]
        house.stalled.add(1)
        house.run(30)
        faults = [m for m in house.loop.outbox if isinstance(m, Left)]
        assert faults == [Left(SessionId(2), Event.FAULT, 11)]
        calls = house.close()
        flags = calls[1].ticks["flags"]
        assert flags[-1] & Flag.FAULT
        assert not flags[-1] & Flag.GENERATED
        for other in (calls[0], calls[2]):
            assert (len(other.ticks), int((other.ticks["flags"] & Flag.FAULT).sum())) == (30, 0)
        return
    # A frame that carries the stamp of whoever had the channel before.
    stale = DownlinkHeader(2, 1, 10, 9, 0, 0)
    caller = house.callers[1]
    assert caller.channel.downlink.put(stale, np.full(64, 0.5, np.float32))
    house.run(30)
    calls = house.close()
    assert all(len(call.ticks) == 30 for call in calls)
    (end,) = (call.end for call in calls if call.header.session == 2)
    assert end is not None
    assert end["foreign"] == 1  # its receipt, under the stamp it bore, was not believed
    assert report.summarise(calls).unexplained == 0
    heard = report.first_outcomes(calls[1], 30)
    assert (heard == Settled.DELIVERED).all()
