"""What a bundle carries so that calls can begin with a voice and a persona.

    silence, sine     codes of frames in which nobody speaks: published constants of the trained
                      codec, or what a smaller codec makes of silence and of a 440 Hz sine
    voices/*          recordings brought to -24 LUFS and encoded frame by frame, as a call would
                      be; or published embeddings (`checkpoint_voice`)
    tokenizer.model   turns a persona into ids

The order in which serving strings them together is the published one: voice, pause, persona,
pause (`appliance.persona`). Not here: the stages (`prompt_stages`), the bundle's folder (`build`).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.bundle import Dtype, PromptSpec, VoiceSpec
from export.checkpoint_voice import SPARE_COLUMNS, read_voice
from export.loudness import TooQuiet, loudness_lufs
from export.mistake import Mistake
from export.models import tokens
from export.models.config import LmConfig, ModelConfig
from export.models.mimi import Mimi
from export.models.streaming import TORCH_DTYPES, fresh_state
from export.prompt_stages import Opening, Prefill

TARGET_LUFS = -24.0  # models/lm.py of NVIDIA/personaplex: load_voice_prompt
SINE_HZ, SINE_AMPLITUDE = 440.0, 0.5  # ibid.: create_sinewave
SETTLED_FRAMES = 25
"""Two seconds of an unchanging sound: the codec's transformers hear it back to their context."""
LONGEST_VOICE_S = 30.0
"""Published voices are a few seconds; every frame of one is a frame less of conversation."""


class VoiceError(Mistake):
    """A file that cannot be a voice of this model; whoever named it must choose another."""


class NoRoom(Mistake):
    """A context in which no prompt fits; whoever asked for it must ask for more."""


def check_room(config: ModelConfig) -> None:
    """Raise NoRoom if a prompt of two pauses and one piece of text is longer than may be."""
    if config.prompt is None:
        return
    needed = 2 * config.prompt.pause_frames + 1
    if config.lm.context - 1 < needed:
        raise NoRoom(
            f"--context {config.lm.context}: calls of {config.name} begin with a prompt, whose two "
            f"pauses of {config.prompt.pause_frames} ticks and one piece of text fill {needed}, "
            f"and one tick must be left to the call. Name {needed + 1} or more"
        )


def settled_codes(mimi: Mimi, sine: bool) -> tuple[int, ...]:
    """What the codec makes of silence, or of the sine, once it has heard it for two seconds."""
    config = mimi.config
    at = np.arange(SETTLED_FRAMES * config.samples_per_frame) / config.sample_rate_hz
    pcm = SINE_AMPLITUDE * np.sin(2 * np.pi * SINE_HZ * at) if sine else np.zeros_like(at)
    return tuple(encode_sound(mimi, pcm)[-1].tolist())


@torch.no_grad()
def encode_sound(mimi: Mimi, pcm: NDArray[np.float64]) -> Tensor:
    """(S,) at the codec's rate -> (T, codebooks) int64, frame by frame, the last one filled up."""
    size = mimi.config.samples_per_frame
    frames = math.ceil(len(pcm) / size)
    padded = torch.zeros(frames * size)
    padded[: len(pcm)] = torch.from_numpy(pcm).float()
    state = fresh_state(mimi.regions(), 1)
    codes = []
    for frame in padded.view(frames, 1, 1, size):
        found, new = mimi.encode(frame, state)
        state |= new
        codes.append(found)
    return torch.cat(codes)


def sound_of(path: Path, rate_hz: int, longest_s: float = LONGEST_VOICE_S) -> NDArray[np.float64]:
    """The first channel of a recording at ``rate_hz``, (S,). Raises `VoiceError`."""
    import soundfile
    import soxr

    try:
        pcm, found_hz = soundfile.read(path, dtype="float64", always_2d=True)
    except (OSError, RuntimeError) as err:  # soundfile's errors are RuntimeErrors
        raise VoiceError(f"{path}: {err}. Name a WAV file of one person speaking") from None
    if len(pcm) > longest_s * found_hz or not np.isfinite(pcm).all():
        raise VoiceError(
            f"{path} lasts {len(pcm) / found_hz:.1f} s, or has samples that are no numbers; "
            f"at most {longest_s:.0f} s of one person speaking are taken"
        )
    return np.asarray(soxr.resample(pcm[:, 0], found_hz, rate_hz), np.float64)


def codes_of_voice(name: str, pcm: NDArray[np.float64], mimi: Mimi) -> Tensor:
    """Codes (T, codebooks) of a voice (S,), brought to `TARGET_LUFS`. Raises `VoiceError`."""
    try:
        gain_db = TARGET_LUFS - loudness_lufs(pcm, mimi.config.sample_rate_hz)
    except TooQuiet as err:
        raise VoiceError(f"{name} is too quiet or too short: {err}. Record it again") from None
    return encode_sound(mimi, pcm * 10 ** (gain_db / 20))


def voice_frames(spec: PromptSpec, codes: Tensor) -> NDArray[np.int64]:
    """Frames (T, streams) in which the agent says ``codes`` (T, agent's) and nobody else does."""
    frames = np.empty((len(codes), len(spec.delays)), np.int64)
    own = 1 + codes.shape[1]
    frames[:, 0], frames[:, 1:own], frames[:, own:] = (
        spec.silent_text_id,
        codes.numpy(),
        spec.caller_codes,
    )
    return frames


def packaged_frames(spec: PromptSpec, cache: Tensor, embedded_rows: int) -> NDArray[np.int64]:
    """Frames (E + 1, streams) of a published voice, of which only the last two are known.

    cache: (streams, columns), the ring it left behind: the last frame lies at position E, plus
    the delay of each stream; those before reach as far as E with their delayed streams alone.
    """
    frames = np.empty((embedded_rows + 1, len(spec.delays)), np.int64)
    frames[:] = (spec.silent_text_id, *spec.silence_codes, *spec.caller_codes)
    ring, columns = cache.numpy(), cache.shape[1]
    for stream, delay in enumerate(spec.delays):
        for frame in range(max(0, embedded_rows - delay), embedded_rows + 1):
            frames[frame, stream] = ring[stream, (frame + delay) % columns]
    return frames


def prompt_spec(
    config: ModelConfig, mimi: Mimi, graphs: tuple[Prefill, Opening], tokenizer: str
) -> PromptSpec:
    """The manifest's prompt section, without voices. ``config.prompt`` must be set."""
    prompt, lm = config.prompt, config.lm
    assert prompt is not None, config.name
    prefill, opening = (graph.spec for graph in graphs)
    return PromptSpec(
        prefill=prefill,
        opening=opening,
        tokens=tokens.TOKENS,
        counter=tokens.OFFSET,
        delays=lm.delays,
        initial_ids=(lm.text_card, *[lm.card] * lm.audio_streams),
        silent_text_id=lm.text_padding_id,
        silence_codes=prompt.silence_codes or settled_codes(mimi, sine=False),
        caller_codes=prompt.sine_codes or settled_codes(mimi, sine=True),
        pause_frames=prompt.pause_frames,
        longest_frames=lm.context - 1,
        wrap=prompt.wrap,
        tokenizer=tokenizer,
    )


def voices(
    sources: Mapping[str, Path | NDArray[np.float64]],
    spec: PromptSpec,
    mimi: Mimi,
    lm: LmConfig,
    hidden: Dtype,
) -> Iterator[tuple[VoiceSpec, bytes]]:
    """Every voice by name, and its file's bytes.

    sources: a packaged voice (``.pt``), a recording, or sound at the codec's rate, (S,).

    Raises `VoiceError`, `checkpoint_file.CheckpointError`.
    """
    room = spec.longest_frames - 2 * spec.pause_frames
    for name, source in sorted(sources.items()):
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
            raise VoiceError(f"{name!r} is no name for a voice: letters, digits, - and _, up to 64")
        embedded = torch.zeros(0, lm.dimension)
        if isinstance(source, Path) and source.suffix == ".pt":
            held = read_voice(source, lm)
            assert held["cache"].shape[1] == lm.max_delay + SPARE_COLUMNS, source
            embedded = held["embeddings"]
            frames = packaged_frames(spec, held["cache"], len(embedded))
        else:
            rate_hz = mimi.config.sample_rate_hz
            pcm = sound_of(source, rate_hz) if isinstance(source, Path) else source
            frames = voice_frames(spec, codes_of_voice(name, pcm, mimi))
        if len(frames) > room:
            raise VoiceError(
                f"voice {name} is {len(frames)} frames long, and a prompt of this model has room "
                f"for {room}. Cut it to a few seconds"
            )
        yield (
            VoiceSpec(name, f"voices/{name}.safetensors", len(frames)),
            voice_file(frames, embedded, hidden),
        )


def voice_file(frames: NDArray[np.int64], embedded: Tensor, hidden: Dtype) -> bytes:
    """The file `engines.voice` reads."""
    from safetensors.torch import save

    held = {"frames": torch.from_numpy(frames), "embedded": embedded.to(TORCH_DTYPES[hidden])}
    return save({name: tensor.contiguous() for name, tensor in held.items()})
