"""From a request to a prompt: order, wrapping, allow-lists and refusals."""

import importlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from appliance.admission import Reason, Refusal
from appliance.config import PersonaConfig
from appliance.persona import Personas, compose, quiet, wrapped
from appliance.reception import Reception
from engines import tensor_file
from engines.bundle import Bundle, BundleError
from engines.prefill import Prompt
from engines.tensor_file import Tensor
from export.checkpoint_text import seeded_pieces, sentencepiece_model
from tests.fakes import make_bundle
from tests.fakes_prompt import SPEC, make_prompted_bundle

IDS = 128
VOICE = np.arange(12, dtype=np.int64).reshape(4, 3)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """With a tokenizer of 128 pieces and a voice of four frames, the first two by embedding."""
    bundle = make_prompted_bundle(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(seeded_pieces(IDS)))
    (tmp_path / "voices").mkdir()
    write_voice(tmp_path, VOICE, np.ones((2, 2), np.float32))
    spec = msgspec.structs.replace(SPEC, initial_ids=(IDS, 9, 9))
    return Bundle(tmp_path, msgspec.structs.replace(bundle.manifest, prompt=spec))


def write_voice(folder: Path, frames: np.ndarray, embedded: np.ndarray) -> None:
    held = {"frames": Tensor("int64", frames), "embedded": Tensor("float32", embedded)}
    (folder / SPEC.voices[0].file).write_bytes(b"".join(tensor_file.encode(held, {})))


def refusal(found: Prompt | Refusal | None) -> str:
    assert isinstance(found, Refusal), found
    assert found.reason is Reason.FAULT
    return found.detail


def test_the_order_is_voice_pause_persona_pause() -> None:
    frames = compose(SPEC, VOICE, [50, 51, 52])
    assert frames[:4].tolist() == VOICE.tolist()
    silent = [3, 1, 2]
    assert frames[4:6].tolist() == [silent] * 2
    assert frames[6:9].tolist() == [[50, 1, 2], [51, 1, 2], [52, 1, 2]]
    assert frames[9:].tolist() == [silent] * 2
    assert quiet(SPEC).tolist() == [silent]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("You are Ann.", "<system> You are Ann. <system>"),
        ("  You are Ann.\n", "<system> You are Ann. <system>"),
        ("<system> You are Ann. <system>", "<system> You are Ann. <system>"),
        ("<system>", "<system> <system> <system>"),
    ],
)
def test_a_persona_is_wrapped_once(text: str, says: str) -> None:
    assert wrapped(SPEC, text) == says


def test_a_voice_and_a_persona_become_one_prompt(bundle: Bundle) -> None:
    pytest.importorskip("sentencepiece", reason="needs the persona extra")
    personas = Personas(bundle)
    both = personas.prepare("alto", "Be kind")
    assert isinstance(both, Prompt)
    assert both.frames[:4].tolist() == VOICE.tolist()
    assert both.embedded.tolist() == [[1, 1], [1, 1]]
    text = both.frames[6:-2, 0].tolist()
    assert len(text) > len("<system>  <system>") // 2
    assert all(3 < token < IDS for token in text)
    voice, words = personas.prepare("alto", ""), personas.prepare("", "Be kind")
    assert isinstance(voice, Prompt)
    assert isinstance(words, Prompt)
    assert voice.rows == 4 + 2 + 2
    assert words.frames.tolist() == both.frames[4:].tolist()
    assert len(words.embedded) == 0
    again = personas.prepare("alto", "Be kind")
    assert isinstance(again, Prompt)
    assert again.key == both.key
    assert len({both.key, voice.key, words.key}) == 3
    assert personas.prepare("", "") is None


@pytest.mark.parametrize("name", ["tenor", "../voices/alto", "voices/alto.safetensors", "ALTO"])
def test_only_the_bundles_voices_can_be_named(bundle: Bundle, name: str) -> None:
    says = refusal(Personas(bundle).prepare(name, ""))
    assert f"{name!r} is not a voice of echo; it has alto" in says


def test_a_blank_persona_is_none(bundle: Bundle) -> None:
    assert Personas(bundle).prepare("", " \n ") is None


def test_a_prompt_that_leaves_no_room_is_refused(bundle: Bundle) -> None:
    pytest.importorskip("sentencepiece", reason="needs the persona extra")
    says = refusal(Personas(bundle).prepare("alto", "Be kind. " * 40))
    assert "frames long and this bundle takes 63; shorten the persona" in says


def test_without_the_tokenizers_library_voices_still_work(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    personas = Personas(bundle)
    assert "pip install 'duplexbox[persona]'" in refusal(personas.prepare("", "Be kind"))
    assert isinstance(personas.prepare("alto", ""), Prompt)


def test_a_model_without_prompts_says_so(tmp_path: Path) -> None:
    personas = Personas(make_bundle(tmp_path))
    assert personas.voices == ()
    assert "echo takes no persona" in refusal(personas.prepare("", "Be kind"))
    assert "echo takes no voice" in refusal(personas.prepare("alto", ""))
    assert personas.prepare("", "") is None


def test_a_tokenizer_of_another_model_is_a_bad_bundle(bundle: Bundle) -> None:
    pytest.importorskip("sentencepiece", reason="needs the persona extra")
    path = bundle.file("tokenizer.model")
    path.write_bytes(sentencepiece_model(seeded_pieces(IDS - 1)))
    with pytest.raises(BundleError, match="has 127 pieces and the model 128 text ids"):
        Personas(bundle)
    path.write_bytes(b"no model")
    with pytest.raises(BundleError, match="is no SentencePiece model"):
        Personas(bundle)


@pytest.mark.parametrize(
    ("frames", "embedded", "says"),
    [
        (VOICE[:3], np.ones((2, 2), np.float32), r"frames are int64 \[3, 3\], not int64 \[4, 3\]"),
        (VOICE, np.ones((2, 3), np.float32), r"embedded is float32 \[2, 3\]; the model is float32"),
        (VOICE, np.ones((4, 2), np.float32), "4 embeddings for 4 frames"),
    ],
)
def test_a_voice_that_does_not_fit_is_refused_with_its_file_in_the_log(
    bundle: Bundle,
    frames: np.ndarray,
    embedded: np.ndarray,
    says: str,
) -> None:
    write_voice(bundle.path, frames, embedded)
    with pytest.raises(BundleError, match=says):
        Personas(bundle).prepare("alto", "")
    bundle.file(SPEC.voices[0].file).write_bytes(b"junk")
    with pytest.raises(BundleError, match="not a voice"):
        Personas(bundle).prepare("alto", "")
    # A caller is told so, and not where the box keeps its files.
    reception = Reception(bundle, None, PersonaConfig(keep_mb=0))
    found = reception.receive("alto", "", {}, 0)
    assert isinstance(found, Refusal)
    assert found.detail == "voice 'alto' cannot be read on the box; its log says why"
