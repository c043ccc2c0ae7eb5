"""The local line at work: one call, one sound card, one terminal, and the box at the other end.

Carries things between them and decides little: what a key does, and for how long a call waits for
a card that has gone (the model hears silence meanwhile, and what it says is discarded). One
thread; callbacks of the sound library and opening a card have threads of their own.

Ctrl-C hangs up politely. A second one leaves at once; the box, whose socket closes, takes the
session for lost.
"""

import signal
from collections.abc import Callable
from types import FrameType

from appliance import control
from appliance.clock import NS_PER_MS, NS_PER_S, Clock
from appliance.lines.boxes import Boxes, tell
from appliance.lines.local_call import POLL_NS, LocalCall, State
from appliance.lines.local_rings import Exchange
from appliance.lines.local_screen import HELP, LEAVE_KEY, MUTE_KEY, Screen, View
from appliance.lines.local_sound import QUIETEST_DB, Microphone, Speaker
from appliance.lines.local_watch import CardWatch

SHOWN_NS = 100 * NS_PER_MS
"""How often the meter moves."""

PAUSE_NS = NS_PER_S
"""Words that have not been followed by others for so long are a line."""

AGAIN_NS = 500 * NS_PER_MS
"""A second Ctrl-C within this of the first is the same one, seen by both processes of `talk`."""

SETTLED_S = 0.5
SETTLE_NS = 4 * NS_PER_S
"""Nobody is called before the card has worked for so long, or has had so much time to: a sound
server that has just been asked for sound stumbles, and the model's first words would be lost."""

LONGEST_SLEEP_S = 0.1
"""A signal sets a flag and interrupts no sleep."""

Ends = Callable[[Exchange], tuple[Microphone, Speaker]]


class LocalLine:
    """A line process's whole work."""

    def __init__(
        self,
        boxes: Boxes,
        call: LocalCall,
        card: CardWatch,
        ends: Ends,
        screen: Screen,
        clock: Clock,
        wait_for_card_ns: int,
    ) -> None:
        """ends: makes a microphone and a loudspeaker of an open card.

        wait_for_card_ns: how long the call lasts without one.
        """
        self.muted = False
        self._boxes = boxes
        self._call = call
        self._card = card
        self._ends = ends
        self._screen = screen
        self._clock = clock
        self._wait_for_card_ns = wait_for_card_ns
        self._began_ns = clock.now_ns()
        self._has_settled = False
        self._lost_ns = 0
        self._told = ""
        self._shown_ns = 0
        self._spoke_ns = 0
        self._joined = False
        self._interrupts: list[int] = []

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: once hangs up politely, twice raises KeyboardInterrupt."""
        self._interrupts.append(self._clock.now_ns())
        if self._interrupts[-1] - self._interrupts[0] > AGAIN_NS:
            raise KeyboardInterrupt

    def run(self) -> int:
        """Talk until the call is over. 0: it ended as it should; 1: it did not; 130: Ctrl-C."""
        call = self._call
        self._attach()
        with self._screen.open():
            try:
                while not call.is_over:
                    self._turn()
            except (control.BoxGone, control.ControlError) as err:
                call.end(self._clock.now_ns(), str(err))
            except KeyboardInterrupt:
                call.end(self._clock.now_ns(), "interrupted twice")
            self._screen.pause()
        if call.trouble:
            self._screen.say(call.trouble)
        return 1 if call.trouble else 130 if self._interrupts else 0

    def _turn(self) -> None:
        """Do what is due, then wait for the box or for the next thing, whichever is first."""
        call, now_ns = self._call, self._clock.now_ns()
        self._keys()
        self._look_after_card(now_ns)
        if call.microphone is not None:
            # Frames whose time has passed while this process slept are left out by the call.
            call.microphone.listen(now_ns, max(call.take_ns, now_ns + 1))
        if self._settled(now_ns):
            for message in call.advance(now_ns):
                self._boxes.send(1, message)
        self._show(now_ns)
        now_ns = self._clock.now_ns()
        wake_ns = call.wake_ns(now_ns) if self._has_settled else now_ns + POLL_NS
        wait_s = max(0.0, (wake_ns - now_ns) / NS_PER_S)
        for news in self._boxes.receive(min(wait_s, LONGEST_SLEEP_S)):
            tell(news, self._call, self._clock.now_ns())

    def _settled(self, now_ns: int) -> bool:
        if not self._has_settled:
            exchange = self._card.exchange
            samples = 0 if exchange is None else min(exchange.heard.read, exchange.played.written)
            enough = exchange is not None and samples > SETTLED_S * exchange.rate_hz
            late = now_ns - self._began_ns > SETTLE_NS
            self._has_settled = enough or late or bool(self._interrupts)
        return self._has_settled

    def _keys(self) -> None:
        keys = self._screen.keys()
        if keys.count(MUTE_KEY) % 2:
            self.muted = not self.muted
            if self._call.microphone is not None:
                self._call.microphone.muted = self.muted
        if LEAVE_KEY in keys or self._interrupts:
            self._call.hang_up()

    def _look_after_card(self, now_ns: int) -> None:
        card = self._card
        if card.turn(now_ns):
            self._attach()
            if card.exchange is not None:
                self._screen.say("the sound card is back")
            else:
                self._lost_ns = now_ns
        if card.trouble and card.trouble != self._told:
            left_s = self._wait_for_card_ns // NS_PER_S
            self._screen.say(f"{card.trouble} (the call waits for up to {left_s} s)")
        self._told = card.trouble
        if card.exchange is None and now_ns - self._lost_ns > self._wait_for_card_ns:
            self._call.leave(now_ns, "the sound card did not come back")

    def _attach(self) -> None:
        call, exchange = self._call, self._card.exchange
        if exchange is None:
            call.microphone = call.speaker = None
        else:
            call.microphone, call.speaker = self._ends(exchange)
            call.microphone.muted = self.muted

    def _show(self, now_ns: int) -> None:
        call = self._call
        if not self._joined and call.state is State.TALKING:
            self._joined = True
            self._screen.say(f"you are through, session {call.session}. {HELP}")
        if call.said:
            self._screen.words(call.said)
            call.said = ""
            self._spoke_ns = now_ns
        elif now_ns - self._spoke_ns > PAUSE_NS:
            self._screen.pause()
        if now_ns - self._shown_ns < SHOWN_NS:
            return
        self._shown_ns = now_ns
        microphone, speaker = call.microphone, call.speaker
        self._screen.show(
            View(
                microphone_db=microphone.level.look() if microphone else QUIETEST_DB,
                speaker_db=speaker.level.look() if speaker else QUIETEST_DB,
                muted=self.muted,
                margin_ms=call.margin_ns / NS_PER_MS,
                drift_ppm=-speaker.drift.drift_ppm if speaker else 0.0,
                trouble=self._card.trouble,
            )
        )


def hang_up_on_signals(line: LocalLine) -> Callable[[], None]:
    """SIGINT, SIGTERM and a closed terminal end the call; returns what undoes this."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, line.interrupt)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore
