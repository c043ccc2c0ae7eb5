"""Who may send the telephone line anything: a filter that the kernel applies to our sockets.

Decides the filter's program; it knows nothing of SIP beyond the first letters of OPTIONS. The
kernel drops what does not pass before any parser sees it, so a scanner costs what an unread packet
costs; how many were dropped is in /proc/net/udp. Needs no privilege: a process may filter its own
sockets (SO_ATTACH_FILTER, classic BPF). IPv4.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

SO_ATTACH_FILTER = 26
SO_RCVBUFFORCE = 33
WAITING_BYTES = 4 << 20
"""Some thousand SIP messages: a lost BYE is a call that nobody ends."""

NET_OFFSET = 0xFFF0_0000
"""SKF_NET_OFF of linux/filter.h: offsets from here count from the IP header."""
SOURCE = NET_OFFSET + 12
"""Where an IPv4 header has its source address."""

LOAD = 0x20
"""BPF_LD | BPF_W | BPF_ABS: one big-endian word into the accumulator."""
MASK = 0x54
"""BPF_ALU | BPF_AND | BPF_K"""
IF_EQUAL = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K: skip so many instructions if equal, so many if not."""
RETURN = 0x06
"""BPF_RET | BPF_K: bytes of the packet to keep."""
ALL = 0xFFFF_FFFF

UDP_HEADER_BYTES = 8
OPTI = int.from_bytes(b"OPTI", "big")

MOST_NETWORKS = 1000
"""Four instructions each; the kernel takes 4,096."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of classic BPF."""

    code: int
    if_true: int
    if_false: int
    value: int

    def packed(self) -> bytes:
        return struct.pack("=HBBI", self.code, self.if_true, self.if_false, self.value)


def program(networks: Sequence[IPv4Network], *, drop_options: bool = False) -> list[Instruction]:
    """Pass what comes from one of ``networks``; from anybody if there are none.

    drop_options: of a UDP socket; OPTIONS requests are dropped, so that a load balancer which asks
    hears nothing and sends its calls elsewhere.
    """
    if len(networks) > MOST_NETWORKS:
        raise ValueError(f"{len(networks)} networks; {MOST_NETWORKS} fit into a filter")
    lines: list[Instruction] = []
    if drop_options:
        lines += [
            Instruction(LOAD, 0, 0, UDP_HEADER_BYTES),
            Instruction(IF_EQUAL, 0, 1, OPTI),
            Instruction(RETURN, 0, 0, 0),
        ]
    for network in networks:
        lines += [
            Instruction(LOAD, 0, 0, SOURCE),
            Instruction(MASK, 0, 0, int(network.netmask)),
            Instruction(IF_EQUAL, 0, 1, int(network.network_address)),
            Instruction(RETURN, 0, 0, ALL),
        ]
    return [*lines, Instruction(RETURN, 0, 0, 0 if networks else ALL)]


def passes(lines: Sequence[Instruction], source: IPv4Address, payload: bytes) -> bool:
    """What the kernel will do with a UDP packet: the same program, run here. For tests and checks.

    A load beyond the packet's end drops it, as in the kernel.
    """
    packet = bytes(UDP_HEADER_BYTES) + payload
    accumulator, at = 0, 0
    while True:
        line = lines[at]
        at += 1
        if line.code == LOAD and line.value == SOURCE:
            accumulator = int(source)
        elif line.code == LOAD:
            word = packet[line.value : line.value + 4]
            if len(word) < 4:
                return False
            accumulator = int.from_bytes(word, "big")
        elif line.code == MASK:
            accumulator &= line.value
        elif line.code == IF_EQUAL:
            at += line.if_true if accumulator == line.value else line.if_false
        else:
            return line.value != 0


def attach(connection: socket.socket, lines: Sequence[Instruction]) -> None:
    """Let the kernel apply ``lines`` to what ``connection`` receives. Raises `OSError`."""
    raw = ctypes.create_string_buffer(b"".join(line.packed() for line in lines))
    described = struct.pack("@HL", len(lines), ctypes.addressof(raw))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def make_room(connection: socket.socket) -> None:
    """Let as many datagrams wait for a busy stack as the kernel allows."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, WAITING_BYTES)
    except OSError:  # without CAP_NET_ADMIN: up to net.core.rmem_max
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WAITING_BYTES)


def empty(connection: socket.socket) -> None:
    """Throw away what came before there was a filter."""
    with contextlib.suppress(BlockingIOError):
        while True:
            connection.recv(1, socket.MSG_DONTWAIT)


@contextlib.contextmanager
def own_sockets(
    address: str,
    ports: Sequence[int],
    *,
    among: range | None = None,
    known: set[str] | None = None,
) -> Iterator[list[socket.socket]]:
    """This process's UDP sockets and TCP listeners at ``address``, whoever in it opened them.

    among: UDP sockets of any of these ports at any address instead. known: sockets to leave out,
    by what /proc calls them; those that are found are added, those that are gone removed. They are
    borrowed: closing is left to their owner.
    """
    found: list[socket.socket] = []
    seen: set[str] = set() if known is None else known
    there: set[str] = set()
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                kind = os.readlink(f"/proc/self/fd/{name}")
                there.add(kind)
                if kind.startswith("socket:") and kind not in seen:
                    copy = socket.socket(fileno=os.dup(int(name)))
                    if _is_at(copy, address, ports) if among is None else _is_among(copy, among):
                        seen.add(kind)  # a copy of ours may have got a number that is yet to come
                        found.append(copy)
                    else:
                        copy.close()
        seen &= there
        yield found
    finally:
        for copy in found:
            copy.close()


def _is_among(connection: socket.socket, ports: range) -> bool:
    if connection.family != socket.AF_INET or connection.type != socket.SOCK_DGRAM:
        return False
    return connection.getsockname()[1] in ports


def _is_at(connection: socket.socket, address: str, ports: Sequence[int]) -> bool:
    if connection.family != socket.AF_INET:
        return False
    host, port = connection.getsockname()
    if host != address or port not in ports:
        return False
    if connection.type == socket.SOCK_DGRAM:
        return True
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def dropped(address: str, port: int, table: Path = Path("/proc/net/udp")) -> int:
    """Datagrams the kernel has dropped at our UDP socket: by the filter, or for want of room."""
    packed = int.from_bytes(IPv4Address(address).packed, "little" if _little() else "big")
    local = f"{packed:08X}:{port:04X}"
    for line in table.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1] == local:
            return int(fields[-1])
    return 0


def _little() -> bool:
    return struct.pack("=H", 1) == b"\x01\x00"
