"""A published checkpoint folder, opened: which model it is, and its tensors by our names.

    model.safetensors                             the language model
    tokenizer-e351c8d8-checkpoint125.safetensors  Mimi
    tokenizer_spm_32k_3.model                     text pieces; optional here
    config.json                                   optional: heads, context, delays

`open_checkpoint` finds the files, refuses what it cannot export in one sentence with a way out,
reads the model's numbers off the tensors' shapes and holds them against config.json where there
is one. PersonaPlex has 16 depth steps; the last 8 guess what the caller says and are always
overwritten, so they are checked, then cut. Nothing is loaded: a tensor is mapped when asked for,
and `Weights.sources` says where it lies, so that a bundle can point into the checkpoint.

Not here: the format of a file (`checkpoint_file`), names and shapes (`checkpoint_layout`), what
config.json may say (`checkpoint_config`), PersonaPlex's voices (`checkpoint_voice`), making a
checkpoint from a seed (`seed`).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from export import checkpoint_layout as layout
from export.checkpoint_config import (
    CONFIG_FILE,
    LONGEST_CONTEXT,
    PICKLES,
    PublishedConfig,
    check_config,
    pickled,
    read_config,
)
from export.checkpoint_file import CheckpointError, Source, TensorFile, read
from export.checkpoint_layout import PUBLISHED, Shapes
from export.models.config import (
    MOSHI_7B,
    PERSONAPLEX_7B,
    LmConfig,
    MimiConfig,
    ModelConfig,
    PromptConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

UNTRAINED = "duplexbox.untrained"
"""Key in a file's metadata that says its weights come from a seed (`seed` writes it)."""

FLOATS = {"bfloat16", "float16", "float32"}
SAMPLE_BYTES = 4096
"""Of each tensor's beginning, in the fingerprint that does not read everything."""
READ_BYTES = 1 << 20

Family = Literal["moshi", "personaplex"]


class Weights:
    """The tensors of one model under its modules' names, mapped from a file one at a time."""

    def __init__(self, file: TensorFile, names: Mapping[str, list[str]], shapes: Shapes) -> None:
        """names: ours -> the file's, in step order; shapes: ours, as the modules have them."""
        self.file, self.shapes = file, shapes
        self._names = names

    @property
    def values(self) -> int:
        """How many numbers the modules take; a file with more depth steps holds more."""
        return layout.values(self.shapes)

    def sources(self, name: str) -> tuple[Source, ...]:
        """Where the tensor lies: one place, or in the split layout one per depth step.

        A single source can be pointed at where it is; several have to be joined, rows first.
        """
        rows_left = self.shapes[name][0]
        found = []
        for part in self._names[name]:
            source = self.file.tensors[part]
            if not rows_left:
                break
            rows = min(rows_left, source.shape[0])
            found.append(source if rows == source.shape[0] else source.leading(rows))
            rows_left -= rows
        assert not rows_left, (name, rows_left)
        return tuple(found)

    def tensor(self, name: str) -> "Tensor":
        """The tensor, in the file's dtype; mapped where it lies in one place, else a copy."""
        import torch

        parts = [read(source) for source in self.sources(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensors(self) -> Iterator[tuple[str, "Tensor"]]:
        """Every tensor in turn, by our name; drop one before taking the next to stay small."""
        for name in self.shapes:
            yield name, self.tensor(name)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a bundle records of the checkpoint it was made from."""

    sha256: str
    covers: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that can be exported."""

    folder: Path
    family: Family
    config: ModelConfig
    lm: Weights
    mimi: Weights
    depth_steps_in_file: int
    parameters_in_file: int
    """Of the language model, the depth steps that are cut included."""
    dtype: str
    """Of most of the language model's values."""
    split: bool
    """Attention comes as one matrix per depth step (`checkpoint_layout`)."""
    untrained: str | None
    """Which seed, if the weights are random."""
    text_tokenizer: Path | None

    def fingerprint(self, content: bool = False) -> Fingerprint:
        """sha256 of both files' size, header and content; file names do not count.

        content: read every byte, some seconds per gigabyte; else only the beginning of every
        tensor, which tells apart any two checkpoints that were trained or seeded apart.
        """
        digest = hashlib.sha256()
        for role, weights in (("lm", self.lm), ("mimi", self.mimi)):
            file = weights.file
            digest.update(f"{role} {file.bytes} {file.header_bytes}\n".encode())
            digest.update(file.raw_header)
            with file.path.open("rb") as stream:
                for source in file.tensors.values():
                    stream.seek(source.offset)
                    left = source.length if content else min(source.length, SAMPLE_BYTES)
                    while left:
                        read_now = stream.read(min(left, READ_BYTES))
                        if not read_now:
                            raise CheckpointError(f"{file.path} became shorter while it was read.")
                        digest.update(read_now)
                        left -= len(read_now)
        covers = "every byte" if content else f"headers, sizes, {SAMPLE_BYTES} bytes of each tensor"
        return Fingerprint(digest.hexdigest(), covers)


def open_checkpoint(
    folder: Path, *, mimi: Path | None = None, context: int | None = None
) -> Checkpoint:
    """Find, check and describe the checkpoint in ``folder``.

    mimi: the codec's file, if it is not in the folder. context: ticks attention sees, instead
    of what config.json or the published model says. Raises CheckpointError.
    """
    try:
        return _open(folder, mimi, context)
    except OSError as err:
        raise CheckpointError(f"{folder} cannot be read: {err.strerror or err}") from None


def _open(folder: Path, mimi: Path | None, context: int | None) -> Checkpoint:
    published = read_config(folder)
    lm_file = TensorFile(_lm_path(folder, published))
    config, names = _read_lm(lm_file, published)
    file_steps, parameters = config.depth_codebooks, layout.values(layout.lm_shapes(config))
    family: Family = "moshi"
    if file_steps == config.audio_streams and file_steps % 2 == 0:
        family = "personaplex"
        config = replace(config, depth_codebooks=file_steps // 2)
    config = replace(config, context=_context(family, published, context))
    mimi_file = TensorFile(mimi or _mimi_path(folder, published))
    mimi_config, mimi_names = _read_mimi(mimi_file, config)
    tokenizer = folder / published.tokenizer_name
    return Checkpoint(
        folder=folder,
        family=family,
        config=ModelConfig(
            name=_name(family, config),
            mimi=mimi_config,
            lm=config,
            prompt=_prompt(mimi_config) if family == "personaplex" else None,
        ),
        lm=Weights(lm_file, names, layout.lm_shapes(config)),
        mimi=Weights(mimi_file, mimi_names, layout.mimi_shapes(mimi_config)),
        depth_steps_in_file=file_steps,
        parameters_in_file=parameters,
        dtype=_dtype(lm_file),
        split=any(".in_projs." in name for name in lm_file.tensors),
        untrained=lm_file.metadata.get(UNTRAINED),
        text_tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def lines(checkpoint: Checkpoint) -> Iterator[str]:
    """What was detected, for a person."""
    lm, mimi = checkpoint.config.lm, checkpoint.config.mimi
    steps = f"dep_q {checkpoint.depth_steps_in_file}"
    if checkpoint.depth_steps_in_file != lm.depth_codebooks:
        steps += f" cut to {lm.depth_codebooks}"
    names = "split" if checkpoint.split else "fused"
    seed = f", UNTRAINED ({checkpoint.untrained})" if checkpoint.untrained else ""
    yield (
        f"{checkpoint.config.name}: {steps}, {lm.streams} streams, context {lm.context:,}, "
        f"{lm.layers} layers of {lm.dimension:,} ({lm.heads} heads), depth {lm.depth_layers} of "
        f"{lm.depth_dimension:,}, {checkpoint.parameters_in_file:,} parameters, "
        f"{checkpoint.dtype}, {names} keys{seed}"
    )
    yield (
        f"mimi: {mimi.sample_rate_hz:,} Hz, {mimi.samples_per_frame:,} samples a frame, "
        f"{mimi.codebooks_used} of {mimi.codebooks} codebooks, {mimi.layers} layers of "
        f"{mimi.dimension:,}, {checkpoint.mimi.values:,} values, {_dtype(checkpoint.mimi.file)}"
    )


def _lm_path(folder: Path, published: PublishedConfig) -> Path:
    named = folder / published.moshi_name
    if named.is_file():
        return named
    every = sorted(path.name for path in folder.iterdir() if path.is_file())
    tensors = [name for name in every if name.endswith(".safetensors") and not _is_mimi(name)]
    if len(tensors) == 1:
        return folder / tensors[0]
    if tensors:
        raise CheckpointError(
            f"{folder} has no {published.moshi_name} but {len(tensors)} that could be it "
            f"({', '.join(tensors[:5])}). Name one in {CONFIG_FILE}: "
            f'"moshi_name": "{tensors[0]}"'
        )
    pickles = [name for name in every if Path(name).suffix in PICKLES]
    if pickles:
        raise CheckpointError(pickled(folder, pickles))
    other = [name for name in every if name.endswith((".gguf", ".npz"))]
    if other:
        raise CheckpointError(
            f"{folder} holds {', '.join(other[:5])}, weights converted for another program. "
            f"Use the PyTorch checkpoint: {PUBLISHED}."
        )
    raise CheckpointError(
        f"{folder} has no {published.moshi_name} ({len(every)} files in it). Download {PUBLISHED}, "
        "or make a random one: duplexbox export seed-checkpoint moshiko"
    )


def _is_mimi(name: str) -> bool:
    return name.startswith(("tokenizer", "mimi"))


def _mimi_path(folder: Path, published: PublishedConfig) -> Path:
    named = folder / published.mimi_name
    if named.is_file():
        return named
    found = sorted(path for path in folder.glob("*.safetensors") if _is_mimi(path.name))
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} that could be it ({', '.join(p.name for p in found[:5])})"
    raise CheckpointError(
        f"{folder} has no {published.mimi_name}, the codec Mimi"
        f"{', but ' + what if found else ''}. It comes with every published checkpoint: "
        f"{PUBLISHED}."
    )


def _read_lm(file: TensorFile, published: PublishedConfig) -> tuple[LmConfig, dict[str, list[str]]]:
    name, shapes = str(file.path), _shapes(file)
    layout.refuse_foreign(name, shapes)
    config = layout.infer_lm(name, layout.whole_shapes(name, shapes), published.delays)
    names = layout.resolve(name, shapes, layout.lm_shapes(config), config)
    _check_floats(file)
    config = replace(
        config,
        heads=published.num_heads or config.heads,
        depth_heads=published.depformer_num_heads or config.depth_heads,
        text_padding_id=published.existing_text_padding_id,
    )
    check_config(file.path, published, config)
    return config, names


def _read_mimi(file: TensorFile, lm: LmConfig) -> tuple[MimiConfig, dict[str, list[str]]]:
    name, shapes = str(file.path), _shapes(file)
    layout.refuse_foreign(name, shapes)
    used = lm.depth_codebooks
    config = layout.infer_mimi(name, layout.whole_shapes(name, shapes), used)
    names = layout.resolve(name, shapes, layout.mimi_shapes(config), config)
    _check_floats(file)
    if config.bins != lm.card or config.codebooks < used:
        raise CheckpointError(
            f"{name} has {config.codebooks} codebooks of {config.bins}, the language model speaks "
            f"{used} of {lm.card}: they do not belong together. Use the codec of its own folder."
        )
    return config, names


def _shapes(file: TensorFile) -> Shapes:
    return {name: source.shape for name, source in file.tensors.items()}


def _check_floats(file: TensorFile) -> None:
    odd = [name for name, source in file.tensors.items() if source.dtype not in FLOATS]
    if odd:
        raise CheckpointError(
            f"{file.path} holds {len(odd)} tensors that are not bf16, fp16 or fp32 (such as "
            f"{odd[0]}, {file.tensors[odd[0]].dtype}): quantised weights are not read. "
            f"Use the bf16 checkpoint: {PUBLISHED}."
        )


def _context(family: Family, published: PublishedConfig, asked: int | None) -> int:
    """Ticks attention sees: what was asked for, else what the model's own code does."""
    if asked is not None:
        if not 2 <= asked <= LONGEST_CONTEXT:
            raise CheckpointError(
                f"a context of {asked:,} ticks cannot be; name 2 to {LONGEST_CONTEXT:,}."
            )
        return asked
    nominal = published.context or MOSHI_7B.lm.context
    # PersonaPlex's own ring hides its oldest entry once full: one tick fewer than it says.
    hidden = MOSHI_7B.lm.context - PERSONAPLEX_7B.lm.context if family == "personaplex" else 0
    return nominal - hidden


def _prompt(mimi: MimiConfig) -> PromptConfig:
    """Codes of silence are constants of the published codec; a smaller one is asked for its own."""
    if mimi == MimiConfig():
        return PromptConfig()
    return PromptConfig(silence_codes=None, sine_codes=None)


def _dtype(file: TensorFile) -> str:
    """Of most of the values."""
    lengths: dict[str, int] = {}
    for source in file.tensors.values():
        lengths[source.dtype] = lengths.get(source.dtype, 0) + source.length
    return max(lengths, key=lambda dtype: lengths[dtype])


def _name(family: Family, config: LmConfig) -> str:
    """ "moshi-7b" for the published size, else the family and the width."""
    full = replace(MOSHI_7B.lm, context=config.context)
    if replace(config, depth_codebooks=full.depth_codebooks) == full:
        return f"{family}-7b"
    return f"{family}-{config.layers}x{config.dimension}"
