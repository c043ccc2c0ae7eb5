"""Who may send the telephone line anything, as the kernel sees it."""

import socket
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lines.sip_filter import attach, dropped, own_sockets, passes, program

networks = st.builds(
    lambda address, bits: IPv4Network((address, bits), strict=False),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32),
)


@given(st.lists(networks, max_size=8), st.integers(0, 2**32 - 1), st.booleans())
def test_the_program_passes_who_is_listed_and_nobody_else(
    allowed: list[IPv4Network], source: int, drop: bool
) -> None:
    address = IPv4Address(source)
    lines = program(allowed, drop_options=drop)
    listed = not allowed or any(address in network for network in allowed)
    assert passes(lines, address, b"INVITE sip:x SIP/2.0\r\n") is listed
    assert passes(lines, address, b"OPTIONS sip:x SIP/2.0\r\n") is (listed and not drop)


def test_more_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="1001 networks; 1000 fit"):
        program([IPv4Network("10.0.0.0/8")] * 1001)


def receive_all(listener: socket.socket) -> list[bytes]:
    listener.settimeout(0.2)
    found = []
    try:
        while True:
            found.append(listener.recv(100))
    except TimeoutError:
        return found


def test_the_kernel_does_what_the_program_says_and_counts_what_it_dropped() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        address, port = listener.getsockname()
        with own_sockets(address, (port,)) as found:
            assert len(found) == 1
            attach(found[0], program([IPv4Network("127.0.0.2/31")], drop_options=True))
        before = dropped(address, port)
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.bind((source, 0))
                sender.sendto(b"INVITE " + source.encode(), (address, port))
                sender.sendto(b"OPTIONS " + source.encode(), (address, port))
        assert receive_all(listener) == [b"INVITE 127.0.0.2", b"INVITE 127.0.0.3"]
        assert dropped(address, port) - before == 6


def test_sockets_of_calls_are_found_by_their_ports_and_only_once() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("0.0.0.0", 0))
        port = one.getsockname()[1]
        known: set[str] = set()
        for expected in (1, 0):
            with own_sockets("", (), among=range(port, port + 1), known=known) as found:
                assert len(found) == expected
                for connection in found:
                    attach(connection, program([IPv4Network("127.0.0.2/32")]))
        for source in ("127.0.0.1", "127.0.0.2"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.bind((source, 0))
                sender.sendto(source.encode(), ("127.0.0.1", port))
        assert receive_all(one) == [b"127.0.0.2"]
    with own_sockets("", (), among=range(port, port + 1), known=known):
        assert not known  # what is gone is forgotten


def test_listeners_of_tcp_are_found_and_strangers_do_not_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        with own_sockets(address, (port,)) as found:
            assert [one.type for one in found] == [socket.SOCK_STREAM]
            attach(found[0], program([IPv4Network("127.0.0.9/32")]))
        with pytest.raises(TimeoutError):
            socket.create_connection((address, port), timeout=0.3)
        friend = socket.create_connection((address, port), 2, source_address=("127.0.0.9", 0))
        friend.close()
