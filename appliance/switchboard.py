"""The box's end of the control socket, in a thread of its own: who comes, who goes, and why.

The thread owns connections, session states, leases and channels. It asks `admission`, prepares
everything a session needs (shared memory, a ledger file) and only then tells the tick thread,
through a deque; what happened comes back through another. A call is over in this order:

    tick loop says Left  ->  lease free  ->  ledger has every receipt (or a timeout)  ->  Gone

so the tick thread never waits for a line, and no line keeps a slot by not answering.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance import control, endings
from appliance.admission import Reason, Refusal, admit
from appliance.calls import UNDER_WAY, Call, prepare
from appliance.clock import NS_PER_S, Clock
from appliance.config import AdmissionConfig, ClockConfig
from appliance.foresight import Foresight
from appliance.leases import Lease, Leases
from appliance.ledger import Why
from appliance.ledger_writer import LedgerWriter
from appliance.line_sockets import Came, Connection, LineSockets, Lost, Said
from appliance.log import Seldom
from appliance.priming import Job
from appliance.realtime import ask_for_priority
from appliance.reception import Reception
from appliance.reporter import Counted, Reporter
from appliance.seat import Arrive, Depart, FromTick, Left, Primed, Restart, Restarted, WentLive
from appliance.session import Event, SessionId, State
from appliance.side_models import SideModels
from appliance.step_model import StepSamples
from appliance.tick_loop import TickLoop
from appliance.transfers import Told, Transfers
from engines.bundle import Bundle
from engines.executor import OnDevice

logger = logging.getLogger(__name__)

REST_S = 0.001
"""Between two passes, so at most this often a line is listened to: one message a pass."""

POLL_S = 0.01
"""How long news from the tick or the ledger may lie; a connection is answered at once."""


class Switchboard:
    """Everything but ticks and files. `start` and `stop` belong to the main thread."""

    def __init__(
        self,
        path: Path,
        bundle: Bundle,
        slots: int,
        loop: TickLoop,
        ledger: LedgerWriter,
        reception: Reception,
        beside: SideModels,
        clock: Clock,
        policy: ClockConfig,
        memory_bytes: int,
        session_bytes: int,
        admission: AdmissionConfig,
        samples: StepSamples,
        on_failure: Callable[[BaseException], None],
        device: OnDevice | None = None,
    ) -> None:
        """Binds the socket. slots: at most the engine's. samples: of its calibration.

        device: where sessions' state lies, if that is not the machine's memory.

        Raises `listener.SocketTaken`.
        """
        self.ready = False
        """Set by the main thread once the engine is warm."""
        self.calls_ended = 0
        self.sessions_shed = 0
        self.sessions_reset = 0
        self.sessions_hung_up = 0
        self.refusals: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._bundle = bundle
        self._loop = loop
        self._ledger = ledger
        self._reception = reception
        self._beside = beside
        self._clock = clock
        self._policy = policy
        self.foresight = Foresight(
            loop, bundle.manifest, admission, slots, memory_bytes, session_bytes, samples, device
        )
        self._on_failure = on_failure
        self._leases = Leases(slots)
        self._transfers = Transfers()
        self._calls: dict[SessionId, Call] = {}
        self._pending: dict[SessionId, Arrive | Restart] = {}
        """What the tick thread is told once a snapshot has been looked for."""
        self._token = secrets.token_hex(4)
        self._drain_until_ns: int | None = None
        self._stop = False
        self._rest = threading.Event()
        self._reporter = Reporter(
            bundle.manifest, loop, ledger, self._leases, self.foresight, reception, beside
        )
        self._lines = LineSockets(path)
        # What a peer can cause at will is logged seldom.
        self._refused = Seldom(logger, logging.INFO)
        # A daemon, as the ledger's: `stop` ends it, and a process that never came to that must end.
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def sessions(self) -> int:
        """Calls that are not over, whatever their state."""
        return len(self._calls)

    @property
    def draining(self) -> bool:
        return self._drain_until_ns is not None

    def start(self) -> None:
        self._thread.start()

    def drain(self, within_ns: int) -> None:
        """Refuse newcomers, let calls end, after ``within_ns`` end them; then stop the loop.

        Called from a signal handler: sets a number and nothing else.
        """
        until_ns = self._clock.now_ns() + within_ns
        if self._drain_until_ns is None or until_ns < self._drain_until_ns:
            self._drain_until_ns = until_ns

    def stop(self) -> None:
        """End the thread. Connections stay open until `close`."""
        self._stop = True
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """After the tick loop and the ledger have stopped: give back sockets and memory."""
        for call in self._calls.values():
            call.channel.close()
            call.channel.unlink()
        self._calls.clear()
        self._lines.close()

    def _run(self) -> None:
        try:
            ask_for_priority(self._policy.realtime_priority // 2, "the control thread")
            while not self._stop:
                self.serve_once(POLL_S)
                # A line that never stops sending must leave the interpreter to the tick thread.
                self._rest.wait(REST_S)
        except BaseException as err:
            # A box nobody can call is no box: end the process, systemd starts it again.
            self._on_failure(err)

    def serve_once(self, timeout_s: float) -> None:
        """One pass: messages, news from tick and ledger, time limits. Tests call it directly."""
        for event in self._lines.poll(timeout_s, self._clock.now_ns()):
            match event:
                case Came(connection):
                    self._welcome(connection)
                case Said(connection, raw):
                    self._read(connection, raw)
                case Lost(connection):
                    self._lose(connection)
        if self._ledger.failure is not None:
            raise self._ledger.failure
        self._hear_reception()
        while self._loop.outbox:
            self._hear_tick(self._loop.outbox.popleft())
        while self._ledger.closed:
            self._forget(SessionId(self._ledger.closed.popleft()))
        now_ns = self._clock.now_ns()
        self.foresight.look(now_ns)
        self._shed()
        self._give_up_on_silent_lines(now_ns)
        self._drain_on(now_ns)
        self._beside.look(now_ns)
        self._reporter.say_lateness(now_ns)
        self._reporter.say_alarms(now_ns)

    # --- lines

    def _welcome(self, connection: Connection) -> None:
        t0_ns, reception = self._loop.grid.t0_ns, self._reception
        voices, persona = reception.voices, reception.takes_persona
        self._send(connection, control.welcome(self._bundle, t0_ns, voices, persona))

    def _read(self, connection: Connection, raw: bytes) -> None:
        try:
            message = control.decode_to_box(raw)
        except control.ControlError as err:
            now_ns = self._clock.now_ns()
            self._lines.cut_off(connection, f"it sent {len(raw)} bytes, {err}", now_ns)
            return
        match message:
            case control.Join():
                self._join(connection, message)
            case control.Withdraw():
                self._withdraw(connection, message)
            case control.Leave():
                self._leave(connection, message)
            case control.Reset():
                self._reset(connection, message)
            case control.HangUp():
                self._hang_up(connection, message)
            case control.Transfer():
                call = self._calls.get(SessionId(message.session))
                self._tell(self._transfers.ask(connection, message, call))
            case control.Transferred():
                self._tell(self._transfers.ended(connection, message))
            case control.Status():
                self._send(connection, self._report(message))

    def _leave(self, connection: Connection, leave: control.Leave) -> None:
        if leave.session not in connection.sessions:  # nobody ends another line's call
            return
        call = self._calls[SessionId(leave.session)]
        if not call.leaving:  # the tick thread must not read through a flood of goodbyes
            call.leaving = True
            self._depart(call, Event.LEAVE)

    def _hang_up(self, connection: Connection, message: control.HangUp) -> None:
        call = self._calls.get(SessionId(message.session))
        found = endings.hang_up(connection, message, call)
        if isinstance(found, control.Refused):
            self._send(connection, found)
        else:
            logger.info("session %d is to end: %s", message.session, found.ended_by)
            self._depart(found, Event.LEAVE)

    def _send(self, connection: Connection, message: control.FromBox) -> None:
        self._lines.send(connection, control.encode(message), self._clock.now_ns())

    def _tell(self, told: Told | None) -> None:
        if told is not None:
            self._send(*told)

    def _lose(self, connection: Connection) -> None:
        """The line is gone; its calls follow, each at its own next boundary."""
        for session in list(connection.sessions):
            call = self._calls[session]
            call.connection = None
            if call.session.state is State.DRAINING:
                call.session.on(Event.LOST)
                self._ledger.finish(session, call.due, Why.LOST)
            elif call.session.state is not State.GONE:
                self._depart(call, Event.LOST)

    # --- newcomers

    def _join(self, connection: Connection, join: control.Join) -> None:
        room = self.foresight.headroom(self._leases.held, self.ready, self.draining)
        refusal = admit(room, self._bundle.manifest, join.settings)
        job: Job | Refusal | None = None
        if refusal is None:
            job = self._reception.receive(
                join.voice, join.persona, join.settings, self._clock.now_ns()
            )
        if refusal is None and isinstance(job, Refusal):
            refusal, job = job, None
        lease = None if refusal else self._leases.grant()
        if refusal is None and lease is not None:
            assert not isinstance(job, Refusal), job
            refusal = self._prepare(connection, join, lease, job)
        if refusal is not None:
            if lease is not None:
                self._leases.give_back(lease.session)
            self._refuse(connection, join.request, refusal)

    def _refuse(self, connection: Connection | None, request: int, refusal: Refusal) -> None:
        self.refusals[refusal.reason] += 1
        now_ns, reason = self._clock.now_ns(), refusal.reason
        self._refused.say(now_ns, "refused: reason=%s (%s)", reason.value, refusal.detail)
        if connection is not None:
            self._send(connection, control.Refused(request, refusal.reason, refusal.detail))

    def _prepare(
        self, connection: Connection, join: control.Join, lease: Lease, job: Job | None
    ) -> Refusal | None:
        """All that a session needs, before the tick thread hears of it."""
        first_frame_ns = self._policy.first_frame_s * NS_PER_S
        t0_ns, now_ns = self._loop.grid.t0_ns, self._clock.now_ns()
        call = prepare(
            self._bundle,
            self._token,
            t0_ns,
            connection,
            join,
            lease,
            job,
            self._beside,
            first_frame_ns,
            now_ns,
        )
        if isinstance(call, Refusal):
            return call
        results = call.tap.results if call.tap is not None else None
        self._ledger.open(call.header, call.channel.receipts, results)
        self._calls[lease.session] = call
        connection.sessions.add(lease.session)
        self._tell_tick(lease.session, Arrive(call.seat), job)
        logger.info("session %d %s: line=%s", lease.session, call.session.state.value, join.line)
        if job is None:
            self._answer(call)
        return None

    def _withdraw(self, connection: Connection, message: control.Withdraw) -> None:
        """Its caller has gone while the persona was fed: the slot is somebody else's."""
        for session in connection.sessions:
            call = self._calls[session]
            answer = call.answer
            if answer is not None and answer.request == message.request and not call.leaving:
                call.leaving = call.withdrawn = True
                self._depart(call, Event.LEAVE)
                return

    # --- what the tick thread is told

    def _tell_tick(self, session: SessionId, message: Arrive | Restart, job: Job | None) -> None:
        """At once, or when what is kept of the job's prompt has been read from the disk."""
        if job is None:
            self._loop.inbox.append(message)
        else:
            self._pending[session] = message
            self._reception.fetch(session, job)

    def _hear_reception(self) -> None:
        while self._reception.fetched:
            message = self._pending.pop(SessionId(self._reception.fetched.popleft()), None)
            if message is not None:  # None: its caller has gone
                self._loop.inbox.append(message)

    def _depart(self, call: Call, event: Event) -> None:
        """End a session, at the next tick boundary at the latest."""
        pending = self._pending.pop(call.session.id, None)
        if isinstance(pending, Arrive):  # the tick thread has never heard of it
            self._hear_tick(Left(call.session.id, event, 0))
        else:
            self._loop.inbox.append(Depart(call.session.id, event))

    # --- sessions that begin anew

    def _reset(self, connection: Connection, message: control.Reset) -> None:
        call = self._calls.get(SessionId(message.session))
        state = State.GONE if call is None else call.session.state
        job: Job | Refusal | None = None
        if call is None or state is not State.LIVE:
            job = Refusal(
                Reason.FAULT,
                f"session {message.session} is {state.value}; only one that is live can be reset",
            )
        else:
            wish = call.wish
            job = self._reception.receive(
                wish.voice, wish.persona, wish.settings, self._clock.now_ns()
            )
        if call is None or isinstance(job, Refusal):
            assert isinstance(job, Refusal), job
            self._send(connection, control.Refused(message.request, job.reason, job.detail))
            return
        call.session.on(Event.RESET)
        call.reset_for = connection, message.request
        self._tell_tick(call.session.id, Restart(call.session.id, job), job)

    def _restarted(self, call: Call, news: Restarted) -> None:
        call.session.on(Event.RESTARTED)
        self.sessions_reset += 1
        if news.job is not None:
            self._reception.primed(news.session, news.job)
        logger.info("session %d reset: tick=%d frames_held=%d", news.session, news.tick, news.held)
        asked, call.reset_for = call.reset_for, None
        prompt = self._reception.prompted(news.job)
        said = control.WasReset(0, news.session, news.frame_index, news.held, prompt)
        if call.connection is not None and (asked is None or asked[0] is not call.connection):
            self._send(call.connection, said)
        if asked is not None and asked[0].is_open:
            self._send(asked[0], msgspec.structs.replace(said, request=asked[1]))

    def _answer(self, call: Call) -> None:
        """Its caller may speak from now on."""
        answer, call.answer = call.answer, None
        if call.connection is not None and answer is not None:
            self._send(call.connection, answer)

    # --- what tick and ledger say

    def _hear_tick(self, news: FromTick) -> None:
        call = self._calls[news.session]
        if isinstance(news, Primed):
            self._reception.primed(news.session, news.job)
            call.session.on(Event.PRIMED)
            if call.answer is not None:
                prompt = self._reception.prompted(news.job)
                call.answer = msgspec.structs.replace(call.answer, prompt=prompt)
            self._answer(call)
            return
        if isinstance(news, Restarted):
            self._restarted(call, news)
            return
        if isinstance(news, WentLive):
            call.session.on(Event.FIRST_FRAME)
            logger.info("session %d live: slot=%d tick=%d", news.session, news.slot, news.tick)
            return
        self._leases.give_back(news.session)
        call.due = news.due
        call.why = endings.why(call, news.event)
        state = call.session.on(news.event)
        if call.connection is None and state is State.DRAINING:
            call.why = Why.LOST
            state = call.session.on(Event.LOST)
        self.sessions_hung_up += call.why is Why.OPERATOR
        for told in endings.waiting(call):
            self._tell(told)
        if state is State.DRAINING:
            call.settle_until_ns = self._clock.now_ns() + self._policy.settle_s * NS_PER_S
            self._ledger.settle(news.session, call.due, call.why)
        else:
            self._ledger.finish(news.session, call.due, call.why)

    def _give_up_on_silent_lines(self, now_ns: int) -> None:
        for session, call in list(self._calls.items()):
            pending = self._pending.get(session)
            job = None if pending is None else pending.job
            if job is not None and now_ns > job.until_ns:  # the disk does not answer
                self._depart(call, Event.TIMEOUT)
            if call.session.state is State.DRAINING and now_ns > call.settle_until_ns:
                call.session.on(Event.TIMEOUT)
                if call.why is not Why.OPERATOR:
                    call.why = Why.TIMEOUT
                self._ledger.finish(session, call.due, call.why)

    def _forget(self, session: SessionId) -> None:
        """The file is closed, the channel is nobody's any more."""
        call = self._calls[session]
        if call.session.state is State.DRAINING:
            call.session.on(Event.FLUSHED)
        assert call.session.state is State.GONE, call.session
        # Counted first: who sees from another thread that nobody is left finds all of them ended.
        self.calls_ended += 1
        del self._calls[session]
        call.channel.close()
        call.channel.unlink()
        self._beside.forget(session)
        self._tell(self._transfers.forget(session))
        why = call.why.name.lower()
        logger.info("session %d gone: why=%s frames_due=%d", session, why, call.due)
        if call.connection is None:
            return
        call.connection.sessions.discard(session)
        word = endings.last_word(call, self._reception.overdue)
        if isinstance(word, Refusal):
            self._refuse(call.connection, call.wish.request, word)
        else:
            self._send(call.connection, word)

    # --- the box itself

    def _drain_on(self, now_ns: int) -> None:
        if self._drain_until_ns is None:
            return
        if not self._calls:
            self._loop.stopping = True
        elif now_ns >= self._drain_until_ns:
            for call in self._calls.values():
                if not call.stopped and call.session.state in UNDER_WAY:
                    call.stopped = True
                    self._depart(call, Event.LEAVE)

    def _shed(self) -> None:
        """Ticks are late all the same: the newest session goes, with a Gone that says why."""
        live = [s for s, call in self._calls.items() if call.session.state is State.LIVE]
        newest = self.foresight.plan_shed(live)
        if newest is not None:
            self.sessions_shed += 1
            self._loop.inbox.append(Depart(SessionId(newest), Event.SHED))
            logger.warning(
                "session %d shed: late_run=%d sessions=%d margin_us=%d",
                newest,
                self._loop.counts.late_run,
                len(live),
                self._loop.counts.margin_ns // 1000,
            )

    def _report(self, asked: control.Status) -> control.Report:
        counted = Counted(
            ready=self.ready,
            draining=self.draining,
            refusals={reason.value: count for reason, count in self.refusals.items() if count},
            shed=self.sessions_shed,
            reset=self.sessions_reset,
            hung_up=self.sessions_hung_up,
        )
        return self._reporter.report(asked, counted)
