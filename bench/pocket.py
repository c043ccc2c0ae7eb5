"""How well the pocket model converses, and how well its codec is understood.

    python -m bench.pocket talk BUNDLE HELD_BANK [--each N] [--g711] [--set NAME=VALUE] [--out DIR]
    python -m bench.pocket codec BUNDLE HELD_BANK [--words N]

`talk` holds short calls with voices and scripts that training never heard: numbers read back,
names, interruptions, pauses, silence. The callers' sound goes through the box's own resampler and,
with --g711, through 8 kHz and mu-law in both directions; the model runs on the engine the box
serves from, as fast as it can rather than on the clock. `codec` gives the distance of mel spectra
between speech and its copy, and how many digits a recogniser (pocketsphinx) gets right in both.

Made for one machine; no decision of the box hangs on it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch

from appliance.lines.resample import Quality, Resampler
from engines import bundle
from engines.ort_executor import OrtExecutor
from export.pocket import bank, trials
from export.pocket.codec_losses import MelDistance
from export.pocket.mix import Mixer
from export.pocket.script import CALLER, FRAME, RATE_HZ, Stage
from export.pocket.trials import Sound, Trial
from export.pocket.world import Kind

TELEPHONE_HZ = 8_000
SLOTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("talk", "codec"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("held", type=Path, help="export.pocket.cli bank --held-out")
    parser.add_argument("--each", type=int, default=48, help="trials of each kind")
    parser.add_argument("--words", type=int, default=200, help="numbers the recogniser hears")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--g711", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="keep calls as WAV files, caller left")
    args = parser.parse_args()
    stage = Stage(bank.read(args.held))
    executor = OrtExecutor(bundle.read(args.bundle), SLOTS)
    found = talk(stage, executor, args) if args.what == "talk" else codec(stage, args)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


def talk(stage: Stage, executor: OrtExecutor, args: argparse.Namespace) -> dict[str, float]:
    mixer = Mixer(stage, torch.device("cpu"))
    asked = trials.trials(stage, args.seed, args.each)
    settings = {name: float(value) for name, _, value in (s.partition("=") for s in args.set)}
    verdicts = []
    for first in range(0, len(asked), SLOTS):
        group = asked[first : first + SLOTS]
        callers = [heard(mixer, trial, args.g711) for trial in group]
        sounds, texts = converse(executor, callers, settings)
        for n, (trial, sound, text) in enumerate(zip(group, sounds, texts, strict=True)):
            reply = telephone(sound) if args.g711 else sound
            verdict = trials.judge(trial, reply, text)
            verdicts.append((trial, verdict))
            said = " ".join((trial.kind, trial.voice, *trial.said))
            sys.stderr.write(f"{said} -> {verdict}\n")
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                both = np.stack([callers[n], reply], axis=1)
                soundfile.write(args.out / f"{first + n:03}-{trial.kind}.wav", both, RATE_HZ)
    return trials.summary(verdicts)


def heard(mixer: Mixer, trial: Trial, g711: bool) -> Sound:
    """What the model hears of a trial: (frames * FRAME,)."""
    sound = mixer.calls([trial.call], torch.Generator().manual_seed(len(trial.voice)))
    caller = sound[0, CALLER].numpy()
    return telephone(caller) if g711 else caller


def telephone(sound: Sound) -> Sound:
    """Through 8 kHz and G.711 mu-law, by the box's own resampler."""
    narrow = resampled(sound, RATE_HZ, TELEPHONE_HZ)
    coded = np.sign(narrow) * np.log1p(255 * np.minimum(np.abs(narrow), 1)) / np.log(256)
    levels = np.round(coded * 127) / 127
    spoken = np.sign(levels) * np.expm1(np.abs(levels) * np.log(256)) / 255
    wide = resampled(spoken.astype(np.float32), TELEPHONE_HZ, RATE_HZ)
    return np.pad(wide, (0, max(0, len(sound) - len(wide))))[: len(sound)]


def resampled(sound: Sound, from_hz: int, to_hz: int) -> Sound:
    resampler = Resampler(from_hz, to_hz, Quality.EXACT)
    return np.concatenate([resampler.push(sound), resampler.flush()])


def converse(
    executor: OrtExecutor, callers: list[Sound], settings: dict[str, float]
) -> tuple[list[Sound], list[list[int]]]:
    """Calls side by side, each from its first frame: the model's sound and text."""
    for slot in range(len(callers)):
        executor.join(slot, {"sampling.seed": slot + 1} | settings)
    frames = len(callers[0]) // FRAME
    sounds = np.zeros((len(callers), frames, FRAME), np.float32)
    texts: list[list[int]] = [[] for _ in callers]
    for frame in range(frames):
        for slot, caller in enumerate(callers):
            executor.audio_in[slot] = caller[frame * FRAME : (frame + 1) * FRAME]
        executor.step(len(callers))
        for slot in range(len(callers)):
            if executor.valid[slot]:
                sounds[slot, frame] = executor.audio_out[slot]
            texts[slot].append(int(executor.text[slot]) if executor.valid[slot] else -1)
    return list(sounds.reshape(len(callers), -1)), texts


def codec(stage: Stage, args: argparse.Namespace) -> dict[str, float]:
    """Speech and its copy by the bundle's codec, run stage by stage."""
    coder = Coder(bundle.read(args.bundle))
    mel = MelDistance()
    chunks = [c for c in stage.bank.index.chunks if c.kind in (Kind.DIGITS, "digit")]
    chunks = [c for c in chunks if c.kind == Kind.DIGITS][: args.words]
    distances, right, right_copy, total = [], 0, 0, 0
    recognise = recogniser()
    for chunk in chunks:
        sound = stage.bank.sound[chunk.start : chunk.start + chunk.samples] / np.float32(32_768)
        padded = np.pad(sound, (FRAME, 4 * FRAME - len(sound) % FRAME)).astype(np.float32)
        copy = coder.copied(padded)
        distances.append(float(mel(torch.from_numpy(padded)[None], torch.from_numpy(copy)[None])))
        wanted = chunk.text.split()
        total += len(wanted)
        right += in_common(wanted, recognise(padded))
        right_copy += in_common(wanted, recognise(copy))
    return {
        "numbers": len(chunks),
        "mel distance": round(float(np.mean(distances)), 4),
        "digits right in speech": round(right / total, 4),
        "digits right in its copy": round(right_copy / total, 4),
    }


class Coder:
    """Encode and decode with the bundle's own stages."""

    def __init__(self, opened: bundle.Bundle) -> None:
        import onnxruntime as ort

        self.manifest = opened.manifest
        self.stages = {s.name: s for s in opened.manifest.stages if s.graph}
        options = ort.SessionOptions()
        options.log_severity_level = 3  # rings are copied here, and it would say so every time
        self.sessions = {
            name: ort.InferenceSession(
                str(opened.file(self.stages[name].graph)),
                options,
                providers=["CPUExecutionProvider"],
            )
            for name in ("mimi_encode", "mimi_decode")
        }

    def copied(self, sound: Sound) -> Sound:
        """(n * FRAME,) -> the same, through codes."""
        kinds = {"float32": np.float32, "int64": np.int64}
        state = {
            r.name: np.full((1, *r.shape), r.fill, kinds[r.dtype])
            for r in self.manifest.regions
            if r.name.startswith("mimi.")
        }
        out = []
        for frame in sound.reshape(-1, FRAME):
            codes = self._run("mimi_encode", {"pcm": frame[None, None]}, state)["user_codes"]
            given = {"codes": codes, "valid": np.ones(1, np.bool_)}
            out.append(self._run("mimi_decode", given, state)["pcm_out"][0, 0])
        return np.concatenate(out)

    def _run(
        self, name: str, given: dict[str, np.ndarray], state: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        stage = self.stages[name]
        feeds = {t.name: given.get(t.name, state.get(t.name)) for t in stage.inputs}
        names = [t.name for t in stage.outputs]
        found = dict(zip(names, self.sessions[name].run(names, feeds), strict=True))
        state |= {k.removesuffix(".next"): v for k, v in found.items() if k.endswith(".next")}
        return found


def recogniser() -> Callable[[Sound], list[str]]:
    """pocketsphinx with its own English model, told to expect digits."""
    import soxr
    from pocketsphinx import Decoder

    grammar = (
        "#JSGF V1.0; grammar d; public <d> = (zero|one|two|three|four|five|six|seven|eight|nine)+;"
    )
    decoder = Decoder(samprate=16_000, lm=None, loglevel="FATAL")
    decoder.add_jsgf_string("digits", grammar)
    decoder.activate_search("digits")

    def recognise(sound: Sound) -> list[str]:
        wide = soxr.resample(sound, RATE_HZ, 16_000)
        decoder.start_utt()
        decoder.process_raw(
            (np.clip(wide, -1, 1) * 32_767).astype(np.int16).tobytes(), full_utt=True
        )
        decoder.end_utt()
        best = decoder.hyp()
        return best.hypstr.split() if best else []

    return recognise


def in_common(wanted: list[str], found: list[str]) -> int:
    """Words right: the longest common subsequence, less what was made up beyond the length."""
    table = np.zeros((len(wanted) + 1, len(found) + 1), int)
    for i, a in enumerate(wanted):
        for j, b in enumerate(found):
            table[i + 1, j + 1] = (
                table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
            )
    return int(table[-1, -1]) - max(0, len(found) - len(wanted))


if __name__ == "__main__":
    sys.exit(main())
