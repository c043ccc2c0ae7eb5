"""What the language model's kernels need to be told: weights by role, numbers by name. Pure.

C = features, G = half of a gate, V = text tokens, S = streams, D = depth features, K = codes.

    gated_first    in   user_codes, lm.tokens, lm.offset      out  x, qkv, lm.tokens.next
                   emb.{1..S-1} (K+1, C), emb.0 (V+1, C) of the text, norm1 (C), qkv (3C, C)
    gated_piece    in   x, attended                           out  x, qkv
                   out (C, C), norm2 (C), gate (2G, C), down (C, G), norm1, qkv of the next layer
    gated_last     in   x, attended, lm.offset                out  hidden, text_logits, offset.next
                   out, norm2, gate, down; out_norm (C), text (V, C)
    depth          in   hidden, text_logits, noise, lm.tokens, lm.offset, temperature, that of
                        text, top_k, that of text        out  text, codes, valid, lm.tokens.next
                   per step s: {s}.in (D, C), {s}.emb (K+1 or V+1, D), {s}.head (K, D), and per
                   layer l: {s}.{l}.{qkv,out,gate,down}; norms {l}.norm1, {l}.norm2 (D)

Numbers: `eps` of the norms always, `gate` (G) of all but the first. Of the first, `delay.{stream}`
of every stream, and the ids that begin one, `initial.0` (V) of text and `initial.1` (K) of the
others. Of depth `steps`, `layers`, `heads`, `features` (D), `card` (K), `text_padding`, and the
delays of the streams that speak and the largest of all, `max_delay`.

Not here: checking a manifest against it (`kernel_kinds`), the kernels.
"""

from collections.abc import Callable

from engines.bundle import KernelSpec, StageSpec, TensorSpec

MOST_STREAMS = 64
MOST_STEPS = 16
MOST_CANDIDATES = 1024
"""What gated.cu and depth.cu have room for."""

Shape = tuple[int, ...]


def gated_first(stage: StageSpec, kernel: KernelSpec) -> dict[str, Shape]:
    codes, tokens, _ = _pick(stage.inputs, 3)
    x, qkv, moved = _pick(stage.outputs, 3)
    streams, _ = tokens.row_shape
    _one_dtype(kernel, x, qkv)
    if moved.row_shape != tokens.row_shape:
        raise ValueError(f"{moved.name} is not the next value of {tokens.name}")
    if streams > MOST_STREAMS:
        raise ValueError(f"{streams} streams; up to {MOST_STREAMS} are served")
    if not 0 < codes.row_shape[0] < streams:
        raise ValueError(f"{streams} streams do not hold {codes.row_shape[0]} codebooks")
    (features,) = x.row_shape
    _number(kernel, "eps")
    for stream in range(streams):
        _number(kernel, f"delay.{stream}")
    text, audio = _number(kernel, "initial.0"), _number(kernel, "initial.1")
    return {
        "emb.0": (text + 1, features),
        **{f"emb.{stream}": (audio + 1, features) for stream in range(1, streams)},
        **_before(features, qkv),
    }


def gated_piece(stage: StageSpec, kernel: KernelSpec) -> dict[str, Shape]:
    x, attended = _pick(stage.inputs, 2)
    y, qkv = _pick(stage.outputs, 2)
    _one_dtype(kernel, x, attended, y, qkv)
    (features,) = x.row_shape
    _same(x, attended, y)
    return {**_after(features, kernel), **_before(features, qkv)}


def gated_last(stage: StageSpec, kernel: KernelSpec) -> dict[str, Shape]:
    x, attended, _ = _pick(stage.inputs, 3)
    hidden, logits, _ = _pick(stage.outputs, 3)
    (features,) = x.row_shape
    _one_dtype(kernel, x, attended, hidden)
    _same(x, attended, hidden)
    return {
        **_after(features, kernel),
        "out_norm": (features,),
        "text": (*logits.row_shape, features),
    }


def depth(stage: StageSpec, kernel: KernelSpec) -> dict[str, Shape]:
    hidden, logits, noise, *_ = _pick(stage.inputs, 9)
    _pick(stage.outputs, 4)
    _one_dtype(kernel, hidden)
    (features,), (text_card,) = hidden.row_shape, logits.row_shape
    steps, layers = _number(kernel, "steps"), _number(kernel, "layers")
    d, gate, card = (_number(kernel, name) for name in ("features", "gate", "card"))
    heads = _number(kernel, "heads")
    if steps < 1 or layers < 1 or heads < 1 or d % heads:
        raise ValueError(f"{steps} steps, {layers} layers, {heads} heads on {d} features")
    if noise.row_shape[0] != 1 + steps:
        raise ValueError(f"{noise.name} has {noise.row_shape[0]} rows for {steps} steps and text")
    if steps > MOST_STEPS or noise.row_shape[1] > MOST_CANDIDATES:
        raise ValueError(
            f"{steps} steps and {noise.row_shape[1]} candidates; up to {MOST_STEPS} and "
            f"{MOST_CANDIDATES} are served"
        )
    _number(kernel, "eps")
    _number(kernel, "text_padding")
    _number(kernel, "max_delay")
    for stream in range(1 + steps):
        _number(kernel, f"delay.{stream}")
    wanted: dict[str, Shape] = {}
    for layer in range(layers):
        wanted |= {f"{layer}.norm1": (d,), f"{layer}.norm2": (d,)}
    for step in range(steps):
        wanted[f"{step}.in"] = (d, features)
        wanted[f"{step}.emb"] = ((card if step else text_card) + 1, d)
        wanted[f"{step}.head"] = (card, d)
        for layer in range(layers):
            wanted[f"{step}.{layer}.qkv"] = (3 * d, d)
            wanted[f"{step}.{layer}.out"] = (d, d)
            wanted[f"{step}.{layer}.gate"] = (2 * gate, d)
            wanted[f"{step}.{layer}.down"] = (d, gate)
    return wanted


SHAPES: dict[str, Callable[[StageSpec, KernelSpec], dict[str, Shape]]] = {
    "gated_first": gated_first,
    "gated_piece": gated_piece,
    "gated_last": gated_last,
    "depth": depth,
}


def _before(features: int, qkv: TensorSpec) -> dict[str, Shape]:
    """A layer up to its attention."""
    return {"norm1": (features,), "qkv": (*qkv.row_shape, features)}


def _after(features: int, kernel: KernelSpec) -> dict[str, Shape]:
    """A layer from its attention on."""
    _number(kernel, "eps")
    gate = _number(kernel, "gate")
    return {
        "out": (features, features),
        "norm2": (features,),
        "gate": (2 * gate, features),
        "down": (features, gate),
    }


def _number(kernel: KernelSpec, name: str) -> int:
    return int(kernel.numbers[name])


def _one_dtype(kernel: KernelSpec, *rows: TensorSpec) -> None:
    dtypes = {weight.dtype for weight in kernel.weights.values()} | {row.dtype for row in rows}
    if len(dtypes) != 1:
        raise ValueError(f"weights and rows of {', '.join(sorted(dtypes))}; they must be of one")


def _pick(tensors: tuple[TensorSpec, ...], count: int) -> tuple[TensorSpec, ...]:
    if len(tensors) != count:
        raise ValueError(f"{len(tensors)} tensors where this kind has {count}")
    return tensors


def _same(*tensors: TensorSpec) -> None:
    for tensor in tensors[1:]:
        if (tensor.dtype, tensor.row_shape) != (tensors[0].dtype, tensors[0].row_shape):
            raise ValueError(f"{tensor.name} is not of the shape of {tensors[0].name}")
