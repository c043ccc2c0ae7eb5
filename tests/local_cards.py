"""A sound card and a box on a fake clock, for the local line: exact, and as odd as wanted.

The card has a clock of its own and calls its `Exchange` at its own times; the box is a channel and
an echo. `Sim` jumps from one thing to the next, so 20 minutes take seconds.
"""

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S, MonotonicClock, TickGrid
from appliance.frame_ring import FINAL, GENERATED, LAST, DownlinkHeader
from appliance.lines.local_call import LocalCall, State, Wish
from appliance.lines.local_card import CardError, Device, Pair
from appliance.lines.local_rings import Exchange
from appliance.lines.local_sound import Cleaner, Microphone, Speaker, Untouched

SAMPLES, RATE_HZ, PERIOD_MS = 1920, 24_000, 80
CARD_HZ, BLOCK = 48_000, 480
T0_NS = 40 * MS
WELCOME = control.Welcome(
    version=control.PROTOCOL,
    bundle="b",
    model="echo",
    trained=False,
    notice="",
    period_ns=PERIOD_MS * MS,
    sample_rate_hz=RATE_HZ,
    samples_per_frame=SAMPLES,
    t0_ns=T0_NS,
    pieces="",
    silent_ids=(0,),
)
_names = itertools.count()

Source = Callable[[int, int], NDArray[np.float32]]
"""Samples start.. (a number of the card's), so many: (n,) float32."""


def silence(start: int, size: int) -> NDArray[np.float32]:
    return np.zeros(size, np.float32)


def tone(hz: float, level: float = 0.3) -> Source:
    def source(start: int, size: int) -> NDArray[np.float32]:
        phase = (start + np.arange(size)) * (hz / CARD_HZ) % 1.0
        pcm: NDArray[np.float32] = (level * np.sin(2 * np.pi * phase)).astype(np.float32)
        return pcm

    return source


@dataclass
class Card:
    """A card whose clock is so many ppm fast."""

    ppm: float = 0.0
    speaker_ppm: float | None = None
    """None: one clock for both directions, as a card has."""
    source: Source = silence
    late_ns: Callable[[int], int] = lambda block: 0
    """How late the callbacks of a block are."""
    keep: bool = True
    """Whether what is played is kept."""
    exchange: Exchange = field(default_factory=lambda: Exchange(CARD_HZ, BLOCK))
    blocks: int = 0
    speaker_blocks: int = 0
    out: list[NDArray[np.float32]] = field(default_factory=list)
    stands: bool = False
    """No callbacks, as if it had gone."""
    active: bool = True
    _buffer: NDArray[np.float32] = field(default_factory=lambda: np.zeros(BLOCK, np.float32))

    @property
    def next_ns(self) -> int:
        return min(self._hears_ns, self._plays_ns)

    def call_back(self, now_ns: int) -> None:
        if self._hears_ns <= now_ns:
            if not self.stands:
                self.exchange.hear(self.source(self.blocks * BLOCK, BLOCK), now_ns)
            self.blocks += 1
        if self._plays_ns <= now_ns:
            if not self.stands:
                self.exchange.play(self._buffer, now_ns)
                if self.keep:
                    self.out.append(self._buffer.copy())
            self.speaker_blocks += 1

    @property
    def _hears_ns(self) -> int:
        at = (self.blocks + 1) * BLOCK * NS_PER_S / (CARD_HZ * (1 + self.ppm / 1e6))
        return round(at) + self.late_ns(self.blocks)

    @property
    def _plays_ns(self) -> int:
        ppm = self.ppm if self.speaker_ppm is None else self.speaker_ppm
        at = (self.speaker_blocks + 1) * BLOCK * NS_PER_S / (CARD_HZ * (1 + ppm / 1e6))
        return round(at) + self.late_ns(self.speaker_blocks)

    def played(self) -> NDArray[np.float32]:
        return np.concatenate(self.out)

    def close(self) -> None:
        self.active = False


class Sim:
    """A local call, its card and its box."""

    def __init__(
        self,
        card: Card,
        cleaner: Cleaner | None = None,
        made_ns: Callable[[int], int] = lambda tick: 5 * MS,
        turn_ns: int = 2 * MS,
        says: Callable[[int], NDArray[np.float32]] | None = None,
    ) -> None:
        """made_ns: how long after its start a tick's frame is there. turn_ns: how often the line
        looks. says: what the model says in a tick, (S,) float32; None: what it hears."""
        self.card = card
        self.channel = Channel.create(f"dbx-local-{os.getpid()}-{next(_names)}", SAMPLES)
        self.call = LocalCall(Wish("somebody"), WELCOME, [], 0)
        self.cleaner = cleaner or Untouched()
        self.attach()
        self.now_ns = 0
        self.receipts: Counter[tuple[int, int]] = Counter()
        self.said: list[control.ToBox] = []
        self.uplink: list[NDArray[np.float32]] = []
        """The newest frames that the box heard."""
        self.concealed = 0
        self.made = 0
        self.missed: set[int] = set()
        """Ticks that the box does not run."""
        self.asleep_until_ns = 0
        """The line's process does nothing before that."""
        self._made_ns = made_ns
        self._turn_ns = turn_ns
        self._says = says
        self._grid = TickGrid(T0_NS, PERIOD_MS * MS)
        self._tick = 0
        self._next_turn_ns = 0
        self._live = False
        self._ended = False
        self._ready: list[tuple[int, DownlinkHeader, NDArray[np.float32]]] = []

    def attach(self) -> None:
        """The call gets the ends of `card`."""
        exchange = self.card.exchange
        period_ns = PERIOD_MS * MS
        self.call.microphone = Microphone(exchange, self.cleaner, RATE_HZ, SAMPLES, period_ns)
        self.call.speaker = Speaker(exchange, RATE_HZ, SAMPLES, period_ns)

    @property
    def microphone(self) -> Microphone:
        assert self.call.microphone is not None
        return self.call.microphone

    @property
    def speaker(self) -> Speaker:
        assert self.call.speaker is not None
        return self.call.speaker

    def close(self) -> None:
        self.call.end(self.now_ns)
        self.channel.close()
        self.channel.unlink()

    def run(self, until_ns: int) -> None:
        if self.call.state is State.JOINING:
            self.said += self.call.advance(self.now_ns)
            self.call.admitted(
                control.Admitted(1, 9, 3, self.channel.name, 16, 64, 256), self.now_ns, T0_NS
            )
        while self.now_ns < until_ns:
            ready_ns = self._ready[0][0] if self._ready else until_ns
            tick_ns = self._grid.start_ns(self._tick)
            self.now_ns = min(self.card.next_ns, ready_ns, tick_ns, self._turn_at(), until_ns)
            if self.now_ns >= self.card.next_ns:
                self.card.call_back(self.now_ns)
            if self.now_ns >= tick_ns:
                self._step()
            while self._ready and self._ready[0][0] <= self.now_ns:
                _, header, pcm = self._ready.pop(0)
                assert self.channel.downlink.put(header, pcm)
            if self.now_ns >= self._turn_at():
                self.turn()

    def turn(self) -> None:
        """What `local_line` does on each turn."""
        call = self.call
        self._next_turn_ns = self.now_ns + self._turn_ns
        if call.microphone is not None:
            call.microphone.listen(self.now_ns, max(call.take_ns, self.now_ns + 1))
        self.said += call.advance(self.now_ns)
        self.settle()

    def settle(self) -> None:
        while (receipt := self.channel.receipts.get()) is not None:
            assert (receipt.session, receipt.generation) == (9, 3)
            self.receipts[receipt.frame_index, receipt.outcome] += 1

    def _turn_at(self) -> int:
        wake_ns = min(self._next_turn_ns, self.call.wake_ns(self._next_turn_ns))
        return max(wake_ns, self.asleep_until_ns, self.now_ns)

    def _step(self) -> None:
        tick, start_ns = self._tick, self.now_ns
        self._tick += 1
        if tick in self.missed:
            return
        pcm = np.zeros(SAMPLES, np.float32)
        header = self.channel.uplink.get(pcm)
        self._live |= header is not None
        if not self._live or self._ended:
            return
        self.concealed += header is None
        self._ended = header is not None and bool(header.flags & LAST)
        self.uplink = [*self.uplink[-63:], pcm]
        made_ns = start_ns + self._made_ns(tick)
        self._ready.append(
            (
                made_ns,
                DownlinkHeader(
                    session=9,
                    generation=3,
                    frame_index=self.made,
                    tick=tick,
                    deadline_ns=self._grid.deadline_ns(tick),
                    made_ns=made_ns,
                    flags=GENERATED | (FINAL if self._ended else 0),
                    heard=-1 if header is None else header.frame_index,
                ),
                pcm if self._says is None else self._says(tick),
            )
        )
        self.made += 1


class ThreadCard:
    """A sound card that is a thread: blocks of 10 ms on the machine's clock, no latency."""

    def __init__(self, heard: NDArray[np.float32]) -> None:
        """heard: what the microphone hears; the card falls silent at its end."""
        self.exchange = Exchange(CARD_HZ, BLOCK)
        self.active = True
        self.heard = heard[: heard.size // BLOCK * BLOCK]
        self.played = np.zeros_like(self.heard)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.active = False
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        clock = MonotonicClock()
        start_ns = clock.now_ns()
        for at in range(0, self.heard.size, BLOCK):
            clock.sleep_until(start_ns + (at + BLOCK) * NS_PER_S // CARD_HZ)
            if self._stopped.is_set():
                return
            now_ns = clock.now_ns()
            self.exchange.hear(self.heard[at : at + BLOCK], now_ns)
            # A real card plays what it gets now while it hears the next block.
            after = min(at + BLOCK, self.heard.size - BLOCK)
            self.exchange.play(self.played[after : after + BLOCK], now_ns)


class ThreadSound:
    """The sound library that has these cards, one after the other."""

    def __init__(self, *cards: ThreadCard) -> None:
        self._cards = list(cards)

    def devices(self) -> list[Device]:
        return [Device(0, "thread", "test", 1, 1, CARD_HZ, True, True)]

    def open(self, pair: Pair, latency_s: float) -> tuple[Exchange, ThreadCard]:
        if not self._cards:
            raise CardError("there is no card left")
        card = self._cards.pop(0)
        card.start()
        return card.exchange, card

    def look_again(self) -> None:
        pass
