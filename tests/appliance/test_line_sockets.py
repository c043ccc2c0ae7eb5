"""Between the control socket and those who decide: nothing is lost, nothing without bound."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.line_sockets import MOST_WAITING, Came, Connection, LineSockets, Lost, Said


class Desk:
    """The box's end and one line, which are the test's both."""

    def __init__(self, path: Path) -> None:
        self.lines = LineSockets(path)
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(str(path))
        self.line.settimeout(5)
        (came,) = self.poll()
        assert isinstance(came, Came)
        self.connection: Connection = came.connection

    def poll(self) -> list[Came | Said | Lost]:
        return list(self.lines.poll(0, 0))

    def say(self, number: int) -> None:
        self.lines.send(self.connection, number.to_bytes(400, "little"), 0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        desk = Desk(Path(folder) / "s.sock")
        yield desk
        desk.line.close()
        desk.lines.close()


def test_a_line_that_is_busy_for_a_while_is_told_everything_in_order(desk: Desk) -> None:
    for number in range(MOST_WAITING):
        desk.say(number)
    assert desk.connection.waiting  # or the kernel holds so much that this shows nothing
    heard: list[int] = []
    while len(heard) < MOST_WAITING:
        heard.append(int.from_bytes(desk.line.recv(1000), "little"))
        assert desk.poll() == []
    assert heard == list(range(MOST_WAITING))
    assert not desk.connection.waiting


def test_a_line_that_never_reads_is_cut_off_and_told_of_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2 * MOST_WAITING):
        desk.say(number)
    assert not desk.connection.is_open
    assert len(desk.connection.waiting) == 0
    assert desk.poll() == [Lost(desk.connection)]
    assert desk.poll() == []
    assert f"it left {MOST_WAITING + 1} messages unread" in caplog.text
    assert len(desk.lines) == 0


def test_what_a_line_said_before_it_went_is_heard_first(desk: Desk) -> None:
    desk.line.send(b"one")
    desk.line.send(b"two")
    desk.line.close()
    assert desk.poll() == [Said(desk.connection, b"one")]  # one a pass: a flood has its turn
    assert desk.poll() == [Said(desk.connection, b"two")]
    assert desk.poll() == [Lost(desk.connection)]
    desk.say(1)  # to nobody
    assert desk.poll() == []


def test_a_line_that_went_is_found_out_when_it_is_spoken_to(desk: Desk) -> None:
    desk.line.close()
    desk.say(1)
    assert desk.poll() == [Lost(desk.connection)]
    assert desk.poll() == []


def test_a_line_that_is_cut_off_while_it_is_heard_is_told_of_once(desk: Desk) -> None:
    desk.line.send(b"junk")
    found = []
    for event in desk.lines.poll(0, 0):
        found.append(event)
        if isinstance(event, Said):
            desk.lines.cut_off(desk.connection, "it sent junk", 0)
            desk.lines.cut_off(desk.connection, "twice", 0)
    assert found == [Said(desk.connection, b"junk"), Lost(desk.connection)]
