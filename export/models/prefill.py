"""Several forced positions of one session at once, through the temporal transformer alone.

A prompt leaves the model nothing to choose: text and all audio streams are given. So neither the
depth transformer nor sampling is needed until its last row, and many rows go through a layer as
one matrix product. What stays behind is what stepping the same rows one per tick would leave: keys
and values in the rings, each key turned by its own position.

Rows of one call lie one after the other in the ring and are written with one scatter, so a chunk
must not straddle the ring's end, nor overwrite a key that its own first rows still need: several
rows only below the ring's length, one at a time beyond. `engines.prefill.chunk_rows` cuts so. Under
that rule a row sees the ring rows up to its own position, and past the end all of them.

`open_mouth` is the last row's: text and those of the agent's codebooks that run without delay are
the model's own first choice; the others of that position were forced by the prompt.

Not here: which tokens a prompt is made of (`export.prompt`), delays (`tokens`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from export.models import operators as op
from export.models.coded import Coded
from export.models.config import LmConfig
from export.models.lm import Choose, LanguageModel
from export.models.streaming import State
from export.models.transformer import GatedLayer, row_of


def prefill(
    lm: LanguageModel,
    ids: Tensor,
    position: Tensor,
    embedded: Tensor,
    is_embedded: Tensor,
    state: State,
    coded: Sequence[Coded] = (),
) -> tuple[Tensor, Tensor, State]:
    """Feed R rows of one session; ``state`` holds its rings, (1, 1, T, C) each.

    ids: (R, streams) int64, delays and initial ids already in place; position: (R,) int64,
    consecutive; embedded: (R, C), fed instead of the ids where is_embedded (R,) bool is set
    (a packaged voice). coded: of rings of 8 bits, one per layer. Returns hidden (1, C) and
    text_logits (1, text_card) float32 of the last row, and the rings.
    """
    x = torch.where(is_embedded.unsqueeze(-1), embedded, lm.embed(ids))
    capacity = state["temporal.layers.0.k"].shape[2]
    index = row_of(position.narrow(0, 0, 1), capacity, lm.config.pinned)
    seen = torch.arange(capacity).view(1, -1) <= position.unsqueeze(-1)
    seen = seen.unsqueeze(0).unsqueeze(0)
    cosine, sine = (angle.transpose(0, 1) for angle in lm.rope(position, 1))
    new: State = {}
    for number, layer in enumerate(lm.transformer.layers):
        assert isinstance(layer, GatedLayer), layer
        attention, kept = layer.self_attn, coded[number] if coded else None
        query, key, value = op.split3(op.linear(layer.norm1(x), attention.in_proj_weight))
        query, key = (
            op.rotate(y.float().unsqueeze(0), cosine, sine, attention.heads) for y in (query, key)
        )
        key = key.to(x.dtype) if kept is None else kept.encode_k(key)
        k_name, v_name = f"{attention.region}.k", f"{attention.region}.v"
        new[k_name] = op.ring_write(state[k_name], key.unsqueeze(1), index)
        rows = value.unsqueeze(0).unsqueeze(0)
        if kept is not None:
            rows = kept.encode_v(rows.float())
        new[v_name] = op.ring_write(state[v_name], rows, index)
        k, v = new[k_name].squeeze(1), new[v_name].squeeze(1)
        if kept is not None:
            k, v = kept.decode_k(k).to(x.dtype), kept.decode_v(v).to(x.dtype)
        y = op.attend_seen(query.to(x.dtype), k, v, seen, attention.heads).squeeze(0)
        x = x + attention.out_proj(y)
        x = x + layer.gating(layer.norm2(x))
    hidden = lm.out_norm(x.select(0, -1).unsqueeze(0))
    return hidden, lm.text_linear(hidden).float(), new


def free_streams(config: LmConfig) -> int:
    """How many streams, text first, the model chooses itself at the first tick after a prompt."""
    own = config.delays[: 1 + config.depth_codebooks]
    free = sum(delay == 0 for delay in own)
    assert own[:free] == (0,) * free, f"delays {own}: streams without delay must come first"
    return free


def open_mouth(lm: LanguageModel, hidden: Tensor, text_logits: Tensor, choose: Choose) -> Tensor:
    """Choose text and the codebooks without delay, as `LanguageModel.depth` does.

    hidden: (1, C); text_logits: (1, text_card). Returns (1, free_streams) int64.
    """
    return lm.depth(hidden, text_logits, choose, free_streams(lm.config) - 1)
