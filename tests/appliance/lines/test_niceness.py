"""What is asked of the kernel, and what is said if it will not."""

import os
import threading
from pathlib import Path

from appliance.lines.niceness import ask_for


def test_it_is_asked_for_the_thread_and_for_its_session(tmp_path: Path) -> None:
    group = tmp_path / "autogroup"
    group.write_text("/autogroup-7 nice 0\n")
    found: list[object] = []

    def work() -> None:
        found.append(ask_for(5, group))
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=work)  # whose niceness ends with it
    thread.start()
    thread.join()
    assert found == ["", 5]
    assert group.read_text() == "5\n"


def test_what_is_not_given_is_said_with_the_remedy(tmp_path: Path) -> None:
    group = tmp_path / "autogroup"
    group.mkdir()  # cannot be written to, as for a process without the right
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(ask_for(5, group)))
    thread.start()
    thread.join()
    assert "no niceness of 5: Is a directory. It needs LimitNICE" in found[0]


def test_kernels_without_groups_are_not_asked(tmp_path: Path) -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(ask_for(1, tmp_path / "none")))
    thread.start()
    thread.join()
    assert found == [""]
