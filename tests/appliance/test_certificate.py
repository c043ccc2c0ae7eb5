"""When N sessions hold, what is tried next, and what the page shows."""

from collections.abc import Sequence
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import certificate, report
from appliance.certificate import FALL, Certificate, fewer, problems, trial
from appliance.certificate_page import page, tick_durations_ns
from appliance.clock import NS_PER_MS as MS
from appliance.ledger import Call, Settled, Why
from appliance.lines.callers import Conditions
from appliance.lines.synthetic import SyntheticReport
from tests.appliance.test_report import LATE, MISSED, OK, all_delivered, call

GOOD = [call([OK] * 20, all_delivered(20), session=n, first_tick=n) for n in (1, 2)]


def caller(number: int, ended: str = "finished", refused: str = "") -> SyntheticReport:
    return SyntheticReport(
        number, 0 if refused else number, ended, refused, "why", 0, 20, 0, 0, 20, 0, 0, 0, 0, 1
    )


def found_in(calls: Sequence[Call], callers: Sequence[SyntheticReport], sessions: int) -> str:
    return " / ".join(problems(report.summarise(calls), callers, sessions))


@given(sessions=st.integers(1, 200), admitted=st.integers(0, 200))
def test_fewer_are_tried_as_many_as_were_let_in_or_a_part_less(
    sessions: int, admitted: int
) -> None:
    found = fewer(sessions, admitted)
    assert found >= 1
    assert found < sessions or sessions == 1
    assert found == max(1, admitted) or found >= sessions - max(1, sessions // FALL)


def test_sessions_hold_when_every_frame_of_every_one_is_on_time() -> None:
    callers = [caller(1), caller(2)]
    assert problems(report.summarise(GOOD), callers, 2) == ()
    one = trial(report.summarise(GOOD), callers, 2, 30.0)
    assert (one.held, one.why_not, one.worst_margin_ns) == (True, "", 60 * MS)


@pytest.mark.parametrize(
    ("second", "ended", "words"),
    [
        (call([OK, LATE], [(0, 1), (1, Settled.LATE)], session=2), "finished", "frames were late"),
        (call([OK, MISSED], [(0, 1), (1, Settled.FILLED)], session=2), "finished", "missed"),
        (call([OK, OK], [(0, 1), (1, Settled.FILLED)], session=2), "finished", "filled"),
        (call([OK, OK], [(0, 1)], session=2), "finished", "unexplained"),
        (call([OK], [(0, 1)], session=2, why=Why.SHED), "shed", "1 of 2 sessions failed"),
    ],
)
def test_one_broken_call_among_good_ones_is_enough_not_to_hold(
    second: Call, ended: str, words: str
) -> None:
    assert words in found_in([GOOD[0], second], [caller(1), caller(2, ended)], 2)


def test_a_caller_who_was_refused_or_left_no_record_stays_in_the_count() -> None:
    assert "1 of 2 callers were refused, the first for time" in found_in(
        GOOD[:1], [caller(1), caller(2, "refused", "time")], 2
    )
    assert "1 calls left no record" in found_in(GOOD[:1], [caller(1), caller(2)], 2)
    assert "2 calls left no record" in found_in([], [caller(1), caller(2)], 2)


def test_a_call_file_that_cannot_be_read_is_a_failure() -> None:
    callers, damage = [caller(1), caller(2)], ["/x/cut.call: it has no header"]
    found = problems(report.summarise(GOOD), callers, 2, damage)
    assert found == ("1 call files cannot be read, the first: /x/cut.call: it has no header",)
    assert not trial(report.summarise(GOOD), callers, 2, 30.0, damage).held


def certificate_of(calls: Sequence[Call], **fields: object) -> Certificate:
    summary = report.summarise(calls)
    callers = [caller(n + 1) for n in range(len(calls))]
    wrong = problems(summary, callers, len(calls))
    made = Certificate(
        format=certificate.FORMAT,
        started="20260131T120000.250Z",
        command="duplexbox appliance certify b",
        machine=certificate.Machine(
            "a <CPU>", 2, 2**30, "none", "none", "6.1", "3.11", "0.1", "ORT", 0.1, 0.2
        ),
        model=certificate.Model("echo", False, 1000, "0" * 64, "b", 80 * MS, 10.0, 1000),
        path="here and back",
        quick=False,
        conditions=Conditions(len(calls), 20, 1),
        sessions=0 if wrong else len(calls),
        slots=4,
        holds=not wrong,
        forecast_sessions=4,
        forecast_ns=50 * MS,
        newcomer=certificate.Newcomer(False, "time", "too slow"),
        trials=(trial(summary, callers, len(calls), 20.0),),
        ticks=summary.ticks,
        calls=summary.sessions,
        failed=summary.failed,
        mean_on_time_share=summary.mean_on_time_share,
        worst_session=summary.worst_session,
        worst_on_time_share=summary.worst_on_time_share,
        smallest_margin_ns=0,
        smallest_buffer_ns=0,
        longest_miss_run=0,
        problems=wrong,
    )
    return msgspec.structs.replace(made, **fields)


def test_a_certificate_is_read_back_as_it_was_written() -> None:
    made = certificate_of(GOOD)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Certificate) == made


def test_the_terminal_says_what_holds_or_why_not() -> None:
    good = "\n".join(certificate.text(certificate_of(GOOD)))
    assert "2 sessions HOLD; the next one is refused for time: their ticks would be" in good
    full = certificate.Newcomer(False, "lines", "all 4 slots are taken")
    found = certificate_of(GOOD, newcomer=full)
    assert certificate.text(found)[-1].endswith("refused for lines: all 4 slots are taken")
    more = certificate.text(certificate_of(GOOD, newcomer=full, forecast_sessions=9))
    assert more[-1] == (
        "2 sessions HOLD with [engine] slots = 4, which refuses the next one (lines); by forecast "
        "alone 9 would be let in"
    )
    assert "one more was refused (time): too slow" in good
    assert "40 of 40 frames on time" in good
    bad = [GOOD[0], call([OK, LATE], [(0, 1), (1, Settled.LATE)], session=2)]
    text = "\n".join(certificate.text(certificate_of(bad)))
    assert "HOLD" not in text.replace("DOES NOT HOLD", "")
    assert "DOES NOT HOLD: 1 of 22 frames were late" in text


def test_the_page_stands_alone_and_shows_every_session() -> None:
    bad = [GOOD[0], call([OK, LATE], [(0, 1), (1, Settled.LATE)], session=2)]
    for calls in (GOOD, bad, []):
        html = page(certificate_of(calls), calls)
        assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
        assert "a &lt;CPU&gt;" in html
        body = html.partition("</style></head>")[2].removesuffix("</html>\n").strip()
        root = ElementTree.fromstring(body)  # well-formed, plots included
        assert len(root.findall(".//{http://www.w3.org/2000/svg}svg")) == (2 if calls else 0)
        assert all(f"{c.header.session} (" in html for c in calls)
    assert "2 sessions hold" in page(certificate_of(GOOD), GOOD)
    assert "does not hold" in page(certificate_of(bad), bad)
    assert "no evidence" in page(certificate_of(GOOD, quick=True), GOOD)


def test_a_ticks_duration_counts_once_however_many_sessions_it_had() -> None:
    calls = [call([OK, MISSED, OK], all_delivered(3), session=n) for n in (1, 2)]
    took = tick_durations_ns(calls)
    assert np.array_equal(took, [20 * MS, 20 * MS])
