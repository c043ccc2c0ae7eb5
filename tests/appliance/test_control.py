"""Control messages: bytes and back, and what is not one."""

import contextlib
import os
import resource
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import control
from appliance.admission import Reason
from appliance.control import BoxGone, ControlClient, ControlError

WELCOME = control.Welcome(1, "/b", "m", False, "", 80_000_000, 24_000, 1920, 5, "/b/p", (3, 0))


@pytest.mark.parametrize(
    "message",
    [
        control.Join(1, "file", "Ann", {"sampling.seed": 4.0}),
        control.Leave(3, "tired"),
        control.Status(9),
        control.HangUp(1, 2, "tired"),
        control.Transfer(1, 2, "sip:desk@pbx"),
        control.Transferred(0, 2, True, "gone"),
    ],
)
def test_a_message_to_the_box_survives_the_wire(message: control.ToBox) -> None:
    assert control.decode_to_box(control.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        WELCOME,
        control.Admitted(1, 2, 3, "dbx-1", 16, 64, 256),
        control.Refused(1, Reason.LINES, "all taken"),
        control.Gone(2, "finished"),
        control.Gone(2, control.OPERATOR, "an operator ended it"),
        control.HungUp(1, 2, 30),
        control.Report(1, True, False, 9, 1, 2, 4, 0, 0, 7, -7, 0),
    ],
)
def test_a_message_from_the_box_survives_the_wire(message: control.FromBox) -> None:
    assert control.decode_from_box(control.encode(message)) == message


@given(raw=st.binary(max_size=200))
def test_garbage_is_a_control_error_and_nothing_else(raw: bytes) -> None:
    with pytest.raises(ControlError):
        control.decode_to_box(raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "Join", "request": 1, "line": "file", "caller": "x", "extra": 1},
        {"type": "Join", "request": "1", "line": "file", "caller": "x"},
        {"type": "Join", "request": 1, "line": "file", "caller": "x" * 201},
        {"type": "Shutdown"},
        {"request": 1},
    ],
)
def test_a_message_that_is_almost_right_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ControlError):
        control.decode_to_box(msgspec.msgpack.encode(raw))


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def test_no_box_at_the_path_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(BoxGone, match="duplexbox appliance serve"):
        ControlClient.connect(tmp_path / "none.sock")


def test_a_box_that_goes_away_is_told_from_one_that_is_silent(tmp_path: Path) -> None:
    with listening(tmp_path / "s") as listener:
        peer_of: list[socket.socket] = []

        def welcome() -> ControlClient:
            client_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client_socket.connect(str(tmp_path / "s"))
            peer_of.append(listener.accept()[0])
            return ControlClient(client_socket, WELCOME)

        client = welcome()
        assert client.receive(0.01) is None
        peer_of[0].send(control.encode(control.Gone(4, "left")))
        assert client.receive(1.0) == control.Gone(4, "left")
        peer_of[0].close()
        with pytest.raises(BoxGone, match="closed the connection"):
            client.receive(1.0)
        with pytest.raises(BoxGone):
            client.send(control.Status(1))
        client.close()


def test_a_line_with_a_thousand_connections_hears_its_box(tmp_path: Path) -> None:
    high, limits = 1100, resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] <= high:
        resource.setrlimit(resource.RLIMIT_NOFILE, (high + 1, limits[1]))
    box, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        low = line.detach()
        os.dup2(low, high)
        os.close(low)
        client = ControlClient(socket.socket(fileno=high), WELCOME)
        assert client.receive(0.01) is None
        box.send(control.encode(control.Gone(4, "left")))
        assert client.receive(1.0) == control.Gone(4, "left")
        client.close()
    finally:
        box.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_box_of_another_version_is_refused(tmp_path: Path) -> None:
    import threading

    with listening(tmp_path / "s") as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.send(control.encode(msgspec.structs.replace(WELCOME, version=99)))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            ControlError, match=f"does not speak control protocol {control.PROTOCOL}"
        ):
            ControlClient.connect(tmp_path / "s")
        thread.join()


def test_a_line_that_has_no_descriptor_left_may_look_for_its_box_again(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest + 1, 64), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(BoxGone, match="cannot be reached: Too many open files"):
            ControlClient.connect(tmp_path / "box.sock")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
