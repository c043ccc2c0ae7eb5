"""A prompt section that contradicts itself or the tick is refused with its place."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engines import bundle_faults
from engines.bundle import Bundle, Manifest
from export import show

pytestmark = pytest.mark.torch

Edit = Callable[[dict[str, Any]], object]


def put(value: object, *keys: str | int) -> Edit:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


def drop(*keys: str | int) -> Edit:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


RING, RING_SHAPE = 4, [1, 1, 48, 32]
"""Index of the first ring among prefill's inputs, and its shape."""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("lm.token", "tokens"), "lm.token is no int64 region"),
        (put("lm.offset", "tokens"), "lm.offset is no int64 region of that shape"),
        (put("lm.tokens", "counter"), "lm.tokens is no int64 region of that shape"),
        (put([9] * 17, "delays"), "does not hold 17 streams' delays"),
        (put([0] * 16, "delays"), "does not hold 16 streams' delays"),
        (put([-1] + [0] * 16, "delays"), "no negative delay"),
        (put([1, 2], "initial_ids"), "one id per stream"),
        (put([1, 2], "silence_codes"), "they are not 17 streams"),
        (put([1] * 9, "caller_codes"), "they are not 17 streams"),
        (put(-1, "pause_frames"), "cannot hold two pauses"),
        (put(11, "longest_frames"), "11 frames cannot hold two pauses"),
        (put("x.onnx", "prefill", "graph"), "x.onnx is not among"),
        (put("", "opening", "graph"), "nothing is not among"),
        (put("temporal", "prefill", "name"), "temporal is the name of a stage of the tick"),
        (put("x.model", "tokenizer"), "x.model is not among"),
        (put("x.safetensors", "voices", 0, "file"), "x.safetensors is not among"),
        (put("bass", "voices", 0, "name"), "a name is used twice"),
        (put(40, "voices", 0, "frames"), r"voices \(alto\): 40 frames leave no room"),
        (drop("prefill", "inputs", 0), "ids must be int64"),
        (put(["B", 17], "prefill", "inputs", 0, "shape"), "ids must be int64"),
        (put("int32", "prefill", "inputs", 1, "dtype"), "position must be int64"),
        (put(["R"], "prefill", "inputs", 2, "shape"), "embedded must be of shape"),
        (put("lm.offset", "prefill", "inputs", RING, "name"), "is no region, or not of its dtype"),
        (put([1, 1, 9, 32], "prefill", "inputs", RING, "shape"), "is no region, or not of its"),
        (put(["B", 1, 48, 32], "prefill", "inputs", RING, "shape"), "is no region, or not of its"),
        (drop("prefill", "outputs", 2), "temporal.layers.0.k is read and not moved on"),
        (put([1, 1, 9, 32], "prefill", "outputs", 2, "shape"), "does not fit its region"),
        (put("nowhere.next", "prefill", "outputs", 2, "name"), "moves on a region it never reads"),
        (put(["R", 32], "prefill", "outputs", 0, "shape"), "must be of the last row alone"),
        (put("hiddn", "prefill", "outputs", 0, "name"), "hidden is nothing that prefill, noise"),
        (put(["R", 32], "opening", "inputs", 0, "shape"), "hidden is nothing that prefill"),
        (put("int64", "opening", "inputs", 1, "dtype"), "text_logits is nothing that"),
        (put("sound", "opening", "inputs", 2, "name"), "sound is nothing that prefill"),
        (put([], "opening", "outputs"), "must be lm.tokens.next alone"),
        (drop("opening", "inputs", 3), "lm.tokens is moved on and never read"),
        (put(["B", 17, 9], "opening", "outputs", 0, "shape"), "lm.tokens.next does not fit"),
    ],
)
def test_one_wrong_thing_is_named(persona_bundle: Bundle, change: Edit, says: str) -> None:
    tree = msgspec.json.decode(msgspec.json.encode(persona_bundle.manifest))
    change(tree["prompt"])
    found = "\n".join(bundle_faults.faults(msgspec.convert(tree, Manifest)))
    assert "`$.prompt" in found
    assert re.search(says, found), found


def test_a_whole_one_has_no_fault(persona_bundle: Bundle) -> None:
    assert list(bundle_faults.faults(persona_bundle.manifest)) == []
    assert persona_bundle.manifest.prompt is not None
    assert persona_bundle.manifest.prompt.prefill.inputs[RING].shape == tuple(RING_SHAPE)


def test_an_unknown_field_is_refused(persona_bundle: Bundle) -> None:
    tree = msgspec.json.decode(msgspec.json.encode(persona_bundle.manifest))
    tree["prompt"]["voice"] = "alto"
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `voice` - at `\$\.prompt`"):
        msgspec.convert(tree, Manifest)


def test_show_says_how_a_call_may_begin(persona_bundle: Bundle) -> None:
    page = "\n".join(show.lines(persona_bundle.manifest))
    assert "before a call: a voice and a persona, 47 frames at most" in page
    assert "voices (frames)   alto (8), bass (8)" in page
    voices = show.describe(persona_bundle.manifest)["prompt"]["voices"]
    assert [voice["name"] for voice in voices] == ["alto", "bass"]
