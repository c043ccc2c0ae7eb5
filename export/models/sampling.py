"""Choose a token from logits, with the session's own temperature and top-k, and noise given.

Adding Gumbel noise to log-probabilities and taking the largest is sampling from them, so the
graph needs no random numbers of its own: noise for the top candidates comes in, drawn per session
and per tick by whoever runs the graph, and a call can be replayed to the same tokens.

Temperature 0 is greedy: the first candidate, whatever the noise. A top-k of 0, or above the
bundle's `candidates`, means all `candidates` (moshi 0.2.13 would then sample from every token).
"""

import torch
from torch import Tensor


def choose(logits: Tensor, temperature: Tensor, top_k: Tensor, noise: Tensor) -> Tensor:
    """logits (B, N) float32, temperature (B,) float32, top_k (B,) int64, noise (B, K) float32.

    Returns (B,) int64. K is the largest top-k; candidates beyond a session's own are left out.
    """
    candidates = min(noise.shape[-1], logits.shape[-1])
    best, ids = torch.topk(logits, candidates, dim=-1)
    noise = noise.narrow(-1, 0, candidates)
    is_greedy = temperature <= 0
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, candidates))
    limit = torch.where(is_greedy, torch.ones_like(limit), limit).unsqueeze(-1)
    heat = torch.where(is_greedy, torch.ones_like(temperature), temperature).unsqueeze(-1)
    score = best / heat + noise
    left_out = torch.arange(candidates).view(1, -1) >= limit
    score = score.masked_fill(left_out, float("-inf"))
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)
