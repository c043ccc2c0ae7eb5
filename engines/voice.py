"""A voice as a bundle carries it: frames of it speaking, and sometimes what they embed to.

    voices/NAME.safetensors   frames    (T, streams) int64        what everybody says, undelayed
                              embedded  (E, C) the model's dtype   fed instead of positions 0..E-1

A voice made from a recording has no embeddings, E = 0. One that was published as embeddings has
E = T - 1, and of its frames only the last two are known: those that reach beyond position E.

Not here: making voices (`export.prompt`), who may ask for which (`bundle.PromptSpec.voices`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines import tensor_file
from engines.bundle import Bundle, BundleError, PromptSpec, VoiceSpec
from engines.tensor_file import TensorFileError


def read_voice(
    bundle: Bundle, spec: PromptSpec, voice: VoiceSpec
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """frames (T, streams) int64 and embedded (E, C). Raises `BundleError`."""
    path = bundle.file(voice.file)
    (wanted,) = (t for t in spec.prefill.inputs if t.name == "embedded")
    try:
        tensors, _ = tensor_file.decode(memoryview(path.read_bytes()))
    except (OSError, TensorFileError) as err:
        raise BundleError(f"{path}: not a voice: {err}. {REMEDY}") from None
    if sorted(tensors) != ["embedded", "frames"]:
        raise BundleError(f"{path}: not a voice: it holds {sorted(tensors)}. {REMEDY}")
    frames, embedded = tensors["frames"], tensors["embedded"]
    streams = len(spec.delays)
    if frames.dtype != "int64" or frames.array.shape != (voice.frames, streams):
        raise BundleError(
            f"{path}: frames are {frames.dtype} {list(frames.array.shape)}, not int64 "
            f"{[voice.frames, streams]}. {REMEDY}"
        )
    if embedded.dtype != wanted.dtype or embedded.array.shape[1:] != wanted.row_shape:
        raise BundleError(
            f"{path}: embedded is {embedded.dtype} {list(embedded.array.shape)}; the model is "
            f"{wanted.dtype} and {wanted.row_shape[0]} wide. {REMEDY}"
        )
    if not len(embedded.array) < max(voice.frames, 1):
        raise BundleError(f"{path}: {len(embedded.array)} embeddings for {voice.frames} frames")
    return frames.array, embedded.array


REMEDY = "Build the bundle again with its voices: duplexbox export build --help"
