"""Make a bundle: a model's stages as graphs, its weights, its words, and the manifest over them.

    bundle.json
    pieces.json          text of every token
    stages/*.onnx        one graph per stage
    stages/weights/*.bin weights, one file per part, shared by the stages

The folder is filled from scratch: an old bundle in its place is replaced, anything else refused.
The same model and seed give the same bytes. Not here: what a stage computes (`stages`), how it is
written (`to_onnx`), the format (`engines.bundle`).
"""

import hashlib
import shutil
from pathlib import Path

import msgspec

from engines import bundle
from engines.bundle import (
    AudioPorts,
    Bundle,
    Manifest,
    ModelInfo,
    TextPorts,
    Timing,
)
from export import tiny
from export.models.config import ModelConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.stages import PCM, PCM_OUT, TEXT, VALID, all_regions, graphs_of, noise_stage
from export.to_onnx import Weights, raw_bytes, write_graph

PIECES = "pieces.json"
UNTRAINED = "untrained: weights from seed {seed}; its voice and its words are noise"


class FolderTaken(ValueError):
    """The folder to write holds something that is not a bundle; the operator's fault."""


def build_seeded(model: str, out: Path, *, seed: int = 0, largest_batch: int = 8) -> Bundle:
    """Write the bundle of a small seeded model (`tiny.MODELS`) into ``out`` and read it back.

    Raises `FolderTaken` when ``out`` exists and is not a bundle.
    """
    config = tiny.MODELS[model]
    mimi, lm = tiny.seeded(config, seed)
    return build(
        config,
        mimi,
        lm,
        tiny.pieces(config),
        out,
        largest_batch=largest_batch,
        trained=False,
        notice=UNTRAINED.format(seed=seed),
    )


def build(
    config: ModelConfig,
    mimi: Mimi,
    lm: LanguageModel,
    pieces: tuple[str, ...],
    out: Path,
    *,
    largest_batch: int,
    trained: bool,
    notice: str = "",
) -> Bundle:
    """Write the bundle of a model that is in memory into ``out`` and read it back, hashes too."""
    assert len(pieces) == config.lm.text_card, (len(pieces), config.lm.text_card)
    _clear(out)
    graphs = graphs_of(config, mimi, lm)
    stages = out / "stages"
    stages.mkdir()
    with Weights(stages) as weights:
        files = [str(write_graph(graph, weights).relative_to(out)) for graph in graphs]
    files += [f"stages/{name}" for name in weights.files]
    (out / PIECES).write_bytes(msgspec.json.encode(pieces) + b"\n")
    files.append(PIECES)
    encode, temporal, depth, decode = (graph.spec for graph in graphs)
    manifest = Manifest(
        format=bundle.FORMAT,
        model=ModelInfo(
            name=config.name,
            parameters=tiny.parameters(mimi) + tiny.parameters(lm),
            checkpoint_sha256=checkpoint_sha256(mimi, lm),
            trained=trained,
            notice=notice,
        ),
        timing=Timing(
            period_ns=config.period_ns,
            sample_rate_hz=config.mimi.sample_rate_hz,
            samples_per_frame=config.mimi.samples_per_frame,
        ),
        largest_batch=largest_batch,
        regions=all_regions(graphs, config),
        stages=(noise_stage(config), encode, temporal, depth, decode),
        audio=AudioPorts(input=PCM, output=PCM_OUT, valid=VALID),
        text=TextPorts(output=TEXT, pieces=PIECES, silent_ids=config.silent_ids),
        files={name: bundle.describe_file(out / name) for name in sorted(files)},
    )
    bundle.write(out, manifest)
    return bundle.read(out)


def checkpoint_sha256(mimi: Mimi, lm: LanguageModel) -> str:
    """Hash over names, shapes and values of everything a checkpoint of the model holds."""
    digest = hashlib.sha256()
    for part, model in (("mimi", mimi), ("lm", lm)):
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{part}.{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _clear(out: Path) -> None:
    """Make ``out`` an empty folder; only a bundle is ever deleted."""
    if out.exists():
        if not (out / "bundle.json").is_file() and (not out.is_dir() or any(out.iterdir())):
            raise FolderTaken(
                f"{out} exists and is not a bundle, so nothing was written. "
                f"Choose another folder: duplexbox export build MODEL -o FOLDER"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True)
