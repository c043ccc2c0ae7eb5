"""What operators get wrong about the telephone line, and what peers say oddly: each is told in
words, at the start where that is possible, and costs nobody a call."""

import argparse
import asyncio
import logging
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Network
from pathlib import Path

import msgspec
import pytest

from appliance.clock import MonotonicClock
from appliance.config import EXIT_CONFIG, ConfigError, parse
from appliance.lines import sip
from appliance.lines.sip_baresip import BaresipStack
from appliance.lines.sip_config import SipAccount, SipConfig
from appliance.lines.sip_health import Health
from appliance.lines.sip_hook import ProgramHook
from appliance.lines.sip_recorder import stored
from appliance.lines.sip_records import LOST, Records, read
from appliance.lines.sip_stack import StackError
from tests.appliance.lines.test_sip import ROOT, line, speech
from tests.appliance.lines.test_sip_health import OPTIONS
from tests.appliance.lines.test_sip_records import row
from tests.fakes_line import FakeBox
from tests.sip_peer import HOST, Phone, free_port, now_s, sleep

pytestmark = pytest.mark.clock

LISTEN = 'listen = "10.0.0.5:5060"\n'
LOGIN = 'user = "a", register = true, password_file = "/p"'


def sip_table(text: str) -> SipConfig:
    config = parse('[engine]\nbundle = "b"\n[sip]\n' + text, "box.toml")
    assert config.sip is not None
    return config.sip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LISTEN + 'allow = ["0.0.0.0/0"]\naccounts = [{ user = "a" }]\n', "is everybody"),
        (
            LISTEN
            + f"allow = {[f'10.{n >> 8}.{n & 255}.0/24' for n in range(1001)]}\n"
            + 'accounts = [{ user = "a" }]\n',
            "allow: 1001 networks; the kernel's filter holds 1000",
        ),
        (
            LISTEN
            + 'allow = ["10.0.0.9/32"]\n'
            + f'accounts = [{{ {LOGIN}, domain = "10.0.0.2:5070" }}]\n',
            "10.0.0.2 is not in allow, so what it answers to a login would be dropped",
        ),
        (
            LISTEN
            + 'allow = ["10.0.0.2/32"]\n'
            + f'accounts = [{{ {LOGIN}, domain = "10.0.0.2", proxy = "sip:10.0.0.3" }}]\n',
            'Add "10.0.0.3/32"',
        ),
        (
            LISTEN + 'allow = ["10.0.0.2/32"]\naccounts = [{ user = "a", domain = "sip:pbx" }]\n',
            'domain: "sip:pbx" is not HOST or HOST:PORT',
        ),
        (
            LISTEN + 'allow = ["10.0.0.2/32"]\naccounts = [{ user = "a", domain = "pbx:99999" }]\n',
            'domain: "pbx:99999" is not HOST or HOST:PORT',
        ),
    ],
)
def test_what_would_start_and_never_work_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        sip_table(text)


@pytest.mark.parametrize(
    "account",
    [
        f'{LOGIN}, domain = "10.0.0.2"',
        f'{LOGIN}, domain = "pbx.example:5060"',  # whose address only the stack will know
        f'{LOGIN}, domain = "192.0.2.1", transport = "tcp"',  # no filter on what we call ourselves
        f'{LOGIN}, domain = "192.0.2.1", proxy = "192.0.2.2;transport=tcp"',
        'user = "a", domain = "192.0.2.1"',
    ],
)
def test_a_registrar_that_can_be_heard_is_none_of_allows_business(account: str) -> None:
    assert sip_table(LISTEN + f'allow = ["10.0.0.2/32"]\naccounts = [{{ {account} }}]\n').accounts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tls_ca", None),
        ("tls_ca", "no certificate"),
        ("tls_certificate", None),
        ("tls_certificate", "no certificate"),
        ("password_file", None),
        ("password_file", "\n"),
        ("password_file", 'half"a\n'),
    ],
)
def test_a_file_that_is_of_no_use_is_named_before_anything_starts(
    tmp_path: Path, name: str, text: str | None
) -> None:
    path = tmp_path / "file.pem"
    if text is not None:
        path.write_text(text)
    account = SipAccount(user="bot")
    if name == "password_file":
        account = SipAccount(user="bot", domain="pbx", register=True, password_file=path)
    config = SipConfig(listen=f"{HOST}:5060", accounts=(account,))
    if name != "password_file":
        config = msgspec.structs.replace(config, **{name: path})
    with pytest.raises(StackError, match=f"{name} = {re.escape(str(path))}: "):
        asyncio.run(BaresipStack(config).start(lambda _: None))


def test_a_load_balancer_that_allow_lacks_costs_nothing_and_hears_nothing() -> None:
    """The answers are made where calls are looked after."""
    port = free_port()

    async def ask() -> tuple[list[bytes], Health]:
        health = Health(f"{HOST}:{port}", lambda _: None, (IPv4Network(f"{HOST}/32"),))
        await health.start()
        heard = []
        for source in ("127.0.0.7", HOST):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as balancer:
                balancer.bind((source, 0))
                balancer.sendto(OPTIONS, (HOST, port))
                await asyncio.sleep(0.05)
                balancer.setblocking(False)
                try:
                    heard.append(balancer.recv(2_000))
                except BlockingIOError:
                    heard.append(b"")
        health.close()
        return heard, health

    (stranger, balancer), health = asyncio.run(ask())
    assert stranger == b""
    assert balancer.startswith(b"SIP/2.0 503 ")
    assert (health.answered, health.ignored) == (1, 0)


# --- records


def test_records_that_are_broken_are_set_aside_and_no_reason_to_take_no_calls(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sip.sqlite"
    path.write_bytes(b"not a table" * 1_000)
    records = Records(path)
    records.write(row(1))
    records.close()
    assert [one.id for one in read(path)] == ["r-1"]
    (aside,) = tmp_path.glob("sip.broken-*.sqlite")
    assert aside.read_bytes() == b"not a table" * 1_000


def test_rows_wait_while_somebody_else_has_the_table(tmp_path: Path) -> None:
    path = tmp_path / "sip.sqlite"
    first = Records(path)
    first.write(row(1))
    first.close()  # its call was on: the process died
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    records = Records(path, patience_s=0.01, again_s=0.05)
    records.end_lost("sip", "s")
    records.write(row(2))
    sleep(0.3)
    other.execute("COMMIT")
    other.close()
    records.write(row(3))
    records.close()
    assert records.failures == 0
    assert [(one.id, one.why) for one in read(path)] == [("r-1", LOST), ("r-2", ""), ("r-3", "")]


def test_calls_of_another_line_and_of_this_process_are_not_taken_for_lost(tmp_path: Path) -> None:
    """docs/telephone.md has several lines write to one table."""
    path = tmp_path / "sip.sqlite"
    records = Records(path)
    for number, line_ in enumerate(("sip", "audiosocket")):
        records.write(row(number, line=line_))
    records.close()
    records = Records(path)
    records.write(row(2, id="this-2"))
    records.end_lost("sip", "this")
    records.close()
    assert [(one.id, one.why) for one in read(path)] == [("r-0", LOST), ("r-1", ""), ("this-2", "")]


@contextmanager
def unready(folder: Path, config: Path) -> Iterator[Path]:
    """A line that tries again and again; its log."""
    log = folder / "unready.log"
    command = [sys.executable, "-m", "duplexbox", "appliance", "sip", "--config", str(config)]
    with log.open("wb") as said:
        process = subprocess.Popen([*command, "--drain", "0"], cwd=ROOT, stderr=said)
    try:
        wait(log, "the telephone line ended with 1; again in 0.5 s")  # for the second time
        assert process.poll() is None
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()


def wait(log: Path, text: str, seconds: float = 20.0) -> None:
    until = now_s() + seconds
    while text not in log.read_text():
        assert now_s() < until, f"{text} is not in {log.read_text()}"
        sleep(0.05)


@pytest.mark.slow
def test_a_second_line_ends_no_call_of_the_first_and_takes_over_once_its_port_is_free(
    tmp_path: Path,
) -> None:
    """As an old process that ends late, and is no setting's fault: nobody has to start it again."""
    config = tmp_path / "second.toml"
    with ExitStack() as stack, FakeBox(tmp_path) as box:
        with line(tmp_path, box.path) as running, Phone("bot", running.port) as phone:
            phone.dial()
            text = (tmp_path / "box.toml").read_text()
            config.write_text(re.sub("(?m)^health = .*$", "", text))
            log = stack.enter_context(unready(tmp_path, config))
            assert "Is 127.0.0.1:" in log.read_text()
            assert [one.ended for one in running.rows()] == [""]
            phone.hang_up()
            running.wait("call 1 over")
        wait(log, "taking calls")
        with Phone("bot", running.port) as phone:
            phone.dial()
            assert phone.hang_up() == 200


@pytest.mark.slow
@pytest.mark.parametrize("what", ["listen", "health"])
def test_an_address_that_the_machine_does_not_have_yet_is_waited_for(
    tmp_path: Path, what: str
) -> None:
    """It may come from DHCP after the line was started, and systemd starts nothing after 78."""
    away, here = f"192.0.2.7:{free_port()}", f"{HOST}:{free_port()}"
    where = {"listen": here, "health": here} | {what: away}
    config = tmp_path / "box.toml"
    with FakeBox(tmp_path) as box:
        config.write_text(
            f'[engine]\nbundle = "b"\n[control]\nsocket = "{box.path}"\n[sip]\n'
            f'listen = "{where["listen"]}"\nrecords = "{tmp_path}/sip.sqlite"\n'
            + (f'health = "{away}"\n' if what == "health" else "")
            + f'allow = ["{HOST}/32"]\naccounts = [{{ user = "bot" }}]\n'
        )
        with unready(tmp_path, config) as log:
            assert away in log.read_text()


@pytest.mark.slow
def test_what_only_an_operator_can_mend_is_not_tried_again(tmp_path: Path) -> None:
    config = tmp_path / "box.toml"
    with FakeBox(tmp_path) as box:
        config.write_text(
            f'[engine]\nbundle = "b"\n[control]\nsocket = "{box.path}"\n[sip]\n'
            f'listen = "{HOST}:{free_port()}"\nrecords = "{tmp_path}/sip.sqlite"\n'
            'tls_ca = "/nonexistent"\naccounts = [{ user = "bot" }]\n'
        )
        command = [sys.executable, "-m", "duplexbox", "appliance", "sip", "--config", str(config)]
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=False, timeout=20, text=True
        )
    assert ran.returncode == EXIT_CONFIG
    assert "[sip] tls_ca = /nonexistent: " in ran.stderr


@pytest.mark.parametrize(
    ("day", "code", "lines"),
    [("2026-01-31", 0, 3), ("20260131", 0, 3), ("2026-02-01", 0, 2), ("all", 0, 4), ("May", 2, 0)],
)
def test_the_records_of_a_day_are_asked_for_as_the_ledgers_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], day: str, code: int, lines: int
) -> None:
    path = tmp_path / "sip.sqlite"
    records = Records(path)
    for number, began in enumerate(("20260130T2359", "20260131T0000", "20260201T0000")):
        records.write(row(number, began=began))
    records.close()
    config = tmp_path / "box.toml"
    config.write_text(
        f'[engine]\nbundle = "b"\n[sip]\nlisten = "{HOST}:5060"\nrecords = "{path}"\n'
        'accounts = [{ user = "bot" }]\n'
    )
    parser = argparse.ArgumentParser()
    sip.add_arguments(parser)
    assert sip.run_sip(parser.parse_args(["--config", str(config), "--csv", day])) == code
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == lines
    assert ("expected all, today, yesterday or a date" in said.err) == (code == 2)


# --- what an operator's own programs do


def test_a_hook_that_hangs_is_killed_with_what_it_waits_for(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.write_text('#!/bin/sh\nsleep 60 &\necho $! >"$0.pid"\nwait\n')
    hook.chmod(0o755)

    async def tell() -> None:
        told = ProgramHook(hook, MonotonicClock(), longest_s=0.5)
        told({"event": "digit"})
        await told.settle()

    asyncio.run(tell())
    child = int((tmp_path / "hook.pid").read_text())
    until = now_s() + 2
    while _is_running(child):
        assert now_s() < until, "the program that the script waits for goes on"
        sleep(0.02)


def _is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_hook_that_is_not_there_is_said_at_the_start_and_no_key_fills_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell() -> None:
        told = ProgramHook(tmp_path / "hook", MonotonicClock())
        assert "no such program" in caplog.text
        for _ in range(10):
            told({"event": "digit"})
        await told.settle()

    with caplog.at_level(logging.WARNING):
        asyncio.run(tell())
    assert caplog.text.count("could not be started") == 1


def test_a_recording_that_is_moved_away_meanwhile_is_no_trouble_for_another(tmp_path: Path) -> None:
    for name in ("a.wav", "b.wav", "notes.txt"):
        (tmp_path / name).write_bytes(b"1234")
    with os.scandir(tmp_path) as entries:
        found = list(entries)
    (tmp_path / "a.wav").unlink()
    assert [(one.name, one.bytes) for one in stored(found)] == [("b.wav", 4)]


# --- peers


@pytest.mark.slow
def test_headers_in_their_short_form_without_a_port_and_of_any_length_are_understood(
    tmp_path: Path,
) -> None:
    short = {"Via": "v", "From": "f", "To": "t", "Call-ID": "i", "Contact": "m"}
    with FakeBox(tmp_path) as box, line(tmp_path, box.path) as running:
        with Phone("bot", running.port) as phone:
            phone.sequence = 1
            text = phone.request("INVITE", phone.sdp()).decode()
            for name, letter in short.items():
                text = re.sub(f"(?m)^{name}:", f"{letter}:", text)
            phone.send(text.encode())
            _call(phone)
        with Phone("bot", running.port) as phone:
            phone.sequence = 1
            text = phone.request("INVITE", phone.sdp()).decode()
            text = re.sub(r"Via: SIP/2.0/UDP ([^:]+):\d+", r"Via: SIP/2.0/UDP \1;rport", text)
            phone.send(text.encode())
            _call(phone)
        with Phone("bot", running.port) as phone:
            phone.call_id = "c" * 900 + "@test"
            phone.dial()
            phone.hang_up()
        until = now_s() + 10
        while sum(bool(one.ended) for one in running.rows()) < 3:
            assert now_s() < until
            sleep(0.05)
    rows = running.rows()
    assert [(one.source, one.name, one.called, one.number) for one in rows] == [
        (HOST, "Test", "bot", "phone")
    ] * 3
    assert rows[2].call_id == "c" * 250
    assert len(rows[2].figures) < 2_500


@pytest.mark.slow
def test_a_line_without_a_free_descriptor_lets_nobody_in_unfiltered_and_recovers(
    tmp_path: Path,
) -> None:
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, f'allow = ["{HOST}/32"]') as running,
        Phone("bot", running.port) as first,
        Phone("bot", running.port) as phone,
    ):
        first.dial()
        first.talk(speech(0.5))  # with all that is opened at a process's first call
        phone.sequence = 1
        phone.send(phone.request("INVITE", phone.sdp()))
        phone.to_tag = _tag(phone.answer("INVITE")[1])
        worker = running.worker()
        most, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (4, hard))
        phone.send(phone.request("ACK"))
        heard = phone.listen(1.0)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (most, hard))
        assert [said.partition(" ")[0] for said in heard] == ["BYE"]
        assert first.talk(speech(0.5)).arrived_s.size > 15
        assert first.hang_up() == 200
        first.to_tag, first.call_id = "", "again@test"
        first.dial()
        assert first.talk(speech(0.5)).arrived_s.size > 15
        assert first.hang_up() == 200
    log = running.log.read_text()
    assert log.count("a call is ended, for its audio cannot be looked after") == 1
    assert "Traceback" not in log


def _call(phone: Phone) -> None:
    """To the end of one whose INVITE has been sent."""
    phone.to_tag = _tag(phone.answer("INVITE")[1])
    phone.send(phone.request("ACK"))
    assert phone.hang_up() == 200


def _tag(text: str) -> str:
    found = re.search(r"^(?:To|t):.*;tag=([^;\r]+)", text, re.M)
    assert found is not None
    return found[1]
