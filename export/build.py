"""Make a bundle: a model's stages as graphs, its weights, its words, and the manifest over them.

    bundle.json
    pieces.json          text of every token
    tokenizer.model      the SentencePiece model they come from, if the checkpoint has one
    stages/*.onnx        one graph per stage
    stages/weights/*.bin weights, by part of the model, shared by the stages
    cache/*              of 8-bit rings: their scales, and a report of what they cost
    golden/*.safetensors what every stage must answer, recorded in float32

A model may be larger than the machine's memory: graphs are traced without values, and weights go
from the checkpoint into the bundle a few megabytes at a time. A killed build continues, a
finished one says that there is nothing to do (`journal`). The same model gives the same bytes.

Not here: what a stage computes (`stages`), how it is written (`to_onnx`), where the model comes
from (`source`), the format (`engines.bundle`).
"""

import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch

from engines import bundle
from engines.bundle import (
    AudioPorts,
    Bundle,
    GoldenSpec,
    Manifest,
    ModelInfo,
    PromptSpec,
    TextPorts,
    Timing,
)
from export import cache_report, golden, prompt, ring_stages, tiny
from export.cache_report import Calibration
from export.journal import Journal
from export.kernel_specs import Kernels, kernels_of, with_kernel
from export.mistake import Mistake
from export.prompt_stages import Opening, Prefill, prompt_graphs
from export.source import Precision, Source, from_seed
from export.stages import (
    PCM,
    PCM_OUT,
    TEXT,
    VALID,
    Attention,
    StageGraph,
    all_regions,
    graphs_of,
    noise_stage,
)
from export.to_onnx import Weights, graph_bytes
from export.traces import Traces

PIECES, TOKENIZER = "pieces.json", "tokenizer.model"
SPARE_BYTES = 256 << 20
"""Left free on the disk; golden data and the manifest are far smaller."""

Progress = Callable[[str, int, int], None]
"""(file, bytes of it written, bytes of it) -> nothing."""
Say = Callable[[str], None]


class DiskFull(Mistake):
    """The bundle does not fit where it should go; the operator's to solve."""


def build_seeded(
    model: str,
    out: Path,
    *,
    seed: int = 0,
    largest_batch: int = 8,
    dtype: Precision | None = None,
    attention: Attention = "standard",
    calibration: Calibration | None = None,
) -> Bundle:
    """Write the bundle of a small seeded model (`tiny.MODELS`) into ``out`` and read it back.

    Raises `FolderTaken` when ``out`` exists and is not a bundle.
    """
    source = from_seed(model, seed, dtype)
    return build(
        source, out, largest_batch=largest_batch, attention=attention, calibration=calibration
    )


def build(
    source: Source,
    out: Path,
    *,
    largest_batch: int,
    attention: Attention = "standard",
    calibration: Calibration | None = None,
    voices: Mapping[str, Path] = MappingProxyType({}),
    progress: Progress = lambda file, done, total: None,
    say: Say = lambda sentence: None,
) -> Bundle:
    """Write, continue or recognise the bundle of ``source`` in ``out``, and read its manifest.

    calibration: of 8-bit rings (`cache_report.plan`); None: they are as the model is.
    Raises `FolderTaken` when ``out`` holds something else, `DiskFull` before writing weights,
    `ring_stages.CannotCut`, `prompt.NoRoom`, `prompt.VoiceError`.
    """
    config = source.config
    if voices and config.prompt is None:
        raise prompt.VoiceError(f"{config.name} takes no voices; leave --voices out")
    prompt.check_room(config)
    assert len(source.pieces) == config.lm.text_card, (len(source.pieces), config.lm.text_card)
    if attention == "ring":
        ring_stages.check_cut(config, source.dtype)
    digest = source.checkpoint_sha256()
    given = made_from(source, digest, largest_batch, voices, attention)
    journal = Journal(out, given | (calibration.made_from() if calibration else {}))
    if journal.note:
        say(journal.note)
    if journal.whole:
        return bundle.read(out, hashes=False)  # the journal has just compared them
    caches = cache_report.prepare(source, calibration, journal, say) if calibration else None
    graphs = graphs_of(config, source.mimi, source.lm, source.dtype, attention, caches)
    prompted = config.prompt is not None
    asks = prompt_graphs(config, source.lm, source.dtype, caches) if prompted else ()
    # Before what takes long: a voice may be one that cannot be.
    prompts = _write_prompt(source, asks, voices, journal) if asks else None
    kernels = _write_stages(source, (*graphs, *asks), journal, progress, say)
    pieces = msgspec.json.encode(source.pieces) + b"\n"
    _write_once(journal, PIECES, lambda: pieces)
    if source.tokenizer is not None:
        _write_once(journal, TOKENIZER, source.tokenizer.read_bytes)
    elif prompted:
        _write_once(journal, TOKENIZER, lambda: tiny.tokenizer(config))
    regions = all_regions(graphs, config)
    specs = _write_golden(source, graphs, asks, journal, say)
    manifest = Manifest(
        format=bundle.FORMAT,
        model=ModelInfo(
            name=config.name,
            parameters=source.parameters,
            checkpoint_sha256=digest,
            trained=source.trained,
            notice=source.notice,
        ),
        timing=Timing(
            period_ns=config.period_ns,
            sample_rate_hz=config.mimi.sample_rate_hz,
            samples_per_frame=config.mimi.samples_per_frame,
        ),
        largest_batch=largest_batch,
        regions=regions,
        stages=(noise_stage(config), *(with_kernel(graph.spec, kernels) for graph in graphs)),
        audio=AudioPorts(input=PCM, output=PCM_OUT, valid=VALID),
        text=TextPorts(output=TEXT, pieces=PIECES, silent_ids=config.silent_ids),
        files={name: journal.files[name] for name in sorted(journal.files)},
        golden=specs,
        golden_call=golden.CALL,
        cache_report=cache_report.REPORT if calibration else "",
        made_from=journal.made_from,
        prompt=prompts,
    )
    bundle.write(out, manifest)
    journal.finish()
    return bundle.read(out, hashes=False)


def made_from(
    source: Source,
    checkpoint_sha256: str,
    largest_batch: int,
    voices: Mapping[str, Path] = MappingProxyType({}),
    attention: Attention = "standard",
) -> dict[str, str]:
    """Everything the bytes of a bundle depend on."""
    given = {
        "checkpoint": checkpoint_sha256,
        "batches": f"1-{largest_batch}",
        "attention": attention,
        "exporter": exporter_sha256(),
        "torch": str(torch.__version__),
    }
    given |= {f"voice {n}": bundle.describe_file(path).sha256 for n, path in voices.items()}
    return source.made_from | given


@functools.cache
def exporter_sha256() -> str:
    """Hash of this program's own text: another exporter may write another bundle."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_stages(
    source: Source,
    graphs: tuple[StageGraph, ...],
    journal: Journal,
    progress: Progress,
    say: Say,
) -> Kernels:
    """Graphs first, because they say which weights there are; then the weights, file by file.

    Returns the kernels that can stand in for graphs.
    """
    weights = Weights(journal.folder / "stages", source.hollow, source.halved)
    traces = Traces()
    # Stages that differ in nothing but names share a graph.
    for graph in {shared.name: shared for shared in (g.written() for g in graphs)}.values():
        say(f"{'writing' if graph in traces else 'tracing'} {graph.name}")
        # Also if the file is there: this is what gives the weights their places.
        raw = graph_bytes(graph, weights, traces)
        _write_once(journal, graph.file, lambda raw=raw: raw)  # type: ignore[misc]
    # The kernels read weights where they lie, in the precision they compute in.
    kernels = {} if source.halved else kernels_of(graphs, weights)
    _check_disk(journal, {f"stages/{name}": size for name, size in weights.files.items()})
    for file, total in weights.files.items():
        name = f"stages/{file}"
        if not journal.has(name):
            journal.write(name, _counted(weights.chunks(file), name, total, progress))
    return kernels


def _counted(
    chunks: Iterator[memoryview], name: str, total: int, progress: Progress
) -> Iterator[memoryview]:
    done = 0
    for chunk in chunks:
        done += len(chunk)
        yield chunk
        if len(chunk):
            progress(name, done, total)


def _write_golden(
    source: Source,
    graphs: tuple[StageGraph, ...],
    asks: tuple[StageGraph, ...],
    journal: Journal,
    say: Say,
) -> tuple[GoldenSpec, ...]:
    """Of the stages of a tick, of those of a prompt, and of a call, which has no prompt."""
    specs = []
    for graph in (*graphs, *asks):
        spec = golden.spec_of(graph, source)
        if not journal.has(spec.file):
            say(f"recording what {graph.name} answers, in float32")
            journal.write(spec.file, [golden.record(graph, source, spec)])
        specs.append(spec)
    if not journal.has(golden.CALL):
        say("recording a call, in float32")
        is_large = source.parameters > golden.LARGE_PARAMETERS

        def on_tick(tick: int, ticks: int) -> None:
            if is_large:
                say(f"  frame {tick + 1} of {ticks}")

        journal.write(golden.CALL, [golden.record_call(graphs, source, on_tick)])
    return tuple(specs)


def _write_prompt(
    source: Source, graphs: tuple[Prefill, Opening], voices: Mapping[str, Path], journal: Journal
) -> PromptSpec:
    """The prompt section, and its voices' files; a seeded model has voices of its own."""
    config = source.config
    spec = prompt.prompt_spec(config, source.mimi, graphs, TOKENIZER)
    sounds = dict(voices) or (tiny.voices(config) if config in tiny.MODELS.values() else {})
    found = []
    for voice, content in prompt.voices(sounds, spec, source.mimi, config.lm, source.dtype):
        _write_once(journal, voice.file, lambda content=content: content)  # type: ignore[misc]
        found.append(voice)
    return msgspec.structs.replace(spec, voices=tuple(found))


def _write_once(journal: Journal, name: str, content: Callable[[], bytes]) -> None:
    if not journal.has(name):
        journal.write(name, [content()])


def _check_disk(journal: Journal, files: dict[str, int]) -> None:
    needed = sum(size for name, size in files.items() if not journal.has(name))
    free = shutil.disk_usage(journal.folder).free
    if needed + SPARE_BYTES > free:
        raise DiskFull(
            f"{journal.folder} has {free / 1e9:.1f} GB free, the bundle needs {needed / 1e9:.1f} "
            f"GB more. Free some and run the same command again, or choose another folder with -o"
        )
