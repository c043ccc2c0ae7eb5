"""How well the pocket model converses, and how well its codec is understood.

    python -m bench.pocket box BUNDLE HELD_BANK [--each N] [--kinds KIND,...] [--g711] [--listen]
    python -m bench.pocket talk BUNDLE HELD_BANK [the same]
    python -m bench.pocket codec BUNDLE HELD_BANK [--words N]

`box` and `talk` hold short calls with voices and scripts that training never heard: numbers read
back, names, interruptions, pauses, silence. `box` plays them into a box on the real clock, eight
at once (`pocket_box`); with --g711 they are 8 kHz mu-law files, and what comes back is judged after
mu-law, too. `talk` runs the engine the box serves from as fast as it can, which is enough to
compare settings (--set sampling.text_temperature=0); callers' sound goes through the box's
resampler. With --listen, pocketsphinx says which digits the answer's sound holds. `codec` gives the
distance of mel spectra between speech and its copy, and how many digits pocketsphinx gets right in
both.

Made for one machine; no decision of the box hangs on it.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import torch

from appliance.lines.resample import Quality, Resampler
from bench import pocket_box
from bench.pocket_box import SLOTS, Answer
from engines import bundle
from engines.ort_executor import OrtExecutor
from export.pocket import bank, trials
from export.pocket.codec_losses import MelDistance
from export.pocket.mix import Mixer
from export.pocket.script import CALLER, FRAME, RATE_HZ, Stage
from export.pocket.trials import FRAME_S, KINDS, Sound, Trial, Verdict
from export.pocket.world import DIGITS, Kind

TELEPHONE_HZ = 8_000
BETWEEN_DIGITS_S = 0.07
"""As the desk's script has it."""
Recognise = Callable[[Sound], list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("box", "talk", "codec"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("held", type=Path, help="export.pocket.cli bank --voices held-out")
    parser.add_argument("--each", type=int, default=48, help="trials of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--words", type=int, default=200, help="numbers the recogniser hears")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--g711", action="store_true")
    parser.add_argument("--at-once", type=int, default=SLOTS, help="calls live in the box")
    parser.add_argument("--listen", action="store_true", help="digits of the answer's sound, too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path, help="every trial and its verdict")
    parser.add_argument("--out", type=Path, help="keep calls as WAV files, caller left")
    args = parser.parse_args()
    stage = Stage(bank.read(args.held))
    found = codec(stage, args) if args.what == "codec" else talk(stage, args)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


def talk(stage: Stage, args: argparse.Namespace) -> dict[str, float]:
    """Hold all trials and judge them."""
    mixer = Mixer(stage, torch.device("cpu"))
    asked = trials.trials(stage, args.seed, args.each, kinds=args.kinds.split(","))
    clock: dict[str, float] = {}
    if args.what == "box":
        with tempfile.TemporaryDirectory(prefix="pocket-") as folder:
            answers, clock = in_a_box(args, mixer, asked, Path(folder))
    else:
        answers = on_the_engine(args, mixer, asked)
    recognise = recogniser() if args.listen else None
    verdicts, rows, lost = [], [], 0
    for n, (trial, answer) in enumerate(zip(asked, answers, strict=True)):
        if isinstance(answer, str):
            sys.stderr.write(f"no call: {answer}\n")
            lost += 1
            verdicts.append((trial, Verdict(right=False)))
            continue
        sound = telephone(answer.sound) if args.g711 else answer.sound
        verdict = trials.judge(trial, sound, answer.text, answer.delay_s)
        verdicts.append((trial, verdict))
        row = facts(trial, answer, verdict)
        if recognise and trial.kind in ("number", "pause"):
            row |= listened(recognise, trial, sound, answer)
        rows.append(row)
        sys.stderr.write(f"{json.dumps(row)}\n")
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            both = conversation(spoken(mixer, trial), sound, answer.delay_s)
            soundfile.write(args.out / f"{n:03}-{trial.kind}.wav", both, RATE_HZ)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    found = trials.summary(verdicts) | {"calls lost": lost} | clock
    sure = [row for row in rows if "heard" in row]
    if sure:
        same = [row["heard"] == row["wrote"] for row in sure]
        found["answers whose sound is heard as their text"] = round(float(np.mean(same)), 4)
    return found


def facts(trial: Trial, answer: Answer, verdict: Verdict) -> dict[str, object]:
    """One trial and its verdict, to be read by people."""
    row: dict[str, object] = {"kind": trial.kind, "voice": trial.voice}
    row |= {"said": " ".join(trial.said), "ends_s": round(trial.ends_s, 3)}
    row |= {"delay_s": round(answer.delay_s, 4), "concealed": answer.concealed}
    return row | {field: getattr(verdict, field) for field in Verdict.__slots__}


def conversation(caller: Sound, model: Sound, delay_s: float) -> Sound:
    """Left the caller, right the model when the caller hears it: (S, 2)."""
    late = round(delay_s * RATE_HZ)
    both = np.zeros((max(len(caller), late + len(model)), 2), np.float32)
    both[: len(caller), 0] = caller
    both[late : late + len(model), 1] = model
    return both


def in_a_box(
    args: argparse.Namespace, mixer: Mixer, asked: list[Trial], folder: Path
) -> tuple[list[Answer | str], dict[str, float]]:
    """On the clock, from files."""
    files = []
    for n, trial in enumerate(asked):
        path = folder / f"{n:03}-{trial.kind}.wav"
        sound = spoken(mixer, trial)
        if args.g711:
            narrow = resampled(sound, RATE_HZ, TELEPHONE_HZ)
            soundfile.write(path, narrow, TELEPHONE_HZ, subtype="ULAW")
        else:
            soundfile.write(path, sound, RATE_HZ, subtype="PCM_16")
        files.append(path)
    return pocket_box.converse(args.bundle, files, args.set, folder, args.at_once)


def on_the_engine(args: argparse.Namespace, mixer: Mixer, asked: list[Trial]) -> list[Answer | str]:
    """As fast as it goes, `SLOTS` at once."""
    executor = OrtExecutor(bundle.read(args.bundle), SLOTS)
    settings = {name: float(value) for name, _, value in (s.partition("=") for s in args.set)}
    found: list[Answer | str] = []
    for first in range(0, len(asked), SLOTS):
        group = [spoken(mixer, trial) for trial in asked[first : first + SLOTS]]
        callers = [telephone(sound) if args.g711 else sound for sound in group]
        found += converse(executor, callers, settings, first)
    return found


def listened(recognise: Recognise, trial: Trial, sound: Sound, answer: Answer) -> dict[str, str]:
    """The digits the model wrote after the caller's end, and those heard in its sound meanwhile."""
    words = [(at, w) for at, w in trials.timed(answer.text, answer.delay_s) if at > trial.ends_s]
    first = next((n for n, (_, word) in enumerate(words) if word in DIGITS), None)
    if first is None:
        return {}
    last = next((n for n in range(first, len(words)) if words[n][1] not in DIGITS), len(words))
    begins, until = words[first][0], words[last][0] if last < len(words) else words[-1][0] + 0.8
    part = slice(*(round(max(0, at - answer.delay_s) * RATE_HZ) for at in (begins - 0.1, until)))
    wrote = " ".join(word for _, word in words[first:last])
    return {"wrote": wrote, "heard": " ".join(recognise(sound[part]))}


def spoken(mixer: Mixer, trial: Trial) -> Sound:
    """A trial's caller, before any telephone: (frames * FRAME,)."""
    sound = mixer.calls([trial.call], torch.Generator().manual_seed(len(trial.voice)))
    found: Sound = sound[0, CALLER].numpy()
    return found


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
    executor: OrtExecutor, callers: list[Sound], settings: dict[str, float], seed: int
) -> list[Answer | str]:
    """Calls side by side, each from its first frame."""
    for slot in range(len(callers)):
        executor.join(slot, {"sampling.seed": seed + slot + 1} | settings)
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
    found = sounds.reshape(len(callers), -1)
    return [Answer(sound, text, FRAME_S) for sound, text in zip(found, texts, strict=True)]


def codec(stage: Stage, args: argparse.Namespace) -> dict[str, float]:
    """Speech and its copy by the bundle's codec, run stage by stage: callers' numbers in one
    breath, and numbers as the desk's own recordings say them back."""
    coder = Coder(bundle.read(args.bundle))
    mel, recognise = MelDistance(), recogniser()
    numbers = [c for c in stage.bank.index.chunks if c.kind == Kind.DIGITS][: args.words]
    distances, right, right_copy, total = [], 0, 0, 0
    for chunk in numbers:
        whole = padded(recorded(stage, chunk))
        copy = coder.copied(whole)
        distances.append(float(mel(torch.from_numpy(whole)[None], torch.from_numpy(copy)[None])))
        wanted = chunk.text.split()
        total += len(wanted)
        right += in_common(wanted, recognise(whole))
        right_copy += in_common(wanted, recognise(copy))
    exact, exact_copy = [], []
    for wanted, sound in read_back(stage, args.seed, args.words):
        whole = padded(sound)
        exact.append(recognise(whole) == wanted)
        exact_copy.append(recognise(coder.copied(whole)) == wanted)
    return {
        "numbers": len(numbers),
        "mel distance": round(float(np.mean(distances)), 4),
        "digits right in speech": round(right / total, 4),
        "digits right in its copy": round(right_copy / total, 4),
        "desk's numbers exactly right in its recordings": round(float(np.mean(exact)), 4),
        "and in their copies": round(float(np.mean(exact_copy)), 4),
    }


def recorded(stage: Stage, chunk: bank.Chunk) -> Sound:
    """What a voice said."""
    sound = stage.bank.sound[chunk.start : chunk.start + chunk.samples]
    return np.asarray(sound / 32_768, np.float32)


def padded(sound: Sound) -> Sound:
    """Whole frames of it, with silence before and behind."""
    return np.pad(sound, (FRAME, 4 * FRAME - len(sound) % FRAME)).astype(np.float32)


def read_back(stage: Stage, seed: int, count: int) -> Iterator[tuple[list[str], Sound]]:
    """Numbers of one to four digits as the desk's recordings say them, without the model."""
    rng = random.Random(seed)
    pause = np.zeros(round(BETWEEN_DIGITS_S * RATE_HZ), np.float32)
    for n in range(count):
        digits = rng.choices(DIGITS, k=1 + n % 4)
        parts: list[Sound] = []
        for at, digit in enumerate(digits, 1):
            form = bank.AT_END if at == len(digits) else bank.WITHIN
            parts += [recorded(stage, rng.choice(stage.desk[digit, form])), pause]
        yield digits, np.concatenate(parts)


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


def recogniser() -> Recognise:
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
