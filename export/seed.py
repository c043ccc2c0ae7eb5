"""Random checkpoints in the published layouts: real names, files and dtypes, any seed.

Parity, speed and memory can be shown on weights nobody has to download. Every tensor is random,
those training starts at zero or one included, because a test on a zero tests nothing.

Values come from `seed_values`, keyed by the fused names: a split tensor is a range of the fused
one, so both layouts hold the same numbers, and the order of writing does not matter.

How a file is written. Into `NAME.part`, in the order of its header, renamed when whole; a run
that was killed continues from what it knows to be on the disk. The header's metadata records seed,
width and generator, and a whole file with the right record is left alone.

Peak memory is a chunk, whatever the size. Not here: reading (`checkpoint`), names and shapes
(`checkpoint_layout`), text pieces (`checkpoint_text`).
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy.typing as npt

from engines.bundle import ITEMSIZE, Dtype
from export import checkpoint_layout as layout
from export.checkpoint import UNTRAINED
from export.checkpoint_config import CONFIG_FILE, LM_FILE, MIMI_FILE, TEXT_FILE
from export.checkpoint_file import LENGTH_BYTES
from export.checkpoint_text import seeded_pieces, sentencepiece_model
from export.mistake import Mistake
from export.models.config import LmConfig, MimiConfig
from export.seed_values import GENERATOR, draw

NAMES = ("moshiko", "moshika", "personaplex")
WIDTHS = ("small", "full")
LAYOUTS = ("fused", "split")

Name = Literal["moshiko", "moshika", "personaplex"]
Width = Literal["small", "full"]
Layout = Literal["fused", "split"]

SMALL_LM = LmConfig(
    dimension=256,
    layers=4,
    heads=2,
    feedforward=1056,
    context=100,
    text_card=512,
    card=256,
    depth_dimension=128,
    depth_layers=2,
    depth_heads=2,
    depth_feedforward=528,
)
"""Head sizes (128, 64) and proportions as published, so that a reader infers it like the real one;
a context short enough to wrap in seconds."""

SMALL_MIMI = MimiConfig(
    filters=8,
    dimension=128,
    layers=2,
    heads=2,
    feedforward=256,
    codebook_dimension=32,
    bins=256,
)

CHUNK = 1 << 21
"""Values made at once."""
SYNC_BYTES = 128 << 20
"""Between two syncs; a run that was killed repeats less than twice as much, a second or two."""
SPARE_BYTES = 64 << 20
"""Left free on the disk."""

Progress = Callable[[str, int, int], None]
"""(file, bytes of it written, bytes of it) -> nothing; called a few times per hundred MB."""


class SeedError(Mistake):
    """The folder or the disk does not allow writing the checkpoint; the operator's to solve."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of a file to be written."""

    name: str
    """In the file."""
    fused: str
    """The name its values are keyed by."""
    first: int
    """Place of its first value in the fused tensor."""
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One safetensors file: header, then tensors back to back."""

    name: str
    seed: int
    dtype: Dtype
    tensors: tuple[Planned, ...]
    header: bytes
    """Length prefix included."""

    @property
    def bytes(self) -> int:
        values = sum(tensor.values for tensor in self.tensors)
        return len(self.header) + values * ITEMSIZE[self.dtype]


def configs(name: Name, width: Width) -> tuple[LmConfig, MimiConfig]:
    """The models of a checkpoint, with as many depth steps as its file has."""
    lm, mimi = (LmConfig(), MimiConfig()) if width == "full" else (SMALL_LM, SMALL_MIMI)
    if name == "personaplex":
        lm = replace(lm, depth_codebooks=lm.audio_streams)
    return lm, mimi


def plan(name: Name, width: Width, seed: int, keys: Layout = "fused") -> tuple[PlannedFile, ...]:
    """The weight files of a checkpoint, down to every byte of their headers. Writes nothing."""
    lm, mimi = configs(name, width)
    about = f"seed={seed} width={width} generator={GENERATOR}"
    return (
        _plan_file(LM_FILE, layout.lm_shapes(lm), lm, seed, "bfloat16", keys, about),
        _plan_file(MIMI_FILE, layout.mimi_shapes(mimi), mimi, seed, "float32", keys, about),
    )


def write_checkpoint(
    name: Name,
    out: Path,
    *,
    width: Width,
    seed: int,
    keys: Layout = "fused",
    progress: Progress = lambda file, done, total: None,
) -> int:
    """Write, continue or recognise the checkpoint in ``out``; returns the bytes newly written.

    Raises SeedError if the folder holds something else or the disk is too small.
    """
    files = plan(name, width, seed, keys)
    lm, _ = configs(name, width)
    small = {
        TEXT_FILE: sentencepiece_model(seeded_pieces(lm.text_card)),
        CONFIG_FILE: config_json(name, width),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            _refuse_other(out / file.name, file.bytes, file.header)
        for small_name, content in small.items():
            _refuse_other(out / small_name, len(content), content)
        _check_disk(out, files)
        written = sum(_write_file(out, file, progress) for file in files)
        for small_name, content in small.items():
            _write_whole(out / small_name, content)
    except OSError as err:
        raise SeedError(
            f"{out} cannot be written: {err.strerror or err}. Run the same command again to "
            "continue, or choose another folder with -o"
        ) from None
    return written


def config_json(name: Name, width: Width) -> bytes:
    """config.json as published: minimal for PersonaPlex, complete for Moshi."""
    if name == "personaplex":
        return _json({"model_type": "personaplex", "version": "7b-v1"})
    lm, _ = configs(name, width)
    # The fields and their order are those of configs/moshi_7b_202409.json in kyutai-labs/moshi.
    return _json(
        {
            "dim": lm.dimension,
            "text_card": lm.text_card,
            "existing_text_padding_id": lm.text_padding_id,
            "n_q": lm.audio_streams,
            "dep_q": lm.depth_codebooks,
            "card": lm.card,
            "num_heads": lm.heads,
            "num_layers": lm.layers,
            "hidden_scale": lm.feedforward / lm.dimension,
            "causal": True,
            "layer_scale": None,
            "context": lm.context,
            "max_period": 10000,
            "gating": "silu",
            "norm": "rms_norm_f32",
            "positional_embedding": "rope",
            "depformer_dim": lm.depth_dimension,
            "depformer_dim_feedforward": lm.depth_feedforward,
            "depformer_num_heads": lm.depth_heads,
            "depformer_num_layers": lm.depth_layers,
            "depformer_causal": True,
            "depformer_layer_scale": None,
            "depformer_multi_linear": True,
            "depformer_context": lm.depth_codebooks,
            "depformer_max_period": 10000,
            "depformer_gating": "silu",
            "depformer_pos_emb": "none",
            "depformer_weights_per_step": True,
            "delays": list(lm.delays),
        }
    )


def _plan_file(
    name: str,
    shapes: layout.Shapes,
    config: LmConfig | MimiConfig,
    seed: int,
    dtype: Dtype,
    keys: Layout,
    about: str,
) -> PlannedFile:
    tensors = [
        Planned(part, fused, place, shape)
        for fused, whole in shapes.items()
        for part, place, shape in _parts(fused, whole, config, keys)
    ]
    tensors.sort(key=lambda tensor: tensor.name)
    spelled = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", UNTRAINED: about}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.values * ITEMSIZE[dtype]
        entries[tensor.name] = {
            "dtype": spelled,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)  # so that tensors lie on multiples of eight
    header = len(raw).to_bytes(LENGTH_BYTES, "little") + raw
    return PlannedFile(name, seed, dtype, tuple(tensors), header)


def _parts(
    fused: str, shape: tuple[int, ...], config: LmConfig | MimiConfig, keys: Layout
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name in the file, place of its first value, shape) of a tensor, or of its steps."""
    if keys == "fused":
        yield fused, 0, shape
        return
    place = 0
    for name, part in layout.split_shapes({fused: shape}, config).items():
        yield name, place, part
        place += math.prod(part)


def _chunks(file: PlannedFile, from_byte: int) -> Iterator[tuple[Planned, int, int]]:
    """(tensor, first value in it, count) from a byte of the data on."""
    begin, size = 0, ITEMSIZE[file.dtype]
    for tensor in file.tensors:
        done = max(0, from_byte - begin) // size
        while done < tensor.values:
            count = min(CHUNK, tensor.values - done)
            yield tensor, done, count
            done += count
        begin += tensor.values * size


def _values(file: PlannedFile, tensor: Planned, first: int, count: int) -> npt.NDArray[Any]:
    place = tensor.first + first
    return draw(file.seed, tensor.fused, tensor.shape, file.dtype, place, count)


def _write_file(out: Path, file: PlannedFile, progress: Progress) -> int:
    """Write what is missing of one file; returns how many bytes that was."""
    whole, part = out / file.name, out / f"{file.name}.part"
    if whole.exists():
        return 0  # `_refuse_other` has seen that it is this one
    with part.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SeedError(
                f"{part} is being written by another run. Wait for it, or choose another folder "
                "with -o"
            ) from None
        begin = _safe_bytes(stream, file)
        stream.truncate(begin)
        if begin < len(file.header):
            stream.write(file.header)
        done = max(begin, len(file.header))
        for tensor, first, count in _chunks(file, done - len(file.header)):
            stream.write(_values(file, tensor, first, count).data)
            before, done = done, done + count * ITEMSIZE[file.dtype]
            if before // SYNC_BYTES != done // SYNC_BYTES:
                stream.flush()
                os.fsync(stream.fileno())
            progress(file.name, done, file.bytes)
        stream.flush()
        os.fsync(stream.fileno())
        assert done == file.bytes, (done, file.bytes)
        part.rename(whole)
    return done - begin


def _safe_bytes(stream: IO[bytes], file: PlannedFile) -> int:
    """How much of an unfinished file can be kept; 0 if it is not this file's beginning.

    A file that reaches past a sync was written past it, so all before that sync is on the disk.
    The length alone says less: a machine that lost power may have kept it and lost the bytes.
    Syncs come with the first chunk that ends past a multiple of `SYNC_BYTES`, so the last multiple
    within the file may not have had its sync; the one before has.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if stream.read(len(file.header)) != file.header:
        return 0
    safe = (size // SYNC_BYTES - 1) * SYNC_BYTES
    return safe if safe >= len(file.header) else 0


def _refuse_other(path: Path, size: int, start: bytes) -> None:
    """Raise SeedError if something of that name is there that is not ``size`` bytes from ``start``.

    A config.json that is already there may be anybody's, so it is never written over.
    """
    if not os.path.lexists(path):
        return
    if path.is_file() and path.stat().st_size == size:
        with path.open("rb") as stream:
            if stream.read(len(start)) == start:
                return
    raise SeedError(
        f"{path} is there already and is not what this command writes (another seed, width, "
        "layout, or real weights). Remove it, or choose another folder with -o"
    )


def _check_disk(out: Path, files: tuple[PlannedFile, ...]) -> None:
    there = sum(
        path.stat().st_size
        for file in files
        for path in (out / file.name, out / f"{file.name}.part")
        if path.exists()
    )
    needed = sum(file.bytes for file in files) - there
    free = shutil.disk_usage(out).free
    if needed > 0 and needed + SPARE_BYTES > free:
        raise SeedError(
            f"{out} has {free / 1e6:,.0f} MB free; the checkpoint needs {needed / 1e6:,.0f} MB "
            f"more, and {SPARE_BYTES / 1e6:,.0f} MB are kept. Free some, choose another folder "
            f"with -o{', or write --width small' if needed > SPARE_BYTES else ''}"
        )


def _write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that nobody ever sees half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.rename(path)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=4).encode() + b"\n"
