"""The language model: one tick of the temporal transformer, then of the depth transformer.

Parameter names are those of the published Moshi and PersonaPlex checkpoints in their fused
layout; a PersonaPlex checkpoint with 16 depth steps must be cut to the configured ones first.

    temporal   17 tokens -> sum of embeddings -> layers over KV rings -> hidden, text logits
    depth      hidden, text token -> one code per step, each step with weights of its own

The depth transformer starts anew each tick: its keys and values are scratch inside the graph,
not regions. Its fused projections are step-major, so a step's weights are one slice.

Not here: delays and special ids (`tokens`), choosing a token (`sampling`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from engines.bundle import Dtype
from export.models import operators as op
from export.models.config import LmConfig
from export.models.streaming import State, Streaming
from export.models.tokens import ZERO
from export.models.transformer import GatedLayer, GatedMlp, RmsNorm, Rope, View, Weight

Choose = Callable[[int, Tensor], Tensor]
"""(step, logits (B, card) float32) -> token (B,) int64; step 0 is text, then the codebooks."""


class Embedding(nn.Module):
    """A table whose id -1 means nothing at all."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, features))

    def forward(self, ids: Tensor, may_be_zero: bool = True) -> Tensor:
        """(B,) int64 -> (B, C)."""
        if not may_be_zero:
            return functional.embedding(ids, self.weight)
        found = functional.embedding(ids.clamp(min=0), self.weight)
        return torch.where((ids == ZERO).unsqueeze(-1), torch.zeros_like(found), found)


class Layers(Streaming):
    """The level ``layers`` of ``transformer.layers.3``."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class DepthAttention(nn.Module):
    """Self-attention over the steps of one tick; every step has projections of its own."""

    def __init__(self, features: int, heads: int, steps: int) -> None:
        super().__init__()
        self.features, self.heads = features, heads
        self.in_proj_weight = nn.Parameter(torch.empty(steps * 3 * features, features))
        self.out_proj = Weight(features, steps * features)

    def forward(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """x: (B, C). Appends this step's key and value (B, 1, C) and returns (B, C)."""
        c = self.features
        weight = self.in_proj_weight.narrow(0, step * 3 * c, 3 * c)
        query, key, value = op.split3(op.linear(x, weight))
        keys.append(key.unsqueeze(1))
        values.append(value.unsqueeze(1))
        if step == 0:
            seen = value  # all there is to see
        else:
            k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)
            seen = op.attend(query.unsqueeze(1), k, v, self.heads).squeeze(1)
        return op.linear(seen, self.out_proj.weight.narrow(0, step * c, c))


class DepthLayer(nn.Module):
    """One layer of the depth transformer: norms shared by the steps, the rest per step."""

    def __init__(self, features: int, heads: int, gate: int, steps: int) -> None:
        super().__init__()
        self.norm1 = RmsNorm(features)
        self.self_attn = DepthAttention(features, heads, steps)
        self.norm2 = RmsNorm(features)
        self.gating = nn.ModuleList(GatedMlp(features, gate) for _ in range(steps))

    def forward(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """(B, C) -> (B, C)."""
        x = x + self.self_attn(self.norm1(x), step, keys, values)
        y: Tensor = self.gating[step](self.norm2(x))
        return x + y


class LanguageModel(Streaming):
    """Moshi's RQ-transformer with its state outside."""

    def __init__(self, config: LmConfig, ring_dtype: Dtype = "float32") -> None:
        super().__init__()
        self.config = config
        c, d, steps = config.dimension, config.depth_dimension, config.depth_codebooks
        self.emb = nn.ModuleList(Embedding(config.card + 1, c) for _ in range(config.audio_streams))
        self.text_emb = Embedding(config.text_card + 1, c)
        self.transformer = Layers(
            [
                GatedLayer(
                    f"temporal.layers.{layer}",
                    c,
                    config.heads,
                    config.gate,
                    config.context,
                    ring_dtype,
                    config.pinned,
                )
                for layer in range(config.layers)
            ]
        )
        self.rope = Rope(c // config.heads)
        self.out_norm = RmsNorm(c)
        self.text_linear = Weight(c, config.text_card)
        self.depformer_in = nn.ModuleList(Weight(c, d) for _ in range(steps))
        self.depformer_emb = nn.ModuleList(Embedding(config.card + 1, d) for _ in range(steps - 1))
        self.depformer_text_emb = Embedding(config.text_card + 1, d)
        self.depformer = Layers(
            [
                DepthLayer(d, config.depth_heads, config.depth_gate, steps)
                for _ in range(config.depth_layers)
            ]
        )
        self.linears = nn.ModuleList(Weight(d, config.card) for _ in range(steps))

    def embed(self, ids: Tensor) -> Tensor:
        """(N, streams) int64 -> the temporal transformer's input, (N, C)."""
        total: Tensor = self.emb[0](ids.select(1, 1))
        for stream in range(1, self.config.audio_streams):
            total = total + self.emb[stream](ids.select(1, stream + 1))
        text: Tensor = self.text_emb(ids.select(1, 0))
        return total + text

    def temporal(self, ids: Tensor, position: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """One tick, or several positions of forced tokens at once.

        ids: (B, streams) or (B, R, streams) int64; position: (B,) int64 of the first row.
        Returns hidden (B*R, C), text_logits (B*R, text_card) float32, and the rings.
        """
        rows = 1 if ids.dim() == 2 else ids.shape[1]
        flat = ids.reshape(-1, self.config.streams) if ids.dim() == 3 else ids
        x = self.embed(flat)
        capacity = state["temporal.layers.0.k"].shape[2]
        view = View(position, rows, capacity, self.config.context, self.config.pinned)
        turn = self.rope(position, rows)
        new: State = {}
        for layer in self.transformer.layers:
            x, moved = layer(x, view, turn, state)
            new |= moved
        return *self.think(x), new

    def think(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layer gave, (N, C) -> hidden (N, C), text_logits (N, text_card) float32."""
        hidden = self.out_norm(x)
        return hidden, self.text_linear(hidden).float()

    def depth(
        self, hidden: Tensor, text_logits: Tensor, choose: Choose, steps: int | None = None
    ) -> Tensor:
        """Choose text, then one code per step; the first ``steps`` of them, or all.

        hidden: (B, C); text_logits: (B, text_card). Returns (B, 1 + steps) int64, text first.
        """
        chosen = [choose(0, text_logits)]
        layers = [layer for layer in self.depformer.layers if isinstance(layer, DepthLayer)]
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        for step in range(self.config.depth_codebooks if steps is None else steps):
            table = self.depformer_text_emb if step == 0 else self.depformer_emb[step - 1]
            x: Tensor = self.depformer_in[step](hidden) + table(chosen[-1], may_be_zero=False)
            for layer, k, v in zip(layers, keys, values, strict=True):
                x = layer(x, step, k, v)
            chosen.append(choose(step + 1, self.linears[step](x).float()))
        return torch.stack(chosen, dim=1)
