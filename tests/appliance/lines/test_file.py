"""Whole calls: a line process on one side, an echoing box on the other, in real time."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile

from appliance.admission import Reason
from appliance.clock import NS_PER_MS
from appliance.frame_ring import Outcome
from appliance.lines.call_report import CallReport
from appliance.lines.file import UsageError, add_arguments, plan_calls, run_calls
from tests.fakes_line import PERIOD_NS, RATE_HZ, SAMPLES, FakeBox, FakeSession, Trouble

pytestmark = pytest.mark.clock

ROOT = Path(__file__).resolve().parents[3]
LINE = """
import argparse, sys
from appliance.lines.file import add_arguments, run_calls
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run_calls(parser.parse_args()))
"""


def parse(*words: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def speech(path: Path, samples: int, rate_hz: int = RATE_HZ, channels: int = 1) -> Path:
    pcm = np.random.default_rng(samples).integers(-9000, 9000, (samples, channels), np.int16)
    soundfile.write(path, pcm, rate_hz, subtype="PCM_16")
    return path


def start_line(*words: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LINE, *map(str, words)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def spend() -> None:
    """Let the box, a thread of this process, and the line have the machine for a moment."""
    threading.Event().wait(0.01)


def box_reaches(
    box: FakeBox, line: "subprocess.Popen[str]", there: Callable[[FakeSession], bool]
) -> None:
    while not (box.sessions and there(box.sessions[0])):
        assert line.poll() is None, line.communicate()
        assert box.failure is None
        spend()


def recorded(path: Path) -> int:
    frames: int = soundfile.info(path).frames
    return frames


def report(folder: Path, stem: str) -> CallReport:
    return msgspec.json.decode((folder / f"{stem}.json").read_bytes(), type=CallReport)


def place_undisturbed(folder: Path, stems: Sequence[str], *words: str | Path) -> FakeBox:
    """Run a line process until nothing was late: this machine may be busy with something else."""
    for _ in range(6):
        with FakeBox(folder) as box:
            line = start_line("--socket", box.path, *words)
            _, said = line.communicate(timeout=60)
        box.path.unlink()
        assert line.returncode == 0, said
        reports = [report(folder / "out", stem) for stem in stems]
        if not any(figures.concealed + figures.late + figures.filled for figures in reports):
            assert "this box only echoes" in said
            assert all(f"{stem}: finished: " in said for stem in stems)
            return box
    pytest.fail("six runs on end had frames late: more than a busy machine")


@pytest.mark.slow
def test_three_callers_are_heard_to_the_last_sample(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wavs = [
        speech(tmp_path / "a.wav", 30 * SAMPLES - 17),
        speech(tmp_path / "b.wav", 44_100 + 3, 44_100, channels=2),
        speech(tmp_path / "c.wav", 8_000, 8_000),
    ]
    box = place_undisturbed(
        tmp_path,
        ["01-a", "02-b", "03-c"],
        *wavs,
        *("--out", out, "--stagger", "0.3", "--set", "x.seed=3"),
    )
    assert [session.join.caller for session in box.sessions] == ["a.wav", "b.wav", "c.wav"]
    assert [session.join.settings for session in box.sessions] == [{"x.seed": 3.0}] * 3
    # Exactly one receipt per frame.
    for session, frames in zip(box.sessions, (30, 13, 13), strict=True):
        assert session.outcomes()[Outcome.DELIVERED] == list(range(frames))
        assert len(session.receipts) == frames
        assert session.heard == list(range(frames))
        # The grid is the box's, and its own: no frame is captured at the time of a wake-up.
        assert set(np.diff(session.captured_ns)) == {PERIOD_NS}
    lengths = [soundfile.info(out / f"{stem}.reply.wav").frames for stem in ("01-a", "02-b")]
    assert lengths == [30 * SAMPLES - 17, round(44_103 * 24_000 / 44_100)]
    # The echo is a frame behind, and every bit of it is there.
    reply, rate_hz = soundfile.read(out / "01-a.reply.wav", dtype="int16")
    caller, _ = soundfile.read(wavs[0], dtype="int16")
    assert rate_hz == RATE_HZ
    assert (reply[:SAMPLES] == 0).all()
    assert (reply[SAMPLES:] == caller[:-SAMPLES]).all()
    # In the conversation the reply lies where it was heard: a round trip after the caller.
    both, _ = soundfile.read(out / "01-a.conversation.wav", dtype="int16")
    figures = report(out, "01-a")
    assert figures.round_trip_ms is not None
    at = round(figures.round_trip_ms * RATE_HZ / 1000)
    assert (both[: caller.size, 0] == caller).all()
    assert (both[:at, 1] == 0).all()
    assert (both[at : at + reply.size, 1] == reply).all()
    assert figures.captured_to_in_hand_ms is not None
    assert 20 <= figures.captured_to_in_hand_ms.min <= figures.captured_to_in_hand_ms.max
    assert (figures.warming, figures.concealed, figures.strays) == (1, 0, 0)
    assert (out / "01-a.txt").read_text().startswith("  0.1 s  so it goes so it goes")


def place(folder: Path, box: FakeBox, samples: int, *words: str) -> int:
    """One caller in this process; ``folder`` gets its files."""
    wav = speech(folder / "in.wav", samples)
    return run_calls(parse(wav, "--socket", box.path, "--out", folder, *words))


@pytest.mark.slow
def test_lost_and_late_frames_are_accounted_for(tmp_path: Path) -> None:
    late = {
        5: PERIOD_NS + 22 * NS_PER_MS,  # after its deadline, in hand when it is due
        9: 3 * PERIOD_NS,  # long after its playout time
    }
    with FakeBox(tmp_path, Trouble(lost=frozenset({3}), late=late)) as box:
        assert place(tmp_path, box, 20 * SAMPLES) == 0
    outcomes = box.sessions[0].outcomes()
    # What waits behind frame 9 comes late, too.
    assert 3 in outcomes[Outcome.FILLED]
    assert 9 in outcomes[Outcome.FILLED]
    assert 9 in outcomes[Outcome.DISCARDED]
    assert 5 in outcomes[Outcome.LATE] + outcomes[Outcome.FILLED]
    heard = sorted(outcomes[Outcome.DELIVERED] + outcomes[Outcome.LATE] + outcomes[Outcome.FILLED])
    frames = box.sessions[0].frame_index
    assert heard == list(range(frames))
    figures = report(tmp_path, "01-in")
    assert figures.frames_heard == frames
    assert figures.filled == len(outcomes[Outcome.FILLED])
    assert figures.discarded == len(outcomes[Outcome.DISCARDED])
    reply, _ = soundfile.read(tmp_path / "01-in.reply.wav", dtype="int16")
    assert reply.size == frames * SAMPLES
    spoken = [bool(frame.any()) for frame in reply.reshape(-1, SAMPLES)]
    assert not any(spoken[k] for k in outcomes[Outcome.FILLED])
    assert any(spoken[k] for k in outcomes[Outcome.DELIVERED])


@pytest.mark.slow
def test_a_caller_who_vanishes_leaves_receipts_for_everything(tmp_path: Path) -> None:
    with FakeBox(tmp_path) as box:
        assert place(tmp_path, box, 50 * SAMPLES, "--drop-after", "1=0.9") == 0
    session = box.sessions[0]
    assert [leave.why for leave in box.leaves] == ["hung up"]
    assert session.gone == "left"
    outcomes = session.outcomes()
    assert session.unaccounted() == {}
    # Of what was in hand, or of what would have been, had this machine had time to make it.
    assert outcomes[Outcome.DISCARDED] or outcomes[Outcome.FILLED]
    figures = report(tmp_path, "01-in")
    assert figures.reply_samples == figures.frames_heard * SAMPLES


@pytest.mark.slow
def test_ctrl_c_says_goodbye_and_leaves_whole_files(tmp_path: Path) -> None:
    wav = speech(tmp_path / "long.wav", 500 * SAMPLES)
    with FakeBox(tmp_path) as box:
        line = start_line(wav, "--socket", box.path, "--out", tmp_path)
        try:
            box_reaches(box, line, lambda session: session.frame_index > 5)
            line.send_signal(signal.SIGINT)
            _, said = line.communicate(timeout=60)
        finally:
            line.kill()
            line.wait()
    assert line.returncode == 130, said
    assert "Traceback" not in said
    session = box.sessions[0]
    assert session.gone == "finished"
    assert report(tmp_path, "01-long").frames_heard == session.frame_index
    assert soundfile.info(tmp_path / "01-long.reply.wav").frames == session.frame_index * SAMPLES


@pytest.mark.slow
def test_a_killed_line_is_lost_to_the_box_and_its_recording_plays(tmp_path: Path) -> None:
    wav, reply = speech(tmp_path / "long.wav", 500 * SAMPLES), tmp_path / "01-long.reply.wav"
    with FakeBox(tmp_path) as box:
        line = start_line(wav, "--socket", box.path, "--out", tmp_path)
        try:
            box_reaches(box, line, lambda session: session.frame_index > 30)
            while recorded(reply) < 12 * SAMPLES:
                spend()
        finally:
            line.kill()
            line.communicate()
        while not box.sessions[0].gone:
            assert box.failure is None
            spend()
        name = box.sessions[0].channel.name
        assert Path("/dev/shm", name).exists()
    assert box.sessions[0].gone == "lost"
    assert not Path("/dev/shm", name).exists()
    assert recorded(reply) >= 12 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        (Trouble(refuse=Reason.LINES), "01-in: refused (lines): 1 of 1 slots is taken"),
        (Trouble(fault_at=4), "01-in: the box ended it: fault"),
        (Trouble(vanish_at=4), "01-in: the box closed the connection; its log says why"),
    ],
)
def test_trouble_with_the_box_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trouble: Trouble, complaint: str
) -> None:
    with FakeBox(tmp_path, trouble) as box:
        assert place(tmp_path, box, 30 * SAMPLES) == 1
    assert complaint in capsys.readouterr().err.splitlines()
    if trouble.refuse is None:
        figures = report(tmp_path, "01-in")
        assert recorded(tmp_path / "01-in.reply.wav") == figures.frames_heard * SAMPLES
        assert figures.ended in complaint


def test_no_box_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wav = speech(tmp_path / "in.wav", 100)
    out = tmp_path / "out"
    assert run_calls(parse(wav, "--socket", tmp_path / "none.sock", "--out", out)) == 1
    assert "no box answers at" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda path: path.write_text("no audio"), "is not a WAV file. Convert it: ffmpeg"),
        (lambda path: speech(path, 0), "has 0 samples; hand in"),
        (lambda path: None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_call_stops_everybody_before_the_first_call(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], object],
    complaint: str,
) -> None:
    good = speech(tmp_path / "good.wav", 100)
    bad = tmp_path / "bad.wav"
    write(bad)
    with FakeBox(tmp_path) as box:
        assert run_calls(parse(good, bad, "--socket", box.path, "--out", tmp_path)) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert box.sessions == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--hang-up-after", "2"], "--hang-up-after 2: expected I=S, such as 2=6.5"),
        (["--hang-up-after", "x=1"], "expected I=S"),
        (["--hang-up-after", "3=1"], "--hang-up-after 3=1: there are callers 1 to 2"),
        (["--drop-after", "1=0"], "--drop-after 1=0: expected more than 0 seconds"),
        (["--drop-after", "1=nan"], "expected more than 0 seconds"),
        (["--drop-after", "1=2", "--hang-up-after", "1=3"], "caller 1 cannot both"),
        (["--set", "temperature"], "--set temperature: expected NAME=NUMBER"),
        (["--set", "t=inf"], "expected NAME=NUMBER"),
        (["--stagger", "-1"], "--stagger -1.0: expected seconds, 0 or more"),
    ],
)
def test_a_wrong_option_is_said_with_what_was_expected(words: list[str], complaint: str) -> None:
    args = parse("a.wav", "b.wav", "--socket", "s", "--out", "o", *words)
    with pytest.raises(UsageError, match=complaint.replace("(", r"\(")):
        plan_calls(args, 0)
    assert run_calls(args) == 2


def test_callers_start_one_after_the_other() -> None:
    args = parse(
        *("a.wav", "b.wav", "c.wav", "--socket", "s", "--out", "o", "--stagger", "2"),
        *("--hang-up-after", "2=6.5", "--drop-after", "3=1"),
    )
    plans = plan_calls(args, 100)
    assert [plan.start_ns for plan in plans] == [100, 2_000_000_100, 4_000_000_100]
    assert [plan.hang_up_after_ns for plan in plans] == [None, 6_500_000_000, 1_000_000_000]
    assert [plan.abrupt for plan in plans] == [False, False, True]
    assert [plan.stem for plan in plans] == ["01-a", "02-b", "03-c"]


def test_arguments_can_be_defined_without_loading_audio_libraries() -> None:
    code = (
        "import argparse, sys; from appliance.lines.file import add_arguments; "
        "add_arguments(argparse.ArgumentParser()); "
        "sys.exit(any(name in sys.modules for name in ('soundfile', 'soxr')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ).returncode == 0
