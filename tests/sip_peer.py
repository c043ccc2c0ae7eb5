"""A telephone of a few dozen lines for tests: it dials, talks and listens over real sockets.

One call at a time, G.711 µ-law, UDP on the loopback; what a network does to its packets (loss,
jitter, a clock that is off) is chosen by the test. It answers nothing but what a call needs and
checks nothing; tests do. It parses SIP just well enough for the one stack it talks to.
"""

import itertools
import os
import random
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from appliance.clock import NS_PER_S, MonotonicClock

RATE_HZ = 8_000
PACKET_SAMPLES = 160
PACKET_S = PACKET_SAMPLES / RATE_HZ
HOST = "127.0.0.1"
CLOCK = MonotonicClock()


def now_s() -> float:
    return CLOCK.now_ns() / NS_PER_S


def sleep(seconds: float) -> None:
    CLOCK.sleep_until(CLOCK.now_ns() + int(seconds * NS_PER_S))


PORTS = range(12_100, 20_000, 4)
"""Below those a kernel gives to whoever asks for any: whoever is told one of them opens it a second
later, and a test in another process would have been given it by then. Lines' RTP is elsewhere."""
_next_port = itertools.count(os.getpid() * 67)


def free_port() -> int:
    """One that nobody has now, for UDP and TCP, with the next one, which is for TLS.

    Never the same twice in a row, and not the one another process of tests is likely to be told.
    """
    for turn in _next_port:
        port = PORTS[turn % len(PORTS)]
        kinds = socket.SOCK_STREAM, socket.SOCK_DGRAM
        if not any(is_taken(port, kind) for kind in kinds) and not is_taken(port + 1):
            return port
    raise AssertionError("unreachable")


def is_taken(port: int, kind: int = socket.SOCK_STREAM, host: str = HOST) -> bool:
    """By somebody, on the loopback if no other address of this machine is given."""
    with socket.socket(socket.AF_INET, kind) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def ulaw_decode(raw: bytes) -> NDArray[np.int16]:
    """G.711 µ-law to 16 bits."""
    code = ~np.frombuffer(raw, np.uint8)
    exponent = (code >> 4) & 7
    magnitude = (((code & 15).astype(np.int32) << 3) + 132) << exponent
    value = magnitude - 132
    return np.where(code & 128, -value, value).astype(np.int16)


def ulaw_encode(pcm: NDArray[np.int16]) -> bytes:
    """16 bits to G.711 µ-law."""
    value = np.clip(np.abs(pcm.astype(np.int32)), 0, 32_635) + 132
    exponent = np.floor(np.log2(value)).astype(np.int32) - 7
    mantissa = (value >> (exponent + 3)) & 15
    sign = np.where(pcm < 0, 128, 0)
    return bytes((~(sign | (exponent << 4) | mantissa) & 255).astype(np.uint8))


@dataclass(frozen=True)
class Network:
    """What happens between the telephone and the box, one way."""

    loss: float = 0.0
    """Share of packets that never arrive."""
    jitter_s: float = 0.0
    """Packets come later by 0 to this, at random."""
    skew_ppm: float = 0.0
    """How much faster than the box's the telephone's clock runs."""
    seed: int = 1


@dataclass
class Heard:
    """What came back."""

    pcm: NDArray[np.int16]
    """In order of arrival, 8 kHz."""
    arrived_s: NDArray[np.float64]
    """Of each packet, on the monotonic clock."""
    sent: int = 0
    dropped: int = 0
    sent_s: list[float] = field(default_factory=list)
    """When each packet of ours left (or was dropped), on the same clock."""


class Refused(Exception):
    """The box said no."""

    def __init__(self, status: int, headers: str) -> None:
        super().__init__(f"{status}")
        self.status = status
        self.headers = headers


class Phone:
    """``with Phone("bot", port) as phone: phone.dial(); phone.talk(pcm); phone.hang_up()``"""

    def __init__(self, user: str, port: int, *, host: str = HOST, source: str = HOST) -> None:
        """user, port: whom to call. source: the address to call from."""
        self.user, self.box, self.source = user, (host, port), source
        self.sip = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sip.bind((source, 0))
        self.rtp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.rtp.bind((source, 0))
        self.rtp.setblocking(False)
        self.call_id = f"{random.getrandbits(64):x}@test"
        self.tag = f"{random.getrandbits(32):x}"
        self.to_tag = ""
        self.target = f"sip:{user}@{host}:{port}"
        self.routes: list[str] = []
        """Proxies that want to see every request of the dialog, nearest first."""
        self.sequence = 0
        self.media: tuple[str, int] = ("", 0)
        self.rtp_sequence = random.getrandbits(16)
        self.timestamp = random.getrandbits(31)
        self.ssrc = random.getrandbits(32)
        self.said: list[str] = []
        """Requests the box sent, whole."""
        self.refuses = ""
        """The method that is answered with 603."""
        self.accepts = ""
        """The method that is answered with 202."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sip.close()
        self.rtp.close()

    # --- signalling

    def contact(self) -> str:
        host, port = self.sip.getsockname()
        return f"{host}:{port}"

    def sdp(self, *, direction: str = "sendrecv", payloads: str = "0 101") -> str:
        rtpmap = {"0": "PCMU/8000", "8": "PCMA/8000", "9": "G722/8000"}
        lines = [f"a=rtpmap:{p} {rtpmap.get(p, 'telephone-event/8000')}" for p in payloads.split()]
        return "\r\n".join(
            [
                "v=0",
                f"o=- 1 {self.sequence + 1} IN IP4 {self.source}",
                "s=-",
                f"c=IN IP4 {self.source}",
                "t=0 0",
                f"m=audio {self.rtp.getsockname()[1]} RTP/AVP {payloads}",
                *lines,
                f"a={direction}",
                "",
            ]
        )

    def request(
        self, method: str, body: str = "", *, branch: str = "", sequence: int = 0, extra: str = ""
    ) -> bytes:
        """One request of this call's dialog, as bytes."""
        number = sequence or self.sequence
        address = self.contact()
        tag = f";tag={self.to_tag}" if self.to_tag else ""
        routes = "".join(f"Route: {route}\r\n" for route in self.routes)
        kind = "Content-Type: application/sdp\r\n" if body and "Content-Type" not in extra else ""
        return (
            f"{method} {self.target} SIP/2.0\r\n"
            f"Via: SIP/2.0/UDP {address};branch={branch or self.branch(method, number)}\r\n"
            f'From: "Test" <sip:phone@{address}>;tag={self.tag}\r\n'
            f"To: <sip:{self.user}@{self.box[0]}:{self.box[1]}>{tag}\r\n"
            f"Call-ID: {self.call_id}\r\nCSeq: {number} {method}\r\n"
            f"{routes}Contact: <sip:phone@{address}>\r\nMax-Forwards: 70\r\n{extra}{kind}"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def branch(self, method: str, number: int) -> str:
        return f"z9hG4bK{self.tag}{number}{method}"

    def send(self, raw: bytes) -> None:
        self.sip.sendto(raw, self.box)

    def answer(self, method: str, *, timeout_s: float = 5.0, least: int = 200) -> tuple[int, str]:
        """The final answer to ``method``: (status, the whole message).

        Requests of the box meanwhile are answered with 200 and noted in `said`.
        """
        until = now_s() + timeout_s
        while (left := until - now_s()) > 0:
            self.sip.settimeout(left)
            try:
                text = self.sip.recv(65_536).decode(errors="replace")
            except TimeoutError:
                break
            if not text.startswith("SIP/2.0"):
                self.respond(text)
                continue
            status = int(text[8:11])
            if re.search(rf"^CSeq: *\d+ {method}\r$", text, re.M) and status >= least:
                return status, text
        raise TimeoutError(f"no answer to {method} within {timeout_s} s")

    def respond(self, text: str, status: str = "200 OK") -> None:
        """Answer a request of the box."""
        self.said.append(text)
        if self.refuses and text.startswith(self.refuses):
            status = "603 Decline"
        elif self.accepts and text.startswith(self.accepts):
            status = "202 Accepted"
        if text.startswith("ACK"):
            return
        kept = [x for x in text.split("\r\n") if re.match(r"(Via|From|To|Call-ID|CSeq):", x)]
        contact = f"Contact: <sip:phone@{self.contact()}>"
        body = self.sdp() if text.startswith("INVITE") else ""
        kind = ["Content-Type: application/sdp"] if body else []
        head = [f"SIP/2.0 {status}", *kept, contact, *kind, f"Content-Length: {len(body)}"]
        self.send(("\r\n".join(head) + "\r\n\r\n" + body).encode())

    def listen(self, seconds: float) -> list[str]:
        """Answer what the box asks for a while; what that was."""
        before = len(self.said)
        until = now_s() + seconds
        while (left := until - now_s()) > 0:
            self.sip.settimeout(left)
            try:
                text = self.sip.recv(65_536).decode(errors="replace")
            except TimeoutError:
                break
            if not text.startswith("SIP/2.0"):
                self.respond(text)
        return self.said[before:]

    def invite(self, body: str = "", **request: str) -> tuple[int, str]:
        """INVITE or re-INVITE, with its ACK; the final answer. Raises `Refused`."""
        self.sequence += 1
        self.send(self.request("INVITE", body or self.sdp(), extra=request.get("extra", "")))
        status, text = self.answer("INVITE", timeout_s=15.0)
        if found := re.search(r"^To:.*;tag=([^;\r]+)", text, re.M):
            self.to_tag = found[1]
        if status < 300:
            contact = re.search(r"^Contact: *<([^>]+)>", text, re.M)
            self.target = contact[1] if contact else self.target
            recorded = ", ".join(re.findall(r"^Record-Route: *(.+?)\r", text, re.M))
            self.routes = [r.strip() for r in recorded.split(",") if r.strip()][::-1]
        branch = self.branch("INVITE", self.sequence) if status >= 300 else ""
        self.send(self.request("ACK", branch=branch))
        if status >= 300:
            raise Refused(status, text)
        addresses = re.findall(r"^c=IN IP4 (\S+)", text, re.M)
        port = re.search(r"^m=audio (\d+)", text, re.M)
        assert port is not None
        self.media = (addresses[-1], int(port[1]))  # the audio's own comes after the session's
        return status, text

    dial = invite

    def hang_up(self) -> int:
        self.sequence += 1
        self.send(self.request("BYE"))
        return self.answer("BYE")[0]

    # --- media

    def packet(
        self, payload: bytes, kind: int = 0, *, marker: bool = False, step: int = 0
    ) -> bytes:
        head = struct.pack(
            "!BBHII",
            0x80,
            kind | (0x80 if marker else 0),
            self.rtp_sequence,
            self.timestamp,
            self.ssrc,
        )
        self.rtp_sequence = (self.rtp_sequence + 1) & 0xFFFF
        self.timestamp = (self.timestamp + step) & 0xFFFFFFFF
        return head + payload

    def digit(self, digit: str, kind: int = 101, *, marker: bool = True) -> None:
        """One key, as RFC 4733 telephone-events of 100 ms."""
        code = "0123456789*#ABCD".index(digit)
        for number, ended in enumerate([0, 0, 0, 1, 1, 1]):
            length = min(number + 1, 4) * PACKET_SAMPLES
            event = struct.pack("!BBH", code, 0x8A if ended else 0x0A, length)
            raw = self.packet(event, kind, marker=marker and number == 0)
            self.rtp.sendto(raw, self.media)
            sleep(PACKET_S)
        self.timestamp += 6 * PACKET_SAMPLES

    def talk(self, pcm: NDArray[np.int16], network: Network | None = None) -> Heard:
        """Say ``pcm`` at its pace and return what was heard meanwhile."""
        net = network or Network()
        chance = random.Random(net.seed)
        payload = ulaw_encode(pcm)
        period_s = PACKET_S / (1 + net.skew_ppm / 1e6)
        chunks = [
            payload[at : at + PACKET_SAMPLES] for at in range(0, len(payload), PACKET_SAMPLES)
        ]
        start = now_s()
        queue = []
        heard = Heard(np.zeros(0, np.int16), np.zeros(0))
        for number, chunk in enumerate(chunks):
            raw = self.packet(chunk, step=PACKET_SAMPLES)
            due = start + number * period_s
            heard.sent_s.append(due)
            if chance.random() < net.loss:
                heard.dropped += 1
                continue
            queue.append((due + chance.random() * net.jitter_s, raw))
        queue.sort()
        heard.sent = len(queue)
        got: list[tuple[float, bytes]] = []
        end = start + len(chunks) * period_s
        at = 0
        while (now := now_s()) < end:
            while at < len(queue) and queue[at][0] <= now:
                self.rtp.sendto(queue[at][1], self.media)
                at += 1
            self._receive(got)
            wake = queue[at][0] if at < len(queue) else end
            sleep(max(0.0, min(wake, end, now + 0.002) - now_s()))
        heard.pcm = ulaw_decode(b"".join(raw[12:] for _, raw in got))
        heard.arrived_s = np.array([s for s, _ in got])
        return heard

    def _receive(self, got: list[tuple[float, bytes]]) -> None:
        while True:
            try:
                raw = self.rtp.recv(2_048)
            except BlockingIOError:
                return
            if raw[1] & 0x7F == 0:
                got.append((now_s(), raw))
