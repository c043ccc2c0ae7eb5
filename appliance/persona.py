"""Who a call is to be: a voice and a persona, as the prompt the model is fed before it listens.

    voice, pause, persona, pause        as published: server.py of NVIDIA/personaplex

A voice is chosen by name from those the bundle carries; there is no path in a request. A persona is
text: it is wrapped as the model was trained to see it and becomes one frame per token. Everything
else that a frame holds (silence, the caller's tone) are facts of the model, in the bundle.

Pure but for reading files of the bundle, once. Not here: feeding (`priming`), keeping what was fed
(`snapshot_store`).
"""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.admission import Reason, Refusal
from engines.bundle import Bundle, BundleError, PromptSpec
from engines.prefill import Prompt, PromptError, make_prompt
from engines.tensor_file import STORED
from engines.voice import read_voice

TOKENIZER_MISSING = (
    "a persona needs the sentencepiece library on the box; "
    "install it there: pip install 'duplexbox[persona]'"
)


class Personas:
    """The prompts of one bundle. The control thread uses it."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises `BundleError` when its tokenizer is not one."""
        self._bundle = bundle
        self.spec: PromptSpec | None = bundle.manifest.prompt
        self._tokenizer = _load_tokenizer(bundle, self.spec) if self.spec else None
        self._voices: dict[str, tuple[NDArray[np.int64], NDArray[Any]]] = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be turned into ids here."""
        return self._tokenizer is not None

    @property
    def voices(self) -> tuple[str, ...]:
        """Names a caller may ask for."""
        return tuple(voice.name for voice in self.spec.voices) if self.spec else ()

    def prepare(self, voice: str, persona: str) -> Prompt | Refusal | None:
        """The prompt of such a call; None when it asks for neither and begins with nothing.

        Raises `BundleError`, which names files, when the bundle's voice cannot be read.
        """
        persona = persona.strip()  # a blank one is none: nobody means to be told nothing
        if not voice and not persona:
            return None
        spec, model = self.spec, self._bundle.manifest.model.name
        if spec is None:
            what = "voice" if voice else "persona"
            return _no(f"{model} takes no {what}: its calls begin with nothing but their caller")
        if voice and voice not in self.voices:
            names = ", ".join(self.voices) or "none"
            return _no(f"{voice[:64]!r} is not a voice of {model}; it has {names}")
        tokens: list[int] = []
        if persona:
            if self._tokenizer is None:
                return _no(TOKENIZER_MISSING)
            tokens = self._tokenizer.encode(wrapped(spec, persona))
        frames, embedded = self._voice(spec, voice)
        try:
            return make_prompt(spec, compose(spec, frames, tokens), embedded)
        except PromptError as err:
            return _no(str(err))

    def plain(self, rows: int) -> Prompt:
        """A prompt of silence, for timing. Only of a bundle whose calls have prompts."""
        assert self.spec is not None
        _, embedded = no_voice(self.spec)
        count = max(1, min(rows, self.spec.longest_frames))
        return make_prompt(self.spec, np.repeat(quiet(self.spec), count, axis=0), embedded)

    def _voice(self, spec: PromptSpec, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if name not in self._voices:
            found = [voice for voice in spec.voices if voice.name == name]
            if found:
                self._voices[name] = read_voice(self._bundle, spec, found[0])
            else:
                self._voices[name] = no_voice(spec)
        return self._voices[name]


def compose(spec: PromptSpec, voice: NDArray[np.int64], tokens: list[int]) -> NDArray[np.int64]:
    """All frames of a prompt, (N, streams) int64. voice: (T, streams), T may be 0."""
    pause = np.repeat(quiet(spec), spec.pause_frames, axis=0)
    spoken = np.repeat(quiet(spec), len(tokens), axis=0)
    spoken[:, 0] = tokens
    return np.concatenate([voice, pause, spoken, pause])


def quiet(spec: PromptSpec) -> NDArray[np.int64]:
    """One frame in which nobody says anything, (1, streams)."""
    return np.array([(spec.silent_text_id, *spec.silence_codes, *spec.caller_codes)], np.int64)


def no_voice(spec: PromptSpec) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Frames and embeddings of no voice at all."""
    (embedded,) = (t for t in spec.prefill.inputs if t.name == "embedded")
    return quiet(spec)[:0], np.zeros((0, *embedded.row_shape), STORED[embedded.dtype])


def wrapped(spec: PromptSpec, persona: str) -> str:
    """The text as the model was trained to see it; one that is wrapped already stays as it is."""
    text = persona.strip()
    if text.startswith(spec.wrap) and text.endswith(spec.wrap) and len(text) > len(spec.wrap):
        return text
    return f"{spec.wrap} {text} {spec.wrap}"


def _load_tokenizer(bundle: Bundle, spec: PromptSpec) -> Any:
    """A SentencePiece processor; None when the library is not installed."""
    path = bundle.file(spec.tokenizer)
    try:
        library = importlib.import_module("sentencepiece")
    except ModuleNotFoundError:
        return None
    try:
        tokenizer = library.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as err:
        raise BundleError(f"{path} is no SentencePiece model: {err}") from None
    ids = spec.initial_ids[0]  # the id after the last text id
    if tokenizer.get_piece_size() != ids:
        raise BundleError(
            f"{path} has {tokenizer.get_piece_size()} pieces and the model {ids} text ids. "
            f"Build the bundle again: duplexbox export build --help"
        )
    return tokenizer


def _no(why: str) -> Refusal:
    return Refusal(Reason.FAULT, why)
