"""What lines from an Asterisk are told on their command line, and how they fail to start."""

import argparse
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from appliance.lines import bridge
from appliance.lines.sip_stack import Stack
from tests.appliance.lines.test_sip import ROOT
from tests.fakes_line import FakeBox
from tests.sip_peer import HOST, free_port
from tests.small import SMALL

REQUIRED = ("--socket", "/nonexistent/box.sock", "--records", "/nonexistent/calls.sqlite")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bridge.add_arguments(parser, f"{HOST}:9092")
    return parser.parse_args([*REQUIRED, *words])


def test_the_command_line_is_held_to_what_the_table_may_say() -> None:
    words = ("--max-s", "60", "--most", "3", "--end-key", "0", "--end-words", "goodbye")
    config = bridge._config(options(*words, "--record", "/r", "--announce", "/a"), "audiosocket")
    (account,) = config.accounts
    assert (account.max_s, config.most, account.digits) == (60, 3, {"0": "hang-up"})
    assert account.words == {"goodbye": "hang-up"}
    assert config.recording is not None
    assert (config.recording.folder, config.recording.announce) == (Path("/r"), Path("/a"))
    assert config.records == Path("/nonexistent/calls.sqlite")
    assert bridge._config(options("--record", "/r"), "audiosocket").recording is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-s", "0"), "--max-s: Expected `int` >= 1"),
        (("--max-s", "86401"), "--max-s: Expected `int` <= 86400"),
        (("--most", "0"), "--most: Expected `int` >= 1"),
        (("--most", "1001"), "--most: Expected `int` <= 1000"),
        (("--end-words", "a" * 201), "--end-words: Expected `str` of length <= 200"),
        (("--end-words", "!"), 'words "!" holds no word'),
        (("--end-key", "x"), "--end-key x: expected one of 0123"),
        (("--allow", "0.0.0.0/0"), 'allow: "0.0.0.0/0" is everybody'),
        (("--listen", "[::1]:9092"), "is IPv6"),
        (("--persona", "a" * 8001), "--persona has 8001 characters; 8000 are allowed"),
    ],
)
def test_what_the_table_may_not_say_is_refused_in_the_same_words(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        bridge._config(options(*words), "audiosocket")
    assert "$" not in str(error.value)  # a path in a file that nobody wrote
    # and before a box is asked for
    for verb in ("audiosocket", "chan-websocket"):
        assert bridge.run(options(*words), verb, _no_stack) == 2
        assert says in capsys.readouterr().err


def _no_stack(*_: object) -> Stack:
    raise AssertionError("it was started")


@pytest.mark.clock
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["audiosocket", "chan-websocket", "websocket"])
def test_a_port_that_somebody_has_is_no_usage_error_for_it_may_be_free_soon(
    tmp_path: Path, verb: str
) -> None:
    """1, which systemd starts again, and neither 2 nor 78, which it does not."""
    port = free_port()
    words = [] if verb == "websocket" else ["--records", str(tmp_path / "calls.sqlite")]
    with FakeBox(tmp_path) as box, socket.create_server((HOST, port)):
        box.welcome = msgspec.structs.replace(box.welcome, bundle=str(SMALL))
        command = [sys.executable, "-m", "duplexbox", "appliance", verb, "--socket", str(box.path)]
        ran = subprocess.run(
            [*command, "--listen", f"{HOST}:{port}", *words],
            cwd=ROOT,
            capture_output=True,
            check=False,
            timeout=30,
            text=True,
        )
    assert ran.returncode == 1, ran.stderr
    assert f"{HOST}:{port} cannot be listened at" in ran.stderr
