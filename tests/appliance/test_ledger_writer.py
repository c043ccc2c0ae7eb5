"""The ledger's thread where it is late, stopped, refused by its disk, or told what cannot be."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance import contracts, ledger, ledger_writer
from appliance.frame_ring import Outcome, Result, ResultRing, ring_bytes
from appliance.ledger import RECORD_BYTES, Beside, Flag, Settled, Why, read_call
from appliance.record_ring import RecordRing
from tests.appliance.test_ledger import Desk, desk, header
from tests.fakes import PERIOD_NS

__all__ = ["desk"]


def test_a_receipt_that_comes_while_its_call_is_closed_is_written_down(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.open()
    desk.tick(0)
    desk.ledger.pump()
    take = RecordRing.take

    def take_late(ring: RecordRing) -> NDArray[np.void]:
        desk.receipt(0)  # after this pass has looked for receipts
        return take(ring)

    monkeypatch.setattr(RecordRing, "take", take_late)
    desk.ledger.finish(1, due=1, why=Why.LOST)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.receipts["outcome"].tolist() == [Settled.DELIVERED]


def test_what_came_before_the_stop_is_written_and_a_call_that_is_on_has_no_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_writer, "POLL_S", 3600.0)  # no pass of the thread but its last
    desk.open()
    desk.ledger.start()
    desk.tick(0)
    desk.ledger.stop()
    call = read_call(desk.path())
    assert call.ticks["index"].tolist() == [0]
    assert call.end is None


def test_of_models_beside_the_voice_what_can_be_true_is_written_down(desk: Desk) -> None:
    models = (
        Beside("speech", "vad", "hard", PERIOD_NS, PERIOD_NS),
        Beside("words", "kws", "event", PERIOD_NS, PERIOD_NS),
    )
    receipts = desk.shared().receipts
    results = ResultRing.create(memoryview(bytearray(ring_bytes(8, 0))), 8)
    desk.ledger.open(header(beside=models), receipts, results)
    delivered = contracts.Outcome.DELIVERED
    true = Result(0, 0, delivered, 0.5, 7, 3), Result(1, 0, contracts.Outcome.LATE, 1.5, -9, 8)
    false = (
        Result(2, 0, delivered, 0.5, 7, 3),  # there are two
        Result(0, -1, delivered, 0.5, 7, 3),
        Result(0, 1, 99, 0.5, 7, 3),
    )
    for result in (true[0], *false, true[1]):
        assert results.put(result)
    desk.ledger.pump()
    assert [(one.name, one.records, one.delivered) for one in desk.ledger.side] == [
        ("speech", 1, 1),
        ("words", 1, 0),
    ]
    last = Result(0, 1, delivered, 0.25, 6, 4)
    assert results.put(last)
    desk.ledger.finish(1, due=0, why=Why.LEFT)
    desk.ledger.pump()
    fields = ["model", "index", "outcome", "value", "margin_ns", "age_ns"]
    assert read_call(desk.path()).side[fields].tolist() == [tuple(one) for one in (*true, last)]
    desk.ledger.open(header(2, beside=models), desk.shared(2).receipts)
    desk.ledger.pump()
    assert [one.records for one in desk.ledger.side] == [2, 1]  # of all callers since the start


def test_a_disk_that_refuses_for_too_long_costs_records_and_the_call_says_how_many(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_writer, "PENDING_LIMIT_BYTES", 10 * RECORD_BYTES)
    desk.open()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for index in range(25):
            desk.tick(index, flags=Flag.MISSED.value)
            desk.ledger.pump()
    assert desk.ledger.records_dropped == 15
    desk.tick(25, flags=Flag.MISSED.value)
    desk.ledger.finish(1, due=26, why=Why.LEFT)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.ticks["index"].tolist() == [*range(10), 25]
    assert (int(call.end["records_lost"]), call.dropped_bytes) == (15, 0)  # type: ignore[index]


def test_a_frame_that_was_filled_says_nothing_of_the_playout_buffer(desk: Desk) -> None:
    desk.open()
    desk.tick(0)
    desk.receipt(0, Outcome.FILLED)
    desk.ledger.pump()
    desk.tick(1)
    desk.receipt(0)  # what was made came later all the same, and is not believed for it
    desk.ledger.pump()
    desk.tick(2)
    desk.ledger.pump()
    left = read_call(desk.path()).ticks["buffer_us"].tolist()
    assert left == [ledger.BUFFER_UNKNOWN] * 3
