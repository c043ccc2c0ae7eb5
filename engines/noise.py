"""The `gumbel_noise` stage: counter-based noise for sampling, the CPU's twin of the GPU kernel.

    in   sampling.seed   (B,)         int64     constant per call
    in   <counter>       (B,)         int64     frames the session has seen
    out  noise           (B, R, K)    float32   standard Gumbel, one per top-k candidate

Noise is a function of (session seed, frame, row, candidate) and of nothing else: not of the
batch, the slot or what ran before. So a call replays to the same tokens, and the same numbers can
be drawn on a GPU. The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011): key = seed, counter = (block, frame low, frame high, 0), four
candidates per block.

Not here: choosing a token (the depth stage's graph), which adds the noise to scaled logits.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))  # Salmon et al., table 2
WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, ibid.
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox 4x32-10. counter: (4, ...) and key: (2, ...), 32-bit words held in uint64.

    Returns (4, ...), 32-bit words held in uint64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        bump0 = (k0 + np.uint64(turn * WEYL[0] & 0xFFFFFFFF)) & _LOW
        bump1 = (k1 + np.uint64(turn * WEYL[1] & 0xFFFFFFFF)) & _LOW
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ bump0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ bump1,
            product0 & _LOW,
        )
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3))


def gumbel(seed: NDArray[np.int64], frame: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Fill ``out`` (B, R, K) with standard Gumbel noise; seed and frame: (B,).

    Uniforms carry 23 bits, at the middle of their cells, so that neither 0 nor 1 occurs in
    float32 and the noise is finite: within -2.8 and 16.7.
    """
    batch, rows, candidates = out.shape
    blocks = -(-candidates // 4)
    block = np.arange(rows * blocks, dtype=np.uint64)[None, :]
    frames = frame.astype(np.uint64)[:, None]
    seeds = seed.astype(np.uint64)[:, None]
    zero = np.zeros((1, 1), np.uint64)
    words = philox(
        np.stack(np.broadcast_arrays(block, frames & _LOW, frames >> _SHIFT, zero)),
        np.stack(np.broadcast_arrays(seeds & _LOW, seeds >> _SHIFT)),
    )
    per_row = np.moveaxis(words, 0, -1).reshape(batch, rows, blocks * 4)[:, :, :candidates]
    uniform = ((per_row >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    np.negative(np.log(-np.log(uniform)), out=out)
