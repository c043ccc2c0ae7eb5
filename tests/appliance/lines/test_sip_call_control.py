"""What ends a call or sends a caller on: keys, transfers, words, an announcement, a fallback."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance import control
from appliance.admission import Reason
from appliance.clock import NS_PER_MS
from appliance.frame_ring import Outcome
from appliance.lines.sip_announce import Announcing
from appliance.lines.sip_call import Extras, State, Verb, Want
from appliance.lines.sip_config import SipAccount
from appliance.lines.sip_transfer import MOST
from appliance.lines.sip_words import Words
from tests.sip_call_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, SipAccount(user="bot", max_s=60, digits={"0": "sip:d@p", "#": "hang-up"}))
    yield made
    made.close()


def test_keys_are_kept_and_do_what_the_account_says(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    for key in "12":
        rig.call.digit(key, rig.now_ns)
    rig.turn()
    assert rig.wants == []
    rig.call.digit("0", rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p")]
    rig.call.digit("0", rig.now_ns)  # pressed by who does not want to wait: it is under way
    rig.turn()
    assert len(rig.wants) == 1
    rig.call.digit("#", rig.now_ns)
    rig.turn()
    assert rig.wants[-1] == Want(Verb.HANG_UP)
    assert rig.call.figures().digits == "1200#"
    for _ in range(1000):
        rig.call.digit("5", rig.now_ns)
    assert len(rig.call.figures().digits) == 256


def test_a_transfer_that_fails_keeps_the_session_and_one_that_is_done_lets_it_go(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    said = len(rig.said)
    assert rig.call.transfer("sip:d@p", "operator") == ""
    assert "is under way" in rig.call.transfer("sip:d@p", "operator")
    rig.run(0.5)
    rig.call.transfer_ended("486 Busy Here", False, rig.now_ns)
    rig.run(1)
    assert rig.call.state is State.TALKING
    assert len(rig.said) == said
    assert (rig.call.sent_on.target, rig.call.sent_on.outcome) == ("sip:d@p", "486 Busy Here")
    assert rig.call.transfer("sip:22@p", "key 0") == ""
    rig.turn()
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p"), Want(Verb.TRANSFER, "sip:22@p")]
    rig.call.transfer_ended("answered", True, rig.now_ns)
    rig.call.closed("Call transfered", {}, rig.now_ns)
    rig.turn()
    assert rig.said[-1] == control.Leave(1, "transferred to sip:22@p")
    rig.gone()
    assert rig.call.is_done
    assert rig.call.sent_on.is_done
    assert len(rig.wants) == 2  # the stack has closed it already


def test_a_peer_that_hangs_up_before_it_says_what_came_of_a_transfer(rig: Rig) -> None:
    rig.answer()
    rig.run(1)
    rig.call.transfer("sip:d@p", "operator")
    rig.bye()
    assert rig.call.sent_on.outcome == "the call ended before the peer said: bye"
    assert not rig.call.sent_on.is_done
    assert rig.call.transfer("sip:d@p", "operator") == "nobody talks on this call"


def test_nobody_is_transferred_where_the_operator_did_not_say_so(rig: Rig) -> None:
    rig.answer()
    assert "not allowed" in rig.call.transfer("sip:1900555@p", "operator")
    assert "not allowed" in rig.call.transfer("sip:d@p;maddr=evil.example", "operator")
    for _ in range(MOST):
        assert rig.call.transfer("sip:d@p", "operator") == ""
        rig.call.transfer_ended("603 Decline", False, rig.now_ns)
    assert f"asked for {MOST} transfers" in rig.call.transfer("sip:d@p", "operator")


class Says:
    """A model that says a word's piece in one frame each, from ``after`` frames on."""

    PIECES = ("", "\u2581so", "\u2581good", "bye", ",", "\u2581have", "\u2581a", "\u2581day")

    def __init__(self, after: int, *ids: int) -> None:
        self.after, self.ids = after, ids

    def __call__(self, frame: int) -> int:
        at = frame - self.after
        return self.ids[at] if 0 <= at < len(self.ids) else 0


@pytest.fixture
def saying(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(what: str, says: Callable[[int], int]) -> Rig:
        words = Words({"Goodbye": what}, Says.PIECES, (0,), 1500 * NS_PER_MS)
        rig = Rig(tmp_path, SipAccount(user="bot"), Extras(words))
        rig.token = says
        rig.level = 30  # the caller is quiet, as a room is
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


def test_the_models_goodbye_ends_the_call_once_it_has_been_heard(
    saying: Callable[..., Rig],
) -> None:
    rig = saying("hang-up", Says(25, 1, 2, 3, 4, 0, 5, 6, 7))
    rig.answer()
    rig.run(4.0)  # its last word is in frame 32, handed over 2.7 s after the first
    assert rig.wants == []
    rig.run(0.7)
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.why == 'words "Goodbye"'
    # All of what it said, and the pause after it, has been heard.
    assert rig.outcomes()[Outcome.DELIVERED][-1] >= 32 + 1500 // 80
    rig.call.closed("we hung up", {}, rig.now_ns)
    rig.gone()
    assert rig.said[-1] == control.Leave(1, 'words "Goodbye"')


def test_a_caller_who_still_talks_is_heard_out(saying: Callable[..., Rig]) -> None:
    rig = saying("hang-up", Says(25, 2, 3))
    rig.level = 1000
    rig.answer()
    rig.run(6.0)
    assert rig.wants == []
    rig.level = 30
    rig.run(1.3)
    assert rig.wants == []
    rig.run(0.5)
    assert rig.wants == [Want(Verb.HANG_UP)]


def test_a_model_that_talks_on_did_not_mean_to_end(saying: Callable[..., Rig]) -> None:
    rig = saying("hang-up", Says(25, 2, 3, *([1] * 100)))
    rig.answer()
    rig.run(14)
    assert rig.wants == []


def test_words_may_send_the_caller_on_and_a_reset_forgets_them(
    saying: Callable[..., Rig],
) -> None:
    rig = saying("sip:d@p", Says(25, 2, 3))
    rig.answer()
    rig.run(3.0)
    rig.call.began_anew()
    rig.run(3.0)
    assert rig.wants == []
    rig.token = Says(rig.frame + 5, 2, 3)
    rig.run(3.0)
    assert rig.wants == [Want(Verb.TRANSFER, "sip:d@p")]
    assert rig.call.sent_on.by == 'words "Goodbye"'


def test_an_announcement_is_heard_whole_before_the_session_goes_live(tmp_path: Path) -> None:
    tone = np.sin(np.arange(24_000) / 10).astype(np.float32)
    rig = Rig(tmp_path, SipAccount(user="bot"), Extras(announcing=Announcing(tone, 24_000)))
    rig.answer()
    rig.run(0.9)
    assert rig.heard == []
    assert rig.media.queued <= 800
    rig.run(3.0)
    said = np.concatenate(rig.media.written[: len(rig.media.written)])
    assert np.abs(said[:8_000].astype(np.float64)).mean() > 10_000
    assert rig.heard[0] == 1
    assert rig.frame == pytest.approx((3.9 - 1.1) / 0.08, abs=4)
    figures = rig.call.figures()
    assert figures.whole >= figures.frames - 2
    rig.close()


@pytest.mark.parametrize("is_done", [True, False])
def test_a_box_that_fails_hands_the_caller_to_somebody(tmp_path: Path, is_done: bool) -> None:
    rig = Rig(tmp_path, SipAccount(user="bot", fallback="sip:22@p"))
    rig.answer()
    rig.run(1)
    rig.call.gone(control.Gone(1, "shed"), rig.now_ns)
    rig.run(5)
    assert rig.wants == [Want(Verb.TRANSFER, "sip:22@p")]
    assert not rig.call.is_done
    assert (rig.call.sent_on.by, rig.call.why) == ("the box ended it (shed)",) * 2
    if is_done:
        rig.call.transfer_ended("answered", True, rig.now_ns)
    else:
        rig.call.transfer_ended("486 Busy Here", False, rig.now_ns)
        rig.turn()
        assert rig.wants[1:] == [Want(Verb.HANG_UP)]
    rig.call.closed("x", {}, rig.now_ns)
    rig.turn()
    assert rig.call.is_done
    rig.close()


OPERATOR = control.Gone(1, control.OPERATOR, "an operator ended it: the hall is closing")


@pytest.mark.parametrize("meanwhile", ["talking", "on hold", "being sent on", "announced"])
def test_an_operator_hangs_up_whatever_the_call_is_doing_and_sends_nobody_on(
    tmp_path: Path, meanwhile: str
) -> None:
    tone = np.zeros(48_000, np.float32)
    extras = Extras(announcing=Announcing(tone, 24_000)) if meanwhile == "announced" else None
    rig = Rig(tmp_path, SipAccount(user="bot", fallback="sip:22@p"), extras)
    rig.answer()
    rig.run(1)
    if meanwhile == "on hold":
        rig.call.held(True, rig.now_ns)
    elif meanwhile == "being sent on":
        assert rig.call.transfer("sip:d@p", "operator") == ""
    rig.run(0.2)
    rig.wants.clear()
    rig.call.gone(OPERATOR, rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert (rig.call.state, rig.call.why) == (State.OVER, OPERATOR.detail)
    rig.bye()
    assert rig.call.is_done
    assert rig.call.why == OPERATOR.detail
    assert not rig.call.sent_on.is_done
    assert not [said for said in rig.said if isinstance(said, control.Leave)]
    rig.close()


def test_a_caller_whose_persona_is_fed_is_ended_unanswered_and_was_not_refused(rig: Rig) -> None:
    rig.turn()
    refused = control.Refused(1, Reason.OPERATOR, OPERATOR.detail)
    rig.call.refused(refused, rig.now_ns)
    rig.turn()
    assert rig.wants == [Want(Verb.REJECT)]
    assert rig.call.why == OPERATOR.detail


def test_a_call_that_was_ended_on_purpose_falls_back_on_nobody(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SipAccount(user="bot", fallback="sip:22@p"))
    rig.answer()
    rig.run(1)
    rig.call.hang_up("key #", rig.now_ns)
    rig.gone()
    assert rig.wants == [Want(Verb.HANG_UP)]
    assert rig.call.sent_on.target == ""
    rig.close()
