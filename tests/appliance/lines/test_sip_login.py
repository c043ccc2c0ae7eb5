"""Staying logged in: what a registrar's answers lead to, on a fake clock."""

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.sip_login import AGAIN_S, RUSH_MOST, Login


def test_a_registrar_whose_logins_last_no_time_is_given_up_after_a_few() -> None:
    login = Login()
    answers = [login.accepted(n * NS_PER_MS) for n in range(RUSH_MOST + 1)]
    assert not any(answers[:-1])
    assert "10 times within 10 ms" in answers[-1]
    assert login.failed() == AGAIN_S[0]
    assert not login.is_on
    # And each time it is the same, it waits for longer.
    for n in range(RUSH_MOST + 1):
        login.accepted(3 * NS_PER_S + n * NS_PER_MS)
    assert login.failed() == AGAIN_S[1]


def test_one_that_wants_to_hear_of_us_every_second_may() -> None:
    login = Login()
    assert not any(login.accepted(n * NS_PER_S) for n in range(1_000))


def test_after_a_day_of_renewals_a_failed_one_is_tried_again_soon() -> None:
    login = Login()
    for _ in range(9):
        login.failed()
    assert login.failed() == AGAIN_S[-1]
    login.accepted(0)
    login.accepted(540 * NS_PER_S)
    assert login.failed() == AGAIN_S[0]
