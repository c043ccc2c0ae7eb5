"""What a person is told about a running box."""

import json
import tempfile
from pathlib import Path

import msgspec
import pytest

from appliance import cli, control, status
from tests.appliance.test_box import Line, Running

REPORT = control.Report(1, True, False, 9, 2, 2, 4, 3, 1, 60_000_000, -7_000_000, 0)


def test_headroom_and_what_limits_it_are_named() -> None:
    report = msgspec.structs.replace(
        REPORT, sessions_free=1, limited_by="time", refusals={"time": 2, "lines": 1}
    )
    text = "\n".join(status.text("x.sock", report))
    assert "2 live, 2 of 4 slots held; 1 more would be admitted, then time refuses" in text
    assert "1 for lines, 2 for time" in text
    assert "late 3, missed 1" in text
    assert "DISK" not in text
    assert "LEDGER" not in text


def test_a_full_disk_and_a_holey_ledger_are_in_capitals() -> None:
    report = msgspec.structs.replace(REPORT, disk_errors=5, records_dropped=2, records_lost=1)
    text = "\n".join(status.text("x.sock", report))
    assert "DISK      5 writes to the ledger failed, 2 records given up" in text
    assert "LEDGER    1 records" in text


@pytest.mark.clock
def test_the_verb_asks_every_box_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        assert cli.main(["status", "--socket", folder]) == 2
        assert "holds no socket" in capsys.readouterr().err
        socket = Path(folder) / "a.sock"
        with Running(tmp_path, socket, lambda batch: None, first_frame_s=60) as running:
            Line(running)
            assert cli.main(["status", "--socket", folder]) == 0
            assert "1 of 2 slots held; 1 more would be admitted" in capsys.readouterr().out
            assert cli.main(["status", "--socket", f"{folder}/a.sock", "--json"]) == 0
            (found,) = json.loads(capsys.readouterr().out).values()
            assert found["leases_held"] == 1
        assert cli.main(["status", "--socket", f"{folder}/a.sock"]) == 1
        assert "no box answers" in capsys.readouterr().err
