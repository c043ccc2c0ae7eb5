"""The box whole: threads, socket, shared memory and files, with an echoing executor.

Real time, on a period of 80 ms, so each test is a second or two; what is asserted never depends
on how fast the machine is.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from appliance import control, ledger, report
from appliance.admission import Reason
from appliance.box import Box
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import MonotonicClock
from appliance.config import (
    AdmissionConfig,
    BesideConfig,
    ClockConfig,
    Config,
    ConfigError,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from appliance.control import ControlClient
from appliance.engine import available_memory_bytes
from appliance.frame_ring import LAST, Outcome, Receipt, UplinkHeader
from appliance.listener import SocketTaken
from tests.fakes import FakeExecutor, make_bundle

pytestmark = pytest.mark.clock

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
ATTEMPTS = 3
"""Where a busy machine may spoil one: the box is at fault if it always does."""
GENEROUS = AdmissionConfig(calibrate_s=0, min_margin_ms=0)
"""So that a busy machine refuses nobody for time."""


class Running:
    """A box that runs in a thread of this process, and ends with the block it is used in."""

    def __init__(
        self,
        folder: Path,
        socket_path: Path,
        work: Callable[[int], None],
        admission: AdmissionConfig = GENEROUS,
        first_frame_s: int = 5,
        beside: tuple[BesideConfig, ...] = (),
    ) -> None:
        self.executor = FakeExecutor(make_bundle(folder / "bundle"), 2, work)
        self.config = Config(
            engine=EngineConfig(folder / "bundle"),
            clock=ClockConfig(
                drain_s=0, settle_s=1, first_frame_s=first_frame_s, realtime_priority=0
            ),
            control=ControlConfig(socket_path),
            ledger=LedgerConfig(folder / "calls"),
            admission=admission,
            beside=beside,
        )
        self.box = Box(self.config, self.executor, MonotonicClock(), 2**30)
        self.error: BaseException | None = None
        self.lines: list[Line] = []
        """Those of the test; what a test that fails leaves open would be a warning in another."""
        # A daemon: a box that does not stop fails its test, and must not hold up the others.
        self._thread = threading.Thread(target=self._run, name="box under test", daemon=True)

    def _run(self) -> None:
        try:
            self.box.run()
        except BaseException as err:
            self.error = err

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.box.drain()
        self.join()
        for line in self.lines:
            line.close()
        assert kind is not None or self.error is None

    def start(self) -> None:
        self._thread.start()
        self.wait_for(lambda: self.box.switchboard.ready or self.error is not None)

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the box did not stop"

    def wait_for(self, true: Callable[[], bool]) -> None:
        never = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if true():
                return
            never.wait(0.01)
        raise AssertionError("it did not happen in time")

    def summary(self) -> report.Summary:
        return report.summarise(ledger.read_folder(self.config.ledger.folder))


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:  # tmp_path may be too long for one
        yield Path(folder) / "control.sock"


@pytest.fixture
def running(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    with Running(tmp_path, socket_path, lambda batch: None) as running:
        yield running
    assert not socket_path.exists()
    assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*"))


class Line:
    """A line with one call, as thin as one can be: no clock, it answers whatever comes."""

    def __init__(self, running: Running, caller: str = "x", **settings: float) -> None:
        self.running = running
        self.channel: Channel | None = None
        self.client = ControlClient.connect(running.config.control.socket)
        self.client.send(control.Join(1, "test", caller, settings))
        running.lines.append(self)
        self.answer = self.next()
        if isinstance(self.answer, control.Admitted):
            self.channel = Channel.attach(self.answer.channel)
        self._pcm = np.zeros(1920, np.float32)

    def next(self) -> control.FromBox:
        message = self.client.receive(DEADLINE_S)
        assert message is not None, "the box said nothing"
        return message

    @property
    def admitted(self) -> control.Admitted:
        assert isinstance(self.answer, control.Admitted), self.answer
        return self.answer

    def speak(self, frames: int, last: bool = False) -> None:
        assert self.channel is not None
        for n in range(frames):
            flags = LAST if last and n == frames - 1 else 0
            assert self.channel.uplink.put(UplinkHeader(n, flags, 1), self._pcm)

    def settle(self, frames: int) -> None:
        """Take ``frames`` frames as they come, and send a receipt for each."""
        assert self.channel is not None
        admitted = self.admitted
        for _ in range(frames):
            self.running.wait_for(lambda: bool(self.channel and self.channel.downlink.waiting))
            header = self.channel.downlink.get(self._pcm)
            assert header is not None
            receipt = Receipt(
                admitted.session, admitted.generation, header.frame_index, Outcome.DELIVERED, 1, 2
            )
            assert self.channel.receipts.put(receipt)

    def settle_all(self) -> control.FromBox:
        """Send a receipt for every frame that comes until the box says something; that."""
        assert self.channel is not None
        stamp = self.admitted.session, self.admitted.generation
        for _ in range(int(DEADLINE_S / 0.01)):
            while (header := self.channel.downlink.get(self._pcm)) is not None:
                receipt = Receipt(*stamp, header.frame_index, Outcome.DELIVERED, 1, 2)
                assert self.channel.receipts.put(receipt)
            if (news := self.client.receive(0.01)) is not None:
                return news
        raise AssertionError("the box said nothing")

    def close(self) -> None:
        self.client.close()
        if self.channel is not None:
            self.channel.close()


def test_a_call_from_hello_to_goodbye(running: Running) -> None:
    line = Line(running, "Ann")
    line.speak(3, last=True)
    assert line.settle_all() == control.Gone(line.admitted.session, "finished")
    line.close()
    (session,) = running.summary().sessions
    # A tick that this machine was too busy for makes no frame, and has its record.
    assert (session.due, session.generated + session.missed) == (3, 3)
    assert session.on_time + session.late == session.generated > 0
    assert (session.caller, session.ended, session.unexplained) == ("Ann", "finished", 0)


def test_the_welcome_says_what_a_line_must_know(running: Running) -> None:
    line = Line(running)
    welcome = line.client.welcome
    assert (welcome.model, welcome.trained, welcome.notice) == ("echo", False, "an echo, for tests")
    assert (welcome.period_ns, welcome.sample_rate_hz) == (80 * MS, 24_000)
    assert (welcome.samples_per_frame, welcome.silent_ids) == (1920, (3,))
    assert Path(welcome.pieces).is_file()
    line.close()


def test_a_full_box_refuses_with_a_reason_and_takes_the_next_one_when_there_is_room(
    running: Running,
) -> None:
    first, second, third = Line(running), Line(running), Line(running)
    assert third.answer == control.Refused(1, Reason.LINES, "all 2 slots are taken")
    first.client.send(control.Leave(first.admitted.session))
    assert first.next() == control.Gone(first.admitted.session, "left")
    fourth = Line(running)
    assert fourth.admitted.session not in (first.admitted.session, second.admitted.session)
    for line in (first, second, third, fourth):
        line.close()


def test_a_setting_that_is_none_is_refused(running: Running) -> None:
    line = Line(running, gian=1.0)
    assert isinstance(line.answer, control.Refused)
    assert (line.answer.reason, "gian" in line.answer.detail) == (Reason.FAULT, True)
    line.close()


def test_a_full_dev_shm_is_a_refusal_and_not_a_crash(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    refused = Line(running)
    assert isinstance(refused.answer, control.Refused)
    assert refused.answer.reason is Reason.MEMORY
    assert "/dev/shm has no room" in refused.answer.detail
    monkeypatch.undo()
    admitted = Line(running), Line(running)  # the refusal kept no lease
    for line in (refused, *admitted):
        assert line is refused or isinstance(line.answer, control.Admitted)
        line.close()


def test_a_line_that_vanishes_takes_its_call_with_it_and_no_other(running: Running) -> None:
    doomed, other = Line(running, "doomed"), Line(running, "other")
    doomed.speak(1)
    other.speak(3)
    running.wait_for(lambda: running.box.loop.counts.live == 2)
    doomed.close()
    other.speak(1, last=True)  # not before: it must not end while this machine is late to look
    assert other.settle_all() == control.Gone(other.admitted.session, "finished")
    running.wait_for(lambda: running.box.switchboard.sessions == 0)
    other.close()
    lost, finished = running.summary().sessions
    assert (lost.ended, lost.failed, lost.unexplained) == ("lost", True, 0)
    assert lost.lost == lost.generated > 0
    assert (finished.ended, finished.unexplained) == ("finished", 0)
    assert finished.due == finished.generated + finished.missed >= 4


def test_a_line_that_sends_garbage_is_cut_off(running: Running) -> None:
    line = Line(running)
    line.client._socket.send(b"\xffgarbage")
    with pytest.raises(control.BoxGone):
        line.next()
    line.close()
    another = Line(running)
    assert isinstance(another.answer, control.Admitted)
    another.close()


def test_nobody_ends_another_lines_call(running: Running) -> None:
    mine, other = Line(running), Line(running)
    other.client.send(control.Leave(mine.admitted.session, "not mine"))
    other.client.send(control.Status(7))
    report_ = other.next()
    assert isinstance(report_, control.Report)
    assert (report_.request, report_.leases_held, report_.slots) == (7, 2, 2)
    assert mine.client.receive(0.3) is None
    mine.close()
    other.close()


def test_a_line_that_never_settles_is_given_up_and_its_frames_are_unexplained(
    running: Running,
) -> None:
    line = Line(running)
    line.speak(2, last=True)
    assert line.next() == control.Gone(line.admitted.session, "timeout")
    line.close()
    summary = running.summary()
    (session,) = summary.sessions
    assert session.ended == "timeout"
    assert summary.unexplained == session.generated == session.due - session.missed > 0


def test_a_caller_who_never_speaks_is_given_up(tmp_path: Path, socket_path: Path) -> None:
    with Running(tmp_path, socket_path, lambda batch: None, first_frame_s=1) as running:
        line = Line(running)
        assert line.next() == control.Gone(line.admitted.session, "timeout")


def test_a_second_box_does_not_take_the_first_ones_socket(running: Running, tmp_path: Path) -> None:
    with pytest.raises(SocketTaken, match="another box listens"):
        Box(running.config, running.executor, MonotonicClock(), 2**30)


def test_the_socket_of_a_box_that_was_killed_is_replaced(tmp_path: Path, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(socket_path))
    with Running(tmp_path, socket_path, lambda batch: None) as running:
        Line(running).close()


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path, socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(SocketTaken, match="is not a socket"):
        Running(tmp_path, socket_path, lambda batch: None)
    assert socket_path.read_text() == "precious"


def test_a_ledger_that_cannot_be_written_is_a_config_error(
    tmp_path: Path, socket_path: Path
) -> None:
    (tmp_path / "calls").write_text("a file, where the folder should be")
    with pytest.raises(ConfigError, match=r"\[ledger\] folder"):
        Running(tmp_path, socket_path, lambda batch: None)


def test_a_broken_engine_ends_the_box_loudly_and_leaves_nothing_behind(
    tmp_path: Path, socket_path: Path
) -> None:
    broken = threading.Event()

    def work(batch: int) -> None:
        if broken.is_set():
            raise RuntimeError("stage temporal failed at batch 1")

    running = Running(tmp_path, socket_path, work)
    running.start()
    line = Line(running)
    broken.set()
    line.speak(1)
    running.join()
    assert isinstance(running.error, RuntimeError)
    with pytest.raises(control.BoxGone):
        line.next()
    line.close()
    assert not socket_path.exists()
    assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*"))
    (session,) = running.summary().sessions
    assert session.ended == "unfinished"


def test_a_full_disk_is_an_alarm_and_no_lost_frame(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    line = Line(running)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        line.speak(3)
        line.settle(6)  # three of them on silence

        def report_of_the_box() -> control.Report:
            line.client.send(control.Status(1))
            report_ = line.next()
            assert isinstance(report_, control.Report)
            return report_

        running.wait_for(lambda: report_of_the_box().disk_errors > 0)
        report_ = report_of_the_box()
        assert (report_.records_lost, report_.records_dropped) == (0, 0)
    line.speak(1, last=True)
    assert line.settle_all() == control.Gone(line.admitted.session, "finished")
    line.close()
    (session,) = running.summary().sessions  # there is room again: nothing is missing
    assert (session.unrecorded, session.records_lost, session.dropped_bytes) == (0, 0, 0)
    assert session.due >= 7


def test_a_drained_box_lets_nobody_in_and_ends_who_is_there(running: Running) -> None:
    inside = Line(running)
    inside.speak(2)
    inside.settle(2)
    running.box.drain()
    gone = inside.next()
    while not isinstance(gone, control.Gone):
        gone = inside.next()
    assert gone.why in ("stopped", "timeout")  # timeout: frames after the two had no receipt
    inside.close()
    running.join()


def spend(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_newcomer_who_would_make_ticks_late_is_refused_for_time(
    tmp_path: Path, socket_path: Path
) -> None:
    for attempt in range(ATTEMPTS):
        with Running(
            tmp_path / str(attempt),
            socket_path,
            lambda batch: spend(0.06 * batch - 0.05),  # 10 ms alone; 70 of 80 with two
            AdmissionConfig(calibrate_s=0, min_margin_ms=16),
        ) as running:
            first, second = Line(running), Line(running)
            if isinstance(first.answer, control.Refused):
                continue  # this machine had something else to do while steps were timed
            assert isinstance(second.answer, control.Refused)
            assert second.answer.reason is Reason.TIME
            assert "with 2 sessions at guaranteed fill" in second.answer.detail
            second.client.send(control.Status(3))
            report_ = second.next()
            assert isinstance(report_, control.Report)
            assert (report_.sessions_free, report_.limited_by) == (0, "time")
            assert report_.forecast_ns > 70 * MS
            assert report_.refusals == {"time": 1}
            return
    pytest.fail(f"the first caller was refused in each of {ATTEMPTS} attempts: {first.answer}")


def test_overload_that_comes_all_the_same_sends_the_newest_away_and_keeps_the_other(
    tmp_path: Path, socket_path: Path
) -> None:
    slow = threading.Event()

    def work(batch: int) -> None:
        spend(0.11 if batch > 1 and slow.is_set() else 0)

    with Running(tmp_path, socket_path, work) as running:
        older, newest = Line(running, "older"), Line(running, "newest")
        older.speak(1)
        newest.speak(1)
        running.wait_for(lambda: running.box.loop.counts.live == 2)
        slow.set()
        assert newest.next() in (
            control.Gone(newest.admitted.session, "shed"),
            control.Gone(newest.admitted.session, "timeout"),  # nobody wrote its receipts
        )
        # The other has its time back.
        running.wait_for(lambda: running.box.loop.counts.late_run == 0)
        assert running.box.switchboard.sessions_shed == 1
        another = Line(running, "another")
        assert isinstance(another.answer, control.Refused)
        assert another.answer.reason is Reason.TIME


def test_what_the_machine_has_is_a_sane_number() -> None:
    assert 2**26 < available_memory_bytes() < 2**50


SERVE = """
import sys
from pathlib import Path
from appliance import box, cli
from appliance.clock import MonotonicClock
from appliance.notify import Notify
from tests.fakes import FakeExecutor, make_bundle
folder = Path(sys.argv[1])
executor = FakeExecutor(make_bundle(folder / "bundle"), 2)
if sys.argv[2:] == ["hang"]:
    import time
    executor.work = lambda batch: time.sleep(60 if (folder / "hang").exists() else 0)
box.open_box = lambda config: box.Box(config, executor, MonotonicClock(), 2**30, Notify())
sys.exit(cli.main(["serve", "--config", str(folder / "duplexbox.toml")]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_drains_and_ends_with_0_when_it_is_told_to(
    tmp_path: Path, socket_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "duplexbox.toml").write_text(
        f'[engine]\nbundle = "{tmp_path}/bundle"\n[clock]\ndrain_s = 0\n'
        f'[control]\nsocket = "{socket_path}"\n[ledger]\nfolder = "{tmp_path}/calls"\n'
        "[admission]\ncalibrate_s = 0\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert any("ready: slots=2" in line for line in process.stderr)
        client = ControlClient.connect(socket_path)
        client.send(control.Join(1, "test", "x"))
        assert isinstance(client.receive(DEADLINE_S), control.Admitted)
        process.send_signal(number)
        assert isinstance(client.receive(DEADLINE_S), control.Gone)
        assert process.wait(DEADLINE_S) == 0
        client.close()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not socket_path.exists()
