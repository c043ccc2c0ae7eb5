"""What export writes of a prompt: codes of silence, voices from sound and from published files."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
import torch

from engines.bundle import Bundle
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtPrimer
from engines.prefill import make_prompt
from engines.voice import read_voice
from export import build, cli, prompt, tiny
from export.loudness import loudness_lufs
from export.models.config import PERSONAPLEX_7B, PromptConfig
from export.models.mimi import Mimi
from export.models.streaming import fresh_state
from export.prompt import VoiceError
from export.prompt_stages import forced_tick
from export.source import from_modules
from export.tiny import PERSONA_MICRO
from tests.export.calls import SEED, TorchCalls
from tests.export.persona import frames_of

pytestmark = pytest.mark.torch

RATE_HZ = PERSONA_MICRO.mimi.sample_rate_hz
LM = PERSONA_MICRO.lm


@pytest.fixture(scope="module")
def mimi() -> Mimi:
    return tiny.seeded(PERSONA_MICRO, SEED)[0]


def hum(seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    return np.asarray(0.02 * np.sin(2 * np.pi * 200 * at) * (1 + np.sin(2 * np.pi * 2 * at)))


def test_published_codes_are_used_where_the_codec_is_the_published_one() -> None:
    assert PERSONAPLEX_7B.prompt == PromptConfig()
    assert PromptConfig().silence_codes == (948, 243, 1178, 546, 1736, 1030, 1978, 2008)
    assert PromptConfig().sine_codes == (430, 1268, 381, 1611, 1095, 1495, 56, 472)
    assert PromptConfig().pause_frames == int(0.5 * 12.5)


@torch.no_grad()
def test_a_smaller_codec_is_asked_what_silence_and_the_sine_are(
    mimi: Mimi, persona_bundle: Bundle
) -> None:
    spec = persona_bundle.manifest.prompt
    assert spec is not None
    state = fresh_state(mimi.regions(), 1)
    size = PERSONA_MICRO.mimi.samples_per_frame
    at = torch.arange(25 * size) / RATE_HZ
    for pcm, codes in (
        (torch.zeros(25 * size), spec.silence_codes),
        (0.5 * torch.sin(2 * torch.pi * 440 * at), spec.caller_codes),
    ):
        state = fresh_state(mimi.regions(), 1)
        for frame in pcm.view(25, 1, 1, size):
            found, new = mimi.encode(frame, state)
            state |= new
        assert tuple(found[0].tolist()) == codes
    assert spec.silence_codes != spec.caller_codes
    assert spec.longest_frames == LM.context - 1


def test_a_recording_is_brought_to_minus_24_lufs_and_encoded_as_a_call_would_be(
    mimi: Mimi, tmp_path: Path
) -> None:
    path = tmp_path / "ann.wav"
    other_hz = 44_100
    pcm = np.stack([hum(1.23, other_hz), np.zeros(round(1.23 * other_hz))], 1)
    soundfile.write(path, pcm, other_hz, subtype="FLOAT")
    sound = prompt.sound_of(path, RATE_HZ)
    assert len(sound) == pytest.approx(1.23 * RATE_HZ, abs=2)
    codes = prompt.codes_of_voice("ann", sound, mimi)
    assert len(codes) == -(-len(sound) // PERSONA_MICRO.mimi.samples_per_frame)
    gain = 10 ** ((-24 - loudness_lufs(sound, RATE_HZ)) / 20)
    assert gain > 1.5
    assert torch.equal(codes, prompt.encode_sound(mimi, sound * gain))
    assert torch.equal(codes, prompt.codes_of_voice("ann", sound * 3, mimi))
    assert not torch.equal(codes, prompt.encode_sound(mimi, sound))


def test_what_cannot_be_a_voice_is_refused(
    mimi: Mimi, tmp_path: Path, persona_bundle: Bundle
) -> None:
    spec = persona_bundle.manifest.prompt
    assert spec is not None
    path = tmp_path / "x.wav"
    path.write_bytes(b"no sound")
    with pytest.raises(VoiceError, match=r"x\.wav"):
        prompt.sound_of(path, RATE_HZ)
    soundfile.write(path, hum(31), RATE_HZ)
    with pytest.raises(VoiceError, match=r"lasts 31\.0 s.*at most 30 s"):
        prompt.sound_of(path, RATE_HZ)
    with pytest.raises(VoiceError, match="ann is too quiet or too short"):
        prompt.codes_of_voice("ann", np.zeros(RATE_HZ), mimi)
    for name in ("../ann", "", "a" * 65, "ann.wav"):
        with pytest.raises(VoiceError, match="no name for a voice"):
            list(prompt.voices({name: hum(1)}, spec, mimi, LM, "float32"))
    with pytest.raises(VoiceError, match=r"50 frames long.*has room for 35"):
        list(prompt.voices({"ann": hum(4)}, spec, mimi, LM, "float32"))


@torch.no_grad()
def test_a_packaged_voice_continues_as_the_one_it_was_saved_from(
    persona_bundle: Bundle, tmp_path: Path
) -> None:
    """Embeddings and ring as PersonaPlex saves them; the state after is that of its frames."""
    spec, lm = persona_bundle.manifest.prompt, tiny.seeded(PERSONA_MICRO, SEED)[1]
    assert spec is not None
    rows = 11
    frames = frames_of(LM, rows)
    fed = make_prompt(spec, frames.numpy(), np.zeros((0, LM.dimension), np.float32)).ids
    embeddings = lm.embed(torch.from_numpy(fed[: rows - 1]))
    columns = LM.max_delay + 3  # of its ring; position p lies at p modulo that
    ring = torch.full((1, LM.streams, columns), -2)
    for frame in range(rows):
        for stream, delay in enumerate(LM.delays):
            ring[0, stream, (frame + delay) % columns] = frames[frame, stream]
    path = tmp_path / "NATF0.pt"
    torch.save({"embeddings": embeddings[:, None, None], "cache": ring}, path)

    ((voice, content),) = prompt.voices(
        {"NATF0": path}, spec, tiny.seeded(PERSONA_MICRO, SEED)[0], LM, "float32"
    )
    assert (voice.name, voice.frames) == ("NATF0", rows)
    (tmp_path / "voices").mkdir()
    (tmp_path / voice.file).write_bytes(content)
    found, embedded = read_voice(Bundle(tmp_path, persona_bundle.manifest), spec, voice)
    assert embedded.shape == (rows - 1, LM.dimension)

    after = np.concatenate([found, frames_of(LM, 4, seed=9).numpy()])
    made = make_prompt(spec, after, embedded)
    executor = OrtExecutor(persona_bundle, 1)
    primer = OrtPrimer(executor)
    primer.clear(0)
    primer.feed(0, made, 0, made.shared_rows)
    calls = TorchCalls(PERSONA_MICRO, SEED)
    calls.join(0, {})
    for frame_ids in torch.cat([frames, frames_of(LM, 4, seed=9)])[:-1]:
        forced_tick(lm, calls.sessions[0], frame_ids)
    for name in (region.name for region in lm.regions()):
        away = np.abs(executor.region(name)[0] - calls.sessions[0][name][0].numpy())
        assert away.max() < 1e-4, name


def test_a_seeded_model_brings_voices_that_differ(persona_bundle: Bundle) -> None:
    spec = persona_bundle.manifest.prompt
    assert spec is not None
    assert [voice.name for voice in spec.voices] == ["alto", "bass"]
    frames = [read_voice(persona_bundle, spec, voice)[0] for voice in spec.voices]
    assert (frames[0] != frames[1]).any()
    for found in frames:
        assert (found[:, 0] == spec.silent_text_id).all()
        assert (found[:, 9:] == spec.caller_codes).all()
    assert msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) == spec


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["personaplex-micro", "--pin-persona", "48"], "window of personaplex-micro is 48 ticks"),
        (["personaplex-micro", "--pin-persona", "-1"], "Name 0 to 47"),
        (["personaplex-micro", "--voices", "{empty}"], "holds no .wav or .pt file"),
        (["micro", "--voices", "{voices}"], "moshi-micro takes no voices; leave --voices out"),
        (["personaplex-micro", "--voices", "{voices}"], "ann is too quiet or too short"),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_remedy(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "voices").mkdir()
    soundfile.write(tmp_path / "voices" / "ann.wav", np.zeros(RATE_HZ), RATE_HZ)
    folders = {"empty": str(tmp_path / "empty"), "voices": str(tmp_path / "voices")}
    given = [word.format(**folders) for word in words]
    assert cli.main(["build", *given, "--batches", "1-1", "-o", str(tmp_path / "out")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("duplexbox export build: ")
    assert says in last


@pytest.mark.parametrize("context", [7, 13])
def test_a_context_without_room_for_a_prompt_is_refused_before_anything_is_made(
    context: int, tmp_path: Path
) -> None:
    config = replace(PERSONA_MICRO, lm=replace(LM, context=context))
    source = from_modules(config, *tiny.seeded(config, SEED), pieces=tiny.pieces(config))
    with pytest.raises(prompt.NoRoom, match=rf"--context {context}: .* Name 14 or more"):
        build.build(source, tmp_path / "b", largest_batch=1)
    assert list(tmp_path.iterdir()) == []
    prompt.check_room(replace(config, lm=replace(LM, context=14)))
    prompt.check_room(replace(config, prompt=None))


def test_a_voice_that_cannot_be_is_refused_before_the_graphs_are_traced(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", hum(20), RATE_HZ)
    source = from_modules(
        PERSONA_MICRO, *tiny.seeded(PERSONA_MICRO, SEED), pieces=tiny.pieces(PERSONA_MICRO)
    )
    folder = tmp_path / "b"
    with pytest.raises(VoiceError, match=r"voice long is 250 frames long"):
        build.build(source, folder, largest_batch=1, voices={"long": tmp_path / "long.wav"})
    assert not (folder / "stages").exists()
