"""Where callers may be sent on to: what strangers can make of an address costs nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lines.sip_transfer import Transfer, address, fault

ALLOWED = ("sip:desk@pbx.example", "sip:2*@10.0.0.2:5080", "tel:+4930*", "sip:*43@pbx.example")


@pytest.mark.parametrize(
    "target",
    [
        "sip:desk@pbx.example",
        "SIP:desk@PBX.example",
        "sip:2@10.0.0.2:5080",
        "sip:2199@10.0.0.2:5080",
        "tel:+4930123",
        "sip:*43@pbx.example",
    ],
)
def test_what_the_list_covers(target: str) -> None:
    assert fault(target, ALLOWED) == ""


@pytest.mark.parametrize(
    "target",
    [
        "sip:Desk@pbx.example",
        "sip:desk@pbx.example.evil.net",
        "sip:desk@pbx.example:5061",
        "sip:desk@pbx.example;maddr=1.2.3.4",
        "sips:desk@pbx.example",
        "sip:3@10.0.0.2:5080",
        "sip:2@10.0.0.2",
        "sip:43@pbx.example",
        "tel:+49301234;phone-context=+1",
        "tel:+1900555",
    ],
)
def test_what_it_does_not(target: str) -> None:
    assert fault(target, ALLOWED)
    assert fault(target, ()) != ""


@pytest.mark.parametrize(
    "text",
    [
        "desk",
        "sip:desk",
        "sip:@pbx",
        "sip:a@b@pbx.example",
        "sip:desk@pbx.example?Replaces=x",
        "sip:desk@pbx.example\r\nRefer-To: sip:x@y",
        "<sip:desk@pbx.example>",
        "sip:de sk@pbx.example",
        "http://pbx.example",
        "sip:desk@pbx.example" + ";a=b" * 5,
    ],
)
def test_what_is_no_address_is_passed_to_nobody(text: str) -> None:
    assert address(text) is None
    assert "is no address" in fault(text, ("sip:*@pbx.example",))


@given(st.text(max_size=80))
def test_a_prefix_lets_nobody_to_another_host(text: str) -> None:
    if fault("sip:" + text, ("sip:*@pbx.example",)) == "":
        found = address("sip:" + text)
        assert found is not None
        assert (found.host, found.rest) == ("pbx.example", "")


def test_an_outcome_without_a_transfer_is_nobodys() -> None:
    sent_on = Transfer()
    assert not sent_on.end("486 Busy Here", is_done=False)
    assert sent_on.ask("sip:desk@pbx.example", "key 0", ALLOWED) == ""
    assert sent_on.end("", is_done=False)
    assert sent_on.outcome == "no reason was given"
    assert not sent_on.end("486 Busy Here", is_done=False)
    assert sent_on.outcome == "no reason was given"


def test_an_answer_that_comes_late_is_one() -> None:
    sent_on = Transfer()
    assert sent_on.ask("sip:desk@pbx.example", "key 0", ALLOWED) == ""
    assert sent_on.end("no transfer outcome within 60 s", is_done=False)
    assert sent_on.end("answered", is_done=True)
    assert (sent_on.outcome, sent_on.is_done) == ("answered", True)
    assert not sent_on.end("the call ended", is_done=False)
    assert sent_on.is_done
