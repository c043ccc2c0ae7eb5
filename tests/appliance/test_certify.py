"""`certify --quick` on the demo's bundle: the whole path, in seconds, on any machine.

Whether the sessions hold depends on what else the machine is doing; that the certificate says
what happened does not.
"""

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from appliance import certify, ledger
from appliance.certificate import Certificate
from appliance.lines.synthetic import SyntheticReport
from tests.small import SMALL


def asked(*words: str) -> certify.Asked:
    values = {
        "sessions": None,
        "minutes": 10.0,
        "quick": "--quick" in words,
        "find": "--find" in words,
        "speech": None,
        "jitter_ms": None,
        "loss": 0.05,
        "skew_ppm": None,
    }
    return certify.plan(argparse.Namespace(executor="auto", gpu=0, **values))


@pytest.mark.clock
@pytest.mark.slow
def test_a_quick_certificate_says_what_happened_whatever_happened(tmp_path: Path) -> None:
    said: list[str] = []
    shown: list[str] = []
    code = certify.run(SMALL, asked("--quick"), tmp_path / "out", said.append, shown.append)
    found = msgspec.json.decode(
        (tmp_path / "out" / "certificate.json").read_bytes(), type=Certificate
    )
    assert code == (0 if found.holds else 1), said
    assert found.holds == (not found.problems)
    assert (found.quick, found.conditions.callers, len(found.trials)) == (True, 2, 1)
    # Every call is in it, and every due frame of each is accounted for, held or not. A machine
    # so busy that a caller was refused says so.
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    callers = msgspec.json.decode(
        (folder / "callers.json").read_bytes(), type=list[SyntheticReport]
    )
    refused = sum(bool(caller.refused) for caller in callers[:2])
    assert len(found.calls) == 2 - refused
    assert any("were refused" in problem for problem in found.problems) == (refused > 0)
    assert sum(c.unrecorded + c.duplicated + c.unreceipted for c in found.calls) == 0
    for call in found.calls:
        assert call.due > 60 or call.ended == "shed"
    if not refused:
        assert sum(c.concealed for c in found.calls) > 0  # the losses that were asked for
    assert found.newcomer is not None
    assert not found.newcomer.admitted
    assert re.match(r"lines|time", found.newcomer.reason)
    assert found.forecast_ns > 0
    assert found.machine.cores >= 1
    assert len(list(folder.glob(f"*{ledger.SUFFIX}"))) == 2 - refused
    assert "</html>" in (tmp_path / "out" / "certificate.html").read_text()
    assert any("no evidence of capacity" in line for line in said)
    assert any("sessions 2 of 2" in line for line in shown)


def test_damaged_call_files_are_told_of_and_not_dropped(tmp_path: Path) -> None:
    assert certify._read(tmp_path) == ([], [])
    for count in (1, 2):
        (tmp_path / f"{count}{ledger.SUFFIX}").write_bytes(b"half a head")
        calls, unreadable = certify._read(tmp_path)
        assert calls == []
        assert [f"{n}{ledger.SUFFIX}" in unreadable[n - 1] for n in range(1, count + 1)] == [
            True
        ] * count


def test_what_is_asked_for_is_checked() -> None:
    assert asked("--quick").sessions == 2
    assert asked("--quick", "--find").sessions is None
    assert asked().seconds == 600
    assert len(asked().speech) == 3
    with pytest.raises(certify.UsageError, match="minutes"):
        certify.plan(argparse.Namespace(sessions=None, minutes=0.0))
    with pytest.raises(certify.UsageError, match="sessions"):
        certify.plan(argparse.Namespace(sessions=0, minutes=1.0))


def test_more_sessions_than_the_bundle_steps_is_refused_with_the_numbers(tmp_path: Path) -> None:
    too_many = certify.plan(
        argparse.Namespace(
            sessions=99, minutes=1.0, quick=False, find=False, speech=None,
            jitter_ms=None, loss=None, skew_ppm=None, executor="auto", gpu=0,
        )
    )  # fmt: skip
    with pytest.raises(certify.UsageError, match=r"99.*largest batch.* is 8"):
        certify.run(SMALL, too_many, tmp_path, print, print)
