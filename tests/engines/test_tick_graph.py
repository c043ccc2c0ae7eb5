"""Capturing ticks: order, warm-up, and blame, on a stream that only keeps a record."""

from collections.abc import Callable

import numpy as np
import pytest

from engines import tick_graph
from engines.cuda_executor import CudaExecutor
from engines.tensorrt_executor import TensorrtExecutor
from engines.tick_graph import WARM_UPS, CaptureFailed, Part, TickGraphs


class RecordingStream:
    """What a `TickGraphs` needs of a stream; graphs replay what was recorded."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.recorded: list[str] | None = None
        self.is_broken = False
        self.waits = 0

    def enqueue(self, what: str) -> None:
        (self.done if self.recorded is None else self.recorded).append(what)

    def synchronize(self) -> None:
        assert self.recorded is None, "waiting for a stream that is being captured"
        self.waits += 1

    def capture_is_broken(self) -> bool:
        return self.is_broken

    def capture(self, record: Callable[[], None]) -> "RecordedGraph":
        self.recorded = []
        try:
            record()
            return RecordedGraph(self.recorded)
        finally:
            self.recorded = None


class RecordedGraph:
    def __init__(self, work: list[str]) -> None:
        self.work = work
        self.nodes = len(work)
        self.is_closed = False

    def replay(self, stream: RecordingStream) -> None:
        assert not self.is_closed
        stream.done += self.work

    def upload(self, stream: RecordingStream) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class CountingEvent:
    """The n-th event made is n ms after the first."""

    made = 0

    def __init__(self) -> None:
        CountingEvent.made += 1
        self.at = CountingEvent.made

    def record_in_graph(self, stream: RecordingStream) -> None:
        stream.enqueue(f"stamp {self.at}")

    def elapsed_us(self, since: "CountingEvent") -> float:
        return 1e3 * (self.at - since.at)

    def close(self) -> None:
        pass


@pytest.fixture
def stream() -> RecordingStream:
    return RecordingStream()


def graphs_on(stream: RecordingStream) -> TickGraphs:
    return TickGraphs(stream)  # type: ignore[arg-type]


def parts(stream: RecordingStream, *names: str) -> list[Part]:
    return [Part(name, lambda name=name: stream.enqueue(name)) for name in names]  # type: ignore[misc]


def test_a_tick_is_warmed_up_then_captured_then_only_replayed(stream: RecordingStream) -> None:
    graphs = graphs_on(stream)
    graphs.capture(3, parts(stream, "encode", "think", "decode"))
    graphs.capture(1, parts(stream, "one"))
    warm = ["encode", "think", "decode"] * WARM_UPS + ["one"] * WARM_UPS
    assert stream.done == warm
    assert stream.waits == 2 * (WARM_UPS + 1), "every warm-up is over, and every graph is there"
    graphs.replay(3)
    graphs.replay(1)
    assert stream.waits == 2 * (WARM_UPS + 1), "a tick waits once, and that is not here"
    assert stream.done[len(warm) :] == ["encode", "think", "decode", "one"]
    assert (graphs.nodes(3), graphs.nodes(1)) == (3, 1)


def test_time_stamps_lie_between_all_parts(
    stream: RecordingStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_graph, "Event", CountingEvent)
    graphs = graphs_on(stream)
    both = parts(stream, "encode", "decode")
    graphs.capture(2, both)
    assert not graphs.has_timed(2)
    graphs.capture_timed(2, both)
    stream.done.clear()
    spent, before = np.zeros(2, np.int64), stream.waits
    graphs.replay_timed(2, spent)
    assert stream.waits == before + 1
    first = CountingEvent.made - 2
    stamps = [f"stamp {first + n}" for n in range(3)]
    assert stream.done == [stamps[0], "encode", stamps[1], "decode", stamps[2]]
    assert spent.tolist() == [1_000_000, 1_000_000]


def test_a_part_that_raises_while_captured_is_named_with_the_reason(
    stream: RecordingStream,
) -> None:
    def fail() -> None:
        if stream.recorded is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    tick = [*parts(stream, "encode"), Part("think", fail), *parts(stream, "decode")]
    with pytest.raises(CaptureFailed, match=r"stage think .* at batch 4: operation not permitted"):
        graphs_on(stream).capture(4, tick)
    stream.synchronize()  # the capture was left


def test_a_part_that_breaks_the_capture_in_silence_is_named(stream: RecordingStream) -> None:
    def spoil() -> None:
        stream.is_broken = stream.recorded is not None

    tick = [*parts(stream, "encode"), Part("think", spoil), *parts(stream, "decode")]
    with pytest.raises(CaptureFailed, match=r"stage think cannot be captured .* waits for"):
        graphs_on(stream).capture(1, tick)


@pytest.mark.parametrize("executor", [CudaExecutor, TensorrtExecutor])
def test_the_command_that_shows_it_eagerly_names_the_executor_it_failed_on(
    stream: RecordingStream, executor: type[CudaExecutor]
) -> None:
    def spoil() -> None:
        stream.is_broken = stream.recorded is not None

    graphs = TickGraphs(stream, executor.kind)  # type: ignore[arg-type]
    with pytest.raises(CaptureFailed, match=rf"--executor {executor.kind} --eager$"):
        graphs.capture(1, [Part("think", spoil)])


def test_closed_graphs_are_gone(stream: RecordingStream) -> None:
    graphs = graphs_on(stream)
    graphs.capture(1, parts(stream, "one"))
    graphs.close()
    with pytest.raises(KeyError):
        graphs.replay(1)
