"""Find the scales of 8-bit rings on speech, and measure what such rings cost in accuracy.

Recordings are encoded by the model's own codec; one is what the caller says and another what the
model is made to say, so that a few hundred frames are known in advance and go through the language
model a layer at a time: no layer is needed twice, and a model larger than memory passes with one
matrix of it loaded. Four models pass side by side that differ in their rings alone: float32,
bfloat16, e4m3, int8. The first tells the scales of a layer, the last two use them at once; in the
end logits and greedy choices are compared, everybody being given the same words whatever they
chose.

Rules. A key turns with its position and its pairs keep their length, so the lengths of pairs are
what counts of keys, and positions beyond the recordings bring nothing new; of values their sizes.

    int8    the largest code stands for the value that `INT8_SHARE` of a head's do not exceed;
            the few larger ones become it
    e4m3    the largest value is `E4M3_HEADROOM` below the largest code: a float loses nothing by
            room above

Everything is float32 but the rings, the weights are the bundle's. Not here: where recordings come
from and what a bundle keeps of this (`cache_report`), what a ring holds for a value
(`models.coded`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from engines.bundle import Dtype
from export.caches import LARGEST_CODE, Caches
from export.hollow import Wide
from export.models import operators as op
from export.models.coded import Coded
from export.models.config import LmConfig
from export.models.transformer import GatedLayer
from export.source import Source

INT8_SHARE = 0.9999
E4M3_HEADROOM = 2.0
KINDS: tuple[Dtype, ...] = ("float32", "bfloat16", "float8e4m3", "int8")
"""Of the rings of the models that pass side by side, the one compared with first."""
QUERIES = 128
"""Rows of attention at a time."""
FRAMES = 64
"""Rows of the depth transformer at a time, of every model."""
WORDS = 1 / 3
"""Share of frames in which the model is made to say a piece of text."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What everybody says, frame by frame."""

    text: Tensor
    """(N,) int64."""
    agent: Tensor
    """(N, agent's codebooks) int64."""
    caller: Tensor
    """(N, caller's codebooks) int64."""


@dataclass
class Distance:
    """How far one model's logits are from another's, summed up."""

    largest: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    reference_squares: float = 0.0
    values: int = 0
    same: int = 0
    choices: int = 0

    def add(self, logits: Tensor, reference: Tensor) -> None:
        """(N, card) both."""
        away = (logits - reference).double().abs()
        self.largest = max(self.largest, float(away.max()))
        self.total += float(away.sum())
        self.squares += float(away.square().sum())
        self.reference_squares += float(reference.double().square().sum())
        self.values += away.numel()
        self.same += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self.choices += len(logits)

    @property
    def mean(self) -> float:
        return self.total / self.values

    @property
    def relative(self) -> float:
        """Of the logits' own size, root of squares over root of squares."""
        return math.sqrt(self.squares / self.reference_squares)

    @property
    def agreement(self) -> float:
        return self.same / self.choices


@dataclass
class Comparison:
    """What one kind of ring does to what the model says."""

    text: Distance = field(default_factory=Distance)
    audio: Distance = field(default_factory=Distance)


@dataclass(frozen=True)
class Found:
    """What passing the model brought."""

    scales: dict[Dtype, Tensor]
    """By 8-bit dtype, (layers, 2, heads) float32."""
    clipped: dict[Dtype, float]
    """Share of new keys and values that were larger than the largest code."""
    compared: dict[tuple[Dtype, Dtype], Comparison]
    """(rings, rings compared with)."""
    frames: int


@dataclass
class Progress:
    """How far the model was passed; enough to go on from."""

    x: Tensor
    """(kinds * N, C) float32, into the next layer."""
    scales: dict[Dtype, list[Tensor]] = field(default_factory=dict)
    clipped: dict[Dtype, int] = field(default_factory=dict)
    layers: int = 0


def fed_ids(config: LmConfig, lines: Lines) -> Tensor:
    """(N + 1, streams): the model's input at positions 0..N, as ticks would have fed it."""
    frames = torch.cat([lines.text.unsqueeze(1), lines.agent, lines.caller], dim=1)
    count = len(frames)
    initial = torch.tensor([config.text_card] + [config.card] * config.audio_streams)
    ids = initial.repeat(count + 1, 1)
    for stream, delay in enumerate(config.delays):
        ids[delay + 1 :, stream] = frames[: count - delay, stream]
    return ids


def lines_of(config: LmConfig, recordings: list[Tensor], frames: int) -> Lines:
    """Recordings (T, codebooks) one after the other, again and again; the model says another one
    than its caller, and pieces of text drawn from a fixed seed.
    """
    turned = recordings[1:] + recordings[:1]
    caller, agent = (_repeated(row, frames) for row in (recordings, turned))
    generator = torch.Generator().manual_seed(0)
    speaks = torch.rand(frames, generator=generator) < WORDS
    words = torch.randint(0, config.text_card, (frames,), generator=generator)
    text = torch.where(speaks, words, torch.full_like(words, config.text_padding_id))
    return Lines(text, agent[:, : config.depth_codebooks], caller[:, : config.user_codebooks])


def _repeated(recordings: list[Tensor], frames: int) -> Tensor:
    joined = torch.cat(recordings)
    return joined.repeat(-(-frames // len(joined)), 1)[:frames]


def begin(source: Source, lines: Lines) -> Progress:
    """The input of the first layer."""
    ids = fed_ids(source.config.lm, lines)[:-1]
    with torch.no_grad(), Wide(source.hollow):
        return Progress(source.lm.embed(ids).float().repeat(len(KINDS), 1))


def pass_layers(source: Source, progress: Progress) -> Iterator[Progress]:
    """Take ``progress`` through one layer after the other, from where it stands."""
    layers = [layer for layer in source.lm.transformer.layers if isinstance(layer, GatedLayer)]
    with torch.no_grad(), Wide(source.hollow):
        for layer in layers[progress.layers :]:
            _pass(layer, source, progress)
            progress.layers += 1
            yield progress


def _pass(layer: GatedLayer, source: Source, progress: Progress) -> None:
    attention, context = layer.self_attn, source.config.lm.context
    count, heads = len(progress.x) // len(KINDS), attention.heads
    turn = source.lm.rope(torch.arange(count), 1)
    cosine, sine = (angle.transpose(0, 1) for angle in turn)
    attended = []
    for number, qkv in enumerate(layer.before(progress.x).chunk(len(KINDS))):
        query, key, value = (x.unsqueeze(0) for x in op.split3(qkv))
        query, key = (op.rotate(x, cosine, sine, heads) for x in (query, key))
        kind = KINDS[number]
        if number == 0:
            for coded in ("float8e4m3", "int8"):
                found = torch.stack([_scale(key, heads, coded, 2), _scale(value, heads, coded, 1)])
                progress.scales.setdefault(coded, []).append(found)
        if kind == "bfloat16":
            key, value = key.bfloat16().float(), value.bfloat16().float()
        elif kind != "float32":
            kept = Coded(kind, *progress.scales[kind][-1])
            clipped = _clipped(key, kept.k_scale, kind) + _clipped(value, kept.v_scale, kind)
            progress.clipped[kind] = progress.clipped.get(kind, 0) + clipped
            key, value = kept.decode_k(kept.encode_k(key)), kept.decode_v(kept.encode_v(value))
        attended.append(attend_back(query, key, value, heads, context))
    progress.x = layer.after(progress.x, torch.cat(attended))


def attend_back(query: Tensor, key: Tensor, value: Tensor, heads: int, context: int) -> Tensor:
    """Row n of (1, N, H*D) sees rows n - context + 1 to n. Returns (N, H*D)."""
    q, k, v = (x.reshape(x.shape[1], heads, -1).transpose(0, 1) for x in (query, key, value))
    found = []
    for first in range(0, q.shape[1], QUERIES):
        after = min(first + QUERIES, q.shape[1])
        oldest = max(0, first - context + 1)
        back = torch.arange(first, after).view(-1, 1) - torch.arange(oldest, after).view(1, -1)
        seen = (back >= 0) & (back < context)
        rows = functional.scaled_dot_product_attention(
            q[:, first:after], k[:, oldest:after], v[:, oldest:after], seen
        )
        found.append(rows.transpose(0, 1).flatten(1))
    return torch.cat(found)


def _scale(x: Tensor, heads: int, dtype: Dtype, group: int) -> Tensor:
    """(H,) of (1, N, H*D); ``group``: 2 for keys, whose pairs count by their length."""
    size = x.reshape(x.shape[1], heads, -1, group).square().sum(-1).sqrt()
    ranked = size.transpose(0, 1).flatten(1).sort(dim=1).values
    at = ranked.shape[1] - 1
    if dtype == "int8":
        reach = ranked[:, min(at, int(INT8_SHARE * ranked.shape[1]))]
    else:
        reach = ranked[:, at] * E4M3_HEADROOM
    scale = reach / LARGEST_CODE[dtype]
    # A head that is always silent: any scale will do.
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _clipped(x: Tensor, scale: Tensor, dtype: Dtype) -> int:
    parts = x.reshape(x.shape[1], len(scale), -1).abs() / scale.view(1, -1, 1)
    return int((parts > LARGEST_CODE[dtype] + 0.5).sum())


def finish(source: Source, lines: Lines, progress: Progress) -> Found:
    """What comes out behind the last layer: every model's logits, and how far they are apart."""
    lm, config = source.lm, source.config.lm
    count = len(lines.text)
    given = fed_ids(config, lines)[1:, : 1 + config.depth_codebooks]
    pairs = [(kind, KINDS[0]) for kind in KINDS[1:]] + [(kind, KINDS[1]) for kind in KINDS[2:]]
    compared = {pair: Comparison() for pair in pairs}
    by_kind = progress.x.view(len(KINDS), count, -1)
    with torch.no_grad(), Wide(source.hollow):
        for first in range(0, count, FRAMES):
            rows = by_kind[:, first : first + FRAMES]
            forced = given[first : first + FRAMES].repeat(len(KINDS), 1)
            hidden, text_logits = lm.think(rows.reshape(-1, rows.shape[-1]))

            def choose(step: int, logits: Tensor, forced: Tensor = forced) -> Tensor:
                per_kind = dict(zip(KINDS, logits.chunk(len(KINDS)), strict=True))
                for (kind, reference), found in compared.items():
                    meter = found.audio if step else found.text
                    meter.add(per_kind[kind], per_kind[reference])
                return forced[:, step]

            lm.depth(hidden, text_logits, choose)
    scales = {dtype: torch.stack(rows) for dtype, rows in progress.scales.items()}
    values = 2 * count * config.dimension * config.layers
    return Found(
        scales=scales,
        clipped={dtype: progress.clipped.get(dtype, 0) / values for dtype in scales},
        compared=compared,
        frames=count,
    )


def caches(found: Found, dtype: Dtype) -> Caches:
    """The rings of one kind."""
    return Caches(dtype, found.scales[dtype])
