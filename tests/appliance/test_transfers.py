"""`duplexbox appliance transfer` on a whole box: who is asked, who is told, and who cannot be."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import cli, control
from appliance.admission import Reason
from appliance.channel import Channel
from appliance.control import ControlClient
from appliance.session import SessionId
from tests.appliance.test_box import DEADLINE_S, Line, Running, socket_path

pytestmark = pytest.mark.clock

__all__ = ["socket_path"]


class Phone(Line):
    """A line that can have its caller called on elsewhere."""

    def __init__(self, running: Running) -> None:
        super().__init__(running)
        self.client.send(control.Join(2, "sip", "ann", transfers=True))
        admitted = self.next()
        assert isinstance(admitted, control.Admitted)
        self.session = admitted.session
        self.rings = Channel.attach(admitted.channel)

    def close(self) -> None:
        super().close()
        self.rings.close()


@pytest.fixture
def running(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    with Running(tmp_path, socket_path, lambda batch: None) as running:
        yield running


def asking(running: Running, session: int, target: str = "sip:desk@pbx") -> ControlClient:
    client = ControlClient.connect(running.config.control.socket)
    client.send(control.Transfer(7, session, target))
    return client


@pytest.mark.parametrize("is_done", [True, False])
def test_the_verb_asks_the_line_and_says_what_came_of_it(
    running: Running, is_done: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    phone = Phone(running)
    codes: list[int] = []
    socket = str(running.config.control.socket)
    words = ["transfer", str(phone.session), "sip:desk@pbx", "--socket", socket]
    operator = threading.Thread(target=lambda: codes.append(cli.main(words)))
    operator.start()
    assert phone.next() == control.Transfer(0, phone.session, "sip:desk@pbx")
    detail = "transferred to sip:desk@pbx" if is_done else "486 Busy Here"
    phone.client.send(control.Transferred(0, phone.session, is_done, detail))
    operator.join()
    said = capsys.readouterr()
    if is_done:
        assert (codes, said.out) == ([0], f"session {phone.session}: transferred to sip:desk@pbx\n")
    else:
        assert codes == [1]
        assert f"session {phone.session} stays: 486 Busy Here" in said.err
    phone.close()


def test_a_line_that_transfers_nobody_is_not_asked(running: Running) -> None:
    phone = Phone(running)
    mine = phone.admitted.session  # its Join did not say so
    for session, says in ((mine, "by the line test, which transfers nobody"), (99, "is not on")):
        client = asking(running, session)
        answer = client.receive(DEADLINE_S)
        assert isinstance(answer, control.Refused)
        assert (answer.request, answer.reason) == (7, Reason.FAULT)
        assert says in answer.detail
        client.close()
    assert phone.client.receive(0.1) is None
    phone.close()


def test_one_transfer_at_a_time_and_no_other_line_speaks_for_the_session(running: Running) -> None:
    phone = Phone(running)
    other = ControlClient.connect(running.config.control.socket)
    first = asking(running, phone.session)
    assert isinstance(phone.next(), control.Transfer)
    second = asking(running, phone.session)
    answer = second.receive(DEADLINE_S)
    assert isinstance(answer, control.Refused)
    assert "already" in answer.detail
    other.send(control.Transferred(0, phone.session, True, "mine now"))
    assert first.receive(0.1) is None
    phone.client.send(control.Transferred(0, phone.session, True, "gone"))
    assert first.receive(DEADLINE_S) == control.Transferred(7, phone.session, True, "gone")
    for each in (first, second, phone, other):
        each.close()


def test_who_vanishes_while_it_is_asked_leaves_nothing_behind(running: Running) -> None:
    phone = Phone(running)
    client = asking(running, phone.session)
    phone.next()
    client.close()
    running.wait_for(
        lambda: not running.box.switchboard._transfers._asked[SessionId(phone.session)][0].is_open
    )
    again = asking(running, phone.session)  # the first one waits no more
    assert isinstance(phone.next(), control.Transfer)
    phone.close()  # and now the line does
    answer = again.receive(DEADLINE_S)
    assert isinstance(answer, control.Transferred)
    assert not answer.is_done
    assert "ended before its line said" in answer.detail
    assert not running.box.switchboard._transfers._asked
    again.close()


def test_no_target_is_longer_than_a_message_may_hold() -> None:
    with pytest.raises(control.ControlError):
        control.decode_to_box(control.encode(control.Transfer(1, 2, "x" * 201)))
