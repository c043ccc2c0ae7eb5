"""Many calls at once, and thousands one after the other, by SIPp. `make test-lines`."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.appliance.lines.test_sip import line, speech, ticks
from tests.sip_capture import capture
from tests.sip_debian import sipp
from tests.sip_peer import now_s, sleep
from tests.sip_rig import print_figures, stub_box, used

pytestmark = [pytest.mark.peers, pytest.mark.clock]


def test_sipp_many_calls_at_once(tmp_path: Path) -> None:
    """100 calls of 60 s; DUPLEXBOX_CALLS and DUPLEXBOX_CALL_S are for smaller machines."""
    calls = int(os.environ.get("DUPLEXBOX_CALLS", "100"))
    hold(tmp_path, calls, float(os.environ.get("DUPLEXBOX_CALL_S", "60")))


def test_the_model_hears_all_of_fifty_calls_at_once(tmp_path: Path) -> None:
    """As many as two cores bear that the box and SIPp have a share of."""
    overslept, filled, ticks = hold(tmp_path, 50, 30)
    assert overslept <= ticks / 200
    assert filled <= ticks / 50


def hold(tmp_path: Path, calls: int, seconds: float) -> tuple[float, int, float]:
    """So many calls at once for so long: packets leave in time, and calls end as they should.

    Returns the ticks overslept, frames that callers did not hear in time, and ticks.
    """
    extra = f"calls_per_s = 1000\nmost = {calls}\nrtp_ports = [10000, 12000]"
    with stub_box(tmp_path, calls) as socket, line(tmp_path, socket, extra) as running:
        before = used(running.worker())
        with capture(tmp_path, (10_000, 12_000)) as caught:
            code, screen = sipp(
                tmp_path, running.port, calls, seconds, rate=10, voice=speech(seconds + 1)
            )
        after = used(running.worker())
        assert code == 0, screen
        until = now_s() + 20
        while not all(row.ended for row in running.rows()):
            assert now_s() < until
            sleep(0.1)
    rows = running.rows()
    off = [abs(ticks(row) - row.talked_ms / 80) for row in rows]
    overslept = sum(ticks(row) - row.frames for row in rows)
    gaps = caught.gaps_ms()
    every = np.concatenate(list(gaps.values()))
    share = (after.cpu_s - before.cpu_s) / (seconds * calls) * 50
    print_figures(
        f"{calls} calls of {seconds:g} s",
        cpu_of_one_core_per_50_calls=round(share, 3),
        gaps_ms={q: round(float(np.percentile(every, q)), 2) for q in (50, 99, 99.9, 100)},
        worst_call_p99_9_ms=round(max(float(np.percentile(g, 99.9)) for g in gaps.values()), 2),
        mean_gap_ms=round(float(every.mean()), 4),
        talked_ms=(min(row.talked_ms for row in rows), max(row.talked_ms for row in rows)),
        ends=dict(Counter(row.why for row in rows)),
        rss_mb=round(after.rss_kb / 1000),
        frames_off=max(off),
        ticks_overslept=overslept,
        delivered=sum(row.delivered for row in rows),
        not_delivered=sum(row.late + row.filled + row.discarded for row in rows),
        underruns=sum(row.underruns for row in rows),
        concealed_ms=sum(row.concealed_ms for row in rows),
    )
    assert len(rows) == calls
    assert {row.why for row in rows} == {"the caller hung up"}
    assert len(gaps) == calls
    assert np.percentile(every, 99.9) <= 25
    assert max(off) <= 1 + 1 / 80  # a record's time is in whole milliseconds
    assert all(row.rx_packets > seconds * 45 for row in rows)
    assert all(row.tx_packets > seconds * 45 for row in rows)
    late = sum(row.late + row.filled + row.discarded for row in rows)
    return overslept, late, sum(ticks(row) for row in rows)


def test_sipp_thousands_of_short_calls_leave_nothing_behind(tmp_path: Path) -> None:
    """5,000 calls; DUPLEXBOX_CHURN is for smaller machines."""
    calls = int(os.environ.get("DUPLEXBOX_CHURN", "5000"))
    extra = "calls_per_s = 1000\nmost = 60"
    with stub_box(tmp_path, 60) as socket, line(tmp_path, socket, extra) as running:
        code, screen = sipp(tmp_path, running.port, calls // 5, 0.2, rate=40, at_once=50)
        assert code == 0, screen
        sleep(3)
        settled = used(running.worker())
        code, screen = sipp(tmp_path, running.port, calls - calls // 5, 0.2, rate=40, at_once=50)
        assert code == 0, screen
        sleep(3)
        after = used(running.worker())
    rows = running.rows()
    left = [row for row in rows if row.why.startswith("no audio")]
    print_figures(f"{calls} short calls", settled=settled, after=after, bye_missing=len(left))
    assert not left
    assert len(running.rows()) == calls
    assert after.descriptors <= settled.descriptors + 2
    assert after.rss_kb < settled.rss_kb * 1.25
