"""When the SIP stack's media threads wake up, and who has them do so."""

import ctypes
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from appliance.lines.sip_pace import LIBRARY, PRELOAD, preload, tell_nobody
from tests.appliance.lines.test_sip import line, speech
from tests.fakes_line import FakeBox
from tests.sip_peer import RATE_HZ, Phone, now_s, sleep

STEP_MS = 10
SENDER_US, FEEDER_US = 4_000, 20_000


@pytest.fixture(scope="module")
def sleeps() -> ctypes.CDLL:
    assert LIBRARY.is_file(), (
        f"{LIBRARY} was not compiled at installation: apt-get install gcc libc6-dev, and install "
        "duplexbox again"
    )
    library = ctypes.CDLL(str(LIBRARY))
    library.tmr_jiffies.restype = ctypes.c_uint64
    library.sys_usleep.restype = None
    library.thrd_join.argtypes = (ctypes.c_ulong, ctypes.c_void_p)
    return library


def woken_ms(library: ctypes.CDLL, us: int, times: int) -> list[int]:
    """What a thread takes for the time each time that it has slept."""
    found: list[int] = []

    def run() -> None:
        for _ in range(times):
            library.sys_usleep(us)
            found.append(library.tmr_jiffies())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_threads_wake_at_points_of_one_grid_and_senders_after_what_feeds_them(
    sleeps: ctypes.CDLL,
) -> None:
    senders = [woken_ms(sleeps, SENDER_US, 10) for _ in range(8)]
    feeders = [woken_ms(sleeps, FEEDER_US, 5) for _ in range(8)]
    for times in senders + feeders:
        # A thread that the machine woke late by a whole step is told the time as it is.
        phases = [ms % STEP_MS for ms in times]
        assert phases.count(phases[-1]) >= len(times) - 2
    assert {times[-1] % STEP_MS for times in senders} == {5, 6, 7, 8}
    assert {times[-1] % STEP_MS for times in feeders} == {0, 1, 2, 3}


def test_nobody_wakes_early_and_a_thread_that_has_not_slept_has_the_time(
    sleeps: ctypes.CDLL,
) -> None:
    def raw_ms() -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) // 1_000_000  # noqa: TID251

    for us in (SENDER_US, FEEDER_US):
        before = raw_ms()
        assert before + us // 1_000 <= woken_ms(sleeps, us, 1)[0] <= raw_ms()
    before = raw_ms()
    assert before <= sleeps.tmr_jiffies() <= raw_ms()


def test_a_thread_has_the_time_it_was_woken_for_and_the_real_one_when_it_is_a_step_late(
    sleeps: ctypes.CDLL,
) -> None:
    found: list[tuple[int, ...]] = []

    def run() -> None:
        for _ in range(10):
            sleeps.sys_usleep(FEEDER_US)
            woken = sleeps.tmr_jiffies()
            sleep(0.003)
            soon = sleeps.tmr_jiffies()
            sleep(0.02)
            found.append((woken, soon, sleeps.tmr_jiffies()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert sum(woken == soon for woken, soon, _ in found) >= 5  # unless we are late
    assert all(late >= woken + 20 for woken, _, late in found)


def test_a_signal_wakes_nobody(sleeps: ctypes.CDLL) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    took: list[float] = []

    def run() -> None:
        began = now_s()
        sleeps.sys_usleep(300_000)
        took.append(now_s() - began)

    try:
        thread = threading.Thread(target=run)
        thread.start()
        sleep(0.05)
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert took[0] >= 0.3


def test_a_sender_that_was_woken_looks_as_often_as_it_would_have_by_itself(
    sleeps: ctypes.CDLL,
) -> None:
    """Three times, or packets of 5 ms are never sent as fast as they are due."""
    looks = Counter(woken_ms(sleeps, SENDER_US, 60)).values()
    assert Counter(looks).most_common(1)[0][0] == 3
    assert max(Counter(woken_ms(sleeps, FEEDER_US, 10)).values()) == 1


def test_a_thread_that_is_waited_for_is_woken(sleeps: ctypes.CDLL) -> None:
    """A call that ends waits for its threads, and with it all that others say."""
    pthread_create = ctypes.CDLL(None).pthread_create
    pthread_create.argtypes = [ctypes.c_void_p] * 4
    thread = ctypes.c_ulong()
    a_minute_us = ctypes.c_void_p(60_000_000)
    began = now_s()
    asleep = ctypes.cast(sleeps.sys_usleep, ctypes.c_void_p)
    assert pthread_create(ctypes.byref(thread), None, asleep, a_minute_us) == 0
    sleep(0.1)  # it is known once it sleeps
    assert sleeps.thrd_join(thread, None) == 0
    assert now_s() - began < 20


def test_who_waits_for_a_thread_is_told_what_it_returned_or_that_it_cannot_be_waited_for(
    sleeps: ctypes.CDLL,
) -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = [ctypes.c_void_p] * 4
    thread, code = ctypes.c_ulong(), ctypes.c_int()
    returns_it = ctypes.cast(libc.abs, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(thread), None, returns_it, 42) == 0
    assert sleeps.thrd_join(thread, ctypes.byref(code)) == 0
    assert code.value == 42
    thrd_error = 2
    assert sleeps.thrd_join(threading.get_ident(), None) == thrd_error  # itself


def test_a_worker_is_started_with_it_and_tells_nobody(tmp_path: Path) -> None:
    library = Path(shutil.copy(LIBRARY, tmp_path / "sleep.so"))
    environ = {PRELOAD: "/usr/lib/theirs.so"}
    assert preload(environ, library) == ""
    assert environ == {PRELOAD: f"{library}:/usr/lib/theirs.so"}
    tell_nobody(environ, library)
    assert environ == {PRELOAD: "/usr/lib/theirs.so"}
    alone: dict[str, str] = {}
    preload(alone, library)
    tell_nobody(alone, library)
    assert alone == {}


def test_a_worker_is_started_without_what_the_loader_cannot_load_and_it_is_said(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "my programs"
    folder.mkdir()
    empty = tmp_path / "empty.so"
    empty.touch()
    for library, why in (
        (tmp_path / "sleep.so", "Install a C compiler"),
        (Path(shutil.copy(LIBRARY, folder / "sleep.so")), "where no name has one of ' :$'"),
        (empty, "file too short. On this machine, install duplexbox again"),
    ):
        environ = {PRELOAD: "/usr/lib/theirs.so"}
        said = preload(environ, library)
        assert why in said
        assert str(library) in said
        assert environ == {PRELOAD: "/usr/lib/theirs.so"}


class Impatient(Phone):
    """A telephone that wants short packets."""

    def sdp(self, *, direction: str = "sendrecv", payloads: str = "0 101") -> str:
        return super().sdp(direction=direction, payloads=payloads) + "a=ptime:5\r\n"


@pytest.mark.slow
@pytest.mark.clock
def test_a_caller_whose_packets_are_of_5_ms_hears_all_of_a_second_in_a_second(
    tmp_path: Path,
) -> None:
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path) as running,
        Impatient("bot", running.port) as phone,
    ):
        phone.dial()
        phone.talk(speech(0.5))
        heard = phone.talk(speech(2.0))
        phone.hang_up()
        running.wait("call 1 over")
    assert heard.pcm.size / heard.arrived_s.size == 5 * RATE_HZ / 1_000
    assert heard.pcm.size > 0.9 * 2 * RATE_HZ  # half of it, with one packet a wake-up


@pytest.mark.slow
@pytest.mark.clock
def test_the_stack_of_a_line_sleeps_so(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\ncat > /dev/null\nenv > "{tmp_path}/hook.env"\n')
    hook.chmod(0o700)
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, f'hook = "{hook}"') as running,
        Phone("bot", running.port) as phone,
    ):
        phone.dial()
        phone.talk(speech(1.0))
        (sender,) = threads(running.worker(), "Audio TX")
        before, began = switches(sender), now_s()
        phone.talk(speech(2.0))
        woken_per_s = (switches(sender) - before) / (now_s() - began)
        phone.hang_up()
        running.wait("call 1 over")
    assert 20 < woken_per_s < 150  # 250 by itself
    assert PRELOAD not in (tmp_path / "hook.env").read_text()


def threads(process: int, name: str) -> list[Path]:
    tasks = Path(f"/proc/{process}/task")
    return [
        tasks / one
        for one in os.listdir(tasks)
        if (tasks / one / "comm").read_text() == f"{name}\n"
    ]


def switches(thread: Path) -> int:
    """How often it has begun to wait."""
    for text in (thread / "status").read_text().splitlines():
        if text.startswith("voluntary_ctxt_switches"):
            return int(text.partition(":")[2])
    raise AssertionError(f"{thread} has no count of its waits")
