"""Whom a call is from, by its headers as they come; hostile ones cost and break nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.lines.sip_headers import WITHHELD, Said, number_of, read, sent_by, values

FROM = '"Test" <sip:phone@127.0.0.1:5060>;tag=1'
ANONYMOUS = '"Anonymous" <sip:anonymous@anonymous.invalid>;tag=1'
VOUCHED = "P-Asserted-Identity"


@pytest.mark.parametrize(
    ("headers", "number", "name"),
    [
        ({"From": FROM}, "phone", "Test"),
        ({"f": FROM}, "phone", "Test"),
        ({"FROM": FROM}, "phone", "Test"),
        ({"From": "sip:40@pbx;tag=1"}, "40", ""),
        ({"From": '"A \\"B\\" <x>" <sip:40@pbx>'}, "40", 'A "B" <x>'),
        ({"From": "Ann  <sip:40@pbx>"}, "40", "Ann"),
        # whom the peer vouches for comes before what the caller says
        ({"From": ANONYMOUS, VOUCHED: '"Ann" <sip:+4930@carrier;user=phone>'}, "+4930", "Ann"),
        ({"From": ANONYMOUS, VOUCHED: "<tel:+49-30>"}, "+49-30", ""),
        ({"From": ANONYMOUS, "p-asserted-identity": "sips:ann@carrier;x=1"}, "ann", ""),
        ({"From": FROM, VOUCHED: "<sip:+4930@carrier>"}, "+4930", "Test"),
        ({"From": FROM, VOUCHED: '"a, b" <sip:1@c>, "Bob" <tel:+2>'}, "1", "a, b"),
        ({"From": FROM, VOUCHED: '<mailto:a@b>, <TEL:+2>, "x" <sip:3@c>'}, "+2", "Test"),
        ({"From": FROM, VOUCHED: "\t<sip:1@c>\r\n ,\r\n <tel:+2>"}, "1", "Test"),
        # nobody is vouched for
        ({"From": FROM, VOUCHED: ""}, "phone", "Test"),
        ({"From": FROM, VOUCHED: "<sip:@c>"}, "phone", "Test"),
        ({"From": FROM, VOUCHED: '"' + "A" * 1023}, "phone", "Test"),
        ({}, "", ""),
        # who does not want to be known is not
        ({"From": ANONYMOUS, VOUCHED: "<sip:1@c>", "Privacy": "id"}, WITHHELD, ""),
        ({"From": FROM, VOUCHED: "<sip:1@c>", "privacy": "header; ID;critical"}, WITHHELD, ""),
        ({"From": FROM, "Privacy": "user"}, WITHHELD, ""),
        ({"From": FROM, VOUCHED: "<sip:1@c>", "Privacy": "full"}, WITHHELD, ""),
        ({"From": FROM, VOUCHED: "<sip:1@c>", "Privacy": "none"}, "1", "Test"),
        ({"From": FROM, VOUCHED: "<sip:1@c>", "Privacy": "identity, session"}, "1", "Test"),
    ],
)
def test_the_number_and_name_of_a_caller(headers: dict[str, str], number: str, name: str) -> None:
    said = read(headers)
    assert (said.number, said.name) == (number, name)


@pytest.mark.parametrize(
    ("headers", "diverted"),
    [
        ({}, ""),
        ({"Diversion": "<sip:+4930@carrier>;reason=unconditional;counter=1"}, "+4930"),
        ({"Diversion": '"Desk, 1" <tel:+4930>;privacy=off'}, "+4930"),
        ({"Diversion": "<sip:2@c>;reason=no-answer, <sip:1@c>;reason=user-busy"}, "1"),
        ({"Diversion": "<sip:1@c>;privacy=full"}, WITHHELD),
        ({"Diversion": '<sip:1@c>;x=1; privacy = "URI"'}, WITHHELD),
        ({"Diversion": "<sip:1@c;privacy=full>"}, "1"),  # that is the address's own
        ({"Diversion": "<sip:1@c>", "Privacy": "history"}, WITHHELD),
        ({"Diversion": "<sip:1@c>", "Privacy": "id"}, "1"),  # of the caller, not of this one
        ({"Diversion": "unknown"}, ""),
        ({"History-Info": "<sip:1@c?Reason=SIP%3Bcause%3D302>;index=1"}, "1"),
        ({"History-Info": "<sip:1@c?privacy=history&reason=SIP>;index=1"}, WITHHELD),
        ({"History-Info": "<sip:1@c>;index=1"}, ""),  # every call has one, diverted or not
        ({"Diversion": "<sip:2@c>", "History-Info": "<sip:1@c?Reason=SIP>;index=1"}, "2"),
    ],
)
def test_from_where_a_call_was_diverted(headers: dict[str, str], diverted: str) -> None:
    assert read({"From": FROM} | headers).diverted == diverted


@pytest.mark.parametrize(
    ("via", "host"),
    [
        ("SIP/2.0/UDP 10.0.0.5:5060;branch=x", "10.0.0.5"),
        ("SIP / 2.0 / TCP pbx.example;rport", "pbx.example"),
        ("SIP/2.0/TLS [::1]:5061", "[::1]"),
        ("SIP/2.0/UDP " + "a" * 900, "a" * 100),
        ("SIP/3.0/UDP a", ""),
        ("", ""),
    ],
)
def test_where_it_comes_from(via: str, host: str) -> None:
    assert sent_by(via) == host
    assert read({"v": via}).source == host


def test_the_number_that_was_dialled_keeps_what_belongs_to_it() -> None:
    assert read({"t": "<sip:30@pbx;x=1>;tag=2"}).called == "sip:30@pbx;x=1"
    assert read({"To": "<<<<<sip:30@pbx>"}).called == "<<<<sip:30@pbx"
    assert number_of("sip:%2B49%0D%0A30%00@pbx") == "+4930"  # what cannot be printed is left out


def test_a_list_is_cut_where_it_is_one() -> None:
    assert values('"a, \\"b" <sip:1@x?y=1,2>, c ,,<sip:2@x') == [
        '"a, \\"b" <sip:1@x?y=1,2>',
        "c",
        "<sip:2@x",
    ]


ODD = st.text(st.sampled_from('"\\<>,;:@=% \r\n\tsiptel+1aÄ\x00\u202e?'), max_size=60)
NAMES = ("From", "To", "Via", VOUCHED, "Privacy", "Diversion", "History-Info")


@given(st.dictionaries(st.sampled_from(NAMES), st.one_of(ODD, st.text(max_size=40))))
def test_whatever_comes_is_read_into_something_that_can_be_printed(
    headers: dict[str, str],
) -> None:
    said = read(headers)
    assert (said.name + said.number + said.diverted).isprintable()
    assert len(said.name) <= 100


@pytest.mark.clock
@pytest.mark.parametrize(
    "text",
    [
        *('"' * 1024, '"\\' * 512, "<" * 1024, " " * 1024, '"a' + " " * 1022, "a " * 512),
        *("," * 1024, '""' * 512, "\\" * 1024, "<>" * 512, '"" ' * 340, "sip:" * 256),
        ";privacy = " * 90,
    ],
)
def test_the_longest_headers_take_no_time(text: str) -> None:
    """Every one of them is read on the loop that looks after all calls. As long as the stack cuts
    them; a pattern that tries everything twice would take seconds."""
    clock = MonotonicClock()
    took_ns = []
    for _ in range(3):
        began_ns = clock.now_ns()
        assert isinstance(read(dict.fromkeys(NAMES, text)), Said)
        took_ns.append(clock.now_ns() - began_ns)
    assert min(took_ns) < 50 * NS_PER_MS
