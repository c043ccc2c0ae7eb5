"""Cut a model into the stages of one tick, and say what each takes and gives.

    noise         in   sampling.seed, lm.offset
                  out  noise                       (B, 1+steps, K)   float32   built in, not a graph
    mimi_encode   in   pcm                         (B, 1, samples)   float32
                  i/o  mimi.encoder..., mimi.encoder_transformer..., mimi.downsample...
                  out  user_codes                  (B, user's)       int64
    temporal      in   user_codes
                  i/o  lm.tokens, lm.offset        counts the tick: 0 when a call begins
                  i/o  temporal.layers.{l}.{k,v}   (B, 1, T, C)      ring, T = context
                  out  hidden                      (B, C)
                  out  text_logits                 (B, text_card)    float32
    depth         in   hidden, text_logits, noise, sampling.{temperature, text_temperature, ...}
                  in   lm.offset                   already counts this tick
                  i/o  lm.tokens
                  out  text                        (B,)              int64     aligned with pcm_out
                  out  codes                       (B, agent's)      int64
                  out  valid                       (B,)              bool      False: nothing yet
    mimi_decode   in   codes, valid
                  i/o  mimi.upsample..., mimi.decoder_transformer..., mimi.decoder...
                  out  pcm_out                     (B, 1, samples)   float32   0 where not valid

A `StageGraph` is a torch module over those tensors by name: run eagerly it is the reference the
graphs are checked against, traced it is what `to_onnx` writes. Not here: the nets (`models`), the
bundle's files (`build`).
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from engines.bundle import NEXT, Dtype, RegionSpec, StageSpec, TensorSpec
from engines.clocks import ClockKind, NativeClock
from export.caches import Caches
from export.models import tokens
from export.models.config import LmConfig, ModelConfig
from export.models.lm import Choose, LanguageModel
from export.models.mimi import Mimi
from export.models.sampling import Taste
from export.models.streaming import State, counter, regions_of

Attention = Literal["standard", "ring"]
"""Inside the graphs, with standard operators, or between them, as a stage of our own."""

PCM, PCM_OUT = "pcm", "pcm_out"
USER_CODES, CODES, TEXT, VALID = "user_codes", "codes", "text", "valid"
HIDDEN, TEXT_LOGITS, NOISE = "hidden", "text_logits", "noise"
SEED = "sampling.seed"
TEMPERATURE, TEXT_TEMPERATURE = "sampling.temperature", "sampling.text_temperature"
TOP_K, TEXT_TOP_K = "sampling.top_k", "sampling.text_top_k"


class StageGraph(nn.Module):
    """One stage as a torch module over named tensors.

    Subclasses say what they take (`inputs`) and give (`outputs`), in order, and compute
    `run`. Regions come in under their name and go out with ``.next`` behind it.
    """

    def __init__(self, name: str, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
        super().__init__()
        self.name = name
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    @property
    def file(self) -> str:
        """Of the graph, inside the bundle."""
        return f"stages/{self.name}.onnx"

    @property
    def spec(self) -> StageSpec:
        return StageSpec(self.name, self.inputs, self.outputs, graph=self.file)

    def written(self) -> "StageGraph":
        """What is written for it: itself, or what it shares with others."""
        return self

    @property
    def program(self) -> str:
        """Of one model, stages that compute the same from other weights have the same."""
        return self.name

    def own(self, weight: str, of: "StageGraph") -> str:
        """Name here of what is ``weight`` in ``of``, which has the same program."""
        assert of.name == self.name, (of.name, self.name)
        return weight

    def run(self, named: State) -> State:
        """Compute the outputs by name; a region's new value under the region's own name."""
        raise NotImplementedError

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`run` with tensors in the order of `inputs` and `outputs`, as a graph has them."""
        named = {spec.name: x for spec, x in zip(self.inputs, tensors, strict=True)}
        found = self.run(named)
        return tuple(found[spec.name.removesuffix(NEXT)] for spec in self.outputs)


class MimiEncode(StageGraph):
    """What the caller said, as codes."""

    def __init__(self, config: ModelConfig, mimi: Mimi) -> None:
        self.regions = [
            *mimi.encoder.regions(),
            *mimi.encoder_transformer.regions(),
            *regions_of(mimi.downsample),
        ]
        super().__init__(
            "mimi_encode",
            [
                tensor(PCM, "float32", 1, config.mimi.samples_per_frame),
                *read(self.regions),
            ],
            [tensor(USER_CODES, "int64", config.mimi.codebooks_used), *written(self.regions)],
        )
        self.mimi = mimi

    def run(self, named: State) -> State:
        codes, new = self.mimi.encode(named[PCM], named)
        return new | {USER_CODES: codes}


class Temporal(StageGraph):
    """Take the caller's codes in, and think one step."""

    def __init__(self, config: ModelConfig, lm: LanguageModel, hidden: Dtype) -> None:
        shared = [tokens.token_region(config.lm), counter(tokens.OFFSET, 1)]
        self.regions = [*shared, *lm.regions()]
        super().__init__(
            "temporal",
            [tensor(USER_CODES, "int64", config.lm.user_codebooks), *read(self.regions)],
            [
                tensor(HIDDEN, hidden, config.lm.dimension),
                tensor(TEXT_LOGITS, "float32", config.lm.text_card),
                *written(self.regions),
            ],
        )
        self.lm = lm

    def run(self, named: State) -> State:
        config, offset = self.lm.config, named[tokens.OFFSET]
        heard = tokens.hear(config, named[tokens.TOKENS], offset, named[USER_CODES])
        ids = tokens.read(config, heard, offset)
        hidden, text_logits, new = self.lm.temporal(ids, offset, named)
        return new | {
            HIDDEN: hidden,
            TEXT_LOGITS: text_logits,
            tokens.TOKENS: heard,
            tokens.OFFSET: offset + 1,
        }


class Depth(StageGraph):
    """Choose what to say, and line up the frame that is now complete."""

    def __init__(self, config: ModelConfig, lm: LanguageModel, hidden: Dtype) -> None:
        c = config.lm
        self.regions = choice_regions(config)
        super().__init__(
            "depth",
            [
                tensor(HIDDEN, hidden, c.dimension),
                tensor(TEXT_LOGITS, "float32", c.text_card),
                noise(config),
                *read(self.regions),
            ],
            [
                tensor(TEXT, "int64"),
                tensor(CODES, "int64", c.depth_codebooks),
                tensor(VALID, "bool"),
                *written(self.regions[:1]),
            ],
        )
        self.lm = lm

    def run(self, named: State) -> State:
        config, after = self.lm.config, named[tokens.OFFSET]
        spoken = self.lm.depth(named[HIDDEN], named[TEXT_LOGITS], chooser(config, named))
        ring = tokens.speak(config, named[tokens.TOKENS], after, spoken)
        frame = tokens.align(config, ring, after)
        return {
            TEXT: frame.text,
            CODES: frame.codes,
            VALID: frame.valid,
            tokens.TOKENS: ring,
        }


class MimiDecode(StageGraph):
    """What the model says, as sound."""

    def __init__(self, config: ModelConfig, mimi: Mimi) -> None:
        self.regions = [
            *regions_of(mimi.upsample),
            *mimi.decoder_transformer.regions(),
            *mimi.decoder.regions(),
        ]
        super().__init__(
            "mimi_decode",
            [
                tensor(CODES, "int64", config.mimi.codebooks_used),
                tensor(VALID, "bool"),
                *read(self.regions),
            ],
            [
                tensor(PCM_OUT, "float32", 1, config.mimi.samples_per_frame),
                *written(self.regions),
            ],
        )
        self.mimi = mimi

    def run(self, named: State) -> State:
        live = named[VALID]
        sound, new = self.mimi.decode(named[CODES], named, live)
        quiet = torch.zeros_like(sound)
        return new | {PCM_OUT: torch.where(live.view(-1, 1, 1), sound, quiet)}


def graphs_of(
    config: ModelConfig,
    mimi: Mimi,
    lm: LanguageModel,
    hidden: Dtype = "float32",
    attention: Attention = "standard",
    caches: Caches | None = None,
) -> tuple[StageGraph, ...]:
    """The stages of a tick that are the model's, in order: four, or many if cut at attention.

    caches: of the language model if its rings have 8 bits; only where it is cut.
    Raises `ring_stages.CannotCut`.
    """
    assert config.lm.user_codebooks == config.mimi.codebooks_used == config.lm.depth_codebooks
    if attention == "ring":
        from export.ring_stages import ring_graphs  # it is built on this file

        return ring_graphs(config, mimi, lm, hidden, caches)
    assert caches is None, "rings of 8 bits are for a stage of our own"
    return (
        MimiEncode(config, mimi),
        Temporal(config, lm, hidden),
        Depth(config, lm, hidden),
        MimiDecode(config, mimi),
    )


def noise_stage(config: ModelConfig) -> StageSpec:
    """The built-in stage before them: it sees `lm.offset` before this tick is counted."""
    return StageSpec(
        "noise",
        (tensor(SEED, "int64"), tensor(tokens.OFFSET, "int64")),
        (noise(config),),
        builtin="gumbel_noise",
    )


def sampling_regions(config: ModelConfig) -> list[RegionSpec]:
    """What a session may choose when its call begins."""
    sampling = config.sampling
    most = float(sampling.candidates)
    return [
        _setting(SEED, "int64", 0, 2.0**53),
        _setting(TEMPERATURE, "float32", sampling.temperature, 10.0),
        _setting(TEXT_TEMPERATURE, "float32", sampling.text_temperature, 10.0),
        _setting(TOP_K, "int64", sampling.top_k, most),
        _setting(TEXT_TOP_K, "int64", sampling.text_top_k, most),
    ]


def choice_regions(config: ModelConfig) -> list[RegionSpec]:
    """What choosing reads: the tokens so far, which come first, the tick, and the settings."""
    settings = (region for region in sampling_regions(config) if region.name != SEED)
    return [tokens.token_region(config.lm), counter(tokens.OFFSET, 1), *settings]


def chooser(config: LmConfig, named: State) -> Choose:
    """Step 0 chooses text, the others codes: by the session's settings, with this tick's noise."""
    most = named[NOISE].shape[-1]
    text = Taste(named[TEXT_TEMPERATURE], named[TEXT_TOP_K], min(most, config.text_card))
    audio = Taste(named[TEMPERATURE], named[TOP_K], min(most, config.card))

    def choose(step: int, logits: Tensor) -> Tensor:
        return (audio if step else text).choose(logits, named[NOISE].select(1, step))

    return choose


def all_regions(graphs: Iterable[StageGraph], config: ModelConfig) -> tuple[RegionSpec, ...]:
    """Every region once, in the order the stages meet them, settings last."""
    found: dict[str, RegionSpec] = {}
    settings = sampling_regions(config)
    for graph in graphs:
        regions = graph.regions
        assert isinstance(regions, list), graph.name
        found |= {r.name: r for r in regions if r.clock.kind is not ClockKind.CONSTANT}
    return (*found.values(), *settings)


def tensor(name: str, dtype: Dtype, *row: int) -> TensorSpec:
    return TensorSpec(name, dtype, ("B", *row))


def noise(config: ModelConfig) -> TensorSpec:
    """(B, 1 + steps, K): a row for text, then one per codebook."""
    rows = 1 + config.lm.depth_codebooks
    return tensor(NOISE, "float32", rows, config.sampling.candidates)


def read(regions: Iterable[RegionSpec]) -> list[TensorSpec]:
    return [tensor(r.name, r.dtype, *r.shape) for r in regions]


def written(regions: Iterable[RegionSpec]) -> list[TensorSpec]:
    return [tensor(r.name + NEXT, r.dtype, *r.shape) for r in regions]


def _setting(name: str, dtype: Dtype, default: float, most: float) -> RegionSpec:
    clock = NativeClock(kind=ClockKind.CONSTANT)
    return RegionSpec(
        name=name, dtype=dtype, shape=(), clock=clock, fill=default, bounds=(0.0, most)
    )
