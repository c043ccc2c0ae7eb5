"""Which threads are put ahead, and when none may be."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from appliance.lines.media_threads import MediaThreads, highest_priority

BOX = 500


def thread(proc: Path, process: int | str, number: int, name: str, priority: int = 0) -> None:
    """As /proc has it."""
    folder = proc / str(process) / "task" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    rest = ["S", *("0" for _ in range(36)), str(priority), "1"]
    (folder / "stat").write_text(f"{number} ({name}) {' '.join(rest)}\n")


class Kernel:
    """What it was asked for, and what it answers."""

    def __init__(self, trouble: OSError | None = None) -> None:
        self.given: list[int] = []
        self.trouble = trouble

    def give(self, number: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.given.append(number)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A line with one call and one box whose tick has priority 10."""
    thread(tmp_path, "self", 1, "python")
    thread(tmp_path, "self", 2, "Audio TX")
    thread(tmp_path, BOX, BOX, "a (b) c")
    thread(tmp_path, BOX, BOX + 1, "python", priority=10)
    return tmp_path


def media(proc: Path, kernel: Kernel) -> MediaThreads:
    return MediaThreads(["Audio TX", "aumem_src"], lambda: [BOX], kernel.give, proc)


def test_each_thread_with_a_media_name_is_put_ahead_once(proc: Path) -> None:
    kernel = Kernel()
    threads = media(proc, kernel)
    threads.look()
    threads.look()
    assert kernel.given == [2]
    thread(proc, "self", 3, "python")  # the next call's, before it has named itself
    threads.look()
    thread(proc, "self", 3, "aumem_src")
    threads.look()
    assert kernel.given == [2, 3]


def test_a_number_that_comes_again_is_another_thread(proc: Path) -> None:
    kernel = Kernel()
    threads = media(proc, kernel)
    threads.look()
    old = proc / "self" / "task" / "2"
    old.rename(proc / "gone")
    threads.look()
    thread(proc, "self", 2, "Audio TX")
    threads.look()
    assert kernel.given == [2, 2]


@pytest.mark.parametrize("priority", [0, 1])
def test_nothing_is_asked_for_while_a_tick_would_fall_behind(
    proc: Path, priority: int, caplog: pytest.LogCaptureFixture
) -> None:
    thread(proc, BOX, BOX + 1, "python", priority)
    kernel = Kernel()
    threads = media(proc, kernel)
    with caplog.at_level(logging.INFO):
        threads.look()
        threads.look()
    assert not kernel.given
    assert [record.getMessage() for record in caplog.records] == [
        "the stack's media threads stay ordinary ones: a box's tick has no real-time priority "
        "above 1, which theirs would be ([clock] realtime_priority)"
    ]
    thread(proc, BOX, BOX + 1, "python", priority=10)
    threads.look()
    assert kernel.given == [2]


def test_what_the_kernel_refuses_is_said_once_with_the_remedy(
    proc: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = media(proc, Kernel(PermissionError(errno.EPERM, "Operation not permitted")))
    with caplog.at_level(logging.INFO):
        threads.look()
        threads.look()
    (record,) = caplog.records
    assert record.getMessage() == (
        "no real-time priority of 1 for the stack's media threads: Operation not permitted. "
        "It needs LimitRTPRIO=1 in its unit, or CAP_SYS_NICE"
    )


def test_a_call_that_ends_meanwhile_is_no_trouble(
    proc: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        media(proc, Kernel(ProcessLookupError(errno.ESRCH, "No such process"))).look()
    assert not caplog.records


def test_a_box_that_is_gone_has_no_priority(proc: Path) -> None:
    assert highest_priority(BOX, proc) == 10
    assert highest_priority(501, proc) == 0


def test_the_kernels_own_figures_are_read() -> None:
    """This process's real threads, one of which may have any priority the machine gives it."""
    ours = max(os.sched_getparam(int(one)).sched_priority for one in os.listdir("/proc/self/task"))
    assert highest_priority(os.getpid()) == ours
    found: list[int] = []

    def work() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(3))
        except PermissionError:
            found.extend((ours, ours))
            return
        found.extend((highest_priority(os.getpid()), max(3, ours)))

    one = threading.Thread(target=work)
    one.start()
    one.join()
    assert found[0] == found[1]
