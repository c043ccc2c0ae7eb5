"""A line and its boxes: placed by headroom, refused only by all, and one lost box costs its own."""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from appliance import control, demonstration, ledger, report
from appliance.admission import Forecast, Reason
from appliance.clock import NS_PER_MS as MS
from appliance.clock import MonotonicClock
from appliance.lines.boxes import Boxes, News
from appliance.lines.synthetic import SyntheticReport
from appliance.step_model import StepModel
from tests.appliance.test_box import DEADLINE_S, Running, spend
from tests.small import SMALL

pytestmark = pytest.mark.clock

ROOT = Path(__file__).parents[3]
CLOCK = MonotonicClock()
ATTEMPTS = 3


class House:
    """Two boxes in this process, each with 2 slots, their sockets in one folder."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.sockets = sockets
        self.boxes = [
            Running(folder / "a", sockets / "a.sock", lambda batch: None, first_frame_s=60),
            Running(folder / "b", sockets / "b.sock", lambda batch: None, first_frame_s=60),
        ]
        for box in self.boxes:
            box.start()
            # Where callers go must not depend on how busy the machine of the tests is.
            box.box.switchboard.foresight.look_at_time = False

    def held(self) -> list[int]:
        return [box.box.switchboard.sessions for box in self.boxes]

    def close(self) -> None:
        for box in self.boxes:
            box.box.drain()
            box.join()


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        yield Path(folder)


@pytest.fixture
def house(tmp_path: Path, sockets: Path) -> Iterator[House]:
    house = House(tmp_path, sockets)
    yield house
    house.close()


@pytest.fixture
def boxes(house: House) -> Iterator[Boxes]:
    boxes = Boxes.connect(house.sockets, CLOCK)
    yield boxes
    boxes.close()


def answer(boxes: Boxes, call: int) -> News:
    """What ``call`` is told next; others' news are not expected."""
    for _ in range(int(DEADLINE_S / 0.05)):
        for news in boxes.receive(0.05):
            assert news.call == call
            return news
    raise AssertionError("no box said anything")


def join(boxes: Boxes, call: int) -> News:
    boxes.send(call, control.Join(call, "test", f"caller {call}"))
    return answer(boxes, call)


def test_newcomers_go_where_headroom_is_largest_and_are_refused_only_by_all(
    house: House, boxes: Boxes
) -> None:
    assert len(boxes) == 2
    seen = []
    for call in range(1, 5):
        news = join(boxes, call)
        assert isinstance(news.message, control.Admitted)
        assert news.t0_ns in {box.box.loop.grid.t0_ns for box in house.boxes}
        seen.append(house.held())
    # One here, one there: each time where more is free. Both have a session 1 and a session 2.
    assert seen == [[1, 0], [1, 1], [2, 1], [2, 2]]
    fifth = join(boxes, 5)
    assert isinstance(fifth.message, control.Refused)
    assert fifth.message.reason is Reason.LINES
    assert [sum(b.box.switchboard.refusals.values()) for b in house.boxes] == [1, 1]
    boxes.send(2, control.Leave(1, "enough"))  # call 2 is session 1 of the second box
    news = answer(boxes, 2)
    assert news.message == control.Gone(1, "left")
    house.boxes[1].wait_for(lambda: house.held() == [2, 1])


def test_a_box_that_has_no_time_sends_the_caller_to_the_other(house: House, boxes: Boxes) -> None:
    # The second box would take 10 ms for one session and 70 for two, and may take 50.
    model = StepModel(-50e6, 60e6, 0, 0, 0, 1e9, 9, 2, 1)
    strict = Forecast(model, 80 * MS, 30 * MS)
    second = house.boxes[1].box.switchboard.foresight
    second.forecast = lambda: strict  # type: ignore[method-assign]
    for call in range(1, 4):
        assert isinstance(join(boxes, call).message, control.Admitted)
    assert house.held() == [2, 1]
    fourth = join(boxes, 4).message
    assert isinstance(fourth, control.Refused)
    assert fourth.reason in (Reason.LINES, Reason.TIME)
    assert house.boxes[1].box.switchboard.refusals[Reason.TIME] == 1


def test_a_setting_nobody_takes_is_refused_once(house: House, boxes: Boxes) -> None:
    boxes.send(1, control.Join(1, "test", "x", {"gian": 1.0}))
    news = answer(boxes, 1)
    assert isinstance(news.message, control.Refused)
    assert news.message.reason is Reason.FAULT
    assert sum(b.box.switchboard.refusals[Reason.FAULT] for b in house.boxes) == 1


def test_no_box_in_a_folder_is_said_in_a_sentence(sockets: Path) -> None:
    with pytest.raises(control.BoxGone, match="no box answers in"):
        Boxes.connect(sockets, CLOCK)


@pytest.mark.slow
def test_one_engine_lost_costs_only_its_own_sessions(tmp_path: Path, sockets: Path) -> None:
    """Two engine processes on the demo's bundle, four callers in real time, one kill -9.

    A busy machine may let fewer in, or shed one, and says so; whoever was in is accounted for.
    """
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if killed := lose_one(folder, sockets):
            break
    else:
        pytest.fail(
            f"in {ATTEMPTS} attempts an engine had no time for anybody: a very busy machine"
        )
    lost, kept = (
        Counter(s.ended for s in report.summarise(ledger.read_folder(folder / name, [])).sessions)
        for name in ("a", "b")
    )
    told = msgspec.json.decode((folder / "callers.json").read_bytes(), type=list[SyntheticReport])
    outcomes = Counter(caller.ended for caller in told)
    # What the lost one wrote up to then can be read, and says that it has no end.
    assert lost["unfinished"] == killed >= 1
    assert set(lost) <= {"unfinished", "shed"}
    # The other engine's calls, each of them: whole, accounted for, and of full length.
    assert set(kept) <= {"finished", "shed"}
    summary = report.summarise(ledger.read_folder(folder / "b"))
    assert summary.unexplained == 0
    assert max(s.due for s in summary.sessions) >= 75
    # And every caller was told just that.
    assert outcomes["finished"] == kept["finished"] >= 1
    assert outcomes["shed"] == lost["shed"] + kept["shed"]
    assert outcomes["refused"] == len(told) - lost.total() - kept.total()
    broken = set(outcomes) - {"finished", "shed", "refused"}
    assert all("the box closed the connection" in why or "broke" in why for why in broken), broken
    assert sum(outcomes[why] for why in broken) == killed


def lose_one(folder: Path, sockets: Path) -> int:
    """Kill engine a while it holds calls, and so does b; how many it held. 0: one held none."""
    engines = [serve(folder, sockets, name) for name in ("a", "b")]
    callers = subprocess.Popen(
        [
            *(sys.executable, "-m", "duplexbox", "appliance", "callers"),
            *(str(path) for path in demonstration.script(SMALL).callers),
            *("--socket", str(sockets), "--out", str(folder / "callers.json")),
            *("--count", "4", "--talk", "6", "--stagger", "0.3", "--jitter-ms", "0", "--loss", "0"),
        ],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    killed = 0
    try:
        if both_have_calls(folder, callers):
            spend(1.5)  # all have asked by now, and those who were let in talk
            engines[0].send_signal(signal.SIGKILL)
            engines[0].wait(DEADLINE_S)
            found = report.summarise(ledger.read_folder(folder / "a", []))
            killed = sum(s.ended == "unfinished" for s in found.sessions)
            assert callers.wait(60) == 1
    finally:
        for process in (callers, *engines):
            process.terminate()
            process.wait(DEADLINE_S)
        for engine in engines:
            assert engine.stderr is not None
            engine.stderr.close()
        for name in Path("/dev/shm").glob(f"dbx-{engines[0].pid}-*"):
            name.unlink()  # what a killed process could not
    return killed


def both_have_calls(folder: Path, callers: "subprocess.Popen[str]") -> bool:
    """False: the callers are done, or nobody else is let in in time."""
    for _ in range(int(DEADLINE_S / 0.05)):
        if all(any((folder / name).glob("*.call")) for name in ("a", "b")):
            return True
        if callers.poll() is not None:
            return False
        spend(0.05)
    return False


def serve(
    folder: Path, sockets: Path, name: str, more: str = "", priority: int = 0, niceness: int = 0
) -> "subprocess.Popen[str]":
    config = folder / f"{name}.toml"
    config.write_text(
        f'[engine]\nbundle = "{SMALL}"\nslots = 4\n'
        f"[clock]\ndrain_s = 1\nrealtime_priority = {priority}\n"
        f'[control]\nsocket = "{sockets / f"{name}.sock"}"\n[ledger]\nfolder = "{folder / name}"\n'
        f"[admission]\ncalibrate_s = 1\nmin_margin_ms = 0\n{more}"
    )
    process = subprocess.Popen(
        [
            *("nice", "-n", str(niceness)),
            *(sys.executable, "-m", "duplexbox", "appliance", "serve", "--config", str(config)),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "ready: slots=4" in line:
            return process
    raise AssertionError(said)


def test_a_lost_box_tells_its_own_calls_and_the_rest_go_on(house: House, boxes: Boxes) -> None:
    for call in (1, 2):
        assert isinstance(join(boxes, call).message, control.Admitted)
    assert house.held() == [1, 1]
    house.boxes[0].box.drain()
    house.boxes[0].box.drain()
    house.boxes[0].join()
    assert answer(boxes, 1).message == control.Gone(1, "stopped")
    while len(boxes) > 1:
        assert boxes.receive(0.05) == []  # its call was told; the other one has lost nothing
    assert isinstance(join(boxes, 3).message, control.Admitted)
    assert house.boxes[1].box.switchboard.sessions == 2
