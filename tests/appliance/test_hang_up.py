"""`duplexbox appliance hangup`: who is told what, what is recorded, and what cannot hold it up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import cli, control, endings, ledger_views
from appliance.admission import Reason
from appliance.control import ControlClient
from appliance.ledger import Why
from appliance.session import Event, SessionId, State
from tests.appliance.test_box import DEADLINE_S, Line, Running, socket_path
from tests.appliance.test_box_reset import ask, settle_live
from tests.appliance.test_transfers import Phone

pytestmark = pytest.mark.clock

__all__ = ["socket_path"]

SAID = "an operator ended it: the hall is closing"


@pytest.fixture
def running(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    with Running(tmp_path, socket_path, lambda batch: None) as running:
        yield running


def owe(running: Running, line: Line) -> None:
    """Be live, with a frame that the line has not settled: the box waits a second for that."""
    settle_live(running, line, 1)
    running.wait_for(lambda: line.channel is not None and line.channel.downlink.waiting > 0)


def verb(running: Running, session: int, *words: str) -> int:
    socket = str(running.config.control.socket)
    return cli.main(["hangup", str(session), "--socket", socket, *words])


def hang_up(session: int) -> control.HangUp:
    return control.HangUp(7, session, "the hall is closing")


def test_the_verb_ends_one_call_and_every_record_says_who_did(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = Line(running, "mine"), Line(running, "other")
    for line in (mine, other):
        settle_live(running, line, 2)
    session = mine.admitted.session
    assert verb(running, session, "--why", "the hall\nis closing") == 0
    assert mine.settle_all() == control.Gone(session, "operator", SAID)
    due = running.summary().sessions[0].due
    assert capsys.readouterr().out == f"session {session} is ended; {due} frames of it were due\n"
    assert other.client.receive(0.1) is None
    other.client.send(control.Status(1))
    report_ = other.next()
    assert isinstance(report_, control.Report)
    assert (report_.sessions_hung_up, report_.leases_held, report_.refusals) == (1, 1, {})
    other.speak(1, last=True)
    assert other.settle_all() == control.Gone(other.admitted.session, "finished")
    ended = {s.caller: (s.ended, s.failed, s.unexplained) for s in running.summary().sessions}
    assert ended == {"mine": ("operator", False, 0), "other": ("finished", False, 0)}
    rows = ledger_views.rows(running.config.ledger.folder)
    assert sorted(row.ended for row in rows) == ["finished", "operator"]


def test_a_caller_who_has_said_nothing_yet_is_ended_too(running: Running) -> None:
    line = Line(running)
    answer = ask(running, hang_up(line.admitted.session))
    assert answer == control.HungUp(7, line.admitted.session, 0)
    assert line.next() == control.Gone(line.admitted.session, "operator", SAID)


def test_a_line_that_does_not_answer_keeps_no_slot_and_is_not_what_ended_the_call(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    line, neighbour = Line(running), Line(running)
    owe(running, line)
    session = line.admitted.session
    assert isinstance(ask(running, hang_up(session)), control.HungUp)
    newcomer = Line(running)  # of two slots, before the line has settled anything
    assert isinstance(newcomer.answer, control.Admitted)
    call = running.box.switchboard._calls[SessionId(session)]
    assert call.session.state is State.DRAINING
    assert verb(running, session) == 1
    assert f"session {session} is ending already: {SAID}" in capsys.readouterr().err
    assert line.next() == control.Gone(session, "operator", SAID)  # and not "timeout"
    assert neighbour.client.receive(0.0) is None


def test_what_is_not_on_or_ends_by_itself_is_refused_in_words(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(running, 4711) == 1
    assert "hangup: session 4711 is not on" in capsys.readouterr().err
    line = Line(running)
    owe(running, line)
    line.client.send(control.Leave(line.admitted.session, "bye"))
    line.client.send(control.HangUp(7, line.admitted.session))
    answer = line.next()
    assert isinstance(answer, control.Refused)
    assert (answer.request, answer.reason) == (7, Reason.FAULT)
    assert answer.detail.startswith(f"session {line.admitted.session} is ending already")
    assert line.settle_all() == control.Gone(line.admitted.session, "left")
    assert verb(running, 1, "--why", "x" * 201) == 2
    assert "--why has 201 characters: at most 200" in capsys.readouterr().err
    assert running.box.switchboard.sessions_hung_up == 0


def test_a_caller_who_is_being_sent_on_is_ended_and_who_asked_for_that_is_told(
    running: Running,
) -> None:
    phone = Phone(running)
    client = ControlClient.connect(running.config.control.socket)
    client.send(control.Transfer(3, phone.session, "sip:desk@pbx"))
    assert isinstance(phone.next(), control.Transfer)
    assert isinstance(ask(running, hang_up(phone.session)), control.HungUp)
    assert phone.next() == control.Gone(phone.session, "operator", SAID)
    answer = client.receive(DEADLINE_S)
    assert isinstance(answer, control.Transferred)
    assert not answer.is_done
    client.close()
    phone.close()


def test_a_line_that_leaves_as_it_is_ended_does_not_make_it_its_own_doing(
    running: Running,
) -> None:
    line = Line(running)
    settle_live(running, line, 1)
    session = line.admitted.session
    line.client.send(control.HangUp(7, session, "the hall is closing"))
    line.client.send(control.Leave(session, "bye"))
    answer = line.next()
    assert isinstance(answer, control.HungUp), answer
    assert line.settle_all() == control.Gone(session, "operator", SAID)


def test_an_end_that_came_first_is_the_one_that_is_written_down(running: Running) -> None:
    line = Line(running)
    settle_live(running, line, 1)
    call = running.box.switchboard._calls[SessionId(line.admitted.session)]
    call.ended_by = SAID
    assert endings.why(call, Event.LEAVE) is Why.OPERATOR
    assert endings.why(call, Event.FAULT) is Why.FAULT
    call.stopped = True
    assert endings.why(call, Event.LEAVE) is Why.OPERATOR
    call.ended_by = ""
    assert endings.why(call, Event.LEAVE) is Why.STOPPED
    assert set(endings.ENDED) < set(Event)
    assert call.connection is not None
    call.ended_for, call.why = (call.connection, 9), Why.FAULT
    (told,) = endings.waiting(call)
    detail = f"session {line.admitted.session} had ended already: fault"
    assert told == (call.connection, control.Refused(9, Reason.FAULT, detail))
    assert endings.waiting(call) == []
    call.stopped = False


def test_words_cannot_break_a_log_or_a_message() -> None:
    assert endings.printable(" a\nb\x1b[31m\u202e\ud800c ") == "a b [31m  c"
    with pytest.raises(control.ControlError):
        control.decode_to_box(control.encode(control.HangUp(1, 2, "x" * 201)))
