"""Our stages against the published package, whole ticks, on the same seeded weights."""

import pytest
import torch
from torch import Tensor

from export.models.streaming import fresh_state
from export.tiny import MICRO
from tests.export.calls import GREEDY, SEED, TorchCalls, speech
from tests.export.peer import peer_lm, peer_mimi

pytestmark = pytest.mark.torch

TICKS = 304
JOINS = {0: 0, 1: 7, 2: 31}
"""Slot -> tick at which its session begins."""
RESET = (1, 160)
"""Slot whose caller hangs up and is followed by another at once, and when."""


class Peer:
    """The package's codec and language model, three rows that begin when they are told to."""

    def __init__(self, calls: TorchCalls) -> None:
        self.mimi, self.gen = peer_mimi(calls.mimi), peer_lm(calls.lm)
        self.mimi.streaming_forever(3)
        self.gen.streaming_forever(3)
        self.live = torch.zeros(3, dtype=torch.bool)

    def join(self, slot: int) -> None:
        row = torch.arange(3) == slot
        self.mimi.reset_streaming(row)
        self.gen.reset_streaming(row)
        self.live |= row

    @torch.no_grad()
    def step(self, pcm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(3, samples) -> user codes (3, 8), tokens (3, 9) or -2, sound (3, samples)."""
        self.mimi.set_exec_mask(self.live)
        self.gen.set_exec_mask(self.live)
        codes = self.mimi.encode(pcm[:, None])
        tokens = self.gen.step(codes)
        spoke = self.live & (tokens[:, 0, 0] >= 0)
        self.mimi.set_exec_mask(spoke)
        sound = self.mimi.decode(tokens[:, 1:].clamp(min=0))
        return codes[..., 0], tokens[..., 0], torch.where(spoke[:, None], sound[:, 0], 0)


def test_every_token_equals_the_package_for_300_frames_of_staggered_calls() -> None:
    calls = TorchCalls(MICRO, SEED)
    peer = Peer(calls)
    pcm = speech(3, TICKS, 3, MICRO.mimi.samples_per_frame)
    assert TICKS // MICRO.lm.context > 5
    assert 2 * TICKS // MICRO.mimi.context > 5
    said: list[Tensor] = []
    heard: list[Tensor] = []
    for tick in range(TICKS):
        for slot in range(3):
            if JOINS[slot] == tick or (slot, tick) == RESET:
                calls.join(slot, GREEDY)
                peer.join(slot)
        batch = int(peer.live.sum())
        codes, tokens, sound = peer.step(pcm[tick])
        ours = calls.step(pcm[tick, :batch])
        assert torch.equal(ours["user_codes"], codes[:batch]), tick
        valid = tokens[:batch, 0] >= 0
        assert torch.equal(ours["valid"], valid), tick
        mine = torch.cat([ours["text"][:, None], ours["codes"]], dim=1)
        assert torch.equal(mine[valid], tokens[:batch][valid]), tick
        assert (ours["pcm_out"][:, 0] - sound[:batch]).abs().max() < 1e-4, tick
        said.append(mine)
        heard.append(codes[:batch])
    _assert_lively(torch.cat(said), torch.cat(heard), ours["pcm_out"])


def test_the_codec_equals_the_package_frame_by_frame_past_the_wrap_of_its_rings() -> None:
    calls = TorchCalls(MICRO, seed=2)
    peer = peer_mimi(calls.mimi)
    mimi, pcm = calls.mimi, speech(4, 140, 2, MICRO.mimi.samples_per_frame)
    state = fresh_state(mimi.regions(), 2)
    furthest = 0.0
    loud = 0.0
    with torch.no_grad(), peer.streaming(2):
        for frame in pcm:
            expected = peer.encode(frame[:, None])
            expected_sound = peer.decode(expected)
            codes, moved = mimi.encode(frame[:, None], state)
            state |= moved
            sound, moved = mimi.decode(codes, state)
            state |= moved
            assert torch.equal(codes, expected[..., 0])
            furthest = max(furthest, float((sound - expected_sound).abs().max()))
            loud = max(loud, float(sound.std()))
    assert furthest < 1e-4
    assert loud > 0.01


def _assert_lively(said: Tensor, heard: Tensor, sound: Tensor) -> None:
    """A reference that never changes would prove nothing."""
    assert min(column.unique().numel() for column in said.T) > MICRO.lm.text_card // 2
    assert min(column.unique().numel() for column in heard.T) >= 4
    assert 0.01 < float(sound.std()) < 1
