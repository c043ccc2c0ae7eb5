"""The box's end of the control socket, in a thread of its own: who comes, who goes, and why.

The thread owns connections, session states, leases and channels. It asks `admission`, prepares
everything a session needs (shared memory, a ledger file) and only then tells the tick thread,
through a deque; what happened comes back through another. A call is over in this order:

    tick loop says Left  ->  lease free  ->  ledger has every receipt (or a timeout)  ->  Gone

so the tick thread never waits for a line, and no line keeps a slot by not answering.
"""

import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance import control
from appliance.admission import Reason, Refusal, admit
from appliance.channel import Capacities, Channel
from appliance.clock import NS_PER_MS, NS_PER_S, Clock, wall_stamp
from appliance.config import AdmissionConfig, ClockConfig
from appliance.foresight import Foresight
from appliance.frame_ring import ChannelError
from appliance.leases import Lease, Leases
from appliance.ledger import Header, Why
from appliance.ledger_writer import LedgerWriter
from appliance.listener import Listener
from appliance.log import Seldom
from appliance.priming import Job
from appliance.reception import Reception
from appliance.session import Event, Session, SessionId, State
from appliance.step_model import StepSamples
from appliance.tick_loop import Arrive, Depart, Left, Primed, Seat, TickLoop, WentLive
from engines.bundle import Bundle

logger = logging.getLogger(__name__)

MOST_LINES = 64
"""Connections at once: far more line processes than a box has lines, and few enough that they
cannot use up the descriptors that calls need."""

REST_S = 0.001
"""Between two passes, so at most this often a line is listened to: one message a pass."""

POLL_S = 0.01
"""How long news from the tick or the ledger may lie; a connection is answered at once."""

ENDED: dict[Event, Why] = {
    Event.LAST_FRAME: Why.FINISHED,
    Event.LEAVE: Why.LEFT,
    Event.FAULT: Why.FAULT,
    Event.LOST: Why.LOST,
    Event.TIMEOUT: Why.TIMEOUT,
    Event.SHED: Why.SHED,
}


UNDER_WAY = (State.PRIMING, State.ADMITTED, State.LIVE)
"""What a box that stops must end."""


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    sessions: set[SessionId] = field(default_factory=set)


@dataclass(slots=True)
class _Call:
    session: Session
    channel: Channel
    connection: _Connection | None
    """None once the line is lost."""
    due: int = 0
    why: Why = Why.FINISHED
    leaving: bool = False
    """The line has said goodbye."""
    stopped: bool = False
    """The box ended the call, not the line."""
    settle_until_ns: int = 0
    answer: control.Admitted | None = None
    """What its line is told once its prompt is done."""


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
        clock: Clock,
        policy: ClockConfig,
        memory_bytes: int,
        session_bytes: int,
        admission: AdmissionConfig,
        samples: StepSamples,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Binds the socket. slots: at most the engine's. samples: of its calibration.

        Raises `listener.SocketTaken`.
        """
        self.ready = False
        """Set by the main thread once the engine is warm."""
        self.calls_ended = 0
        self.sessions_shed = 0
        self.refusals: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._bundle = bundle
        self._loop = loop
        self._ledger = ledger
        self._reception = reception
        self._clock = clock
        self._policy = policy
        self.foresight = Foresight(
            loop, bundle.manifest, admission, slots, memory_bytes, session_bytes, samples
        )
        self._on_failure = on_failure
        self._leases = Leases(slots)
        self._calls: dict[SessionId, _Call] = {}
        self._token = secrets.token_hex(4)
        self._drain_until_ns: int | None = None
        self._stop = False
        self._rest = threading.Event()
        self._seen_late = (0, 0)
        self._quiet_until_ns = 0
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(path)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        # What a peer can cause at will is logged seldom, each kind for itself.
        self._cut_off = Seldom(logger, logging.WARNING)
        self._turned_away = Seldom(logger, logging.WARNING)
        self._refused = Seldom(logger, logging.INFO)
        self._thread = threading.Thread(target=self._run, name="control")

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
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                key.data.socket.close()
        self._selector.close()
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._stop:
                self.serve_once(POLL_S)
                # A line that never stops sending must leave the interpreter to the tick thread.
                self._rest.wait(REST_S)
        except BaseException as err:
            # A box nobody can call is no box: end the process, systemd starts it again.
            self._on_failure(err)

    def serve_once(self, timeout_s: float) -> None:
        """One pass: messages, news from tick and ledger, time limits. Tests call it directly."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        if self._ledger.failure is not None:
            raise self._ledger.failure
        while self._loop.outbox:
            self._hear_tick(self._loop.outbox.popleft())
        while self._ledger.closed:
            self._forget(SessionId(self._ledger.closed.popleft()))
        now_ns = self._clock.now_ns()
        self.foresight.look(now_ns)
        self._shed()
        self._give_up_on_silent_lines(now_ns)
        self._drain_on(now_ns)
        self._report_lateness(now_ns)

    # --- lines

    def _accept(self) -> None:
        lines = len(self._selector.get_map()) - 1  # the listener is in it, too
        peer, problem = self._listener.accept(has_room=lines < MOST_LINES)
        if peer is None:
            now_ns = self._clock.now_ns()
            self._turned_away.say(now_ns, "a line was not let in: %s; %d are", problem, lines)
            return
        connection = _Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        t0_ns, reception = self._loop.grid.t0_ns, self._reception
        voices, persona = reception.voices, reception.takes_persona
        self._send(connection, control.welcome(self._bundle, t0_ns, voices, persona))

    def _read(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return  # dropped by something earlier in this pass
        try:
            raw = connection.socket.recv(control.LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if not raw:
            self._lose(connection)
            return
        try:
            message = control.decode_to_box(raw)
        except control.ControlError as err:
            now_ns = self._clock.now_ns()
            self._cut_off.say(now_ns, "a line was cut off: it sent %d bytes, %s", len(raw), err)
            self._lose(connection)
            return
        match message:
            case control.Join():
                self._join(connection, message)
            case control.Leave():
                self._leave(connection, message)
            case control.Status():
                self._send(connection, self._report(message.request, message.detail))

    def _leave(self, connection: _Connection, leave: control.Leave) -> None:
        if leave.session not in connection.sessions:  # nobody ends another line's call
            return
        call = self._calls[SessionId(leave.session)]
        if not call.leaving:  # the tick thread must not read through a flood of goodbyes
            call.leaving = True
            self._loop.inbox.append(Depart(call.session.id, Event.LEAVE))

    def _send(self, connection: _Connection, message: control.FromBox) -> None:
        try:
            connection.socket.send(control.encode(message))
        except OSError as err:  # full, because the line does not read, or closed
            now_ns, why = self._clock.now_ns(), err.strerror or err
            self._cut_off.say(now_ns, "a line was cut off: it does not read (%s)", why)
            self._lose(connection)

    def _lose(self, connection: _Connection) -> None:
        """The line is gone; its calls follow, each at its own next boundary."""
        if connection.socket.fileno() < 0:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for session in connection.sessions:
            call = self._calls[session]
            call.connection = None
            if call.session.state is State.DRAINING:
                call.session.on(Event.LOST)
                self._ledger.finish(session, call.due, Why.LOST)
            elif call.session.state is not State.GONE:
                self._loop.inbox.append(Depart(session, Event.LOST))

    # --- newcomers

    def _join(self, connection: _Connection, join: control.Join) -> None:
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

    def _refuse(self, connection: _Connection | None, request: int, refusal: Refusal) -> None:
        self.refusals[refusal.reason] += 1
        now_ns, reason = self._clock.now_ns(), refusal.reason
        self._refused.say(now_ns, "refused: reason=%s (%s)", reason.value, refusal.detail)
        if connection is not None:
            self._send(connection, control.Refused(request, refusal.reason, refusal.detail))

    def _prepare(
        self, connection: _Connection, join: control.Join, lease: Lease, job: Job | None
    ) -> Refusal | None:
        """All that a session needs, before the tick thread hears of it."""
        manifest = self._bundle.manifest
        sizes = Capacities()
        name = f"dbx-{os.getpid()}-{self._token}-{lease.session}"
        try:
            channel = Channel.create(name, manifest.timing.samples_per_frame, sizes)
        except (ChannelError, OSError) as err:
            return Refusal(Reason.MEMORY, f"no shared memory for the call: {err}")
        header = Header(
            session=lease.session,
            generation=lease.generation,
            line=join.line,
            caller=join.caller,
            settings=dict(join.settings),
            bundle=str(self._bundle.path),
            model=manifest.model.name,
            checkpoint_sha256=manifest.model.checkpoint_sha256,
            period_ns=manifest.timing.period_ns,
            t0_ns=self._loop.grid.t0_ns,
            started=wall_stamp(),
            voice=join.voice,
            persona=join.persona,
            prompt_frames=job.prompt.rows if job is not None else 0,
        )
        self._ledger.open(header, channel.receipts)
        state = State.ADMITTED if job is None else State.PRIMING
        session = Session(lease.session, lease.generation, state)
        call = self._calls[lease.session] = _Call(session, channel, connection)
        connection.sessions.add(lease.session)
        first_frame_ns = self._policy.first_frame_s * NS_PER_S
        until_ns = self._clock.now_ns() + first_frame_ns
        settings = dict(join.settings)
        seat = Seat(session.id, session.generation, channel, settings, until_ns, job)
        seat.first_frame_ns = first_frame_ns
        self._loop.inbox.append(Arrive(seat))
        call.answer = control.Admitted(
            request=join.request,
            session=lease.session,
            generation=lease.generation,
            channel=name,
            uplink=sizes.uplink,
            downlink=sizes.downlink,
            receipts=sizes.receipts,
        )
        logger.info("session %d %s: line=%s", lease.session, state.value, join.line)
        if job is None:
            self._answer(call)
        return None

    def _answer(self, call: _Call) -> None:
        """Its caller may speak from now on."""
        answer, call.answer = call.answer, None
        if call.connection is not None and answer is not None:
            self._send(call.connection, answer)

    # --- what tick and ledger say

    def _hear_tick(self, news: Primed | WentLive | Left) -> None:
        call = self._calls[news.session]
        if isinstance(news, Primed):
            self._reception.primed(news.session, news.job)
            call.session.on(Event.PRIMED)
            self._answer(call)
            return
        if isinstance(news, WentLive):
            call.session.on(Event.FIRST_FRAME)
            logger.info("session %d live: slot=%d tick=%d", news.session, news.slot, news.tick)
            return
        self._leases.give_back(news.session)
        call.due = news.due
        call.why = ENDED[news.event]
        if call.stopped and call.why is Why.LEFT:
            call.why = Why.STOPPED
        state = call.session.on(news.event)
        if call.connection is None and state is State.DRAINING:
            call.why = Why.LOST
            state = call.session.on(Event.LOST)
        if state is State.DRAINING:
            call.settle_until_ns = self._clock.now_ns() + self._policy.settle_s * NS_PER_S
            self._ledger.settle(news.session, call.due, call.why)
        else:
            self._ledger.finish(news.session, call.due, call.why)

    def _give_up_on_silent_lines(self, now_ns: int) -> None:
        for session, call in self._calls.items():
            if call.session.state is State.DRAINING and now_ns > call.settle_until_ns:
                call.session.on(Event.TIMEOUT)
                call.why = Why.TIMEOUT
                self._ledger.finish(session, call.due, Why.TIMEOUT)

    def _forget(self, session: SessionId) -> None:
        """The file is closed, the channel is nobody's any more."""
        call = self._calls.pop(session)
        if call.session.state is State.DRAINING:
            call.session.on(Event.FLUSHED)
        assert call.session.state is State.GONE, call.session
        call.channel.close()
        call.channel.unlink()
        self.calls_ended += 1
        why = call.why.name.lower()
        logger.info("session %d gone: why=%s frames_due=%d", session, why, call.due)
        if call.connection is None:
            return
        call.connection.sessions.discard(session)
        if call.answer is None:
            self._send(call.connection, control.Gone(session, why))
        elif call.why is Why.TIMEOUT:  # its line never heard of the session, only of the request
            self._refuse(call.connection, call.answer.request, self._reception.overdue())
        else:
            stopping = Refusal(Reason.DRAINING, "the box stopped before the persona was fed")
            self._refuse(call.connection, call.answer.request, stopping)

    # --- the box itself

    def _drain_on(self, now_ns: int) -> None:
        if self._drain_until_ns is None:
            return
        if not self._calls:
            self._loop.stopping = True
        elif now_ns >= self._drain_until_ns:
            for session, call in self._calls.items():
                if not call.stopped and call.session.state in UNDER_WAY:
                    call.stopped = True
                    self._loop.inbox.append(Depart(session, Event.LEAVE))

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

    def _report(self, request: int, detail: bool) -> control.Report:
        counts = self._loop.counts
        room = self.foresight.headroom(self._leases.held, self.ready, self.draining)
        return control.Report(
            request=request,
            ready=self.ready,
            draining=self.draining,
            tick=counts.tick,
            sessions_live=counts.live,
            leases_held=self._leases.held,
            slots=self._leases.total,
            ticks_late=counts.late,
            ticks_missed=counts.missed,
            last_margin_ns=counts.margin_ns,
            worst_margin_ns=counts.worst_margin_ns,
            records_lost=self._loop.ring.lost,
            sessions_free=room.free,
            limited_by=room.limit.value,
            forecast_ns=room.forecast.tick_ns(room.held + 1) if room.forecast else 0,
            refusals={reason.value: count for reason, count in self.refusals.items() if count},
            sessions_shed=self.sessions_shed,
            disk_errors=self._ledger.write_errors,
            records_dropped=self._ledger.records_dropped,
            personas=self._reception.report(),
            view=self._ledger.watch.view(self._bundle.manifest.session_bytes) if detail else None,
        )

    def _report_lateness(self, now_ns: int) -> None:
        """At most once a second, with counts: a late box must not also drown in its own log."""
        seen = (self._loop.counts.late, self._loop.counts.missed)
        if seen == self._seen_late or now_ns < self._quiet_until_ns:
            return
        logger.warning(
            "ticks late: %d more, missed: %d more; margin_us=%d sessions=%d",
            seen[0] - self._seen_late[0],
            seen[1] - self._seen_late[1],
            self._loop.counts.margin_ns // 1000,
            self._loop.counts.live,
        )
        self._seen_late = seen
        self._quiet_until_ns = now_ns + 1000 * NS_PER_MS
