"""What waits for which stream: of the driver's shells alone, and of the fake that is late."""

import ctypes

import numpy as np
import pytest

from engines import cuda
from engines.cuda_memory import HostArray, Range, write_ordered
from tests.engines.fake_driver import PAGE, FakeDriver, bytes_at


def test_what_is_filled_or_written_is_there_when_the_call_returns(driver: FakeDriver) -> None:
    first, second = cuda.allocate(8), cuda.allocate(8)
    cuda.fill_bytes(first, 7, 8)
    assert bytes_at(first, 8).tolist() == [7] * 8
    cuda.write_device(second, bytes(range(8)))
    assert bytes_at(second, 8).tolist() == list(range(8))


def test_a_range_is_closed_when_nothing_touches_its_pages(driver: FakeDriver) -> None:
    memory = Range(2 * PAGE)
    memory.map_page(0)
    memory.fill(0, PAGE, 1)
    memory.close()
    assert driver.held == {}
    assert driver.pages == 0


def test_work_is_done_when_somebody_waits_for_its_stream_and_not_before(
    driver: FakeDriver,
) -> None:
    host, one, other = HostArray((4,), np.uint8), cuda.Stream(), cuda.Stream()
    device, back = cuda.allocate(4), cuda.allocate(4)
    host.array[:] = 1
    host.to_device(device, 4, one)
    write_ordered(back, b"abcd", one)
    host.array[:] = 2  # too early: it is what arrives
    other.synchronize()
    assert bytes_at(device, 4).tolist() == [0xFF] * 4
    assert other.is_idle()
    assert not one.is_idle()
    one.synchronize()
    assert one.is_idle()
    assert bytes_at(device, 4).tolist() == [2] * 4
    assert bytes(bytes_at(back, 4)) == b"abcd", "taken by the call: its memory may go"
    host.from_device(back, 4, other)
    assert host.array.tolist() == [2] * 4
    raw = (ctypes.c_ubyte * 4)()
    cuda.call("cuMemcpyDtoHAsync", ctypes.addressof(raw), back, 4, other.handle)
    assert host.array.tobytes() == bytes(raw) == b"abcd", "other memory is waited for"


def test_two_streams_at_one_place_are_found_though_the_order_came_out_right(
    driver: FakeDriver,
) -> None:
    memory, stream = Range(2 * PAGE), cuda.Stream()
    memory.map_page(0)
    memory.fill(0, 8, 0)
    write_ordered(cuda.DevicePtr(memory.base + 8), bytes(8), stream)
    stream.synchronize()
    write_ordered(cuda.DevicePtr(memory.base + 4), bytes(8), stream)
    with pytest.raises(AssertionError, match="races"):
        stream.synchronize()
    with pytest.raises(AssertionError, match="races"):
        cuda.read_device(memory.base, 1)
    with pytest.raises(AssertionError, match="races"):
        memory.unmap_page(0)


def test_what_is_given_to_a_stream_needs_its_pages_then_and_until_it_is_done(
    driver: FakeDriver,
) -> None:
    memory, stream = Range(2 * PAGE), cuda.Stream()
    row = cuda.DevicePtr(memory.base + PAGE - 8)
    memory.map_page(0)
    write_ordered(row, bytes(16), stream)
    memory.map_page(1)
    with pytest.raises(AssertionError, match="too late"):
        stream.synchronize()
    write_ordered(row, bytes(8), stream)
    driver.cuMemUnmap(memory.base + PAGE, PAGE)
    write_ordered(row, bytes(16), stream)
    with pytest.raises(AssertionError, match="has no page"):
        stream.synchronize()
