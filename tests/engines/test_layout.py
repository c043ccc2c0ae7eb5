"""Where buffers lie and which pages a session needs: arithmetic, checked row by row."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.clocks import ClockKind, NativeClock, Order
from engines.layout import ALIGN_BYTES, NEVER, Family, piece_rows, plan_layout
from engines.program import Buffer, plan_program
from tests.engines import toy


def family(retain: int, row_bytes: int, page_bytes: int, slots: int, advance: str = "1") -> Family:
    """Two rings of ``slots`` slots."""
    clock = NativeClock(ClockKind.RING, 0, advance, retain=retain, order=Order.MODULO)
    pages = -(-slots * retain * row_bytes // page_bytes)
    return Family(("k", "v"), clock, retain * row_bytes, page_bytes, (0, pages), pages)


@given(
    retain=st.integers(2, 40).map(lambda n: n - n % 2),
    row_bytes=st.integers(1, 30),
    page_bytes=st.integers(8, 200),
    slot=st.integers(0, 4),
    advance=st.sampled_from(["1", "2", "1/2"]),
)
def test_pages_cover_exactly_the_rows_a_session_has(
    retain: int, row_bytes: int, page_bytes: int, slot: int, advance: str
) -> None:
    ring = family(retain, row_bytes, page_bytes, 5, advance)
    for ticks in range(2 * retain + 3):
        rows = range(ring.clock.valid_rows(ticks))
        touched = {
            byte // page_bytes
            for row in rows
            for byte in (
                slot * ring.slot_bytes + row * row_bytes,
                slot * ring.slot_bytes + (row + 1) * row_bytes - 1,
            )
        }
        pages = ring.pages_at(slot, ticks)
        if rows:
            assert (pages.start, pages.stop) == (min(touched), max(touched) + 1)
        else:
            assert not pages
        grows = ring.grows_at(slot, ticks)
        later = [t for t in range(2 * retain + 9) if ring.pages_at(slot, t).stop > pages.stop]
        assert grows == (min(later) if later else NEVER)


def test_buffers_do_not_overlap_and_large_rings_get_pages() -> None:
    manifest = toy.manifest()
    program = plan_program(manifest)
    plain = plan_layout(manifest, program, 3, page_bytes=4096)
    assert plain.families == ()  # a ring of 40 bytes is whole
    assert plain.growing_bytes == 0
    spans = sorted((w.offset_bytes, w.offset_bytes + 3 * w.row_bytes) for w in plain.whole.values())
    assert all(low % ALIGN_BYTES == 0 for low, _ in spans)
    assert all(end <= low for (_, end), (low, _) in pairwise(spans))
    assert spans[-1][1] <= plain.whole_bytes
    assert {Buffer("frames", 0), Buffer("frames", 1), Buffer("hear.ring", 0)} <= plain.whole.keys()

    paged = plan_layout(manifest, program, 3, page_bytes=16)
    assert [f.names for f in paged.families] == [("hear.ring",)]
    assert Buffer("hear.ring", 0) not in paged.whole
    rows = paged.ring_rows("hear.ring")
    assert rows is not None
    assert (rows.first, rows.slot_bytes, rows.row_bytes) == (0, 40, 8)
    assert paged.ring_rows("frames") is None
    assert paged.growing_bytes == 128  # 3 slots x 5 rows x 8 bytes = 120, in pages of 16


def test_memory_is_known_at_every_age_before_anything_runs() -> None:
    manifest = toy.manifest()
    layout = plan_layout(manifest, plan_program(manifest), 3, page_bytes=16)
    # Slots of 40 bytes: slot 1 begins in the middle of page 2.
    assert layout.committed_bytes([]) == layout.whole_bytes
    assert layout.committed_bytes([1]) - layout.whole_bytes == 16
    assert layout.committed_bytes([5]) - layout.whole_bytes == 48
    assert layout.committed_bytes([5, 1]) - layout.whole_bytes == 48  # shares the third page
    assert layout.committed_bytes([5, 2]) - layout.whole_bytes == 64
    assert layout.full_bytes(3) - layout.whole_bytes == 128


@pytest.mark.parametrize("pinned", [0, 2])
def test_a_ring_that_wraps_needs_no_page_more(pinned: int) -> None:
    ring = family(8, 4, 8, 2)
    clock = msgspec.structs.replace(ring.clock, pinned=pinned)
    ring = Family(ring.names, clock, 32, 8, ring.base_pages, ring.pages)
    assert ring.pages_at(0, 8) == ring.pages_at(0, 800) == ring.span(0)
    assert ring.grows_at(0, 800) == NEVER


@given(
    retain=st.integers(2, 40).map(lambda n: n - n % 2),
    row_bytes=st.integers(1, 30),
    page_bytes=st.integers(8, 200),
    place=st.integers(0, 4),
    advance=st.sampled_from(["1", "2"]),
)
def test_a_place_has_memory_for_the_rows_of_all_its_rings(
    retain: int, row_bytes: int, page_bytes: int, place: int, advance: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.layout.PIECE_ROWS", 8)
        clock = NativeClock(ClockKind.RING, 0, advance, retain=retain, order=Order.MODULO)
        ring = Family(("a", "b", "c"), clock, retain * row_bytes, page_bytes, (0,), 0, True)
    assert ring.slot_bytes % page_bytes == 0
    seen: set[int] = set()
    for ticks in range(retain + 3):
        rows = clock.valid_rows(ticks)
        touched = set()
        for name in ring.names:
            for offset, nbytes in ring.rows(name).spans(place, 0, rows):
                touched |= set(range(offset, offset + nbytes))
        assert len(touched) == 3 * rows * row_bytes  # no two rows share a byte
        assert all(place * ring.slot_bytes <= b < (place + 1) * ring.slot_bytes for b in touched)
        pages = ring.pages_at(place, ticks)
        assert {byte // page_bytes for byte in touched} <= set(pages)
        for page in set(pages) - seen:
            assert ring.ticks_before(place, page) < ticks
        seen |= set(pages)
        later = [t for t in range(retain + 9) if ring.pages_at(place, t).stop > pages.stop]
        assert ring.grows_at(place, ticks) == (min(later) if later else NEVER)


def test_a_piece_is_a_power_of_two_and_no_longer_than_its_ring_needs() -> None:
    assert [piece_rows(retain) for retain in (1, 2, 3, 17, 64, 65, 3000)] == [
        *(1, 2, 4, 32, 64, 64, 64),
    ]


def test_moshi_loses_less_than_a_piece_of_every_ring() -> None:
    """64 rings of 3,000 rows of 8 KiB: 2.5 % more than their bytes at a minute, 0.3 % when full."""
    clock = NativeClock(ClockKind.RING, 1, "1", retain=3000, order=Order.MODULO)
    page, ring = 2 << 20, 3000 * 8192
    placed = Family(tuple(map(str, range(64))), clock, ring, page, (0,), 0, True)
    assert placed.growth_ticks == 64
    assert placed.growth_pages == 16
    assert len(placed.span(0)) * page == 64 * 3008 * 8192
    assert len(placed.pages_at(3, 750)) * page == 64 * 768 * 8192
    by_slot = Family(tuple(map(str, range(64))), clock, ring, page, tuple(range(64)), 0)
    lost = [64 * len(by_slot.span(slot)) * page - 64 * ring for slot in range(64)]
    assert sum(lost) > 5e9  # what places are for
