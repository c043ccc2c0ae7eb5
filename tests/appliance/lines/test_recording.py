"""Where each sample of a conversation is found afterwards."""

from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from appliance.lines.recording import WINDOW_S, Recording

RATE_HZ = 8_000
S = 640
MS = 1_000_000


def frame(value: float) -> NDArray[np.float32]:
    return np.full(S, value, np.float32)


def both(folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    reply, _ = soundfile.read(folder / "x.reply.wav")
    conversation, _ = soundfile.read(folder / "x.conversation.wav", always_2d=True)
    return reply, conversation


def test_the_reply_lies_where_the_caller_heard_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "x", RATE_HZ)
    for k in range(4):
        recording.said(frame(0.125 * (k + 1)), (1_000 + 80 * k) * MS)
        if k >= 2:
            recording.heard(frame(-0.25 * (k - 1)), (1_190 + 80 * (k - 2)) * MS)
    recording.close()
    reply, conversation = both(tmp_path)
    assert (reply == np.repeat([-0.25, -0.5], S)).all()
    at = 190 * RATE_HZ // 1000
    left, right = np.zeros(at + 2 * S), np.zeros(at + 2 * S)
    left[: 4 * S] = np.repeat([0.125, 0.25, 0.375, 0.5], S)
    right[at:] = np.repeat([-0.25, -0.5], S)
    assert (conversation == np.stack([left, right], 1)).all()


def test_odd_times_leave_neither_holes_nor_overlaps(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "x", RATE_HZ)
    recording.said(frame(0.5), 0)
    for k in range(50):
        recording.heard(frame(0.25), 12_345_678 + k * 80 * MS)
    recording.close()
    _, conversation = both(tmp_path)
    assert conversation.shape[0] == 99 + 50 * S
    assert (conversation[99:, 1] == 0.25).all()


def test_the_padding_of_the_last_frame_is_not_in_the_reply(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "x", RATE_HZ)
    recording.said(frame(0.5), 0)
    recording.heard(frame(0.25), 0)
    recording.heard(frame(0.25), 80 * MS)
    assert recording.reply_samples == 2 * S
    recording.close(padding_samples=S - 1)
    assert recording.reply_samples == S + 1
    assert both(tmp_path)[0].shape == (S + 1,)


def test_a_model_that_never_answers_costs_a_window_of_memory_and_no_more(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "x", RATE_HZ)
    frames = 3 * WINDOW_S * RATE_HZ // S
    for k in range(frames):
        recording.said(frame(0.5), k * 80 * MS)
    # It speaks at last, for a moment long past and then for now.
    recording.heard(frame(0.25), 80 * MS)
    recording.heard(frame(0.25), (frames - 1) * 80 * MS)
    recording.close()
    _, conversation = both(tmp_path)
    assert conversation.shape[0] == frames * S
    assert (conversation[:, 0] == 0.5).all()
    assert (conversation[-S:, 1] == 0.25).all()
    assert (conversation[:-S, 1] == 0).all()


def test_a_call_nobody_answered_still_has_its_caller(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "x", RATE_HZ)
    recording.said(frame(0.5), 0)
    recording.close()
    reply, conversation = both(tmp_path)
    assert reply.shape == (0,)
    assert (conversation == np.tile([0.5, 0.0], (S, 1))).all()
