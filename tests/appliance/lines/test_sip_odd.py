"""Peers that lose messages, never confirm, or are no telephones. `make test-lines`."""

import os
import random
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.appliance.lines.test_sip import line, speech
from tests.fakes_line import FakeBox
from tests.sip_debian import sipp
from tests.sip_peer import Phone, now_s, sleep
from tests.sip_rig import print_figures

pytestmark = [pytest.mark.peers, pytest.mark.clock]


def test_sipp_with_a_third_of_all_messages_lost_leaves_no_ghost(tmp_path: Path) -> None:
    """INVITE, answers, ACK and BYE alike, sent again until they arrive: each call ends as it was
    told to, and the box knows of no other."""
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, "calls_per_s = 1000\nmost = 60") as running,
    ):
        code, screen = sipp(tmp_path, running.port, 60, 1.0, rate=10, lost=33)
        until = now_s() + 40
        while not all(row.ended for row in running.rows()):
            assert now_s() < until
            sleep(0.1)
        rows = running.rows()
    print_figures("a third lost", code=code, ends=sorted({row.why for row in rows}))
    assert len(rows) == len(box.sessions) <= 60, screen
    assert all(session.gone == "left" for session in box.sessions)
    # One whose BYE got lost ten times in a row, or whose INVITE did, is SIPp's to count as failed.
    assert sum(row.why == "the caller hung up" for row in rows) >= 57


def test_an_answer_that_is_never_confirmed_ends_after_half_a_minute(tmp_path: Path) -> None:
    """RFC 3261 has the answer repeated for 64 x T1, and then the call ended with BYE."""
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as running:
        with Phone("bot", running.port) as phone:
            phone.sequence = 1
            phone.send(phone.request("INVITE", phone.sdp()))
            _, text = phone.answer("INVITE")
            began = now_s()
            answers = 1
            while not box.sessions[0].gone:
                assert now_s() < began + 40
                try:
                    _, again = phone.answer("INVITE", timeout_s=1.0)
                except TimeoutError:
                    continue
                answers += 1
                assert tag(again) == tag(text)
            assert [said.partition(" ")[0] for said in phone.said] == ["BYE"]
        running.wait("call 1 over")
    print_figures("no ACK", answers=answers, seconds=now_s() - began)
    assert answers >= 10
    (row,) = running.rows()
    assert row.why == "the caller never confirmed that the call was answered"
    assert row.talked_ms == 0


def tag(text: str) -> str:
    found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
    assert found is not None
    return found[1]


def torture(phone: Phone) -> list[bytes]:
    """Messages of the kinds RFC 4475 collects: some legal and odd, most not."""
    body = phone.sdp()
    invite = phone.request("INVITE", body, sequence=1)
    head, _, _ = invite.partition(b"\r\n\r\n")
    odd = [
        invite.replace(b"INVITE sip", b"INVITE  sip", 1),
        invite.replace(b"SIP/2.0\r\n", b"SIP/7.0\r\n", 1),
        invite.replace(b"CSeq: 1 INVITE", b"CSeq: 36893488147419103232 INVITE"),
        invite.replace(b"CSeq: 1 INVITE", b"CSeq: 1 REGISTER"),
        invite.replace(b"Max-Forwards: 70", b"Max-Forwards: 300"),
        invite.replace(b"Max-Forwards: 70", b"Max-Forwards: 0"),
        invite.replace(b"Content-Length: ", b"Content-Length: -"),
        invite.replace(b"Content-Length: ", b"Content-Length: 9999"),
        invite.replace(b"Call-ID: ", b"Call-ID: x\r\nCall-ID: "),
        invite.replace(b"From: ", b"From: \x00\xff\xfe"),
        invite.replace(b'"Test"', b'"Te\\"st'),
        invite.replace(b'"Test"', b'"' + b"A" * 20_000 + b'"'),
        invite.replace(b"Via: ", b"Via: " + b"SIP/2.0/UDP a;branch=b, " * 500),
        invite.replace(b"To: <", b"To: <<<<<"),
        invite.replace(b"tag=", b"tag=%00%ff"),
        invite.replace(b"sip:bot", b"sip:%62%6f%74"),
        invite.replace(b"sip:bot", b"sips:bot"),
        invite.replace(b"sip:bot", b"http://bot"),
        invite.replace(b"\r\n", b"\n"),
        invite.replace(b"\r\n", b"\r\n\t "),
        invite.replace(b"m=audio", b"m=" + b"9" * 5_000),
        invite.replace(b"RTP/AVP 0", b"RTP/AVP " + b"0 " * 3_000),
        invite.replace(b"c=IN IP4 127.0.0.1", b"c=IN IP4 999.999.1.1"),
        invite.replace(b"c=IN IP4 127.0.0.1", b"c=IN IP6 ::%lo"),
        head,
        b"\r\n\r\n",
        b"\0" * 1_400,
        b"SIP/2.0 200 OK\r\n\r\n",
        b"SIP/2.0 4294967301 better not break the receiver\r\n\r\n",
    ]
    for method in ("NOTIFY", "SUBSCRIBE", "MESSAGE", "INFO", "REFER", "PRACK", "PUBLISH", "!#$%&"):
        odd.append(phone.request(method, sequence=1, extra="Refer-To: <sip:x@127.0.0.1:9>\r\n"))
    return odd


def test_torture_and_mutated_packets_cost_a_call_in_progress_nothing(tmp_path: Path) -> None:
    """100,000 packets; DUPLEXBOX_PACKETS is for smaller machines."""
    packets = int(os.environ.get("DUPLEXBOX_PACKETS", "100000"))
    chance = random.Random(4475)
    with ExitStack() as stack:
        box = stack.enter_context(FakeBox(tmp_path))
        running = stack.enter_context(line(tmp_path, box.path, "calls_per_s = 5"))
        phone = stack.enter_context(Phone("bot", running.port))
        stranger = stack.enter_context(Phone("bot", running.port, source="127.0.0.7"))
        phone.dial()
        worker = running.worker()
        seeds = [*torture(stranger), stranger.request("INVITE", stranger.sdp(), sequence=1)]
        sent = 0
        missed = 0
        while sent < packets:
            for _ in range(2_000):
                raw = bytearray(chance.choice(seeds))
                for _ in range(chance.choice((0, 1, 3, 30))):
                    at = chance.randrange(len(raw))
                    raw[at] = chance.randrange(256)
                if chance.random() < 0.2:
                    raw = raw[: chance.randrange(1, len(raw) + 1)]
                stranger.send(bytes(raw[:60_000]))
                sent += 1
            heard = phone.talk(speech(1.0))
            missed += 50 - min(50, heard.arrived_s.size)
        assert running.worker() == worker
        assert phone.hang_up() == 200
        with Phone("bot", running.port) as other:  # and it still takes calls
            other.dial()
            other.hang_up()
        until = now_s() + 60
        while not all(session.gone for session in box.sessions):
            assert now_s() < until
            sleep(0.1)
    print_figures("torture", sent=sent, rtp_missed=missed, sessions=len(box.sessions))
    assert missed <= packets // 2_000  # one a second, at the seams of `talk`
