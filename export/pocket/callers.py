"""The demo's callers of the front desk: three short calls, written down as they are spoken.

Each is a list of what is said and when, by a voice that training never heard. The first gives a
number and confirms it, the second interrupts, the third pauses in mid-turn. They speak when it is
written here, whatever the desk does, as recordings do.

Not here: playing them (`appliance.demonstration`).
"""

import random
from pathlib import Path

import soundfile
import soxr
import torch

from export.pocket.mix import Mixer
from export.pocket.script import CALLER, FRAME, RATE_HZ, Call, Line, Scene, Stage

SECONDS = 16.0
LINE = Line(telephone=False, noise=0.0005, echo=0.0, echo_after=0)
TELEPHONE = Line(telephone=True, noise=0.0005, echo=0.0, echo_after=0)

Said = tuple[tuple[float, tuple[str, ...]], ...]
"""(when, chunks in a row)."""

CALLERS: dict[str, tuple[str, Line, Said]] = {
    "caller_number": (
        "flite-rms-1.0",
        LINE,
        (
            (3.6, ("my number is", "four,", "seven,", "one.")),
            (9.2, ("yes",)),
            (12.4, ("goodbye",)),
        ),
    ),
    "caller_interrupts": (
        "espeak-f2",
        LINE,
        (
            (3.6, ("the number is", "eight,", "two,", "five,", "six.")),
            (7.4, ("stop",)),
            (10.0, ("my name is", "Laura")),
        ),
    ),
    "caller_pauses": (
        "espeak-adam",
        TELEPHONE,
        (
            (3.6, ("my number is",)),
            (5.8, ("three,", "nine.")),
            (10.0, ("no that is wrong",)),
            (13.2, ("five.",)),
        ),
    ),
}


def write(stage: Stage, folder: Path) -> None:
    """NAME.wav and NAME.said.txt of every caller; ``stage``: the held-out voices."""
    mixer = Mixer(stage, torch.device("cpu"))
    for name, (voice, line, said) in CALLERS.items():
        call = _call(stage, voice, line, said)
        sound = mixer.calls([call], torch.Generator().manual_seed(0))[0, CALLER].numpy()
        rate_hz = 8_000 if line.telephone else 16_000
        sound = soxr.resample(sound, RATE_HZ, rate_hz)
        soundfile.write(folder / f"{name}.wav", sound, rate_hz, subtype="PCM_16")
        lines = (f"{at_s:5.1f} s  {_text(chunks)}\n" for at_s, chunks in said)
        (folder / f"{name}.said.txt").write_text("".join(lines), encoding="utf-8")


def _call(stage: Stage, voice: str, line: Line, said: Said) -> Call:
    scene = Scene(stage, random.Random(voice), round(SECONDS * RATE_HZ / FRAME), voice)
    scene.rate, scene.gain, scene.call.line = 1.0, 0.8, line
    for at_s, chunks in said:
        for text in chunks:
            form = {",": "within", ".": "end"}.get(text[-1], "")
            wanted = (text.rstrip(",."), form)
            chunk = next(c for c in stage.bank.of(voice) if (c.text, c.form) == wanted)
            at_s = scene.say(CALLER, chunk, at_s) + 0.07
    return scene.finish()


def _text(chunks: tuple[str, ...]) -> str:
    return " ".join(text.rstrip(",.") for text in chunks)
