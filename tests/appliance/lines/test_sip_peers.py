"""The telephone line with real peers from Debian; run by `make test-lines`."""

import dataclasses
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray

from appliance.admission import Reason
from tests.appliance.lines.test_audiosocket import ended
from tests.appliance.lines.test_audiosocket import line as bridge
from tests.appliance.lines.test_sip import ROOT, Line, line, speech, ticks
from tests.fakes_line import FakeBox, FakeSession, Trouble
from tests.sip_asterisk import asterisk
from tests.sip_capture import capture
from tests.sip_debian import baresip, certificate, kamailio, sipp
from tests.sip_peer import Network, Phone, Refused, now_s, sleep

pytestmark = [pytest.mark.peers, pytest.mark.clock]


class HearingBox(FakeBox):
    """Keeps what its model heard."""

    def __init__(self, folder: Path, trouble: Trouble | None = None) -> None:
        super().__init__(folder, trouble)
        self.heard: dict[int, list[NDArray[np.float32]]] = {}

    def _step(self, session: FakeSession, tick: int) -> None:
        before = session.frame_index
        super()._step(session, tick)
        if session.frame_index > before:
            self.heard.setdefault(session.number, []).append(session.before)


def snr_db(
    said: NDArray[np.float32], heard: NDArray[np.float32], rate_hz: int
) -> tuple[float, float]:
    """Of the best half second, and the delay there in ms; through the filter that fits best."""
    best = (-np.inf, 0.0)
    length, taps = rate_hz // 2, 32
    for start in range(rate_hz, said.size - 2 * rate_hz, rate_hz // 2):
        middle = said[start : start + length].astype(np.float64)
        if np.sqrt(np.mean(middle**2)) < 0.01:
            continue
        where = heard[start : start + length + rate_hz].astype(np.float64)
        if where.size < length:
            continue
        size = 1 << (where.size + length).bit_length()
        likeness = np.fft.irfft(np.fft.rfft(where, size) * np.conj(np.fft.rfft(middle, size)), size)
        at = int(np.argmax(likeness[: where.size - length + 1]))
        found = where[at : at + length]
        rows = [said[start - k : start - k + length] for k in range(-taps, taps + 1)]
        filters = np.stack(rows, 1).astype(np.float64)
        fitted = filters @ np.linalg.lstsq(filters, found, rcond=None)[0]
        rest = found - fitted
        quality = 10 * np.log10((fitted @ fitted) / (rest @ rest + 1e-12))
        best = max(best, (float(quality), 1000 * at / rate_hz))
    return best


CODECS = [
    ("pcmu", 8_000, 35.0),
    ("pcma", 8_000, 35.0),
    ("g722/16000/1", 16_000, 20.0),
    ("opus/48000/2", 48_000, 10.0),
]
"""With what the codec itself leaves of a voice; the two lossy ones keep no waveform."""


@pytest.mark.parametrize(("codec", "rate_hz", "least_db"), CODECS)
def test_debian_baresip_talks_and_hears_in_every_codec(
    tmp_path: Path, codec: str, rate_hz: int, least_db: float
) -> None:
    voice = (speech(8.0) / 32_768).astype(np.float32)
    wave = soxr.resample(voice, 8_000, rate_hz).astype(np.float32)
    with HearingBox(tmp_path) as box, line(tmp_path, box.path) as running:
        heard, heard_hz = baresip(tmp_path / "b", running.port, codec, wave, rate_hz, 9)
        running.wait("call 1 over")
    model = np.concatenate(box.heard[1])
    said = soxr.resample(voice, 8_000, 24_000).astype(np.float32)
    to_model = snr_db(said, model, 24_000)
    back = snr_db(soxr.resample(voice, 8_000, heard_hz).astype(np.float32), heard, heard_hz)
    (row,) = running.rows()
    print_figures(f"baresip {codec}", to_model=to_model, back=back, row=row)
    assert to_model[0] > least_db
    assert back[0] > least_db - 5
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)
    assert row.whole >= row.frames - 2


def print_figures(name: str, **figures: object) -> None:
    """For whoever reads the run: `pytest -s`."""
    sys.stderr.write(f"\n{name}: {figures}\n")


IMPAIRED = [
    Network(loss=0.05),
    Network(jitter_s=0.06),
    Network(skew_ppm=300),
    Network(skew_ppm=-300),
    Network(loss=0.05, jitter_s=0.06, skew_ppm=300),
    Network(loss=0.05, jitter_s=0.06, skew_ppm=-300),
]


@pytest.mark.parametrize("network", IMPAIRED, ids=str)
def test_a_bad_network_shrinks_nothing_and_the_delay_stays_bounded(
    tmp_path: Path, network: Network
) -> None:
    seconds = float(os.environ.get("DUPLEXBOX_IMPAIRED_S", "20"))
    said = speech(seconds)
    with (
        HearingBox(tmp_path) as box,
        line(tmp_path, box.path) as running,
        Phone("bot", running.port) as phone,
    ):
        phone.dial()
        phone.talk(said, network)
        phone.hang_up()
        running.wait("call 1 over")
    (row,) = running.rows()
    model = np.concatenate(box.heard[1])
    delays = delays_ms(said, model, network.skew_ppm)
    print_figures(f"{network}", delays=(delays.min(), np.median(delays), delays.max()), row=row)
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)
    assert abs(np.median(delays[-5:]) - np.median(delays[:5])) < 120
    # Against the soonest: when the telephone began to talk is not known to the model. A second
    # may be found in the wrong place, since a vowel is much like itself; most are not.
    assert np.percentile(delays, 75) - np.percentile(delays, 5) < 200


def delays_ms(
    said: NDArray[np.int16], model: NDArray[np.float32], skew_ppm: float
) -> NDArray[np.float64]:
    """How much later than it was said each second is heard, first to last."""
    rate_hz = 8_000
    heard = soxr.resample(model, 24_000, rate_hz).astype(np.float64)
    found = []
    for start in range(rate_hz, said.size - 2 * rate_hz, rate_hz):
        middle = said[start : start + rate_hz // 2].astype(np.float64)
        where = heard[start : start + rate_hz // 2 + rate_hz]
        likeness = np.correlate(where, middle, "valid")
        lag = int(np.argmax(likeness))
        found.append(1000 * lag / rate_hz + start / rate_hz * skew_ppm / 1000)
    return np.array(found)


# --- many calls


@contextmanager
def stub_box(folder: Path, slots: int) -> Iterator[Path]:
    """A real box with an echo for a model; its socket."""
    with (folder / "box.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stub_box", str(folder), str(slots)], cwd=ROOT, stderr=log
        )
    try:
        until = now_s() + 30
        while b"ready" not in (folder / "box.log").read_bytes():
            assert process.poll() is None
            assert now_s() < until
            sleep(0.05)
        yield folder / "box.sock"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@dataclasses.dataclass(frozen=True)
class Used:
    """What a process has."""

    cpu_s: float
    rss_kb: int
    descriptors: int


def used(pid: int) -> Used:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    rss = status.partition("VmRSS:")[2].split()[0]
    open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Used((int(fields[11]) + int(fields[12])) / 100, int(rss), open_now)


def test_sipp_many_calls_at_once(tmp_path: Path) -> None:
    """100 calls of 60 s; DUPLEXBOX_CALLS and DUPLEXBOX_CALL_S are for smaller machines."""
    calls = int(os.environ.get("DUPLEXBOX_CALLS", "100"))
    seconds = float(os.environ.get("DUPLEXBOX_CALL_S", "60"))
    extra = f"calls_per_s = 1000\nmost = {calls}\nrtp_ports = [10000, 12000]"
    with stub_box(tmp_path, calls) as socket, line(tmp_path, socket, extra) as running:
        before = used(running.worker())
        with capture(tmp_path, (10_000, 12_000)) as caught:
            code, screen = sipp(
                tmp_path, running.port, calls, seconds, rate=10, voice=speech(seconds + 1)
            )
        after = used(running.worker())
        assert code == 0, screen
        until = now_s() + 20
        while not all(row.ended for row in running.rows()):
            assert now_s() < until
            sleep(0.1)
    rows = running.rows()
    off = [abs(ticks(row) - row.talked_ms / 80) for row in rows]
    overslept = sum(ticks(row) - row.frames for row in rows)
    gaps = caught.gaps_ms()
    every = np.concatenate(list(gaps.values()))
    share = (after.cpu_s - before.cpu_s) / (seconds * calls) * 50
    print_figures(
        f"{calls} calls of {seconds:g} s",
        cpu_of_one_core_per_50_calls=round(share, 3),
        gaps_ms={q: round(float(np.percentile(every, q)), 2) for q in (50, 99, 99.9, 100)},
        worst_call_p99_9_ms=round(max(float(np.percentile(g, 99.9)) for g in gaps.values()), 2),
        mean_gap_ms=round(float(every.mean()), 4),
        talked_ms=(min(row.talked_ms for row in rows), max(row.talked_ms for row in rows)),
        ends=dict(Counter(row.why for row in rows)),
        rss_mb=round(after.rss_kb / 1000),
        frames_off=max(off),
        ticks_overslept=overslept,
        delivered=sum(row.delivered for row in rows),
        not_delivered=sum(row.late + row.filled + row.discarded for row in rows),
        underruns=sum(row.underruns for row in rows),
        concealed_ms=sum(row.concealed_ms for row in rows),
    )
    assert len(rows) == calls
    assert {row.why for row in rows} == {"the caller hung up"}
    assert len(gaps) == calls
    assert np.percentile(every, 99.9) <= 25
    assert max(off) <= 1.125  # a frame, and the 10 ms at which calls are looked after
    assert all(row.rx_packets > seconds * 45 for row in rows)
    assert all(row.tx_packets > seconds * 45 for row in rows)


def test_sipp_thousands_of_short_calls_leave_nothing_behind(tmp_path: Path) -> None:
    """5,000 calls; DUPLEXBOX_CHURN is for smaller machines."""
    calls = int(os.environ.get("DUPLEXBOX_CHURN", "5000"))
    extra = "calls_per_s = 1000\nmost = 60"
    with stub_box(tmp_path, 60) as socket, line(tmp_path, socket, extra) as running:
        code, screen = sipp(tmp_path, running.port, calls // 5, 0.2, rate=40, at_once=50)
        assert code == 0, screen
        sleep(3)
        settled = used(running.worker())
        code, screen = sipp(tmp_path, running.port, calls - calls // 5, 0.2, rate=40, at_once=50)
        assert code == 0, screen
        sleep(3)
        after = used(running.worker())
    rows = running.rows()
    left = [row for row in rows if row.why.startswith("no audio")]
    print_figures(f"{calls} short calls", settled=settled, after=after, bye_missing=len(left))
    assert not left
    assert len(running.rows()) == calls
    assert after.descriptors <= settled.descriptors + 2
    assert after.rss_kb < settled.rss_kb * 1.25


def test_sipp_with_a_third_of_all_messages_lost_leaves_no_ghost(tmp_path: Path) -> None:
    """INVITE, answers, ACK and BYE alike, sent again until they arrive: each call ends as it was
    told to, and the box knows of no other."""
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, "calls_per_s = 1000\nmost = 60") as running,
    ):
        code, screen = sipp(tmp_path, running.port, 60, 1.0, rate=10, lost=33)
        until = now_s() + 40
        while not all(row.ended for row in running.rows()):
            assert now_s() < until
            sleep(0.1)
        rows = running.rows()
    print_figures("a third lost", code=code, ends=sorted({row.why for row in rows}))
    assert len(rows) == len(box.sessions) <= 60, screen
    assert all(session.gone == "left" for session in box.sessions)
    # One whose BYE got lost ten times in a row, or whose INVITE did, is SIPp's to count as failed.
    assert sum(row.why == "the caller hung up" for row in rows) >= 57


def test_an_answer_that_is_never_confirmed_ends_after_half_a_minute(tmp_path: Path) -> None:
    """RFC 3261 has the answer repeated for 64 x T1, and then the call ended with BYE."""
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as running:
        with Phone("bot", running.port) as phone:
            phone.sequence = 1
            phone.send(phone.request("INVITE", phone.sdp()))
            _, text = phone.answer("INVITE")
            began = now_s()
            answers = 1
            while not box.sessions[0].gone:
                assert now_s() < began + 40
                try:
                    _, again = phone.answer("INVITE", timeout_s=1.0)
                except TimeoutError:
                    continue
                answers += 1
                assert tag(again) == tag(text)
            assert [said.partition(" ")[0] for said in phone.said] == ["BYE"]
        running.wait("call 1 over")
    print_figures("no ACK", answers=answers, seconds=now_s() - began)
    assert answers >= 10
    (row,) = running.rows()
    assert row.why == "the caller never confirmed that the call was answered"
    assert row.talked_ms == 0


def tag(text: str) -> str:
    found = re.search(r"^To:.*;tag=([^;\r]+)", text, re.M)
    assert found is not None
    return found[1]


# --- what is no telephone


def torture(phone: Phone) -> list[bytes]:
    """Messages of the kinds RFC 4475 collects: some legal and odd, most not."""
    body = phone.sdp()
    invite = phone.request("INVITE", body, sequence=1)
    head, _, _ = invite.partition(b"\r\n\r\n")
    odd = [
        invite.replace(b"INVITE sip", b"INVITE  sip", 1),
        invite.replace(b"SIP/2.0\r\n", b"SIP/7.0\r\n", 1),
        invite.replace(b"CSeq: 1 INVITE", b"CSeq: 36893488147419103232 INVITE"),
        invite.replace(b"CSeq: 1 INVITE", b"CSeq: 1 REGISTER"),
        invite.replace(b"Max-Forwards: 70", b"Max-Forwards: 300"),
        invite.replace(b"Max-Forwards: 70", b"Max-Forwards: 0"),
        invite.replace(b"Content-Length: ", b"Content-Length: -"),
        invite.replace(b"Content-Length: ", b"Content-Length: 9999"),
        invite.replace(b"Call-ID: ", b"Call-ID: x\r\nCall-ID: "),
        invite.replace(b"From: ", b"From: \x00\xff\xfe"),
        invite.replace(b'"Test"', b'"Te\\"st'),
        invite.replace(b'"Test"', b'"' + b"A" * 20_000 + b'"'),
        invite.replace(b"Via: ", b"Via: " + b"SIP/2.0/UDP a;branch=b, " * 500),
        invite.replace(b"To: <", b"To: <<<<<"),
        invite.replace(b"tag=", b"tag=%00%ff"),
        invite.replace(b"sip:bot", b"sip:%62%6f%74"),
        invite.replace(b"sip:bot", b"sips:bot"),
        invite.replace(b"sip:bot", b"http://bot"),
        invite.replace(b"\r\n", b"\n"),
        invite.replace(b"\r\n", b"\r\n\t "),
        invite.replace(b"m=audio", b"m=" + b"9" * 5_000),
        invite.replace(b"RTP/AVP 0", b"RTP/AVP " + b"0 " * 3_000),
        invite.replace(b"c=IN IP4 127.0.0.1", b"c=IN IP4 999.999.1.1"),
        invite.replace(b"c=IN IP4 127.0.0.1", b"c=IN IP6 ::%lo"),
        head,
        b"\r\n\r\n",
        b"\0" * 1_400,
        b"SIP/2.0 200 OK\r\n\r\n",
        b"SIP/2.0 4294967301 better not break the receiver\r\n\r\n",
    ]
    for method in ("NOTIFY", "SUBSCRIBE", "MESSAGE", "INFO", "REFER", "PRACK", "PUBLISH", "!#$%&"):
        odd.append(phone.request(method, sequence=1, extra="Refer-To: <sip:x@127.0.0.1:9>\r\n"))
    return odd


def test_torture_and_mutated_packets_cost_a_call_in_progress_nothing(tmp_path: Path) -> None:
    """100,000 packets; DUPLEXBOX_PACKETS is for smaller machines."""
    packets = int(os.environ.get("DUPLEXBOX_PACKETS", "100000"))
    chance = random.Random(4475)
    with ExitStack() as stack:
        box = stack.enter_context(FakeBox(tmp_path))
        running = stack.enter_context(line(tmp_path, box.path, "calls_per_s = 5"))
        phone = stack.enter_context(Phone("bot", running.port))
        stranger = stack.enter_context(Phone("bot", running.port, source="127.0.0.7"))
        phone.dial()
        worker = running.worker()
        seeds = [*torture(stranger), stranger.request("INVITE", stranger.sdp(), sequence=1)]
        sent = 0
        missed = 0
        while sent < packets:
            for _ in range(2_000):
                raw = bytearray(chance.choice(seeds))
                for _ in range(chance.choice((0, 1, 3, 30))):
                    at = chance.randrange(len(raw))
                    raw[at] = chance.randrange(256)
                if chance.random() < 0.2:
                    raw = raw[: chance.randrange(1, len(raw) + 1)]
                stranger.send(bytes(raw[:60_000]))
                sent += 1
            heard = phone.talk(speech(1.0))
            missed += 50 - min(50, heard.arrived_s.size)
        assert running.worker() == worker
        assert phone.hang_up() == 200
        with Phone("bot", running.port) as other:  # and it still takes calls
            other.dial()
            other.hang_up()
        until = now_s() + 60
        while not all(session.gone for session in box.sessions):
            assert now_s() < until
            sleep(0.1)
    print_figures("torture", sent=sent, rtp_missed=missed, sessions=len(box.sessions))
    assert missed <= packets // 2_000  # one a second, at the seams of `talk`


# --- Kamailio

MODULES = "".join(
    f'loadmodule "{name}.so"\n' for name in ("tm", "sl", "rr", "pv", "textops", "siputils")
)

REGISTRAR = (
    MODULES
    + """loadmodule "usrloc.so"
loadmodule "registrar.so"
loadmodule "auth.so"
request_route {
  if (is_method("REGISTER")) {
    if (!pv_www_authenticate("duplex", "s3cret", "0")) { www_challenge("duplex", "0"); exit; }
    save("location"); exit;
  }
  if (has_totag()) {
    if (loose_route()) { t_relay(); } else if (is_method("ACK") && t_check_trans()) { t_relay(); }
    exit;
  }
  record_route();
  if (!lookup("location")) { sl_send_reply("404", "Not Found"); exit; }
  t_relay();
}
"""
)


def test_it_logs_in_at_kamailio_with_a_password_and_is_called_through_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    with kamailio(tmp_path, REGISTRAR) as proxy, FakeBox(tmp_path) as box:
        account = f'domain = "127.0.0.1:{proxy}"\nregister = true\npassword_file = "{secret}"'
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is registered")
            with Phone("bot", proxy) as phone:
                phone.dial()
                assert phone.talk(speech(1.0)).arrived_s.size > 40
                assert phone.hang_up() == 200
            running.wait("call 1 over")
            secret.write_text("wrong\n")
    assert running.rows()[0].talked_ms > 900


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_it_logs_in_and_is_called_over_a_connection(tmp_path: Path, transport: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    keys = certificate(tmp_path / "keys")
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, FakeBox(tmp_path) as box:
        port = proxy + (transport == "tls")
        account = (
            f'domain = "127.0.0.1:{port}"\nregister = true\npassword_file = "{secret}"\n'
            f'transport = "{transport}"'
        )
        trust = f'tls_ca = "{keys}/authority.pem"'
        with line(tmp_path, box.path, trust, account) as running:
            running.wait("account bot is registered")
            with Phone("bot", proxy) as phone:
                phone.dial()
                assert phone.talk(speech(1.0)).arrived_s.size > 40
                assert phone.hang_up() == 200
            running.wait("call 1 over")
    assert running.rows()[0].talked_ms > 900


def test_encrypted_audio_over_tls_and_none_of_what_is_not(tmp_path: Path) -> None:
    """SDES: Debian's baresip calls through Kamailio, which hands the call on over TLS."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    keys = certificate(tmp_path / "keys")
    voice = (speech(6.0) / 32_768).astype(np.float32)
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, HearingBox(tmp_path) as box:
        account = (
            f'domain = "127.0.0.1:{proxy + 1}"\nregister = true\npassword_file = "{secret}"\n'
            'transport = "tls"\nsrtp = "mandatory"'
        )
        trust = f'tls_ca = "{keys}/authority.pem"'
        with line(tmp_path, box.path, trust, account) as running:
            running.wait("account bot is registered")
            heard, _ = baresip(tmp_path / "b", proxy, "pcma", voice, 8_000, 7, "srtp-mand")
            running.wait("call 1 over")
            with Phone("bot", proxy) as phone, pytest.raises(Refused, match="488"):
                phone.dial()  # in the clear
    said = soxr.resample(voice, 8_000, 24_000).astype(np.float32)
    to_model = snr_db(said, np.concatenate(box.heard[1]), 24_000)
    back = snr_db(voice, heard, 8_000)
    print_figures("baresip over TLS with SRTP", to_model=to_model, back=back)
    assert to_model[0] > 35
    assert back[0] > 29
    assert len(box.sessions) == 1


def test_a_registrar_with_a_certificate_of_somebody_else_gets_no_password(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    keys, others = certificate(tmp_path / "keys"), certificate(tmp_path / "others")
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, FakeBox(tmp_path) as box:
        account = (
            f'domain = "127.0.0.1:{proxy + 1}"\nregister = true\npassword_file = "{secret}"\n'
            'transport = "tls"'
        )
        with line(tmp_path, box.path, f'tls_ca = "{others}/authority.pem"', account) as running:
            running.wait("certificate verify failed")
            running.wait("account bot is not registered")


def test_who_may_connects_to_us_over_tls_and_who_may_not_is_not_let_in(tmp_path: Path) -> None:
    keys = certificate(tmp_path / "keys")
    ours = tmp_path / "ours.pem"
    ours.write_text((keys / "its.pem").read_text() + (keys / "its.key").read_text())
    settings = f'tls_certificate = "{ours}"\nallow = ["127.0.0.1/32"]'
    trust = ssl.create_default_context(cafile=str(keys / "authority.pem"))
    with FakeBox(tmp_path) as box, line(tmp_path, box.path, settings) as running:
        for transport in ("TCP", "TLS"):
            port = running.port + (transport == "TLS")
            with (
                Phone("bot", port) as phone,
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                trust.wrap_socket(plain, server_hostname="127.0.0.1")
                if transport == "TLS"
                else plain as connection,
            ):
                phone.sequence = 1
                asked = phone.request("OPTIONS").replace(b"2.0/UDP", b"2.0/" + transport.encode())
                connection.sendall(asked)
                assert connection.recv(65_536).startswith(b"SIP/2.0 200 OK")
        for port in (running.port, running.port + 1):
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.5, ("127.0.0.7", 0))


def test_a_wrong_password_is_said_and_tried_again(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    with kamailio(tmp_path, REGISTRAR) as proxy, FakeBox(tmp_path) as box:
        account = f'domain = "127.0.0.1:{proxy}"\nregister = true\npassword_file = "{secret}"'
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is not registered at 127.0.0.1")


def dispatcher(folder: Path, lines: list[Line]) -> str:
    """As docs/telephone.md has it: asked at the health port, called at the other."""
    listed = folder / "dispatcher.list"
    listed.write_text(
        "".join(f"1 sip:127.0.0.1:{one.health} 0 0 calls={one.port}\n" for one in lines)
    )
    return (
        MODULES
        + f"""loadmodule "dispatcher.so"
modparam("dispatcher", "list_file", "{listed}")
modparam("dispatcher", "flags", 2)
modparam("dispatcher", "xavp_dst", "_dsdst_")
modparam("dispatcher", "ds_ping_method", "OPTIONS")
modparam("dispatcher", "ds_ping_interval", 1)
modparam("dispatcher", "ds_probing_mode", 1)
modparam("dispatcher", "ds_probing_threshold", 1)
modparam("dispatcher", "ds_inactive_threshold", 1)
modparam("dispatcher", "ds_ping_reply_codes", "code=200")
"""
        + """request_route {
  if (has_totag()) {
    if (loose_route()) { t_relay(); } else if (is_method("ACK") && t_check_trans()) { t_relay(); }
    exit;
  }
  record_route();
  if (!ds_select_dst("1", "4")) { route(FULL); exit; }
  route(CALLS);
  t_on_failure("NEXT");
  t_relay();
}
route[CALLS] {
  $du = "sip:127.0.0.1:" + $(xavp(_dsdst_=>attrs){param.value,calls});
}
route[FULL] {
  append_to_reply("Retry-After: 5\\r\\n");
  sl_send_reply("503", "Service Unavailable");
}
failure_route[NEXT] {
  if (t_is_canceled() || !t_check_status("486|503|408")) { exit; }
  if (ds_next_dst()) { route(CALLS); t_on_failure("NEXT"); t_relay(); exit; }
  append_to_reply("Retry-After: 5\\r\\n");
  t_reply("503", "Service Unavailable");
}
"""
    )


def call_through(proxy: int, calls: int) -> None:
    for _ in range(calls):
        with Phone("bot", proxy) as phone:
            phone.dial()
            phone.hang_up()


def test_two_boxes_behind_kamailio_share_calls_and_a_full_or_stopping_one_gets_none(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        boxes = [stack.enter_context(FakeBox(folder, Trouble())) for folder in folders]
        lines = [
            stack.enter_context(line(folder, box.path, "calls_per_s = 100"))
            for folder, box in zip(folders, boxes, strict=True)
        ]
        proxy = stack.enter_context(kamailio(tmp_path, dispatcher(tmp_path, lines)))
        sleep(4)
        call_through(proxy, 8)
        assert [len(box.sessions) for box in boxes] == [4, 4]
        boxes[0].trouble.refuse = Reason.MEMORY
        sleep(4)
        call_through(proxy, 4)
        assert [len(box.sessions) for box in boxes] == [4, 8]
        assert not lines[0].rows()[4:]  # it was not even asked
        boxes[1].trouble.refuse = Reason.MEMORY
        with Phone("bot", proxy) as phone, pytest.raises(Refused, match="503") as refused:
            phone.dial()
        assert "Retry-After: 5" in refused.value.headers
        boxes[0].trouble.refuse = None
        sleep(4)
        call_through(proxy, 2)
        assert [len(box.sessions) for box in boxes] == [6, 8]
        # One that stops, with a call that goes on, gets no new one.
        boxes[1].trouble.refuse = None
        sleep(4)
        with Phone("bot", lines[0].port) as last:
            last.dial()
            lines[0].process.send_signal(signal.SIGTERM)
            sleep(1.2)
            call_through(proxy, 4)
            assert [len(box.sessions) for box in boxes] == [7, 12]


# --- Asterisk


@pytest.mark.parametrize("codec", ["alaw", "g722", "opus"])
def test_asterisk_takes_its_login_and_calls_with_a_voice_and_keys(
    tmp_path: Path, codec: str
) -> None:
    voice = speech(6.0)
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    with asterisk(tmp_path, voice, codec) as pbx, HearingBox(tmp_path) as box:
        account = f'domain = "127.0.0.1:{pbx.port}"\nregister = true\npassword_file = "{secret}"'
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is registered")
            pbx.say("channel originate PJSIP/bot extension s@play")
            running.wait("call 1 over", 40)
        heard, rate_hz = pbx.heard()
    model = np.concatenate(box.heard[1])
    said = (soxr.resample(voice / 32_768, 8_000, 24_000)).astype(np.float32)
    to_model = snr_db(said, model, 24_000)
    (row,) = running.rows()
    print_figures(f"asterisk {codec}", to_model=to_model, row=row, heard=heard.size / rate_hz)
    assert to_model[0] > (25 if codec != "opus" else 8)
    assert np.abs(heard).max() > 1_000
    assert row.digits == "12#"
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)


def test_asterisk_hands_a_caller_over_by_audiosocket(tmp_path: Path) -> None:
    voice = speech(6.0)
    with (
        HearingBox(tmp_path) as box,
        bridge(tmp_path, box.path) as port,
        asterisk(tmp_path, voice, bridge=port) as pbx,
    ):
        pbx.say("channel originate Local/s@speak extension s@bridge")
        (row,) = ended(tmp_path, 40)
        heard, rate_hz = pbx.heard()
    model = np.concatenate(box.heard[1])
    said = (soxr.resample(voice / 32_768, 8_000, 24_000)).astype(np.float32)
    to_model = snr_db(said, model, 24_000)
    print_figures("asterisk audiosocket", to_model=to_model, row=row, heard=heard.size / rate_hz)
    assert to_model[0] > 38
    assert np.abs(heard).max() > 1_000
    assert row.caller == "40325ec2-5efd-4bd3-805f-53576e581d13"
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)
