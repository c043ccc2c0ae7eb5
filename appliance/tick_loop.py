"""Gather, step, scatter, account: on the grid, for exactly the live sessions.

    tick n  |- join, leave -|- gather -|- executor.step(B) -|- scatter, record -|.. margin ..|
            t0 + n·period                                                           deadline

Newcomers with a persona are prepared in the margin, piece by piece (`priming`).

`TickLoop.turn` is the hot path and is bound by these rules: it retains nothing it allocates, does
not log, await or touch a file, and takes no lock. Control messages come and go through two
deques, records leave through a preallocated ring, frames through shared memory that the control
thread made before the loop ever sees the session.

One session's trouble stays its own: a frame of NaN from a caller is replaced by silence and
recorded; a row of NaN from the model ends that session with FAULT, and the others go on. An
exception out of `executor.step` concerns everybody: it is not caught, it ends the process, and
systemd starts it again. Decisions are in `scheduler`; who may come in is `admission`'s business.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance import frame_ring
from appliance.calibration import Recalibration
from appliance.clock import Clock, TickGrid
from appliance.frame_ring import DownlinkHeader, UplinkHeader
from appliance.leases import Slots
from appliance.priming import PrimingDesk
from appliance.record_ring import RecordRing
from appliance.scheduler import (
    Occupant,
    TickPlan,
    plan_resume,
    plan_slot,
    plan_tick,
)
from appliance.seat import (
    Arrive,
    FromTick,
    Left,
    Primed,
    Restart,
    Restarted,
    Seat,
    TickCounts,
    ToTick,
    WentLive,
)
from appliance.session import Event
from appliance.step_model import StepRing
from appliance.tick_record import (
    BAD_INPUT,
    CONCEALED,
    FAULT,
    GENERATED,
    HEARD,
    LAST,
    LATE,
    MISSED,
    PRIMING,
    RESET,
    U32_MAX,
    UNREAD,
    WARMING,
    downlink_flags,
    tick_record,
)
from engines.executor import Executor, SettingError

RECENT_STEPS = 8
"""Steps looked back on to guess the next one's length. The guess is the shortest of them: after a
hiccup steps are fast again, and one frame late is better than one frame lost."""


@dataclass(frozen=True, slots=True)
class TickPolicy:
    """What an operator may choose about lateness; see `config.ClockConfig`."""

    catch_up_ns: int
    lag_limit_frames: int
    unread_limit_frames: int = U32_MAX
    """Frames in a row a line may leave unread in a full ring before its call is ended."""


@dataclass(slots=True)
class TickLoop:
    """The loop and everything it owns. One thread calls `turn` or `run`."""

    executor: Executor
    clock: Clock
    grid: TickGrid
    policy: TickPolicy
    ring: RecordRing
    inbox: deque[ToTick] = field(default_factory=deque)
    outbox: deque[FromTick] = field(default_factory=deque)
    counts: TickCounts = field(default_factory=TickCounts)
    steps_seen: StepRing = field(default_factory=StepRing)
    """What each tick took, for admission's forecasts."""
    desk: PrimingDesk | None = None
    """None: this bundle's calls have no prompts."""
    idle: Recalibration | None = None
    """What is done in ticks in which nobody is in the box."""
    beat: Callable[[], None] | None = None
    """Called after a turn, at most every `beat_ticks`: proof that we turn. Must not block."""
    beat_ticks: int = 1
    stopping: bool = False
    """Set by another thread: return from `run` before the next tick."""

    _slots: Slots[Seat] = field(init=False)
    _waiting: list[Seat] = field(default_factory=list)
    _priming: list[Seat] = field(default_factory=list)
    _stamps: list[int] = field(init=False)
    """Generation per slot; travels with the state when it is moved."""
    _rows_in: list[NDArray[np.float32]] = field(init=False)
    _rows_out: list[NDArray[np.float32]] = field(init=False)
    _scratch: NDArray[np.float32] = field(init=False)
    _finite: NDArray[np.bool_] = field(init=False)
    _steps_ns: list[int] = field(init=False)
    full_frames: int = field(init=False)
    """Age at which a session's state is at full retention."""
    _beat_tick: int = 0
    _done_ns: int = 0
    """When the last tick was done: a late one's excess is not counted twice."""

    def __post_init__(self) -> None:
        slots = self.executor.slots
        self._slots = Slots(slots)
        self._stamps = [0] * slots
        self._rows_in = [self.executor.audio_in[slot] for slot in range(slots)]
        self._rows_out = [self.executor.audio_out[slot] for slot in range(slots)]
        self._scratch = np.zeros_like(self._rows_in[0])
        self._finite = np.ones((slots, len(self._scratch)), np.bool_)
        self._steps_ns = [self.grid.period_ns // 2] * RECENT_STEPS
        self.full_frames = max(1, self.executor.bundle.manifest.ticks_until_full())

    def run(self) -> None:
        """Tick until told to stop. Whatever `turn` raises ends the process."""
        tick = max(0, self.grid.tick_at(self.clock.now_ns()) + 1)
        while not self.stopping:
            self.clock.sleep_until(self.grid.start_ns(tick))
            tick = self.turn(tick)

    def turn(self, due_tick: int) -> int:
        """Everything that happens at one tick boundary and until the next; see the module's rules.

        due_tick: the tick that is due now. Returns the one to wait for next.
        """
        self.ring.is_hurried = True
        self._read_inbox()
        self._let_leave()
        self._begin_anew()
        now_ns = self.clock.now_ns()
        tick = plan_resume(
            due_tick,
            now_ns,
            self.grid.t0_ns,
            self.grid.period_ns,
            min(self._steps_ns),
            self.policy.catch_up_ns,
        )
        for missed in range(due_tick, tick):
            self._miss(missed)
            self._let_leave()
        self._let_in(tick)
        self._hold(tick)
        self._step(tick, max(0, self.grid.tick_at(now_ns) - tick))
        self.ring.is_hurried = False
        if self._priming:
            self._prime(tick)
        if self.idle is not None and self.idle.asked:
            if len(self._slots) or self._priming or self._waiting:
                self.idle.drop()
            else:
                self.idle.work()
        if self.beat is not None and tick >= self._beat_tick:
            self.beat()
            self._beat_tick = tick + self.beat_ticks
        return tick + 1

    @property
    def live(self) -> int:
        return len(self._slots)

    # --- joins and leaves: at the boundary, before anything is gathered

    def _read_inbox(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Arrive):
                if self.desk is not None and message.seat.job is not None:
                    self.desk.take(message.seat.job, len(self._slots))
                    self._priming.append(message.seat)
                else:
                    self._waiting.append(message.seat)
                continue
            for seat in (*self._slots, *self._waiting, *self._priming):
                if seat.session != message.session or seat.ending is not None:
                    continue
                if isinstance(message, Restart):
                    seat.restart = message
                else:
                    seat.ending = message.event

    def _let_leave(self) -> None:
        for seat in [seat for seat in self._slots if seat.ending is not None]:
            hole = seat.slot
            source = self._slots.leave(seat)
            if source is not None:
                self.executor.move(source, hole)
                self._stamps[hole] = self._stamps[source]
            self._say_left(seat)
        for seat in [seat for seat in self._priming if seat.ending is not None]:
            self._priming.remove(seat)
            self._drop_job(seat)
            self._say_left(seat)

    def _begin_anew(self) -> None:
        """Give live sessions that asked for it a state as new as a newcomer's.

        One without a prompt is stepped on it at once. One with a prompt leaves the batch as a
        leaver does, is prepared like a newcomer in the margins of ticks, and comes back; its lease
        is the slot it waits in, so that a full box can do it as well.
        """
        for seat in [seat for seat in self._slots if seat.restart is not None]:
            assert seat.restart is not None
            job, seat.restart = seat.restart.job, None
            if job is None or self.desk is None:
                self.executor.join(seat.slot, seat.settings)
                seat.began, seat.is_fresh = seat.frame_index, True
                continue
            hole, source = seat.slot, self._slots.leave(seat)
            if source is not None:
                self.executor.move(source, hole)
                self._stamps[hole] = self._stamps[source]
            seat.job, seat.is_held, seat.began = job, True, seat.frame_index
            self.desk.take(job, len(self._slots))
            self._priming.append(seat)

    def _hold(self, tick: int) -> None:
        """Frames that are due of sessions between two states: each gets its record."""
        for seat in self._held():
            self._pass_over(seat, PRIMING, tick, self.clock.now_ns())

    def _held(self) -> list[Seat]:
        return [seat for seat in (*self._priming, *self._waiting) if seat.is_held]

    def _let_in(self, tick: int) -> None:
        """Seat those whose first frame has come; a session costs nothing before that."""
        if not self._waiting:
            return
        now_ns = self.clock.now_ns()
        staying = []
        for seat in self._waiting:
            if seat.ending is None and now_ns > seat.wait_until_ns and not seat.is_held:
                seat.ending = Event.TIMEOUT
            if seat.ending is None and (seat.is_held or seat.channel.uplink.waiting):
                self._seat(seat, tick)
            elif seat.ending is None:
                staying.append(seat)
            if seat.ending is not None:
                self._drop_job(seat)
                self._say_left(seat)
        self._waiting = staying

    def _seat(self, seat: Seat, tick: int) -> None:
        slot = self._slots.take(seat)
        lifted = self.desk.lift(slot, seat.job) if self.desk is not None else None
        try:
            if self.desk is not None and seat.job is not None:
                self.desk.seat(seat.job, slot)
            else:
                self.executor.join(slot, seat.settings)
        except SettingError:  # admission let it through: this session's trouble, nobody else's
            self._slots.leave(seat)
            self._drop_job(seat)
            seat.ending = Event.FAULT
        if self.desk is not None and lifted is not None:
            self.desk.put_down(lifted, len(self._slots))
        if seat.ending is not None:
            return
        self._stamps[slot] = seat.generation
        if seat.is_held:
            seat.is_held, seat.is_fresh = False, True
        else:
            self.outbox.append(WentLive(seat.session, tick, slot))

    def _prime(self, tick: int) -> None:
        """Newcomers with a persona, in what is left of the tick's period."""
        assert self.desk is not None
        now_ns = self.clock.now_ns()
        staying = []
        for seat in self._priming:
            if seat.ending is None and seat.job is not None and now_ns > seat.job.until_ns:
                seat.ending = Event.TIMEOUT
            if seat.ending is None:
                staying.append(seat)
            else:
                self._drop_job(seat)
                self._say_left(seat)
        done = self.desk.work(self.grid.start_ns(tick + 1)) if staying else []
        self._priming = [seat for seat in staying if seat.job not in done]
        for seat in staying:
            if seat.job is not None and seat.job in done:
                seat.wait_until_ns = self.clock.now_ns() + seat.first_frame_ns
                self._waiting.append(seat)
                if not seat.is_held:
                    self.outbox.append(Primed(seat.session, seat.job))

    def _drop_job(self, seat: Seat) -> None:
        if self.desk is not None and seat.job is not None and seat.job.slot >= 0:
            self.desk.drop(seat.job)

    def _say_left(self, seat: Seat) -> None:
        assert seat.ending is not None, seat.session
        self.outbox.append(Left(seat.session, seat.ending, seat.frame_index))

    # --- one tick

    def _step(self, tick: int, ticks_behind: int) -> None:
        """ticks_behind: later ticks whose start has passed; their frames wait, and rightly so."""
        seats = list(self._slots)
        counts = self.counts
        counts.tick = tick
        counts.live = len(seats)
        if not seats:
            return
        plan = plan_tick(
            tick,
            [Occupant(seat.slot, seat.channel.uplink.waiting) for seat in seats],
            self.policy.lag_limit_frames + ticks_behind,
        )
        heard = self._gather(seats, plan)
        began_ns = self.clock.now_ns()
        self.ring.is_hurried = False
        self.executor.step(plan.batch)
        self.ring.is_hurried = True
        step_ns = self.clock.now_ns() - began_ns
        self._steps_ns[tick % RECENT_STEPS] = step_ns
        margin_ns = self._scatter(seats, plan, heard, min(step_ns, U32_MAX))
        counts.margin_ns = margin_ns  # of the last slot: the tick's own
        counts.worst_margin_ns = (
            min(counts.worst_margin_ns, margin_ns) if counts.steps else margin_ns
        )
        counts.late += margin_ns < 0
        counts.late_run = counts.late_run + 1 if margin_ns < 0 else 0
        counts.steps += 1
        done_ns = self.clock.now_ns()
        full = self.full_frames
        aged = sum([min(seat.age, full) for seat in seats])
        began_ns = max(self.grid.start_ns(tick), self._done_ns)
        counts.slow_run = counts.slow_run + 1 if done_ns - began_ns > self.grid.period_ns else 0
        busy_ns = done_ns - began_ns
        self.steps_seen.put(plan.batch, aged * 1000 // full, busy_ns, margin_ns, step_ns)
        self._done_ns = done_ns

    def _gather(self, seats: list[Seat], plan: TickPlan) -> list[tuple[int, UplinkHeader | None]]:
        """Put what each slot hears into its row. Returns flags, and the frame's header if any."""
        heard: list[tuple[int, UplinkHeader | None]] = []
        for seat, (_, skip, hears, _), row in zip(seats, plan.slots, self._rows_in, strict=False):
            uplink = seat.channel.uplink
            if skip:
                uplink.skip(skip)
            header = uplink.get(row) if hears else None
            flags = RESET if seat.is_fresh else 0
            if header is None:
                row.fill(0)
                flags |= CONCEALED
            else:
                flags |= HEARD | LAST if header.flags & frame_ring.LAST else HEARD
            heard.append((flags, header))
        for slot in self._broken(self._rows_in, len(seats)):
            self._rows_in[slot].fill(0)  # one NaN would stay in the session's state for ever
            flags, header = heard[slot]
            heard[slot] = flags & ~HEARD | CONCEALED | BAD_INPUT, header
        for seat, (flags, _), row in zip(seats, heard, self._rows_in, strict=False):
            if seat.tap is not None and flags & HEARD:
                seat.tap.put(UplinkHeader(seat.frame_index, 0, self.clock.now_ns()), row)
        return heard

    def _broken(self, rows: list[NDArray[np.float32]], batch: int) -> list[int]:
        """Slots below ``batch`` whose row is not all finite; hardly ever any, so all at once."""
        block = self.executor.audio_in if rows is self._rows_in else self.executor.audio_out
        finite = np.isfinite(block[:batch], out=self._finite[:batch])
        if finite.all():
            return []
        return np.flatnonzero(~finite.all(axis=1)).tolist()

    def _scatter(
        self,
        seats: list[Seat],
        plan: TickPlan,
        heard: list[tuple[int, UplinkHeader | None]],
        step_ns: int,
    ) -> int:
        """Hand each slot's frame to its line and record it. Returns the last one's margin in ns."""
        executor, tick, now_ns = self.executor, plan.tick, self.clock.now_ns
        deadline_ns, margin_ns = self.grid.deadline_ns(tick), 0
        texts, valid = executor.text[: plan.batch].tolist(), executor.valid[: plan.batch].tolist()
        broken = self._broken(self._rows_out, plan.batch)
        for seat, mine, (flags, header) in zip(seats, plan.slots, heard, strict=True):
            slot = mine.slot
            text = texts[slot]
            if flags & LAST:
                seat.ending = Event.LAST_FRAME
            if not valid[slot]:
                flags |= WARMING
                text = -1
            made_ns = now_ns()
            if made_ns > deadline_ns:
                flags |= LATE
            if self._stamps[slot] != seat.generation or slot in broken:
                flags |= FAULT
                seat.ending = Event.FAULT
                margin_ns = deadline_ns - now_ns()
                made_ns, text = 0, -1
            else:
                flags |= GENERATED
                sent = DownlinkHeader(
                    seat.session,
                    seat.generation,
                    seat.frame_index,
                    tick,
                    deadline_ns,
                    made_ns,
                    text,
                    downlink_flags(flags),
                    header.frame_index if header is not None and flags & HEARD else -1,
                )
                if seat.channel.downlink.put(sent, self._rows_out[slot]):
                    seat.unread = 0
                else:
                    flags |= UNREAD
                    self._count_unread(seat)
                margin_ns = deadline_ns - made_ns
            if seat.is_fresh:
                self._say_restarted(seat, tick)
            seat.misses = seat.misses + 1 if flags & (LATE | FAULT) else 0
            self.ring.put(
                tick_record(
                    seat, mine, flags, header, plan.batch, tick, made_ns, margin_ns, step_ns, text
                )
            )
            seat.frame_index += 1
        return margin_ns

    def _say_restarted(self, seat: Seat, tick: int) -> None:
        seat.is_fresh = False
        held = seat.frame_index - seat.began
        seat.began = seat.frame_index
        self.outbox.append(Restarted(seat.session, tick, seat.frame_index, held, seat.job))

    def _count_unread(self, seat: Seat) -> None:
        """A line that has read nothing for so long hangs: its call ends, and settles nothing."""
        seat.unread += 1
        if seat.unread >= self.policy.unread_limit_frames and seat.ending is None:
            seat.ending = Event.TIMEOUT
            self.counts.hung += 1

    def _miss(self, tick: int) -> None:
        """A tick that never runs: its frames are due all the same, and each gets its record."""
        held = self._held()
        if len(self._slots):
            self.counts.missed += 1
        margin_ns = self.grid.margin_ns(tick, self.clock.now_ns())
        for seat in (*self._slots, *held):
            self._pass_over(seat, MISSED, tick, self.grid.deadline_ns(tick) - margin_ns)

    def _pass_over(self, seat: Seat, flags: int, tick: int, at_ns: int) -> None:
        """A due frame that nothing is made for: it gets its record, and counts as a miss.

        The caller's frame of that tick is taken and dropped with it, so that the session does
        not lag behind its caller from then on.
        """
        uplink = seat.channel.uplink
        # No frame is skipped for lag here: the others that wait belong to the ticks after.
        plan = plan_slot(max(0, seat.slot), uplink.waiting, lag_limit_frames=uplink.capacity)
        header = uplink.get(self._scratch) if plan.hears else None
        if header is not None and header.flags & frame_ring.LAST:
            flags |= LAST
            seat.ending = Event.LAST_FRAME
        seat.misses += 1
        margin_ns = self.grid.margin_ns(tick, at_ns)
        batch = len(self._slots)
        self.ring.put(tick_record(seat, plan, flags, header, batch, tick, 0, margin_ns, 0, -1))
        seat.frame_index += 1
