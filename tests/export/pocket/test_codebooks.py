"""Codebooks that learn end up where the serving quantiser expects them."""

import torch

from export.pocket import codebooks
from export.pocket.model import POCKET
from export.tiny import seeded


def test_training_chooses_what_serving_chooses() -> None:
    mimi, _ = seeded(POCKET, 5)
    latent = torch.randn(3, POCKET.mimi.dimension, 7, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        _, whole, codes, _ = codebooks.quantise(mimi.quantizer, latent, learn=False)
        flat = latent.transpose(1, 2).flatten(0, 1)
        served = mimi.quantizer.encode(flat)
        assert (codes.flatten(0, 1) == served).all()
        back = mimi.quantizer.decode(served).view(3, 7, -1).transpose(1, 2)
    torch.testing.assert_close(whole, back, atol=1e-4, rtol=1e-4)


def test_centroids_move_to_what_chooses_them_and_unused_ones_are_given_work() -> None:
    torch.manual_seed(0)
    mimi, _ = seeded(POCKET, 5)
    book = mimi.quantizer.rvq_first.codebooks()[0]
    book.cluster_usage.fill_(0.75 * codebooks.RARE)  # as training begins
    features = book.embedding_sum.shape[1]
    clusters = 3 * torch.randn(40, features)
    for _ in range(60):
        x = clusters[torch.randint(40, (2_000,))] + 0.05 * torch.randn(2_000, features)
        code = codebooks.nearest(book, x)
        codebooks.follow(book, x, code)
    error = (x - codebooks.centroids(book)[codebooks.nearest(book, x)]).pow(2).mean()
    assert float(error) < 0.01
    assert float(book.cluster_usage.min()) >= codebooks.RARE


def test_gradients_pass_through_the_choice() -> None:
    mimi, _ = seeded(POCKET, 5)
    latent = torch.randn(1, POCKET.mimi.dimension, 4, requires_grad=True)
    semantic, whole, _, loss = codebooks.quantise(mimi.quantizer, latent, learn=False)
    (semantic.sum() + whole.sum() + loss).backward()  # type: ignore[no-untyped-call]
    assert latent.grad is not None
    assert float(latent.grad.abs().min()) > 0
