"""A line that sends or connects without end costs the box a bounded amount, and nobody a frame."""

import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import control
from appliance.control import ControlClient
from appliance.line_sockets import MOST_LINES
from appliance.seat import Depart, ToTick
from appliance.session import Event, SessionId
from tests.appliance.test_box import DEADLINE_S, Line, Running

pytestmark = pytest.mark.clock


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with (
        tempfile.TemporaryDirectory(prefix="dbx-") as folder,  # tmp_path may be too long for one
        Running(tmp_path, Path(folder) / "control.sock", lambda batch: None) as running,
    ):
        yield running


def test_more_lines_than_there_is_room_for_are_turned_away_and_no_call_notices(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    path = running.config.control.socket
    well = Line(running)
    others = [ControlClient.connect(path) for _ in range(MOST_LINES - 1)]
    for _ in range(5):
        with pytest.raises(control.BoxGone, match="closed the connection at once"):
            ControlClient.connect(path)
    well.speak(3, last=True)
    assert well.settle_all() == control.Gone(well.admitted.session, "finished")
    # Once a second, and these came within one unless this machine is busy.
    told = sum("was not let in: too many lines" in r.message for r in caplog.records)
    assert 1 <= told < 5
    well.client.close()
    for other in others:
        other.close()
    running.wait_for(lambda: len(running.box.switchboard._lines) == 0)
    ControlClient.connect(path).close()


def test_refusals_by_the_thousand_are_counted_and_logged_seldom(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    line = Line(running, gain=99.0)
    for request in range(500):
        line.client.send(control.Join(request, "test", "x", {"gain": 99.0}))
        assert isinstance(line.next(), control.Refused)
    assert sum(running.box.switchboard.refusals.values()) == 501
    line.client.close()
    said = [record for record in caplog.records if record.message.startswith("refused")]
    assert len(said) <= DEADLINE_S


def test_a_flood_of_goodbyes_reaches_the_tick_thread_as_one(running: Running) -> None:
    sent: list[Depart] = []

    class Inbox(deque[ToTick]):
        def append(self, message: ToTick) -> None:
            if isinstance(message, Depart):
                sent.append(message)
            super().append(message)

    running.box.loop.inbox = Inbox()
    line = Line(running)
    for _ in range(50):
        line.client.send(control.Leave(line.admitted.session))
    assert line.next() == control.Gone(line.admitted.session, "left")
    line.client.close()
    assert sent == [Depart(SessionId(line.admitted.session), Event.LEAVE)]
