"""What the language model's kernels should give, in numpy: float64 between roundings.

Decides the meaning of `linear.cu`, `gated.cu` and `depth.cu`: what is summed, where a result is
rounded to the element, which token is chosen. Does not know about warps, parts or launches. Slow
on purpose: it is compared with, never served. Elements are float32 values here, whatever they are
stored as; ``store`` rounds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import Dtype
from engines.kernels.linear_choice import Finish
from engines.kernels.ring_reference import bf16_bits, bf16_values

Array = NDArray[Any]
Rows = NDArray[np.float64]


def store(dtype: Dtype, x: Array) -> Array:
    """Values -> how they lie in memory."""
    x = np.asarray(x, np.float32)
    if dtype == "bfloat16":
        return bf16_bits(x)
    return x.astype(np.float16) if dtype == "float16" else x


def values(stored: Array) -> Rows:
    """How elements lie in memory -> their values."""
    plain = bf16_values(stored) if stored.dtype == np.uint16 else stored
    return np.asarray(plain, np.float64)


def rounded(dtype: Dtype, x: Array) -> Rows:
    return values(store(dtype, x))


def product(
    dtype: Dtype, x: Array, w: Array, finish: Finish = Finish.STORE, add: Array | None = None
) -> Rows:
    """x: (B, I), w: (O, I); with GATE w is (2 O, I). Returns (B, O)."""
    sums = rounded(dtype, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T)
    if finish is Finish.GATE:
        opened, value = np.split(sums, 2, axis=1)
        return rounded(dtype, rounded(dtype, opened / (1 + np.exp(-opened))) * value)
    if finish is Finish.ADD:
        assert add is not None
        return rounded(dtype, add + sums)
    return sums


def norm(dtype: Dtype, x: Array, alpha: Array, eps: float) -> Rows:
    """Root mean square norm of x (B, I)."""
    x = np.asarray(x, np.float64)
    scale = 1 / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + eps)
    return rounded(dtype, x * (alpha * scale))


def attend(dtype: Dtype, query: Array, keys: Array, held: Array, heads: int) -> Rows:
    """query: (B, D); keys, held: (B, T, D), all seen. Returns (B, D)."""
    batch, rows, features = keys.shape
    q = query.reshape(batch, heads, -1)
    k, v = (x.reshape(batch, rows, heads, -1) for x in (keys, held))
    scores = np.einsum("bhd,bthd->bht", q, k) / (features // heads) ** 0.5
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return rounded(dtype, np.einsum("bht,bthd->bhd", weights, v).reshape(batch, features))


def choose(logits: Array, noise: Array, temperature: float, top_k: int) -> int:
    """One session's token: logits (N,), noise (K,) float32; `export.models.sampling`.

    Candidates in order of their logits, ties in order of their ids; of equal scores the first.
    """
    candidates = min(len(noise), len(logits))
    order = np.argsort(-logits.astype(np.float64), kind="stable")[:candidates]
    limit = top_k if 0 < top_k < candidates else candidates
    heat = np.float32(temperature)
    if temperature <= 0:
        limit, heat = 1, np.float32(1)
    score = logits[order[:limit]].astype(np.float32) / heat + noise[:limit]
    return int(order[np.argmax(score)])


@dataclass(frozen=True, slots=True)
class Taste:
    """How the sessions of a tick choose: (B,) each."""

    temperature: Array
    text_temperature: Array
    top_k: Array
    text_top_k: Array


def depth(
    dtype: Dtype,
    weight: Callable[[str], Array],
    numbers: Mapping[str, float],
    hidden: Array,
    text_logits: Array,
    noise: Array,
    taste: Taste,
) -> NDArray[np.int64]:
    """What a tick says, (B, 1 + steps), text first. weight: values by role."""
    steps, layers = int(numbers["steps"]), int(numbers["layers"])
    heads, eps = int(numbers["heads"]), numbers["eps"]

    def chosen(row: int, logits: Array) -> NDArray[np.int64]:
        heat, top_k = (
            (taste.temperature, taste.top_k) if row else (taste.text_temperature, taste.text_top_k)
        )
        return np.array(
            [
                choose(logits[b].astype(np.float32), noise[b, row], float(heat[b]), int(top_k[b]))
                for b in range(len(hidden))
            ]
        )

    said = [chosen(0, text_logits)]
    past: list[list[tuple[Rows, Rows]]] = [[] for _ in range(layers)]
    for step in range(steps):
        entered = product(dtype, hidden, weight(f"{step}.in"))
        x = rounded(dtype, entered + weight(f"{step}.emb")[said[-1]])
        for layer in range(layers):
            at = f"{step}.{layer}."
            y = norm(dtype, x, weight(f"{layer}.norm1"), eps)
            query, key, value = np.split(product(dtype, y, weight(at + "qkv")), 3, axis=1)
            past[layer].append((key, value))
            keys, held = (np.stack(rows, axis=1) for rows in zip(*past[layer], strict=True))
            seen = attend(dtype, query, keys, held, heads)
            x = product(dtype, seen, weight(at + "out"), Finish.ADD, x)
            y = norm(dtype, x, weight(f"{layer}.norm2"), eps)
            opened = product(dtype, y, weight(at + "gate"), Finish.GATE)
            x = product(dtype, opened, weight(at + "down"), Finish.ADD, x)
        said.append(chosen(step + 1, product(dtype, x, weight(f"{step}.head"))))
    return np.stack(said, axis=1)


def speak(
    numbers: Mapping[str, float], tokens: Array, after: Array, said: Array
) -> tuple[Array, Array, Array, Array]:
    """The delay ring moved on, and the frame it completes: ring, text, codes, valid.

    tokens: (B, S, R); after: (B,), this tick counted; said: (B, own streams).
    """
    batch, own = said.shape
    rows = tokens.shape[2]
    ring = tokens.copy()
    most = int(numbers["max_delay"])
    frame = np.zeros((batch, own), np.int64)
    for b in range(batch):
        ring[b, :own, after[b] % rows] = said[b]
        for stream in range(own):
            at = int(after[b]) + int(numbers[f"delay.{stream}"]) - most
            frame[b, stream] = ring[b, stream, at % rows]
    valid = after > most
    frame[~valid] = 0
    frame[~valid, 0] = int(numbers["text_padding"])
    return ring, frame[:, 0], frame[:, 1:], valid


def embed(
    dtype: Dtype,
    weight: Callable[[str], Array],
    numbers: Mapping[str, float],
    codes: Array,
    tokens: Array,
    offset: Array,
) -> tuple[Array, Rows]:
    """The delay ring with what was heard, and the first layer's input (B, C)."""
    batch, streams, rows = tokens.shape
    own = streams - codes.shape[1]
    ring = tokens.copy()
    total: list[Rows] = []
    for b in range(batch):
        ids = []
        for stream in range(streams):
            delay = int(numbers[f"delay.{stream}"])
            if stream >= own:
                ring[b, stream, (offset[b] + delay) % rows] = codes[b, stream - own]
            initial = int(numbers["initial.1" if stream else "initial.0"])
            ids.append(initial if offset[b] <= delay else int(ring[b, stream, offset[b] % rows]))
        found = [weight(f"emb.{s}")[ids[s]] * (ids[s] >= 0) for s in range(streams)]
        x = found[1]
        for row in (*found[2:], found[0]):
            x = rounded(dtype, x + row)
        total.append(x)
    return ring, np.stack(total)
