"""When the model is taken at its word."""

import pytest

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.sip_words import PATIENCE_NS, Meant, Words, plain

GRACE_NS = 1_500 * NS_PER_MS
RULES = {"Good bye": "hang-up", "Put you through": "sip:desk@pbx"}


def say(words: Words, text: str, pieces: list[str], now_ns: int, spoke_ns: int = 0) -> int:
    """One word per frame; when the last was said."""
    for word in text.split(" "):
        now_ns += 80 * NS_PER_MS
        words.hear(pieces.index("\u2581" + word), now_ns, spoke_ns)
        assert words.due(now_ns, spoke_ns) is None
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
    assert words.due(last_ns + GRACE_NS - 1, 0) is None
    assert words.due(last_ns + GRACE_NS, 0) == meant
    assert words.due(last_ns + 10 * GRACE_NS, 0) is None


def test_silence_is_no_word_and_pauses_within_a_phrase_do_not_break_it() -> None:
    words, pieces = rules("good bye")
    words.hear(1, 0, 0)
    for frame in range(40):
        words.hear(0, frame, 0)
        words.hear(-1, frame, 0)
    assert words.due(GRACE_NS, 0) is None
    words.hear(2, 2 * GRACE_NS, 0)
    assert words.due(3 * GRACE_NS, 0) == Meant("Good bye", "hang-up")
    assert len(pieces) == 3


def test_a_phrase_that_was_acted_upon_is_not_acted_upon_again() -> None:
    words, pieces = rules("good bye", "sorry busy")
    last_ns = say(words, "good bye", pieces, 0)
    assert words.due(last_ns + GRACE_NS, 0) is not None
    last_ns = say(words, "sorry busy", pieces, last_ns + GRACE_NS)
    assert words.due(last_ns + GRACE_NS, 0) is None


def test_apostrophes_and_case_are_told_apart_from_what_is_not_said() -> None:
    assert plain("I\u2019ll  put you THROUGH\u2026 ok?") == "i'll put you through ok"


def test_a_caller_who_still_speaks_is_waited_for_but_not_for_ever() -> None:
    words, pieces = rules("good bye")
    last_ns = say(words, "good bye", pieces, 0)
    spoke_ns = last_ns + NS_PER_S  # "bye, and thank you"
    assert words.due(last_ns + GRACE_NS, spoke_ns) is None
    assert words.due(spoke_ns + GRACE_NS - 1, spoke_ns) is None
    assert words.due(spoke_ns + GRACE_NS, spoke_ns) == Meant("Good bye", "hang-up")
    last_ns = say(words, "good bye", pieces, spoke_ns + 10 * NS_PER_S)
    late_ns = last_ns + PATIENCE_NS + GRACE_NS
    assert words.due(late_ns - 1, late_ns - 1) is None  # a noisy line
    assert words.due(late_ns, late_ns) == Meant("Good bye", "hang-up")


def test_a_caller_with_one_more_question_takes_the_goodbye_back() -> None:
    words, pieces = rules("good bye", "sure what is it")
    last_ns = say(words, "good bye", pieces, 0)
    spoke_ns = last_ns + NS_PER_S
    answer_ns = say(words, "sure what is it", pieces, spoke_ns + NS_PER_S // 2, spoke_ns)
    assert words.due(answer_ns + GRACE_NS, spoke_ns) is None
    # Over the end of what is said, a caller's "okay" takes nothing back.
    last_ns = say(words, "good bye", pieces, answer_ns + 9 * NS_PER_S)
    spoke_ns = last_ns + 1
    last_ns = say(words, "sure", pieces, last_ns, spoke_ns)
    assert words.due(last_ns + GRACE_NS, spoke_ns) == Meant("Good bye", "hang-up")
