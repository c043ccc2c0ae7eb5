"""The telephone line's shell: a stack on one side, the boxes on the other, one event loop.

Carries events to calls, calls' wishes to the stack, and messages between calls and the box; all
calls are looked after every `turn_ns`, on a grid, so that a hundred of them cost one wake-up. What
a call does is `sip_call`'s business, who may come in the box's: a caller is asked for there first,
rings meanwhile, and is refused with what the box said.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from appliance import control, status
from appliance.clock import NS_PER_MS, NS_PER_S, Clock, wall_stamp
from appliance.lines import sip_stack
from appliance.lines.boxes import Boxes, News
from appliance.lines.limits import Bucket
from appliance.lines.sip_call import Limits, PhoneCall, Verb
from appliance.lines.sip_config import SipAccount, SipConfig
from appliance.lines.sip_extras import ExtrasMaker
from appliance.lines.sip_headers import number_of
from appliance.lines.sip_hear import MISSED_NS, HandIn
from appliance.lines.sip_recorder import Recorded
from appliance.lines.sip_records import Records, Row, row_at_end
from appliance.lines.sip_stack import Event, Incoming, Stack
from appliance.lines.strain import Strain
from appliance.lines.web_pace import TickTimes
from appliance.log import Seldom

logger = logging.getLogger(__name__)

TURNS_NS = ((0, 20 * NS_PER_MS), (24, 5 * NS_PER_MS), (48, 10 * NS_PER_MS))
MANY_TURN_NS = 20 * NS_PER_MS
"""How often calls are looked after, by how many there are at most, and if there are more. What they
wait is delay both ways; a turn of a hundred takes 10 ms, so a packet (20 ms) at a time is enough.
While nobody calls only the box is listened to."""

SEEK_S = 1.0
"""Between two attempts to find a box that is gone, and two looks at how it is."""

MOST_SOURCES = 10_000
"""Addresses whose calls are counted one by one."""

LONGEST_WORDS = 250
"""Of what a peer says of a call; a SIP message bears thousands."""

Hook = Callable[[dict[str, object]], None]


def turn_ns(calls: int) -> int:
    """From one look at so many calls to the next."""
    return next((every_ns for most, every_ns in TURNS_NS if calls <= most), MANY_TURN_NS)


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

        line: what boxes are told the line is. Raises `RecorderError`.
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
            config.lead_ms * NS_PER_MS,
            config.media_timeout_s * NS_PER_S,
            config.hold_s * NS_PER_S,
            config.transfer_to,
        )
        self._run_id = secrets.token_hex(4)
        self._calls: dict[int, PhoneCall] = {}
        self._legs: dict[int, PhoneCall] = {}
        self._rows: dict[int, Row] = {}
        self._recorded_rows: dict[str, Row] = {}
        """Of calls that are over and whose recording is being finished."""
        self._operators: set[int] = set()
        """Calls that an operator has had transferred, and the box has not been told."""
        self._numbers = 0
        self._hand_in = HandIn()
        self._strain = Strain()
        self._sources: dict[str, Bucket] = {}
        self._boxes: Boxes | None = None
        self._stop_ns: int | None = None
        self._take_ns: int | None = None
        """When the next frame of any call is to be handed in."""
        self._report: control.Report | None = None
        self._trouble = ""
        self.counts = dict.fromkeys(
            ("calls", "answered", "refused", "limited", "unknown", "unheard"), 0
        )
        self._refused = Seldom(logger, logging.INFO)
        self._ended = Seldom(logger, logging.INFO)
        self._missed = Seldom(logger, logging.WARNING)
        low, high = config.rtp_ports
        self._where_to_look = (
            f". Do packets from there reach UDP ports {low}-{high} here, and has `allow` "
            "the address that they come from? docs/telephone.md, Behind a router"
            if line == "sip"
            else ""
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._extras = ExtrasMaker(config, clock, self._recorded)
        self._use(boxes)

    async def run(self) -> str:
        """Take calls until `stop` has been called and the last one is over; why it ended if not."""
        self._loop = asyncio.get_running_loop()
        await self._stack.start(self._hear)
        self._records.end_lost(self._line, self._run_id)
        logger.info("taking calls at %s for %s", self._config.listen, ", ".join(self._accounts))
        watching = asyncio.create_task(self._watch())
        try:
            while not self._has_stopped() and not self._trouble:
                if watching.done():
                    watching.result()  # a fault of ours: this process is replaced
                self._turn()
                now_ns = self._clock.now_ns()
                every_ns = turn_ns(len(self._calls))
                # On a grid: what a turn takes does not add to what calls wait.
                wake_ns = (now_ns // every_ns + 1) * every_ns
                if self._take_ns is not None:
                    wake_ns = min(wake_ns, max(self._take_ns, now_ns))
                await asyncio.sleep((wake_ns - now_ns) / NS_PER_S)
        finally:
            watching.cancel()
            await self._stack.close()
            if self._boxes is not None:
                self._boxes.close()
            for number, call in self._calls.items():
                call.lost("this line stopped", self._clock.now_ns())
                self._write_down(number, call)
            await asyncio.to_thread(self._extras.close)
            await asyncio.sleep(0)  # what the recorder said last is heard
            await asyncio.to_thread(self._records.close)
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

    @property
    def boxes(self) -> list[int]:
        """Processes of the boxes that calls are in."""
        return [] if self._boxes is None else self._boxes.processes

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
                self._tell_operator(call)
            case sip_stack.Digit():
                call.digit(event.digit, now_ns)
                self._say("digit", call, digit=event.digit)
            case sip_stack.Held():
                call.held(event.is_held, now_ns)
                self._say("hold" if event.is_held else "resume", call)
            case sip_stack.TransferEnded():
                self._transfer_ended(event, call, now_ns)

    def _transfer_ended(self, event: sip_stack.TransferEnded, call: PhoneCall, now_ns: int) -> None:
        if not call.transfer_ended(event.why, event.is_done, now_ns):
            return
        self._tell_operator(call)
        what = "transferred" if event.is_done else "not transferred"
        logger.info("call %d %s to %s: %s", call.number, what, call.sent_on.target, event.why)
        self._say(what, call, target=call.sent_on.target, why=event.why)

    def _incoming(self, event: Incoming, now_ns: int) -> None:
        self.counts["calls"] += 1
        event = _short(event)
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
            self._extras.make(f"{self._run_id}-{self._numbers}", account),
            self._hand_in,
        )
        self._calls[call.number] = self._legs[event.leg] = call
        self._rows[call.number] = row = Row(
            id=f"{self._run_id}-{call.number}",
            began=wall_stamp(),
            line=self._line,
            account=account.user,
            caller=event.caller,
            name=event.name,
            number=event.number or number_of(event.caller),
            called=number_of(event.called),
            diverted=event.diverted,
            voice=account.voice,
            call_id=event.call_id,
            source=event.source,
        )
        self._records.write(row)

    def _turn_away(self, event: Incoming, account: SipAccount | None, now_ns: int) -> str:
        """Why this one is not even asked for at the box; empty: it is."""
        if account is None:
            self.counts["unknown"] += 1
            return f"no account {event.account}"
        if why := self._takes_none():
            return why
        if len(self._sources) > MOST_SOURCES:
            self._sources.clear()
        per_s = self._config.calls_per_s
        bucket = self._sources.setdefault(event.source, Bucket(per_s, max(1.0, 2 * per_s)))
        if not bucket.take(1, now_ns):
            self.counts["limited"] += 1
            return f"more than {per_s:g} calls a second from there"
        return ""

    def _takes_none(self) -> str:
        """Why the line takes no call more, whoever it is of; empty: it does, if a box has room."""
        if self._stop_ns is not None:
            return "this line stops"
        if self._boxes is None:
            return "no box answers"
        if len(self._calls) >= self._config.most:
            return f"{self._config.most} calls are on"
        return self._strain.why

    # --- the clock

    def _turn(self) -> None:
        boxes = self._boxes
        now_ns = self._clock.now_ns()
        if self._stop_ns is not None and now_ns >= self._stop_ns:
            for call in self._calls.values():
                call.hang_up("this line stops", now_ns)
        self._hand_in.look_after(len(self._calls))
        heard = [call.hear(self._clock.now_ns()) for call in self._calls.values()]
        self._strain.look(self._hand_in.due, self._hand_in.missed, now_ns)
        self._take_ns = min((take_ns for take_ns in heard if take_ns is not None), default=None)
        try:
            if boxes is not None:
                for news in boxes.deal(self._calls):
                    self._hear_operator(news)
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
                self._say("transfer", call, target=target, by=call.sent_on.by)
                self._stack.transfer(leg, target)

    def _finish(self, number: int, call: PhoneCall) -> None:
        row = self._write_down(number, call)
        self._ended.say(self._clock.now_ns(), "call %d over: %s %s", number, call.why, row.figures)
        self._tell_hook(
            "ended",
            row,
            why=row.why,
            talked_ms=row.talked_ms,
            recording=row.recording,
            transfer_to=row.transfer_to,
            transfer=row.transfer,
        )
        del self._calls[number], self._rows[number]
        self._operators.discard(number)
        self._legs.pop(call.incoming.leg, None)

    def _has_stopped(self) -> bool:
        return self._stop_ns is not None and not self._calls

    # --- the box

    def _use(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._welcome = boxes.welcome
        self._times = TickTimes(boxes.welcome.period_ns)
        self._extras.use(boxes.welcome)

    def _hear_operator(self, news: News) -> None:
        """Somebody wants something of a call, by way of its box."""
        call = self._calls[news.call]
        match news.message:
            case control.WasReset():
                call.began_anew()
            case control.Transfer() as wish:
                why = call.transfer(wish.target, "operator")
                self._operators.add(call.number)
                self._tell_operator(call, why)

    def _tell_operator(self, call: PhoneCall, why_not: str = "") -> None:
        """What became of a transfer that came by way of the box, once it is known."""
        sent_on = call.sent_on
        if call.number not in self._operators or (sent_on.is_under_way and not why_not):
            return
        self._operators.discard(call.number)
        is_done = sent_on.is_done and not why_not
        detail = f"transferred to {sent_on.target}" if is_done else why_not or sent_on.outcome
        if self._boxes is not None:
            said = control.Transferred(0, call.session, is_done, detail[:200])
            self._boxes.send(call.number, said)

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
            self._look_for_missed()
            await asyncio.sleep(SEEK_S)

    def _tell_room(self) -> None:
        if self._room is None:
            return
        why = self._takes_none()
        if not why and self._report is not None and not self._report.sessions_free:
            why = f"the box is full: {self._report.limited_by}"
        self._room(not why, why)

    def _look_for_missed(self) -> None:
        """Callers of whom nothing has come: it is said while they are on, not only after."""
        now_ns = self._clock.now_ns()
        for call in self._calls.values():
            if not call.hearing.misses_caller(now_ns):
                continue
            self.counts["unheard"] += 1
            caller = call.incoming.caller or "somebody"
            seconds = MISSED_NS // NS_PER_S
            why = self._where_to_look
            self._missed.say(
                now_ns, "call %d of %s: no audio in %d s%s", call.number, caller, seconds, why
            )
            self._say("unheard", call)

    # --- what is left of a call

    def _write_down(self, number: int, call: PhoneCall) -> Row:
        """Its record, as it is when the call is over; what it was recorded on is finished."""
        row = row_at_end(self._rows[number], call, self._clock.now_ns())
        self._records.write(row)
        if (tape := call.tape) is not None:
            self._recorded_rows[tape.name] = row  # before the recorder can say that it is done
            tape.close()
        return row

    def _recorded(self, recorded: Recorded) -> None:
        """The recorder's thread has finished a file."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hear_recorded, recorded)

    def _hear_recorded(self, recorded: Recorded) -> None:
        row = self._recorded_rows.pop(recorded.name, None)
        if recorded.trouble:
            logger.warning("recording %s: %s", recorded.path, recorded.trouble)
        if row is None:
            return
        path = str(recorded.path) if recorded.seconds else ""
        seconds = round(recorded.seconds, 3)
        row = msgspec.structs.replace(row, recording=path, recorded_ms=round(seconds * 1000))
        self._records.write(row)
        self._tell_hook("recorded", row, recording=path, seconds=seconds, trouble=recorded.trouble)

    def _say(self, what: str, call: PhoneCall, **more: object) -> None:
        row = msgspec.structs.replace(self._rows[call.number], session=call.session)
        self._tell_hook(what, row, **more)

    def _tell_hook(self, what: str, row: Row, **more: object) -> None:
        self._hook(
            {
                "event": what,
                "call": row.id,
                "account": row.account,
                "caller": row.caller,
                "number": row.number,
                "name": row.name,
                "called": row.called,
                "diverted": row.diverted,
                "call_id": row.call_id,
                "session": row.session,
                **more,
            }
        )


def _short(event: Incoming) -> Incoming:
    """With a stranger's words at a length that may be kept of half a million calls."""
    words = ("caller", "call_id", "source", "name", "called", "number", "diverted")
    return replace(event, **{word: getattr(event, word)[:LONGEST_WORDS] for word in words})
