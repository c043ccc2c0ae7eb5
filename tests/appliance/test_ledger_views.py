"""What the ledger verb shows of calls that were written by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from appliance import cli, ledger, report
from appliance import ledger_views as views
from appliance.call_table import CallTable, Totals, row_of
from appliance.clock import NS_PER_MS as MS
from appliance.clock import wall_stamp
from appliance.ledger import BUFFER_UNKNOWN, Flag, Settled, Why
from tests.appliance.test_ledger import header
from tests.appliance.test_report import LATE, MISSED, OK, call


def write(folder: Path, session: int, flags: list[int], started: str, why: Why | None) -> Path:
    """A call file as a box leaves it: every frame that was made was delivered."""
    made = call(flags, [(n, 1) for n, f in enumerate(flags) if f & Flag.GENERATED], session=session)
    ticks = made.ticks.copy()
    ticks["buffer_us"] = 12_345
    ticks["buffer_us"][0] = BUFFER_UNKNOWN
    ticks["generation"] = session
    raw = ledger.encode_header(header(session, started=started))
    raw += ledger.seal(ticks) + ledger.seal(made.receipts)
    if why is not None:
        end = np.zeros(1, ledger.END)
        end["kind"], end["index"], end["why"] = ledger.Kind.END, len(flags), why
        raw += ledger.seal(end)
    path = folder / ledger.file_name(header(session, started=started))
    path.write_bytes(raw)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three calls: a good one and a bad one of yesterday, a failed one of today."""
    yesterday, today = wall_stamp(ago_s=86_400), wall_stamp()
    write(tmp_path, 1, [OK] * 5, yesterday, Why.FINISHED)
    write(tmp_path, 2, [OK, LATE, MISSED, MISSED, OK], yesterday, Why.FINISHED)
    write(tmp_path, 3, [OK] * 5, today, Why.LOST)
    return tmp_path


def run(*words: object) -> int:
    return cli.main(["ledger", *(str(word) for word in words)])


def test_a_list_has_a_line_per_call_with_or_without_a_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--list") == 0
    without = capsys.readouterr().out
    table = CallTable(folder, "now")
    table.write([row_of(c) for c in ledger.read_folder(folder)[:2]])  # the third is not in it
    table.close()
    assert run(folder, "--list") == 0
    assert capsys.readouterr().out == without
    assert "3 calls" in without
    assert "finished" in without
    assert "lost" in without
    assert run(folder, "--list", "--on", "yesterday", "--json") == 0
    assert [r["session"] for r in json.loads(capsys.readouterr().out)] == [1, 2]


def test_a_call_that_is_on_has_no_sums_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noughts would say that not one frame was due."""
    table = CallTable(tmp_path, wall_stamp())
    table.write([Totals().row(header(3), "", 0, 0, 0)])
    table.close()
    assert run(tmp_path, "--list") == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[row.index("unfinished") + 1 :] == ["-"] * 8


def test_a_list_goes_on_without_a_table_that_is_broken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "calls.sqlite").write_bytes(b"no database" * 100)
    assert run(folder, "--list") == 1
    said = capsys.readouterr()
    assert "3 calls" in said.out
    assert "the table of calls cannot be read" in said.err


def test_one_call_is_shown_with_every_stretch_of_trouble(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--call", "2", "--plot", folder / "x.svg") == 0
    out = capsys.readouterr().out
    assert "call 2 of" in out
    assert "0.08 s  frame 1: made late, worst margin -5.0 ms" in out
    assert "0.16 s  frames 2 to 3: never made: the tick was dropped after an overrun" in out
    assert (folder / "x.svg").read_text().startswith("<svg")
    assert run(folder, "--call", "1") == 0
    assert "every frame was heard, made in time and delivered" in capsys.readouterr().out


def test_the_worst_of_yesterday_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--on", "yesterday", "--worst", "1") == 0
    out = capsys.readouterr().out
    assert "call 2 of" in out
    assert "call 1 of" not in out
    summary = report.summarise(ledger.read_folder(folder))
    assert [s.session for s in views.worst(summary, 3)] == [3, 2, 1]  # the failed one first


def test_every_frame_is_a_line_of_csv_joined_with_its_receipt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--call", "2", "--csv", folder / "x.csv") == 0
    with (folder / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["frame"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row["missed"] for row in rows] == ["0", "0", "1", "1", "0"]
    assert [row["outcome"] for row in rows] == ["delivered", "delivered", "", "", "delivered"]
    assert [row["buffer_us"] for row in rows] == ["", *["12345"] * 4]
    assert rows[1]["receipt_buffer_us"] == str(40_000)
    assert rows[1]["margin_us"] == "-5000"
    assert set(rows[0]) == set(views.FRAME_COLUMNS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "tomorrow"), "--on tomorrow: expected today"),
        (("--call", "77"), "holds no call 77"),
        (("--on", "1999-01-01"), "holds no call of 19990101"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(
    folder: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *words) == 2
    assert said in capsys.readouterr().err


def test_a_day_is_named_in_several_ways() -> None:
    assert views.day_of("2026-01-31") == views.day_of("20260131") == "20260131"
    assert views.day_of("today") == wall_stamp()[:8]


def test_trouble_has_words_for_every_kind() -> None:
    flags = [OK, (Flag.CONCEALED | Flag.GENERATED).value, OK, OK, Flag.FAULT.value]
    outcomes = [(0, 1), (1, 1), (2, Settled.FILLED), (3, Settled.DISCARDED)]
    text = "\n".join(views.call_text(call(flags, outcomes, margin_ns=9 * MS)))
    for words in (
        "the model heard silence",
        "the caller heard silence instead",
        "the caller had hung up",
        "the session's row was broken",
    ):
        assert words in text
    assert "NO RECEIPT" in "\n".join(views.call_text(call([OK], [])))
