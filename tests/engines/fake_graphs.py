"""CUDA graphs on the fake driver: what is enqueued while capturing is kept, given when replayed.

As on a GPU, nothing runs while it is captured, and a replay is only under way when it returns. So a
part that is missing from a capture, or in the wrong place, is silence or a wrong sound later, and
what was captured can be read in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines import cuda, cuda_memory
from tests.engines import fake_driver, fake_tensorrt


@dataclass(frozen=True, slots=True)
class Work:
    """One thing on the stream."""

    kind: str
    """plan, graph, ring, noise, state, copy_in or copy_out."""
    tensors: dict[str, int]
    """Of a plan: name -> address. Of a ring: "qkv" and "attended"."""
    profile: int
    """Of a plan; -1 for the rest."""
    run: Callable[[], object]


@dataclass
class FakeGraph:
    """What was captured, in order."""

    work: list[Work] = field(default_factory=list)
    replays: int = 0

    @property
    def nodes(self) -> int:
        return len(self.work)

    def replay(self, stream: cuda.Stream) -> None:
        self.replays += 1
        for work in self.work:
            work.run()

    def upload(self, stream: cuda.Stream) -> None:
        pass

    def close(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Let streams of the fake driver capture until the test ends; returns every graph made."""
    graphs: list[FakeGraph] = []
    open_graphs: list[FakeGraph] = []

    def capture(stream: cuda.Stream, record: Callable[[], None]) -> FakeGraph:
        graphs.append(FakeGraph())
        open_graphs.append(graphs[-1])
        try:
            record()
        finally:
            open_graphs.clear()
        return graphs[-1]

    def keep(owner: type, name: str, kind: str, tensors: Callable[..., dict[str, int]]) -> None:
        really = getattr(owner, name)

        def enqueue(self: Any, *given: Any) -> object:
            if not open_graphs:
                return really(self, *given)
            profile = self._profile if kind == "plan" else -1
            work = Work(kind, tensors(self, *given), profile, lambda: really(self, *given))
            open_graphs[0].work.append(work)
            return True

        monkeypatch.setattr(owner, name, enqueue)

    none: Callable[..., dict[str, int]] = lambda *_: {}  # noqa: E731
    keep(fake_tensorrt.IExecutionContext, "execute_async_v3", "plan", _bound)
    keep(fake_driver.HostSession, "run_with_iobinding", "graph", none)
    keep(fake_driver.HostRings, "launch", "ring", _of_ring)
    keep(fake_driver.HostKernels, "noise", "noise", none)
    keep(fake_driver.HostKernels, "back", "state", none)
    keep(cuda_memory.HostArray, "to_device", "copy_in", none)
    keep(cuda_memory.HostArray, "from_device", "copy_out", none)
    monkeypatch.setattr(cuda.Stream, "capture", capture)
    monkeypatch.setattr(cuda.Stream, "capture_is_broken", lambda _: False)
    return graphs


def _bound(context: Any, stream: int) -> dict[str, int]:
    return dict(context._addresses)


def _of_ring(rings: Any, params: Any, stream: object) -> dict[str, int]:
    return {"qkv": int(params.q), "attended": int(params.out)}
