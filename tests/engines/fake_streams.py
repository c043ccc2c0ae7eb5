"""Streams of a driver that are as late as they may be.

What a stream is given is kept, and done in order when somebody waits for that stream or for the
device, not before. Waiting for one stream hurries no other, and what the default stream was given
hurries nobody: ours do not wait for it. So whoever reads, overwrites, unmaps or frees what a stream
still uses does that to memory on which nothing has happened yet, and it is heard.

What is not heard, because it came out right in this order, is looked for: work that says what it
touches must not touch what waits in another stream, unless both only read.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]
NONE = -1
"""No stream: the host is at work."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of memory."""

    address: int
    nbytes: int
    is_written: bool = False

    def meets(self, other: "Span") -> bool:
        """Whether the order of these two matters."""
        if not self.is_written and not other.is_written:
            return False
        first, last = max(self.address, other.address), min(self.end, other.end)
        return first < last

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Given:
    """Something a stream has to do."""

    number: int
    work: Work
    spans: tuple[Span, ...]
    """What it will touch; kernels and graphs say so when they run."""


class LateStreams:
    """Queues by the driver's handle; 0 is the default stream."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Given]] = {0: deque()}
        self._running = NONE
        self.given = 0
        """Things given to any stream so far."""
        self.doing = 0
        """How many had been given when what runs now was."""

    def create(self) -> int:
        handle = len(self._queues)
        self._queues[handle] = deque()
        return handle

    def give(self, stream: int, work: Work, *spans: Span) -> None:
        self.given += 1
        self._queues[stream].append(Given(self.given, work, spans))

    def wait(self, stream: int) -> None:
        queue = self._queues[stream]
        while queue:
            given = queue.popleft()
            self._running, self.doing = stream, given.number
            given.work()
        self._running = NONE

    def touch(self, span: Span) -> None:
        """What runs now, or the host, touches this: nothing that waits elsewhere may."""
        for stream, queue in self._queues.items():
            if stream != self._running:
                raced = [one for given in queue for one in given.spans if one.meets(span)]
                assert not raced, f"{span} on stream {self._running} races {raced} on {stream}"

    def wait_for_all(self) -> None:
        for stream in self._queues:
            self.wait(stream)

    def is_done(self, stream: int) -> bool:
        return not self._queues[stream]

    @property
    def is_idle(self) -> bool:
        return not any(self._queues.values())
