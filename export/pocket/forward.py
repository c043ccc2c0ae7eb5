"""The models as training runs them: whole recordings at once, differentiable, weights unchanged.

The modules of `export.models` take one tick and carry their state; these functions compute the
same from the same parameters over a whole stretch of time, with torch's own operators. What both
give is compared in the tests, so what was trained is what will be served.

A codec transformer's query sees what its ring holds after its tick's rows were written, which is
one key fewer for the first of two rows (`export.models.transformer`).

Not here: losses (`codec_losses`, `lm_losses`), quantising while training (`codebooks`).
"""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.models.config import ROPE_MAX_PERIOD, LmConfig
from export.models.lm import DepthLayer, LanguageModel
from export.models.mimi import CodecTransformer, Elu, Mimi, ResidualBlock
from export.models.streaming import CausalConv1d, CausalConvTranspose1d
from export.models.transformer import RMS_EPS, CodecLayer, GatedLayer, GatedMlp, Rope


def encode(mimi: Mimi, pcm: Tensor) -> Tensor:
    """pcm (B, 1, n * samples_per_frame), calls from their start -> what is quantised, (B, C, n)."""
    x = run(mimi.encoder.model, pcm)
    x = codec_transformer(mimi.encoder_transformer, x)
    return conv(mimi.downsample.get_submodule("conv"), x)


def decode(mimi: Mimi, latent: Tensor) -> Tensor:
    """latent (B, C, n) -> pcm (B, 1, n * samples_per_frame)."""
    x = conv_transpose(mimi.upsample.get_submodule("convtr"), latent)
    x = codec_transformer(mimi.decoder_transformer, x)
    return run(mimi.decoder.model, x)


def run(modules: nn.Module, x: Tensor) -> Tensor:
    """A numbered list of a SEANet's parts, one after the other."""
    for module in modules.children():
        if isinstance(module, CausalConv1d):
            x = conv(module, x)
        elif isinstance(module, CausalConvTranspose1d):
            x = conv_transpose(module, x)
        elif isinstance(module, ResidualBlock):
            x = x + run(module.block, x)
        else:
            assert isinstance(module, Elu), module
            x = functional.elu(x)
    return x


def conv(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, CausalConv1d), module
    inner = module.conv.get_submodule("conv")
    assert isinstance(inner, nn.Conv1d), inner
    if module.pad_first:
        x = torch.cat([x[..., :1].expand(-1, -1, module.remembered), x], dim=-1)
    elif module.remembered:
        x = functional.pad(x, (module.remembered, 0))
    return functional.conv1d(x, inner.weight, inner.bias, inner.stride)


def conv_transpose(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, CausalConvTranspose1d), module
    inner = module.convtr.get_submodule("convtr")
    assert isinstance(inner, nn.ConvTranspose1d), inner
    whole = functional.conv_transpose1d(
        x, inner.weight, inner.bias, inner.stride, groups=inner.groups
    )
    return whole[..., : x.shape[-1] * module.stride]


def codec_transformer(module: CodecTransformer, x: Tensor) -> Tensor:
    """(B, C, S) -> (B, C, S)."""
    steps = x.shape[-1]
    at = torch.arange(steps, device=x.device)
    newest = at // module.advance * module.advance + module.advance - 1
    seen = (at[None] <= at[:, None]) & (at[None] > newest[:, None] - module.context)
    turn = angles(module.rope, steps, x.device)
    y = x.transpose(1, 2)
    for layer in module.transformer.get_submodule("layers").children():
        assert isinstance(layer, CodecLayer), layer
        mixed = attention(layer.norm1(y), layer.self_attn.in_proj_weight, turn, layer, seen)
        y = y + layer.layer_scale_1(functional.linear(mixed, layer.self_attn.out_proj.weight))
        wide = functional.gelu(functional.linear(layer.norm2(y), layer.linear1.weight))
        y = y + layer.layer_scale_2(functional.linear(wide, layer.linear2.weight))
    return y.transpose(1, 2)


def attention(
    x: Tensor,
    weight: Tensor,
    turn: tuple[Tensor, Tensor],
    layer: CodecLayer | GatedLayer,
    seen: Tensor | None,
) -> Tensor:
    """x (B, S, C) -> (B, S, C), before the last matrix; seen: None is everything before."""
    batch, steps, features = x.shape
    heads = layer.self_attn.heads
    q, k, v = functional.linear(x, weight).view(batch, steps, 3, heads, -1).unbind(2)
    q, k = turned(q, turn).to(v.dtype), turned(k, turn).to(v.dtype)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
    return y.transpose(1, 2).reshape(batch, steps, features)


def angles(rope: Rope, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (1, S, 1, D/2) of positions 0 .. S - 1, made where they are needed."""
    pairs = torch.arange(rope.head_features // 2, device=device, dtype=torch.float32)
    frequencies = torch.exp(pairs * (-math.log(ROPE_MAX_PERIOD) * 2 / rope.head_features))
    angle = torch.arange(steps, device=device, dtype=torch.float32).view(1, -1, 1, 1) * frequencies
    return torch.cos(angle), torch.sin(angle)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Interleaved rotary embedding of (B, S, H, D), in float32."""
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = turn
    both = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(both, dim=-1).flatten(-2)


def norm(x: Tensor, alpha: Tensor) -> Tensor:
    """RMS norm of (..., C) in float32, back in x's dtype."""
    scaled = functional.rms_norm(x.float(), x.shape[-1:], alpha.view(-1).float(), RMS_EPS)
    return scaled.to(x.dtype)


def gated(mlp: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(mlp, GatedMlp), mlp
    opened, value = functional.linear(x, mlp.linear_in.weight).chunk(2, dim=-1)
    return functional.linear(functional.silu(opened) * value, mlp.linear_out.weight)


def embedded(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table, as a product with ones and zeros; id -1 is exactly zero.

    The tables are short, and the gradient of a product needs neither sorting nor atomic adding.
    """
    rows = torch.arange(weight.shape[0], device=ids.device)
    return (ids.unsqueeze(-1) == rows).to(weight.dtype) @ weight


def temporal(lm: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids (B, S, streams) of calls from their start -> hidden (B, S, C), text logits float32.

    S may not pass the model's window: nothing here forgets.
    """
    config, steps = lm.config, ids.shape[1]
    assert steps <= config.context, (steps, config.context)
    x = embedded(lm.text_emb.weight, ids[..., 0])
    for stream, table in enumerate(lm.emb):
        weight = table.get_parameter("weight")
        x = x + embedded(weight, ids[..., stream + 1])
    turn = angles(lm.rope, steps, ids.device)
    for layer in lm.transformer.layers:
        assert isinstance(layer, GatedLayer), layer
        given = norm(x, layer.norm1.alpha)
        mixed = attention(given, layer.self_attn.in_proj_weight, turn, layer, None)
        x = x + functional.linear(mixed, layer.self_attn.out_proj.weight)
        x = x + gated(layer.gating, norm(x, layer.norm2.alpha))
    hidden = norm(x, lm.out_norm.alpha)
    return hidden, functional.linear(hidden, lm.text_linear.weight).float()


def depth(lm: LanguageModel, hidden: Tensor, spoken: Tensor) -> Tensor:
    """Logits of every code given those before it: (Q, N, card) float32.

    hidden (N, C); spoken (N, 1 + Q) int64, text first; an id of -1 embeds as zero. All steps at
    once: each has weights of its own, so every product is one batch of Q products.
    """
    config: LmConfig = lm.config
    steps, c, heads = config.depth_codebooks, config.depth_dimension, config.depth_heads
    inward = torch.stack([part.get_parameter("weight") for part in lm.depformer_in])
    x = torch.einsum("nc,qdc->qnd", hidden, inward)
    tables = [lm.depformer_text_emb.weight]
    tables += [table.get_parameter("weight") for table in lm.depformer_emb]
    before = [embedded(table, spoken[:, step]) for step, table in enumerate(tables)]
    x = x + torch.stack(before)
    past = torch.ones(steps, steps, dtype=torch.bool, device=x.device).tril()
    for layer in lm.depformer.layers:
        assert isinstance(layer, DepthLayer), layer
        weight = layer.self_attn.in_proj_weight.view(steps, 3 * c, c)
        qkv = torch.bmm(norm(x, layer.norm1.alpha), weight.transpose(1, 2))
        q, k, v = qkv.view(steps, -1, 3, heads, c // heads).permute(2, 1, 3, 0, 4)
        mixed = _small_attention(q, k, v, past).permute(2, 0, 1, 3).reshape(steps, -1, c)
        out = layer.self_attn.out_proj.weight.view(steps, c, c)
        x = x + torch.bmm(mixed, out.transpose(1, 2))
        given = norm(x, layer.norm2.alpha)
        parts = [mlp for mlp in layer.gating if isinstance(mlp, GatedMlp)]
        wide = torch.bmm(given, torch.stack([m.linear_in.weight for m in parts]).transpose(1, 2))
        opened, value = wide.chunk(2, dim=-1)
        back = torch.stack([m.linear_out.weight for m in parts]).transpose(1, 2)
        x = x + torch.bmm(functional.silu(opened) * value, back)
    heads_out = torch.stack([part.get_parameter("weight") for part in lm.linears])
    return torch.bmm(x, heads_out.transpose(1, 2)).float()


def _small_attention(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """(N, H, Q, D) over Q of six or eight: written out, since N is tens of thousands."""
    score = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weight = score.masked_fill(~past, float("-inf")).softmax(-1)
    mixed: Tensor = weight.to(v.dtype) @ v
    return mixed
