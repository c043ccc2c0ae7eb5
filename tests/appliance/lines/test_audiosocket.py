"""Callers whom an Asterisk hands over: the bytes, and calls over a real connection."""

import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import cli
from appliance.admission import Reason
from appliance.clock import NS_PER_S
from appliance.lines.audiosocket import (
    AUDIO,
    BEHIND_NS,
    HANG_UP,
    ID,
    KEY,
    QUEUED_BYTES,
    AudioSocketMedia,
    Messages,
    message,
)
from appliance.lines.sip_records import Row, read
from tests.appliance.lines.test_sip import ROOT, snr_db, speech
from tests.fakes_line import FakeBox, Trouble
from tests.sip_peer import CLOCK, free_port, now_s, sleep
from tests.sip_rig import stub_box

pytestmark = pytest.mark.clock

said = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=700)), max_size=8)


@given(said, st.lists(st.integers(1, 900), max_size=30))
def test_messages_are_the_same_however_their_bytes_are_cut(
    sent: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    raw = b"".join(message(kind, payload) for kind, payload in sent)
    messages = Messages()
    found = []
    for cut in cuts:
        found += messages.push(raw[:cut])
        raw = raw[cut:]
    assert found + messages.push(raw) == sent


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_what_waits_is_bounded_and_silence_fills_a_packet(writes: list[int]) -> None:
    media = AudioSocketMedia()
    taken = 0
    for samples in writes:
        taken += media.write(np.full(samples, 7, np.int16))
        media.heard(bytes(samples))
    assert 2 * taken <= QUEUED_BYTES
    assert media.read().size <= QUEUED_BYTES // 2
    assert media.read().size == 0
    sent = b"".join(media.packet() for _ in range(QUEUED_BYTES // 320 + 1))
    heard = np.frombuffer(sent, "<i2")
    assert (heard == 7).sum() == taken
    assert not heard[taken:].any()


def test_what_was_not_read_in_time_is_let_go_oldest_first_and_in_whole_samples() -> None:
    media = AudioSocketMedia()
    came = np.arange(QUEUED_BYTES, dtype="<i2").tobytes()
    for at in range(0, len(came), 7):  # as a peer may cut it: in the middle of samples
        media.heard(came[at : at + 7])
    last = np.frombuffer(came, "<i2")[-QUEUED_BYTES // 2 :]
    assert media.read().tolist() == last.tolist()
    media.heard(b"\x01")
    assert media.read().size == 0
    media.heard(b"\x02")
    assert media.read().tolist() == [0x0201]


@contextmanager
def line(folder: Path, box: Path, *words: str, verb: str = "audiosocket") -> Iterator[int]:
    """A running line from an Asterisk; its port."""
    port = free_port()
    command = [sys.executable, "-W", "error", "-m", "duplexbox", "appliance", verb]
    command += ["--socket", str(box), "--listen", f"127.0.0.1:{port}", "--drain", "0"]
    with (folder / "line.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--records", str(folder / "calls.sqlite"), *words], cwd=ROOT, stderr=log
        )
    until = now_s() + 20
    while "taking calls" not in (folder / "line.log").read_text():
        assert process.poll() is None, (folder / "line.log").read_text()
        assert now_s() < until
        sleep(0.02)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, (folder / "line.log").read_text()


def exchange(port: int, pcm: bytes, *more: bytes) -> tuple[bytes, list[int], tuple[float, float]]:
    """Talk as an Asterisk does, then send ``more`` and listen until the line closes.

    What was heard until then, other messages, and how many seconds of audio that should be: at
    least and at most. Nobody makes up for a line that stood still for longer than `BEHIND_NS`.
    """
    messages = Messages()
    heard: list[tuple[int, bytes]] = []
    stood_s = 0.0
    with socket.create_connection(("127.0.0.1", port), 5) as asterisk:
        asterisk.sendall(message(ID, uuid.UUID(int=7).bytes))
        start = now_s()
        due_ns = came_ns = CLOCK.now_ns()
        asterisk.settimeout(0.001)
        for at in range(0, len(pcm), 320):
            asterisk.sendall(message(AUDIO, pcm[at : at + 320]))
            due_ns += 20_000_000
            CLOCK.sleep_until(due_ns)
            try:
                heard += messages.push(asterisk.recv(65_536))
            except TimeoutError:
                continue
            silent_ns, came_ns = CLOCK.now_ns() - came_ns, CLOCK.now_ns()
            stood_s += silent_ns / NS_PER_S if silent_ns > BEHIND_NS else 0.0
        took = now_s() - start
        for raw in more:
            asterisk.sendall(raw)
        asterisk.settimeout(10)  # closed with something unread, it would be reset: no goodbye
        while asterisk.recv(65_536):
            pass
    audio = b"".join(payload for kind, payload in heard if kind == AUDIO)
    return audio, [kind for kind, _ in heard if kind != AUDIO], (took - stood_s, took)


def ended(folder: Path, seconds: float = 10.0) -> list[Row]:
    """The records, once there are some and no call is on."""
    until = now_s() + seconds
    while True:
        rows = read(folder / "calls.sqlite")
        if rows and all(row.ended for row in rows):
            return rows
        assert now_s() < until
        sleep(0.05)


@pytest.mark.slow
def test_a_call_over_audiosocket_there_and_back(tmp_path: Path) -> None:
    voice = speech(3.0)
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as port:
        audio, others, (least_s, most_s) = exchange(
            port, voice.astype("<i2").tobytes(), message(KEY, b"4"), message(HANG_UP)
        )
        (row,) = ended(tmp_path)
    assert others == []
    assert least_s - 0.3 < len(audio) / 16_000 < most_s + 0.3
    # More than 40 dB on a quiet machine, since there is no codec on the way.
    assert snr_db(voice, np.frombuffer(audio, "<i2").astype(np.int16)) > 12
    assert (row.line, row.digits, row.why) == ("audiosocket", "4", "hung up")
    assert row.caller == str(uuid.UUID(int=7))
    assert box.sessions[0].join.line == "audiosocket"
    assert [leave.session for leave in box.leaves] == [1]


@pytest.mark.slow
def test_who_is_refused_or_talks_nonsense_is_hung_up_on(tmp_path: Path) -> None:
    with FakeBox(tmp_path, Trouble(refuse=Reason.MEMORY)) as box, line(tmp_path, box.path) as port:
        with socket.create_connection(("127.0.0.1", port), 5) as asterisk:
            asterisk.sendall(message(ID, uuid.UUID(int=8).bytes))
            messages, found = Messages(), []
            while data := asterisk.recv(65_536):
                found += messages.push(data)
            assert found[-1] == (HANG_UP, b"")
        for nonsense in (message(AUDIO, bytes(320)), message(ID, b"short"), b"GET / HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.sendall(nonsense + struct.pack("!BH", 0, 0) * 9_000)
                stranger.shutdown(socket.SHUT_WR)
                try:
                    assert stranger.recv(10) == b""
                except ConnectionResetError:
                    continue
        (row,) = ended(tmp_path)
    assert row.why.startswith("refused (memory)")


@pytest.mark.slow
def test_an_operator_hangs_up_and_the_dialplan_goes_on(tmp_path: Path) -> None:
    with stub_box(tmp_path, 1) as box, line(tmp_path, box) as port:
        with socket.create_connection(("127.0.0.1", port), 5) as asterisk:
            asterisk.sendall(message(ID, uuid.UUID(int=7).bytes))
            assert asterisk.recv(3) == message(AUDIO, bytes(320))[:3]  # it has been answered
            assert cli.main(["hangup", "1", "--socket", str(box)]) == 0
            rest = b"".join(iter(lambda: asterisk.recv(65_536), b""))
        (row,) = ended(tmp_path)
    assert rest.endswith(message(HANG_UP))
    assert row.why == "an operator ended it"


@pytest.mark.slow
def test_who_is_not_allowed_is_not_heard(tmp_path: Path) -> None:
    with FakeBox(tmp_path) as box, line(tmp_path, box.path, "--allow", "127.0.0.9/32") as port:
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            assert stranger.recv(10) == b""
        friend = socket.create_connection(("127.0.0.1", port), 5, source_address=("127.0.0.9", 0))
        friend.sendall(message(ID, uuid.UUID(int=9).bytes))
        assert friend.recv(3) == message(AUDIO, bytes(320))[:3]
        friend.close()
        (row,) = ended(tmp_path)
    assert row.source == "127.0.0.9"
