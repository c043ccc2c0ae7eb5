"""Recordings of telephone calls: what is on the disk, how much, what a slow or full one costs."""

import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from numpy.typing import NDArray

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines import sip_recorder
from appliance.lines.sip_announce import Announcing, read
from appliance.lines.sip_config import SipRecording
from appliance.lines.sip_recorder import MB, Recorded, Recorder, RecorderError, Tape
from appliance.lines.sip_stack import Format
from appliance.lines.wav import WavError, WavWriter
from tests.fakes import FakeClock

RATE_HZ = 8_000
S = 640
PERIOD_NS = 80 * NS_PER_MS


class Rig:
    """A recorder with a folder, and what it said."""

    def __init__(
        self, folder: Path, *, keep_days: int = 0, keep_mb: int = 0, min_free_mb: int = 0
    ) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.finished: list[Recorded] = []
        self.heard = threading.Event()
        config = SipRecording(folder, None, keep_days, keep_mb, min_free_mb)
        self.recorder = Recorder(config, self.clock, self._hear)
        self.recorder.frames(S, RATE_HZ)

    def _hear(self, recorded: Recorded) -> None:
        self.finished.append(recorded)
        self.heard.set()

    def call(self, name: str, frames: int) -> Recorded:
        """One that lasts so long: the caller says 0.5, the model 0.25 from 100 ms on."""
        tape = self.recorder.tape(name)
        talk(tape, frames)
        tape.close()
        tape.close()
        assert self.heard.wait(10)
        self.heard.clear()
        return self.finished[-1]


def talk(tape: Tape, frames: int) -> None:
    for k in range(frames):
        tape.said(frame(0.5), (k + 1) * PERIOD_NS)
        tape.heard(frame(0.25), 100 * NS_PER_MS + k * PERIOD_NS)


def frame(value: float) -> NDArray[np.float32]:
    return np.full(S, value, np.float32)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "tapes")
    yield made
    made.recorder.close()


def test_both_sides_lie_where_they_were_heard(rig: Rig) -> None:
    done = rig.call("a-1", 40)
    assert (done.name, done.trouble) == ("a-1", "")
    pcm, rate_hz = sf.read(done.path)
    assert rate_hz == RATE_HZ
    assert done.path.name.endswith("-a-1.wav")
    assert (pcm[: 40 * S, 0] == 0.5).all()
    assert (pcm[:800, 1] == 0).all()
    assert (pcm[800:, 1] == 0.25).all()
    assert pcm.shape[0] == 40 * S + 800
    assert done.seconds == pytest.approx(pcm.shape[0] / RATE_HZ)


def test_a_sender_that_takes_whole_packets_leaves_no_clicks(rig: Rig) -> None:
    tape = rig.recorder.tape("a-5")
    for k in range(40):
        tape.said(frame(0.5), (k + 1) * PERIOD_NS)
        tape.heard(frame(0.25), 100 * NS_PER_MS + k * PERIOD_NS + (k * 13 % 41 - 20) * NS_PER_MS)
    for k in range(40, 60):  # a gap, and on
        tape.said(frame(0.5), (k + 1) * PERIOD_NS)
        tape.heard(frame(0.25), 180 * NS_PER_MS + k * PERIOD_NS)
    tape.close()
    rig.recorder.close()
    right = sf.read(rig.finished[0].path)[0][:, 1]
    first, last = np.flatnonzero(right)[[0, -1]]
    holes = np.flatnonzero(right[first:last] == 0)
    assert holes.size == pytest.approx(800, abs=10)  # the gap of 100 ms, and no other
    assert (np.diff(holes) == 1).all()


def test_ticks_without_a_frame_keep_their_time(rig: Rig) -> None:
    tape = rig.recorder.tape("a-2")
    for k in range(10):
        tape.said(None if k in (3, 4) else frame(0.5), (k + 1) * PERIOD_NS)
    tape.close()
    rig.recorder.close()
    pcm, _ = sf.read(rig.finished[0].path)
    assert pcm.shape[0] == 10 * S
    assert (pcm[3 * S : 5 * S] == 0).all()
    assert (pcm[5 * S :, 0] == 0.5).all()


def test_a_call_of_which_nothing_was_heard_leaves_no_file(rig: Rig) -> None:
    tape = rig.recorder.tape("a-3")
    tape.heard(frame(0.5), 0)
    tape.close()
    rig.recorder.close()
    assert [(done.seconds, done.trouble) for done in rig.finished] == [(0.0, "")]
    assert list(rig.folder.iterdir()) == []


def test_a_line_that_stops_finishes_what_is_being_recorded(rig: Rig) -> None:
    tape = rig.recorder.tape("a-4")
    talk(tape, 20)
    rig.recorder.close()
    assert sf.info(tape.path).frames == 20 * S + 800
    assert [done.name for done in rig.finished] == ["a-4"]


def test_old_files_go_first_and_the_ones_that_are_on_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tapes"
    folder.mkdir()
    for day in ("20250101", "20260101", "20260102"):
        (folder / f"{day}T000000.000Z-x-1.wav").write_bytes(bytes(MB // 2))
    (folder / "notes.txt").write_text("mine")
    rig = Rig(folder, keep_mb=1)
    done = rig.call("b-1", 20)
    assert done.trouble == ""
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["20260101T000000.000Z-x-1.wav", "20260102T000000.000Z-x-1.wav",
                    done.path.name, "notes.txt"]  # fmt: skip
    rig.recorder.close()
    aged = Rig(folder, keep_days=30)
    done = aged.call("b-2", 20)
    assert not [path for path in folder.iterdir() if path.name.startswith("202601")]
    aged.recorder.close()


def test_calls_that_are_on_and_take_too_much_are_not_recorded_further(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "tapes", keep_mb=1)
    tape = rig.recorder.tape("c-1")
    for k in range(1_000):  # 2.5 MB of stereo
        tape.said(frame(0.5), (k + 1) * PERIOD_NS)
        tape.heard(frame(0.25), k * PERIOD_NS)
        if k % 100 == 99:
            while not rig.recorder._queue.empty():
                pass
            rig.clock.advance(5 * NS_PER_S)
    tape.close()
    rig.recorder.close()
    (done,) = rig.finished
    assert "keep_mb is 1; nothing more is recorded" in done.trouble
    assert MB / 2 < done.path.stat().st_size < 2 * MB
    assert sf.info(done.path).frames > 0  # what there is can be played


def test_a_full_disk_costs_recordings_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 3 * MB))
    rig = Rig(tmp_path / "tapes", min_free_mb=500)
    done = rig.call("d-1", 20)
    assert "3 MB are free" in done.trouble
    assert done.seconds == 0
    monkeypatch.undo()
    rig.clock.advance(5 * NS_PER_S)
    rig.recorder._config = SipRecording(tmp_path / "tapes", min_free_mb=0)
    assert rig.call("d-2", 20).trouble == ""
    rig.recorder.close()


def test_a_disk_that_is_too_slow_leaves_frames_out_and_keeps_the_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sip_recorder, "MOST_WAITING", 4)
    held = threading.Event()
    begun = threading.Event()
    make_room = rig.recorder._make_room

    def slow() -> str:
        begun.set()
        assert held.wait(10)
        return make_room()

    monkeypatch.setattr(rig.recorder, "_make_room", slow)
    tape = rig.recorder.tape("e-1")
    tape.said(frame(0.5), PERIOD_NS)
    assert begun.wait(10)
    talk(tape, 30)
    held.set()
    tape.close()
    rig.recorder.close()
    (done,) = rig.finished
    assert tape.left_out >= 50
    assert done.trouble == f"the disk was too slow for {tape.left_out} frames"
    assert sf.info(done.path).frames == pytest.approx(31 * S, abs=S + 800)


def test_a_folder_that_cannot_be_written_to_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecorderError, match=r"\[sip\.recording\] folder"):
        Rig(tmp_path / "file" / "tapes")


class Sender:
    """A stack's sender that takes what it is given."""

    in_hz = 8_000
    codec = "g711"

    def __init__(self) -> None:
        self.queued = 0
        self.written: list[NDArray[np.int16]] = []

    def format(self) -> Format | None:
        return Format(8_000, self.queued)

    def read(self) -> NDArray[np.int16]:
        return np.zeros(0, np.int16)

    def write(self, pcm: NDArray[np.int16]) -> int:
        taken = pcm[:500]
        self.written.append(taken)
        self.queued += taken.size
        return int(taken.size)


def test_an_announcement_is_given_to_the_sender_as_it_plays(tmp_path: Path) -> None:
    path = tmp_path / "announcement.wav"
    with WavWriter(path, 16_000) as wav:
        wav.write(np.full(16_000, 0.5, np.float32))
    announcing, sender = Announcing(*read(path)), Sender()
    turns = 0
    while not announcing.is_over:
        announcing.turn(sender)
        assert sender.queued <= 800
        sender.queued = max(0, sender.queued - 80)
        turns += 1
        assert turns < 1_000
    heard = np.concatenate(sender.written)
    assert heard.size == 8_000
    assert np.abs(heard[500:-500].astype(int) - 16_384).max() < 200
    assert turns == pytest.approx(100, abs=15)  # a second, 10 ms at a time


def test_an_announcement_longer_than_the_box_waits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    with WavWriter(path, 8_000) as wav:
        wav.write(np.zeros(9 * 8_000, np.float32))
    with pytest.raises(WavError, match=r"lasts 9\.0 s; an announcement may last 8 s"):
        read(path)
