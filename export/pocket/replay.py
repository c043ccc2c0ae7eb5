"""Run a training step over and over, on a GPU as one captured graph.

The nets are small and the machine is fast, so a step is over before Python has launched it. A step
that reads its inputs from tensors that stay where they are, and never asks for a value, is captured
once and replayed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[], Tensor]
"""Takes nothing, returns what to report."""
Say = Callable[[str], None]
WARM_UP = 3


class NotCaptured(RuntimeError):
    """A step asks for something a graph cannot hold."""


class Replay:
    """A step, captured at its first call on a GPU."""

    def __init__(self, step: Step, device: torch.device, say: Say, capture: bool = True) -> None:
        self.step, self.device, self.say = step, device, say
        self.capture = capture and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.report: Tensor | None = None

    def __call__(self) -> Tensor:
        if not self.capture:
            return self.step()
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        assert self.report is not None
        return self.report

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.report = self.step()
        except RuntimeError as err:
            # What a failed capture leaves behind is not fit for training: begin again without.
            raise NotCaptured(f"this step cannot be captured; use --step-by-step: {err}") from err
        self.graph = graph
        self.say("step captured")
