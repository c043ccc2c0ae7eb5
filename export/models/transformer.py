"""Attention over rings, and the two kinds of transformer layer built on it.

Mimi's layers: LayerNorm, GELU, LayerScale, two rows per tick. The temporal ones: RMSNorm, gated
SiLU, one row per tick. Both keep keys and values in KV rings, time-major (1, T, H*D) per session,
one region each, written with one `ring_write` and read whole, so that an executor may update them
where they lie.

How much a query sees. One row per tick: the first ``min(position + 1, T)`` rows of the ring, in
whatever order, because attention does not care. Several rows per tick: writing the last of them
may have overwritten a key the first could still have seen, so each query is masked by the
position every row holds after the write. That is what moshi 0.2.13 computes; an offline pass sees
that key, so the two differ once a ring has wrapped.

With a pinned prefix the ring's first rows are written once and stay; the others turn. Keys keep
the rotary embedding of the position they were written at, so the distance from a query to the
prefix keeps growing with the call, beyond anything the model was trained on.

Positions come from outside: one counter per transformer, (B,) int64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from engines.bundle import Dtype, RegionSpec
from engines.clocks import ClockKind, NativeClock, Order
from export.models import operators as op
from export.models.coded import Coded
from export.models.config import ROPE_MAX_PERIOD
from export.models.streaming import State, Streaming

RMS_EPS = 1e-8  # transformer.py: create_norm_fn("rms_norm_f32")


class RmsNorm(nn.Module):
    """Root mean square norm in float32, `alpha` (1, 1, C) as in the checkpoints."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) -> (N, C)."""
        # float32 in and out of the norm: ONNX would round before it scales.
        return op.rms_norm(x.float(), self.alpha.float().view(-1), RMS_EPS).to(x.dtype)


class Weight(nn.Module):
    """A matrix called ``weight`` (O, I), multiplied as ``x @ weight.T``; no bias anywhere."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, O)."""
        return op.linear(x, self.weight)


class GatedMlp(nn.Module):
    """silu(a) * b with a, b the halves of `linear_in`, back through `linear_out`."""

    def __init__(self, features: int, gate: int) -> None:
        super().__init__()
        self.linear_in = Weight(features, 2 * gate)
        self.linear_out = Weight(gate, features)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) -> (N, C)."""
        opened, value = op.split2(self.linear_in(x))
        gated: Tensor = self.linear_out(functional.silu(opened) * value)
        return gated


class Rope:
    """Angles of the rotary embedding, in float32 whatever the model's dtype."""

    def __init__(self, head_features: int) -> None:
        self.head_features = head_features

    def __call__(self, position: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine (B, rows, D/2) of positions position .. position + rows - 1."""
        # Not a buffer: casting the model to bfloat16 would cast the frequencies.
        pairs = torch.arange(self.head_features // 2, dtype=torch.float32)
        frequencies = torch.exp(pairs * (-math.log(ROPE_MAX_PERIOD) * 2 / self.head_features))
        at = position.float().view(-1, 1, 1)
        if rows > 1:
            at = at + torch.arange(rows, dtype=torch.float32).view(1, -1, 1)
        angle = frequencies * at
        return torch.cos(angle), torch.sin(angle)


def row_of(position: Tensor, capacity: int, pinned: int) -> Tensor:
    """Row of a ring at which ``position`` (any shape, int64) lies; `NativeClock.row_of`."""
    if not pinned:
        return position % capacity
    turned = pinned + (position - pinned) % (capacity - pinned)
    return torch.where(position < capacity, position, turned)


class View:
    """What the queries of one tick may see, worked out once for all layers of a transformer."""

    def __init__(
        self, position: Tensor, rows: int, capacity: int, context: int, pinned: int = 0
    ) -> None:
        """position: (B,) int64 of the first new row; rows: new rows; capacity: ring rows.

        context < capacity narrows the view to the last ``context`` positions. pinned: rows at
        the start that stay for ever; a query then sees them and the last ``capacity - pinned``.
        """
        self.rows = rows
        self.index = row_of(position, capacity, pinned)
        self.valid: Tensor | None = None
        self.seen: Tensor | None = None
        if rows == 1 and context == capacity:
            self.valid = (position + 1).clamp(max=capacity)
            return
        assert not pinned, "several rows at once, or a longer ring, know nothing of pinned rows"
        last = (position + (rows - 1)).view(-1, 1)
        back = (last - torch.arange(capacity).view(1, -1)) % capacity
        held = (last - back).view(-1, 1, 1, capacity)
        asked = position.view(-1, 1, 1, 1) + torch.arange(rows).view(1, 1, -1, 1)
        self.seen = (held >= 0) & (held <= asked)
        if context < capacity:
            self.seen = self.seen & (asked - held < context)


@dataclass(frozen=True, slots=True)
class Ring:
    """Attention itself, without a weight: what is between its two matrices."""

    region: str
    """Before ``.k`` and ``.v``."""
    features: int
    heads: int

    def attend(
        self,
        qkv: Tensor,
        view: View,
        turn: tuple[Tensor, Tensor],
        state: State,
        coded: Coded | None = None,
    ) -> tuple[Tensor, State]:
        """qkv: (B*R, 3C), not yet rotated, R = view.rows. Returns (B*R, C) and the two rings.

        coded: of rings of 8 bits; then everything between the rounding and the result is float32.
        """
        rows, features = view.rows, self.features
        query, key, value = op.split3(qkv)
        query = self._turned(query, rows, turn)
        key = self._turned(key, rows, turn)
        if coded is None:
            query, key = query.to(qkv.dtype), key.to(qkv.dtype)
        else:
            key = coded.encode_k(key)
        k = op.ring_write(state[f"{self.region}.k"], key.unsqueeze(1), view.index)
        new_rows = value.view(-1, 1, rows, features)
        if coded is not None:
            new_rows = coded.encode_v(new_rows.float())
        v = op.ring_write(state[f"{self.region}.v"], new_rows, view.index)
        keys, values = k.squeeze(1), v.squeeze(1)
        if coded is not None:
            keys, values = coded.decode_k(keys), coded.decode_v(values)
        if view.valid is not None:
            y = op.attend_valid(query, keys, values, view.valid, self.heads)
        else:
            assert view.seen is not None
            y = op.attend_seen(query, keys, values, view.seen, self.heads)
        y = y.to(qkv.dtype).view(-1, features)
        return y, {f"{self.region}.k": k, f"{self.region}.v": v}

    def _turned(self, x: Tensor, rows: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        wide = x.view(-1, rows, self.features).float()
        return op.rotate(wide, turn[0], turn[1], self.heads)


class RingAttention(Streaming):
    """Self-attention whose keys and values survive the tick in two KV rings."""

    def __init__(
        self,
        region: str,
        features: int,
        heads: int,
        capacity: int,
        *,
        advance: int,
        dtype: Dtype,
        pinned: int = 0,
    ) -> None:
        """advance: rows per tick; capacity: rows of the ring; dtype: of the rings.

        pinned: rows at the ring's start that are never overwritten.
        """
        super().__init__()
        self.region = region
        self.features, self.heads, self.capacity = features, heads, capacity
        self.pinned = pinned
        self.advance, self.dtype = advance, dtype
        self.in_proj_weight = nn.Parameter(torch.empty(3 * features, features))
        self.out_proj = Weight(features, features)

    def regions(self) -> Iterator[RegionSpec]:
        clock = NativeClock(
            kind=ClockKind.RING,
            axis=1,
            advance=str(self.advance),
            retain=self.capacity,
            pinned=self.pinned,
            order=Order.MODULO,
        )
        for which in ("k", "v"):
            yield RegionSpec(
                name=f"{self.region}.{which}",
                dtype=self.dtype,
                shape=(1, self.capacity, self.features),
                clock=clock,
                in_place=True,
            )

    def forward(
        self, x: Tensor, view: View, turn: tuple[Tensor, Tensor], state: State
    ) -> tuple[Tensor, State]:
        """x: (B*R, C), R = view.rows. Returns (B*R, C) and the two rings."""
        y, new = self.ring.attend(self.project(x), view, turn, state)
        return self.out_proj(y), new

    @property
    def ring(self) -> Ring:
        return Ring(self.region, self.features, self.heads)

    def project(self, x: Tensor) -> Tensor:
        """(N, C) -> query, key and value side by side, (N, 3C)."""
        return op.linear(x, self.in_proj_weight)


class GatedLayer(Streaming):
    """One layer of the temporal transformer."""

    def __init__(
        self,
        region: str,
        features: int,
        heads: int,
        gate: int,
        capacity: int,
        dtype: Dtype,
        pinned: int = 0,
    ) -> None:
        super().__init__()
        self.norm1 = RmsNorm(features)
        self.self_attn = RingAttention(
            region, features, heads, capacity, advance=1, dtype=dtype, pinned=pinned
        )
        self.norm2 = RmsNorm(features)
        self.gating = GatedMlp(features, gate)

    def forward(
        self, x: Tensor, view: View, turn: tuple[Tensor, Tensor], state: State
    ) -> tuple[Tensor, State]:
        """(B*R, C) -> (B*R, C)."""
        update, new = self.self_attn(self.norm1(x), view, turn, state)
        return self._gated(x + update), new

    def before(self, x: Tensor) -> Tensor:
        """What attention takes: (N, C) -> (N, 3C)."""
        return self.self_attn.project(self.norm1(x))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from its input and what attention gave, (N, C) both."""
        return self._gated(x + self.self_attn.out_proj(attended))

    def _gated(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.gating(self.norm2(x))
        return y


class LayerScale(nn.Module):
    """A learnt factor per channel on a residual branch."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class CodecLayer(Streaming):
    """One layer of Mimi's transformers."""

    def __init__(
        self,
        region: str,
        features: int,
        heads: int,
        feedforward: int,
        capacity: int,
        *,
        advance: int,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, eps=1e-5)
        self.self_attn = RingAttention(
            region, features, heads, capacity, advance=advance, dtype="float32"
        )
        self.layer_scale_1 = LayerScale(features)
        self.norm2 = nn.LayerNorm(features, eps=1e-5)
        self.linear1 = Weight(features, feedforward)
        self.linear2 = Weight(feedforward, features)
        self.layer_scale_2 = LayerScale(features)

    def forward(
        self, x: Tensor, view: View, turn: tuple[Tensor, Tensor], state: State
    ) -> tuple[Tensor, State]:
        """(B*R, C) -> (B*R, C)."""
        update, new = self.self_attn(self.norm1(x), view, turn, state)
        return self._fed_forward(x + self.layer_scale_1(update)), new

    def before(self, x: Tensor) -> Tensor:
        """What attention takes: (N, C) -> (N, 3C)."""
        return self.self_attn.project(self.norm1(x))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from its input and what attention gave, (N, C) both."""
        return self._fed_forward(x + self.layer_scale_1(self.self_attn.out_proj(attended)))

    def _fed_forward(self, x: Tensor) -> Tensor:
        update = self.linear2(functional.gelu(self.linear1(self.norm2(x))))
        y: Tensor = x + self.layer_scale_2(update)
        return y
