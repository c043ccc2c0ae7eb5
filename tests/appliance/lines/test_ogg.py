"""Pages out of bytes from a stranger: whole audio packets pass, everything else is counted."""

import struct

import numpy as np
import pytest
import sphn
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.lines.ogg import (
    LONGEST_PAGE_BYTES,
    OggError,
    PageSplitter,
    packet_samples,
)
from appliance.lines.opus import OpusIn, OpusOut


def page(packets: list[bytes], flags: int = 0, open_end: bool = False) -> bytes:
    lacing = b"".join(bytes([255] * (len(p) // 255) + [len(p) % 255]) for p in packets)
    if open_end:
        lacing = lacing[:-1]
    head = b"OggS\0" + bytes([flags]) + struct.pack("<qIII", 0, 42, 0, 0)
    return head + bytes([len(lacing)]) + lacing + b"".join(packets)


def stream(frames: int) -> list[bytes]:
    """What a client sends for so many blocks of 80 ms."""
    tone = np.sin(np.arange(1920, dtype=np.float32) / 9)
    out = OpusOut()
    return [out.encode(tone) for _ in range(frames)]


def test_a_clients_stream_passes_however_it_is_cut() -> None:
    whole = b"".join(stream(5))
    for cut in (1, 7, 100, 1000, len(whole)):
        splitter = PageSplitter()
        pages = [p for at in range(0, len(whole), cut) for p in splitter.push(whole[at : at + cut])]
        assert [p.samples for p in pages] == [1920] * 10  # 40 ms each, at 48 kHz
        assert (splitter.junk_bytes, splitter.dropped_pages) == (0, 0)


def test_what_a_page_claims_is_what_the_decoder_makes_of_it() -> None:
    splitter, opus = PageSplitter(), OpusIn()
    for block in (480, 960, 1440, 1920):
        writer = sphn.OpusStreamWriter(24_000)
        for _ in range(6):
            for found in splitter.push(writer.append_pcm(np.zeros(block, np.float32))):
                assert opus.decode(found.raw).size * 2 == found.samples


def test_a_stream_may_be_joined_in_mid_page() -> None:
    later = b"".join(stream(4)[1:])
    splitter = PageSplitter()
    pages = splitter.push(later[10:])
    assert len(pages) == 5
    assert splitter.junk_bytes > 0
    assert all(OpusIn().decode(p.raw).size == 960 for p in pages)


def test_garbage_between_pages_is_skipped_and_the_decoder_never_sees_it() -> None:
    opus, splitter, heard = OpusIn(), PageSplitter(), 0
    for part in stream(6):
        for found in splitter.push(b"OggS\x07junk" + part + b"Og"):
            heard += opus.decode(found.raw).size
    assert heard == 6 * 1920
    assert opus.failures == 0
    assert splitter.junk_bytes > 6 * 9


def test_packets_that_go_on_over_a_pages_end_are_dropped() -> None:
    splitter = PageSplitter()
    assert splitter.push(page([b"\x48" * 255], open_end=True)) == []
    assert splitter.push(page([b"\x48" * 20], flags=1)) == []
    assert splitter.dropped_pages == 2


@pytest.mark.parametrize(
    ("packet", "samples"),
    [
        (b"", None),
        (b"\x00", 480),  # SILK, 10 ms
        (b"\x18", 2880),  # SILK, 60 ms
        (b"\x60", 480),  # hybrid, 10 ms
        (b"\x80", 120),  # CELT, 2.5 ms
        (b"\x98", 960),  # CELT, 20 ms
        (b"\x99", 1920),  # two frames
        (b"\x9b", None),  # so many frames: how many is missing
        (b"\x9b\x06", 5760),
        (b"\x9b\x07", None),  # 140 ms
        (b"\x9b\x00", None),
    ],
)
def test_a_packet_says_how_long_it_is(packet: bytes, samples: int | None) -> None:
    assert packet_samples(packet) == samples


@pytest.mark.parametrize(("channels", "mapping"), [(0, 0), (3, 0), (1, 1), (8, 255)])
def test_a_stream_that_is_no_voice_is_refused(channels: int, mapping: int) -> None:
    head = b"OpusHead\x01" + bytes([channels]) + bytes(8) + bytes([mapping])
    with pytest.raises(OggError, match=f"{channels} channels in mapping {mapping}"):
        PageSplitter().push(page([head], flags=2))
    with pytest.raises(OggError, match="10 bytes"):
        PageSplitter().push(page([head[:10]], flags=2))


good = st.sampled_from(stream(3))
junk = st.binary(max_size=200) | st.just(b"OggS") | st.just(b"OggS\0")
broken = st.builds(
    lambda packets, flags, end: page(packets, flags, end),
    st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    st.integers(0, 255),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(good | junk | broken, max_size=12), st.integers(1, 500))
def test_nothing_a_stranger_sends_raises_or_is_kept(parts: list[bytes], cut: int) -> None:
    whole = b"".join(parts)
    splitter, opus = PageSplitter(), OpusIn()
    passed = 0
    for at in range(0, len(whole), cut):
        try:
            pages = splitter.push(whole[at : at + cut])
        except OggError:
            continue
        for found in pages:
            passed += len(found.raw)
            assert opus.decode(found.raw).size * 2 <= found.samples
        assert len(splitter._rest) < LONGEST_PAGE_BYTES
    assert passed + splitter.junk_bytes + len(splitter._rest) <= len(whole)
