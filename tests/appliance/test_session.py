"""The table of a session's life."""

import pytest

from appliance.session import TRANSITIONS, Event, IllegalTransition, Session, SessionId, State


def session(state: State = State.ADMITTED) -> Session:
    return Session(SessionId(1), generation=1, state=state)


def test_a_call_from_beginning_to_end() -> None:
    call = session()
    states = [call.on(e) for e in (Event.FIRST_FRAME, Event.LAST_FRAME, Event.FLUSHED)]
    assert states == [State.LIVE, State.DRAINING, State.GONE]


@pytest.mark.parametrize("state", [s for s in State if s is not State.GONE])
def test_a_lost_caller_is_gone_from_any_state(state: State) -> None:
    assert session(state).on(Event.LOST) is State.GONE


@pytest.mark.parametrize("event", Event)
def test_nothing_happens_to_a_session_that_is_gone(event: Event) -> None:
    with pytest.raises(IllegalTransition, match=r"session 1 is GONE .* it expects nothing"):
        session(State.GONE).on(event)


def test_a_broken_live_session_settles_its_frames_first() -> None:
    assert session(State.LIVE).on(Event.FAULT) is State.DRAINING


def test_a_caller_who_hangs_up_before_speaking_leaves_nothing_to_settle() -> None:
    assert session().on(Event.LEAVE) is State.GONE


def test_every_state_is_in_the_table_and_every_path_ends() -> None:
    assert set(TRANSITIONS) == set(State)
    for state in State:
        reached, todo = set(), [state]
        while todo:
            here = todo.pop()
            reached.add(here)
            todo += [s for s in TRANSITIONS[here].values() if s not in reached]
        assert State.GONE in reached
