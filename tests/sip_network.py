"""Computers, routers and cables for tests of the telephone line: the kernel's, none of them real.

    apt-get install --no-install-recommends iproute2 nftables

A host is a network namespace, a cable a pair of interfaces, a router forwards and translates
addresses as Linux does in most that are sold. They have no names and end with the test, also one
that is killed. A cable on which packets are lost and late goes through a thread of ours instead:
`tc netem` is a module that many kernels lack. Needs root, for namespaces.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import pytest

from tests.sip_debian import program
from tests.sip_peer import Network, now_s

MISSING = "apt-get install --no-install-recommends iproute2 nftables"

CLONE_NEWNET = 0x4000_0000
TUNSETIFF = 0x4004_54CA
TAP = 0x0002 | 0x1000
"""IFF_TAP | IFF_NO_PI: whole Ethernet frames and nothing else."""
FRAME_BYTES = 2_048
AUDIO_BYTES = 256
"""Longer frames are signalling, which the test's telephone does not send again: never lost here."""

BINDING_REQUEST, BINDING_ANSWER = 0x0001, 0x0101
MAGIC = 0x2112_A442
XOR_MAPPED_ADDRESS = 0x0020

_kernel = ctypes.CDLL(None, use_errno=True)


def _here() -> int:
    """The network this thread is in, as a descriptor."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        if code == 1:
            pytest.fail("network namespaces need root: sudo make test-lines")
        raise OSError(code, os.strerror(code))


class Host:
    """A computer as far as the network goes. ``with host.inside():`` this thread, and what it
    starts and opens meanwhile, are on it."""

    def __init__(self) -> None:
        home = _here()
        try:
            _check(_kernel.unshare(CLONE_NEWNET))
            self._network = _here()
        finally:
            _check(_kernel.setns(home, CLONE_NEWNET))
            os.close(home)
        self.path = f"/proc/{os.getpid()}/fd/{self._network}"
        self.ip("link set lo up")

    def close(self) -> None:
        os.close(self._network)

    @contextmanager
    def inside(self) -> Iterator[Self]:
        home = _here()
        _check(_kernel.setns(self._network, CLONE_NEWNET))
        try:
            yield self
        finally:
            _check(_kernel.setns(home, CLONE_NEWNET))
            os.close(home)

    def run(self, command: list[str], text: str = "") -> str:
        """On it, to its end; what it printed."""
        with self.inside():
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{command}: {done.stderr}"
        return done.stdout

    def ip(self, command: str) -> str:
        return self.run([_program("ip"), *command.split()])

    def nft(self, rules: str) -> str:
        return self.run([_program("nft"), "-f", "-"], rules)


def _program(name: str) -> str:
    try:
        return program(name)
    except pytest.fail.Exception:
        pytest.fail(f"{name} is not installed: {MISSING}")


OUTSIDE = "198.51.100.{}/24"
"""Addresses that everybody reaches."""

ROUTER = """table ip router {{
  chain forward {{
    type filter hook forward priority 0; policy accept;
    iifname "eth0" ct state new drop
  }}
  chain input {{
    type filter hook input priority 0; policy accept;
    iifname "eth0" ct state new drop
  }}
  chain out {{
    type nat hook postrouting priority 100;
    oifname "eth0" masquerade {how}
  }}
}}
"""
"""What comes from outside unasked is dropped, as in any router that is sold."""


class Street:
    """``with Street() as street: box = street.host(5)``: a switch, and hosts that are cabled to it.

    Its addresses are `OUTSIDE`; the way to all others leads to number 1, which forwards nothing.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cables = 0
        self._switch = Host()

    def __enter__(self) -> Self:
        self._stack.callback(self._switch.close)
        self._switch.ip("link add street type bridge")
        self._switch.ip("link set street up")
        self._switch.ip(f"address add {OUTSIDE.format(1)} dev street")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, number: int, network: Network | None = None) -> "Wired":
        """One with the address of that ``number``. network: what its cable does, both ways."""
        host = self._new()
        return self._wire(host, self._switch, "eth0", OUTSIDE.format(number), network)

    def router(self, number: int, inside: str, how: str = "") -> tuple["Wired", "Wired"]:
        """One with that ``number`` outside, and a host behind it with the address ``inside``.

        how: of nft's masquerade; "fully-random" gives every peer another port. The cables: the
        router's to the street, and the host's to the router.
        """
        router, host = self._new(), self._new()
        with router.inside(), open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
            forward.write("1")
        outer = self._wire(router, self._switch, "eth0", OUTSIDE.format(number), None)
        first = inside.rpartition(".")[0] + ".1"
        inner = self._wire(host, router, "eth0", f"{inside}/24", None)
        router.ip(f"address add {first}/24 dev {inner.far_name}")
        host.ip(f"route add default via {first}")
        router.nft(ROUTER.format(how=how))
        return outer, inner

    def _new(self) -> Host:
        host = Host()
        self._stack.callback(host.close)
        return host

    def _wire(
        self, near: Host, far: Host, name: str, address: str, network: Network | None
    ) -> "Wired":
        self._cables += 1
        far_name = f"port{self._cables}"
        if network is None:
            near.ip(f"link add {name} type veth peer name {far_name} netns {far.path}")
        else:
            self._stack.enter_context(bad_cable(near, name, far, far_name, network))
        near.ip(f"address add {address} dev {name}")
        near.ip(f"link set {name} up")
        far.ip(f"link set {far_name} up")
        if far is self._switch:
            far.ip(f"link set {far_name} master street")
            near.ip("route add default via " + OUTSIDE.format(1).partition("/")[0])
        return Wired(near, address.partition("/")[0], far, far_name)


@dataclass(frozen=True)
class Wired:
    """A host with its cable."""

    host: Host
    address: str
    _far: Host
    far_name: str

    def unplug(self) -> None:
        """The other end goes: this one sees that there is no carrier, and keeps its routes."""
        self._far.ip(f"link set {self.far_name} down")

    def plug(self) -> None:
        self._far.ip(f"link set {self.far_name} up")


# --- a cable that loses


@contextmanager
def bad_cable(
    near: Host, near_name: str, far: Host, far_name: str, network: Network
) -> Iterator[None]:
    """Two interfaces, and a thread that carries each frame over as ``network`` says."""
    ends = []
    for host, name in ((near, near_name), (far, far_name)):
        with host.inside():
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP))
        ends.append(end)
    stop, stopped = os.pipe()
    thread = threading.Thread(target=_carry, args=(ends, stop, network))
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join()
        for descriptor in (*ends, stop):
            os.close(descriptor)


def _carry(ends: list[int], stop: int, network: Network) -> None:
    chance = random.Random(network.seed)
    waiting: list[tuple[float, int, int, bytes]] = []
    frames = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - now_s()) if waiting else None
        ready, _, _ = select.select([*ends, stop], [], [], wait_s)
        if stop in ready:
            return
        for end in ready:
            raw = os.read(end, FRAME_BYTES)
            frames += 1
            if len(raw) > AUDIO_BYTES or chance.random() >= network.loss:
                due_s = now_s() + chance.random() * network.jitter_s
                other = ends[end == ends[0]]
                heapq.heappush(waiting, (due_s, frames, other, raw))
        while waiting and waiting[0][0] <= now_s():
            _, _, end, raw = heapq.heappop(waiting)
            os.write(end, raw)


# --- who says what our address is


class Stun:
    """``with host.inside(), Stun(address) as stun:`` a server of RFC 5389 that knows one answer."""

    def __init__(self, address: str, port: int = 3478) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, port))
        self._socket.settimeout(0.05)
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self.asked: list[tuple[str, int]] = []
        """By whom."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._socket.close()

    def fall_silent(self) -> None:
        """It goes on to listen."""
        self._stop = True

    def _run(self) -> None:
        while not self._stop:
            try:
                raw, sender = self._socket.recvfrom(2_048)
            except TimeoutError:
                continue
            kind, _, magic = struct.unpack_from("!HHI", raw)
            if kind != BINDING_REQUEST or magic != MAGIC:
                continue
            self.asked.append(sender)
            address = int.from_bytes(socket.inet_aton(sender[0]), "big") ^ MAGIC
            mapped = struct.pack("!BBHI", 0, 1, sender[1] ^ MAGIC >> 16, address)
            attribute = struct.pack("!HH", XOR_MAPPED_ADDRESS, len(mapped)) + mapped
            head = struct.pack("!HH", BINDING_ANSWER, len(attribute)) + raw[4:20]
            self._socket.sendto(head + attribute, sender)
