"""The delay ring against a list that remembers everything."""

import pytest
import torch

from export.models import tokens
from export.tiny import MICRO

pytestmark = pytest.mark.torch

CONFIG = MICRO.lm
OWN = 1 + CONFIG.depth_codebooks


def test_every_stream_comes_in_and_out_as_late_as_its_delay_says() -> None:
    draw = torch.Generator().manual_seed(1)
    ring = torch.full((1, CONFIG.streams, CONFIG.token_rows), tokens.UNGENERATED)
    heard: list[list[int]] = []
    spoken: list[list[int]] = []
    for tick in range(20):
        offset = torch.tensor([tick])
        user = torch.randint(0, CONFIG.card, (1, CONFIG.user_codebooks), generator=draw)
        heard.append(user[0].tolist())
        ring = tokens.hear(CONFIG, ring, offset, user)
        ids = tokens.read(CONFIG, ring, offset)[0].tolist()
        for stream, delay in enumerate(CONFIG.delays):
            if tick <= delay:
                expected = CONFIG.text_card if stream == 0 else CONFIG.card
            elif stream < OWN:
                expected = spoken[tick - 1][stream]
            else:
                expected = heard[tick - delay][stream - OWN]
            assert ids[stream] == expected, (tick, stream)
        said = torch.randint(0, CONFIG.text_card, (1, OWN), generator=draw)
        spoken.append(said[0].tolist())
        ring = tokens.speak(CONFIG, ring, offset + 1, said)
        frame = tokens.align(CONFIG, ring, offset + 1)
        whole = [frame.text.item(), *frame.codes[0].tolist()]
        assert frame.valid.item() == (tick >= CONFIG.max_delay)
        if not frame.valid:
            assert whole == [CONFIG.text_padding_id] + [0] * CONFIG.depth_codebooks
            continue
        for stream in range(OWN):
            late = CONFIG.max_delay - CONFIG.delays[stream]
            assert whole[stream] == spoken[tick - late][stream], (tick, stream)
