"""Calls on the torch stages, with the executor's manners: join a slot, step a batch.

The torch twin of `OrtExecutor`, as slow and plain as a reference should be: a session is a
dictionary of tensors, and a tick stacks those that are live.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.bundle import Bundle
from engines.ort_executor import OrtExecutor
from export import tiny
from export.models.config import ModelConfig
from export.models.streaming import State, fresh_state
from export.stages import (
    NOISE,
    PCM,
    TEMPERATURE,
    TEXT_TEMPERATURE,
    StageGraph,
    all_regions,
    graphs_of,
)

SEED = 6
"""Of the micro model in these tests: with it the two best logits of a greedy choice, and the two
nearest centroids, are never closer than 1e-4, some hundred times what float32 leaves uncertain, so
equal tokens do not hang on the machine."""

GREEDY = {TEMPERATURE: 0.0, TEXT_TEMPERATURE: 0.0}


class TorchCalls:
    """Sessions of one model; slots 0..batch-1 are stepped."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.mimi, self.lm = tiny.seeded(config, seed)
        self.graphs: tuple[StageGraph, ...] = graphs_of(config, self.mimi, self.lm)
        self.regions = all_regions(self.graphs, config)
        self.sessions: dict[int, State] = {}

    def join(self, slot: int, settings: dict[str, float]) -> None:
        state = fresh_state(self.regions, 1)
        for name, value in settings.items():
            state[name].fill_(value)
        self.sessions[slot] = state

    @torch.no_grad()
    def step(self, pcm: Tensor, noise: Tensor | None = None) -> State:
        """pcm: (B, samples) of slots 0..B-1. Returns every tensor of the tick by name."""
        batch = pcm.shape[0]
        rows = [self.sessions[slot] for slot in range(batch)]
        named = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        named[PCM] = pcm.unsqueeze(1)
        shape = (batch, 1 + self.config.lm.depth_codebooks, self.config.sampling.candidates)
        named[NOISE] = torch.zeros(shape) if noise is None else noise
        for graph in self.graphs:
            named |= graph.run(named)
        for slot, row in enumerate(rows):
            for name in row:
                row[name] = named[name][slot : slot + 1]
        return named


def speech(seed: int, ticks: int, sessions: int, samples: int) -> Tensor:
    """(ticks, sessions, samples) float32: noise whose loudness and colour wander."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(ticks, sessions, samples, generator=generator)
    colour = torch.rand(ticks, sessions, 1, generator=generator)
    loudness = 0.3 * torch.rand(ticks, sessions, 1, generator=generator) ** 2
    return loudness * (colour * noise + (1 - colour) * noise.cumsum(-1) / 30)


def heard_among(bundle: Bundle, pcm: NDArray[np.float32], neighbours: bool) -> list[bytes]:
    """What one call hears of every tick, alone or while others join and leave around it.

    pcm: (ticks, 3, samples) float32; the call says ``pcm[:, 0]``.
    """
    executor = OrtExecutor(bundle, 3)
    slot = 1 if neighbours else 0
    batch, heard = slot + 1, []
    executor.join(0, {"sampling.seed": 5, "sampling.temperature": 2.0})
    executor.join(slot, {"sampling.seed": 4})
    for tick in range(len(pcm)):
        if neighbours and tick == 20:
            executor.join(2, GREEDY)
            batch = 3
        if neighbours and tick == 28:  # the newest leaves: nobody is moved
            batch = 2
        if neighbours and tick == 33:  # the first leaves, and ours takes its slot
            executor.move(1, 0)
            slot, batch = 0, 1
        if neighbours and tick == 41:  # somebody else takes the slot that ours was in
            executor.join(1, {"sampling.seed": 6})
            batch = 2
        executor.audio_in[:batch] = pcm[tick, :batch]
        executor.audio_in[slot] = pcm[tick, 0]
        executor.step(batch)
        heard.append(executor.audio_out[slot].tobytes() + executor.text[slot].tobytes())
    return heard
