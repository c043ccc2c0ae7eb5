"""Short calls with one question each, and what a model's side of them is worth.

A `Trial` is a caller's whole side and the facts about it: what was said, when it ended, when it
interrupted or paused. `judge` looks at the model's sound and words, frame by frame, and answers in
numbers. Callers speak when a script says so, whatever the model does, as a recording would.

Times of the model are those at which a caller hears it. Frame t is computed when the caller's
frame t is whole, so without a box it is heard one frame after it; a line says how much later.

Not here: running a model (`bench.pocket`), the voices.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from export.pocket.script import (
    CALLER,
    FRAME,
    RATE_HZ,
    Call,
    Line,
    Scene,
    Stage,
)
from export.pocket.world import DIGITS, VOCABULARY, Kind

Sound = npt.NDArray[np.float32]

FRAME_S = FRAME / RATE_HZ
RATES = (0.88, 1.13)
"""Of voices; narrower than what training hears, and the same whatever training becomes."""
PAUSE_IN_NUMBER_S = (0.14, 0.26)
"""Inside a number, in a call with pauses; before the number they are longer."""
ANSWERED_S = 0.40
"""After a number, in an interrupted call: about when the answer has begun."""
FIRST_S = 3.6
"""The caller's first word: the desk's greeting is over."""
STEP = 240
"""Samples of a window in which the model is loud or not."""
LOUD = 0.008
"""Root mean square above which it is; its speech is near 0.1, its silence below 0.001."""
HOLE_S = 0.25
"""A shorter silence lies inside speech."""
QUIET = Line(telephone=False, noise=0.001, echo=0.0, echo_after=0)
"""The room of every trial; a telephone is whoever runs it, with the box's own resampler."""
KINDS = ("number", "name", "stop", "listener", "pause", "silence")


@dataclass
class Trial:
    """One call and the facts of it."""

    kind: str
    voice: str
    call: Call
    said: tuple[str, ...] = ()
    """The digits, or the name."""
    ends_s: float = 0.0
    """Of the caller's turn."""
    interrupts_s: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a model did; None where the question did not arise."""

    right: bool | None = None
    """It said back what was said."""
    gap_s: float | None = None
    """From the caller's end to the model's first sound."""
    stop_s: float | None = None
    """From an interruption to the model's silence."""
    spoke_in_pause: bool | None = None
    """It said words between the first pause and the caller's end: what a pause in a number draws
    out of it is mostly heard when the caller has gone on. In silence: within 1.5 s."""
    hummed: bool = False
    """It said "mm-hmm" in a pause."""
    went_on: bool | None = None
    """It said its question to the end, though a caller who listens said "mm-hmm" meanwhile."""
    words: str = ""


def trials(
    stage: Stage, seed: int, each: int, frames: int = 130, kinds: Sequence[str] = KINDS
) -> list[Trial]:
    """``each`` of every kind, voices in turn."""
    found = []
    for kind in kinds:
        for n in range(each):
            voice = stage.voices[n % len(stage.voices)]
            rng = random.Random(f"{seed} {kind} {n}")
            found.append(_trial(Scene(stage, rng, frames, voice, RATES), kind, 1 + n % 4))
    return found


def _trial(scene: Scene, kind: str, digits: int) -> Trial:
    rng = scene.rng
    scene.call.line = QUIET
    trial = Trial(kind, scene.voice, scene.call)
    at = FIRST_S + rng.uniform(0, 0.4)
    if kind == "name":
        at = scene.say(CALLER, scene.pick(Kind.LEAD_NAME), at) + 0.06
        chunk = scene.pick(Kind.NAME)
        trial.ends_s, trial.said = scene.say(CALLER, chunk, at), (chunk.text.lower(),)
    elif kind != "silence":
        at = scene.say(CALLER, scene.pick(Kind.LEAD_NUMBER), at)
        if kind == "pause":
            until = at + rng.uniform(0.5, 1.5)
            trial.pauses.append((at, until))
            at = until
        trial.said = tuple(rng.choices(DIGITS, k=digits))
        for n, digit in enumerate(trial.said, 1):
            form = "end" if n == digits else "within"
            at = scene.say(CALLER, rng.choice(scene.mine[digit, form]), at)
            if n < digits:
                halts = kind == "pause" and n == digits // 2
                until = at + (rng.uniform(*PAUSE_IN_NUMBER_S) if halts else 0.06)
                if halts:
                    trial.pauses.append((at, until))
                at = until
        trial.ends_s = at
        if kind in ("stop", "listener"):
            trial.interrupts_s = at + ANSWERED_S + 0.15 * digits + rng.uniform(0.5, 0.9)
            says = Kind.STOP if kind == "stop" else Kind.BACKCHANNEL
            scene.say(CALLER, scene.pick(says), trial.interrupts_s)
    scene.finish()
    return trial


def loud(sound: Sound) -> npt.NDArray[np.bool_]:
    """Per window of 10 ms: whether the model is heard."""
    windows = sound[: len(sound) // STEP * STEP].reshape(-1, STEP)
    return np.asarray(np.sqrt((windows.astype(np.float64) ** 2).mean(1)) > LOUD)


def speech(sound: Sound, delay_s: float = FRAME_S) -> list[tuple[float, float]]:
    """(from, to) in seconds of the call, as the caller hears them; holes are closed."""
    step_s = STEP / RATE_HZ
    found: list[tuple[float, float]] = []
    for index in np.flatnonzero(loud(sound)):
        begins = float(index) * step_s + delay_s
        if found and begins - found[-1][1] < HOLE_S:
            found[-1] = (found[-1][0], begins + step_s)
        else:
            found.append((begins, begins + step_s))
    return found


def timed(text: Sequence[int], delay_s: float) -> list[tuple[float, str]]:
    """(when it is heard, word) of the text of every frame, -1 for none."""
    return [(n * FRAME_S + delay_s, VOCABULARY[t][1:]) for n, t in enumerate(text) if _is_word(t)]


def judge(trial: Trial, sound: Sound, text: Sequence[int], delay_s: float = FRAME_S) -> Verdict:
    """sound (frames * FRAME,), text (frames,): the model's side of the call.

    delay_s: from the caller's first sample to the first one of ``sound``, as the caller hears it.
    """
    words = timed(text, delay_s)
    spoken = " ".join(word for _, word in words)
    heard = speech(sound, delay_s)
    if trial.kind == "silence":
        late = [begins for begins, _ in heard if begins > FIRST_S]
        return Verdict(spoke_in_pause=bool(late and late[0] < FIRST_S + 1.5), words=spoken)
    after = [word for at, word in words if at > trial.ends_s]
    if trial.kind == "name":
        right = bool(set(after) & set(trial.said))
    else:
        right = tuple(_first_number(after)) == trial.said
    starts = [begins for begins, _ in heard if begins > trial.ends_s - 0.08]
    gap = starts[0] - trial.ends_s if starts else None
    if trial.kind == "stop":
        return Verdict(stop_s=_stop(heard, trial.interrupts_s), words=spoken)
    if trial.kind == "listener":
        spoke = _stop(heard, trial.interrupts_s) is not None
        return Verdict(went_on="right" in after if spoke else None, words=spoken)
    if trial.kind == "pause":
        inside = [w for at, w in words if trial.pauses[0][0] < at < trial.ends_s]
        spoke = any(word != "mm-hmm" for word in inside)
        return Verdict(right, gap, None, spoke, "mm-hmm" in inside, words=spoken)
    return Verdict(right, gap, words=spoken)


def _is_word(token: int) -> bool:
    return 0 <= token < len(VOCABULARY) and VOCABULARY[token].startswith("▁")


def _first_number(words: list[str]) -> list[str]:
    """The first digits in a row."""
    found: list[str] = []
    for word in words:
        if word in DIGITS:
            found.append(word)
        elif found:
            break
    return found


def _stop(heard: list[tuple[float, float]], at_s: float) -> float | None:
    """How long after ``at_s`` the speech that was going on ended; None if there was none."""
    going = [until for begins, until in heard if begins < at_s < until]
    return going[0] - at_s if going else None


def summary(verdicts: Sequence[tuple[Trial, Verdict]]) -> dict[str, float]:
    """Shares and medians over all trials."""

    def of(kind: str) -> list[Verdict]:
        return [verdict for trial, verdict in verdicts if trial.kind == kind]

    found: dict[str, float] = {"trials": len(verdicts)}
    for kind in ("number", "name", "pause"):
        found[f"{kind} right"] = _share([v.right is True for v in of(kind)])
    gaps = [v.gap_s for v in of("number") + of("name") if v.gap_s is not None]
    asked = len(of("number")) + len(of("name"))
    found["answered"] = len(gaps) / max(1, asked)
    found["gap median s"] = float(np.median(gaps)) if gaps else float("nan")
    found["gap 90 % s"] = float(np.quantile(gaps, 0.9)) if gaps else float("nan")
    stops = [v.stop_s for v in of("stop") if v.stop_s is not None]
    found["spoke when interrupted"] = len(stops) / max(1, len(of("stop")))
    found["stopped in 0.4 s"] = _share([s <= 0.4 for s in stops])
    found["stop median s"] = float(np.median(stops)) if stops else float("nan")
    went_on = [v.went_on for v in of("listener") if v.went_on is not None]
    found["went on over mm-hmm"] = _share(went_on)
    found["spoke in a pause"] = _share([v.spoke_in_pause is True for v in of("pause")])
    found["hummed in a pause"] = _share([v.hummed for v in of("pause")])
    found["spoke into silence"] = _share([v.spoke_in_pause is True for v in of("silence")])
    return {key: round(value, 4) for key, value in found.items()}


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
