"""A checkpoint's config.json: what of it is read, and what it must not say.

Published folders have a full one, a minimal one or none. Shapes tell most of a model; this file
adds what leaves no trace in them (heads, context, delays), refuses settings that would make the
model compute something else, and holds the rest against what the tensors say.

Not here: the tensors (`checkpoint`).
"""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from export.checkpoint_file import CheckpointError
from export.checkpoint_layout import PUBLISHED
from export.models.config import DELAYS, LmConfig, gate_features

LM_FILE = "model.safetensors"  # loaders.py: MOSHI_NAME
MIMI_FILE = "tokenizer-e351c8d8-checkpoint125.safetensors"  # loaders.py: MIMI_NAME
TEXT_FILE = "tokenizer_spm_32k_3.model"  # loaders.py: TEXT_TOKENIZER_NAME
CONFIG_FILE = "config.json"

LONGEST_CONTEXT = 1 << 20
"""Ticks; a day of 80 ms each. Float32 counts positions exactly up to sixteen times as many."""
LONGEST_DELAY = 1 << 10
"""Ticks; published models delay by one, or a few dozen."""
LARGEST_SCALE = 1 << 10
"""A feed-forward layer is about four times as wide as the model."""

PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".th"}


class PublishedConfig(msgspec.Struct, frozen=True):
    """The fields of a published config.json that are read; the others are ignored.

    Missing means: as the tensors say, or as loaders.py of moshi 0.2.13 has it for Moshi 7B.
    """

    moshi_name: str = LM_FILE
    mimi_name: str = MIMI_FILE
    tokenizer_name: str = TEXT_FILE
    model_type: str = "moshi"
    context: Annotated[int, Meta(ge=3, le=LONGEST_CONTEXT)] | None = None
    delays: tuple[Annotated[int, Meta(ge=0, le=LONGEST_DELAY)], ...] = DELAYS
    num_heads: Annotated[int, Meta(ge=1)] | None = None
    depformer_num_heads: Annotated[int, Meta(ge=1)] | None = None
    existing_text_padding_id: int = 3
    dim: int | None = None
    num_layers: int | None = None
    hidden_scale: Annotated[float, Meta(gt=0, le=LARGEST_SCALE)] | None = None
    n_q: int | None = None
    dep_q: int | None = None
    card: int | None = None
    text_card: int | None = None
    depformer_dim: int | None = None
    depformer_num_layers: int | None = None
    depformer_dim_feedforward: int | None = None


ONLY = {
    "norm": ("rms_norm_f32",),
    "gating": ("silu",),
    "positional_embedding": ("rope",),
    "max_period": (10_000,),
    "causal": (True,),
    "layer_scale": (None,),
    "kv_repeat": (1,),
    "cross_attention": (False,),
    "depformer_gating": ("silu",),
    "depformer_pos_emb": ("none",),
    "depformer_layer_scale": (None,),
    "depformer_multi_linear": (True,),
    "depformer_weights_per_step": (True,),
    "depformer_weights_per_step_schedule": (None,),
    "depformer_low_rank_embeddings": (None,),
    "demux_second_stream": (False, None),
    "demux_second_text_stream": (False, None),
    "conditioners": (None, {}),
    "fuser": (None, {}),
    "quantize": (False, None),
    "lora": (False, None),
    "lora_name": (None,),
    "mimi_config_name": (None,),
}
"""Fields that change what is computed without leaving a trace in the shapes -> what is run."""

OTHER_MODELS = {"hibiki", "stt", "tts"}


def read_config(folder: Path) -> PublishedConfig:
    """The folder's config.json, or what it would say if it has none. Raises CheckpointError."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        _refuse_no_folder(folder)
    if not os.path.lexists(path):
        return PublishedConfig()
    if not path.is_file():
        raise CheckpointError(f"{path} is no file, or links to none. Fetch it again, or remove it.")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        published = msgspec.convert(raw, PublishedConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise CheckpointError(f"{path}: {err}. Fetch it again, or remove it.") from None
    if published.model_type in OTHER_MODELS:
        raise CheckpointError(
            f"{path} is of a {published.model_type} model; duplexbox runs full-duplex ones: "
            f"{PUBLISHED}."
        )
    for field, allowed in ONLY.items():
        if field in raw and raw[field] not in allowed:
            raise CheckpointError(
                f"{path} has {field} = {raw[field]!r}; duplexbox runs {allowed[0]!r} only. "
                f"It reads {PUBLISHED}."
            )
    return published


def _refuse_no_folder(path: Path) -> None:
    if path.suffix in PICKLES:
        raise CheckpointError(pickled(path.parent, [path.name]))
    if path.is_file():
        raise CheckpointError(f"{path} is a file; name the folder that holds it: {path.parent}")
    raise CheckpointError(f"{path} is not a folder. Download {PUBLISHED} and name its folder.")


def check_config(path: Path, published: PublishedConfig, config: LmConfig) -> None:
    """What config.json says and what the tensors say must be the same model."""
    scale = published.hidden_scale
    gate = scale and gate_features(config.dimension, int(scale * config.dimension))
    depth_gate = published.depformer_dim_feedforward and gate_features(
        config.depth_dimension, published.depformer_dim_feedforward
    )
    pairs = {
        "dim": (published.dim, config.dimension),
        "num_layers": (published.num_layers, config.layers),
        "hidden_scale, hence the gate's width": (gate, config.gate),
        "n_q": (published.n_q, config.audio_streams),
        "dep_q": (published.dep_q, config.depth_codebooks),
        "card": (published.card, config.card),
        "text_card": (published.text_card, config.text_card),
        "depformer_dim": (published.depformer_dim, config.depth_dimension),
        "depformer_num_layers": (published.depformer_num_layers, config.depth_layers),
        "depformer_dim_feedforward, hence the gate's width": (depth_gate, config.depth_gate),
    }
    for field, (says, is_) in pairs.items():
        if says is not None and says != is_:
            raise CheckpointError(
                f"{path.parent / CONFIG_FILE} says {field} = {says}, the tensors of {path.name} "
                f"say {is_}: they belong to different checkpoints. Fetch both from the same place."
            )
    padding = config.text_padding_id
    if not 0 <= padding < config.text_card:
        raise CheckpointError(
            f"{path.parent / CONFIG_FILE} says existing_text_padding_id = {padding}, the tensors "
            f"of {path.name} say {config.text_card} text ids: they belong to different "
            "checkpoints. Fetch both from the same place."
        )
    for what, width, heads in (
        ("num_heads", config.dimension, config.heads),
        ("depformer_num_heads", config.depth_dimension, config.depth_heads),
    ):
        if heads < 1 or width % (2 * heads):
            raise CheckpointError(
                f"{path}: {heads} heads do not divide a width of {width} into even parts. "
                f"Say how many there are in {CONFIG_FILE}: {what}"
            )


def pickled(folder: Path, names: list[str]) -> str:
    return (
        f"{folder} holds pickled weights ({', '.join(names[:5])}), and nothing is ever unpickled. "
        "Use the safetensors file of the same checkpoint."
    )
