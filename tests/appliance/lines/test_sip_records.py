"""One row per telephone call: an older table keeps its rows, and a spreadsheet is not fooled."""

import io
import sqlite3
from pathlib import Path

import pytest

from appliance.lines.sip_headers import number_of
from appliance.lines.sip_records import COLUMNS, VERSION, Records, Row, read, write_csv

FIRST_VERSION = (
    "id began line account caller call_id source session waited_ms talked_ms held_ms ended why "
    "digits frames whole concealed_ms noise_ms delivered late filled discarded underruns "
    "rx_packets rx_lost tx_packets tx_lost rtt_ms figures"
).split()


def row(count: int, **more: object) -> Row:
    base = {"id": f"r-{count}", "began": f"20260131T12000{count}.000Z", "line": "sip"}
    fields = base | {"account": "bot", "caller": "sip:ann@pbx", "call_id": "c"} | more
    return Row(**fields)  # type: ignore[arg-type]


def test_a_table_of_the_first_version_gets_its_new_columns_and_keeps_its_rows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sip.sqlite"
    with sqlite3.connect(path) as table:
        table.execute(f"CREATE TABLE calls ({', '.join(FIRST_VERSION)}, PRIMARY KEY (id))")
        old = ["old", "20251231T000000.000Z", "sip", "bot", "sip:ann@pbx", "c", "", 7]
        values = [*old, 1, 2, 3, "20251231T000100.000Z", "bye", "12", *([4] * 13), 0.5, "{}"]
        marks = ", ".join("?" * len(FIRST_VERSION))
        table.execute(f"INSERT INTO calls VALUES ({marks})", values)
        table.execute("PRAGMA user_version = 1")
    table.close()
    records = Records(path)
    records.write(row(1, transfer_to="sip:desk@pbx", rx_jitter_ms=1.5))
    records.close()
    assert records.failures == 0
    found = read(path)
    assert [one.id for one in found] == ["old", "r-1"]
    assert (found[0].digits, found[0].session, found[0].why) == ("12", 7, "bye")
    assert (found[0].transfer_to, found[0].recorded_ms, found[0].rx_jitter_ms) == ("", 0, 0.0)
    assert (found[1].transfer_to, found[1].rx_jitter_ms) == ("sip:desk@pbx", 1.5)
    Records(path).close()  # once more changes nothing
    assert read(path)[0] == found[0]


def test_a_table_of_the_second_version_gets_the_number_that_a_call_was_diverted_from(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sip.sqlite"
    records = Records(path)
    records.write(row(1, number="+49"))
    records.close()
    with sqlite3.connect(path) as table:
        table.execute("ALTER TABLE calls DROP COLUMN diverted")
        table.execute("PRAGMA user_version = 2")
    table.close()
    records = Records(path)
    records.write(row(2, diverted="+4930"))
    records.close()
    assert [(one.id, one.number, one.diverted) for one in read(path)] == [
        ("r-1", "+49", ""),
        ("r-2", "", "+4930"),
    ]


def test_a_table_of_a_later_version_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "sip.sqlite"
    with sqlite3.connect(path) as table:
        table.execute("CREATE TABLE calls (id, new)")
        table.execute(f"PRAGMA user_version = {VERSION + 1}")
    table.close()
    records = Records(path)
    records.write(row(1))
    records.close()
    assert [one.id for one in read(path)] == ["r-1"]
    assert path.with_suffix(f".v{VERSION + 1}.sqlite").exists()


def test_the_csv_has_all_columns_and_no_formula(tmp_path: Path) -> None:
    out = io.StringIO()
    write_csv([row(1, name="=HYPERLINK(1)", number="+4930", transfer="486 Busy Here")], out)
    head, line, _ = out.getvalue().split("\r\n")
    assert head == ",".join(COLUMNS)
    assert {"number", "codec", "digits", "why", "transfer", "recording", "rx_jitter_ms"} <= set(
        COLUMNS
    )
    assert "'=HYPERLINK(1)" in line
    assert "'+4930" in line


@pytest.mark.parametrize(
    ("caller", "number"),
    [
        ("sip:+4930123@pbx.example;user=phone", "+4930123"),
        ("sips:ann@pbx:5061", "ann"),
        ("tel:+4930", "+4930"),
        ("sip:%2B49%2030@pbx", "+49 30"),
        ("40325ec2-5efd", "40325ec2-5efd"),
        ("", ""),
    ],
)
def test_the_number_is_what_can_be_called_back(caller: str, number: str) -> None:
    assert number_of(caller) == number
