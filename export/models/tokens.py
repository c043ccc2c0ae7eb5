"""The delay ring: which token of which stream goes where, and what comes out aligned.

Seventeen streams: text, the agent's codebooks, the user's codebooks. Acoustic codebooks run one
tick behind the semantic one, so `lm.tokens` (streams, max_delay + 2) int64 keeps the last few
positions of every stream; position p lies at p modulo its length. A tick at offset t

  1. writes the user's codes at t + delay of their stream,
  2. reads position t of every stream (the initial token where t <= delay),
  3. lets the model generate, and writes text and the agent's codes at t + 1,
  4. returns the frame whose slowest codebook is now known, t + 1 - max_delay + delay.

Until t + 1 > max_delay there is no such frame: `valid` is False, text is the padding id and the
codes are 0, so that no id out of range ever leaves. This is `LMGen._step` of moshi 0.2.13 with
every row executing. Ids: `text_card` and `card` begin a stream, -1 embeds as exactly zero, -2
has not been generated (the ring's fill).

Pure tensor code: no parameters, no state of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.bundle import RegionSpec
from engines.clocks import ClockKind, NativeClock, Order
from export.models.config import LmConfig

ZERO = -1  # lm.py: zero_token_id
UNGENERATED = -2  # lm.py: ungenerated_token_id

TOKENS = "lm.tokens"
OFFSET = "lm.offset"


@dataclass(frozen=True, slots=True)
class Aligned:
    """What one tick says: text (B,) int64, codes (B, agent's) int64, valid (B,) bool."""

    text: Tensor
    codes: Tensor
    valid: Tensor


def token_region(config: LmConfig) -> RegionSpec:
    """`lm.tokens`: a ring over positions, all streams of one position one column."""
    clock = NativeClock(
        kind=ClockKind.RING,
        axis=1,
        advance="1",
        retain=config.token_rows,
        order=Order.MODULO,
    )
    shape = (config.streams, config.token_rows)
    return RegionSpec(name=TOKENS, dtype="int64", shape=shape, clock=clock, fill=UNGENERATED)


def hear(config: LmConfig, tokens: Tensor, offset: Tensor, user_codes: Tensor) -> Tensor:
    """Step 1. tokens (B, streams, rows), offset (B,), user_codes (B, user's). Returns tokens."""
    own = 1 + config.depth_codebooks
    delays = torch.tensor(config.delays[own:]).view(1, -1, 1)
    at = (offset.view(-1, 1, 1) + delays) % config.token_rows
    user = torch.where(_rows(config) == at, user_codes.unsqueeze(-1), tokens[:, own:])
    return torch.cat([tokens[:, :own], user], dim=1)


def read(config: LmConfig, tokens: Tensor, offset: Tensor) -> Tensor:
    """Step 2: the model's input, (B, streams) int64."""
    at = (offset % config.token_rows).view(-1, 1, 1).expand(-1, config.streams, 1)
    now = tokens.gather(2, at).squeeze(-1)
    initial = torch.tensor([config.text_card] + [config.card] * config.audio_streams)
    begins = offset.view(-1, 1) <= torch.tensor(config.delays).view(1, -1)
    return torch.where(begins, initial.view(1, -1), now)


def speak(config: LmConfig, tokens: Tensor, after: Tensor, spoken: Tensor) -> Tensor:
    """Step 3. after: offset + 1, (B,); spoken: text and agent's codes, (B, 1 + agent's)."""
    own = 1 + config.depth_codebooks
    at = (after % config.token_rows).view(-1, 1, 1)
    ours = torch.where(_rows(config) == at, spoken.unsqueeze(-1), tokens[:, :own])
    return torch.cat([ours, tokens[:, own:]], dim=1)


def speak_free(config: LmConfig, tokens: Tensor, after: Tensor, chosen: Tensor) -> Tensor:
    """Step 3 after a prompt: of the position ``after`` only the first streams are still open.

    chosen: (B, free) int64, text first; the rest of that position was forced.
    """
    free = chosen.shape[1]
    at = (after % config.token_rows).view(-1, 1, 1)
    ours = torch.where(_rows(config) == at, chosen.unsqueeze(-1), tokens[:, :free])
    return torch.cat([ours, tokens[:, free:]], dim=1)


def align(config: LmConfig, tokens: Tensor, after: Tensor) -> Aligned:
    """Step 4. tokens as `speak` left them, after: offset + 1."""
    own = 1 + config.depth_codebooks
    shift = torch.tensor([delay - config.max_delay for delay in config.delays[:own]])
    at = (after.view(-1, 1, 1) + shift.view(1, -1, 1)) % config.token_rows
    frame = tokens[:, :own].gather(2, at).squeeze(-1)
    valid = after > config.max_delay
    nothing = torch.tensor([config.text_padding_id] + [0] * config.depth_codebooks)
    frame = torch.where(valid.view(-1, 1), frame, nothing.view(1, -1))
    return Aligned(text=frame.select(1, 0), codes=frame[:, 1:], valid=valid)


def _rows(config: LmConfig) -> Tensor:
    return torch.arange(config.token_rows).view(1, 1, -1)
