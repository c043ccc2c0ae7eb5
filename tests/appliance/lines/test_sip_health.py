"""What a load balancer is told."""

from hypothesis import example, given
from hypothesis import strategies as st

from appliance.lines.sip_health import Health, answer

OPTIONS = (
    b"OPTIONS sip:10.0.0.5:5070 SIP/2.0\r\n"
    b"Via: SIP/2.0/UDP 10.0.0.1;branch=z9hG4bK1\r\n"
    b"v: SIP/2.0/UDP 10.0.0.2;branch=z9hG4bK2\r\n"
    b"To: <sip:10.0.0.5:5070>\r\nFrom: <sip:dispatcher@localhost>;tag=1\r\n"
    b"CSeq: 10 OPTIONS\r\ni: 5f@10.0.0.1\r\nMax-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
)


def test_room_is_200_with_the_headers_a_transaction_needs() -> None:
    said = answer(OPTIONS, "")
    assert said is not None
    lines = said.split(b"\r\n")
    assert lines[0] == b"SIP/2.0 200 OK"
    assert lines[1:3] == [
        b"Via: SIP/2.0/UDP 10.0.0.1;branch=z9hG4bK1",
        b"Via: SIP/2.0/UDP 10.0.0.2;branch=z9hG4bK2",
    ]
    assert b"Call-ID: 5f@10.0.0.1" in lines
    assert b"CSeq: 10 OPTIONS" in lines
    assert b"To: <sip:10.0.0.5:5070>;tag=room" in lines


def test_no_room_is_503_with_the_reason_and_when_to_ask_again() -> None:
    said = answer(OPTIONS, 'full "of" callers\r\nEvil: 1')
    assert said is not None
    assert said.startswith(b"SIP/2.0 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 5\r\n" in said
    assert b"\r\nEvil" not in said
    assert b"Warning: 399 duplexbox \"full 'of' callers" in said


@given(st.binary(max_size=400))
@example(OPTIONS.replace(b"OPTIONS", b"INVITE"))
@example(OPTIONS.replace(b"CSeq: 10 OPTIONS\r\n", b""))
@example(OPTIONS.replace(b"To: ", b"To: <sip:a>\r\nTo: "))
@example(OPTIONS.replace(b"\r\n", b"\n"))
@example(OPTIONS[:-2])
@example(OPTIONS + bytes(9000))
def test_anything_else_is_not_answered(request: bytes) -> None:
    assert answer(request, "") is None


@given(st.integers(0, len(OPTIONS) - 1), st.integers(0, 255))
def test_a_mangled_request_is_answered_with_one_well_formed_message_or_not_at_all(
    at: int, byte: int
) -> None:
    said = answer(OPTIONS[:at] + bytes([byte]) + OPTIONS[at + 1 :], "full")
    if said is not None:
        assert said.endswith(b"\r\nContent-Length: 0\r\n\r\n")
        assert said.count(b"\r\n\r\n") == 1
        assert len(said) < 2 * len(OPTIONS)


def test_whoever_else_wants_to_know_is_told_of_changes_only() -> None:
    told: list[bool] = []
    health = Health("", told.append)
    for has_room in (False, False, True, True, False):
        health.show(has_room, "" if has_room else "full")
    assert told == [False, True, False]
