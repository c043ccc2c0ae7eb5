"""Accounts whose persona or voice the box's model does not know: said once, and nobody else's."""

import logging
from pathlib import Path

import msgspec
import pytest

from appliance.clock import MonotonicClock
from appliance.lines.sip_config import SipAccount, SipConfig
from appliance.lines.sip_extras import ExtrasMaker, mistakes
from tests.appliance.lines.test_sip import line, speech
from tests.fakes_line import FakeBox
from tests.sip_peer import HOST, Phone, Refused
from tests.sip_rig import stub_box

ACCOUNTS = (
    SipAccount(user="plain"),
    SipAccount(user="ann", persona="You are Ann.", voice="alto"),
    SipAccount(user="bob", voice="tenor"),
    SipAccount(user="blank", persona="  \n"),
)


@pytest.mark.parametrize(
    ("takes_persona", "voices", "says"),
    [
        (True, ("alto", "tenor"), []),
        (
            True,
            ("alto", "bass"),
            ['"bob" will be refused: echo has no voice "tenor". Its voices: alto, bass'],
        ),
        (False, ("alto", "tenor"), ['"ann" will be refused: echo takes no persona in this box']),
        (
            False,
            (),
            [
                '"ann" will be refused: echo takes no persona',
                '"ann" will be refused: echo has no voice "alto". It has none to choose from',
                '"bob" will be refused: echo has no voice "tenor". It has none to choose from',
            ],
        ),
    ],
)
def test_what_the_box_will_refuse_is_known_at_the_start(
    tmp_path: Path, takes_persona: bool, voices: tuple[str, ...], says: list[str]
) -> None:
    with FakeBox(tmp_path) as box:
        welcome = msgspec.structs.replace(box.welcome, takes_persona=takes_persona, voices=voices)
    found = mistakes(ACCOUNTS, welcome)
    assert len(found) == len(says)
    for one, words in zip(found, says, strict=True):
        assert words in one


def test_it_is_said_once_however_often_the_box_is_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SipConfig(listen=f"{HOST}:5060", accounts=(SipAccount(user="bob", voice="tenor"),))
    maker = ExtrasMaker(config, MonotonicClock(), lambda _: None)
    with FakeBox(tmp_path) as box, caplog.at_level(logging.WARNING):
        for voices in ((), (), ("alto",), (), ("tenor",)):
            maker.use(msgspec.structs.replace(box.welcome, voices=voices))
    assert [record.message.partition(". ")[2] for record in caplog.records] == [
        "It has none to choose from: leave it out",
        "Its voices: alto",
    ]


@pytest.mark.clock
@pytest.mark.slow
def test_an_account_with_a_wrong_voice_costs_another_nothing(tmp_path: Path) -> None:
    """A whole box, which refuses it itself."""
    other = 'voice = "alto"\n[[sip.accounts]]\nuser = "plain"'
    with (
        stub_box(tmp_path, 2) as socket,
        line(tmp_path, socket, "calls_per_s = 100", other) as running,
        Phone("plain", running.port) as phone,
    ):
        running.wait('calls to account "bot" will be refused: ')
        phone.dial()
        for _ in range(5):
            with Phone("bot", running.port) as wrong, pytest.raises(Refused, match="486"):
                wrong.dial()
        assert phone.talk(speech(0.5)).arrived_s.size > 15
        assert phone.hang_up() == 200
        assert running.log.read_text().count("will be refused") == 1
    rows = running.rows()  # all of them: the line has stopped
    assert [row.why for row in rows if row.account == "bot"] == [rows[1].why] * 5
    assert rows[1].why.startswith("refused (fault): ")
    assert rows[0].why == "the caller hung up"
