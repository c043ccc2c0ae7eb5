"""When a worker has to go, on a fake clock; and that it goes, and comes back, as real processes."""

import os
import signal
from pathlib import Path

import pytest

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.sip_supervisor import AGAIN_S, BUSY, IDLE, LONG_S, Health, Restarts
from tests.appliance.lines.test_sip import line
from tests.fakes_line import FakeBox
from tests.sip_peer import now_s, sleep

pytestmark = pytest.mark.clock

MB = 1 << 20


def watched(
    health: Health, seconds: float, cpu_share: float, said: bytes = b"", *, from_s: int = 0
) -> str:
    """Look every 250 ms for so long, with a beat every 500 ms if anything is ``said``."""
    for look in range(int(seconds * 4)):
        now_ns = from_s * NS_PER_S + look * 250 * NS_PER_MS
        if said and look % 2 == 0:
            health.beat(said, now_ns)
        why = health.trouble(look * 0.25 * cpu_share, 50 * MB, now_ns)
        if why:
            return why
    return ""


def test_one_that_beats_stays_and_may_be_busy_with_calls() -> None:
    assert watched(Health(500 * MB, 0), 300, 0.1, IDLE) == ""
    assert watched(Health(500 * MB, 0), 300, 0.9, BUSY) == ""


def test_one_that_computes_without_a_call_goes() -> None:
    assert "0.90 of a core without a call" in watched(Health(500 * MB, 0), 60, 0.9, IDLE)


def test_one_that_is_silent_goes_and_one_that_starts_has_a_minute() -> None:
    health = Health(500 * MB, 0)
    assert watched(health, 59, 0.0) == ""
    assert "not ready within 60 s" in watched(health, 70, 0.0)
    health = Health(500 * MB, 0)
    health.beat(IDLE, 0)
    assert "not heard of for 5." in watched(health, 10, 0.0)


def test_when_the_machine_stood_still_it_is_given_its_time_again() -> None:
    health = Health(500 * MB, 0)
    health.beat(IDLE, 0)
    assert watched(health, 1, 0.0) == ""
    assert watched(health, 4, 0.0, from_s=3600) == ""
    assert "not heard of" in watched(health, 8, 0.0, from_s=3604)


def test_one_that_holds_too_much_goes() -> None:
    assert "holds 501 MB, more than 500 MB" in Health(500 * MB, 0).trouble(0.0, 501 * MB, 0)


def test_the_first_is_replaced_at_once_and_those_that_keep_dying_are_not() -> None:
    restarts = Restarts()
    waits = [restarts.again_s(n * NS_PER_S) for n in range(5)]
    assert waits == [*AGAIN_S, LONG_S, LONG_S]
    assert restarts.again_s(100 * NS_PER_S) == AGAIN_S[0]


def gone(pid: int, seconds: float) -> bool:
    """Within so long."""
    until = now_s() + seconds
    while now_s() < until:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        sleep(0.02)
    return False


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_and_none_outlives_its_supervisor(tmp_path: Path) -> None:
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as running:
        first = running.worker()
        until = now_s() + 15
        while len(running.processes()) < 2:  # it has been heard of: a spare one is made then
            assert now_s() < until
            sleep(0.02)
        os.kill(first, signal.SIGSTOP)
        assert gone(first, 8.0)
        running.wait("it was not heard of for ")
        until = now_s() + 15
        while running.log.read_text().count("taking calls") < 2:
            assert now_s() < until
            sleep(0.02)
        second = running.worker()
        os.kill(second, signal.SIGSTOP)  # one that does nothing more by itself
        running.process.kill()
        assert gone(second, 1.0)
        running.process.wait()
        running.process.returncode = 0  # as told
