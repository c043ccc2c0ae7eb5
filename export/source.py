"""What a bundle is made from: a model's modules, its words, and a record of what they came from.

A `Source` is either a small model whose weights come from a seed, in memory, or a checkpoint
folder, whose language model stays on the disk (`hollow`). Everything after it treats both alike.

The language model has the precision that was asked for, or the one it is stored in; the codec is
always float32, because one flipped argmin changes what is heard.

Not here: reading checkpoints (`checkpoint`), writing bundles (`build`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engines.bundle import Dtype, Manifest
from export import checkpoint, tiny
from export.checkpoint import Checkpoint
from export.checkpoint_file import CheckpointError
from export.checkpoint_text import read_pieces
from export.hollow import Hollow, hollow_lm, nothing_hollow
from export.mistake import Mistake
from export.models.config import ModelConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.models.streaming import TORCH_DTYPES

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS = ("float32", "bfloat16", "float16")

SEEDED = tuple(tiny.MODELS)

UNTRAINED = "untrained: weights from a seed ({seed}); its voice and its words are noise"
LICENCES = {
    "moshi": "Moshi weights: CC-BY 4.0, Kyutai",
    "personaplex": "PersonaPlex weights: NVIDIA Open Model License",
}


class SourceError(Mistake):
    """What was named is no model that can be exported; the operator's fault."""


@dataclass(frozen=True)
class Source:
    """One model, ready to be exported."""

    config: ModelConfig
    mimi: Mimi
    lm: LanguageModel
    """Its matrices may be hollow."""
    hollow: Hollow
    dtype: Dtype
    """Of the language model's matrices, keys and values."""
    pieces: tuple[str, ...]
    trained: bool
    notice: str
    made_from: dict[str, str]
    """What a second build compares, to know whether anything changed. No paths."""
    named: Callable[[], Iterator[tuple[str, Tensor]]] = field(repr=False)
    """Every tensor as the checkpoint has it, "lm." or "mimi." before its name, one at a time."""
    tokenizer: Path | None = None
    halved: bool = False
    """Weights are rounded to float16 and stored as that, whatever is computed in."""

    @property
    def parameters(self) -> int:
        return tiny.parameters(self.mimi) + tiny.parameters(self.lm)

    def checkpoint_sha256(self) -> str:
        """Hash over names, dtypes, shapes and values of all tensors, whatever file held them."""
        return sha256_of(self.named())


def from_seed(name: str, seed: int, dtype: Precision | None = None, *, pinned: int = 0) -> Source:
    """A small model by name (`tiny.MODELS`). Raises SourceError when there is none."""
    if name not in tiny.MODELS:
        raise SourceError(
            f"{name} is neither a folder nor a seeded model ({', '.join(sorted(tiny.MODELS))}). "
            "Name a checkpoint's folder, or make one: duplexbox export seed-checkpoint moshiko"
        )
    config = _pin(tiny.MODELS[name], pinned)
    mimi, lm = tiny.seeded(config, seed)
    made_from = {"model": name, "seed": str(seed)}
    notice = UNTRAINED.format(seed=seed)
    source = from_modules(config, mimi, lm, dtype, pieces=tiny.pieces(config), notice=notice)
    return replace(source, made_from=source.made_from | made_from)


def from_modules(
    config: ModelConfig,
    mimi: Mimi,
    lm: LanguageModel,
    dtype: Precision | None = None,
    *,
    pieces: tuple[str, ...],
    trained: bool = False,
    notice: str = "",
) -> Source:
    """A model that is in memory; ``lm`` is copied when it must be cast."""
    stored = dict(lm.state_dict())
    if dtype is not None and dtype != "float32":
        cast = LanguageModel(config.lm, ring_dtype=dtype)
        cast.load_state_dict(stored)
        lm = cast.to(TORCH_DTYPES[dtype]).eval()
    return Source(
        config=config,
        mimi=mimi,
        lm=lm,
        hollow=nothing_hollow(),
        dtype=dtype or "float32",
        pieces=pieces,
        trained=trained,
        notice=notice,
        made_from={
            "dtype": dtype or "float32",
            "context": str(config.lm.context),
            "pinned": str(config.lm.pinned),
        },
        named=lambda: _prefixed(sorted(mimi.state_dict().items()), sorted(stored.items())),
    )


def from_checkpoint(found: Checkpoint, dtype: Precision | None = None) -> Source:
    """A checkpoint folder. Raises CheckpointError when its tokenizer is missing or another's."""
    if found.text_tokenizer is None:
        raise CheckpointError(
            f"{found.folder} has no SentencePiece model, so nobody could read what it says. "
            f"Put tokenizer_spm_32k_3.model of the same checkpoint into {found.folder}."
        )
    pieces = read_pieces(found.text_tokenizer, found.config.lm.text_card)
    stored = found.dtype if found.dtype in PRECISIONS else "float32"
    kind: Dtype = dtype or stored  # type: ignore[assignment]
    lm, hollow = hollow_lm(found.config.lm, kind, found.lm.tensor)
    notice = LICENCES[found.family]
    if found.untrained:
        notice = UNTRAINED.format(seed=found.untrained)
    return Source(
        config=found.config,
        mimi=_codec(found),
        lm=lm,
        hollow=hollow,
        dtype=kind,
        pieces=pieces,
        trained=not found.untrained,
        notice=notice,
        made_from={
            "tokenizer": hashlib.sha256(found.text_tokenizer.read_bytes()).hexdigest(),
            "dtype": kind,
            "context": str(found.config.lm.context),
            "pinned": str(found.config.lm.pinned),
        },
        named=lambda: _prefixed(found.mimi.tensors(), found.lm.tensors()),
        tokenizer=found.text_tokenizer,
    )


def open_source(
    model: str,
    *,
    seed: int = 0,
    dtype: Precision | None = None,
    context: int | None = None,
    pinned: int = 0,
) -> Source:
    """``model``: a folder, or the name of a seeded model. pinned: first ticks attention keeps.

    Raises SourceError, CheckpointError.
    """
    if model in tiny.MODELS:
        if context is not None:
            raise SourceError(
                f"--context changes a checkpoint's window; the seeded model {model} has its own "
                f"({tiny.MODELS[model].lm.context}). Leave it out"
            )
        return from_seed(model, seed, dtype, pinned=pinned)
    if not Path(model).exists():
        return from_seed(model, seed, dtype)  # says what there is
    from export.pocket import finished  # which makes sources itself

    if finished.is_checkpoint(Path(model)):
        return finished.open_checkpoint(Path(model))
    found = checkpoint.open_checkpoint(Path(model), context=context)
    return from_checkpoint(replace(found, config=_pin(found.config, pinned)), dtype)


def open_like(model: str, manifest: Manifest, *, seed: int = 0) -> Source:
    """What ``manifest`` was built from, opened the way it was then: same precision and context.

    Raises SourceError, CheckpointError.
    """
    given = manifest.made_from
    if "dtype" not in given or "context" not in given:
        raise SourceError(
            "the bundle does not say what it was made from (it is older than `verify`). "
            "Build it again: duplexbox export build --help"
        )
    dtype: Precision = given["dtype"]  # type: ignore[assignment]
    context = None if model in tiny.MODELS else int(given["context"])
    pinned = int(given.get("pinned", "0"))
    return open_source(model, seed=seed, dtype=dtype, context=context, pinned=pinned)


def _pin(config: ModelConfig, pinned: int) -> ModelConfig:
    """``config`` with the first ``pinned`` ticks of a call kept out of its window's turning."""
    if not 0 <= pinned < config.lm.context:
        raise SourceError(
            f"--pin-persona {pinned}: the window of {config.name} is {config.lm.context} ticks, "
            f"and some of it must be left to the call. Name 0 to {config.lm.context - 1}"
        )
    return replace(config, lm=replace(config.lm, pinned=pinned))


def sha256_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash over (name, tensor) pairs, in the order they come."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _prefixed(
    mimi: Iterable[tuple[str, Tensor]], lm: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for part, tensors in (("mimi", mimi), ("lm", lm)):
        for name, tensor in tensors:
            yield f"{part}.{name}", tensor


def _codec(found: Checkpoint) -> Mimi:
    with torch.device("meta"):
        mimi = Mimi(found.config.mimi)
    state = {name: tensor.float().clone() for name, tensor in found.mimi.tensors()}
    mimi.load_state_dict(state, assign=True)
    mimi.quantizer.prepare()
    return mimi.eval().requires_grad_(False)
