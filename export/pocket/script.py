"""One scripted call: who says what, and when; from a seed, without any sound.

A call of some frames becomes a `Call`: places of the bank's chunks on two channels, the desk's
text per frame, and for every frame the part of a word each side is in the middle of. The desk

- greets, and answers a turn 0.22 s after it, a number 0.285 s after its last digit;
- waits through pauses after lead-ins and fillers, and says "mm-hmm" in some, over which callers may
  go on; a pause inside a number is shorter than its answer's gap;
- stops a sixth of a second after a caller who interrupts, and speaks on through "mm-hmm";
- asks after five seconds of silence; ignores background speech and its own echo.

Everything is heard about 0.2 s later than it is written here: a frame must be whole before the
model sees it, the acoustic codebooks come one tick after the semantic one, and lines play a frame
out one later.

Not here: sound (`mix`), the words (`world`).
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from export.pocket.bank import AT_END, WITHIN, Bank, Chunk
from export.pocket.world import DIGITS, IDS, PADDING, Kind, words

RATE_HZ = 24_000
FRAME = 1_920
DESK, CALLER = 0, 1

ANSWER_S, ANSWER_NUMBER_S, SPREAD_S = 0.22, 0.34, 0.02
"""Heard through a box, 0.20 to 0.22 s more. With 0.285 s a number is answered within half a second,
and so is every other silence inside a number."""
REACTION_S = (0.12, 0.20)
"""From a caller's interruption to the desk's silence; heard through a box, 0.16 s more."""
INSIDE_S = (-0.03, 0.14)
"""Between two chunks of one breath; below zero they run into each other, as words do."""
PAUSE_IN_NUMBER_S = (0.14, 0.26)
PAUSE_S = (0.4, 1.6)
"""After a lead-in or a filler."""
HUM_AFTER_S = 0.4
RATES = (0.82, 1.2)
"""How much faster or slower, higher or lower, and with which formants a voice may be heard."""
COLOUR_DB = 3.5
"""Deviation of each of the three waves that a microphone and a room add to the spectrum."""
STILL_THERE_S = 5.0
FADE_SAMPLES = 960

WHEN_ASKED = {Kind.YES: 5, Kind.NO: 3, Kind.REPEAT: 2, Kind.DIGIT: 2}
WHEN_FREE = {Kind.DIGIT: 14, Kind.NAME: 4, Kind.REPEAT: 2, Kind.GREET: 2} | dict.fromkeys(
    (Kind.THANKS, Kind.BYE, Kind.YES, Kind.NO, Kind.STOP), 1
)
"""How often callers do what, after "Is that right?" and otherwise."""


@dataclass(frozen=True, slots=True)
class Event:
    """A chunk of the bank placed in a call."""

    channel: int
    start: int
    """First sample in the bank."""
    samples: int
    """Of the bank that are used."""
    at: int
    """Sample of the call."""
    gain: float
    rate: float
    """Samples of the bank per sample of the call: pitch, speed and formants at once."""


@dataclass(frozen=True, slots=True)
class Line:
    """What lies between a caller and the desk."""

    telephone: bool
    noise: float
    """Root mean square of the caller's noise."""
    echo: float
    """How loud the desk comes back, and after how many samples."""
    echo_after: int
    colour: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """What microphone and room do to the spectrum, dB: waves over the octaves (`mix.coloured`)."""


@dataclass
class Call:
    """A whole call: events, and per frame the desk's text and both sides' labels."""

    frames: int
    line: Line
    events: list[Event] = field(default_factory=list)
    text: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    labels: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """(2, frames): 0 where nobody speaks, otherwise a part of a word (`Labels`)."""
    turns: list[tuple[str, float, float, str]] = field(default_factory=list)
    """(what, from, to, words), for evaluation: "caller KIND" and "desk"."""


class Labels:
    """A number for every part of every word anybody in a bank says; 0 is silence."""

    def __init__(self, texts: list[str]) -> None:
        self.first: dict[str, tuple[int, int]] = {}
        self.count = 1
        for word in sorted({w for text in texts for w in words(text)}):
            parts = max(1, min(4, (len(word) + 1) // 2))
            self.first[word] = (self.count, parts)
            self.count += parts

    def at(self, word: str, share: float) -> int:
        """The part of ``word`` after ``share`` of its time; 0 if no training voice says it."""
        if word not in self.first:
            return 0
        first, parts = self.first[word]
        return first + min(parts - 1, int(share * parts))


class Stage:
    """A bank sorted for scripts: chunks by voice and kind."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.desk: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
        self.callers: dict[str, dict[tuple[str, str], list[Chunk]]] = {}
        for chunk in bank.index.chunks:
            if chunk.voice == bank.index.desk:
                self.desk[chunk.text, chunk.form].append(chunk)
                continue
            mine = self.callers.setdefault(chunk.voice, defaultdict(list))
            mine[chunk.kind, chunk.form].append(chunk)
            if chunk.kind == Kind.DIGIT:
                mine[chunk.text, chunk.form].append(chunk)
        self.voices = list(self.callers)
        self.chatter = [v for v in self.voices if (Kind.CHATTER, "") in self.callers[v]]
        spoken = [c.text for c in bank.index.chunks if c.kind != Kind.CHATTER]
        self.labels = Labels(sorted(set(spoken)))


class Scene:
    """A call being written; times in seconds."""

    def __init__(
        self,
        stage: Stage,
        rng: random.Random,
        frames: int,
        voice: str | None,
        rates: tuple[float, float] = RATES,
    ) -> None:
        self.stage, self.rng, self.frames = stage, rng, frames
        self.length_s = frames * FRAME / RATE_HZ
        self.voice = voice or rng.choice(stage.voices)
        self.mine = stage.callers[self.voice]
        self.rate = rng.uniform(*rates)
        self.gain = 10 ** (rng.uniform(-10, 5) / 20)
        self.call = Call(frames, self._line())
        self.call.text = np.full(frames, PADDING, np.int64)
        self.call.labels = np.zeros((2, frames), np.int64)
        self.spoken: list[tuple[Event, Chunk]] = []
        self.now = 0.0
        """When whatever was said last ends."""
        self.number: tuple[str, ...] = ()
        self.asked = False
        """The desk wants to know whether the number is right."""

    def _line(self) -> Line:
        rng = self.rng
        noise = 10 ** (rng.uniform(-76, -42) / 20)
        echo = 10 ** (rng.uniform(-40, -18) / 20) if rng.random() < 0.3 else 0.0
        # Drawn apart, so that a seed's calls are what they were before there were colours.
        drawn = random.Random(self.rate)
        colour = (drawn.gauss(0, COLOUR_DB), drawn.gauss(0, COLOUR_DB), drawn.gauss(0, COLOUR_DB))
        return Line(rng.random() < 0.45, noise, echo, rng.randint(480, 4_800), colour)

    def say(self, channel: int, chunk: Chunk, at_s: float) -> float:
        """Place a chunk; returns when it ends."""
        rate = self.rate if channel == CALLER else 1.0
        gain = self.gain if channel == CALLER else 1.0
        event = Event(channel, chunk.start, chunk.samples, round(at_s * RATE_HZ), gain, rate)
        self.spoken.append((event, chunk))
        return at_s + chunk.samples / rate / RATE_HZ

    def pick(self, kind: str, form: str = "") -> Chunk:
        return self.rng.choice(self.mine[kind, form])

    # -- callers ---------------------------------------------------------------------------------

    def caller_says(self, kind: Kind, at_s: float) -> tuple[float, tuple[str, ...]]:
        """One turn of the caller's; returns its end and, for a name or a number, what it was."""
        began = at_s
        value: tuple[str, ...] = ()
        if kind is Kind.DIGIT:
            at_s = self.lead(Kind.LEAD_NUMBER, at_s)
            at_s, value = self.caller_number(at_s)
        elif kind is Kind.NAME:
            at_s = self.lead(Kind.LEAD_NAME, at_s)
            chunk = self.pick(kind)
            at_s, value = self.say(CALLER, chunk, at_s), (chunk.text,)
        else:
            at_s = self.say(CALLER, self.pick(kind), at_s)
        self.call.turns.append((f"caller {kind}", began, at_s, " ".join(value)))
        return at_s, value

    def lead(self, kind: Kind, at_s: float) -> float:
        """A lead-in, a filler, both or neither, with pauses; the desk may hum in a long one."""
        rng = self.rng
        first = [kind] if rng.random() < 0.6 else []
        first += [Kind.FILLER] if rng.random() < 0.25 else []
        for part in first:
            at_s = self.say(CALLER, self.pick(part), at_s)
            at_s = self.pause(at_s) if rng.random() < 0.4 else at_s + rng.uniform(*INSIDE_S)
        return at_s

    def pause(self, at_s: float) -> float:
        """The caller thinks, and says so to the desk by how the words before ended.

        The desk hums before it can know for how long; a caller who is done goes on over it.
        """
        length = self.rng.uniform(*PAUSE_S)
        began = at_s
        if length > HUM_AFTER_S + 0.1 and self.rng.random() < 0.4:
            hummed = self.desk_says([("Mm-hmm.", "")], began + HUM_AFTER_S)
            self.call.turns.append(("hum", began, hummed, ""))
        at_s = began + length
        self.call.turns.append(("pause", began, at_s, ""))
        return at_s

    def caller_number(self, at_s: float) -> tuple[float, tuple[str, ...]]:
        rng = self.rng
        if rng.random() < 0.45:
            whole = self.pick(Kind.DIGITS)
            return self.say(CALLER, whole, at_s), tuple(whole.text.split())
        digits = tuple(rng.choices(DIGITS, k=rng.choice((1, 2, 3, 3, 4, 4))))
        halt = rng.randrange(1, 4) if rng.random() < 0.45 else 0
        gap = rng.uniform(*INSIDE_S)
        for n, digit in enumerate(digits, 1):
            form = AT_END if n == len(digits) else WITHIN
            at_s = self.say(CALLER, rng.choice(self.mine[digit, form]), at_s)
            if form == AT_END:
                break
            if n == halt and rng.random() < 0.3:
                at_s = self.say(CALLER, self.pick(Kind.FILLER), at_s + gap)
                at_s = self.pause(at_s)
            elif n == halt:
                began = at_s
                at_s += rng.uniform(*PAUSE_IN_NUMBER_S)
                self.call.turns.append(("pause", began, at_s, ""))
            else:
                at_s += gap
        return at_s, digits

    # -- the desk --------------------------------------------------------------------------------

    def desk_says(self, phrases: list[tuple[str, str]], at_s: float) -> float:
        """(text, form) one after the other; returns the end."""
        began = at_s
        for n, (text, form) in enumerate(phrases):
            chunk = self.rng.choice(self.stage.desk[text, form])
            after_digit = n > 0 and phrases[n - 1][1] == WITHIN
            at_s += 0 if n == 0 else 0.07 if after_digit else 0.16
            at_s = self.say(DESK, chunk, at_s)
        said = " ".join(text for text, _ in phrases)
        self.call.turns.append(("desk", began, at_s, said))
        return at_s

    def stop_desk(self, at_s: float) -> None:
        """Nothing of the desk's is heard after ``at_s``."""
        limit = round(at_s * RATE_HZ)
        kept = []
        for event, chunk in self.spoken:
            if event.channel == DESK and event.at + event.samples > limit:
                if event.at >= limit:
                    continue
                event = Event(DESK, event.start, limit - event.at, event.at, 1.0, 1.0)
            kept.append((event, chunk))
        self.spoken = kept

    def answer(self, kind: Kind, value: tuple[str, ...]) -> list[tuple[str, str]]:
        """What the desk says to a turn."""
        asked, self.asked = self.asked, False
        if kind is Kind.DIGIT:
            self.number = value
            return self.read_back()
        if kind is Kind.NAME:
            return [("Thank you,", ""), (value[0], AT_END), ("What is your number?", "")]
        if kind is Kind.REPEAT and self.number:
            return self.read_back()
        if kind is Kind.NO and asked:
            self.number = ()
            return [("Sorry. Please say it again.", "")]
        fixed = {
            Kind.REPEAT: "Nothing to repeat.",
            Kind.YES: "Thank you. Anything else?" if asked else "Okay. Anything else?",
            Kind.NO: "Okay.",
            Kind.GREET: "Hello. How can I help you?",
            Kind.THANKS: "You are welcome.",
            Kind.BYE: "Goodbye.",
            Kind.STOP: "Okay.",
        }
        return [(fixed[kind], "")]

    def read_back(self) -> list[tuple[str, str]]:
        self.asked = True
        digits = [(digit, WITHIN) for digit in self.number[:-1]]
        return [*digits, (self.number[-1], AT_END), ("Is that right?", "")]

    # -- the whole -------------------------------------------------------------------------------

    def exchange(self, phrases: list[tuple[str, str]], at_s: float) -> Kind | None:
        """The desk speaks; the caller may hum, or interrupt. Returns the interruption's kind."""
        rng, begins = self.rng, at_s
        ends = self.desk_says(phrases, at_s)
        self.now = ends
        if ends - begins < 0.7:
            return None
        chance = rng.random()
        if chance < 0.12:
            self.say(CALLER, self.pick(Kind.BACKCHANNEL), rng.uniform(begins + 0.2, ends - 0.3))
        elif chance < 0.34:
            at_s = rng.uniform(begins + 0.15, ends - 0.35)
            kind = rng.choice((Kind.STOP, Kind.STOP, Kind.STOP, self.next_kind()))
            self.interrupt(kind, at_s)
            return kind
        return None

    def interrupt(self, kind: Kind, at_s: float) -> None:
        self.stop_desk(at_s + self.rng.uniform(*REACTION_S))
        self.call.turns.append(("interruption", at_s, at_s, str(kind)))
        self.turn(kind, at_s)

    def turn(self, kind: Kind, at_s: float) -> None:
        """A caller's turn from ``at_s`` and the desk's answer, with whatever comes between."""
        ends, value = self.caller_says(kind, at_s)
        self.now = ends
        gap = ANSWER_NUMBER_S if kind is Kind.DIGIT else ANSWER_S
        if ends + gap < self.length_s:
            self.exchange(self.answer(kind, value), ends + self.rng.gauss(gap, SPREAD_S))

    def next_kind(self) -> Kind:
        options = WHEN_ASKED if self.asked else WHEN_FREE
        return self.rng.choices(list(options), list(options.values()))[0]

    def play(self) -> Call:
        """A call of everything, to its last frame."""
        rng = self.rng
        self.exchange([("Hello, front desk. How can I help you?", "")], rng.uniform(0.25, 0.6))
        while self.now < self.length_s - 1.0:
            if rng.random() < 0.07:
                self.exchange([("Are you still there?", "")], self.now + STILL_THERE_S)
            else:
                self.turn(self.next_kind(), self.now + rng.uniform(0.25, 2.2))
        self.background()
        return self.finish()

    def background(self) -> None:
        """Somebody else talks in the caller's room."""
        if self.rng.random() > 0.2 or not self.stage.chatter:
            return
        voice = self.stage.callers[self.rng.choice(self.stage.chatter)]
        at_s, gain = self.rng.uniform(0, 3), self.gain * 10 ** (self.rng.uniform(-28, -16) / 20)
        while at_s < self.length_s:
            chunk = self.rng.choice(voice[Kind.CHATTER, ""])
            at = round(at_s * RATE_HZ)
            self.call.events.append(Event(CALLER, chunk.start, chunk.samples, at, gain, 1.0))
            at_s += chunk.samples / RATE_HZ + self.rng.uniform(0.3, 3)

    def finish(self) -> Call:
        """Write what was said into the frames."""
        for event, chunk in sorted(self.spoken, key=lambda said: said[0].at):
            if event.at >= self.frames * FRAME:
                continue
            self.call.events.append(event)
            ends = (event.at + event.samples / event.rate) / RATE_HZ
            for word, begins, until in word_times(chunk, event.at / RATE_HZ, event.rate):
                if event.channel == DESK and begins < ends:
                    self.write(word, begins)
                self.label(event.channel, word, begins, min(until, ends))
        return self.call

    def write(self, word: str, begins_s: float) -> None:
        """One word's token in the frame it begins in, or the next that is free."""
        frame = int(begins_s * RATE_HZ / FRAME)
        while frame < self.frames and self.call.text[frame] != PADDING:
            frame += 1
        if frame < self.frames:
            self.call.text[frame] = IDS[word]

    def label(self, channel: int, word: str, begins_s: float, until_s: float) -> None:
        first = int(begins_s * RATE_HZ / FRAME)
        for frame in range(first, min(self.frames, int(until_s * RATE_HZ / FRAME) + 1)):
            middle = (frame + 0.5) * FRAME / RATE_HZ
            if begins_s <= middle < until_s:
                share = (middle - begins_s) / (until_s - begins_s)
                self.call.labels[channel, frame] = self.stage.labels.at(word, share)


def word_times(chunk: Chunk, at_s: float, rate: float) -> list[tuple[str, float, float]]:
    """(word, begins, ends) in seconds; by letters where the voice does not say."""
    spoken = words(chunk.text)
    length = chunk.samples / RATE_HZ
    if chunk.word_starts_s:
        starts = list(chunk.word_starts_s)
    else:
        sizes = np.cumsum([0, *(len(word) + 1 for word in spoken)])
        starts = [float(size) / float(sizes[-1]) * length for size in sizes[:-1]]
    ends = [*starts[1:], length]
    return [
        (word, at_s + begins / rate, at_s + until / rate)
        for word, begins, until in zip(spoken, starts, ends, strict=True)
    ]


def written(stage: Stage, seed: str, frames: int, voice: str | None = None) -> Call:
    """The call of a seed."""
    return Scene(stage, random.Random(seed), frames, voice).play()
