"""8-bit rings of a bundle: what they are calibrated on, and the page that says what they cost.

    cache/scales.bin     the scales (`caches`)
    cache/report.json    on what they were found, by which rule, and how far the model's logits and
                         greedy choices are from those with bfloat16 and float32 rings, for every
                         kind of ring, whichever the bundle has

A model that is larger than memory is passed a layer at a time, and how far it came is kept in the
folder until it is through (`cache/progress.part`): a killed build goes on with the next layer.

Not here: the calibration itself (`cache_scales`), the bundle's other files (`build`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from engines.bundle import Bundle, BundleError, Dtype
from export import cache_scales, golden, prompt
from export.cache_scales import Distance, Found, Lines, Progress
from export.caches import DTYPES, SCALES, CacheName, Caches
from export.journal import Journal
from export.mistake import Mistake
from export.source import Source

REPORT = "cache/report.json"
PROGRESS = "cache/progress.part"
SPEECH = Path(__file__).parents[1] / "appliance" / "demo"
"""Recordings that come with the program."""
FRAMES = 512
LONGEST_S = 600.0

Say = Callable[[str], None]


class CannotKeep(Mistake):
    """A kind of ring that this bundle cannot have; the operator's to choose."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """On what the scales of 8-bit rings are found."""

    dtype: Dtype
    recordings: tuple[Path, ...]
    """Empty: noise as loud as speech."""
    frames: int = FRAMES

    def made_from(self) -> dict[str, str]:
        """What the bytes of the bundle depend on."""
        digest = hashlib.sha256(f"{self.frames}".encode())
        for path in self.recordings:
            digest.update(path.read_bytes())
        return {"cache": self.dtype, "calibration": digest.hexdigest()}


def plan(
    cache: CacheName | None, attention: str, dtype: Dtype, speech: Path | None = None
) -> Calibration | None:
    """What ``--cache`` asks for; None: rings of the model's own dtype. Raises CannotKeep.

    dtype: of the language model; speech: a folder of recordings, None: those of the demo.
    """
    is_8_bit = cache in ("e4m3", "int8")
    if speech is not None and not is_8_bit:
        raise CannotKeep("--calibrate-on finds scales of 8-bit rings: add --cache int8 or e4m3")
    if cache is None:
        return None
    if not is_8_bit:
        if dtype != DTYPES[cache]:
            raise CannotKeep(
                f"--cache {cache}: the language model is {dtype}, and rings that are not of 8 bits "
                f"are as it is. Add --dtype bfloat16, or leave --cache out"
            )
        return None
    if attention != "ring":
        raise CannotKeep(
            f"--cache {cache}: only attention of our own reads rings of 8 bits. "
            f"Add --attention ring"
        )
    found = tuple(sorted((speech or SPEECH).glob("*.wav")))
    if speech is not None and not found:
        raise CannotKeep(f"--calibrate-on {speech} holds no .wav file. Record a minute of speech")
    return Calibration(DTYPES[cache], found)


def prepare(source: Source, wanted: Calibration, journal: Journal, say: Say) -> Caches:
    """Scales and report of a bundle: those that lie there, or found now."""
    if not (journal.has(SCALES) and journal.has(REPORT)):
        lines = hear(source, wanted)
        progress = _passed(source, lines, journal.folder / PROGRESS, say)
        found = cache_scales.finish(source, lines, progress)
        journal.write(SCALES, [cache_scales.caches(found, wanted.dtype).file()])
        journal.write(REPORT, [msgspec.json.format(_report(source, wanted, found)) + b"\n"])
        (journal.folder / PROGRESS).unlink(missing_ok=True)
    lm = source.config.lm
    raw = bytearray((journal.folder / SCALES).read_bytes())
    scales = torch.frombuffer(raw, dtype=torch.float32).view(lm.layers, 2, lm.heads)
    return Caches(wanted.dtype, scales)


def hear(source: Source, wanted: Calibration) -> Lines:
    """Recordings through the model's own codec."""
    mimi, rate_hz = source.mimi, source.config.mimi.sample_rate_hz
    longest = wanted.frames * source.config.mimi.samples_per_frame
    sounds = [prompt.sound_of(path, rate_hz, LONGEST_S)[:longest] for path in wanted.recordings]
    if not sounds:
        noise = golden.sound((2, wanted.frames, longest // wanted.frames), seed=1)
        sounds = [row.reshape(-1).double().numpy() for row in noise]
    codes = [prompt.encode_sound(mimi, sound) for sound in sounds]
    return cache_scales.lines_of(source.config.lm, codes, wanted.frames)


def _passed(source: Source, lines: Lines, path: Path, say: Say) -> Progress:
    layers = source.config.lm.layers
    is_large = source.parameters > golden.LARGE_PARAMETERS
    say(f"finding scales of 8-bit rings on {len(lines.text)} frames")
    progress = _read(path) or cache_scales.begin(source, lines)
    for now in cache_scales.pass_layers(source, progress):
        if is_large:
            say(f"  layer {now.layers} of {layers}")
            _write(path, now)
    return progress


def _write(path: Path, progress: Progress) -> None:
    held = {"x": progress.x} | {
        f"scales.{dtype}": torch.stack(rows) for dtype, rows in progress.scales.items()
    }
    clipped = {dtype: str(count) for dtype, count in progress.clipped.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".new")
    safetensors.torch.save_file(held, part, clipped | {"layers": str(progress.layers)})
    part.rename(path)


def _read(path: Path) -> Progress | None:
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        about: dict[str, str] = dict(file.metadata())
        held: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = int(about.pop("layers"))
    scales: Any = {
        name.removeprefix("scales."): list(rows.unbind())
        for name, rows in held.items()
        if name != "x"
    }
    clipped: Any = {dtype: int(count) for dtype, count in about.items()}
    return Progress(held["x"], scales, clipped, layers)


def _report(source: Source, wanted: Calibration, found: Found) -> bytes:
    caches: dict[str, Any] = {}
    for (kind, reference), compared in found.compared.items():
        entry = caches.setdefault(kind, {"against": {}})
        entry["against"][reference] = {
            "text": _figures(compared.text),
            "audio": _figures(compared.audio),
        }
    for kind, scales in found.scales.items():
        caches[kind]["values_clipped"] = found.clipped[kind]
        caches[kind]["scale_of_keys"] = _span(scales[:, 0])
        caches[kind]["scale_of_values"] = _span(scales[:, 1])
    return msgspec.json.encode(
        {
            "bundle_has": wanted.dtype,
            "trained": source.trained,
            "frames": found.frames,
            "recordings": [path.name for path in wanted.recordings] or ["noise"],
            "words": "given, the same to all: greedy choices are compared frame by frame",
            "arithmetic": f"float32 but for the rings, weights as in the bundle ({source.dtype})",
            "rule": {
                "keys": "length of rotary pairs, per head and layer",
                "values": "size, per head and layer",
                "int8": f"not exceeded by {cache_scales.INT8_SHARE:.2%} stands for 127",
                "float8e4m3": f"the largest stands for {448 / cache_scales.E4M3_HEADROOM:g} of 448",
            },
            "caches": caches,
        }
    )


def _figures(found: Distance) -> dict[str, float]:
    return {
        "logits_max": found.largest,
        "logits_mean": found.mean,
        "logits_relative": found.relative,
        "greedy_same": found.same,
        "greedy_of": found.choices,
    }


def _span(scales: Tensor) -> list[float]:
    return [float(scales.min()), float(scales.max())]


def read(bundle: Bundle) -> dict[str, Any] | None:
    """The report of a bundle, as it lies there; None: it has none. Raises `BundleError`."""
    name = bundle.manifest.cache_report
    if not name:
        return None
    try:
        return msgspec.json.decode(bundle.file(name).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as err:
        raise BundleError(f"{bundle.file(name)}: {err}. Build the bundle again") from None


def lines_of(report: dict[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield (
        f"8-bit rings: scales found on {report['frames']} frames of "
        f"{', '.join(report['recordings'])}; this bundle has {report['bundle_has']}"
    )
    heading = f"{'rings':<12}{'against':<10}{'logits':<7}{'max':>9}{'mean':>9}{'relative':>10}"
    yield f"  {heading}  greedy same"
    for kind, entry in report["caches"].items():
        for reference, parts in entry["against"].items():
            for part, row in parts.items():
                yield (
                    f"  {kind:<12}{reference:<10}{part:<7}{row['logits_max']:>9.4f}"
                    f"{row['logits_mean']:>9.5f}{row['logits_relative']:>10.3%}"
                    f"{row['greedy_same']:>8,} of {row['greedy_of']:,}"
                )
    if not report["trained"]:
        yield "  of weights from a seed: says that it works, not what a trained model loses"
