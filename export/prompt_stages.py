"""The two stages of a prompt, beside the tick: feed its rows, then make the model's first choice.

    temporal_prefill  in   ids                       (R, streams)     int64     delays in place
                      in   position                  (R,)             int64     consecutive
                      in   embedded, is_embedded     (R, C), (R,)               a packaged voice
                      i/o  temporal.layers.{l}.{k,v} (1, 1, T, C)     ring of the one session
                      out  hidden, text_logits       (1, ...)         of the last row
    opening           in   hidden, text_logits, noise, sampling.{temperature, text_temperature, ...}
                      in   lm.offset                 (B,)             counts the whole prompt
                      i/o  lm.tokens                 text and codes without delay are chosen

Both leave the regions as ticks would that were forced to say and hear the prompt. Not here: the
arithmetic (`models.prefill`), what is fed (`prompt`), who feeds it (`engines.prefill`).
"""

import torch
from torch import Tensor

from engines.bundle import NEXT, ROWS, Dtype, TensorSpec
from export.caches import Caches, kept
from export.models import prefill, tokens
from export.models.config import ModelConfig
from export.models.lm import LanguageModel
from export.models.streaming import State
from export.stages import (
    HIDDEN,
    TEXT_LOGITS,
    StageGraph,
    choice_regions,
    chooser,
    noise,
    read,
    tensor,
    written,
)

IDS, POSITION, EMBEDDED, IS_EMBEDDED = "ids", "position", "embedded", "is_embedded"


class Prefill(StageGraph):
    """Rows of one session's prompt through the temporal transformer."""

    def __init__(
        self,
        config: ModelConfig,
        lm: LanguageModel,
        hidden: Dtype,
        caches: Caches | None = None,
    ) -> None:
        c = config.lm
        self.regions = [kept(ring, caches) for ring in lm.regions()]
        self.coded = caches.every_coded() if caches else []
        rings = [(r.name, r.dtype, (1, *r.shape)) for r in self.regions]
        super().__init__(
            "temporal_prefill",
            [
                TensorSpec(IDS, "int64", (ROWS, c.streams)),
                TensorSpec(POSITION, "int64", (ROWS,)),
                TensorSpec(EMBEDDED, hidden, (ROWS, c.dimension)),
                TensorSpec(IS_EMBEDDED, "bool", (ROWS,)),
                *(TensorSpec(*ring) for ring in rings),
            ],
            [
                TensorSpec(HIDDEN, hidden, (1, c.dimension)),
                TensorSpec(TEXT_LOGITS, "float32", (1, c.text_card)),
                *(TensorSpec(name + NEXT, dtype, shape) for name, dtype, shape in rings),
            ],
        )
        self.lm = lm

    def run(self, named: State) -> State:
        hidden, text_logits, new = prefill.prefill(
            self.lm,
            named[IDS],
            named[POSITION],
            named[EMBEDDED],
            named[IS_EMBEDDED],
            named,
            self.coded,
        )
        return new | {HIDDEN: hidden, TEXT_LOGITS: text_logits}


class Opening(StageGraph):
    """What the model says first: only what the prompt's last frame does not say already."""

    def __init__(self, config: ModelConfig, lm: LanguageModel, hidden: Dtype) -> None:
        c = config.lm
        self.regions = choice_regions(config)
        super().__init__(
            "opening",
            [
                tensor(HIDDEN, hidden, c.dimension),
                tensor(TEXT_LOGITS, "float32", c.text_card),
                noise(config),
                *read(self.regions),
            ],
            written(self.regions[:1]),
        )
        self.lm = lm

    def run(self, named: State) -> State:
        config, after = self.lm.config, named[tokens.OFFSET]
        choose = chooser(config, named)
        chosen = prefill.open_mouth(self.lm, named[HIDDEN], named[TEXT_LOGITS], choose)
        return {tokens.TOKENS: tokens.speak_free(config, named[tokens.TOKENS], after, chosen)}


def prompt_graphs(
    config: ModelConfig,
    lm: LanguageModel,
    hidden: Dtype = "float32",
    caches: Caches | None = None,
) -> tuple[Prefill, Opening]:
    """The two graphs of a prompt, in order; caches: as in `stages.graphs_of`."""
    return Prefill(config, lm, hidden, caches), Opening(config, lm, hidden)


def forced_tick(
    lm: LanguageModel, state: State, frame: Tensor, embedded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One tick of one session that is told what everybody says: the plain way through a prompt.

    The reference the stages are held to. frame: (streams,) int64; embedded: (C,), fed instead of
    the ids. Moves ``state`` on; returns hidden (1, C) and text_logits (1, text_card).
    """
    config, ring, offset = lm.config, state[tokens.TOKENS].clone(), state[tokens.OFFSET]
    for stream, delay in enumerate(config.delays):
        ring[0, stream, (int(offset) + delay) % config.token_rows] = frame[stream]
    ids = tokens.read(config, ring, offset)
    if embedded is None:
        hidden, logits, new = lm.temporal(ids, offset, state)
    else:
        hidden, logits, new = prefill.prefill(
            lm, ids, offset, embedded.unsqueeze(0), torch.ones(1, dtype=torch.bool), state
        )
    state |= new | {tokens.TOKENS: ring, tokens.OFFSET: offset + 1}
    return hidden, logits
