"""Mimi's split residual quantiser: one semantic codebook, the others acoustic.

Both halves quantise the same latent (the acoustic half is not given what the semantic one left
over) and decoding adds them, as in quantization/vq.py of moshi 0.2.13. A codebook is kept as
training left it, `embedding_sum` and `cluster_usage`; what the graphs need, the centroids and
their squared lengths, is worked out once after loading by `prepare`.

Nearest centroid: argmin of |c|^2 - 2 x.c, one Gemm per codebook; |x|^2 does not matter.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.models import operators as op
from export.models.config import MimiConfig

USAGE_FLOOR = 1e-5  # core_vq.py: epsilon


class Codebook(nn.Module):
    """Centroids (bins, D) of one level."""

    embedding_sum: Tensor
    cluster_usage: Tensor
    embedding: Tensor
    squared: Tensor

    def __init__(self, bins: int, features: int) -> None:
        super().__init__()
        self.register_buffer("_initialized", torch.ones(1))
        self.register_buffer("cluster_usage", torch.ones(bins))
        self.register_buffer("embedding_sum", torch.zeros(bins, features))
        self.register_buffer("embedding", torch.zeros(bins, features), persistent=False)
        self.register_buffer("squared", torch.zeros(bins), persistent=False)

    def prepare(self) -> None:
        """Work out the centroids from what training left; call after loading."""
        usage = self.cluster_usage.clamp(min=USAGE_FLOOR)
        self.embedding = self.embedding_sum / usage[:, None]
        self.squared = (self.embedding**2).sum(-1)

    def encode(self, x: Tensor) -> Tensor:
        """(B, D) -> index of the nearest centroid, (B,) int64."""
        return op.linear_bias(x, self.embedding, self.squared, -2.0).argmin(-1)

    def decode(self, codes: Tensor) -> Tensor:
        """(B,) int64 -> (B, D)."""
        return functional.embedding(codes, self.embedding)


class VqLayer(nn.Module):
    """The level ``_codebook`` of the checkpoint's names."""

    def __init__(self, bins: int, features: int) -> None:
        super().__init__()
        self._codebook = Codebook(bins, features)

    @property
    def codebook(self) -> Codebook:
        return self._codebook


class ResidualQuantizer(nn.Module):
    """Project, then quantise what the levels before left over; `used` of `levels` levels."""

    def __init__(self, channels: int, features: int, bins: int, levels: int, used: int) -> None:
        super().__init__()
        self.used = used
        self.input_proj = nn.Conv1d(channels, features, 1, bias=False)
        self.output_proj = nn.Conv1d(features, channels, 1, bias=False)
        self.vq = nn.Module()
        self.vq.layers = nn.ModuleList(VqLayer(bins, features) for _ in range(levels))

    def codebooks(self) -> list[Codebook]:
        layers = self.vq.layers
        assert isinstance(layers, nn.ModuleList), layers
        return [layer.codebook for layer in layers if isinstance(layer, VqLayer)]

    def encode(self, latent: Tensor) -> list[Tensor]:
        """(B, C) -> one (B,) int64 per level used."""
        left = op.linear(latent, self.input_proj.weight.squeeze(-1))
        codes = []
        for codebook in self.codebooks()[: self.used]:
            codes.append(codebook.encode(left))
            left = left - codebook.decode(codes[-1])
        return codes

    def decode(self, codes: list[Tensor]) -> Tensor:
        """One (B,) int64 per level used -> (B, C)."""
        books = self.codebooks()
        total = books[0].decode(codes[0])
        for codebook, code in zip(books[1:], codes[1:], strict=False):
            total = total + codebook.decode(code)
        return op.linear(total, self.output_proj.weight.squeeze(-1))


class SplitQuantizer(nn.Module):
    """codes (B, codebooks_used) int64: the semantic one first."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        channels, features, bins = config.dimension, config.codebook_dimension, config.bins
        rest, used = config.codebooks - 1, config.codebooks_used - 1
        self.rvq_first = ResidualQuantizer(channels, features, bins, 1, 1)
        self.rvq_rest = ResidualQuantizer(channels, features, bins, rest, used)

    def prepare(self) -> None:
        """Work out every codebook's centroids; call after loading."""
        for codebook in self.rvq_first.codebooks() + self.rvq_rest.codebooks():
            codebook.prepare()

    def encode(self, latent: Tensor) -> Tensor:
        """(B, C) -> (B, codebooks_used) int64."""
        return torch.stack(self.rvq_first.encode(latent) + self.rvq_rest.encode(latent), dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """(B, codebooks_used) int64 in 0..bins-1 -> (B, C)."""
        levels = [codes.select(1, level) for level in range(codes.shape[1])]
        return self.rvq_first.decode(levels[:1]) + self.rvq_rest.decode(levels[1:])
