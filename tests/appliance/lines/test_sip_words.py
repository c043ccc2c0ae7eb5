"""When the model is taken at its word."""

import pytest

from appliance.clock import NS_PER_MS
from appliance.lines.sip_words import Meant, Words, plain

GRACE_NS = 1_500 * NS_PER_MS
RULES = {"Good bye": "hang-up", "Put you through": "sip:desk@pbx"}


def say(words: Words, text: str, pieces: list[str], now_ns: int) -> int:
    """One word per frame; when the last was said."""
    for word in text.split(" "):
        now_ns += 80 * NS_PER_MS
        words.hear(pieces.index("\u2581" + word), now_ns)
        assert words.due(now_ns) is None
    return now_ns


def rules(*texts: str) -> tuple[Words, list[str]]:
    pieces = ["", *dict.fromkeys("\u2581" + w for text in texts for w in text.split(" "))]
    return Words(RULES, pieces, (0,), GRACE_NS), pieces


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("well, Good bye!", Meant("Good bye", "hang-up")),
        ("GOOD bye and have a nice day", Meant("Good bye", "hang-up")),
        ("let me put you through.", Meant("Put you through", "sip:desk@pbx")),
        ("good byes", None),
        ("goodbye", None),
        ("is it a good bye or not " + "you may ask me " * 3 + "now", None),
        ("nothing", None),
    ],
)
def test_a_phrase_counts_at_the_pause_after_it(text: str, meant: Meant | None) -> None:
    words, pieces = rules(text)
    last_ns = say(words, text, pieces, 0)
    assert words.due(last_ns + GRACE_NS - 1) is None
    assert words.due(last_ns + GRACE_NS) == meant
    assert words.due(last_ns + 10 * GRACE_NS) is None


def test_silence_is_no_word_and_pauses_within_a_phrase_do_not_break_it() -> None:
    words, pieces = rules("good bye")
    words.hear(1, 0)
    for frame in range(40):
        words.hear(0, frame)
        words.hear(-1, frame)
    assert words.due(GRACE_NS) is None
    words.hear(2, 2 * GRACE_NS)
    assert words.due(3 * GRACE_NS) == Meant("Good bye", "hang-up")
    assert len(pieces) == 3


def test_a_phrase_that_was_acted_upon_is_not_acted_upon_again() -> None:
    words, pieces = rules("good bye", "sorry busy")
    last_ns = say(words, "good bye", pieces, 0)
    assert words.due(last_ns + GRACE_NS) is not None
    last_ns = say(words, "sorry busy", pieces, last_ns + GRACE_NS)
    assert words.due(last_ns + GRACE_NS) is None


def test_apostrophes_and_case_are_told_apart_from_what_is_not_said() -> None:
    assert plain("I\u2019ll  put you THROUGH\u2026 ok?") == "i'll put you through ok"
