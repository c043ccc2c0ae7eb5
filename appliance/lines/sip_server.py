"""The telephone line's shell: a stack on one side, the boxes on the other, one event loop.

Carries events to calls, calls' wishes to the stack, and messages between calls and the box; all
calls are looked after every `TURN_NS`, on a grid, so that a hundred of them cost one wake-up. What
a call does is `sip_call`'s business, who may come in the box's: a caller is asked for there first,
rings meanwhile, and is refused with what the box said.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from appliance import control, status
from appliance.clock import NS_PER_MS, NS_PER_S, Clock, wall_stamp
from appliance.lines import sip_stack
from appliance.lines.boxes import Boxes
from appliance.lines.limits import Bucket
from appliance.lines.sip_call import Limits, PhoneCall, Verb
from appliance.lines.sip_config import SipAccount, SipConfig
from appliance.lines.sip_records import Records, Row
from appliance.lines.sip_stack import Event, Incoming, Stack
from appliance.lines.web_pace import TickTimes
from appliance.log import Seldom

logger = logging.getLogger(__name__)

TURN_NS = 10 * NS_PER_MS
"""How often calls are looked after: half a packet."""

IDLE_NS = 20 * NS_PER_MS
"""And the box listened to, while nobody calls."""

SEEK_S = 1.0
"""Between two attempts to find a box that is gone, and two looks at how it is."""

MOST_SOURCES = 10_000
"""Addresses whose calls are counted one by one."""

Hook = Callable[[dict[str, object]], None]


class Room(Protocol):
    """Whoever wants to know whether one more call would be taken."""

    def __call__(self, has_room: bool, why: str) -> None: ...


class SipServer:
    """All calls of one line process."""

    def __init__(
        self,
        config: SipConfig,
        socket: Path,
        boxes: Boxes,
        stack: Stack,
        records: Records,
        clock: Clock,
        *,
        line: str = "sip",
        hook: Hook | None = None,
        room: Room | None = None,
    ) -> None:
        """socket: of the box, or a folder of several. boxes: connected; closed by the server.

        line: what boxes are told the line is.
        """
        self._config = config
        self._socket = socket
        self._stack = stack
        self._records = records
        self._clock = clock
        self._line = line
        self._hook = hook or (lambda _: None)
        self._room = room
        self._accounts = {account.user: account for account in config.accounts}
        self._limits = Limits(
            config.lead_ms * NS_PER_MS, config.media_timeout_s * NS_PER_S, config.hold_s * NS_PER_S
        )
        self._run_id = secrets.token_hex(4)
        self._calls: dict[int, PhoneCall] = {}
        self._legs: dict[int, PhoneCall] = {}
        self._rows: dict[int, Row] = {}
        self._numbers = 0
        self._sources: dict[str, Bucket] = {}
        self._boxes: Boxes | None = None
        self._stop_ns: int | None = None
        self._report: control.Report | None = None
        self._trouble = ""
        self.counts = dict.fromkeys(("calls", "answered", "refused", "limited", "unknown"), 0)
        self._refused = Seldom(logger, logging.INFO)
        self._ended = Seldom(logger, logging.INFO)
        self._use(boxes)

    async def run(self) -> str:
        """Take calls until `stop` has been called and the last one is over; why it ended if not."""
        await self._stack.start(self._hear)
        logger.info("taking calls at %s for %s", self._config.listen, ", ".join(self._accounts))
        watching = asyncio.create_task(self._watch())
        try:
            while not self._has_stopped() and not self._trouble:
                self._turn()
                now_ns = self._clock.now_ns()
                every_ns = TURN_NS if self._calls else IDLE_NS
                # On a grid: what a turn takes does not add to what calls wait.
                wake_ns = (now_ns // every_ns + 1) * every_ns
                await asyncio.sleep((wake_ns - now_ns) / NS_PER_S)
        finally:
            watching.cancel()
            await self._stack.close()
            if self._boxes is not None:
                self._boxes.close()
            for number, call in self._calls.items():
                self._write(number, call)
            self._records.close()
        return self._trouble

    def stop(self, *, within_ns: int) -> None:
        """Refuse newcomers and let calls end by themselves for so long; then end them."""
        if self._stop_ns is None:
            self._stop_ns = self._clock.now_ns() + within_ns
            self._tell_room()

    @property
    def calls(self) -> int:
        """How many are on, in any state."""
        return len(self._calls)

    def call_with(self, call_id: str) -> PhoneCall | None:
        """The call that the peer or we call so."""
        for number, call in self._calls.items():
            if call_id in (call.incoming.call_id, f"{number}"):
                return call
        return None

    # --- the stack

    def _hear(self, event: Event) -> None:
        now_ns = self._clock.now_ns()
        match event:
            case Incoming():
                self._incoming(event, now_ns)
                return
            case sip_stack.Registration():
                state = "is registered" if event.is_registered else "is not registered"
                logger.info("account %s %s: %s", event.account, state, event.why)
                return
            case sip_stack.Dead():
                self._trouble = event.why
                return
        call = self._legs.get(event.leg)
        if call is None:
            return
        match event:
            case sip_stack.Established():
                call.established(now_ns)
                self.counts["answered"] += 1
                self._say("answered", call)
            case sip_stack.Closed():
                del self._legs[event.leg]
                call.closed(event.why, event.stats, now_ns)
            case sip_stack.Digit():
                call.digit(event.digit, now_ns)
                self._say("digit", call, digit=event.digit)
            case sip_stack.Held():
                call.held(event.is_held, now_ns)
                self._say("hold" if event.is_held else "resume", call)
            case sip_stack.TransferEnded():
                logger.info("call %d was not transferred: %s", call.number, event.why)
                self._say("not transferred", call, why=event.why)

    def _incoming(self, event: Incoming, now_ns: int) -> None:
        self.counts["calls"] += 1
        account = self._accounts.get(event.account)
        why = self._turn_away(event, account, now_ns)
        if why or account is None:
            self.counts["refused"] += 1
            self._refused.say(now_ns, "refused %s: %s", event.source or "a caller", why)
            self._stack.reject(event.leg)
            return
        self._numbers += 1
        call = PhoneCall(
            self._numbers,
            event,
            account,
            self._limits,
            self._stack.media(event.leg),
            self._welcome,
            self._times,
            now_ns,
            self._line,
        )
        self._calls[call.number] = self._legs[event.leg] = call
        self._rows[call.number] = row = Row(
            id=f"{self._run_id}-{call.number}",
            began=wall_stamp(),
            line=self._line,
            account=account.user,
            caller=event.caller,
            call_id=event.call_id,
            source=event.source,
        )
        self._records.write(row)

    def _turn_away(self, event: Incoming, account: SipAccount | None, now_ns: int) -> str:
        """Why this one is not even asked for at the box; empty: it is."""
        if account is None:
            self.counts["unknown"] += 1
            return f"no account {event.account}"
        if self._stop_ns is not None:
            return "this line stops"
        if self._boxes is None:
            return "no box answers"
        if len(self._calls) >= self._config.most:
            return f"{self._config.most} calls are on"
        if len(self._sources) > MOST_SOURCES:
            self._sources.clear()
        per_s = self._config.calls_per_s
        bucket = self._sources.setdefault(event.source, Bucket(per_s, max(1.0, 2 * per_s)))
        if not bucket.take(1, now_ns):
            self.counts["limited"] += 1
            return f"more than {per_s:g} calls a second from there"
        return ""

    # --- the clock

    def _turn(self) -> None:
        boxes = self._boxes
        now_ns = self._clock.now_ns()
        if self._stop_ns is not None and now_ns >= self._stop_ns:
            for call in self._calls.values():
                call.hang_up("this line stops", now_ns)
        try:
            if boxes is not None:
                boxes.deal(self._calls)
            else:
                for call in self._calls.values():
                    call.advance(now_ns)
        except (control.BoxGone, control.ControlError) as err:
            self._lose(str(err))
        for number, call in list(self._calls.items()):
            while call.wants:
                want = call.wants.popleft()
                self._carry_out(call, want.verb, want.target)
            if call.is_done:
                self._finish(number, call)

    def _carry_out(self, call: PhoneCall, verb: Verb, target: str) -> None:
        leg = call.incoming.leg
        match verb:
            case Verb.ANSWER:
                self._stack.answer(leg)
            case Verb.REJECT:
                self.counts["refused"] += 1
                self._refused.say(self._clock.now_ns(), "call %d: %s", call.number, call.why)
                self._stack.reject(leg)
            case Verb.HANG_UP:
                self._stack.hang_up(leg)
            case Verb.TRANSFER:
                self._say("transfer", call, target=target)
                self._stack.transfer(leg, target)

    def _finish(self, number: int, call: PhoneCall) -> None:
        self._write(number, call)
        del self._calls[number], self._rows[number]
        self._legs.pop(call.incoming.leg, None)
        figures = msgspec.json.encode(call.figures()).decode()
        now_ns = self._clock.now_ns()
        self._ended.say(now_ns, "call %d over: %s %s", number, call.why, figures)
        self._say("ended", call, why=call.why)

    def _has_stopped(self) -> bool:
        return self._stop_ns is not None and not self._calls

    # --- the box

    def _use(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._welcome = boxes.welcome
        self._times = TickTimes(boxes.welcome.period_ns)

    def _lose(self, why: str) -> None:
        logger.warning("no box: %s; %d calls ended", why, len(self._calls))
        if self._boxes is not None:
            self._boxes.close()
        self._boxes = self._report = None
        now_ns = self._clock.now_ns()
        for call in self._calls.values():
            call.lost("the box is gone", now_ns)
        self._tell_room()

    async def _watch(self) -> None:
        """Off the event loop: how the box is, and finding one that is gone."""
        while True:
            try:
                if self._boxes is None:
                    self._use(await asyncio.to_thread(Boxes.connect, self._socket, self._clock))
                    logger.info("a box answers again: %s", self._welcome.model)
                if not self._socket.is_dir():
                    self._report = await asyncio.to_thread(status.ask, self._socket)
                    self._times.forecast_ns = self._report.forecast_ns
            except control.BoxGone:
                self._report = None
            except control.ControlError as err:
                logger.warning("a box was found that cannot be used: %s", err)
            self._tell_room()
            await asyncio.sleep(SEEK_S)

    def _tell_room(self) -> None:
        if self._room is None:
            return
        why = ""
        if self._stop_ns is not None:
            why = "this line stops"
        elif self._boxes is None:
            why = "no box answers"
        elif len(self._calls) >= self._config.most:
            why = f"{self._config.most} calls are on"
        elif self._report is not None and not self._report.sessions_free:
            why = f"the box is full: {self._report.limited_by}"
        self._room(not why, why)

    # --- what is left of a call

    def _write(self, number: int, call: PhoneCall) -> None:
        figures, stats = call.figures(), call.stats
        ended_ns = call.ended_ns or self._clock.now_ns()
        answered_ns = call.talked_from_ns
        waited_ns = (answered_ns or ended_ns) - call.began_ns
        talked_ns = 0 if answered_ns is None else ended_ns - answered_ns
        row = msgspec.structs.replace(
            self._rows[number],
            session=figures.session,
            waited_ms=waited_ns // NS_PER_MS,
            talked_ms=talked_ns // NS_PER_MS,
            held_ms=figures.held_ms,
            ended=wall_stamp(),
            why=call.why,
            digits=figures.digits,
            frames=figures.frames,
            whole=figures.whole,
            concealed_ms=figures.concealed_ms,
            noise_ms=figures.noise_ms,
            delivered=figures.delivered,
            late=figures.late,
            filled=figures.filled,
            discarded=figures.discarded,
            underruns=figures.underruns,
            rx_packets=int(stats.get("rx_packets", 0)),
            rx_lost=int(stats.get("jbuf_lost", 0)),
            tx_packets=int(stats.get("tx_packets", 0)),
            tx_lost=int(stats.get("rtcp_tx_lost", 0)),
            rtt_ms=stats.get("rtcp_rtt_us", 0) / 1000,
            figures=msgspec.json.encode(figures).decode(),
        )
        self._records.write(row)

    def _say(self, what: str, call: PhoneCall, **more: object) -> None:
        self._hook(
            {
                "event": what,
                "call": f"{self._run_id}-{call.number}",
                "account": call.account.user,
                "caller": call.incoming.caller,
                "call_id": call.incoming.call_id,
                "session": call.session,
                **more,
            }
        )
