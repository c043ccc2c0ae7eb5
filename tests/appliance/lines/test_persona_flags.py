"""``duplexbox appliance call --persona --voice``: what the line asks the box for."""

import argparse
from pathlib import Path

import pytest

from appliance import control
from appliance.config import PersonaConfig, parse
from appliance.lines import file
from appliance.lines.call import PRIMED_NS


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    file.add_arguments(parser)
    return parser.parse_args([*words, "--socket", "s", "--out", "o"])


def test_every_call_of_a_command_has_the_same_persona_and_voice() -> None:
    plans = file.plan_calls(arguments("a.wav", "b.wav", "--persona", "Be kind", "--voice", "a"), 0)
    assert [(plan.persona, plan.voice) for plan in plans] == [("Be kind", "a")] * 2
    (plain,) = file.plan_calls(arguments("a.wav"), 0)
    assert (plain.persona, plain.voice) == ("", "")
    assert plain.wav == Path("a.wav")


@pytest.mark.parametrize(
    ("flag", "length", "says"),
    [("--persona", control.LONGEST_PERSONA, "8001 characters"), ("--voice", 64, "longer than any")],
)
def test_what_no_box_would_read_is_refused_before_calling(
    flag: str, length: int, says: str
) -> None:
    file.plan_calls(arguments("a.wav", flag, "x" * length), 0)
    with pytest.raises(file.UsageError, match=says):
        file.plan_calls(arguments("a.wav", flag, "x" * (length + 1)), 0)


def test_the_line_waits_as_long_as_a_box_may_take_to_feed_a_persona() -> None:
    longest_s = PRIMED_NS // 1_000_000_000
    given = f'[engine]\nbundle = "b"\n[persona]\nwithin_s = {longest_s}'
    assert parse(given, "x").persona == PersonaConfig(within_s=longest_s)


def test_a_message_of_the_longest_persona_fits_a_datagram() -> None:
    join = control.Join(
        1, "file", "c" * control.LONGEST_CALLER, {}, "v" * 64, "\u20ac" * control.LONGEST_PERSONA
    )
    raw = control.encode(join)
    assert len(raw) < control.LIMIT_BYTES
    assert control.decode_to_box(raw) == join
