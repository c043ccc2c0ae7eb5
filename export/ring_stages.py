"""A model cut at attention: what `--attention ring` makes of the stages with a transformer.

    temporal_00             in   user_codes, lm.offset          heard, and embedded
                            i/o  lm.tokens
                            out  temporal_00.x                  (B, P * C)   into the first layer
                            out  temporal_00.qkv                (B, P * 3C)  not rotated
    temporal_00_attention   built in: `engines.ring_stage`
                            out  temporal_00.attended           (B, P * C)
    temporal_01             in   temporal_00.{x,attended}       the rest of layer 0, then layer 1
                            ...
    temporal_32             in   temporal_31.{x,attended}
                            i/o  lm.offset                      counts the tick, after all layers
                            out  hidden, text_logits

Mimi's two stages likewise, with P = 2 rows a tick; their counters move in the last piece too, as
every attention reads them before. Query, key and value stay side by side as the matrix gives
them: the kernel takes strides, and splitting would be a copy per layer. Weights are those of the
whole stage, under the same names. A piece computes what the whole computes, operator by operator.

Not here: the whole stages (`stages`), the nets (`models`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from engines.bundle import Dtype, RegionSpec, RingSpec, StageSpec, TensorSpec, WeightSpec
from engines.ring_stage import INPUTS, OUTPUTS, SCALES
from export.caches import Caches, kept
from export.mistake import Mistake
from export.models import operators as op
from export.models import tokens
from export.models.coded import Coded
from export.models.config import ROPE_MAX_PERIOD, ModelConfig
from export.models.lm import LanguageModel
from export.models.mimi import CodecTransformer, Mimi
from export.models.streaming import State, counter, keep, regions_of
from export.models.transformer import CodecLayer, GatedLayer, Ring, Rope, View
from export.stages import (
    CODES,
    HIDDEN,
    PCM,
    PCM_OUT,
    TEXT_LOGITS,
    USER_CODES,
    VALID,
    Depth,
    StageGraph,
    read,
    tensor,
    written,
)

KERNEL_DTYPES = ("float32", "bfloat16")
LAYER = re.compile(r"\.layers\.(\d+)\.")
"""In the name of a weight, where its layer is counted."""


class CannotCut(Mistake):
    """A model whose attention the built-in stage does not compute; the operator's to choose."""


@dataclass(frozen=True, slots=True)
class Wires:
    """What goes around a layer's attention, and through it."""

    x: str
    qkv: str
    attended: str


@dataclass(frozen=True, slots=True)
class Scales:
    """Of 8-bit rings: where a stage finds its own in the bundle. A twin is handed them."""

    coded: Coded | None = None
    place: WeightSpec | None = None


class RingStage(StageGraph):
    """One layer's attention: the built-in stage, computed here as its twin."""

    def __init__(
        self,
        name: str,
        position: RegionSpec,
        rings: list[RegionSpec],
        heads: int,
        wires: Wires,
        dtype: Dtype,
        scales: Scales | None = None,
    ) -> None:
        """dtype: of what comes in and goes out; scales: of rings of 8 bits."""
        k, _ = rings
        self.regions = [position, *rings]
        self.rows, self.heads = int(k.clock.rows_per_tick), heads
        self.retain, self.features = k.shape[1], k.shape[2]
        self.wires, self.dtype, self.scales = wires, dtype, scales
        inputs = [tensor(wires.qkv, dtype, self.rows * 3 * self.features), *read(self.regions)]
        if scales is not None and scales.coded is None:
            inputs += [TensorSpec(scale, "float32", (1, heads)) for scale in SCALES]
        super().__init__(
            name,
            inputs,
            [tensor(wires.attended, dtype, self.rows * self.features), *written(rings)],
        )
        self.rope = Rope(self.features // heads)

    @property
    def spec(self) -> StageSpec:
        ring = RingSpec(
            twin=self.written().file,
            query_heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.features // self.heads,
            retain=self.retain,
            rows=self.rows,
            max_period=ROPE_MAX_PERIOD,
            scales=self.scales.place if self.scales else None,
        )
        return StageSpec(self.name, self.inputs, self.outputs, builtin="ring_attention", ring=ring)

    def written(self) -> "RingStage":
        """The same for any layer of this shape: its twin, by the names it has in the file."""
        qkv, position, *names = INPUTS
        counts, *rings = self.regions
        shape = f"{self.heads}x{self.features // self.heads}.{self.retain}+{self.rows}"
        kind = f"{self.dtype}.{rings[0].dtype}" if self.scales else self.dtype
        return RingStage(
            f"ring_attention.{kind}.{shape}",
            _renamed(counts, position),
            [_renamed(ring, name) for ring, name in zip(rings, names, strict=True)],
            self.heads,
            Wires("", qkv, OUTPUTS[0]),
            self.dtype,
            Scales() if self.scales else None,
        )

    def run(self, named: State) -> State:
        position, k, v = (named[region.name] for region in self.regions)
        view = View(position, self.rows, k.shape[2], self.retain)
        qkv = named[self.wires.qkv].reshape(-1, 3 * self.features)
        y, new = Ring("ring", self.features, self.heads).attend(
            qkv,
            view,
            self.rope(position, self.rows),
            {"ring.k": k, "ring.v": v},
            self._coded(named),
        )
        _, *rings = (region.name for region in self.regions)
        return {
            self.wires.attended: y.reshape(-1, self.rows * self.features),
            rings[0]: new["ring.k"],
            rings[1]: new["ring.v"],
        }

    @property
    def coded(self) -> Coded | None:
        """How its rings are kept, if in 8 bits; a twin is told when it runs."""
        return self.scales.coded if self.scales else None

    def near_edges(self, qkv: Tensor, position: Tensor, near: float) -> Tensor:
        """Which of qkv (B, P * 3C) float32 may be given another code by an error of ``near`` of
        the rotary pair they are in. Of a pair both or none; never a query.
        """
        assert self.coded is not None, self.name
        parts = qkv.view(-1, self.rows, 3, self.features)
        cosine, sine = self.rope(position, self.rows)
        key = op.rotate(parts[:, :, 1], cosine, sine, self.heads)
        found = torch.zeros_like(parts, dtype=torch.bool)
        for which, x, scale in (
            (1, key, self.coded.k_scale),
            (2, parts[:, :, 2], self.coded.v_scale),
        ):
            pairs = x.reshape(*x.shape[:2], self.heads, -1, 2) / scale.view(-1, 1, 1)
            reach = near * pairs.square().sum(-1, keepdim=True).sqrt()
            low, high = (
                op.to_int8(y) if self.coded.dtype == "int8" else op.to_e4m3(y)
                for y in (pairs - reach, pairs + reach)
            )
            odd = (low != high).any(-1, keepdim=True).expand_as(pairs)
            found[:, :, which] = odd.reshape(x.shape)
        return found.view(qkv.shape)

    def _coded(self, named: State) -> Coded | None:
        if self.scales is None or self.scales.coded is not None:
            return self.coded
        return Coded(self.regions[1].dtype, *(named[scale] for scale in SCALES))


class Piece(StageGraph):
    """What lies between two attentions, before the first of a stage, or after its last."""

    def __init__(
        self,
        stem: str,
        index: int,
        layers: Iterable[GatedLayer | CodecLayer],
        *,
        takes: tuple[list[TensorSpec], list[RegionSpec]],
        gives: tuple[list[TensorSpec], list[RegionSpec]],
        keeps: list[RegionSpec],
    ) -> None:
        """takes: of the first piece, beside regions it moves on; gives: of the last, likewise.

        keeps: regions the first piece reads and leaves as they are.
        """
        around = list(layers)
        attention = (around[index - 1] if index else around[0]).self_attn
        dtype, features, rows = attention.dtype, attention.features, attention.advance
        self.features, self.rows = features, rows
        self.stem, self.index, self.is_last = stem, index, index == len(around)
        self.fore, self.back = wires_of(stem, index), wires_of(stem, index - 1)
        inputs, outputs = [], []
        self.regions = []
        if index:
            inputs += [tensor(self.back.x, dtype, rows * features)]
            inputs += [tensor(self.back.attended, dtype, rows * features)]
        else:
            inputs += takes[0]
            self.regions += takes[1]
        if self.is_last:
            outputs += gives[0]
            self.regions += gives[1]
            inputs += [wire for wire in takes[0] if wire.name == VALID]
        else:
            outputs += [tensor(self.fore.x, dtype, rows * features)]
            outputs += [tensor(self.fore.qkv, dtype, rows * 3 * features)]
        moved = list(self.regions)
        if not index:
            self.regions += keeps
        super().__init__(
            f"{stem}_{index:02}", [*inputs, *read(self.regions)], [*outputs, *written(moved)]
        )

    @property
    def program(self) -> str:
        return self.name if self.index == 0 or self.is_last else f"{self.stem} between layers"

    def own(self, weight: str, of: StageGraph) -> str:
        assert isinstance(of, Piece), of.name
        ahead = self.index - of.index
        return LAYER.sub(lambda found: f".layers.{int(found[1]) + ahead}.", weight)

    def layers(self) -> list[GatedLayer | CodecLayer]:
        """Of the whole stage."""
        raise NotImplementedError

    def first(self, named: State) -> tuple[Tensor, State]:
        """Into the first layer (B*P, C), and what has moved on."""
        raise NotImplementedError

    def last(self, x: Tensor, named: State) -> State:
        """From what the last layer gives, (B*P, C), to the stage's outputs."""
        raise NotImplementedError

    def run(self, named: State) -> State:
        layers = self.layers()
        new: State = {}
        if self.index:
            x = named[self.back.x].reshape(-1, self.features)
            attended = named[self.back.attended].reshape(-1, self.features)
            x = layers[self.index - 1].after(x, attended)
        else:
            x, new = self.first(named)
        if self.is_last:
            return new | self.last(x, named)
        return new | {
            self.fore.x: x.reshape(-1, self.rows * self.features),
            self.fore.qkv: layers[self.index].before(x).reshape(-1, self.rows * 3 * self.features),
        }


class TemporalPiece(Piece):
    """Of `stages.Temporal`."""

    def __init__(self, config: ModelConfig, lm: LanguageModel, hidden: Dtype, index: int) -> None:
        c = config.lm
        offset = counter(tokens.OFFSET, 1)
        super().__init__(
            "temporal",
            index,
            gated_layers(lm),
            takes=(
                [tensor(USER_CODES, "int64", c.user_codebooks)],
                [tokens.token_region(c)],
            ),
            gives=(
                [tensor(HIDDEN, hidden, c.dimension), tensor(TEXT_LOGITS, "float32", c.text_card)],
                [offset],
            ),
            keeps=[offset],
        )
        self.lm = lm

    def layers(self) -> list[GatedLayer | CodecLayer]:
        return [*gated_layers(self.lm)]

    def first(self, named: State) -> tuple[Tensor, State]:
        config, offset = self.lm.config, named[tokens.OFFSET]
        heard = tokens.hear(config, named[tokens.TOKENS], offset, named[USER_CODES])
        return self.lm.embed(tokens.read(config, heard, offset)), {tokens.TOKENS: heard}

    def last(self, x: Tensor, named: State) -> State:
        hidden, text_logits = self.lm.think(x)
        return {
            HIDDEN: hidden,
            TEXT_LOGITS: text_logits,
            tokens.OFFSET: named[tokens.OFFSET] + 1,
        }


class EncodePiece(Piece):
    """Of `stages.MimiEncode`."""

    def __init__(self, config: ModelConfig, mimi: Mimi, index: int) -> None:
        c, transformer = config.mimi, mimi.encoder_transformer
        super().__init__(
            "mimi_encode",
            index,
            codec_layers(transformer),
            takes=(
                [tensor(PCM, "float32", 1, c.samples_per_frame)],
                list(mimi.encoder.regions()),
            ),
            gives=(
                [tensor(USER_CODES, "int64", c.codebooks_used)],
                [counter(transformer.region, transformer.advance), *regions_of(mimi.downsample)],
            ),
            keeps=[],
        )
        self.mimi = mimi

    def layers(self) -> list[GatedLayer | CodecLayer]:
        return [*codec_layers(self.mimi.encoder_transformer)]

    def first(self, named: State) -> tuple[Tensor, State]:
        x, new = self.mimi.encoder(named[PCM], named)
        return x.transpose(1, 2).reshape(-1, self.features), new

    def last(self, x: Tensor, named: State) -> State:
        position = named[self.mimi.encoder_transformer.region]
        y = x.reshape(-1, self.rows, self.features).transpose(1, 2)
        downsample = self.mimi.downsample.get_submodule("conv")
        latent, new = downsample(y, named, None, position == 0)
        codes = self.mimi.quantizer.encode(latent.squeeze(-1))
        moved: State = {self.mimi.encoder_transformer.region: position + self.rows}
        return {**moved, **new, USER_CODES: codes}


class DecodePiece(Piece):
    """Of `stages.MimiDecode`."""

    def __init__(self, config: ModelConfig, mimi: Mimi, index: int) -> None:
        c, transformer = config.mimi, mimi.decoder_transformer
        super().__init__(
            "mimi_decode",
            index,
            codec_layers(transformer),
            takes=(
                [tensor(CODES, "int64", c.codebooks_used), tensor(VALID, "bool")],
                list(regions_of(mimi.upsample)),
            ),
            gives=(
                [tensor(PCM_OUT, "float32", 1, c.samples_per_frame)],
                [counter(transformer.region, transformer.advance), *mimi.decoder.regions()],
            ),
            keeps=[],
        )
        self.mimi = mimi

    def layers(self) -> list[GatedLayer | CodecLayer]:
        return [*codec_layers(self.mimi.decoder_transformer)]

    def first(self, named: State) -> tuple[Tensor, State]:
        latent = self.mimi.quantizer.decode(named[CODES]).unsqueeze(-1)
        upsample = self.mimi.upsample.get_submodule("convtr")
        x, new = upsample(latent, named, named[VALID])
        return x.transpose(1, 2).reshape(-1, self.features), new

    def last(self, x: Tensor, named: State) -> State:
        live, counts = named[VALID], self.mimi.decoder_transformer.region
        y = x.reshape(-1, self.rows, self.features).transpose(1, 2)
        sound, new = self.mimi.decoder(y, named, live)
        position = keep(live, named[counts] + self.rows, named[counts])
        quiet = torch.zeros_like(sound)
        heard = torch.where(live.view(-1, 1, 1), sound, quiet)
        said: State = {counts: position, PCM_OUT: heard}
        return {**said, **new}


def ring_graphs(
    config: ModelConfig,
    mimi: Mimi,
    lm: LanguageModel,
    hidden: Dtype,
    caches: Caches | None = None,
) -> tuple[StageGraph, ...]:
    """The stages of a tick, cut. Raises CannotCut."""
    check_cut(config, hidden)
    encoder, decoder = mimi.encoder_transformer, mimi.decoder_transformer
    return (
        *_cut("mimi_encode", encoder, [EncodePiece(config, mimi, i) for i in _pieces(encoder)]),
        *_cut_temporal(config, lm, hidden, caches),
        Depth(config, lm, hidden),
        *_cut("mimi_decode", decoder, [DecodePiece(config, mimi, i) for i in _pieces(decoder)]),
    )


def check_cut(config: ModelConfig, hidden: Dtype) -> None:
    """Raises CannotCut."""
    if hidden not in KERNEL_DTYPES:
        raise CannotCut(
            f"attention of our own computes in {' or '.join(KERNEL_DTYPES)}, not in {hidden}. "
            f"Choose --dtype bfloat16, or --attention standard"
        )
    if config.lm.pinned:
        raise CannotCut(
            f"--pin-persona {config.lm.pinned}: attention of our own turns the whole ring. "
            f"Leave it out, or choose --attention standard"
        )


def _cut_temporal(
    config: ModelConfig, lm: LanguageModel, hidden: Dtype, caches: Caches | None
) -> list[StageGraph]:
    layers = gated_layers(lm)
    pieces = [TemporalPiece(config, lm, hidden, index) for index in range(len(layers) + 1)]
    return _joined("temporal", counter(tokens.OFFSET, 1), layers, pieces, caches)


def _cut(stem: str, transformer: CodecTransformer, pieces: Sequence[Piece]) -> list[StageGraph]:
    position = counter(transformer.region, transformer.advance)
    return _joined(stem, position, codec_layers(transformer), pieces)


def _joined(
    stem: str,
    position: RegionSpec,
    layers: Sequence[GatedLayer | CodecLayer],
    pieces: Sequence[Piece],
    caches: Caches | None = None,
) -> list[StageGraph]:
    """Pieces and attentions in turn."""
    found: list[StageGraph] = [pieces[0]]
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        rings = [kept(ring, caches) for ring in attention.regions()]
        name, wires = f"{stem}_{index:02}_attention", wires_of(stem, index)
        scales = Scales(caches.coded(index), caches.place(index)) if caches else None
        stage = RingStage(name, position, rings, attention.heads, wires, attention.dtype, scales)
        found += [stage, pieces[index + 1]]
    return found


def wires_of(stem: str, layer: int) -> Wires:
    return Wires(*(f"{stem}_{layer:02}.{what}" for what in ("x", "qkv", "attended")))


def gated_layers(lm: LanguageModel) -> list[GatedLayer]:
    return [layer for layer in lm.transformer.layers if isinstance(layer, GatedLayer)]


def codec_layers(transformer: CodecTransformer) -> list[CodecLayer]:
    layers = transformer.transformer.get_submodule("layers")
    return [layer for layer in layers.children() if isinstance(layer, CodecLayer)]


def _pieces(transformer: CodecTransformer) -> range:
    return range(len(codec_layers(transformer)) + 1)


def _renamed(region: RegionSpec, name: str) -> RegionSpec:
    return msgspec.structs.replace(region, name=name)
