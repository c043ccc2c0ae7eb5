"""`duplexbox appliance sip`, called by a telephone over real sockets; the box only echoes.

The stack is the real one, in the real worker process. What needs more than a few seconds or other
peers is in `test_sip_peers.py` and its neighbours, run by `make test-lines`.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.admission import Reason
from appliance.clock import NS_PER_S
from appliance.frame_ring import Outcome
from appliance.lines.sip import SAID_BURST, Calm
from appliance.lines.sip_records import Row, read
from tests.fakes import FakeClock
from tests.fakes_line import FakeBox, Trouble
from tests.sip_peer import HOST, RATE_HZ, Phone, Refused, free_port, now_s, sleep
from tests.sip_registrar import Registrar

pytestmark = pytest.mark.clock

ROOT = Path(__file__).resolve().parents[3]


class Line:
    """A running `duplexbox appliance sip`."""

    def __init__(
        self, folder: Path, box: Path, extra: str = "", account: str = "", host: str = HOST
    ) -> None:
        self.port = free_port()
        # Of all that are free it may be given the same again.
        self.health = next(port for port in iter(free_port, 0) if port != self.port)
        self.folder = folder
        self.start_s = 0.0
        """How long its first start took, parent and worker."""
        self.sockets = 0
        """Open in the worker before anybody called."""
        config = folder / "box.toml"
        config.write_text(
            f'[engine]\nbundle = "b"\n[control]\nsocket = "{box}"\n'
            f'[sip]\nlisten = "{host}:{self.port}"\nrecords = "{folder}/sip.sqlite"\n'
            f'health = "{host}:{self.health}"\n{extra}\n'
            f'[[sip.accounts]]\nuser = "bot"\n{account}\n'
        )
        self.log = folder / "sip.log"
        command = [sys.executable, "-W", "error", "-m", "duplexbox", "appliance", "sip"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(config), "--drain", "2"], cwd=ROOT, stderr=log
            )

    def wait(self, text: str, seconds: float = 20.0) -> None:
        """Until the log has ``text``."""
        until = now_s() + seconds
        while text not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text()
            assert now_s() < until, f"{text} is not in {self.log.read_text()}"
            sleep(0.02)

    def processes(self) -> list[int]:
        """Of its children: the one that does the work, and the spare one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def worker(self) -> int:
        """The process id of the one that does the work."""
        return self.processes()[0]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def rows(self) -> list[Row]:
        return read(self.folder / "sip.sqlite")


@contextmanager
def line(
    folder: Path, box: Path, extra: str = "", account: str = "", host: str = HOST
) -> Iterator[Line]:
    began = now_s()
    running = Line(folder, box, extra, account, host)
    try:
        running.wait("taking calls")
        running.start_s = now_s() - began
        yield running
    finally:
        code = running.stop()
        assert code == 0, running.log.read_text()


def ticks(row: Row) -> float:
    """Of a call: those with a frame, and those without one of which the line knows why."""
    figures = msgspec.json.decode(row.figures)
    return float(row.frames + figures["overslept"] + figures["paid_back"] + figures["not_taken"])


def speech(seconds: float) -> NDArray[np.int16]:
    """Something that a codec and an ear take for a voice: a vowel whose pitch moves."""
    at = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    pitch = 2 * np.pi * (140 * at + 4 * np.sin(2 * np.pi * 0.7 * at))
    wave = sum(np.sin(k * pitch) / k for k in range(1, 12))
    envelope = 0.6 + 0.4 * np.sin(2 * np.pi * 2.3 * at)
    return np.asarray(5_000 * wave * envelope, np.int16)


def snr_db(said: NDArray[np.int16], heard: NDArray[np.int16]) -> float:
    """Of the best 250 ms: how much louder what was said is in what was heard than the rest.

    Delays of parts of a sample and colouring are forgiven: both are compared through the linear
    filter of 49 taps that fits best. The best, because a busy machine is not what is tested.
    """
    return max(_snr_db(said, heard, at) for at in range(RATE_HZ // 2, said.size - 8_000, 800))


def _snr_db(said: NDArray[np.int16], heard: NDArray[np.int16], start: int) -> float:
    end = start + 2_000
    middle = said[start:end].astype(np.float64)
    # Earlier than it was said, too: a line that stood still leaves out what it owed by then.
    where = heard[max(0, start - 8_000) : end + 6_000].astype(np.float64)
    at = int(np.argmax(np.correlate(where, middle, "valid")))
    found = where[at : at + middle.size]
    delayed = [said[start - k : end - k].astype(np.float64) for k in range(-24, 25)]
    filters = np.stack(delayed, 1)
    fitted = filters @ np.linalg.lstsq(filters, found, rcond=None)[0]
    rest = found - fitted
    return float(10 * np.log10((fitted @ fitted) / (rest @ rest + 1e-9)))


@pytest.mark.slow
def test_a_telephone_hears_itself_through_the_box_and_every_frame_has_its_receipt(
    tmp_path: Path,
) -> None:
    said = speech(4.0)
    with FakeBox(tmp_path) as box:
        with line(tmp_path, box.path) as running, Phone("bot", running.port) as phone:
            phone.dial()
            heard = phone.talk(said)
            phone.digit("5", marker=False)
            phone.hang_up()
            running.wait("call 1 over")
        session = box.sessions[0]
        # 34 dB on a quiet machine, where two passes of G.711 leave 35; make test-lines holds it to
        # that. Busy ones stretch and conceal, but what is heard must still be what was said.
        assert snr_db(said, heard.pcm) > 12
        gaps_ms = np.diff(heard.arrived_s) * 1000
        assert gaps_ms.mean() == pytest.approx(20.0, abs=0.3)
        assert session.join.line == "sip"
        assert session.join.caller.startswith("sip:phone@127.0.0.1")
        assert [leave.session for leave in box.leaves] == [1]
        outcomes = session.outcomes()
        settled = sorted(i for o in outcomes if o != Outcome.FILLED for i in outcomes[o])
        assert settled == list(range(session.frame_index))
    (row,) = running.rows()
    assert row.digits == "5"
    assert row.session == 1
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=2)
    assert row.delivered > 40
    assert row.ended


@pytest.mark.slow
def test_a_box_that_is_full_is_486_and_its_health_says_503(tmp_path: Path) -> None:
    with (
        FakeBox(tmp_path, Trouble(refuse=Reason.MEMORY)) as box,
        line(tmp_path, box.path) as running,
    ):
        with Phone("bot", running.port) as phone, pytest.raises(Refused, match="486"):
            phone.dial()
        with Phone("nobody", running.port) as phone, pytest.raises(Refused, match="404"):
            phone.dial()
        running.wait("refused (memory)")
        text, until = "", now_s() + 20
        while "the box is full" not in text:  # it asks its box once a second
            assert now_s() < until, text
            with Phone("bot", running.health) as phone:
                phone.sequence = 1
                phone.send(phone.request("OPTIONS"))
                status, text = phone.answer("OPTIONS")
            assert status == 503
            assert "Retry-After: 5" in text
            sleep(0.05)
        # Whoever asks at the port for calls hears nothing, which a load balancer understands too.
        with Phone("bot", running.port) as phone:
            phone.sequence = 1
            phone.send(phone.request("OPTIONS"))
            with pytest.raises(TimeoutError):
                phone.answer("OPTIONS", timeout_s=0.3)
        os.kill(running.process.pid, signal.SIGTERM)
        running.process.wait(20)
        assert [row.why.partition(":")[0] for row in running.rows()] == ["refused (memory)"]


@pytest.mark.slow
def test_a_line_that_does_not_keep_up_refuses_more_calls_and_says_so(tmp_path: Path) -> None:
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path) as running,
        Phone("bot", running.port) as phone,
        Phone("bot", running.port) as another,
        Phone("bot", running.health) as balancer,
    ):
        phone.dial()
        for _ in range(20):  # a machine that has something else to do half of the time
            os.kill(running.worker(), signal.SIGSTOP)
            sleep(0.1)
            os.kill(running.worker(), signal.SIGCONT)
            sleep(0.1)
        with pytest.raises(Refused, match="486"):
            another.dial()
        running.wait("this line is late")
        sleep(1.1)  # how often a load balancer's answer is made anew
        balancer.sequence = 1
        balancer.send(balancer.request("OPTIONS"))
        status, text = balancer.answer("OPTIONS")
        assert status == 503
        assert "this line is late" in text
        phone.hang_up()
        running.wait("call 1 over")


def test_a_stack_that_says_much_is_left_out_of_the_log_and_counted() -> None:
    clock = FakeClock()
    calm = Calm(clock)
    record = logging.LogRecord("baresip.native", logging.WARNING, "", 0, "a scanner", None, None)
    assert sum(calm.filter(record) for _ in range(1_000)) == SAID_BURST
    clock.advance(NS_PER_S)
    assert calm.filter(record)
    assert not calm.filter(record)
    assert calm.left_out == 1_000 - SAID_BURST + 1


@pytest.mark.slow
def test_who_is_not_allowed_is_heard_neither_in_sip_nor_in_audio(tmp_path: Path) -> None:
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, 'allow = ["127.0.0.1/32"]') as running,
        Phone("bot", running.port) as phone,
        Phone("bot", running.port, source="127.0.0.7") as stranger,
    ):
        stranger.sequence = 1
        stranger.send(stranger.request("INVITE", stranger.sdp()))
        phone.dial()
        stranger.media = phone.media
        stranger.talk(speech(1.0))
        with pytest.raises(TimeoutError):
            stranger.answer("INVITE", timeout_s=0.1, least=100)
        heard = phone.talk(speech(1.0))
        phone.hang_up()
        running.wait("call 1 over")
    assert np.abs(heard.pcm).max() > 1_000
    (row,) = running.rows()
    assert row.rx_packets == pytest.approx(50, abs=3)


@pytest.mark.slow
def test_a_worker_that_dies_is_back_within_two_seconds_and_its_calls_are_known_to_be_lost(
    tmp_path: Path,
) -> None:
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as running:
        with Phone("bot", running.port) as phone:
            phone.dial()
            until = now_s() + 10
            while not running.rows():  # written by a thread of its own
                assert now_s() < until
                sleep(0.02)
            os.kill(running.worker(), signal.SIGKILL)
            died = now_s()
        until = died + 10
        while True:
            with Phone("bot", running.port) as phone:
                try:
                    phone.sequence = 1
                    phone.send(phone.request("OPTIONS"))
                    # Never 404: until it knows its accounts, nothing is read.
                    assert phone.answer("OPTIONS", timeout_s=0.1)[0] == 200
                    break
                except (TimeoutError, ConnectionRefusedError):
                    pass
                assert now_s() < until
        back_s = now_s() - died
        running.wait("1 calls were on")
        assert box.sessions[0].gone == "lost"
    # On a machine too busy to start it at all within that, no longer than it took at first.
    assert back_s < max(2.0, 1.5 * running.start_s), f"{back_s:.1f} s, {running.start_s:.1f} s"
    assert [row.why for row in running.rows()] == ["the line's process ended"]


@pytest.mark.slow
def test_a_registrar_that_asks_to_be_asked_at_once_again_is_left_alone(tmp_path: Path) -> None:
    """One that says "for 0 seconds" was asked a thousand times a second, for ever."""
    with (
        Registrar(lambda _: ("200 OK", ";expires=0")) as registrar,
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, account=_login(tmp_path, registrar.port)) as running,
    ):
        running.wait("renewed 10 times")
        sleep(0.2)
        asked = len(registrar.requests)
        sleep(1.0)
        assert len(registrar.requests) == asked
    assert asked < 200
    assert running.log.read_text().count("account bot is registered") == 1


@pytest.mark.slow
def test_a_login_that_is_not_renewed_is_tried_again_soon(tmp_path: Path) -> None:
    """The stack alone waits from 30 s to half an hour."""

    def answer(number: int) -> tuple[str, str]:
        return ("503 Service Unavailable", "") if number == 2 else ("200 OK", ";expires=1")

    with (
        Registrar(answer) as registrar,
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, account=_login(tmp_path, registrar.port)) as running,
    ):
        running.wait("is not registered at")
        failed = now_s()
        while running.log.read_text().count("account bot is registered") < 2:
            assert now_s() < failed + 10
            sleep(0.02)


def _login(folder: Path, port: int) -> str:
    secret = folder / "secret"
    secret.write_text("s3cret\n")
    return f'domain = "127.0.0.1:{port}"\nregister = true\npassword_file = "{secret}"'
