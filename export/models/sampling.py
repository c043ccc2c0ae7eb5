"""Choose a token from logits, with the session's own temperature and top-k, and noise given.

Adding Gumbel noise to log-probabilities and taking the largest is sampling from them, so the
graph needs no random numbers of its own: noise for the top candidates comes in, drawn per session
and per tick by whoever runs the graph, and a call can be replayed to the same tokens.

Temperature 0 is greedy: the first candidate, whatever the noise. A top-k of 0, or above the
bundle's `candidates`, means all `candidates` (moshi 0.2.13 would then sample from every token).
"""

import torch
from torch import Tensor


class Taste:
    """How every session of a tick chooses; worked out once, used for each token of a kind."""

    def __init__(self, temperature: Tensor, top_k: Tensor, candidates: int) -> None:
        """temperature: (B,) float32; top_k: (B,) int64; candidates: the most there can be."""
        self.candidates = candidates
        is_greedy = temperature <= 0
        self.heat = torch.where(is_greedy, torch.ones_like(temperature), temperature).unsqueeze(-1)
        limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, candidates))
        limit = torch.where(is_greedy, torch.ones_like(limit), limit).unsqueeze(-1)
        self.left_out = torch.arange(candidates).view(1, -1) >= limit

    def choose(self, logits: Tensor, noise: Tensor) -> Tensor:
        """logits: (B, N) float32, N >= candidates; noise: (B, K) float32, K >= candidates.

        Returns (B,) int64.
        """
        best, ids = torch.topk(logits, self.candidates, dim=-1)
        score = best / self.heat + noise.narrow(-1, 0, self.candidates)
        score = score.masked_fill(self.left_out, float("-inf"))
        return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)
