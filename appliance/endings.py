"""How a call's end is written down and told: to its line, and to whoever waits for the session.

An operator may end any call that is under way (`control.HangUp`). The box does that itself at the
next tick boundary, as it does when a line leaves, so a line that hangs keeps nobody; the line hears
of it as of every other end. What an operator asked for comes first: a line that leaves a moment
later, or never settles its frames, does not make that its own doing.

Decides words and who is told. Sends nothing and ends nothing: that is `switchboard`'s business.
"""

from collections.abc import Callable

from appliance import control
from appliance.admission import Reason, Refusal
from appliance.calls import UNDER_WAY, Call
from appliance.ledger import Why
from appliance.line_sockets import Connection
from appliance.session import Event
from appliance.transfers import Told

ENDED: dict[Event, Why] = {
    Event.LAST_FRAME: Why.FINISHED,
    Event.LEAVE: Why.LEFT,
    Event.FAULT: Why.FAULT,
    Event.LOST: Why.LOST,
    Event.TIMEOUT: Why.TIMEOUT,
    Event.SHED: Why.SHED,
}

BY_OPERATOR = "an operator ended it"


def hang_up(asker: Connection, wish: control.HangUp, call: Call | None) -> control.Refused | Call:
    """An operator wants ``call`` ended. The call: it is to depart, and `waiting` will answer."""
    if call is None:
        why = f"session {wish.session} is not on"
    elif call.ended_by:
        why = f"session {wish.session} is ending already: {call.ended_by}"
    elif call.leaving or call.stopped or call.connection is None:
        why = f"session {wish.session} is ending already"
    elif call.session.state not in UNDER_WAY:
        why = f"session {wish.session} is ending already: {call.why.name.lower()}"
    else:
        words = printable(wish.why)
        call.ended_by = f"{BY_OPERATOR}: {words}" if words else BY_OPERATOR
        call.ended_for = asker, wish.request
        return call
    return control.Refused(wish.request, Reason.FAULT, why)


def printable(words: str) -> str:
    """One line that a log, a terminal and any line's protocol can take."""
    return "".join(char if char.isprintable() else " " for char in words).strip()


def why(call: Call, event: Event) -> Why:
    """What the ledger says of a call that ``event`` ended."""
    found = ENDED[event]
    if found is Why.LEFT and call.ended_by:
        return Why.OPERATOR
    if found is Why.LEFT and call.stopped:
        return Why.STOPPED
    return found


def waiting(call: Call) -> list[Told]:
    """The tick thread has let go of it: who has asked for something and is answered now."""
    session, told = call.session.id, list[Told]()
    if call.reset_for is not None:
        (asker, request), call.reset_for = call.reset_for, None
        detail = f"session {session} ended before it could be reset"
        told.append((asker, control.Refused(request, Reason.FAULT, detail)))
    if call.ended_for is not None:
        (asker, request), call.ended_for = call.ended_for, None
        if call.why is Why.OPERATOR:
            told.append((asker, control.HungUp(request, session, call.due)))
        else:
            detail = f"session {session} had ended already: {call.why.name.lower()}"
            told.append((asker, control.Refused(request, Reason.FAULT, detail)))
    return [(asker, answer) for asker, answer in told if asker.is_open]


def last_word(
    call: Call, overdue: Callable[[], Refusal]
) -> control.Gone | control.Refused | Refusal:
    """What its line hears of a call that is over. A `Refusal`: the box turned a newcomer away.

    overdue: what there is to say of a persona that was not fed in time.
    """
    request = call.wish.request
    if call.answer is None:
        detail = call.ended_by if call.why is Why.OPERATOR else ""
        return control.Gone(call.session.id, call.why.name.lower(), detail)
    if call.withdrawn:
        return control.Refused(request, Reason.FAULT, "its line took it back")
    if call.why is Why.OPERATOR:
        return control.Refused(request, Reason.OPERATOR, call.ended_by)
    if call.why is Why.TIMEOUT:  # its line never heard of the session, only of the request
        return overdue()
    return Refusal(Reason.DRAINING, "the box stopped before the persona was fed")
