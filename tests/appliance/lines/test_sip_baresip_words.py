"""What the stack says, in our words."""

import errno
import json
import os

import pytest

from appliance.lines.sip_baresip_words import NEVER_CONFIRMED, NO_ANSWER, passes, stats, whose, why


@pytest.mark.parametrize(
    ("text", "confirmed", "ours"),
    [
        ("Connection reset by peer [104]", True, "the caller hung up"),
        ("Connection timed out [110]", False, NEVER_CONFIRMED),
        ("Connection timed out [110]", True, NO_ANSWER),
        ("Busy Here", False, "Busy Here"),
        ("", True, "closed"),
    ],
)
def test_why_a_call_ended(text: str, confirmed: bool, ours: str) -> None:
    assert why(text, confirmed) == ours


def test_what_was_counted_is_named_by_where_it_stood() -> None:
    said = {"duration": 3, "rx": {"lost": 1, "of": "x"}, "name": "y"}
    assert stats(said) == {"duration": 3, "rx_lost": 1}


def test_an_event_without_room_for_what_it_says_is_still_its_calls() -> None:
    short = b'{"event":"CALL_CLOSED","overflow":true}'
    assert json.loads(whose(7, short, {7: 2}) or b"") == {"call": 7, "ua": 2}
    assert json.loads(whose(8, short, {7: 2}) or b"") == {"call": 8, "ua": 0}
    for whole in (None, b"", b'{"call":7,"headers":{"From":"\\"x\\",\\"overflow\\":true}"}}'):
        assert whose(7, whole, {}) is whole


@pytest.mark.parametrize(
    ("text", "later"),
    [
        (os.strerror(errno.EADDRINUSE), True),
        (os.strerror(errno.EADDRNOTAVAIL), True),
        (os.strerror(errno.EMFILE), True),
        ("not all of 10.0.0.5:5060 (ports (5060,)) is ours", True),
        (os.strerror(errno.EACCES), False),
        (os.strerror(errno.EINVAL), False),
    ],
)
def test_what_passes_by_itself(text: str, later: bool) -> None:
    assert passes(OSError(f"SIP thread failed to start: {text}")) is later
