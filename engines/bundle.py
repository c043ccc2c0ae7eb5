"""The bundle: the folder export writes and engines read. This file is its format's only home.

`bundle.json` says what the model's tick is made of: timing, regions with their native clocks,
stages in order with every tensor, which tensors are the caller's and the model's audio, and the
sha256 of every file. Reading is strict: an unknown field, a wrong type or a wire that leads
nowhere is a `BundleError` with its path, before anything is loaded.

Wires are names. A stage input is the caller's audio (`audio.input`), an output of an earlier
stage of the same tick, or a region; an output called ``<region>.next`` is the region's new value.
Several stages may update one region within a tick; each sees what the one before it left.

Not here: whether a manifest contradicts itself (`bundle_faults`), running anything
(`ort_executor`), plans for a target (`plans/<target>/`), writing graphs (`export`). No torch, no
onnx, no numpy.
"""

import hashlib
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from engines import clocks
from engines.clocks import NativeClock

FORMAT = 1
"""Raised whenever an older reader would misunderstand a bundle."""

LARGEST_BATCH = 65_535
"""Records of ticks count sessions in 16 bits; no machine steps as many."""

LARGEST_TEXT_ID = 2**31 - 1
"""Text ids travel in 32 bits."""

NEXT = ".next"
"""Suffix of the stage output that carries a region's new value."""

BATCH = "B"
"""Sessions in the batch: the symbolic dimension of a tick, always the first axis."""

ROWS: Literal["R"] = "R"
"""Positions of one session fed at once: the symbolic dimension of a prompt's prefill."""

ITEMSIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8e4m3": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes a bundle may name."""

REBUILD = "Build the bundle again: duplexbox export build --help"


class BundleError(ValueError):
    """The folder is not a bundle this program can run; the operator's or the builder's fault."""


Dtype = Literal[
    "float32",
    "float16",
    "bfloat16",
    "float8e4m3",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class TensorSpec(_Strict, frozen=True):
    """One input or output of a stage. shape: "B" first, then integers; in a prompt's prefill "R"
    or, for what belongs to the one session it feeds, 1."""

    name: str
    dtype: Dtype
    shape: tuple[int | Literal["B", "R"], ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape for one session or row, without the first axis."""
        return tuple(length for length in self.shape[1:] if isinstance(length, int))


class RegionSpec(_Strict, frozen=True):
    """A named tensor of one session that survives a tick."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    """Per session; the batch axis is not part of it."""
    clock: NativeClock
    fill: float = 0
    """What every element holds when a call begins. A `constant` region may be set per call."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value a caller may set a `constant` region to; None: not settable."""
    in_place: bool = False
    """The stage writes the region where it lies. Only for rings whose one reader in the graph
    is TensorScatter: anything else bound in place is silently corrupted."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def whole_bytes(self) -> int:
        """Bytes of one session's region at full retention."""
        return math.prod(self.shape) * self.itemsize

    def bytes_at(self, ticks: int, page_bytes: int = 1) -> int:
        """Bytes one session owns of this region after ``ticks`` ticks, in whole pages."""
        return clocks.bytes_at(self.clock, self.shape, self.itemsize, ticks, page_bytes)


class WeightSpec(_Strict, frozen=True):
    """A slice of a weights file of the bundle, row-major, little-endian."""

    file: str
    offset: int
    """Bytes."""
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class RingSpec(_Strict, frozen=True):
    """What `ring_attention` is told beside its tensors; which those are says `ring_stage`.

    Of which dtype the rings are, their regions say. An 8-bit ring holds value / scale, rounded.
    """

    twin: str
    """ONNX graph in the bundle that computes the same with standard operators; shared by stages
    of one shape, so its tensors have names of their own and are matched by position."""
    query_heads: int
    kv_heads: int
    head_dim: int
    retain: int
    """Rows of the ring."""
    rows: int
    """Rows written, and queries asked, per tick."""
    max_period: float
    """Of the rotary embedding; 0: keys and queries are not rotated."""
    scales: WeightSpec | None = None
    """Of 8-bit rings: (2, KV heads) float32, of the keys and of the values."""


class KernelSpec(_Strict, frozen=True):
    """A kernel of ours that computes what the stage's graph computes, where there is a GPU for
    it. The graph stays the authority: CPUs, plans, golden data and verifying use that."""

    kind: str
    """One of `kernel_kinds.KINDS`, which says what weights and numbers it needs."""
    weights: dict[str, WeightSpec]
    """By role."""
    numbers: dict[str, float] = {}


class StageSpec(_Strict, frozen=True):
    """One step of the tick: an ONNX graph, or a built-in kernel named by `builtin`."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graph: str = ""
    """Path of the ONNX graph inside the bundle; empty for a built-in stage."""
    builtin: Literal["", "gumbel_noise", "ring_attention"] = ""
    ring: RingSpec | None = None
    """Of a `ring_attention`."""
    kernel: KernelSpec | None = None
    """Of a graph that kernels of ours can stand in for."""


class Timing(_Strict, frozen=True):
    """The model's own clock."""

    period_ns: int
    sample_rate_hz: int
    samples_per_frame: int


class AudioPorts(_Strict, frozen=True):
    """Which tensors are the conversation."""

    input: str
    """Stage input (B, 1, samples_per_frame) float32 in -1..1: what the caller said."""
    output: str
    """Stage output of the same shape: what the model says."""
    valid: str = ""
    """Stage output (B,) bool: False while the model's delays warm up and it has said nothing."""


class TextPorts(_Strict, frozen=True):
    """The model's own words, beside its audio."""

    output: str
    """Stage output (B,) int64: one token per frame."""
    pieces: str
    """File in the bundle: a JSON list, token id -> piece; "\\u2581" stands for a space."""
    silent_ids: tuple[int, ...]
    """Ids that mean "not speaking": the only sign a duplex model gives of it."""


class VoiceSpec(_Strict, frozen=True):
    """A voice a caller may ask for by name; `engines.voice` reads the file."""

    name: str
    file: str
    frames: int


class PromptSpec(_Strict, frozen=True):
    """How a call may begin with a voice and a persona: frames the model is fed before it hears.

    A frame is one id per stream, text first, then the agent's codebooks, then the caller's. Frame
    p lands at position p + delay of each stream; a stream begins with its initial id up to its
    delay. All rows but the last leave nothing to choose and go through `prefill`, many at once;
    after the last, `opening` makes the model's own first choice.
    """

    prefill: StageSpec
    """ids (R, streams), position (R,) int64, embedded (R, C), is_embedded (R,) bool and the
    regions it moves on, (1, ...) each; gives what `opening` takes of the last row."""
    opening: StageSpec
    """At batch 1: takes what `prefill` gave, noise, settings, and moves `tokens` on."""
    tokens: str
    """Region (streams, rows): the ring that undoes the delays; position p lies at p mod rows."""
    counter: str
    """Region that counts positions."""
    delays: tuple[int, ...]
    initial_ids: tuple[int, ...]
    silent_text_id: int
    """Text of every frame that says nothing (padding)."""
    silence_codes: tuple[int, ...]
    """What the agent says in frames without a voice."""
    caller_codes: tuple[int, ...]
    """What the caller is made to say all along: a steady tone, so the model knows it is no call."""
    pause_frames: int
    """Silent frames after the voice, and again after the persona."""
    longest_frames: int
    """A prompt longer than this is refused: it must leave room for the call."""
    wrap: str
    """What stands before and after the persona's text."""
    tokenizer: str
    """File: the SentencePiece model that turns text into ids, one per frame."""
    voices: tuple[VoiceSpec, ...] = ()


class ModelInfo(_Strict, frozen=True):
    """What was exported."""

    name: str
    parameters: int
    checkpoint_sha256: str
    trained: bool
    """False: weights from a seed; whatever the model says is noise, and we say so."""
    notice: str = ""
    """A sentence for whoever runs it (licence, limits)."""


class FileSpec(_Strict, frozen=True):
    """One file of the bundle, as it was written."""

    sha256: str
    bytes: int


class GoldenSpec(_Strict, frozen=True):
    """What one stage must answer, recorded from the torch modules in float32."""

    stage: str
    file: str
    """safetensors in the bundle: ``in.<tensor>`` and ``out.<tensor>`` of every session. Of a ring
    only the rows that were written; float regions going in are drawn, see `engines.golden`."""
    ages: tuple[int, ...]
    """Ticks each session of the batch has lived."""
    seed: int
    """Of the state these sessions have reached."""
    ticks: int = 1
    """How far the stage moves a session on: more than 1 only for rows of a prompt."""


class Manifest(_Strict, frozen=True):
    """`bundle.json`, decoded. Use `read` to get one that has also been checked."""

    format: int
    model: ModelInfo
    timing: Timing
    largest_batch: int
    """Batch profiles are 1..largest_batch without gaps."""
    regions: tuple[RegionSpec, ...]
    stages: tuple[StageSpec, ...]
    audio: AudioPorts
    text: TextPorts
    files: dict[str, FileSpec]
    prompt: PromptSpec | None = None
    """None: calls of this model begin without a prompt."""
    golden: tuple[GoldenSpec, ...] = ()
    golden_call: str = ""
    """safetensors in the bundle: a greedy call from its first tick, sound in and tokens out."""
    cache_report: str = ""
    """JSON in the bundle: how the scales of 8-bit rings were found, and what they cost."""
    made_from: dict[str, str] = {}
    """What the builder was given, to tell whether a bundle is stale; nobody else reads it."""

    def region(self, name: str) -> RegionSpec:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def every_stage(self) -> tuple[StageSpec, ...]:
        """The stages of a tick, then those of a prompt."""
        asks = (self.prompt.prefill, self.prompt.opening) if self.prompt else ()
        return (*self.stages, *asks)

    def session_bytes(self, ticks: int, page_bytes: int = 1) -> int:
        """Bytes of state one session owns ``ticks`` ticks into its call."""
        return sum(region.bytes_at(ticks, page_bytes) for region in self.regions)

    def ticks_until_full(self) -> int:
        """Ticks after which a session's state no longer grows."""
        return max((region.clock.ticks_until_full() for region in self.regions), default=0)


class Bundle(msgspec.Struct, frozen=True):
    """A checked manifest and the folder it lies in."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        return self.path / name

    def pieces(self) -> tuple[str, ...]:
        """Text of every token id. Raises `BundleError` when the file is not a list of strings."""
        path = self.file(self.manifest.text.pieces)
        try:
            return msgspec.json.decode(path.read_bytes(), type=tuple[str, ...])
        except (OSError, msgspec.DecodeError) as err:
            raise BundleError(f"{path}: not a list of text pieces: {err}. {REBUILD}") from None


class _FormatOnly(msgspec.Struct):
    """Looked at first, so that a newer bundle says so rather than "unknown field"."""

    format: int


def read(path: Path, *, hashes: bool = True) -> Bundle:
    """Read and check the bundle in folder ``path``.

    hashes: also compare every file's sha256 (about a second per gigabyte); sizes are always
    compared. Raises `BundleError` with the path of the first thing that is wrong.
    """
    manifest_path = path / "bundle.json"
    if not _is_folder(path):
        raise BundleError(
            f"{path} is not a folder, so not a bundle. Build one: duplexbox export build --help"
        )
    try:
        if not stat.S_ISREG(manifest_path.stat().st_mode):  # a pipe would be waited for
            raise BundleError(f"{manifest_path} is not a file. {REBUILD}")
        raw = manifest_path.read_bytes()
    except OSError as err:
        raise BundleError(f"{manifest_path}: {err.strerror or err}. {REBUILD}") from None
    try:
        found = msgspec.json.decode(raw, type=_FormatOnly).format
        if found != FORMAT:
            raise BundleError(
                f"{manifest_path}: format {found} at `$.format`; this program reads {FORMAT}. "
                f"{REBUILD}"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise BundleError(f"{manifest_path}: {err}. {REBUILD}") from None
    for fault in _faults(manifest):
        raise BundleError(f"{manifest_path}: {fault}. {REBUILD}")
    for name, spec in manifest.files.items():
        _check_file(path, name, spec, hashes=hashes)
    return Bundle(path, manifest)


def write(path: Path, manifest: Manifest) -> Bundle:
    """Write ``manifest`` as ``path``/bundle.json; the files it names must lie there already.

    Raises `BundleError` before writing when the manifest contradicts itself.
    """
    for fault in _faults(manifest):
        raise BundleError(f"{path / 'bundle.json'}: {fault}")
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (path / "bundle.json").write_bytes(raw + b"\n")
    return Bundle(path, manifest)


def describe_file(path: Path) -> FileSpec:
    """Hash and size of a file, to be entered into a manifest."""
    return FileSpec(sha256=_sha256(path), bytes=path.stat().st_size)


def identity(manifest: Manifest) -> str:
    """sha256 over the whole manifest, and through it over every file: names one bundle."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def _faults(manifest: Manifest) -> Iterator[str]:
    from engines import bundle_faults  # it is written in this file's words

    return bundle_faults.faults(manifest)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long, or a parent that may not be looked into
        return False


def _check_file(folder: Path, name: str, spec: FileSpec, *, hashes: bool) -> None:
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as err:
        raise BundleError(f"{path}: {err.strerror or err}. {REBUILD}") from None
    if not path.is_file():
        raise BundleError(f"{path} is not a file. {REBUILD}")
    if size != spec.bytes:
        raise BundleError(
            f"{path} has {size} bytes and should have {spec.bytes}: it was cut short or changed. "
            f"Copy the bundle again, or build it: duplexbox export build --help"
        )
    if hashes and (found := _sha256(path)) != spec.sha256:
        raise BundleError(
            f"{path} has sha256 {found[:12]}… and should have {spec.sha256[:12]}…: it was changed "
            f"after the bundle was built. Copy the bundle again, or build it: "
            f"duplexbox export build --help"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
