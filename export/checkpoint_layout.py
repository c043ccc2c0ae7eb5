"""Published key layouts: which tensors a model has, under which names, in which shapes.

The names are those of the torch modules (`export.models`), which are those of the published
checkpoints in their *fused* layout. Newer tools write the *split* one, one matrix per depth step:

    fused   ...self_attn.in_proj_weight          (S * 3C, C), step-major
    split   ...self_attn.in_projs.{step}.weight  (3C, C) each

Older Mimi files call the codebooks' tensors by other names. `gather` undoes both, so that
everything after it knows one name per tensor; `resolve` then holds what was found against what
the model needs, and `infer_lm` and `infer_mimi` read a model's numbers off the shapes. Weights
of other programs (bitsandbytes, candle, MLX) are recognised to be refused by name.

Pure: names and shapes in, names, shapes and configurations out. Not here: files, bytes, torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from export.checkpoint_file import CheckpointError
from export.models.config import LmConfig, MimiConfig, gate_features

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

HEAD_FEATURES = 128  # 4096 / 32 in loaders.py of moshi 0.2.13; heads leave no trace in shapes
DEPTH_HEAD_FEATURES = 64  # 1024 / 16
MIMI_HEAD_FEATURES = 64  # 512 / 8

PUBLISHED = "kyutai/moshiko-pytorch-bf16, kyutai/moshika-pytorch-bf16 or nvidia/personaplex-7b-v1"

ALIASES = (
    (re.compile(r"(.*\.self_attn\.in_proj)\.weight"), r"\1_weight"),
    (re.compile(r"(.*\._codebook\.)(?:embed_sum|embed_avg)"), r"\1embedding_sum"),
    (re.compile(r"(.*\._codebook\.)cluster_size"), r"\1cluster_usage"),
    (re.compile(r"(.*\._codebook\.)inited"), r"\1_initialized"),
)
"""Names of the same tensor in other releases -> ours."""

SPLIT = (
    (re.compile(r"(.*\.self_attn\.)in_projs\.(\d{1,4})\.weight"), "in_proj_weight"),
    (re.compile(r"(.*\.self_attn\.)out_projs\.(\d{1,4})\.weight"), "out_proj.weight"),
)
"""Names of one step's part of a tensor -> our name of the whole."""

FOREIGN = (
    (
        re.compile(r".*_scb"),
        "8-bit weights of bitsandbytes; export the bf16 checkpoint they were made from",
    ),
    (
        re.compile(r"depformer\.slices\.\d+\..*|audio_embs\..*|.*\.(?:scales|biases)"),
        "weights laid out for MLX; use the PyTorch checkpoint of the same model",
    ),
    (
        re.compile(r"depformer\.\d+\..*"),
        "weights laid out for Rust (candle), depth steps apart; use the PyTorch checkpoint of the "
        "same model",
    ),
    (
        re.compile(r".*lora_[AB]\..*"),
        "LoRA adapters; merge them into the weights with the tool that trained them",
    ),
    (
        re.compile(r"condition_provider\..*|fuser\..*|extra_heads\..*"),
        "a model with conditioners or extra heads, such as a text-to-speech one, which duplexbox "
        "does not run",
    ),
    (
        re.compile(r".*semantic_residual_vector_quantizer.*|model\.embed_tokens\..*"),
        "weights laid out for the transformers library; use the PyTorch checkpoint of the same "
        "model",
    ),
)
"""Names only other programs' files have -> what those are, and the way out."""


# What a model has.


def lm_shapes(config: LmConfig) -> Shapes:
    """Every tensor of the language model, fused: name -> shape."""
    c, d, steps = config.dimension, config.depth_dimension, config.depth_codebooks
    shapes: Shapes = {}
    for stream in range(config.audio_streams):
        shapes[f"emb.{stream}.weight"] = (config.card + 1, c)
    shapes["text_emb.weight"] = (config.text_card + 1, c)
    shapes["text_linear.weight"] = (config.text_card, c)
    shapes["out_norm.alpha"] = (1, 1, c)
    for layer in range(config.layers):
        at = f"transformer.layers.{layer}"
        shapes |= _gated(f"{at}.gating", c, config.gate)
        shapes |= _attention_and_norms(at, c, 1)
    for step in range(steps):
        shapes[f"depformer_in.{step}.weight"] = (d, c)
        shapes[f"linears.{step}.weight"] = (config.card, d)
        if step:
            shapes[f"depformer_emb.{step - 1}.weight"] = (config.card + 1, d)
    shapes["depformer_text_emb.weight"] = (config.text_card + 1, d)
    for layer in range(config.depth_layers):
        at = f"depformer.layers.{layer}"
        for step in range(steps):
            shapes |= _gated(f"{at}.gating.{step}", d, config.depth_gate)
        shapes |= _attention_and_norms(at, d, steps)
    return dict(sorted(shapes.items()))


def mimi_shapes(config: MimiConfig) -> Shapes:
    """Every tensor of the codec, fused: name -> shape."""
    c, width = config.dimension, config.filters
    shapes: Shapes = _conv("encoder.model.0.conv.conv", 1, width, config.kernel)
    at = 1
    for ratio in reversed(config.ratios):
        shapes |= _residual(f"encoder.model.{at}", width, config)
        shapes |= _conv(f"encoder.model.{at + 2}.conv.conv", width, 2 * width, 2 * ratio)
        at, width = at + 3, 2 * width
    shapes |= _conv(f"encoder.model.{at + 1}.conv.conv", width, c, config.last_kernel)
    shapes |= _conv("decoder.model.0.conv.conv", c, width, config.kernel)
    at = 2
    for ratio in config.ratios:
        name = f"decoder.model.{at}.convtr.convtr"
        shapes[f"{name}.weight"] = (width, width // 2, 2 * ratio)
        shapes[f"{name}.bias"] = (width // 2,)
        at, width = at + 3, width // 2
        shapes |= _residual(f"decoder.model.{at - 2}", width, config)
    shapes |= _conv(f"decoder.model.{at}.conv.conv", width, 1, config.last_kernel)
    for side in ("encoder", "decoder"):
        for layer in range(config.layers):
            shapes |= _codec_layer(f"{side}_transformer.transformer.layers.{layer}", config)
    shapes["downsample.conv.conv.conv.weight"] = (c, c, 2 * config.downsample)
    shapes["upsample.convtr.convtr.convtr.weight"] = (c, 1, 2 * config.downsample)
    for half, levels in (("first", 1), ("rest", config.codebooks - 1)):
        q = f"quantizer.rvq_{half}"
        shapes[f"{q}.input_proj.weight"] = (config.codebook_dimension, c, 1)
        shapes[f"{q}.output_proj.weight"] = (c, config.codebook_dimension, 1)
        for level in range(levels):
            book = f"{q}.vq.layers.{level}._codebook"
            shapes[f"{book}.embedding_sum"] = (config.bins, config.codebook_dimension)
            shapes[f"{book}.cluster_usage"] = (config.bins,)
            shapes[f"{book}._initialized"] = (1,)
    return dict(sorted(shapes.items()))


def split_shapes(shapes: Mapping[str, Shape], config: LmConfig | MimiConfig) -> Shapes:
    """The same tensors under split names, in the order of `shapes`."""
    split: Shapes = {}
    for name, shape in shapes.items():
        base, many = split_base(name)
        if not many:
            split[name] = shape
            continue
        stepped = isinstance(config, LmConfig) and name.startswith("depformer.")
        parts = config.depth_codebooks if isinstance(config, LmConfig) and stepped else 1
        for part in range(parts):
            split[f"{base}{many}.{part}.weight"] = (shape[0] // parts, *shape[1:])
    return split


def split_base(name: str) -> tuple[str, str]:
    """``...self_attn.`` and ``in_projs`` or ``out_projs``; "" where a tensor is never split."""
    for whole, many in (("in_proj_weight", "in_projs"), ("out_proj.weight", "out_projs")):
        base = name.removesuffix(whole)
        if base != name and base.endswith(".self_attn."):
            return base, many
    return name, ""


def values(shapes: Mapping[str, Shape]) -> int:
    """How many numbers all these tensors hold: the parameters."""
    return sum(prod(shape) for shape in shapes.values())


def _gated(at: str, features: int, gate: int) -> Shapes:
    return {
        f"{at}.linear_in.weight": (2 * gate, features),
        f"{at}.linear_out.weight": (features, gate),
    }


def _attention_and_norms(at: str, features: int, steps: int) -> Shapes:
    return {
        f"{at}.self_attn.in_proj_weight": (steps * 3 * features, features),
        f"{at}.self_attn.out_proj.weight": (steps * features, features),
        f"{at}.norm1.alpha": (1, 1, features),
        f"{at}.norm2.alpha": (1, 1, features),
    }


def _conv(at: str, inputs: int, outputs: int, kernel: int) -> Shapes:
    return {f"{at}.weight": (outputs, inputs, kernel), f"{at}.bias": (outputs,)}


def _residual(at: str, width: int, config: MimiConfig) -> Shapes:
    hidden = width // config.compress
    return _conv(f"{at}.block.1.conv.conv", width, hidden, config.residual_kernel) | _conv(
        f"{at}.block.3.conv.conv", hidden, width, 1
    )


def _codec_layer(at: str, config: MimiConfig) -> Shapes:
    c = config.dimension
    shapes: Shapes = {
        f"{at}.self_attn.in_proj_weight": (3 * c, c),
        f"{at}.self_attn.out_proj.weight": (c, c),
        f"{at}.linear1.weight": (config.feedforward, c),
        f"{at}.linear2.weight": (c, config.feedforward),
    }
    for which in ("1", "2"):
        shapes[f"{at}.norm{which}.weight"] = (c,)
        shapes[f"{at}.norm{which}.bias"] = (c,)
        shapes[f"{at}.layer_scale_{which}.scale"] = (c,)
    return shapes


# What a file holds.


def refuse_foreign(file: str, names: Iterable[str]) -> None:
    """Raise CheckpointError if the names are those of another program's layout."""
    every = list(names)
    for pattern, what in FOREIGN:
        found = [name for name in every if pattern.fullmatch(name)]
        if found:
            raise CheckpointError(
                f"{file} holds {what} ({len(found)} tensors, such as {found[0]}). "
                f"Published: {PUBLISHED}."
            )


def gather(file: str, shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Our name -> the file's names of its parts, in step order; one part where it is whole.

    Raises CheckpointError if a tensor is there under two names.
    """
    parts: dict[str, dict[int, str]] = {}
    for name in shapes:
        whole, part = _whole(name)
        held = parts.setdefault(whole, {})
        if part in held:
            raise CheckpointError(
                f"{file} holds {whole} twice, as {held[part]} and {name}; remove one of them."
            )
        held[part] = name
    gathered: dict[str, list[str]] = {}
    for whole, held in parts.items():
        if WHOLE in held and len(held) > 1:
            both = f"{held[WHOLE]} and {held[max(held)]}"
            raise CheckpointError(f"{file} holds {whole} twice, as {both}; remove one of them.")
        gathered[whole] = [held[part] for part in sorted(held)]
    return gathered


WHOLE = -1
"""Stands for a step's number where a tensor is not split."""


def _whole(name: str) -> tuple[str, int]:
    for pattern, whole in SPLIT:
        match = pattern.fullmatch(name)
        if match:
            return match[1] + whole, int(match[2])
    for pattern, ours in ALIASES:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(ours), WHOLE
    return name, WHOLE


def resolve(
    file: str,
    found: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    config: LmConfig | MimiConfig,
) -> dict[str, list[str]]:
    """Our name -> the file's names, when the file holds exactly what the model needs.

    Raises CheckpointError with the first five missing, unknown or misshapen tensors.
    """
    gathered = gather(file, found)
    in_parts = split_shapes(wanted, config)
    missing: list[str] = []
    misshapen: list[str] = []
    for name, shape in wanted.items():
        names = gathered.get(name)
        if names is None:
            missing.append(name)
        elif _whole(names[0])[1] == WHOLE:
            misshapen += _differs(names[0], shape, found)
        else:
            base, many = split_base(name)
            expected = {n: s for n, s in in_parts.items() if n.startswith(f"{base}{many}.")}
            missing += sorted(set(expected) - set(names))
            for part in names:
                if part in expected:
                    misshapen += _differs(part, expected[part], found)
    unknown = [name for whole in sorted(set(gathered) - set(wanted)) for name in gathered[whole]]
    unknown += [
        part
        for name in wanted
        for part in gathered.get(name, [])
        if _whole(part)[1] != WHOLE and part not in in_parts
    ]
    complaints = [
        f"lacks {_listed(missing)} of the {len(wanted)} tensors of this model" if missing else "",
        f"holds {_listed(unknown)} tensors this model does not have" if unknown else "",
        f"holds {_listed(misshapen)} tensors of the wrong shape" if misshapen else "",
    ]
    if any(complaints):
        raise CheckpointError(
            f"{file} " + "; it ".join(filter(None, complaints)) + f". duplexbox reads {PUBLISHED}."
        )
    return {name: gathered[name] for name in wanted}


def _differs(name: str, expected: Shape, found: Mapping[str, Shape]) -> Iterator[str]:
    if found[name] != expected:
        yield f"{name} (expected {list(expected)}, found {list(found[name])})"


def _listed(names: list[str]) -> str:
    """ "7 (a, b, c, d, e, ...)": how many, and the first five."""
    return f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


# What the shapes tell of the model.


def whole_shapes(file: str, shapes: Mapping[str, Shape]) -> Shapes:
    """Our name -> shape of the whole tensor, split parts added up."""
    return {
        name: (sum(shapes[part][0] for part in parts if shapes[part]), *shapes[parts[0]][1:])
        if shapes[parts[0]]
        else ()
        for name, parts in gather(file, shapes).items()
    }


def infer_lm(file: str, shapes: Mapping[str, Shape], delays: tuple[int, ...]) -> LmConfig:
    """The language model these tensors belong to, with all depth steps the file has.

    shapes: as `whole_shapes` gives them. Heads follow from the published head sizes; context is
    left at its default. Raises CheckpointError if a tensor that tells a number is not there.
    """
    text_rows, c = _told(file, shapes, "text_emb.weight", 2)
    audio_rows, _ = _told(file, shapes, "emb.0.weight", 2)
    gate2, _ = _told(file, shapes, "transformer.layers.0.gating.linear_in.weight", 2)
    d, _ = _told(file, shapes, "depformer_in.0.weight", 2)
    depth_gate2, _ = _told(file, shapes, "depformer.layers.0.gating.0.linear_in.weight", 2)
    steps = max(
        _count(shapes, r"linears\.(\d{1,6})\..*"), _count(shapes, r"depformer_in\.(\d{1,6})\..*")
    )
    return LmConfig(
        dimension=c,
        layers=_count(shapes, r"transformer\.layers\.(\d{1,6})\..*"),
        heads=max(1, c // HEAD_FEATURES),
        feedforward=_feedforward(c, gate2 // 2),
        text_card=text_rows - 1,
        card=audio_rows - 1,
        delays=delays,
        depth_codebooks=steps,
        depth_dimension=d,
        depth_layers=_count(shapes, r"depformer\.layers\.(\d{1,6})\..*"),
        depth_heads=max(1, d // DEPTH_HEAD_FEATURES),
        depth_feedforward=_feedforward(d, depth_gate2 // 2),
    )


def infer_mimi(file: str, shapes: Mapping[str, Shape], codebooks_used: int) -> MimiConfig:
    """The codec these tensors belong to. Sample rate and context are the published ones."""
    filters, _, kernel = _told(file, shapes, "encoder.model.0.conv.conv.weight", 3)
    hidden, _, residual = _told(file, shapes, "encoder.model.1.block.1.conv.conv.weight", 3)
    c, _, resample = _told(file, shapes, "downsample.conv.conv.conv.weight", 3)
    at, ratios = 2, []
    while f"decoder.model.{at}.convtr.convtr.weight" in shapes:
        ratios.append(_told(file, shapes, f"decoder.model.{at}.convtr.convtr.weight", 3)[2] // 2)
        at += 3
    _, _, last_kernel = _told(file, shapes, f"decoder.model.{at}.conv.conv.weight", 3)
    layer = "encoder_transformer.transformer.layers.0"
    feedforward, _ = _told(file, shapes, f"{layer}.linear1.weight", 2)
    book = "quantizer.rvq_first.vq.layers.0._codebook.embedding_sum"
    bins, features = _told(file, shapes, book, 2)
    levels = _count(shapes, r"quantizer\.rvq_rest\.vq\.layers\.(\d{1,6})\..*")
    return MimiConfig(
        filters=filters,
        dimension=c,
        ratios=tuple(ratios),
        downsample=resample // 2,
        kernel=kernel,
        last_kernel=last_kernel,
        residual_kernel=residual,
        compress=max(1, filters // max(1, hidden)),
        layers=_count(shapes, r"encoder_transformer\.transformer\.layers\.(\d{1,6})\..*"),
        heads=max(1, c // MIMI_HEAD_FEATURES),
        feedforward=feedforward,
        codebook_dimension=features,
        bins=bins,
        codebooks=1 + levels,
        codebooks_used=codebooks_used,
    )


def _told(file: str, shapes: Mapping[str, Shape], name: str, rank: int) -> Shape:
    """Shape of a tensor that tells a number of the model."""
    shape = shapes.get(name)
    if shape is None:
        raise CheckpointError(
            f"{file} lacks {name}, so it is not a checkpoint duplexbox knows. Its {len(shapes)} "
            f"tensors: {_listed(sorted(shapes))}. It reads {PUBLISHED}."
        )
    if len(shape) != rank or 0 in shape:
        raise CheckpointError(
            f"{file} holds {name} with shape {list(shape)}; {rank} axes are expected. "
            f"duplexbox reads {PUBLISHED}."
        )
    return shape


def _count(shapes: Mapping[str, Shape], pattern: str) -> int:
    """One more than the largest number in the names; never more than there are names."""
    found = [int(match[1]) for name in shapes if (match := re.fullmatch(pattern, name))]
    return min(1 + max(found, default=-1), len(shapes))


def _feedforward(features: int, gate: int) -> int:
    """The feed-forward width of the configuration whose gate is this wide."""
    for feedforward in (4 * features, (3 * gate + 1) // 2):
        if gate_features(features, feedforward) == gate:
            return feedforward
    return (3 * gate + 1) // 2
