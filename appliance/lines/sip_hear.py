"""What the model hears of a telephone caller: which audio is which tick's frame.

Decides when the stack's audio is read and when a frame is handed in; `receive` decides what is in
one. What the stack has is read every `READ_NS`, brought to the model's rate and put into `receive`,
which gives one frame for every tick, handed in some time before it, as `HandIn` says. A tick that
has begun is left out, and so is one for which the box still has a frame: what waits there would be
lag for ever.
"""

from collections import deque

import numpy as np

from appliance.channel import Channel
from appliance.clock import NS_PER_MS, NS_PER_S, TickGrid
from appliance.frame_ring import DownlinkHeader, UplinkHeader
from appliance.lines.receive import SPARE_NS, ReceiveBuffer
from appliance.lines.sip_figures import Took
from appliance.lines.sip_recorder import Tape
from appliance.lines.sip_stack import Media
from appliance.lines.speex import Stretches, stretcher

LEAD_NS = 12 * NS_PER_MS
MOST_LEAD_NS = 44 * NS_PER_MS
"""How long before a tick its frame is handed in, at the least and at the most."""

LEADS_NS = ((24, LEAD_NS), (48, 16 * NS_PER_MS), (72, 24 * NS_PER_MS))
MANY_LEAD_NS = 32 * NS_PER_MS
"""And at the least by how many calls there are at most, and if there are more: what they have been
seen to need. Calls that are handed in sooner than before stretch their audio, all of them at once,
just when more calls have come."""

SPARE_LEAD_NS = 6 * NS_PER_MS
"""How much sooner than it has been seen to need."""

STEP_NS = 4 * NS_PER_MS
"""In which steps the lead grows and shrinks: each makes calls stretch their audio a little."""

LOOKED_AT, OUTLIERS = 128, 2
"""Ticks of the past that the lead goes by, and how many of them may have needed more."""

CALM_TICKS = 12
"""For so many ticks (a second) after one that no lead would have been enough for, nothing is
stretched: that makes a call's work half as much again, and what waits then is this process's doing
and no clock's."""

LOUD = 0.01
"""Of full scale: -40 dB. A telephone's voice is well above it, and most rooms below."""

READ_NS = 5 * NS_PER_MS
MANY, READ_MANY_NS = 72, 40 * NS_PER_MS
"""How often audio is looked for at most: less than half a packet, so that a hole is found where it
is; where more than so many calls are on, two packets at a time, at a third less work."""

FULL_SCALE = np.float32(1 / 32_768)

MISSED_NS = 3 * NS_PER_S
"""A telephone sends from the moment on at which it is answered, silence too. If nothing at all has
come by then, its audio goes somewhere else."""

PAY_BACK_TICKS = 6
"""So many ticks in a row must have heard an older frame than theirs before a backlog is one."""


class HandIn:
    """How long before a tick all calls of a line hand their frames in. Pure.

    What it must cover is how late this process is when it is woken for them, and what it takes to
    read, to make and to hand in the frames of all calls: 2 ms for a few, 20 for a hundred. It
    grows at once and shrinks when `LOOKED_AT` ticks have needed less.
    """

    def __init__(self) -> None:
        self.lead_ns = LEAD_NS
        self.read_ns = READ_NS
        """How often each call's audio is looked for."""
        self.due = self.missed = 0
        """Frames of all calls, and those of them whose tick had begun before."""
        self._least_ns = LEAD_NS
        self.may_stretch = True
        """There is time to make a call's audio a little longer or shorter."""
        self._calm = CALM_TICKS
        self._start_ns = 0
        """Of the newest tick that anybody handed a frame in for."""
        self._late_ns = 0
        """Of its frames, the latest so far: after the time that was meant for them."""
        self._needed: deque[int] = deque(maxlen=LOOKED_AT)

    def look_after(self, calls: int) -> None:
        """So many calls are on now."""
        self.read_ns = READ_NS if calls <= MANY else READ_MANY_NS
        self._least_ns = next((ns for most, ns in LEADS_NS if calls <= most), MANY_LEAD_NS)
        self.lead_ns = max(self.lead_ns, self._least_ns)

    def saw(self, start_ns: int, now_ns: int) -> None:
        """A frame of the tick that starts then is handed in now."""
        self.due += 1
        self.missed += now_ns >= start_ns
        # What a longer lead would not have mended says nothing about its length.
        late_ns = min(now_ns - (start_ns - self.lead_ns), MOST_LEAD_NS)
        if start_ns <= self._start_ns:
            self._late_ns = max(self._late_ns, late_ns)
            return
        self._needed.append(self._late_ns)
        self._calm = 0 if self._late_ns >= MOST_LEAD_NS else self._calm + 1
        self.may_stretch = self._calm >= CALM_TICKS
        self._start_ns, self._late_ns = start_ns, late_ns
        if len(self._needed) <= OUTLIERS:
            return
        needed_ns = sorted(self._needed)[-1 - OUTLIERS] + SPARE_LEAD_NS
        wanted_ns = min(max(-(-needed_ns // STEP_NS) * STEP_NS, self._least_ns), MOST_LEAD_NS)
        if wanted_ns > self.lead_ns:
            self.lead_ns = wanted_ns
        elif wanted_ns < self.lead_ns and len(self._needed) == LOOKED_AT:
            self.lead_ns -= STEP_NS
            self._needed.clear()


class Hearing:
    """One call's way in. Everything takes the time as an argument."""

    def __init__(
        self,
        samples: int,
        rate_hz: int,
        seed: int,
        media: Media,
        took: Took,
        tape: Tape | None,
        hand_in: HandIn,
        now_ns: int,
    ) -> None:
        """samples, rate_hz: of the model's frames. took: to be added to. tape: hears it, too.

        hand_in: shared by all calls that one thread looks after.
        """
        self.receive = ReceiveBuffer(samples, rate_hz, seed=seed)
        self.sent = 0
        """Frames handed in."""
        self.overslept = 0
        self.not_taken = 0
        self.paid_back = 0
        self.heard_ns = now_ns
        """When something last came of the caller."""
        self.spoke_ns = 0
        """When that was last loud enough for a voice."""
        self.may_miss_caller = True
        """Nothing has come so far, and something should."""
        self._began_ns: int | None = None
        self._rate_hz = rate_hz
        self._media = media
        self._took = took
        self._tape = tape
        self._hand_in = hand_in
        self._in: tuple[int, Stretches] | None = None
        """Rate of the call's audio, and what brings it to the model's."""
        self._tick = 0
        """The tick whose frame is handed in next."""
        self._start_ns = 0
        """When it starts."""
        self._meant: dict[int, tuple[int, int | None]] = {}
        """By uplink frame_index: the tick it was meant for and when its last sample arrived, unless
        the caller sends nothing."""
        self._behind = 0
        self._pay_back = False
        self._read_ns = now_ns
        self._looked_ns = now_ns
        """When audio was last looked for."""
        self._opens_ns: int | None = None
        """When what comes is first kept; None: it is."""
        self._arrived_ns: int | None = None

    @property
    def rate_in_hz(self) -> int:
        """Of the caller's audio; 0 before there was any."""
        return 0 if self._in is None else self._in[0]

    def begin(self, grid: TickGrid, now_ns: int) -> None:
        """The model hears the caller from now on."""
        self._began_ns = now_ns
        self.heard_ns = self._read_ns = self._looked_ns = now_ns
        # Not by today's lead: a call whose lead grows must not have a tick more than it lasts.
        self._tick = grid.tick_at(now_ns + MOST_LEAD_NS) + 1
        self._start_ns = grid.start_ns(self._tick)
        # What comes more than a frame and its spare before that would be lag for the whole call.
        take_ns = self._start_ns - self._hand_in.lead_ns
        self._opens_ns = take_ns - grid.period_ns - SPARE_NS

    def leave_out(self, now_ns: int) -> None:
        """What the caller says meanwhile is heard by nobody."""
        if self._media.read().size:
            self.heard_ns = now_ns
            self.may_miss_caller = False

    def misses_caller(self, now_ns: int) -> bool:
        """Nothing at all has come, although it is time: true once."""
        if self._began_ns is None or now_ns - self._began_ns < MISSED_NS:
            return False
        is_missed, self.may_miss_caller = self.may_miss_caller, False
        return is_missed

    def turn(self, channel: Channel, grid: TickGrid, now_ns: int) -> int:
        """Whatever is due, if anything is; when the next frame's time comes."""
        if self._opens_ns is not None:
            if now_ns < self._opens_ns:
                return self._opens_ns
            self._opens_ns = None
            self.leave_out(now_ns)
            self._read_ns = self._looked_ns = now_ns
        if now_ns >= self._read_ns or now_ns >= self._start_ns - self._hand_in.lead_ns:
            self._read(now_ns)
            self._give(channel, grid, now_ns, self._hand_in.lead_ns)
        return self._start_ns - self._hand_in.lead_ns

    def end(self, channel: Channel, grid: TickGrid, now_ns: int) -> None:
        """The call is over: what is due, and what no lead would have handed in later."""
        self.turn(channel, grid, now_ns)
        self._give(channel, grid, now_ns, MOST_LEAD_NS)

    def _read(self, now_ns: int) -> None:
        """What the caller said since the last time, into the receive buffer."""
        every_ns, take_ns = self._hand_in.read_ns, self._start_ns - self._hand_in.lead_ns
        # The last look before a frame's time is at that time.
        self._read_ns = take_ns - max(0, take_ns - now_ns - 1) // every_ns * every_ns
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        pcm = self._media.read()
        rate_hz = self._media.in_hz
        if not pcm.size or not rate_hz:
            return
        self.heard_ns = now_ns
        self.may_miss_caller = False
        if self._in is None or self._in[0] != rate_hz:
            self._in = (rate_hz, stretcher(rate_hz, self._rate_hz))
        audio = pcm * FULL_SCALE
        self._arrived_ns = now_ns
        if np.vdot(audio, audio) > LOUD * LOUD * audio.size:
            self.spoke_ns = now_ns
        ppm = self.receive.ppm if self._hand_in.may_stretch else 0.0
        self.receive.push(self._in[1].push(audio, ppm), now_ns, take_ns, looked_ns, ppm)

    def _give(self, channel: Channel, grid: TickGrid, now_ns: int, lead_ns: int) -> None:
        """Hand in every frame whose time has come."""
        while self._start_ns - lead_ns <= now_ns:
            tick, start_ns = self._tick, self._start_ns
            self._tick = tick + 1
            self._start_ns = grid.start_ns(tick + 1)
            self._hand_in.saw(start_ns, now_ns)
            if now_ns >= start_ns or self._pay_back:
                self._leave_out_tick(start_ns, has_begun=now_ns >= start_ns)
                continue
            # Of a caller who has said nothing yet, the noise is as old as this moment.
            arrived_ns = now_ns if self._arrived_ns is None else self._arrived_ns
            pcm = self.receive.take(now_ns)
            arrived_ns -= self.receive.held_samples * NS_PER_S // self._rate_hz
            if self._tape is not None:
                self._tape.said(pcm, arrived_ns)
            if not channel.uplink.put(UplinkHeader(self.sent, 0, arrived_ns), pcm):
                self.not_taken += 1
                continue  # the box does not read: it is stopping, or stuck, and will be heard of
            is_heard = self.receive.is_streaming
            self._meant[self.sent] = (tick, arrived_ns if is_heard else None)
            self._meant.pop(self.sent - 64, None)
            if is_heard:
                self._took.arrived_to_tick.append(start_ns - arrived_ns)
            self.sent += 1

    def came_back(self, header: DownlinkHeader) -> None:
        """The model made a frame. Those that wait in the ring on every tick: leave one out."""
        meant = self._meant.get(header.heard)
        if meant is None:
            return
        self._behind = self._behind + 1 if header.tick > meant[0] else 0
        if self._behind >= PAY_BACK_TICKS:
            self._pay_back = True

    def arrived_ns(self, heard: int) -> int | None:
        """When the last sample of uplink frame ``heard`` came, if that is known still."""
        meant = self._meant.get(heard)
        return None if meant is None else meant[1]

    def _leave_out_tick(self, start_ns: int, *, has_begun: bool) -> None:
        if has_begun:
            self.overslept += 1
        else:
            self._pay_back, self._behind = False, 0
            self.paid_back += 1
        if self._tape is not None:
            self._tape.said(None, start_ns)
