"""What the ledger adds up to, on calls written by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import ledger, report
from appliance.clock import NS_PER_MS as MS
from appliance.ledger import Call, Flag, Kind, Settled, Why
from appliance.plot import margin_plot
from tests.appliance.test_ledger import header

OK = (Flag.HEARD | Flag.GENERATED).value
LATE = OK | Flag.LATE.value
MISSED = Flag.MISSED.value
DELIVERED = Settled.DELIVERED.value


def call(
    flags: list[int],
    outcomes: list[tuple[int, int]],
    session: int = 1,
    due: int | None = None,
    why: Why | None = Why.FINISHED,
    first_tick: int = 0,
    **fields: Any,
) -> Call:
    """One call: a record per entry of ``flags``, receipts as (index, outcome)."""
    margin = {"margin_ns": 60 * MS} | fields
    rows = [
        {"session": session, "index": n, "tick": first_tick + n, "flags": flag}
        | margin
        | ({"margin_ns": -5 * MS} if flag & (Flag.LATE | Flag.MISSED) else {})
        for n, flag in enumerate(flags)
    ]
    receipts = np.zeros(len(outcomes), ledger.RECEIPT)
    receipts["kind"] = Kind.RECEIPT
    receipts["session"] = session
    for receipt, (index, outcome) in zip(receipts, outcomes, strict=True):
        receipt["index"], receipt["outcome"] = index, outcome
        receipt["buffer_ns"] = 40 * MS + index
    end = np.zeros(1, ledger.END)
    end["index"] = len(flags) if due is None else due
    end["why"] = why or 0
    return Call(
        path=Path(f"{session}.call"),
        header=header(session),
        ticks=ledger.tick_records(rows),
        receipts=receipts,
        end=None if why is None else end[0],
        dropped_bytes=0,
    )


def all_delivered(frames: int) -> list[tuple[int, int]]:
    return [(n, DELIVERED) for n in range(frames)]


def test_a_call_without_fault() -> None:
    summary = report.summarise([call([OK] * 10, all_delivered(10))])
    (session,) = summary.sessions
    assert (session.due, session.generated, session.on_time) == (10, 10, 10)
    assert (session.on_time_share, session.longest_miss_run, session.failed) == (1.0, 0, False)
    assert (session.worst_margin_ns, session.worst_buffer_ns) == (60 * MS, 40 * MS)
    assert summary.unexplained == 0
    assert "every one of 10 due frames is accounted for" in report.text(summary)


def test_what_went_wrong_is_counted_each_in_its_place() -> None:
    flags = [OK, LATE, MISSED, LATE, OK, Flag.CONCEALED | Flag.GENERATED, OK]
    outcomes = [
        (0, DELIVERED),
        (1, Settled.LATE),
        (2, Settled.FILLED),
        (3, Settled.FILLED),
        (3, Settled.DISCARDED),
        (4, DELIVERED),
        (5, DELIVERED),
        (6, Settled.DISCARDED),
    ]
    (session,) = report.summarise([call(flags, outcomes, lag=2, skipped=1)]).sessions
    assert (session.due, session.generated, session.on_time, session.late) == (7, 6, 3, 1)
    assert (session.filled, session.discarded, session.missed, session.concealed) == (2, 1, 1, 1)
    assert (session.longest_miss_run, session.worst_margin_ns) == (3, -5 * MS)
    assert (session.worst_lag_frames, session.skipped) == (2, 7)
    assert session.on_time_share == 3 / 6
    assert session.unexplained == 0


def test_a_due_frame_without_a_record_is_unexplained() -> None:
    summary = report.summarise([call([OK] * 3, all_delivered(3), due=5)])
    assert summary.unexplained == 2
    assert "2 frames are UNEXPLAINED" in report.text(summary)
    assert "session 1: 2 due frames without a record" in report.text(summary)


def test_a_generated_frame_without_a_receipt_is_unexplained() -> None:
    assert report.summarise([call([OK] * 3, [(0, DELIVERED), (2, DELIVERED)])]).unexplained == 1


def test_a_frame_recorded_twice_is_unexplained() -> None:
    twice = call([OK, OK], all_delivered(2), due=1)
    twice.ticks["index"] = 0
    assert report.summarise([twice]).unexplained == 1


def test_a_frame_beyond_the_last_due_one_is_unexplained() -> None:
    assert report.summarise([call([OK] * 3, all_delivered(3), due=2)]).unexplained == 1


def test_an_unfinished_calls_newest_frames_may_still_be_settled() -> None:
    (session,) = report.summarise(
        [call([OK] * 6, [(0, DELIVERED), (2, DELIVERED)], why=None)]
    ).sessions
    assert (session.unreceipted, session.in_flight, session.ended) == (1, 3, "unfinished")


def test_a_session_that_failed_stays_in_the_denominator() -> None:
    summary = report.summarise(
        [
            call([OK] * 4, all_delivered(4)),
            call([], [], session=2, why=Why.TIMEOUT),
            call([OK, Flag.FAULT.value], [(0, DELIVERED)], session=3, why=Why.FAULT),
        ]
    )
    assert summary.failed == 2
    assert summary.mean_on_time_share == pytest.approx((1 + 0 + 0.5) / 3)
    assert (summary.worst_session, summary.worst_on_time_share) == (2, 0)
    assert "failed 2; on time: mean 50.00 %, worst 0.00 % (session 2)" in report.text(summary)


def test_ticks_are_counted_once_however_many_sessions_they_stepped() -> None:
    summary = report.summarise(
        [
            call([OK, LATE, MISSED, OK], [(n, DELIVERED) for n in (0, 1, 3)]),
            call([OK, LATE], all_delivered(2), session=2, margin_ns=50 * MS),
        ]
    )
    ticks = summary.ticks
    assert (ticks.ticks, ticks.late, ticks.missed, ticks.longest_miss_run) == (4, 1, 1, 2)
    assert (ticks.max_ns, ticks.p50_ns) == (85 * MS, 30 * MS)


def test_nearly_all_is_not_all() -> None:
    frames = 20_001
    outcomes = [*all_delivered(frames - 1), (frames - 1, Settled.FILLED.value)]
    text = report.text(report.summarise([call([OK] * frames, outcomes)]))
    assert "mean 99.99 %" in text


@given(bad=st.lists(st.booleans(), max_size=40))
def test_the_longest_run_is_the_longest_run(bad: list[bool]) -> None:
    words = "".join("x" if b else " " for b in bad).split()
    assert report.longest_run(np.array(bad, bool)) == max(map(len, words), default=0)


def test_no_calls_add_up_to_nothing() -> None:
    summary = report.summarise([])
    assert (summary.unexplained, summary.ticks.ticks, summary.worst_session) == (0, 0, 0)
    report.text(summary)


def test_a_name_cannot_write_on_the_terminal_or_break_the_plot() -> None:
    name = "\x1b[2Jan\nn\x00" + "x" * 200
    hostile = replace(call([OK], all_delivered(1)), header=header(1, caller=name))
    text = report.text(report.summarise([hostile]))
    assert all(line.isprintable() for line in text.splitlines())
    assert "\ufffd[2Jan\ufffdn\ufffdx" in text
    assert max(map(len, text.splitlines())) < 160
    assert "an\ufffdn" in "".join(ElementTree.fromstring(margin_plot([hostile], "x")).itertext())
    assert report.summarise([hostile]).sessions[0].caller == name


def test_damage_before_the_tail_is_unexplained_and_a_torn_record_is_not() -> None:
    torn, damaged = (
        report.summarise([replace(call([OK], all_delivered(1), why=None), dropped_bytes=n)])
        for n in (ledger.RECORD_BYTES - 1, 3 * ledger.RECORD_BYTES + 1)
    )
    assert (torn.unexplained, damaged.unexplained) == (0, 3)
    assert "3 records that cannot be read" in report.text(damaged)


def test_the_plot_is_an_svg_with_a_line_per_call_and_the_deadline() -> None:
    calls = [
        call([OK, LATE, OK, Flag.CONCEALED | Flag.GENERATED], all_delivered(4)),
        call([OK] * 5000, all_delivered(5000), session=2, first_tick=3),
        call([], [], session=3, why=Why.TIMEOUT),
    ]
    text = margin_plot(calls, "margin <of> & three")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 2
    assert len(lines[1].attrib["points"].split()) <= 1000
    words = [element.text for element in root.iter(f"{space}text")]
    assert "margin <of> & three" in words
    assert "deadline" in words
    red = [e for e in root.iter(f"{space}line") if e.attrib["stroke"] == "#c00020"]
    assert len(red) == 2  # the deadline, and the mark of the late frame


def test_the_worst_margin_survives_thinning() -> None:
    flags = [OK] * 5000
    flags[1234] = LATE
    root = ElementTree.fromstring(margin_plot([call(flags, all_delivered(5000))], "x"))
    (line,) = root.findall("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert max(heights) - sorted(heights)[-2] > 100
