"""What a watcher of the box is told of its sessions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.box_view import BINS, MARGINS, MOST_SESSIONS, SessionView, Watch
from appliance.clock import NS_PER_MS as MS
from appliance.ledger import TICK, Flag

PERIOD_NS = 80 * MS


def records(*rows: tuple[int, int, float, int]) -> NDArray[Any]:
    """Of (session, tick, margin in ms, flags)."""
    made = np.zeros(len(rows), TICK)
    for at, (session, tick, margin_ms, flags) in enumerate(rows):
        made[at]["session"], made[at]["tick"] = session, tick
        made[at]["index"], made[at]["flags"] = tick, flags
        made[at]["margin_ns"] = int(margin_ms * MS)
    return made


def watch(*sessions: int) -> Watch:
    made = Watch()
    for session in sessions:
        made.begin(session, "file")
    return made


def test_the_worst_session_of_the_last_ticks_comes_first() -> None:
    seen = watch(1, 2, 3)
    late = Flag.GENERATED.value | Flag.LATE.value
    seen.add(records((1, 0, 70, 0), (2, 0, 60, 0), (1, 1, 70, 0), (2, 1, -2.5, late)), PERIOD_NS)
    view = seen.view(lambda age: 100 * age)
    assert [s.session for s in view.sessions] == [2, 1]  # 3 has not been due
    worst = view.sessions[0]
    assert worst.margins == (600, -25)
    assert (worst.worst, worst.late, worst.age, worst.bytes) == (-25, 1, 2, 200)


def test_a_tick_counts_once_however_many_sessions_it_had() -> None:
    seen = watch(1, 2)
    missed = Flag.MISSED.value
    seen.add(
        records((1, 0, 79, 0), (2, 0, 77, 0), (1, 1, 30, 0), (2, 1, 29, 0), (1, 2, -90, missed)),
        PERIOD_NS,
    )
    seen.add(records((1, 3, -100, 0)), PERIOD_NS)
    histogram = seen.view(lambda age: 0).histogram
    assert sum(histogram) == 3
    assert histogram[0] == 1  # 3 ms of 80
    assert histogram[51 * BINS // 80] == 1
    assert histogram[BINS] == 1


def test_a_call_that_is_over_is_forgotten_and_one_that_never_was_is_nothing() -> None:
    seen = watch(1)
    seen.add(records((1, 0, 70, 0), (9, 0, 70, 0)), PERIOD_NS)
    seen.end(1)
    seen.end(9)
    assert seen.view(lambda age: 0).sessions == ()


def test_as_many_sessions_as_are_told_fit_into_one_message() -> None:
    seen = watch(*range(10**9, 10**9 + MOST_SESSIONS + 5))
    for tick in range(MARGINS):
        rows = [(10**9 + s, 10**8 + tick, -3000.0, 0) for s in range(MOST_SESSIONS + 5)]
        seen.add(records(*rows), PERIOD_NS)
    view = seen.view(lambda age: 10**11)
    assert view.left_out == 5
    assert isinstance(view.sessions[0], SessionView)
    report = control.Report(1, True, False, 2**40, 9, 9, 9, 9, 9, -(2**40), -(2**40), 9, view=view)
    raw = control.encode(report)
    assert len(raw) < control.LIMIT_BYTES
    assert control.decode_from_box(raw) == report
