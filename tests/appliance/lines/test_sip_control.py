"""What is done with telephone calls besides talking, over the real stack: the box only echoes.

Persona, voice and longest call by account, the hook, transfers with what the peer says of them, the
model's goodbye, and recordings.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import soxr

from appliance.ledger import Why, read_folder
from appliance.lines.sip_records import Row
from appliance.lines.wav import WavWriter
from tests.appliance.lines.test_sip import ROOT, Line, line, snr_db, speech
from tests.fakes_line import FakeBox, Trouble
from tests.sip_debian import baresip
from tests.sip_peer import Phone, now_s, sleep
from tests.sip_rig import stub_box

pytestmark = [pytest.mark.slow, pytest.mark.clock]

HOOK = '#!/bin/sh\nread -r line\nprintf "%s\\n" "$line" >>"$0.log"\n'

ACCOUNTS = """persona = "You are Ann."
voice = "alto"
digits = { 0 = "sip:desk@127.0.0.1:9" }
fallback = "sip:desk@127.0.0.1:9"
[[sip.accounts]]
user = "brief"
persona = "You are Bob."
max_s = 1
[[sip.accounts]]
user = "taped"
record = true
[[sip.accounts]]
user = "both"
record = true
words = { "It goes" = "hang-up" }
[[sip.accounts]]
user = "polite"
words = { "It goes" = "hang-up" }
words_grace_ms = 500
[sip.recording]
folder = "FOLDER/tapes"
announce = "FOLDER/announcement.wav"
min_free_mb = 1
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeBox]:
    with FakeBox(tmp_path_factory.mktemp("box"), Trouble(falls_silent_at=30)) as made:
        yield made


@pytest.fixture(scope="module")
def running(box: FakeBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("line")
    hook = folder / "hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    with WavWriter(folder / "announcement.wav", 8_000) as wav:
        wav.write(np.full(4_000, 0.25, np.float32) * np.sin(np.arange(4_000, dtype=np.float32)))
    allowed = '["sip:desk@127.0.0.1:9", "sip:2*@127.0.0.1:9", "sip:d@pbx;user=phone"]'
    extra = f'transfer_to = {allowed}\nhook = "{hook}"'
    with line(folder, box.path, extra, ACCOUNTS.replace("FOLDER", str(folder))) as made:
        yield made


def last(running: Line, seconds: float = 8.0) -> Row:
    """The row of the call that has just ended."""
    until = now_s() + seconds
    while not (rows := running.rows()) or not all(row.ended for row in rows):
        assert now_s() < until
        sleep(0.05)
    return rows[-1]


def events(running: Line, row: Row, least: str, seconds: float = 8.0) -> list[dict[str, object]]:
    """What the hook was told of a call, once ``least`` is among it; in order of what happened."""
    path, until = running.folder / "hook.log", now_s() + seconds
    while True:
        said = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        mine = [event for event in said if event["call"] == row.id]
        if any(event["event"] == least for event in mine):
            return mine
        assert now_s() < until, f"the hook was not told of {least}: {mine}"
        sleep(0.05)


def notify(phone: Phone, status: str) -> None:
    """Say how far the call is that we were asked to place."""
    phone.sequence += 1
    state = "active" if status.startswith("1") else "terminated;reason=noresource"
    body = f"SIP/2.0 {status}\r\n"
    extra = (
        f"Event: refer\r\nSubscription-State: {state}\r\n"
        "Content-Type: message/sipfrag;version=2.0\r\n"
    )
    phone.send(phone.request("NOTIFY", body, extra=extra))
    assert phone.answer("NOTIFY")[0] == 200


def asked(phone: Phone, seconds: float = 3.0) -> str:
    """The address of the REFER that comes; it is accepted."""
    phone.accepts = "REFER"
    until = now_s() + seconds
    while now_s() < until:
        for text in phone.listen(0.1):
            if found := re.search(r"^Refer-To: *<([^>\r]+)>\r", text, re.M):
                return found[1]
    raise AssertionError("no REFER came")


def test_each_account_has_its_persona_and_voice_and_its_longest_call(
    box: FakeBox, running: Line
) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.3))
        assert phone.hang_up() == 200
    ann = last(running)
    with Phone("brief", running.port) as phone:
        phone.dial()
        began = now_s()
        phone.talk(speech(0.8))
        assert phone.listen(2.0)[-1].startswith("BYE ")
        assert now_s() - began > 1.0
    brief = last(running)
    joins = [session.join for session in box.sessions[-2:]]
    assert [(j.persona, j.voice) for j in joins] == [("You are Ann.", "alto"), ("You are Bob.", "")]
    assert (ann.voice, ann.account, ann.name, ann.number) == ("alto", "bot", "Test", "phone")
    assert ann.codec == "g711"
    assert (brief.why, brief.account) == ("longer than 1 s", "brief")
    assert [e["event"] for e in events(running, brief, "ended")] == ["answered", "ended"]


def test_a_caller_of_whom_nothing_comes_is_told_of_while_the_call_is_on(running: Line) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        until = now_s() + 8
        while not (rows := running.rows()) or rows[-1].ended:  # it is written by and by
            assert now_s() < until
            sleep(0.05)
        row = rows[-1]
        events(running, row, "unheard")
        assert not running.rows()[-1].ended
        phone.talk(speech(0.3))
        assert phone.hang_up() == 200
    told = [event["event"] for event in events(running, row, "ended")]
    assert told == ["answered", "unheard", "ended"]
    log = running.log.read_text()
    assert "no audio in 3 s. Do packets from there reach UDP ports" in log


def test_the_hook_hears_of_keys_and_of_how_a_call_began_and_ended(running: Line) -> None:
    with Phone("polite", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.2))
        phone.digit("4")
        phone.digit("2")
        phone.invite(phone.sdp(direction="sendonly"))
        phone.invite()
        assert phone.hang_up() == 200
    row = last(running)
    told = events(running, row, "ended")
    # Each is a process of its own, so two that follow at once may write in any order.
    assert {e["event"] for e in told} == {"answered", "digit", "hold", "resume", "ended"}
    assert sorted(str(e["digit"]) for e in told if e["event"] == "digit") == ["2", "4"]
    (end,) = [e for e in told if e["event"] == "ended"]
    assert (end["account"], end["call_id"], end["session"]) == ("polite", row.call_id, row.session)
    assert end["talked_ms"] == row.talked_ms
    assert row.digits == "42"


def test_keys_come_as_requests_too(running: Line) -> None:
    with Phone("polite", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.2))
        for key in "5#":
            phone.sequence += 1
            body = f"Signal={key}\r\nDuration=160\r\n"
            kind = "Content-Type: application/dtmf-relay\r\n"
            phone.send(phone.request("INFO", body, extra=kind))
            assert phone.answer("INFO")[0] == 200
        assert phone.hang_up() == 200
    assert last(running).digits == "5#"


@pytest.mark.parametrize(
    ("target", "steps", "outcome", "is_done"),
    [
        ("sip:22@127.0.0.1:9", ["100 Trying", "180 Ringing", "200 OK"], "answered", True),
        ("sip:22@127.0.0.1:9", ["100 Trying", "486 Busy Here"], "486 Busy Here", False),
        ("sip:d@pbx;user=phone", ["603 Decline"], "603 Decline", False),
    ],
)
def test_the_peer_says_what_came_of_a_transfer(
    box: FakeBox, running: Line, target: str, steps: list[str], outcome: str, is_done: bool
) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.2))
        session = box.sessions[-1]
        box.transferred.clear()
        box.transfer(session.number, target)
        assert asked(phone) == target
        for step in steps[:-1]:
            notify(phone, step)
            assert not box.transferred
        notify(phone, steps[-1])
        until = now_s() + 5
        while not box.transferred:
            assert now_s() < until
            sleep(0.02)
        said = box.transferred[0]
        assert (said.session, said.is_done) == (session.number, is_done)
        if is_done:
            assert phone.listen(2.0)[-1].startswith("BYE ")
        else:  # the caller is kept, and talks on
            assert phone.talk(speech(0.4)).arrived_s.size > 10
            assert not session.gone
            assert phone.hang_up() == 200
    row = last(running)
    assert session.gone == "left"
    assert (row.transfer_to, row.transfer_by) == (target, "operator")
    assert row.transfer == outcome
    assert (row.why == f"transferred to {target}") is is_done
    what = "transferred" if is_done else "not transferred"
    told = [e for e in events(running, row, what) if e["event"] in ("transfer", what)]
    assert {e["target"] for e in told} == {target}
    assert len(told) == 2


def test_an_address_that_is_not_in_the_list_is_asked_of_nobody(box: FakeBox, running: Line) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.2))
        box.transferred.clear()
        box.transfer(box.sessions[-1].number, "sip:1900555@127.0.0.1:9")
        assert not [text for text in phone.listen(0.5) if text.startswith("REFER")]
        (said,) = box.transferred
        assert not said.is_done
        assert "not allowed" in said.detail
        assert phone.hang_up() == 200
    assert last(running).transfer_to == ""


def test_a_caller_of_a_box_that_fails_is_somebody_elses(box: FakeBox, running: Line) -> None:
    with Phone("bot", running.port) as phone:
        phone.dial()
        phone.talk(speech(0.3))
        box.trouble.fault_at = box.sessions[-1].frame_index + 2
        try:
            assert asked(phone) == "sip:desk@127.0.0.1:9"
        finally:
            box.trouble.fault_at = None
        notify(phone, "200 OK")
        assert phone.listen(2.0)[-1].startswith("BYE ")
    row = last(running)
    assert row.why == row.transfer_by == "the box ended it (fault)"
    assert (row.transfer_to, row.transfer) == ("sip:desk@127.0.0.1:9", "answered")


def test_the_models_goodbye_ends_the_call(box: FakeBox, running: Line) -> None:
    with Phone("polite", running.port) as phone:
        phone.dial()
        heard = phone.talk(speech(2.6))  # it says "so it goes" until frame 30, 2.4 s
        assert heard.arrived_s.size > 100
        assert phone.listen(3.0)[-1].startswith("BYE ")
    row = last(running)
    assert row.why == 'words "It goes"'
    assert row.talked_ms > 2_400 + 500


def test_both_sides_are_recorded_after_the_announcement(box: FakeBox, running: Line) -> None:
    said = speech(3.0)
    with Phone("taped", running.port) as phone:
        phone.dial()
        heard = phone.talk(said)
        assert phone.hang_up() == 200
    row = last(running)
    told = events(running, row, "recorded")
    (done,) = [e for e in told if e["event"] == "recorded"]
    path = Path(str(done["recording"]))
    assert path.parent == running.folder / "tapes"
    assert path.parent.stat().st_mode & 0o077 == 0  # nobody else may listen
    assert done["trouble"] == ""
    pcm, rate_hz = sf.read(path)
    assert rate_hz == 24_000
    assert pcm.shape[1] == 2
    seconds = pcm.shape[0] / rate_hz
    assert seconds == pytest.approx(float(str(done["seconds"])), abs=0.1)
    # The announcement takes half a second, in which nothing is kept.
    assert 1.5 < seconds < row.talked_ms / 1000 - 0.3
    left, right = np.abs(pcm[:, 0]), np.abs(pcm[:, 1])
    assert left[rate_hz:].max() > 0.2
    assert right[rate_hz:].max() > 0.2  # the echo
    tone = np.abs(heard.pcm[:4_000].astype(np.float64)).mean()
    assert tone > 1_000  # the announcement was heard
    until = now_s() + 5
    while not (row := last(running)).recorded_ms:
        assert now_s() < until
        sleep(0.05)
    assert row.recording == str(path)
    assert row.recorded_ms == pytest.approx(1000 * seconds, abs=100)
    assert last(running).id == row.id
    assert sum(row.recording != "" for row in running.rows()) == 1  # nobody else's call


@pytest.mark.peers
def test_debian_baresip_is_recorded_and_hung_up_on(
    box: FakeBox, running: Line, tmp_path: Path
) -> None:
    voice = (speech(4.0) / 32_768).astype(np.float32)
    quiet = np.zeros(10 * 8_000, np.float32)  # it listens, so that the model is taken at its word
    wave = np.concatenate([voice, quiet])
    heard, heard_hz = baresip(tmp_path, running.port, "pcma", wave, 8_000, 14, user="both")
    row = last(running)
    (done,) = [e for e in events(running, row, "recorded") if e["event"] == "recorded"]
    assert row.why == 'words "It goes"'  # and not baresip, which would have stayed for 14 s
    pcm, rate_hz = sf.read(str(done["recording"]), dtype="float32")
    left = soxr.resample(pcm[:, 0], rate_hz, 8_000)
    right = soxr.resample(pcm[:, 1], rate_hz, 8_000)
    rest = np.zeros(8_000, np.float32)
    caller = snr_db(
        np.asarray(left[:26_000] * 32_767, np.int16),
        np.asarray(np.concatenate([voice, rest]) * 32_767, np.int16),
    )
    model = snr_db(
        np.asarray(right[:26_000] * 32_767, np.int16),
        np.asarray(
            np.concatenate([heard[2_000:], rest])  # most of the announcement
            * 32_767,
            np.int16,
        ),
    )
    sys.stderr.write(f"\nrecorded of baresip: caller {caller:.1f} dB, model {model:.1f} dB\n")
    assert heard_hz == 8_000
    assert caller > 25  # on a quiet machine what G.711 leaves, 38, in both
    assert model > 25


def test_the_verb_hangs_up_on_callers_of_a_whole_box(tmp_path: Path) -> None:
    extra = 'transfer_to = ["sip:2*@127.0.0.1:9"]'
    account = 'fallback = "sip:22@127.0.0.1:9"'

    def operator(verb: str, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "duplexbox", "appliance", verb, "--socket", str(socket)]
        return subprocess.Popen(
            [*command, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hung_up(session: str, phone: Phone) -> None:
        done = operator("hangup", session, "--why", "the hall is closing")
        until = now_s() + 10
        while not any(text.startswith("BYE ") for text in phone.listen(0.2)):
            assert now_s() < until
        out, err = done.communicate(timeout=20)
        assert (done.returncode, err) == (0, "")
        assert out.startswith(f"session {session} is ended; ")

    with stub_box(tmp_path, 2) as socket, line(tmp_path, socket, extra, account) as running:
        with Phone("bot", running.port) as phone:
            phone.dial()
            phone.talk(speech(0.5))
            hung_up("1", phone)
        talked = last(running)
        with Phone("bot", running.port) as phone:  # and while somebody else is being called
            phone.dial()
            phone.talk(speech(0.5))
            sent_on = operator("transfer", "2", "sip:21@127.0.0.1:9")
            assert asked(phone, 10) == "sip:21@127.0.0.1:9"
            hung_up("2", phone)
            _, err = sent_on.communicate(timeout=20)
        sent = last(running)
        again = operator("hangup", "2")
        assert "session 2 is not on" in again.communicate(timeout=20)[1]
        assert again.returncode == 1
    assert talked.why == sent.why == "an operator ended it: the hall is closing"
    assert (talked.transfer_to, sent.transfer_to) == ("", "sip:21@127.0.0.1:9")
    assert sent.transfer.startswith("the call ended before the peer said")
    assert "session 2 stays: the session ended before its line said" in err
    ended = {call.end["why"] for call in read_folder(tmp_path / "calls") if call.end is not None}
    assert ended == {Why.OPERATOR}


@pytest.mark.peers
def test_the_verb_sends_a_caller_of_a_whole_box_on(tmp_path: Path) -> None:
    extra = 'transfer_to = ["sip:2*@127.0.0.1:9"]'
    verb = [sys.executable, "-m", "duplexbox", "appliance", "transfer", "1"]

    def operator(target: str) -> "subprocess.Popen[str]":
        words = [*verb, target, "--socket", str(socket)]
        return subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with (
        stub_box(tmp_path, 2) as socket,
        line(tmp_path, socket, extra) as running,
        Phone("bot", running.port) as phone,
    ):
        phone.dial()
        phone.talk(speech(0.5))
        denied = operator("sip:1900555@127.0.0.1:9")
        out, err = denied.communicate(timeout=20)
        assert (denied.returncode, out) == (1, "")
        assert "session 1 stays: sip:1900555@127.0.0.1:9 is not allowed" in err
        busy = operator("sip:21@127.0.0.1:9")
        assert asked(phone, 10) == "sip:21@127.0.0.1:9"
        notify(phone, "486 Busy Here")
        _, err = busy.communicate(timeout=20)
        assert busy.returncode == 1
        assert "session 1 stays: 486 Busy Here" in err
        assert phone.talk(speech(0.5)).arrived_s.size > 15
        done = operator("sip:22@127.0.0.1:9")
        assert asked(phone, 10) == "sip:22@127.0.0.1:9"
        notify(phone, "200 OK")
        out, err = done.communicate(timeout=20)
        assert (done.returncode, err) == (0, "")
        assert out == "session 1: transferred to sip:22@127.0.0.1:9\n"
        row = last(running)
    assert row.why == "transferred to sip:22@127.0.0.1:9"
    assert row.frames > 10
