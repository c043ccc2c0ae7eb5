"""Which kernel of ours computes a piece of the language model, and where its weights are.

Pieces of a temporal transformer cut at attention (`ring_stages`), and the depth stage of every
bundle, keep their graphs; this says beside them what `engines.kernels.lm_kinds` asks for. Names
and slices are those the graphs use, so a weight lies in the bundle once; norms, which a graph has
inline, get a place in the weights' file here.

Not here: the codec's kernels, the kernels themselves.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engines.bundle import Dtype, KernelSpec, WeightSpec
from engines.kernels.lm_kinds import MOST_CANDIDATES, MOST_STEPS, MOST_STREAMS
from export.models.config import LmConfig
from export.models.lm import DepthLayer, LanguageModel
from export.models.streaming import TORCH_DTYPES
from export.models.transformer import RMS_EPS, GatedLayer
from export.ring_stages import TemporalPiece, gated_layers
from export.stages import NOISE, Depth
from export.to_onnx import Weights

FLOATS: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
DTYPES: dict[torch.dtype, Dtype] = {TORCH_DTYPES[dtype]: dtype for dtype in FLOATS}

Roles = Iterator[tuple[str, str, Tensor]]
"""Role, name in the weights' file, values."""


def temporal_kernel(piece: TemporalPiece, weights: Weights) -> KernelSpec | None:
    """What to enter for a piece; None when there is no kernel for such a model."""
    lm = piece.lm
    c = lm.config
    if c.streams > MOST_STREAMS:
        return None
    numbers: dict[str, float] = {"eps": RMS_EPS}
    if piece.index:
        kind = "gated_last" if piece.is_last else "gated_piece"
        numbers["gate"] = c.gate
    else:
        kind = "gated_first"
        numbers |= {"initial.0": c.text_card, "initial.1": c.card, **_delays(c, c.streams)}
    return KernelSpec(kind, _placed(_temporal(piece), weights), numbers)


def depth_kernel(graph: Depth, weights: Weights) -> KernelSpec | None:
    """What to enter for the depth stage; None when there is no kernel for such a model."""
    lm = graph.lm
    c = lm.config
    (noise,) = (tensor for tensor in graph.inputs if tensor.name == NOISE)
    if (
        c.streams > MOST_STREAMS
        or c.depth_codebooks > MOST_STEPS
        or noise.row_shape[1] > MOST_CANDIDATES
    ):
        return None
    numbers: dict[str, float] = {
        "eps": RMS_EPS,
        "steps": c.depth_codebooks,
        "layers": c.depth_layers,
        "heads": c.depth_heads,
        "features": c.depth_dimension,
        "gate": c.depth_gate,
        "card": c.card,
        "text_padding": c.text_padding_id,
        "max_delay": c.max_delay,
        **_delays(c, 1 + c.depth_codebooks),
    }
    return KernelSpec("depth", _placed(_depth(lm), weights), numbers)


def _placed(roles: Roles, weights: Weights) -> dict[str, WeightSpec]:
    found: dict[str, WeightSpec] = {}
    for role, name, tensor in roles:
        place = weights.place(name, tensor)
        file, dtype = f"stages/{place.file}", DTYPES[tensor.dtype]
        found[role] = WeightSpec(file, place.offset, dtype, tuple(tensor.shape))
    return found


def _temporal(piece: TemporalPiece) -> Roles:
    lm, layers = piece.lm, gated_layers(piece.lm)
    if piece.index:
        yield from _after(layers[piece.index - 1], piece.index - 1)
    else:
        yield "emb.0", "lm.text_emb.weight", lm.text_emb.weight
        for stream in range(1, lm.config.streams):
            table = lm.emb[stream - 1].get_parameter("weight")
            yield f"emb.{stream}", f"lm.emb.{stream - 1}.weight", table
    if not piece.is_last:
        yield from _before(layers[piece.index], piece.index)
    else:
        yield "out_norm", "lm.out_norm.alpha", lm.out_norm.alpha.view(-1)
        yield "text", "lm.text_linear.weight", lm.text_linear.weight


def _before(layer: GatedLayer, index: int) -> Roles:
    stem = f"lm.transformer.layers.{index}"
    yield "norm1", f"{stem}.norm1.alpha", layer.norm1.alpha.view(-1)
    yield "qkv", f"{stem}.self_attn.in_proj_weight", layer.self_attn.in_proj_weight


def _after(layer: GatedLayer, index: int) -> Roles:
    stem = f"lm.transformer.layers.{index}"
    yield "out", f"{stem}.self_attn.out_proj.weight", layer.self_attn.out_proj.weight
    yield "norm2", f"{stem}.norm2.alpha", layer.norm2.alpha.view(-1)
    yield "gate", f"{stem}.gating.linear_in.weight", layer.gating.linear_in.weight
    yield "down", f"{stem}.gating.linear_out.weight", layer.gating.linear_out.weight


def _depth(lm: LanguageModel) -> Roles:
    c, d = lm.config, lm.config.depth_dimension
    steps = range(c.depth_codebooks)
    # First and in order, so that they lie side by side on the device and are one product.
    for step in steps:
        weight = lm.depformer_in[step].get_parameter("weight")
        yield f"{step}.in", f"lm.depformer_in.{step}.weight", weight
    for step in steps:
        name = f"depformer_emb.{step - 1}" if step else "depformer_text_emb"
        yield f"{step}.emb", f"lm.{name}.weight", lm.get_parameter(f"{name}.weight")
        head = lm.linears[step].get_parameter("weight")
        yield f"{step}.head", f"lm.linears.{step}.weight", head
    layers = [layer for layer in lm.depformer.layers if isinstance(layer, DepthLayer)]
    for index, layer in enumerate(layers):
        stem = f"lm.depformer.layers.{index}"
        yield f"{index}.norm1", f"{stem}.norm1.alpha", layer.norm1.alpha.view(-1)
        yield f"{index}.norm2", f"{stem}.norm2.alpha", layer.norm2.alpha.view(-1)
        qkv, out = layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight
        for step in steps:
            at, gating = f"{step}.{index}", layer.gating[step]
            part = qkv.narrow(0, step * 3 * d, 3 * d)
            yield f"{at}.qkv", f"{stem}.self_attn.in_proj_weight.{step}", part
            part = out.narrow(0, step * d, d)
            yield f"{at}.out", f"{stem}.self_attn.out_proj.weight.{step}", part
            for role, where in (("gate", "linear_in"), ("down", "linear_out")):
                weight = gating.get_parameter(f"{where}.weight")
                yield f"{at}.{role}", f"{stem}.gating.{step}.{where}.weight", weight


def _delays(c: LmConfig, streams: int) -> dict[str, float]:
    return {f"delay.{stream}": c.delays[stream] for stream in range(streams)}
