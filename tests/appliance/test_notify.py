"""What systemd is told, by whom, and what it is told about us: the unit file."""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_S
from appliance.config import EXIT_CONFIG, ControlConfig
from appliance.control import ControlClient
from appliance.frame_ring import UplinkHeader
from appliance.lines.niceness import NICENESS
from appliance.notify import Notify
from tests.appliance.test_box import DEADLINE_S, SERVE

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "duplexbox.service"


class Systemd:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def hear(self, within_s: float = DEADLINE_S) -> str:
        """The next message; empty when none comes in time."""
        self._socket.settimeout(within_s)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return ""

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(f"@duplexbox-test-{os.getpid()}")
    yield made
    made.close()


def test_ready_alive_and_stopping_in_systemds_words(systemd: Systemd) -> None:
    notify = Notify({"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "10000000"})
    assert notify.watchdog_ns == 10 * NS_PER_S
    notify.ready("8 slots")
    notify.alive()
    notify.stopping(37 * NS_PER_S)
    assert [systemd.hear() for _ in range(3)] == [
        "READY=1\nSTATUS=8 slots",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=37000000",
    ]
    notify.close()
    notify.alive()  # nothing, quietly


def test_a_socket_in_the_file_system_works_as_well(tmp_path: Path) -> None:
    made = Systemd(str(tmp_path / "notify"))
    notify = Notify({"NOTIFY_SOCKET": made.address})
    notify.alive()
    notify.close()
    assert made.hear() == "WATCHDOG=1"
    made.close()


@pytest.mark.parametrize(
    ("environment", "watchdog_ns"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "5"}, None),  # nobody to tell
        ({"NOTIFY_SOCKET": "@x"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "0"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": str(os.getpid())}, 5000),
    ],
)
def test_the_watchdog_is_fed_only_when_it_is_ours(
    environment: dict[str, str], watchdog_ns: int | None
) -> None:
    notify = Notify(environment)
    assert notify.watchdog_ns == watchdog_ns
    notify.alive()  # nobody listens: no matter
    notify.close()


def test_a_systemd_that_does_not_read_never_blocks_the_loop(tmp_path: Path) -> None:
    made = Systemd(str(tmp_path / "notify"))
    notify = Notify({"NOTIFY_SOCKET": made.address})
    for _ in range(5000):  # far more than the socket holds
        notify.alive()
    made.close()
    notify.alive()
    notify.close()


@pytest.mark.clock
def test_the_loop_feeds_the_watchdog_and_a_hanging_loop_does_not(
    tmp_path: Path, systemd: Systemd
) -> None:
    """The whole process: ready, fed while it turns, starved when the tick hangs."""
    (tmp_path / "duplexbox.toml").write_text(
        f'[engine]\nbundle = "{tmp_path}/bundle"\n[clock]\ndrain_s = 0\n'
        f'[control]\nsocket = "{tmp_path}/c.sock"\n[ledger]\nfolder = "{tmp_path}/calls"\n'
        "[admission]\ncalibrate_s = 0\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path), "hang"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1200000"},
    )
    try:
        assert systemd.hear().startswith("READY=1\nSTATUS=2 slots")
        # Every 3 ticks of 80 ms, a fifth of what systemd would wait.
        assert [systemd.hear() for _ in range(3)] == ["WATCHDOG=1"] * 3
        (tmp_path / "hang").touch()
        client = ControlClient.connect(tmp_path / "c.sock")
        client.send(control.Join(1, "test", "x"))
        admitted = client.receive(DEADLINE_S)
        assert isinstance(admitted, control.Admitted)
        channel = Channel.attach(admitted.channel)
        import numpy as np

        assert channel.uplink.put(UplinkHeader(0, 0, 1), np.zeros(1920, np.float32))
        while (said := systemd.hear(1.2)) == "WATCHDOG=1":
            pass  # until the frame is taken and the tick hangs
        assert said == ""  # for as long as systemd would wait
        client.send(control.Status(2))  # while another thread answers, alive as ever
        assert isinstance(client.receive(DEADLINE_S), control.Report)
        channel.close()
        client.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.clock
def test_a_drained_box_says_so_and_asks_for_its_time(tmp_path: Path, systemd: Systemd) -> None:
    (tmp_path / "duplexbox.toml").write_text(
        f'[engine]\nbundle = "{tmp_path}/bundle"\n[clock]\ndrain_s = 0\nsettle_s = 2\n'
        f'[control]\nsocket = "{tmp_path}/c.sock"\n[ledger]\nfolder = "{tmp_path}/calls"\n'
        "[admission]\ncalibrate_s = 0\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"NOTIFY_SOCKET": systemd.address},
    )
    try:
        assert systemd.hear().startswith("READY=1")
        process.terminate()
        assert systemd.hear() == "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=7000000"
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def setting(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(found)


def test_a_box_per_gpu_has_the_same_unit_but_for_its_name() -> None:
    """Two files, because a template cannot be started without a name; they must not drift."""
    one, many = (
        [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for path in (UNIT, UNIT.with_name("duplexbox@.service"))
    )
    several = [line for line in many if line != "RuntimeDirectoryPreserve=yes"]
    assert [line.replace(" %i:", ":").replace("%i", "duplexbox") for line in several] == one


def test_the_unit_says_what_the_box_relies_on() -> None:
    assert setting("Type") == "notify"
    assert int(setting("WatchdogSec")) >= 2
    assert int(setting("RestartPreventExitStatus")) == EXIT_CONFIG
    assert int(setting("LimitRTPRIO")) >= 10
    assert "appliance serve --config /etc/duplexbox/duplexbox.toml" in setting("ExecStart")
    # Where the defaults of the config lie.
    assert setting("RuntimeDirectory") == setting("StateDirectory") == "duplexbox"


def test_a_lines_unit_lets_it_be_as_nice_as_it_asks_and_speaks_to_the_units_box() -> None:
    text = UNIT.with_name("duplexbox-websocket.service").read_text()
    assert f"\nLimitNICE={NICENESS}\n" in text
    socket = ControlConfig().socket
    assert f"appliance websocket --socket {socket} --listen 127.0.0.1:8998\n" in text
    for line in ("User=duplexbox", "Group=duplexbox", "Requires=duplexbox.service"):
        assert f"\n{line}\n" in text


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="needs systemd-analyze: apt-get install systemd",
)
@pytest.mark.parametrize(
    "name",
    [
        "duplexbox.service",
        "duplexbox@.service",
        "duplexbox-websocket.service",
        "duplexbox-sip.service",
    ],
)
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path, name: str) -> None:
    program = tmp_path / "duplexbox"
    program.write_text("#!/bin/sh\n")
    program.chmod(stat.S_IRWXU)
    unit = tmp_path / name.replace("@", "@gpu0")
    text = (
        (UNIT.parent / name).read_text().replace("/opt/duplexbox/venv/bin/duplexbox", str(program))
    )
    assert str(program) in text
    unit.write_text(text)
    if "-" in name:  # a line: it requires the box's, which is not installed here
        box = (UNIT.parent / "duplexbox.service").read_text()
        box = box.replace("/opt/duplexbox/venv/bin/duplexbox", str(program))
        (tmp_path / "duplexbox.service").write_text(box)
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
