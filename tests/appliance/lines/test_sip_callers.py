"""Who calls, over the real stack: whom a carrier vouches for, who does not want to be known, from
where a call was diverted, and peers whose headers are longer than anybody's."""

import json
import re
from collections.abc import Iterator

import pytest

from appliance.lines.sip_records import Row
from tests.appliance.lines.test_sip import Line, line
from tests.fakes_line import FakeBox
from tests.sip_peer import Phone, now_s, sleep

pytestmark = [pytest.mark.slow, pytest.mark.clock]

ANONYMOUS = '"Anonymous" <sip:anonymous@anonymous.invalid>'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("callers")
    hook = folder / "hook"
    hook.write_text('#!/bin/sh\nread -r line\nprintf "%s\\n" "$line" >>"$0.log"\n')
    hook.chmod(0o755)
    with (
        FakeBox(folder) as box,
        line(folder, box.path, f'calls_per_s = 100\nhook = "{hook}"') as made,
    ):
        yield made


def called(running: Line, extra: bytes, caller: str = "") -> Row:
    """The row of one call with ``extra`` headers; caller: its From, if it is another one."""
    before = len(running.rows())
    with Phone("bot", running.port) as phone:
        phone.sequence = 1
        raw = phone.request("INVITE", phone.sdp())
        if caller:
            raw = re.sub(rb"From: [^\r]*;tag", f"From: {caller};tag".encode(), raw)
        phone.send(raw.replace(b"Max-Forwards", extra + b"Max-Forwards", 1))
        status, text = phone.answer("INVITE")
        assert status == 200
        found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
        assert found is not None
        phone.to_tag = found[1]
        phone.send(phone.request("ACK"))
        assert phone.hang_up() == 200
    until = now_s() + 10
    while len(rows := running.rows()) == before or not rows[-1].ended:
        assert now_s() < until
        sleep(0.05)
    return rows[-1]


def test_a_carriers_caller_is_known_by_the_number_that_it_vouches_for(running: Line) -> None:
    extra = (
        b'P-Asserted-Identity: "Ann" <sip:+4930123@carrier;user=phone>, <tel:+499>\r\n'
        b"P-Asserted-Identity: <tel:+498>\r\n"
        b"Diversion: <sip:+4940@carrier>;reason=unconditional\r\n"
    )
    row = called(running, extra, ANONYMOUS)
    assert (row.number, row.name, row.diverted) == ("+4930123", "Ann", "+4940")
    assert (row.caller, row.called) == ("sip:anonymous@anonymous.invalid", "bot")
    path, until = running.folder / "hook.log", now_s() + 8
    while f'"{row.id}"' not in (said := path.read_text() if path.exists() else ""):
        assert now_s() < until
        sleep(0.05)
    told = [json.loads(text) for text in said.splitlines() if f'"{row.id}"' in text]
    for event in told:
        assert event["number"] == "+4930123"
        assert event["name"] == "Ann"
        assert event["called"] == "bot"
        assert event["diverted"] == "+4940"


def test_who_does_not_want_to_be_known_is_not_written_down(running: Line) -> None:
    extra = b'p-asserted-identity: "Ann" <sip:+4930777@carrier>\r\nPrivacy: id\r\n'
    row = called(running, extra, ANONYMOUS)
    assert (row.number, row.name) == ("anonymous", "")
    assert "4930777" not in repr(row)
    log = running.log.read_text() + (running.folder / "hook.log").read_text()
    assert "4930777" not in log


@pytest.mark.parametrize(
    ("extra", "number", "name"),
    [
        (b'P-Asserted-Identity: "J\xc3\xb6rg" <sip:1@a>\r\n', "1", "Jörg"),
        (b'P-Asserted-Identity: "J\xf6rg \xff\x01" <sip:1@a>\r\n', "1", "Jörg ÿ"),
        (b'P-Asserted-Identity: "a\r\n b"\r\n\t<sip:1@a>\r\n', "1", "a b"),
        (b'P-Asserted-Identity: "' + b"A" * 5_000 + b'" <sip:1@a>\r\n', "phone", "Test"),
        (b"P-Asserted-Identity: <sip:" + b"1" * 900 + b"@a>\r\n", "1" * 250, "Test"),
        (b"P-Asserted-Identity:\r\nPrivacy:\r\nDiversion:\r\n", "phone", "Test"),
        (b"Diversion: <sip:%00%0a%1b@a\r\n" * 100, "phone", "Test"),
    ],
)
def test_odd_and_hostile_headers_are_a_call_like_any_other(
    running: Line, extra: bytes, number: str, name: str
) -> None:
    row = called(running, extra)
    assert (row.number, row.name) == (number, name)
    assert row.diverted == ""


def test_a_call_with_more_headers_than_the_stack_can_say_is_refused_and_does_not_ring_on(
    running: Line,
) -> None:
    before = len(running.rows())
    names = (b"P-Asserted-Identity", b"Privacy", b"Diversion", b"History-Info")
    with Phone("bot", running.port) as phone:
        phone.sequence = 1
        raw = phone.request("INVITE", phone.sdp())
        extra = b"".join(name + b": " + b"\xff" * 1_000 + b"\r\n" for name in names)
        phone.send(raw.replace(b"Max-Forwards", extra + b"Max-Forwards", 1))
        assert phone.answer("INVITE")[0] == 486
    running.wait("a call was refused, for its headers are more than 16 kB")
    assert len(running.rows()) == before
    assert called(running, b"").number == "phone"


def test_a_call_whose_end_has_no_room_beside_its_headers_ends(running: Line) -> None:
    """What is said at its end has its figures besides, so there is a length that fits only once."""
    whys = set()
    for last in range(590, 670, 20):
        sizes = {b"P-Asserted-Identity": 1_000, b"Privacy": 1_000, b"Diversion": last}
        extra = b"".join(name + b": " + b"\xff" * size + b"\r\n" for name, size in sizes.items())
        whys.add(called(running, extra).why)
    assert whys == {"the caller hung up", "closed"}
    assert "Traceback" not in running.log.read_text()
