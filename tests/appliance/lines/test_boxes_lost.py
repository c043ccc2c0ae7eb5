"""Boxes that die while newcomers are placed: between two messages, or between reading two boxes."""

import socket
from collections.abc import Iterator

import pytest

from appliance import control
from appliance.admission import Reason
from appliance.lines.boxes import Boxes, Lost
from tests.fakes import FakeClock

WELCOME = control.Welcome(
    control.PROTOCOL, "/b", "m", False, "", 80_000_000, 24_000, 1920, 5, "/b/p", ()
)


class Peer:
    """The other end of one box's connection."""

    def __init__(self) -> None:
        self._socket, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(5)
        self.client = control.ControlClient(line, WELCOME)

    def say(self, message: control.FromBox) -> None:
        self._socket.send(control.encode(message))

    def heard(self) -> control.ToBox:
        return control.decode_to_box(self._socket.recv(control.LIMIT_BYTES))

    def has_room(self, sessions: int) -> None:
        """Answer the question how it is."""
        asked = self.heard()
        assert isinstance(asked, control.Status)
        slots = sessions + 1
        self.say(
            control.Report(asked.request, True, False, 9, 0, 0, slots, 0, 0, 7, 7, 0, sessions)
        )

    def die(self) -> None:
        self._socket.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    peers = [Peer(), Peer()]
    yield peers
    for peer in peers:
        peer.die()


@pytest.fixture
def boxes(peers: list[Peer]) -> Iterator[Boxes]:
    boxes = Boxes([peer.client for peer in peers], FakeClock())
    boxes.send(1, control.Join(1, "test", "Ann"))
    yield boxes
    boxes.close()


def test_a_box_that_dies_once_it_has_said_how_it_is_is_passed_over(
    peers: list[Peer], boxes: Boxes
) -> None:
    first, second = peers
    second.has_room(1)
    assert boxes.receive(0) == []
    first.has_room(5)  # the best place by far
    first.die()
    assert boxes.receive(0) == []
    assert isinstance(second.heard(), control.Join)
    second.say(admitted := control.Admitted(1, 7, 8, "dbx-1", 16, 64, 256))
    (news,) = boxes.receive(0)
    assert (news.call, news.message, len(boxes)) == (1, admitted, 1)


def test_a_box_that_dies_while_another_refuses_costs_the_line_nothing(
    peers: list[Peer], boxes: Boxes
) -> None:
    first, second = peers
    first.has_room(5)
    second.has_room(1)
    assert boxes.receive(0) == []
    assert isinstance(first.heard(), control.Join)
    first.say(refused := control.Refused(1, Reason.TIME, "a tick would take too long"))
    second.die()  # the next to be asked, and the next to be read
    (news,) = boxes.receive(0)
    assert (news.call, news.message, len(boxes)) == (1, refused, 1)
    boxes.send(2, control.Join(2, "test", "Bob"))
    assert isinstance(first.heard(), control.Join)
    first.die()
    (news,) = boxes.receive(0)
    assert (news.call, type(news.message), len(boxes)) == (2, Lost, 0)


def test_what_a_box_said_last_is_heard_by_a_line_that_speaks_before_it_listens() -> None:
    peer = Peer()
    boxes = Boxes([peer.client], FakeClock())
    boxes.send(1, control.Join(1, "test", "Ann"))
    peer.say(control.Admitted(1, 7, 8, "dbx-1", 16, 64, 256))
    assert len(boxes.receive(0)) == 1
    assert isinstance(peer.heard(), control.Join)
    peer.say(gone := control.Gone(7, "stopped"))
    peer.die()
    boxes.send(1, control.Leave(7, "hung up"))
    (news,) = boxes.receive(0)
    assert (news.call, news.message, len(boxes)) == (1, gone, 0)
    with pytest.raises(control.BoxGone):
        boxes.receive(0)
