"""Each frame of a session: when it is heard, and which receipts it earns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.frame_ring import FINAL, GENERATED, DownlinkHeader, Outcome, Receipt
from appliance.lines.playout import HORIZON_FRAMES, Played, Playout

P = 80
"""The period in these tests; nanoseconds are small numbers here."""


def playout(buffer_ns: int = P) -> Playout[str]:
    return Playout(session=7, generation=3, period_ns=P, buffer_ns=buffer_ns)


def header(
    index: int,
    *,
    made_ns: int = 0,
    deadline_ns: int = 0,
    session: int = 7,
    generation: int = 3,
    flags: int = GENERATED,
) -> DownlinkHeader:
    return DownlinkHeader(session, generation, index, 0, deadline_ns, made_ns, -1, flags)


def receipt(index: int, outcome: Outcome, at_ns: int, buffer_ns: int) -> Receipt:
    return Receipt(7, 3, index, outcome, at_ns, buffer_ns)


@pytest.mark.parametrize(
    ("arrived_ns", "made_ns", "outcome", "buffer_ns"),
    [
        (100, 100, Outcome.DELIVERED, 160),
        (179, 180, Outcome.DELIVERED, 81),
        (181, 181, Outcome.LATE, 79),
        (260, 181, Outcome.LATE, 0),
        (260, 179, Outcome.DELIVERED, 0),
        (261, 260, Outcome.FILLED, -1),
    ],
)
def test_the_outcome_follows_from_arrival_deadline_and_playout_time(
    arrived_ns: int, made_ns: int, outcome: Outcome, buffer_ns: int
) -> None:
    line = playout()
    assert line.arrive(header(0), "zero", 100) is None  # so frame 1 is due at 260
    assert line.due(180)[0] == [Played(0, Outcome.DELIVERED, 180, "zero")]
    assert line.arrive(header(1, made_ns=made_ns, deadline_ns=180), "one", arrived_ns) is None
    played, receipts = line.due(261)
    if outcome is Outcome.FILLED:
        assert played == [Played(1, Outcome.FILLED, 260, None)]
        assert receipts == [
            receipt(1, Outcome.FILLED, 261, -1),
            receipt(1, Outcome.DISCARDED, arrived_ns, buffer_ns),
        ]
    else:
        assert played == [Played(1, outcome, 260, "one")]
        assert receipts == [receipt(1, outcome, 261, buffer_ns)]


def test_nothing_is_due_before_the_first_frame_and_never_too_early() -> None:
    line = playout()
    assert line.due(10_000) == ([], [])
    assert line.next_due_ns is None
    line.arrive(header(0), "zero", 20_000)
    assert line.next_due_ns == 20_000 + P
    assert line.due(20_000 + P - 1) == ([], [])
    assert len(line.due(20_000 + P)[0]) == 1


def test_a_frame_after_its_playout_time_was_filled_and_is_discarded() -> None:
    line = playout()
    line.arrive(header(0), "zero", 0)
    played, receipts = line.due(160)
    assert [(p.frame_index, p.outcome) for p in played] == [
        (0, Outcome.DELIVERED),
        (1, Outcome.FILLED),
    ]
    assert receipts[1] == receipt(1, Outcome.FILLED, 160, 0)
    assert line.arrive(header(1), "one", 165) == receipt(1, Outcome.DISCARDED, 165, -5)


def test_a_long_sleep_decides_every_frame_that_was_due_in_order() -> None:
    line = playout()
    for index in (0, 1, 3):
        line.arrive(header(index), str(index), 0)
    played, _ = line.due(80 + 4 * P)
    assert [(p.playout_ns, p.frame) for p in played] == [
        (80, "0"),
        (160, "1"),
        (240, None),
        (320, "3"),
        (400, None),
    ]


def test_nothing_is_due_after_the_final_frame() -> None:
    line = playout()
    line.arrive(header(0), "zero", 0)
    line.arrive(header(1, flags=GENERATED | FINAL), "one", 80)
    assert not line.is_over
    assert len(line.due(10_000)[0]) == 2
    assert line.is_over
    assert line.due(20_000) == ([], [])
    assert line.next_due_ns is None


def test_hanging_up_discards_what_was_not_heard_and_what_still_comes() -> None:
    line = playout()
    line.arrive(header(0), "zero", 0)
    line.arrive(header(1), "one", 70)
    line.due(80)
    assert line.hang_up(90) == [receipt(1, Outcome.DISCARDED, 90, 90)]
    assert line.is_over
    assert line.due(1_000) == ([], [])
    assert line.arrive(header(2), "two", 150) == receipt(2, Outcome.DISCARDED, 150, 90)
    assert line.hang_up(200) == []


@pytest.mark.parametrize(("session", "generation"), [(8, 3), (7, 2)])
def test_a_foreign_frame_is_discarded_under_its_own_stamp(session: int, generation: int) -> None:
    line = playout()
    foreign = header(0, session=session, generation=generation)
    assert line.arrive(foreign, "not ours", 5) == Receipt(
        session, generation, 0, Outcome.DISCARDED, 5, 0
    )
    assert line.first_ns is None
    assert line.strays == 0


@pytest.mark.parametrize("index", [-1, 0, 1, 2 + HORIZON_FRAMES, 2**62])
def test_an_index_that_cannot_be_is_a_stray_without_a_receipt(index: int) -> None:
    line = playout()
    for arrived in (0, 1):
        line.arrive(header(arrived), "", 0)
    line.due(160)
    assert line.arrive(header(index), "", 160) is None
    assert line.strays == 1
    assert line.due(160) == ([], [])


HEARD = {Outcome.DELIVERED, Outcome.LATE, Outcome.FILLED}


@given(
    delays=st.lists(st.none() | st.integers(0, 500), min_size=1, max_size=40),
    wakes=st.lists(st.integers(0, 4000), max_size=40),
    buffer_ns=st.integers(0, 200),
    hang_up_ns=st.none() | st.integers(0, 4000),
)
def test_every_frame_has_one_fate_whatever_happens_when(
    delays: list[int | None], wakes: list[int], buffer_ns: int, hang_up_ns: int | None
) -> None:
    """delays: of frame k after k·P; None: the box never made it. wakes: when the line looks."""
    line = playout(buffer_ns)
    final = len(delays) - 1
    arrivals: list[tuple[int, int]] = []
    clock = 0
    for index, delay in enumerate(delays):
        if delay is not None:
            clock = max(clock, index * P + delay)
            arrivals.append((clock, index))
    heard: list[Played[str]] = []
    receipts: list[Receipt] = []
    events = [(at, 0, index) for at, index in arrivals] + [(at, 1, -1) for at in wakes]
    if hang_up_ns is not None:
        events.append((hang_up_ns, 2, -1))
    for at, kind, index in [*sorted(events), (100_000, 1, -1)]:
        if kind == 0:
            flags = GENERATED | (FINAL if index == final else 0)
            earned = line.arrive(header(index, flags=flags, made_ns=at), str(index), at)
            receipts += [earned] if earned else []
        if kind == 1 or kind == 2:
            played, earned_now = line.due(at)
            heard += played
            receipts += earned_now
        if kind == 2:
            receipts += line.hang_up(at)

    assert line.strays == 0
    assert [p.frame_index for p in heard] == list(range(len(heard)))
    fates = [r.frame_index for r in receipts if r.outcome in HEARD]
    assert fates == list(range(len(heard)))
    assert all((p.outcome is Outcome.FILLED) == (p.frame is None) for p in heard)
    arrived = {index for _, index in arrivals}
    filled = {r.frame_index for r in receipts if r.outcome is Outcome.FILLED}
    discarded = [r.frame_index for r in receipts if r.outcome is Outcome.DISCARDED]
    assert len(discarded) == len(set(discarded))
    # Whatever came was heard or discarded, never both, never neither.
    assert set(discarded) == {i for i in arrived if i >= len(heard) or i in filled}
    if hang_up_ns is None and final in arrived:
        assert filled >= set(range(final + 1)) - arrived
        assert set(discarded) <= filled
        assert len(heard) >= final + 1
    for r in receipts:
        if r.outcome in (Outcome.DELIVERED, Outcome.LATE):
            assert r.buffer_ns >= 0
