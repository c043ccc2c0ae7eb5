"""Sound is where the script says, as loud as it says, and the telephone is narrow."""

import numpy as np
import torch

from export.pocket import script
from export.pocket.mix import LOWEST_HZ, Mixer, Places, coloured, telephone_line
from export.pocket.script import CALLER, DESK, FRAME, RATE_HZ
from tests.export.pocket import hums

CPU = torch.device("cpu")


def test_a_chunk_is_heard_from_its_sample_on_at_its_rate() -> None:
    stage = hums.stage()
    mixer = Mixer(stage, CPU)
    chunk = stage.bank.index.chunks[0]
    out = torch.zeros(2, 48_000)
    whole = [torch.tensor([v]) for v in (1, chunk.start, chunk.samples, 10_000)]
    real = [torch.tensor([v]) for v in (0.5, 1.25)]
    mixer.add(out, Places(*whole, *real))
    assert out[0].abs().max() == 0
    heard = np.flatnonzero(out[1].numpy())
    assert 10_000 <= heard[0] <= 10_002
    assert abs(heard[-1] - (10_000 + chunk.samples / 1.25)) < 4
    spectrum = np.abs(np.fft.rfft(out[1].numpy()))
    assert abs(spectrum.argmax() * RATE_HZ / 48_000 - 150 * 1.25) < 10
    assert abs(out[1].abs().max() - 0.5 * 3_000 / 32_768) < 0.002


def test_speech_stands_where_the_labels_say() -> None:
    stage = hums.stage()
    call = script.written(stage, "where", 300)
    sound = Mixer(stage, CPU).calls([call], torch.Generator().manual_seed(0))[0]
    power = sound[DESK].view(300, FRAME).pow(2).mean(1).sqrt().numpy()
    speaks = call.labels[DESK] > 0
    assert (power[speaks] > 0.01).mean() > 0.95
    assert sound.shape == (2, 300 * FRAME)
    assert sound[CALLER].abs().max() <= 1


def test_a_telephone_passes_speech_and_no_more() -> None:
    at = torch.arange(48_000) / RATE_HZ
    inside, above, below = (
        telephone_line(0.3 * torch.sin(2 * torch.pi * hz * at)[None])[0]
        for hz in (1_000, 6_000, 60)
    )
    assert abs(float(inside.std()) / (0.3 / 2**0.5) - 1) < 0.05
    assert float(above.std()) < 1e-3
    assert float(below.std()) < 5e-3


def test_windows_are_labelled_with_what_is_being_said() -> None:
    stage = hums.stage()
    sound, labels = Mixer(stage, CPU).windows(8, 20, torch.Generator().manual_seed(4))
    power = sound.view(8, 20, FRAME).pow(2).mean(2).sqrt()
    assert labels.max() < stage.labels.count
    assert power[labels > 0].median() > 5 * power[labels == 0].median()


def test_a_colour_is_waves_over_the_octaves() -> None:
    """One half wave: so many dB at its lowest, none in the middle, as many less at the top."""
    at = torch.arange(48_000) / RATE_HZ
    middle_hz = round((LOWEST_HZ * RATE_HZ / 2) ** 0.5)
    tones = torch.stack([torch.sin(2 * torch.pi * hz * at) for hz in (50, middle_hz, 11_990)])
    colour = torch.tensor([[6.0, 0.0, 0.0]] * 3)
    gain_db = 20 * (coloured(tones, colour).std(1) / tones.std(1)).log10()
    assert torch.allclose(gain_db, torch.tensor([6.0, 0.0, -6.0]), atol=0.1)
    assert torch.allclose(coloured(tones, torch.zeros(3, 3)), tones, atol=1e-5)
