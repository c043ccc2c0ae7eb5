"""Whose socket lies at a path, and what happens when nobody more can be let in."""

import contextlib
import os
import resource
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.listener import Listener, SocketTaken


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:  # tmp_path may be too long for one
        yield Path(folder) / "control.sock"


def knock(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setblocking(False)
    try:
        peer.connect(str(path))
    except OSError:
        peer.close()
        raise
    return peer


def use_up_descriptors(taken: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))


def test_a_box_whose_backlog_is_full_is_still_a_box(path: Path) -> None:
    """A stopped box accepts nobody; whoever looks must neither hang nor take its place."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped:
        stopped.bind(str(path))
        stopped.listen(0)
        first = knock(path)
        with pytest.raises(BlockingIOError):
            knock(path)
        with pytest.raises(SocketTaken, match="another box listens"):
            Listener(path)
        first.close()
    assert path.exists()


def test_without_descriptors_whoever_knocks_is_turned_away_and_the_listener_rests(
    path: Path,
) -> None:
    listener = Listener(path)
    peers = [knock(path) for _ in range(2)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(peers[-1].fileno() + 8, 64), limits[1]))
        use_up_descriptors(taken)
        for _ in peers:
            assert listener.accept(has_room=True) == (None, "Too many open files")
        assert select.select([listener], [], [], 0)[0] == []  # nobody is left to spin for
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert [peer.recv(1) for peer in peers] == [b"", b""]
    again = knock(path)
    accepted, _ = listener.accept(has_room=True)
    assert accepted is not None
    for end in (accepted, again, *peers):
        end.close()
    listener.close()
    assert not path.exists()


class Slow(socket.socket):
    """Lets the next box start as soon as nobody listens, before whoever closes it gets further."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.next: Listener | None = None
        self._path = path

    def close(self) -> None:
        super().close()
        if self.next is None:
            self.next = Listener(self._path)


def test_a_box_that_stops_leaves_the_socket_of_the_one_that_starts_meanwhile(path: Path) -> None:
    stopping = Listener(path)
    stopping._socket.close()
    path.unlink()
    stopping._socket = slow = Slow(path)
    slow.bind(str(path))
    slow.listen()
    stopping.close()
    assert slow.next is not None
    knock(path).close()
    slow.next.close()
    assert not path.exists()
