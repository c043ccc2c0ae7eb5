"""The front desk that the pocket model knows: what callers say, what the desk answers, the words.

Everything anybody says is a chunk: a few words spoken in one breath by one voice. Callers' chunks
have a kind (`Kind`), by which the desk chooses its answer; the desk's have words, because its own
text is predicted with its speech. A number is a chunk per digit, or all digits in one breath.

Not here: who speaks them (`voices`), when (`script`).
"""

from enum import StrEnum


class Kind(StrEnum):
    """What a caller's chunk means to the desk."""

    GREET = "greet"
    LEAD_NUMBER = "lead-number"
    """Comes before a number; alone, it asks for patience."""
    LEAD_NAME = "lead-name"
    FILLER = "filler"
    """The caller keeps the turn."""
    DIGIT = "digit"
    DIGITS = "digits"
    NAME = "name"
    YES = "yes"
    NO = "no"
    STOP = "stop"
    REPEAT = "repeat"
    THANKS = "thanks"
    BYE = "bye"
    BACKCHANNEL = "backchannel"
    CHATTER = "chatter"
    """Background speech: nobody talks to the desk."""


class Group(StrEnum):
    """Who may hear a voice."""

    TRAINING = "training"
    TUNING = "tuning"
    """What is chosen by ear or by figures, such as sampling, is chosen on these."""
    HELD_OUT = "held-out"
    """Figures that are told are of these; nothing is chosen on them."""


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = (
    "Anna Ben Carla David Emma Frank Grace Henry Julia Kevin Laura Martin Nina Oliver Paula Robert"
).split()

CALLER: dict[Kind, tuple[str, ...]] = {
    Kind.GREET: ("hello", "hi", "good morning", "hello there"),
    Kind.LEAD_NUMBER: ("my number is", "the number is", "number", "it is"),
    Kind.LEAD_NAME: ("my name is", "this is", "I am"),
    Kind.FILLER: ("um", "uh", "let me see", "one moment"),
    Kind.NAME: tuple(NAMES),
    Kind.YES: ("yes", "yeah", "yes please", "that is right"),
    Kind.NO: ("no", "no that is wrong", "nope"),
    Kind.STOP: ("stop", "wait", "hold on", "stop please"),
    Kind.REPEAT: ("repeat", "repeat please", "say that again", "could you repeat that"),
    Kind.THANKS: ("thank you", "thanks"),
    Kind.BYE: ("goodbye", "bye", "bye bye", "thank you goodbye"),
    Kind.BACKCHANNEL: ("mm-hmm", "uh-huh", "okay"),
    Kind.CHATTER: (
        "did you see the game last night",
        "the train was late again this morning",
        "we should have lunch at the new place around the corner",
        "I left my keys on the kitchen table",
        "it may rain in the afternoon, take a coat with you",
    ),
}
"""Digits are not listed: they come as units (`DIGITS`, each within and at the end of a number)
and as whole numbers of two to four digits."""

DESK_PHRASES = (
    "Hello, front desk. How can I help you?",
    "Hello. How can I help you?",
    "Thank you. What is your number?",
    "Is that right?",
    "Thank you. Anything else?",
    "Sorry. Please say it again.",
    "Okay.",
    "Okay. Anything else?",
    "You are welcome.",
    "Goodbye.",
    "Are you still there?",
    "Nothing to repeat.",
    "Mm-hmm.",
    "Thank you,",
    "What is your number?",
    "How can I help you?",
)
"""The desk's chunks besides digits and names. A name is spoken after "Thank you,"."""

SPECIAL = ("", "", "", "")
"""End of padding, beginning and end of a text, padding: ids 0 to 3, as in the published models."""
PADDING, END_OF_PADDING = 3, 0


def words(phrase: str) -> tuple[str, ...]:
    """The words of a chunk as they are written in `VOCABULARY`, without punctuation."""
    return tuple(w for w in (p.strip(".,?!").lower() for p in phrase.split()) if w)


def _vocabulary() -> tuple[str, ...]:
    found: dict[str, None] = {}
    for phrase in (*DESK_PHRASES, *DIGITS, *NAMES):
        for word in words(phrase):
            found.setdefault(word)
    return (*SPECIAL, *(f"▁{word}" for word in found))


VOCABULARY = _vocabulary()
"""Text of every id: the desk's words, each one token."""
IDS = {piece.removeprefix("▁"): i for i, piece in enumerate(VOCABULARY) if piece}
