"""PersonaPlex's packaged voices: from torch's `.pt` to safetensors, once, at export.

A voice is what its prompt left behind: the temporal transformer's inputs, one row per frame, and
the last columns of the token ring.

    in   NATF2.pt            embeddings  (T, 1, 1, C)    floating point
                             cache       (1, streams, 4) int64
    out  NATF2.safetensors   embeddings  (T, C)          the same dtype
                             cache       (streams, 4)    int64

A `.pt` file is a pickle, and this is the one place that opens one: by torch's weights-only reader,
which builds tensors and plain containers and runs nothing the file names. Everything in it is
then checked, because the result is played into every call that asks for the voice.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.checkpoint_file import CheckpointError
from export.models.config import LmConfig

if TYPE_CHECKING:
    from torch import Tensor

UNGENERATED = -2  # lm.py: ungenerated_token_id; `export.models.tokens` has it too, with torch
SPARE_COLUMNS = 3  # models/lm.py of NVIDIA/personaplex: its ring has max_delay + 3 columns
LARGEST_BYTES = 256 << 20
"""More than any voice that fits the context: 3,000 rows of 4,096 in float32 are 49 MB."""

VOICES = "Use one of the voices in voices.tgz of nvidia/personaplex-7b-v1."


def convert_voice(pickled: Path, out: Path, config: LmConfig) -> int:
    """Convert one voice; returns its length in frames. Raises CheckpointError.

    config: the model it must fit. ``out`` is written whole or not at all.
    """
    from safetensors.torch import save_file

    voice = read_voice(pickled, config)
    part = out.with_name(f"{out.name}.part")
    save_file(voice, part, {"format": "pt"})
    part.rename(out)
    return voice["embeddings"].shape[0]


def read_voice(pickled: Path, config: LmConfig) -> dict[str, "Tensor"]:
    """`embeddings` (T, C) and `cache` (streams, 4) int64 of a `.pt` voice, checked."""
    import torch

    held = _load(pickled)
    keys = sorted(map(str, held)) if isinstance(held, dict) else type(held).__name__
    if keys != ["cache", "embeddings"]:
        raise CheckpointError(
            f"{pickled} is not a voice: it holds {keys}, not cache and embeddings. {VOICES}"
        )
    embeddings, cache = held["embeddings"], held["cache"]
    for name, tensor in (("embeddings", embeddings), ("cache", cache)):
        if not isinstance(tensor, torch.Tensor) or tensor.is_sparse or tensor.is_quantized:
            raise CheckpointError(f"{pickled}: {name} is not a plain tensor. {VOICES}")
    columns = config.max_delay + SPARE_COLUMNS
    frames = embeddings.shape[0] if embeddings.dim() else 0
    wanted = {
        "embeddings": (embeddings, (frames, 1, 1, config.dimension)),
        "cache": (cache, (1, config.streams, columns)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{pickled}: {name} has shape {list(tensor.shape)}, {list(shape)} is expected for "
                f"a model {config.dimension} wide. Use a voice of the same model."
            )
    if not 0 < frames < config.context:
        raise CheckpointError(
            f"{pickled} is {frames:,} frames long; it must leave room in a context of "
            f"{config.context:,}. {VOICES}"
        )
    if not embeddings.is_floating_point() or not bool(torch.isfinite(embeddings).all()):
        raise CheckpointError(
            f"{pickled}: embeddings are {embeddings.dtype} or not finite everywhere. {VOICES}"
        )
    _check_tokens(pickled, cache, config)
    return {
        "embeddings": embeddings.reshape(frames, config.dimension).contiguous(),
        "cache": cache.reshape(config.streams, columns).long().contiguous(),
    }


def _load(pickled: Path) -> Any:
    import pickle

    import torch

    try:
        size = pickled.stat().st_size
        if size > LARGEST_BYTES:
            raise CheckpointError(
                f"{pickled} is {size:,} bytes, no voice is over {LARGEST_BYTES:,}. {VOICES}"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then refuses
            return torch.load(pickled, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as err:
        raise CheckpointError(f"{pickled} cannot be read: {err.strerror or err}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as err:
        # The reader's messages advise turning its check off; that is not a remedy.
        reason = str(err).partition("\n")[0].partition(". ")[0]
        raise CheckpointError(
            f"{pickled} is damaged or holds more than tensors ({reason}), and nothing else is ever "
            f"unpickled. {VOICES}"
        ) from None


def _check_tokens(pickled: Path, cache: "Tensor", config: LmConfig) -> None:
    """Ids out of range would index past an embedding."""
    if cache.is_floating_point() or cache.is_complex():
        raise CheckpointError(f"{pickled}: cache is {cache.dtype}, not whole numbers. {VOICES}")
    for stream in range(config.streams):
        largest = config.card if stream else config.text_card
        ids = cache[0, stream]
        if int(ids.min()) < UNGENERATED or int(ids.max()) > largest:
            raise CheckpointError(
                f"{pickled}: stream {stream} of cache has ids {int(ids.min())} to "
                f"{int(ids.max())}; {UNGENERATED} to {largest} are possible. {VOICES}"
            )
