"""A call's file: written by the ledger's pump, read back, torn on purpose."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import ledger, report
from appliance.channel import Channel
from appliance.frame_ring import Outcome, Receipt
from appliance.ledger import (
    RECORD_BYTES,
    TICK,
    TICK_FIELDS,
    Flag,
    Header,
    LedgerError,
    Settled,
    Why,
    read_call,
    read_folder,
)
from appliance.ledger_writer import LedgerWriter
from appliance.record_ring import RecordRing
from tests.fakes import PERIOD_NS, FakeClock

HEARD = (Flag.HEARD | Flag.GENERATED).value


def header(session: int = 1, **changes: Any) -> Header:
    fields: dict[str, Any] = {
        "session": session,
        "generation": session,
        "line": "file",
        "caller": "Änn",
        "settings": {"gain": 0.5},
        "bundle": "/b",
        "model": "echo",
        "checkpoint_sha256": "0" * 64,
        "period_ns": PERIOD_NS,
        "t0_ns": 1000,
        "started": "20260131T120000Z",
    }
    return Header(**(fields | changes))


class Desk:
    """A ledger without its thread, the rings it reads, and what a tick or a line would put in."""

    def __init__(self, folder: Path, records: int = 256) -> None:
        self.folder = folder
        self.ring = RecordRing(records)
        self.clock = FakeClock(5)
        self.ledger = LedgerWriter(folder, self.ring, self.clock)
        self.channels: dict[int, Channel] = {}

    def shared(self, session: int = 1) -> Channel:
        channel = Channel.create(f"dbxtest-{uuid.uuid4().hex[:12]}", 8)
        self.channels[session] = channel
        return channel

    def open(self, session: int = 1) -> Channel:
        channel = self.shared(session)
        self.ledger.open(header(session), channel.receipts)
        self.ledger.pump()
        return channel

    def tick(self, index: int, session: int = 1, flags: int = HEARD, **fields: int) -> None:
        names = [name for name in TICK.names or () if name != "crc"]
        known = {"kind": 1, "generation": session, "session": session, "index": index}
        values = known | {"flags": flags, "tick": index, "margin_ns": 9} | fields
        assert set(values) <= set(names), set(values) - set(names)
        self.ring.put(tuple(values.get(name, 0) for name in TICK_FIELDS))

    def receipt(
        self, index: int, outcome: int = Outcome.DELIVERED, session: int = 1, **stamp: int
    ) -> None:
        fields = {"session": session, "generation": session} | stamp
        # Attached again: this is the line's end of the ring.
        line = Channel.attach(self.channels[session].name)
        line.receipts.put(Receipt(fields["session"], fields["generation"], index, outcome, 7, 33))
        line.close()

    def path(self, session: int = 1) -> Path:
        return self.folder / ledger.file_name(header(session))

    def close(self) -> None:
        self.ledger.stop()
        for channel in self.channels.values():
            channel.close()
            channel.unlink()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "calls")
    yield desk
    desk.close()


def test_what_was_written_is_read_back(desk: Desk) -> None:
    desk.open()
    desk.tick(0, margin_ns=-5, text=-1, captured_ns=2**40, lag=3, skipped=2)
    desk.tick(1)
    desk.receipt(0, Outcome.LATE)
    desk.receipt(1)
    desk.ledger.pump()
    desk.ledger.settle(1, due=2, why=Why.FINISHED)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.header == header()
    assert call.ticks["index"].tolist() == [0, 1]
    first = call.ticks[0]
    assert (first["margin_ns"], first["text"], first["captured_ns"]) == (-5, -1, 2**40)
    assert (first["lag"], first["skipped"], first["generation"]) == (3, 2, 1)
    assert call.receipts["outcome"].tolist() == [Settled.LATE, Settled.DELIVERED]
    assert call.receipts["buffer_ns"].tolist() == [33, 33]
    assert call.end is not None
    assert (call.end["index"], call.end["why"], call.end["at_ns"]) == (2, Why.FINISHED, 5)
    assert call.dropped_bytes == 0
    assert desk.ledger.closed.popleft() == 1


@pytest.mark.parametrize("length", range(17))
def test_a_head_takes_whole_lines_of_16_bytes_and_no_line_too_many(length: int) -> None:
    head = header(caller="x" * length)
    raw = ledger.encode_header(head)
    body = msgspec.json.encode(head)
    assert len(raw) % 16 == 0
    assert 0 <= len(raw) - len(ledger.MAGIC) - 4 - len(body) < 16


def test_the_first_four_outcomes_are_the_lines_own_words() -> None:
    assert [s for s in Settled if s is not Settled.LOST] == [Settled(o.value) for o in Outcome]
    assert [s.name for s in Settled][:4] == [o.name for o in Outcome]


def test_a_call_stays_open_until_every_frame_is_accounted_for(desk: Desk) -> None:
    desk.open()
    desk.tick(0)
    desk.tick(1, flags=Flag.MISSED.value)
    desk.tick(2, flags=(Flag.GENERATED | Flag.UNREAD).value)
    desk.tick(3, flags=Flag.FAULT.value)
    desk.ledger.settle(1, due=4, why=Why.FINISHED)
    desk.ledger.pump()
    assert not desk.ledger.closed
    desk.receipt(0)  # the others were never handed over: nobody can say what became of them
    desk.ledger.pump()
    assert list(desk.ledger.closed) == [1]


def test_a_frame_filled_before_it_was_made_is_accounted_for(desk: Desk) -> None:
    desk.open()
    desk.receipt(0, Outcome.FILLED)
    desk.ledger.pump()
    desk.tick(0)
    desk.ledger.settle(1, due=1, why=Why.FINISHED)
    desk.ledger.pump()
    assert list(desk.ledger.closed) == [1]


def test_a_vanished_line_is_not_our_fault_and_is_said_so(desk: Desk) -> None:
    desk.open()
    desk.tick(0)
    desk.tick(1)
    desk.receipt(0)
    desk.ledger.pump()
    desk.ledger.finish(1, due=2, why=Why.LOST)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.receipts["outcome"].tolist() == [Settled.DELIVERED, Settled.LOST]
    (session,) = report.summarise([call]).sessions
    assert (session.lost, session.unexplained, session.failed) == (1, 0, True)


def test_a_line_that_never_settles_leaves_unexplained_frames(desk: Desk) -> None:
    desk.open()
    desk.tick(0)
    desk.ledger.pump()
    desk.ledger.finish(1, due=1, why=Why.TIMEOUT)
    desk.ledger.pump()
    summary = report.summarise([read_call(desk.path())])
    assert summary.unexplained == 1


def test_a_line_that_lies_is_not_believed(desk: Desk) -> None:
    desk.open()
    desk.tick(0)
    desk.receipt(0, session=1, generation=9)
    desk.receipt(0, outcome=0)
    desk.receipt(0, outcome=77)
    desk.receipt(-1)
    desk.receipt(100_000)
    desk.receipt(0, Outcome.FILLED)
    desk.receipt(0, Outcome.DISCARDED)
    desk.receipt(0, Outcome.DISCARDED)  # two are what a frame can have
    desk.ledger.settle(1, due=1, why=Why.FINISHED)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.receipts["outcome"].tolist() == [Settled.FILLED, Settled.DISCARDED]
    assert call.end is not None
    assert call.end["foreign"] == 6


def test_calls_do_not_mix(desk: Desk) -> None:
    for session in (1, 2):
        desk.open(session)
    for index in range(3):
        for session in (1, 2):
            desk.tick(index, session)
            desk.receipt(index, session=session)
    desk.ledger.pump()
    for session in (1, 2):
        desk.ledger.settle(session, due=3, why=Why.FINISHED)
    desk.ledger.pump()
    for call in read_folder(desk.folder):
        assert set(call.ticks["session"].tolist()) == {call.header.session}
        assert set(call.receipts["session"].tolist()) == {call.header.session}
        assert call.ticks["index"].tolist() == [0, 1, 2]


def test_a_full_ring_is_counted_in_the_calls_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path, records=2)
    desk.open()
    for index in range(5):
        desk.tick(index)
    for index in range(2):
        desk.receipt(index)
    desk.ledger.settle(1, due=5, why=Why.FINISHED)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.end is not None
    assert call.end["records_lost"] == 3
    assert report.summarise([call]).unexplained == 3
    desk.close()


def test_a_disk_that_refuses_is_tried_again_and_tears_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        real(fd, bytes(data)[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    desk.open()
    desk.tick(0)
    desk.ledger.pump()
    desk.tick(1)
    monkeypatch.setattr(os, "pwrite", half)
    desk.ledger.pump()
    desk.ledger.pump()
    assert desk.ledger.write_errors == 2
    monkeypatch.setattr(os, "pwrite", real)
    desk.tick(2)
    desk.ledger.pump()
    call = read_call(desk.path())
    assert call.ticks["index"].tolist() == [0, 1, 2]
    assert call.dropped_bytes == 0


def test_a_file_that_cannot_be_made_yet_is_made_later_and_lacks_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or a flood of connections, may hold the last descriptors."""
    real = os.open

    def none_left(*args: Any, **options: Any) -> int:
        raise OSError(24, "Too many open files")

    channel = desk.shared()
    monkeypatch.setattr(os, "open", none_left)
    desk.ledger.open(header(1), channel.receipts)
    desk.ledger.pump()
    desk.tick(0)
    desk.ledger.pump()
    assert (desk.ledger.write_errors, desk.ledger.failure) == (2, None)
    monkeypatch.setattr(os, "open", real)
    desk.tick(1)
    desk.ledger.pump()
    assert read_call(desk.path()).ticks["index"].tolist() == [0, 1]


def test_what_never_reached_the_disk_is_counted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    desk.open()
    monkeypatch.setattr(os, "pwrite", full)
    for index in range(3):
        desk.tick(index)
    desk.ledger.finish(1, due=3, why=Why.LOST)
    desk.ledger.pump()
    assert desk.ledger.records_dropped == 3 + 3 + 1  # ticks, receipts of a lost line, END


def test_the_thread_writes_what_is_left_when_it_is_stopped(desk: Desk) -> None:
    desk.open()
    desk.ledger.start()
    desk.tick(0)
    desk.ledger.stop()
    call = read_call(desk.path())
    assert call.ticks["index"].tolist() == [0]
    assert call.end is None
    (session,) = report.summarise([call]).sessions
    assert (session.ended, session.failed, session.in_flight) == ("unfinished", True, 1)
    assert session.unexplained == 0


def call_bytes(ticks: int) -> bytes:
    records = ledger.tick_records(
        [{"session": 1, "generation": 1, "index": n, "tick": n} for n in range(ticks)]
    )
    return ledger.encode_header(header()) + ledger.seal(records)


@given(ticks=st.integers(0, 5), cut=st.integers(0, 5 * RECORD_BYTES))
def test_a_torn_tail_is_dropped_wherever_it_is_torn(
    tmp_path_factory: pytest.TempPathFactory, ticks: int, cut: int
) -> None:
    raw = call_bytes(ticks)
    body = ticks * RECORD_BYTES
    cut = min(cut, body)
    path = tmp_path_factory.mktemp("torn") / "x.call"
    path.write_bytes(raw[: len(raw) - cut])
    call = read_call(path)
    assert len(call.ticks) == (body - cut) // RECORD_BYTES
    assert call.ticks["index"].tolist() == list(range(len(call.ticks)))
    assert call.dropped_bytes == (body - cut) % RECORD_BYTES


@given(at=st.integers(0, 4 * RECORD_BYTES - 1), flip=st.integers(1, 255))
def test_a_garbled_byte_ends_what_is_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    raw = bytearray(call_bytes(4))
    raw[len(raw) - 4 * RECORD_BYTES + at] ^= flip
    path = tmp_path_factory.mktemp("garbled") / "x.call"
    path.write_bytes(raw)
    call = read_call(path)
    assert call.ticks["index"].tolist() == list(range(at // RECORD_BYTES))
    assert call.dropped_bytes == (4 - at // RECORD_BYTES) * RECORD_BYTES


def test_zeros_after_a_power_cut_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "x.call"
    path.write_bytes(call_bytes(2) + bytes(3 * RECORD_BYTES))
    call = read_call(path)
    assert (len(call.ticks), call.dropped_bytes) == (2, 3 * RECORD_BYTES)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a call's record"),
        (b"RIFF....WAVE", "not a call's record"),
        (ledger.MAGIC[:-1] + b"\x63" + bytes(50), "format 99; this program reads 3"),
        (ledger.MAGIC + b"\xff\xff\x00\x00{}", "header was cut short"),
        (ledger.MAGIC + b"\x02\x00\x00\x00{}", "header is damaged"),
    ],
)
def test_what_is_no_call_is_said_in_a_line(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "x.call"
    path.write_bytes(raw)
    with pytest.raises(LedgerError, match=words):
        read_call(path)


def test_a_folder_without_calls_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="holds no call"):
        read_folder(tmp_path)


def test_a_file_without_a_header_does_not_hide_the_other_calls(tmp_path: Path) -> None:
    """A box killed between making a call's file and writing its head leaves an empty one."""
    (tmp_path / "1.call").write_bytes(b"")
    with pytest.raises(LedgerError, match="is not a call's record"):
        read_folder(tmp_path)
    (tmp_path / "2.call").write_bytes(call_bytes(3))
    with pytest.raises(LedgerError, match="is not a call's record"):
        read_folder(tmp_path)
    unreadable: list[LedgerError] = []
    calls = read_folder(tmp_path, unreadable)
    assert [len(call.ticks) for call in calls] == [3]
    assert [str(err).partition(" ")[0] for err in unreadable] == [str(tmp_path / "1.call")]


def test_records_have_no_undefined_bytes() -> None:
    named = np.zeros(RECORD_BYTES, bool)
    for kind, offset, *_ in (TICK.fields or {}).values():
        named[offset : offset + kind.itemsize] = True
    assert named.all()


def test_every_record_says_how_much_of_the_playout_buffer_was_left(desk: Desk) -> None:
    """The line's newest receipt carried on: its playout moves one period a frame."""
    desk.open()
    # Handed over at 1000 + (tick + 1) * period - margin; a receipt says 33 ns were left then.
    desk.tick(0)
    desk.ledger.pump()
    desk.receipt(0)
    desk.ledger.pump()
    desk.tick(1)  # as early in its period as frame 0: the same buffer
    desk.tick(2, margin_ns=9 - 5_000_000)  # handed over 5 ms later: 5 ms less
    desk.tick(4, flags=Flag.MISSED.value, margin_ns=9 - 40_000_000)
    desk.ledger.pump()
    left = read_call(desk.path()).ticks["buffer_us"].tolist()
    assert left == [ledger.BUFFER_UNKNOWN, 0, -5_000, -40_000]
