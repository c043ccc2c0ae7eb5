"""The process that runs the models beside the voice: `python -m appliance.side_worker FD`.

It is started by the box (`side_models`) with one end of a socket pair. It is told once what to run
and then which sessions begin and end; it takes each caller's frames out of its tap, hands them to
one `side_loop` per model in the chunks and at the times `side_stream` says, and puts what comes of
them back. One thread does it all: steps take a fraction of a millisecond, and a process of its own
keeps them off the interpreter that ticks. An exception ends the process; the box starts another.

    box -> here   Setup (first)   Watch   Forget
    here -> box   Started
"""

import contextlib
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from appliance.clock import NS_PER_MS, MonotonicClock
from appliance.contracts import Contract, Terms
from appliance.frame_ring import ChannelError, Result
from appliance.realtime import ask_for_priority
from appliance.side_loop import Record, SideLoop
from appliance.side_stream import SideStream
from appliance.tap import Tap
from engines.stream_model import SPECS, StreamModel

POLL_NS = 2 * NS_PER_MS
"""How often a hard loop looks again for a chunk that has not come."""
LOOK_NS = 10 * NS_PER_MS
"""How often taps and the box are looked at: a chunk may be used a whole frame after it came."""
NEVER_NS = 2**62
LIMIT_BYTES = 65_536


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    pass


class SideModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model and its contract."""

    name: str
    model: str
    """One of `stream_model.SPECS`."""
    file: str
    contract: Contract
    bound_ns: int

    @property
    def terms(self) -> Terms:
        return Terms(self.contract, SPECS[self.model].period_ns, self.bound_ns)


class Setup(_Message, frozen=True):
    """What to run, and how the voice's frames are."""

    models: tuple[SideModel, ...]
    rate_hz: int
    samples: int
    period_ns: int
    realtime_priority: int
    """Below the tick thread's, where the machine allows it; 0: an ordinary process."""


class Watch(_Message, frozen=True):
    """A session begins; its tap is there."""

    session: int
    tap: str


class Forget(_Message, frozen=True):
    """A session is over: let go of its tap."""

    session: int


class Started(_Message, frozen=True):
    """All models are loaded and have run once."""


_to_worker = msgspec.msgpack.Decoder(Setup | Watch | Forget)
_from_worker = msgspec.msgpack.Decoder(Started)
encode = msgspec.msgpack.encode
decode_from_worker = _from_worker.decode


@dataclass(slots=True)
class _Ear:
    """One model that hears one session."""

    index: int
    model: StreamModel
    terms: Terms
    stream: SideStream
    loop: SideLoop | None = None
    """None before the first frame."""


class Worker:
    """All sessions and all models."""

    def __init__(self, setup: Setup, clock: MonotonicClock) -> None:
        self._setup = setup
        self._clock = clock
        self._models = []
        for one in setup.models:
            spec = SPECS[one.model]
            model = StreamModel(spec, Path(one.file))
            model.step(np.zeros(spec.samples, np.float32))  # the first run allocates
            self._models.append(model)
        self._sessions: dict[int, tuple[Tap, list[_Ear]]] = {}
        self._pcm = np.zeros(setup.samples, np.float32)

    @property
    def is_idle(self) -> bool:
        return not self._sessions

    def hear(self, message: Watch | Forget) -> None:
        """A session comes or goes."""
        if isinstance(message, Watch):
            try:
                tap = Tap.attach(message.tap)
            except ChannelError:
                return  # it has ended meanwhile
            ears = [
                _Ear(index, model.another(), one.terms, self._stream(model))
                for index, (one, model) in enumerate(
                    zip(self._setup.models, self._models, strict=True)
                )
            ]
            self._sessions[message.session] = tap, ears
        elif message.session in self._sessions:
            tap, _ = self._sessions.pop(message.session)
            tap.close()

    def turn(self) -> int:
        """Do what is due; returns when to turn next."""
        wake_ns = self._clock.now_ns() + LOOK_NS
        for tap, ears in self._sessions.values():
            while (header := tap.audio.get(self._pcm)) is not None:
                for ear in ears:
                    ear.stream.push(header.frame_index, self._pcm, header.captured_ns)
            for ear in ears:
                wake_ns = min(wake_ns, self._listen(tap, ear))
        return wake_ns

    def _listen(self, tap: Tap, ear: _Ear) -> int:
        stream = ear.stream
        if stream.grid is None:
            return NEVER_NS
        if ear.loop is None:

            def hand_on(record: Record) -> None:
                tap.results.put(
                    Result(
                        ear.index,
                        record.number,
                        record.outcome,
                        record.value,
                        record.margin_ns,
                        record.age_ns,
                    )
                )

            ear.loop = SideLoop(
                ear.model, ear.terms, self._clock, stream.grid, hand_on, first=stream.first
            )
        loop, now_ns = ear.loop, self._clock.now_ns()
        loop.waiting.extend(stream.due(now_ns))
        while loop.waiting:
            before = len(loop.waiting)
            loop.turn()
            if len(loop.waiting) == before:
                break
        loop.turn()
        wake_ns = min(stream.wake_ns(NEVER_NS), loop.wake_ns(NEVER_NS))
        return max(wake_ns, self._clock.now_ns() + POLL_NS)

    def _stream(self, model: StreamModel) -> SideStream:
        setup, spec = self._setup, model.spec
        return SideStream(setup.rate_hz, setup.samples, setup.period_ns, spec.rate_hz, spec.samples)


def run(box: socket.socket) -> None:
    """Until the box closes its end."""
    clock = MonotonicClock()
    setup = _to_worker.decode(box.recv(LIMIT_BYTES))
    assert isinstance(setup, Setup), setup
    worker = Worker(setup, clock)
    if any(one.contract is Contract.HARD for one in setup.models):
        ask_for_priority(setup.realtime_priority)
    box.send(encode(Started()))
    wake_ns = clock.now_ns()
    while True:
        left_s = None if worker.is_idle else max(0.0, (wake_ns - clock.now_ns()) / 1e9)
        if select.select([box], [], [], left_s)[0]:
            raw = box.recv(LIMIT_BYTES)
            if not raw:
                return
            message = _to_worker.decode(raw)
            assert not isinstance(message, Setup), message
            worker.hear(message)
        wake_ns = worker.turn()


def main() -> None:
    # Ctrl-C is the box's to hear: it drains, and then closes our socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        socket.socket(fileno=int(sys.argv[1])) as box,
        # It closed its end with something of ours unread, or before we had started.
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
    ):
        run(box)


if __name__ == "__main__":
    main()
