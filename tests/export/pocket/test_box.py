"""Trials through a box: what its file line leaves becomes an answer, on its caller's own time."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile

from appliance.demonstration import POCKET
from appliance.frame_ring import DownlinkHeader
from appliance.journal import SUFFIX, Head, JournalWriter
from bench import pocket_box
from bench.pocket import conversation
from bench.pocket_box import Answer, Report
from export.pocket.script import FRAME, RATE_HZ


def left(folder: Path, stem: str, report: Report, texts: dict[int, int], frames: int) -> None:
    """What a line leaves of a call: its report, its journal, and the reply."""
    (folder / f"{stem}.json").write_bytes(msgspec.json.encode(report))
    writer = JournalWriter(
        folder / f"{stem}{SUFFIX}", Head(1, 1, 0, "pocket", FRAME, RATE_HZ, {}, None)
    )
    pcm = np.zeros(FRAME, np.float32)
    for index, text in texts.items():
        writer.heard(DownlinkHeader(1, 1, index, index, 0, 0, text, heard=index), pcm)
    writer.close()
    soundfile.write(folder / f"{stem}.reply.wav", np.zeros(frames * FRAME, np.float32), RATE_HZ)


def test_words_of_frames_that_never_came_are_none(tmp_path: Path) -> None:
    left(tmp_path, "01-a", Report("finished", 203.0, 2), {0: 3, 1: 40, 3: 41}, 4)
    answer = pocket_box.answer(tmp_path, "01-a")
    assert isinstance(answer, Answer)
    assert answer.text == [3, 40, -1, 41]
    assert answer.delay_s == pytest.approx(0.203)
    assert len(answer.sound) == 4 * FRAME
    assert answer.concealed == 2


def test_a_call_that_was_not_held_says_why(tmp_path: Path) -> None:
    (tmp_path / pocket_box.LOG).write_text("01-a: refused (lines): all 8 are taken\n")
    assert pocket_box.answer(tmp_path, "01-a") == "01-a: refused (lines): all 8 are taken"
    left(tmp_path, "02-b", Report("fault", 203.0, 0), {0: 3}, 1)
    assert pocket_box.answer(tmp_path, "02-b") == "02-b: fault"


@pytest.mark.slow
@pytest.mark.clock
def test_two_callers_are_answered_by_a_box_on_the_clock(tmp_path: Path) -> None:
    """One at the model's rate, one as a telephone's file; the box greets both."""
    files = [tmp_path / "wide.wav", tmp_path / "narrow.wav"]
    soundfile.write(files[0], np.zeros(36_000, np.float32), RATE_HZ, subtype="PCM_16")
    soundfile.write(files[1], np.zeros(12_000, np.float32), 8_000, subtype="ULAW")
    answers, clock = pocket_box.converse(POCKET, files, ["sampling.temperature=0"], tmp_path)
    assert clock["calls recorded"] == 2
    for answer in answers:
        assert isinstance(answer, Answer), answer
        assert 0.16 <= answer.delay_s < 0.6
        # 1.5 s said, and what the line hears afterwards; a frame that came too late moves the rest.
        assert len(answer.text) == len(answer.sound) // FRAME
        assert 18 <= len(answer.text) <= 20


def test_a_kept_conversation_lies_on_its_caller_s_time() -> None:
    caller, model = np.full(3 * FRAME, 0.5, np.float32), np.full(3 * FRAME, 0.25, np.float32)
    both = conversation(caller, model, 0.2)
    assert both.shape == (3 * FRAME + 4_800, 2)
    assert not both[:4_800, 1].any()
    assert (both[4_800:, 1] == 0.25).all()
    assert (both[: 3 * FRAME, 0] == 0.5).all()
