"""One CUDA graph per exact batch: a whole tick, replayed with one launch.

A tick is a list of `Part`s that enqueue device work: copies in, the stages in order, state moved
on, copies out. For each batch the parts are run eagerly first (libraries choose algorithms and
allocate then, which cannot be captured), then captured, and from there on only replayed. A part
that cannot be captured is named with the reason, at start-up.

For measuring, a second graph of the same parts can be captured with a time stamp between any two.
Not here: what the parts do, and where their buffers lie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.cuda import Event, Graph, Stream

WARM_UPS = 2
"""Eager runs before capture: the second finds every algorithm chosen and all memory there."""


class CaptureFailed(RuntimeError):
    """A stage cannot become part of a graph; the bundle's or the library's fault."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a tick that is timed and blamed by ``name``."""

    name: str
    enqueue: Callable[[], None]
    """Enqueue device work for one batch on the graphs' stream; no waiting."""


class TickGraphs:
    """Captured ticks by batch. One thread uses them."""

    def __init__(self, stream: Stream, executor: str = "cuda") -> None:
        """executor: what the command line calls whose parts these are, for error messages."""
        self._stream, self._executor = stream, executor
        self._graphs: dict[int, Graph] = {}
        self._timed: dict[int, tuple[Graph, list[Event]]] = {}

    def capture(self, batch: int, parts: Sequence[Part]) -> None:
        """Warm up and capture ``parts`` as the tick of ``batch`` sessions.

        Raises `CaptureFailed` naming the part.
        """
        for _ in range(WARM_UPS):
            run_eagerly(parts)
            self._stream.synchronize()
        self._graphs[batch] = self._captured(batch, parts, [])

    def capture_timed(self, batch: int, parts: Sequence[Part]) -> None:
        """The same with time stamps, for `replay_timed`. `capture` must have come first."""
        events = [Event() for _ in range(len(parts) + 1)]
        self._timed[batch] = (self._captured(batch, parts, events), events)

    def replay(self, batch: int) -> None:
        """Launch the tick of ``batch`` sessions; returns before it has run."""
        self._graphs[batch].replay(self._stream)

    def replay_timed(self, batch: int, spent_ns: NDArray[np.int64]) -> None:
        """Run the time-stamped tick to its end; device time per part into ``spent_ns``."""
        graph, events = self._timed[batch]
        graph.replay(self._stream)
        self._stream.synchronize()
        for index in range(len(events) - 1):
            spent_ns[index] = events[index + 1].elapsed_us(events[index]) * 1e3

    def has_timed(self, batch: int) -> bool:
        return batch in self._timed

    def nodes(self, batch: int) -> int:
        """Kernels, copies and fills in the tick of ``batch`` sessions."""
        return self._graphs[batch].nodes

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        for graph, events in self._timed.values():
            graph.close()
            for event in events:
                event.close()
        self._graphs, self._timed = {}, {}

    def _captured(self, batch: int, parts: Sequence[Part], events: Sequence[Event]) -> Graph:
        stream = self._stream
        at = "the first part"

        def record() -> None:
            nonlocal at
            if events:
                events[0].record_in_graph(stream)
            for index, part in enumerate(parts):
                at = part.name
                part.enqueue()
                if stream.capture_is_broken():
                    raise CaptureFailed("it waits for the device, or allocates")
                if events:
                    events[index + 1].record_in_graph(stream)

        try:
            graph = stream.capture(record)
            graph.upload(stream)
            stream.synchronize()
        except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
            raise CaptureFailed(
                f"stage {at} cannot be captured into a CUDA graph at batch {batch}: "
                f"{_first_line(err)}. Run without graphs to see it work eagerly: "
                f"duplexbox engines bench BUNDLE --executor {self._executor} --eager"
            ) from err
        return graph


def run_eagerly(parts: Sequence[Part]) -> None:
    """Enqueue every part, without a graph."""
    for part in parts:
        part.enqueue()


def _first_line(err: BaseException) -> str:
    text = str(err).strip()
    return text.splitlines()[0] if text else type(err).__name__
