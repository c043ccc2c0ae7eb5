"""Callers who are to be called on elsewhere: anybody asks for it, the line that has them does it.

    operator -- Transfer --> box -- Transfer --> line ... its peer says what came of it
    operator <- Transferred - box <- Transferred - line

Decides who is told what. The box itself transfers nobody: which targets are allowed, and how a peer
is asked, is the line's business. The control thread uses it.
"""

from appliance import control
from appliance.admission import Reason
from appliance.calls import Call
from appliance.line_sockets import Connection
from appliance.session import SessionId, State

Told = tuple[Connection, control.FromBox]
"""What is to be said, and to whom."""


class Transfers:
    """Who has asked for which session, and has not been answered."""

    def __init__(self) -> None:
        self._asked: dict[SessionId, tuple[Connection, int]] = {}

    def ask(self, asker: Connection, wish: control.Transfer, call: Call | None) -> Told:
        """Somebody wants it. call: the session's, if there is one."""
        session = SessionId(wish.session)
        why = ""
        if call is None or call.connection is None or call.session.state is State.GONE:
            why = f"session {session} is not on"
        elif not call.wish.transfers:
            why = (
                f"session {session} came by the line {call.wish.line}, which transfers nobody; the "
                "telephone line does where [sip] transfer_to says so"
            )
        elif session in self._asked and self._asked[session][0].is_open:
            why = f"session {session} is being transferred already"
        if why or call is None or call.connection is None:
            return asker, control.Refused(wish.request, Reason.FAULT, why)
        self._asked[session] = (asker, wish.request)
        return call.connection, control.Transfer(0, session, wish.target)

    def ended(self, line: Connection, message: control.Transferred) -> Told | None:
        """The line says what became of it; None: nobody waits to hear that."""
        session = SessionId(message.session)
        if session not in self._asked or session not in line.sessions:
            return None
        asker, request = self._asked.pop(session)
        answer = control.Transferred(request, session, message.is_done, message.detail)
        return (asker, answer) if asker.is_open else None

    def forget(self, session: SessionId) -> Told | None:
        """The session is over, and its line said nothing."""
        asker, request = self._asked.pop(session, (None, 0))
        if asker is None or not asker.is_open:
            return None
        detail = "the session ended before its line said what became of it"
        return asker, control.Transferred(request, session, False, detail)
