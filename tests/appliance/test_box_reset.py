"""`duplexbox appliance reset` on a whole box: who is told what, and what is written down."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import cli, control, ledger
from appliance.admission import Reason
from appliance.control import ControlClient
from appliance.ledger import Flag
from appliance.session import SessionId, State
from tests.appliance.test_box import DEADLINE_S, Line, Running, socket_path

pytestmark = pytest.mark.clock

__all__ = ["socket_path"]


@pytest.fixture
def running(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    with Running(tmp_path, socket_path, lambda batch: None) as running:
        yield running


def settle_live(running: Running, line: Line, frames: int) -> None:
    """Say and take ``frames`` frames, and wait until the box too knows that the call is live."""
    line.speak(frames)
    line.settle(frames)
    call = running.box.switchboard._calls[SessionId(line.admitted.session)]
    running.wait_for(lambda: call.session.state is State.LIVE)


def ask(running: Running, question: control.ToBox) -> control.FromBox | None:
    """Of an operator, who is no line."""
    client = ControlClient.connect(running.config.control.socket)
    client.send(question)
    answer = client.receive(DEADLINE_S)
    client.close()
    return answer


def test_the_verb_resets_one_call_and_its_line_is_told(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = Line(running, "mine"), Line(running, "other")
    for line in (mine, other):
        settle_live(running, line, 2)
    socket = str(running.config.control.socket)
    assert cli.main(["reset", str(mine.admitted.session), "--socket", socket]) == 0
    said = mine.next()
    assert isinstance(said, control.WasReset)
    assert (said.request, said.session, said.held) == (0, mine.admitted.session, 0)
    expected = f"session {said.session} began anew at frame {said.frame_index} of its call\n"
    assert capsys.readouterr().out == expected
    assert other.client.receive(0.1) is None
    for line in (mine, other):
        line.speak(1, last=True)
        assert line.settle_all() == control.Gone(line.admitted.session, "finished")
        line.close()
    calls = {c.header.caller: c for c in ledger.read_folder(running.config.ledger.folder)}
    flags = calls["mine"].ticks["flags"]
    (at,) = [index for index, f in enumerate(flags) if f & Flag.RESET]
    assert at == said.frame_index
    assert not any(f & Flag.RESET for f in calls["other"].ticks["flags"])
    assert running.summary().unexplained == 0
    assert running.box.switchboard.sessions_reset == 1


def test_a_line_may_ask_for_its_own_call_and_is_answered_once(running: Running) -> None:
    line = Line(running)
    settle_live(running, line, 1)
    line.client.send(control.Reset(5, line.admitted.session))
    said = line.next()
    assert isinstance(said, control.WasReset)
    assert said.request == 5
    assert line.client.receive(0.2) is None
    line.close()


def test_only_a_live_call_can_be_reset(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Line(running)  # admitted, and has said nothing
    answer = ask(running, control.Reset(7, line.admitted.session))
    assert isinstance(answer, control.Refused)
    assert (answer.request, answer.reason) == (7, Reason.FAULT)
    assert "is admitted; only one that is live can be reset" in answer.detail
    socket = str(running.config.control.socket)
    assert cli.main(["reset", "4711", "--socket", socket]) == 1
    assert "session 4711 is gone; only one that is live" in capsys.readouterr().err
    assert sum(running.box.switchboard.refusals.values()) == 0  # nobody was turned away
    line.close()


def test_whoever_asks_and_vanishes_costs_nothing(running: Running) -> None:
    line = Line(running)
    settle_live(running, line, 1)
    client = ControlClient.connect(running.config.control.socket)
    client.send(control.Reset(7, line.admitted.session))
    client.close()
    assert isinstance(line.next(), control.WasReset)
    line.close()
