"""What a good codec is: the same spectrum, and nothing a small listener could tell apart.

`mel_distance` compares log mel spectra at five window lengths. `Listener` is three small
convolutional nets over complex spectra that learn to tell speech from its copy; the codec learns to
please them and to give them the same inner values.

Not here: the codec, and what the semantic codebook must tell (`codec_training`).
"""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

WINDOWS = ((128, 10), (256, 20), (512, 40), (1024, 64), (2048, 100))
"""(samples, mel bands)."""
LISTENER_WINDOWS = (256, 512, 1024)
RATE_HZ = 24_000
FLOOR = 1e-4
"""Added to mel magnitudes: about what 8 bits of telephone can tell from nothing."""


def mel_filters(window: int, bands: int) -> Tensor:
    """Triangles (window / 2 + 1, bands), equally spaced in mel from 0 to 12 kHz."""
    top = 2595 * torch.log10(torch.tensor(1 + RATE_HZ / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, float(top), bands + 2) / 2595) - 1)
    hz = torch.linspace(0, RATE_HZ / 2, window // 2 + 1)[:, None]
    width = RATE_HZ / window
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    up = (hz - low) / (middle - low).clamp(min=width)
    down = (high - hz) / (high - middle).clamp(min=width)
    shape = torch.minimum(up, down).clamp(min=0)
    return shape / shape.sum(0, keepdim=True).clamp(min=1)


class MelDistance(nn.Module):
    """Mean distance of log mel magnitudes over all windows; no parameters."""

    def __init__(self) -> None:
        super().__init__()
        for window, bands in WINDOWS:
            self.register_buffer(f"mel{window}", mel_filters(window, bands))
            self.register_buffer(f"hann{window}", torch.hann_window(window))

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        """(B, samples) both."""
        total = real.new_zeros(())
        both = torch.cat([real, made])
        for window, _ in WINDOWS:
            size = spectrum(both, window, self.get_buffer(f"hann{window}")).abs()
            mel = torch.log10(size.transpose(1, 2) @ self.get_buffer(f"mel{window}") + FLOOR)
            first, second = mel.chunk(2)
            total = total + functional.l1_loss(first, second)
        return total / len(WINDOWS)


def spectrum(sound: Tensor, window: int, hann: Tensor) -> Tensor:
    """(B, samples) -> (B, bins, steps) complex, scaled so that a window's sum is 1."""
    return torch.stft(
        sound, window, window // 4, window=hann / hann.sum(), center=True, return_complex=True
    )


class Listener(nn.Module):
    """Three nets, one per window: scores and inner values of (B, samples)."""

    def __init__(self, filters: int = 16) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_net(filters) for _ in LISTENER_WINDOWS)
        for window in LISTENER_WINDOWS:
            self.register_buffer(f"hann{window}", torch.hann_window(window), persistent=False)

    def forward(self, sound: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        scores, inner = [], []
        for window, net in zip(LISTENER_WINDOWS, self.nets, strict=True):
            found = spectrum(sound, window, self.get_buffer(f"hann{window}")) * window**0.5
            x = torch.view_as_real(found).permute(0, 3, 2, 1)
            assert isinstance(net, nn.ModuleList), net
            for layer in net[:-1]:
                x = functional.leaky_relu(layer(x), 0.2)
                inner.append(x)
            scores.append(net[-1](x))
        return scores, inner


def _net(filters: int) -> nn.ModuleList:
    """Over (2, steps, bins): bins are halved three times, steps never."""

    def conv(inputs: int, outputs: int, size: tuple[int, int], stride: int) -> nn.Module:
        padding = (size[0] // 2, size[1] // 2)
        made = nn.Conv2d(inputs, outputs, size, (1, stride), padding)
        normed: nn.Module = nn.utils.parametrizations.weight_norm(made)
        return normed

    return nn.ModuleList(
        [
            conv(2, filters, (3, 9), 2),
            conv(filters, filters, (3, 9), 2),
            conv(filters, 2 * filters, (3, 9), 2),
            conv(2 * filters, 2 * filters, (3, 3), 1),
            conv(2 * filters, 1, (3, 3), 1),
        ]
    )


def listener_loss(real: list[Tensor], made: list[Tensor]) -> Tensor:
    """How badly it told them apart (hinge)."""
    pairs = zip(real, made, strict=True)
    losses = [functional.relu(1 - r).mean() + functional.relu(1 + m).mean() for r, m in pairs]
    return torch.stack(losses).mean()


def pleasing_loss(made: list[Tensor]) -> Tensor:
    return torch.stack([-m.mean() for m in made]).mean()


def inner_loss(real: list[Tensor], made: list[Tensor]) -> Tensor:
    """How far the listener's inner values are apart, by the real ones' size."""
    pairs = zip(real, made, strict=True)
    losses = [functional.l1_loss(m, r) / (r.abs().mean() + 1e-3) for r, m in pairs]
    return torch.stack(losses).mean()
