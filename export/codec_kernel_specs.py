"""Which kernel of ours computes a piece of the codec, and where its weights are.

Pieces of a model cut at attention (`ring_stages`) keep their graphs; this says beside them what
`engines.kernels.codec_kinds` asks for. Weights a graph keeps inline, because they are small, get a
place in the weights' file here. A codec they cannot compute has none: it runs as graphs.

Not here: the language model's kernels, the kernels themselves.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from engines.bundle import KernelSpec, WeightSpec
from engines.kernels.codec_kinds import CodecShape
from export.models.config import MimiConfig
from export.models.mimi import CodecTransformer
from export.models.quantizer import SplitQuantizer
from export.models.streaming import CausalConv1d, CausalConvTranspose1d
from export.models.transformer import CodecLayer
from export.ring_stages import DecodePiece, EncodePiece, codec_layers
from export.to_onnx import Weights

LAYER_NORM_EPS = 1e-5  # of `CodecLayer`

Roles = Iterator[tuple[str, str, Tensor]]
"""Role, name in the weights' file, values."""


def codec_kernel(piece: EncodePiece | DecodePiece, weights: Weights) -> KernelSpec | None:
    """What to enter for a piece; None when there is no kernel for such a codec."""
    shape = codec_shape(piece.mimi.config)
    if shape.fault():
        return None
    found: dict[str, WeightSpec] = {}
    for role, name, tensor in roles(piece):
        place = weights.place(name, tensor)
        file = f"stages/{place.file}"
        found[role] = WeightSpec(file, place.offset, "float32", tuple(tensor.shape))
    return KernelSpec(kind=kind_of(piece), weights=found, numbers=shape.numbers())


def codec_shape(config: MimiConfig) -> CodecShape:
    return CodecShape(
        filters=config.filters,
        dimension=config.dimension,
        ratios=config.ratios,
        positions=config.downsample,
        kernel=config.kernel,
        last_kernel=config.last_kernel,
        residual_kernel=config.residual_kernel,
        compress=config.compress,
        feedforward=config.feedforward,
        features=config.codebook_dimension,
        bins=config.bins,
        levels=config.codebooks_used,
        eps=LAYER_NORM_EPS,
    )


def kind_of(piece: EncodePiece | DecodePiece) -> str:
    if piece.index and not piece.is_last:
        return "codec_piece"
    half = "encode" if isinstance(piece, EncodePiece) else "decode"
    return f"codec_{half}_{'last' if piece.is_last else 'first'}"


def roles(piece: EncodePiece | DecodePiece) -> Roles:
    """Every weight of a piece, by the names the graphs use."""
    mimi = piece.mimi
    is_encoder = isinstance(piece, EncodePiece)
    transformer = mimi.encoder_transformer if is_encoder else mimi.decoder_transformer
    stem = "mimi.encoder_transformer" if is_encoder else "mimi.decoder_transformer"
    layers = _layers(transformer)
    if piece.index:
        yield from _after(layers[piece.index - 1], f"{stem}.transformer.layers.{piece.index - 1}")
    if not piece.is_last:
        yield from _before(layers[piece.index], f"{stem}.transformer.layers.{piece.index}")
    if is_encoder and not piece.index:
        yield from _net(mimi.encoder, "mimi.encoder")
    if not is_encoder and piece.is_last:
        yield from _net(mimi.decoder, "mimi.decoder")
    if is_encoder and piece.is_last:
        down = mimi.downsample.get_submodule("conv.conv.conv")
        yield "downsample", "mimi.downsample.conv.conv.conv.weight", _weight(down)
        yield from _books(mimi.quantizer, mimi.config, encodes=True)
    if not is_encoder and not piece.index:
        up = mimi.upsample.get_submodule("convtr.convtr.convtr")
        yield "upsample", "mimi.upsample.convtr.convtr.convtr.weight", _weight(up)
        yield from _books(mimi.quantizer, mimi.config, encodes=False)


def _layers(transformer: CodecTransformer) -> list[CodecLayer]:
    return codec_layers(transformer)


def _before(layer: CodecLayer, name: str) -> Roles:
    yield from _norm("norm1", layer.norm1, name)
    yield "qkv", f"{name}.self_attn.in_proj_weight", layer.self_attn.in_proj_weight


def _after(layer: CodecLayer, name: str) -> Roles:
    yield "out", f"{name}.self_attn.out_proj.weight", layer.self_attn.out_proj.weight
    yield "scale1", f"{name}.layer_scale_1.scale", layer.layer_scale_1.scale
    yield from _norm("norm2", layer.norm2, name)
    yield "linear1", f"{name}.linear1.weight", layer.linear1.weight
    yield "linear2", f"{name}.linear2.weight", layer.linear2.weight
    yield "scale2", f"{name}.layer_scale_2.scale", layer.layer_scale_2.scale


def _norm(role: str, norm: nn.LayerNorm, name: str) -> Roles:
    assert norm.eps == LAYER_NORM_EPS, norm
    yield f"{role}.weight", f"{name}.{role}.weight", norm.weight
    yield f"{role}.bias", f"{name}.{role}.bias", norm.bias


def _net(net: nn.Module, name: str) -> Roles:
    for path, module in net.named_modules():
        if isinstance(module, CausalConv1d | CausalConvTranspose1d):
            inner = "conv.conv" if isinstance(module, CausalConv1d) else "convtr.convtr"
            conv = module.get_submodule(inner)
            yield f"{path}.weight", f"{name}.{path}.{inner}.weight", _weight(conv)
            bias = conv.bias
            assert isinstance(bias, Tensor), path
            yield f"{path}.bias", f"{name}.{path}.{inner}.bias", bias


def _books(quantizer: SplitQuantizer, config: MimiConfig, *, encodes: bool) -> Roles:
    level = 0
    for half in ("first", "rest"):
        part = quantizer.rvq_first if half == "first" else quantizer.rvq_rest
        name = f"mimi.quantizer.rvq_{half}"
        which = "input_proj" if encodes else "output_proj"
        weight = _weight(part.input_proj if encodes else part.output_proj).squeeze(-1)
        yield f"proj.{half}", f"{name}.{which}.weight", weight
        for index, book in enumerate(part.codebooks()[: part.used]):
            stem = f"{name}.vq.layers.{index}._codebook"
            yield f"book.{level}", f"{stem}.embedding", book.embedding
            if encodes:
                yield f"squared.{level}", f"{stem}.squared", book.squared
            level += 1
    assert level == config.codebooks_used, level


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), module
    return weight
