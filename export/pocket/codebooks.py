"""Quantising while training: nearest centroids, followed by running means.

A codebook is kept as the checkpoint has it, `embedding_sum` and `cluster_usage`, both running
sums that forget one in a hundred per step. A centroid that hardly anything chooses is moved onto a
vector of the batch, which also is how the codebooks begin. Everything has a fixed shape and no
value is looked at by the host, so that a step can be captured and replayed.

Not here: quantising when serving (`export.models.quantizer`).
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.models.quantizer import USAGE_FLOOR, Codebook, ResidualQuantizer, SplitQuantizer

DECAY = 0.99
RARE = 0.2
"""Choices per step, in the running mean, below which a centroid is moved."""


def quantise(quantizer: SplitQuantizer, latent: Tensor, learn: bool) -> tuple[Tensor, ...]:
    """latent (B, C, n) float32 -> semantic part, whole, codes (B, n, Q), commitment ().

    Gradients pass straight through the choice.
    """
    flat = latent.transpose(1, 2).flatten(0, 1)
    first, first_codes, first_loss = _residual(quantizer.rvq_first, flat, learn)
    rest, rest_codes, rest_loss = _residual(quantizer.rvq_rest, flat, learn)
    codes = torch.stack([*first_codes, *rest_codes], dim=1)
    codes = codes.view(latent.shape[0], latent.shape[2], -1)
    shape = (latent.shape[0], latent.shape[2], -1)
    semantic = first.view(shape).transpose(1, 2)
    whole = (first + rest).view(shape).transpose(1, 2)
    return semantic, whole, codes, first_loss + rest_loss


def _residual(
    part: ResidualQuantizer, flat: Tensor, learn: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    x = functional.linear(flat, part.input_proj.weight.squeeze(-1))
    left, total, codes = x, torch.zeros_like(x), []
    loss = x.new_zeros(())
    for book in part.codebooks()[: part.used]:
        with torch.no_grad():
            code = nearest(book, left)
            chosen = functional.embedding(code, centroids(book))
            if learn:
                follow(book, left, code)
        loss = loss + functional.mse_loss(left, chosen)
        codes.append(code)
        total, left = total + chosen, left - chosen
    through = x + (total - x).detach()
    return functional.linear(through, part.output_proj.weight.squeeze(-1)), codes, loss


def centroids(book: Codebook) -> Tensor:
    return book.embedding_sum / book.cluster_usage.clamp(min=USAGE_FLOOR)[:, None]


def nearest(book: Codebook, x: Tensor) -> Tensor:
    """(N, D) -> (N,) int64."""
    table = centroids(book)
    return torch.addmm((table**2).sum(-1)[None], x, table.t(), alpha=-2).argmin(-1)


def follow(book: Codebook, x: Tensor, code: Tensor) -> None:
    """Move the running sums by what chose each centroid, and the rare ones onto the batch."""
    bins = book.cluster_usage.shape[0]
    counts = torch.zeros_like(book.cluster_usage).index_add_(0, code, torch.ones_like(x[:, 0]))
    sums = torch.zeros_like(book.embedding_sum).index_add_(0, code, x)
    usage = torch.lerp(counts, book.cluster_usage, DECAY)
    total = torch.lerp(sums, book.embedding_sum, DECAY)
    picked = x[(torch.rand(bins, device=x.device) * x.shape[0]).long()]
    rare = usage < RARE
    book.cluster_usage.copy_(torch.where(rare, torch.ones_like(usage), usage))
    book.embedding_sum.copy_(torch.where(rare[:, None], picked, total))
