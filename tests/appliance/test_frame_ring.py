"""The rings against a deque, against a scribbling peer, and between two real processes."""

import collections
import itertools
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import frame_ring
from appliance.channel import CHANNEL_FIELDS, MAGIC_CHANNEL, Capacities, Channel
from appliance.frame_ring import (
    FINAL,
    GENERATED,
    LAST,
    ChannelError,
    DownlinkHeader,
    DownlinkRing,
    Outcome,
    Receipt,
    ReceiptRing,
    UplinkHeader,
    UplinkRing,
    ring_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
_names = itertools.count()


def fresh_name() -> str:
    return f"dbxtest-{os.getpid()}-{next(_names)}"


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel.create(fresh_name(), 8, Capacities(uplink=4, downlink=4, receipts=4))
    yield channel
    channel.close()
    channel.unlink()


def memory(capacity: int, samples: int) -> memoryview:
    return memoryview(bytearray(ring_bytes(capacity, samples)))


def frame(value: float, samples: int = 8) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(samples, value, np.float32)


@given(st.integers(1, 5), st.lists(st.sampled_from(["put", "get", "skip"]), max_size=60))
def test_a_ring_behaves_like_a_bounded_deque(capacity: int, steps: list[str]) -> None:
    buffer = memory(capacity, 3)
    writer = UplinkRing.create(buffer, capacity, 3)
    reader = UplinkRing.attach(buffer)
    model: collections.deque[int] = collections.deque()
    row = frame(-1, 3)
    for number, step in enumerate(steps):
        if step == "put":
            accepted = writer.put(UplinkHeader(number, LAST, -number), frame(number, 3))
            assert accepted == (len(model) < capacity)
            if accepted:
                model.append(number)
        elif step == "get":
            header = reader.get(row)
            if not model:
                assert header is None
            else:
                oldest = model.popleft()
                assert header == UplinkHeader(oldest, LAST, -oldest)
                assert (row == oldest).all()
        else:
            dropped = reader.skip(2)
            assert dropped == min(2, len(model))
            for _ in range(dropped):
                model.popleft()
        assert reader.waiting == len(model)
    assert (writer.faults, reader.faults) == (0, 0)


def test_every_field_survives_at_its_extremes() -> None:
    down = DownlinkRing.create(memory(1, 8), 1, 8)
    header = DownlinkHeader(
        session=2**64 - 1,
        generation=2**32 - 1,
        frame_index=-(2**63),
        tick=2**63 - 1,
        deadline_ns=2**63 - 1,
        made_ns=-1,
        text=-1,
        flags=GENERATED | FINAL,
        heard=-1,
    )
    row = frame(0)
    assert down.put(header, frame(0.5))
    assert down.get(row) == header
    assert (row == 0.5).all()
    receipts = ReceiptRing.create(memory(1, 0), 1)
    receipt = Receipt(2**64 - 1, 2**32 - 1, 2**63 - 1, Outcome.DISCARDED, -1, -(2**63))
    assert receipts.put(receipt)
    assert receipts.get() == receipt
    assert receipts.get() is None


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_peer_that_scribbles_over_the_counters_raises_nothing(written: int, read: int) -> None:
    buffer = memory(4, 8)
    writer, reader = DownlinkRing.create(buffer, 4, 8), DownlinkRing.attach(buffer)
    row = frame(0)
    header = DownlinkHeader(1, 2, 3, 4, 5, 6)
    assert writer.put(header, frame(1))
    counters = buffer[:192].cast("Q")
    counters[8] = written  # seen by the reader: a writer gone mad
    assert 0 <= reader.waiting <= 4
    for _ in range(6):
        reader.get(row)
    counters[16] = read  # seen by the writer: a reader gone mad
    accepted = sum(writer.put(header, row) for _ in range(10))
    assert accepted <= 4
    if not 0 <= 1 - read <= 4:
        assert accepted == 0
        assert writer.faults == 10


def test_a_ring_refuses_memory_that_is_not_its_own() -> None:
    buffer = memory(2, 8)
    UplinkRing.create(buffer, 2, 8)
    with pytest.raises(ChannelError, match="DownlinkRing starts with"):
        DownlinkRing.attach(buffer)
    with pytest.raises(ChannelError, match="does not fit"):
        UplinkRing.attach(buffer[:-64])
    with pytest.raises(ChannelError, match="too few"):
        UplinkRing.attach(buffer[:64])
    buffer[8:16] = (2**63).to_bytes(8, "little")
    with pytest.raises(ChannelError, match="9223372036854775808 entries"):
        UplinkRing.attach(buffer)
    with pytest.raises(ValueError, match="needs a capacity"):
        UplinkRing.create(buffer, 3, 8)


def test_frames_and_receipts_cross_a_channel(channel: Channel) -> None:
    line = Channel.attach(channel.name)
    row = frame(0)
    assert line.samples == 8
    assert line.uplink.put(UplinkHeader(0, LAST, 7), frame(0.25))
    assert channel.uplink.get(row) == UplinkHeader(0, LAST, 7)
    assert (row == 0.25).all()
    assert channel.downlink.put(DownlinkHeader(1, 2, 3, 4, 5, 6), frame(-1))
    assert line.downlink.get(row) == DownlinkHeader(1, 2, 3, 4, 5, 6)
    assert line.receipts.put(Receipt(1, 2, 3, Outcome.DELIVERED, 8, 9))
    assert channel.receipts.get() == Receipt(1, 2, 3, Outcome.DELIVERED, 8, 9)
    line.close()
    line.close()


def test_an_unlinked_channel_still_serves_whoever_has_it_mapped() -> None:
    box = Channel.create(fresh_name(), 8)
    line = Channel.attach(box.name)
    box.unlink()
    box.unlink()
    with pytest.raises(ChannelError, match="cannot be opened: No such file"):
        Channel.attach(box.name)
    assert line.uplink.put(UplinkHeader(0, 0, 0), frame(1))
    assert box.uplink.waiting == 1
    line.close()
    box.close()


def test_a_channel_says_what_is_wrong_with_a_segment(channel: Channel) -> None:
    with pytest.raises(ChannelError, match="exists already"):
        Channel.create(channel.name, 8)
    for name in ("../etc/passwd", "", "a/b", ".hidden"):
        with pytest.raises(ChannelError, match="cannot be the name"):
            Channel.attach(name)
    path = Path("/dev/shm") / fresh_name()
    try:
        path.touch(0o600)
        with pytest.raises(ChannelError, match="is empty"):
            Channel.attach(path.name)
        path.write_bytes(b"x" * 10)
        with pytest.raises(ChannelError, match="10 bytes"):
            Channel.attach(path.name)
        path.write_bytes(b"x" * 4096)
        with pytest.raises(ChannelError, match="different versions"):
            Channel.attach(path.name)
        lie = CHANNEL_FIELDS.pack(MAGIC_CHANNEL, 1920, 16, 64, 256)
        path.write_bytes(lie + bytes(4096))
        with pytest.raises(ChannelError, match="header asks for"):
            Channel.attach(path.name)
    finally:
        path.unlink()


WRITER = """
import sys, zlib
import numpy as np
from appliance.channel import Channel
from appliance.frame_ring import UplinkHeader
channel = Channel.attach(sys.argv[1])
random = np.random.default_rng(1)
pcm = np.empty(channel.samples, np.float32)
for index in range(int(sys.argv[2])):
    pcm[:] = random.standard_normal(channel.samples, np.float32)
    while not channel.uplink.put(UplinkHeader(index, index % 7, zlib.crc32(pcm)), pcm):
        pass
channel.close()
"""


@pytest.mark.slow
def test_two_processes_lose_and_tear_nothing() -> None:
    frames = 10_000
    channel = Channel.create(fresh_name(), 480, Capacities(uplink=3))
    writer = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, channel.name, str(frames)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    try:
        row = np.empty(480, np.float32)
        for index in range(frames):
            while (header := channel.uplink.get(row)) is None:
                assert writer.poll() in (None, 0), writer.communicate()
            assert header == UplinkHeader(index, index % 7, zlib.crc32(row.tobytes()))
        _, complaints = writer.communicate(timeout=10)
        assert (writer.returncode, complaints) == (0, b"")
        assert channel.uplink.faults == 0
    finally:
        writer.kill()
        writer.wait()
        channel.close()
        channel.unlink()


BOX = """
import sys
import zlib
from appliance.channel import Channel
channel = Channel.create(sys.argv[1], 1920)
print("ready", flush=True)
sys.stdin.read()
channel.close()
channel.unlink()
"""


@pytest.mark.slow
def test_a_killed_line_leaves_nothing_and_takes_nothing() -> None:
    channel = Channel.create(fresh_name(), 480)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, channel.name, "1000000"], cwd=ROOT, stderr=subprocess.PIPE
    )
    row = np.empty(480, np.float32)
    try:
        while channel.uplink.get(row) is None:
            assert writer.poll() is None, writer.communicate()
        writer.send_signal(signal.SIGKILL)
        assert writer.communicate(timeout=10)[1] == b""
        # The line's death did not take the segment from the box, whose name still works.
        Channel.attach(channel.name).close()
        while channel.uplink.get(row) is not None:
            pass
        assert channel.uplink.faults == 0
    finally:
        writer.kill()
        writer.wait()
        channel.close()
        channel.unlink()
    assert not Path("/dev/shm", channel.name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["polite", "killed"])
def test_the_segment_goes_with_the_box_however_it_ends(ending: str) -> None:
    name = fresh_name()
    box = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BOX, name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert box.stdout is not None
    assert box.stdout.readline() == b"ready\n"
    assert Path("/dev/shm", name).exists()
    if ending == "killed":
        box.kill()
    # Its stderr is also the resource tracker's, so this waits for that process, too.
    _, complaints = box.communicate(timeout=20)
    assert not Path("/dev/shm", name).exists()
    if ending == "polite":
        assert complaints == b""


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(0, 2000))
def test_entries_start_on_cache_lines(capacity: int, samples: int) -> None:
    assert frame_ring.entry_bytes(samples) % 64 == 0
    assert frame_ring.entry_bytes(samples) >= 64 + 4 * samples
    assert ring_bytes(capacity, samples) % 64 == 0
