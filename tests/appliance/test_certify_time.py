"""A machine whose time runs out before its lines do: certify finds N, and N+1 is refused for time.

The engine is a fake that takes 18 ms a session of an 80 ms tick and has room for eight; callers,
box, rings and ledger are real. Half a minute of real time: `make soak`.
"""

import argparse
from pathlib import Path

import msgspec
import pytest

from appliance import certify
from appliance.admission import Reason
from appliance.certificate import Certificate
from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.engine import Engine
from tests.fakes import FakeExecutor, make_bundle

SESSION_NS = 18 * NS_PER_MS


@pytest.mark.clock
@pytest.mark.soak
def test_the_next_caller_is_refused_for_time_while_lines_are_free(tmp_path: Path) -> None:
    clock = MonotonicClock()

    def work(batch: int) -> None:
        clock.sleep_until(clock.now_ns() + batch * SESSION_NS)

    executor = FakeExecutor(make_bundle(tmp_path / "bundle", 8), 8, work)
    engine = Engine(executor, "a fake", 2**30)
    asked = certify.plan(
        argparse.Namespace(
            sessions=None, minutes=1.0, quick=True, find=True, speech=None,
            jitter_ms=None, loss=None, skew_ppm=None, executor="cpu", gpu=0,
        )
    )  # fmt: skip
    said: list[str] = []
    found = certify.measure(engine, asked, tmp_path / "out", said.append, lambda line: None)
    certify.write(found, tmp_path / "out")
    assert found.holds, said
    # Three take 54 ms and four 72; with a guard of 8 that is all there is, and a tick takes more.
    assert (found.sessions, found.slots) == (3, 8), said
    assert found.newcomer is not None
    assert (found.newcomer.admitted, found.newcomer.reason) == (False, Reason.TIME.value)
    assert "with 4 sessions at guaranteed fill" in found.newcomer.detail
    page = (tmp_path / "out" / "certificate.json").read_bytes()
    assert msgspec.json.decode(page, type=Certificate).newcomer == found.newcomer
