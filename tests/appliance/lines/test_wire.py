"""Moshi's messages and query parameters, and what a stranger makes of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import control
from appliance.admission import Reason
from appliance.ledger import Why
from appliance.lines import wire
from appliance.lines.wire import Ending, Model, WishError, read_wish

MODEL = Model(
    {
        "sampling.temperature": (0, 10),
        "sampling.text_temperature": (0, 10),
        "sampling.top_k": (0, 32),
        "sampling.seed": (0, 2**53),
    },
    voices=("NATF2", "VARM0"),
    takes_persona=True,
)
PLAIN = Model({})


def test_messages_are_a_kind_and_a_payload() -> None:
    assert wire.audio(b"OggS") == b"\x01OggS"
    assert wire.audio_of(b"\x01OggS") == b"OggS"
    assert wire.text(" hé") == b"\x02 h\xc3\xa9"
    assert wire.text("a\ud800").decode() == "\x02a?"
    assert wire.error("no") == b"\x05no"
    assert json.loads(wire.metadata({"notes": ["x"]})[1:]) == {"notes": ["x"]}
    assert (wire.HANDSHAKE, wire.PING) == (b"\0", b"\x06")


@given(st.binary(max_size=100))
def test_only_audio_means_anything(message: bytes) -> None:
    found = wire.audio_of(message)
    if len(message) > 1 and message[0] == 1:
        assert found == message[1:]
    else:
        assert found is None


def test_the_published_pages_parameters_become_settings() -> None:
    wish = read_wish(
        {
            "text_temperature": "0.7",
            "audio_temperature": "0.8",
            "audio_topk": "250",  # the page's default; this model has 32
            "pad_mult": "0",
            "repetition_penalty": "1.0",
            "text_seed": "3",
            "audio_seed": "4",
            "voice_prompt": "NATF2.pt",
            "text_prompt": " You enjoy talking. ",
            "email": "x@example.org",
        },
        MODEL,
    )
    assert wish.settings == {
        "sampling.text_temperature": 0.7,
        "sampling.temperature": 0.8,
        "sampling.top_k": 32.0,
        "sampling.seed": 4.0,
    }
    assert (wish.voice, wish.persona, wish.notes) == ("NATF2", "You enjoy talking.", ())


def test_empty_and_missing_prompts_are_no_prompts() -> None:
    for query in ({}, {"text_prompt": "", "voice_prompt": "", "seed": ""}, {"seed": "-1"}):
        wish = read_wish(query, MODEL)
        assert (wish.settings, wish.voice, wish.persona, wish.notes) == ({}, "", "", ())


def test_what_a_model_cannot_give_is_said_and_not_silent() -> None:
    query = {"text_prompt": "be kind", "voice_prompt": "NATF2.pt", "seed": "1", "audio_topk": "x"}
    wish = read_wish(query, PLAIN)
    assert (wish.settings, wish.voice, wish.persona) == ({}, "", "")
    assert wish.notes == (
        "audio_topk is no number and was left out",
        "seed: this model has no sampling.seed",
        "this model has no voices to choose from",
        "this model takes no persona",
    )


@pytest.mark.parametrize("voice", ["../x.pt", "/etc/passwd", "a\\b", "v" * 65, "a\0"])
def test_a_voice_is_a_name_and_never_a_path(voice: str) -> None:
    with pytest.raises(WishError, match="by name"):
        read_wish({"voice_prompt": voice}, MODEL)


def test_a_persona_beyond_any_window_is_refused() -> None:
    longest = control.LONGEST_PERSONA
    assert len(read_wish({"text_prompt": "x" * longest}, MODEL).persona) == longest
    with pytest.raises(WishError, match=f"{longest + 1} characters; {longest} are"):
        read_wish({"text_prompt": "x" * (longest + 1)}, MODEL)


@given(
    st.dictionaries(
        st.sampled_from([p for p, _ in wire.SETTINGS] + ["voice_prompt", "text_prompt", "zz"]),
        st.text(max_size=30) | st.floats().map(str) | st.integers().map(str),
    )
)
def test_a_wish_is_always_within_bounds(query: dict[str, str]) -> None:
    try:
        wish = read_wish(query, MODEL)
    except WishError:
        return
    for name, value in wish.settings.items():
        low, high = MODEL.bounds[name]
        assert low <= value <= high
        if name in wire.WHOLE:
            assert value == int(value)


def test_every_refusal_and_every_end_has_its_code() -> None:
    assert set(wire.REFUSED) == set(Reason)
    codes = {reason: wire.REFUSED[reason].code for reason in Reason}
    assert codes[Reason.LINES] == codes[Reason.TIME] == codes[Reason.MEMORY] == 1013
    assert codes[Reason.NOT_READY] == 1014
    assert codes[Reason.DRAINING] == 1012
    assert codes[Reason.FAULT] == 1011
    assert codes[Reason.OPERATOR] == 1000
    assert set(wire.GONE) == {why.name.lower() for why in Why}
    assert wire.GONE[control.OPERATOR] is Ending.OVER


@given(st.text(max_size=300))
def test_a_reason_fits_a_close_frame(detail: str) -> None:
    for ending in Ending:
        raw = ending.reason(detail).encode()
        assert len(raw) <= 123
        assert raw.decode().startswith(ending.value[1])
