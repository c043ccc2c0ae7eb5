"""What peers do to dialogs, said to the real stack word by word: no ghost call, nothing left over.

One line for all of them, so that what one leaves behind the next would find; the last test counts.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance import control
from tests.appliance.lines.test_sip import Line, line, speech
from tests.fakes_line import FakeBox
from tests.sip_peer import CLOCK, PACKET_S, Phone, Refused, now_s, sleep

pytestmark = [pytest.mark.slow, pytest.mark.clock]


DIGITS = 'digits = { "#" = "hang-up", "0" = "sip:desk@127.0.0.1:9" }'


class SlowBox(FakeBox):
    """Answers a Join only when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hesitates = False
        self.waiting: list[control.Join] = []

    def _join(self, join: control.Join) -> None:
        if self.hesitates:
            self.waiting.append(join)
        else:
            super()._join(join)

    def live(self) -> int:
        return sum(not session.gone for session in self.sessions)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowBox]:
    with SlowBox(tmp_path_factory.mktemp("box")) as made:
        yield made


@pytest.fixture(scope="module")
def running(box: SlowBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("line")
    extra = 'media_timeout_s = 3\ntransfer_to = ["sip:desk@127.0.0.1:9"]'
    with line(folder, box.path, extra, DIGITS) as made:
        sleep(1.2)  # the box has been asked how it is, and that socket is closed again
        made.sockets = sockets(made)
        yield made


def sockets(running: Line) -> int:
    """Open in the worker."""
    links = Path(f"/proc/{running.worker()}/fd").iterdir()
    return sum(str(link.readlink()).startswith("socket:") for link in links)


@pytest.fixture
def phone(running: Line) -> Iterator[Phone]:
    with Phone("bot", running.port) as made:
        yield made


def until(true: object, seconds: float = 8.0) -> None:
    """Wait for it."""
    assert callable(true)
    end = now_s() + seconds
    while not true():
        assert now_s() < end, "it did not happen"
        sleep(0.02)


def test_an_invite_sent_twice_is_one_call(box: SlowBox, phone: Phone) -> None:
    before = len(box.sessions)
    phone.sequence = 1
    raw = phone.request("INVITE", phone.sdp())
    phone.send(raw)
    phone.send(raw)
    _, first = phone.answer("INVITE")
    phone.send(raw)  # as a telephone does that has not got the 200
    _, again = phone.answer("INVITE")
    tags = {re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)[1] for text in (first, again)}  # type: ignore[index]
    assert len(tags) == 1
    phone.to_tag = tags.pop()
    phone.send(phone.request("ACK"))
    sleep(0.3)
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)
    assert len(box.sessions) == before + 1


def test_a_call_that_is_given_up_while_it_rings(box: SlowBox, phone: Phone) -> None:
    box.hesitates = True
    try:
        phone.sequence = 1
        phone.send(phone.request("INVITE", phone.sdp()))
        assert phone.answer("INVITE", least=180)[0] == 180
        until(lambda: box.waiting)
        phone.send(phone.request("CANCEL", branch=phone.branch("INVITE", 1)))
        assert phone.answer("INVITE")[0] == 487
    finally:
        box.hesitates = False
    box._join(box.waiting.pop())
    until(lambda: box.leaves and box.live() == 0)


def test_a_bye_before_the_ack(box: SlowBox, phone: Phone) -> None:
    phone.sequence = 1
    phone.send(phone.request("INVITE", phone.sdp()))
    _, text = phone.answer("INVITE")
    found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
    assert found is not None
    phone.to_tag = found[1]
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)


def test_everything_sent_twice_is_done_once(box: SlowBox, phone: Phone) -> None:
    before = len(box.sessions)
    phone.dial()
    ack = phone.request("ACK")
    for _ in range(3):
        phone.send(ack)
    assert phone.talk(speech(0.3)).arrived_s.size > 8
    phone.sequence += 1
    bye = phone.request("BYE")
    phone.send(bye)
    phone.send(bye)
    assert phone.answer("BYE")[0] == 200
    phone.send(bye)  # its 200 was lost
    assert phone.answer("BYE")[0] == 200
    phone.send(ack)
    until(lambda: box.live() == 0)
    assert len(box.sessions) == before + 1


def test_a_cancel_that_comes_twice_or_too_late(box: SlowBox, phone: Phone) -> None:
    phone.sequence = 1
    cancel = phone.request("CANCEL", branch=phone.branch("INVITE", 1))
    phone.dial()
    phone.send(cancel.replace(b"CSeq: 1", b"CSeq: %d" % phone.sequence))
    assert phone.answer("CANCEL")[0] in (200, 481)
    assert phone.talk(speech(0.4)).arrived_s.size > 12  # an answered call cannot be cancelled
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)
    with Phone("bot", phone.box[1]) as other:
        box.hesitates = True
        other.sequence = 1
        other.send(other.request("INVITE", other.sdp()))
        assert other.answer("INVITE", least=180)[0] == 180
        until(lambda: box.waiting)
        cancel = other.request("CANCEL", branch=other.branch("INVITE", 1))
        other.send(cancel)
        other.send(cancel)
        assert other.answer("INVITE")[0] == 487
        other.send(cancel)
        assert other.answer("CANCEL")[0] in (200, 481)
        box.hesitates = False
        box.waiting.clear()


def test_a_bye_while_it_still_rings(box: SlowBox, running: Line, phone: Phone) -> None:
    box.hesitates = True
    try:
        phone.sequence = 1
        phone.send(phone.request("INVITE", phone.sdp()))
        _, text = phone.answer("INVITE", least=180)
        found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
        assert found is not None
        phone.to_tag = found[1]
        until(lambda: box.waiting)
        phone.sequence = 2
        phone.send(phone.request("BYE"))
        seen = {phone.answer("BYE")[0], phone.answer("INVITE")[0]}
        assert seen <= {200, 481, 487}
    finally:
        box.hesitates = False
        box.waiting.clear()
    until(lambda: all(row.ended for row in running.rows()), 15.0)
    assert box.live() == 0


def test_an_offer_that_comes_with_the_ack(box: SlowBox, phone: Phone) -> None:
    phone.sequence = 1
    phone.send(phone.request("INVITE"))
    status, text = phone.answer("INVITE")
    assert status == 200
    offer = text.partition("\r\n\r\n")[2]
    assert "m=audio" in offer
    found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
    port = re.search(r"^m=audio (\d+)", text, re.M)
    assert found is not None
    assert port is not None
    phone.to_tag, phone.media = found[1], ("127.0.0.1", int(port[1]))
    phone.send(phone.request("ACK", phone.sdp()))
    assert phone.talk(speech(0.6)).arrived_s.size > 15
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)


def test_requests_out_of_order(box: SlowBox, phone: Phone) -> None:
    before = len(box.sessions)
    phone.dial()
    phone.sequence = 9
    assert phone.invite()[0] == 200  # 10
    phone.sequence = 4
    with pytest.raises(Refused, match="500"):
        phone.invite()  # an old one, late
    phone.sequence = 10
    assert phone.talk(speech(0.4)).arrived_s.size > 12
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)
    assert len(box.sessions) == before + 1


@pytest.mark.parametrize("direction", ["sendonly", "inactive"])
def test_hold_and_back(box: SlowBox, running: Line, phone: Phone, direction: str) -> None:
    phone.dial()
    phone.talk(speech(0.5))
    phone.invite(phone.sdp(direction=direction))
    frames = box.sessions[-1].frame_index
    held = phone.talk(speech(0.6)) if direction == "sendonly" else None
    if held is None:
        sleep(0.6)
    phone.invite(phone.sdp(direction=direction))  # once more changes nothing
    phone.invite()
    heard = phone.talk(speech(1.0))
    assert heard.arrived_s.size > 40
    assert np.abs(heard.pcm).max() > 1_000
    # The model's clock went on all the while.
    assert box.sessions[-1].frame_index - frames >= 16
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)
    until(lambda: running.rows()[-1].ended)
    assert running.rows()[-1].held_ms > 400


def test_another_codec_at_another_address(box: SlowBox, phone: Phone) -> None:
    phone.dial()
    phone.talk(speech(0.4))
    with Phone("bot", phone.box[1]) as other:
        phone.rtp, other.rtp = other.rtp, phone.rtp
        _, text = phone.invite(phone.sdp(payloads="8 101"))
        assert " 8 " in text.partition("m=audio")[2].partition("\r")[0] + " "
        end = now_s() + 1.0
        got: set[int] = set()
        due_ns = CLOCK.now_ns()
        while now_s() < end:
            phone.rtp.sendto(phone.packet(bytes([0xD5]) * 160, 8, step=160), phone.media)
            due_ns += int(PACKET_S * 1e9)
            CLOCK.sleep_until(due_ns)
            try:
                got.add(phone.rtp.recv(2_048)[1] & 0x7F)
            except BlockingIOError:
                continue
    assert got == {8}
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)


def test_refreshes_of_a_session_timer_and_questions_within_a_call(
    box: SlowBox, phone: Phone
) -> None:
    phone.dial()
    phone.talk(speech(0.3))
    timer = "Session-Expires: 90;refresher=uac\r\nSupported: timer\r\n"
    assert phone.invite(extra=timer)[0] == 200
    for method in ("UPDATE", "OPTIONS"):
        phone.sequence += 1
        phone.send(phone.request(method, extra=timer))
        assert phone.answer(method)[0] == 200
    assert phone.talk(speech(0.5)).arrived_s.size > 15
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)


def test_requests_for_calls_that_are_not_there(box: SlowBox, phone: Phone) -> None:
    before = len(box.sessions)
    phone.to_tag = "nothing"
    for method in ("BYE", "CANCEL"):
        phone.sequence += 1
        phone.send(phone.request(method))
        assert phone.answer(method)[0] == 481
    phone.send(phone.request("ACK"))
    phone.to_tag = ""
    with pytest.raises(Refused, match="488"):
        phone.invite("v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
                     "m=audio 4000 RTP/AVP 77\r\na=rtpmap:77 nothing/8000\r\n")  # fmt: skip
    assert len(box.sessions) == before


@pytest.mark.parametrize("payload", [96, 101])
def test_keys_come_on_any_payload_type_with_or_without_a_marker(
    running: Line, box: SlowBox, phone: Phone, payload: int
) -> None:
    phone.dial(phone.sdp(payloads=f"0 {payload}"))
    phone.talk(speech(0.2))
    phone.digit("7", payload, marker=payload == 96)
    phone.digit("#", payload, marker=payload == 96)
    assert phone.listen(1.0)[-1].startswith("BYE ")
    until(lambda: box.live() == 0)
    until(lambda: running.rows()[-1].ended)
    row = running.rows()[-1]
    assert (row.digits, row.why) == ("7#", "key #")


def test_a_key_transfers_the_caller_and_one_who_will_not_go_stays(
    box: SlowBox, phone: Phone
) -> None:
    phone.dial()
    phone.talk(speech(0.2))
    phone.refuses = "REFER"
    phone.digit("0")
    refer = next(text for text in phone.listen(1.0) if text.startswith("REFER "))
    assert "Refer-To: sip:desk@127.0.0.1:9" in refer.replace("<", "").replace(">", "")
    assert phone.talk(speech(0.5)).arrived_s.size > 15
    assert phone.hang_up() == 200
    until(lambda: box.live() == 0)


def test_a_peer_that_vanishes_is_noticed_by_its_silence(running: Line, box: SlowBox) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.3))
    until(lambda: box.live() == 0)
    until(lambda: running.rows()[-1].ended)
    assert "no audio" in running.rows()[-1].why or "rtp" in running.rows()[-1].why


def test_after_all_that_nothing_is_left(running: Line, box: SlowBox) -> None:
    until(lambda: all(row.ended for row in running.rows()))
    assert box.live() == 0
    assert {session.gone for session in box.sessions} == {"left"}
    until(lambda: sockets(running) <= running.sockets)
