"""The RTP of a run as it was on the wire: how long after one another a call's packets left.

`tcpdump` on the loopback, stamped by the kernel, so that no program's own clock is believed.

    apt-get install --no-install-recommends tcpdump
"""

import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.sip_debian import program
from tests.sip_peer import now_s, sleep

KEPT_BYTES = 64
"""Of each packet: Ethernet, IP, UDP and RTP headers."""
RECORD = np.dtype(
    [
        ("second", "<u4"),
        ("microsecond", "<u4"),
        ("kept", "<u4"),
        ("length", "<u4"),
        ("head", "V34"),
        ("from_port", ">u2"),
        ("to_port", ">u2"),
        ("rest", f"V{KEPT_BYTES - 38}"),
    ]
)
"""One packet in a capture file whose packets are all longer than `KEPT_BYTES`."""


class Capture:
    """What was caught; to be read once it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def gaps_ms(self) -> dict[int, NDArray[np.float64]]:
        """By the port the packets left from: times between them, in order."""
        raw = self.path.read_bytes()
        assert struct.unpack_from("<I", raw)[0] == 0xA1B2C3D4, "not a capture of microseconds"
        packets = np.frombuffer(raw, RECORD, offset=24, count=(len(raw) - 24) // RECORD.itemsize)
        assert (packets["kept"] == KEPT_BYTES).all(), "a packet shorter than RTP's"
        at_us = packets["second"].astype(np.int64) * 1_000_000 + packets["microsecond"]
        return {
            int(port): np.diff(at_us[packets["from_port"] == port]) / 1000
            for port in np.unique(packets["from_port"])
        }


@contextmanager
def capture(folder: Path, ports: tuple[int, int]) -> Iterator[Capture]:
    """Catch audio that leaves from ``ports`` while the block runs: even ones, as RTP's are."""
    path = folder / "rtp.pcap"
    wanted = f"udp and src portrange {ports[0]}-{ports[1]} and greater {KEPT_BYTES}"
    wanted += " and udp[1:1] & 1 == 0"
    command = [program("tcpdump"), "-i", "lo", "-n", "-B", "16384", "-s", str(KEPT_BYTES)]
    with (folder / "tcpdump.log").open("wb") as log:
        process = subprocess.Popen([*command, "-w", str(path), "-U", wanted], stderr=log)
    until = now_s() + 10
    while b"listening on" not in (folder / "tcpdump.log").read_bytes():
        assert process.poll() is None, (folder / "tcpdump.log").read_text()
        assert now_s() < until
        sleep(0.05)
    try:
        yield Capture(path)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    said = (folder / "tcpdump.log").read_text()
    assert "\n0 packets dropped by kernel" in said, said
