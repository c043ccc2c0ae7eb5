"""`duplexbox appliance websocket`: what the command line means, and the command itself."""

import argparse
import asyncio
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession
from yarl import URL

from appliance import control
from appliance.lines.limits import Bucket
from appliance.lines.tls import KEPT_IN
from appliance.lines.web_door import Guard, may_call
from appliance.lines.web_server import Options
from appliance.lines.websocket import (
    UsageError,
    add_arguments,
    announcement,
    reachable,
    read_listen,
    read_options,
)
from tests.fakes_line import FakeBox
from tests.small import SMALL
from tests.web_clients import call

pytestmark = pytest.mark.clock

ROOT = Path(__file__).resolve().parents[3]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--socket", "s", *words])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8998", ("127.0.0.1", 8998)),
        ("[::1]:80", ("::1", 80)),
        ("box.example:0", ("box.example", 0)),
    ],
)
def test_where_to_listen(text: str, expected: tuple[str, int]) -> None:
    assert read_listen(text) == expected


@pytest.mark.parametrize("text", ["8998", ":8998", "host:", "host:99999", "host:x", ""])
def test_nowhere_to_listen_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        read_listen(text)


def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short\n")
    with pytest.raises(UsageError, match=r"5 characters; 16 are the least.*openssl rand"):
        read_options(parse("--token", str(token)))
    token.write_text("0123456789abcdef\n")
    assert read_options(parse("--token", str(token))).token == "0123456789abcdef"
    with pytest.raises(UsageError, match="no index"):
        read_options(parse("--static", str(tmp_path)))
    with pytest.raises(UsageError, match="--most 0: expected 1 to"):
        read_options(parse("--most", "0"))


def test_a_line_goes_by_the_names_it_is_given_and_those_of_its_machine() -> None:
    hosts = read_options(parse("--host", "Voice.Example", "--listen", "box.lan:8998")).hosts
    assert {"voice.example", "box.lan", socket.gethostname().lower()} <= hosts
    assert "*" not in hosts


def test_what_an_operator_is_told_is_what_to_open() -> None:
    welcome = control.Welcome(
        *(control.PROTOCOL, "b", "moshi", False, "noise", 1, 1, 1, 0, "p", (0,))
    )
    plain = announcement(welcome, 8998, "127.0.0.1", Options(Path("s")), None)
    assert plain == [
        "noise",
        "moshi answers at http://127.0.0.1:8998/",
        "how the box is: http://127.0.0.1:8998/box",
    ]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    guarded = announcement(welcome, 443, "::1", Options(Path("s"), token="x" * 16), tls)
    assert "moshi answers at https://[::1]:443/" in guarded
    assert any("?token=" in said for said in guarded)
    assert not any("x" * 16 in said for said in guarded)
    everywhere = announcement(welcome, 8998, "0.0.0.0", Options(Path("s")), None)
    assert not any("0.0.0.0" in said for said in everywhere)
    assert "microphone" in everywhere[-1]
    assert reachable("0.0.0.0")[-1] == socket.gethostname()


def test_origins() -> None:
    assert may_call("http://box:8998", "box:8998", frozenset())
    assert not may_call("http://box:8999", "box:8998", frozenset())
    assert not may_call("null", "box:8998", frozenset())
    assert may_call("https://a.example", "box", frozenset({"https://a.example"}))
    assert may_call("https://a.example", "box", frozenset({"*"}))


def test_headers_that_no_browser_sends_are_refused_like_others() -> None:
    """Bytes that are no UTF-8 come as surrogates, which no answer can hold."""
    guard, token = Guard("s3cret-s3cret-s3cret"), "\udcff"
    for headers, given in (({"Authorization": f"Bearer {token}"}, ""), ({}, token)):
        refused = guard.refusal(headers, given)
        assert refused is not None
        assert refused[0] == 401
    for origin in ("http://[", "http://evil\udcff"):
        refused = guard.refusal({"Origin": origin, "Host": "box"}, "s3cret-s3cret-s3cret")
        assert refused is not None
        assert refused[0] == 403
        assert refused[1].encode()
    assert guard.wrong_name({"Host": "evil\udcff"}).encode()


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(10, 5)
    assert [bucket.take(1, 0) for _ in range(6)] == [True] * 5 + [False]
    assert not bucket.take(1, 99_000_000)
    assert bucket.take(1, 100_000_000)
    assert not bucket.take(6, 10**12)
    assert bucket.take(5, 10**12)


def visit_and_call(line: "subprocess.Popen[str]", home: Path) -> None:
    """See the page, try to leave its folder, and hold a call, all over TLS that is checked."""
    assert line.stderr is not None
    assert "only echoes" in line.stderr.readline()
    address = line.stderr.readline().strip().rpartition(" ")[2]
    assert address.startswith("https://127.0.0.1:")
    tls = ssl.create_default_context(cafile=str(home / KEPT_IN / "cert.pem"))

    async def visit() -> tuple[str, int]:
        async with ClientSession() as session:
            async with session.get(address, ssl=tls) as answer:
                index = await answer.text()
            outside = URL(address + "..%2fsecret.txt", encoded=True)
            async with session.get(outside, ssl=tls) as answer:
                return index, answer.status

    index, outside = asyncio.run(visit())
    assert index == "hello page"
    assert outside in (403, 404)
    url = address.replace("https", "wss") + "api/chat?audio_topk=250&audio_temperature=0.5"
    heard = asyncio.run(call(url, np.zeros(2 * 24_000, np.float32), tls=tls))
    assert heard.kinds[0] == 0
    assert heard.audio.size > 12_000


@pytest.mark.slow
def test_the_command_serves_https_and_a_page_and_stops_when_told(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("hello page")
    (tmp_path / "secret.txt").write_text("secret")
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    with FakeBox(tmp_path) as box:
        # Its bundle has to be one that can be read; nothing else is asked of it.
        box.welcome = msgspec.structs.replace(box.welcome, bundle=str(SMALL))
        line = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "duplexbox", "appliance", "websocket"),
                *("--socket", str(box.path), "--listen", "127.0.0.1:0"),
                *("--static", str(page), "--tls", "auto"),
            ],
            cwd=ROOT,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            visit_and_call(line, tmp_path)
        finally:
            line.send_signal(signal.SIGTERM)
            _, said = line.communicate(timeout=20)
        assert line.returncode == 0, said
        assert box.sessions[0].join.line == "websocket"
        assert box.sessions[0].join.settings == {
            "sampling.top_k": 32.0,
            "sampling.temperature": 0.5,
        }
    assert len(box.leaves) == 1


HASTY = """
import os, signal, sys
from appliance import cli
from appliance.lines import websocket
said = websocket._say
def say(text):
    said(text)
    os.kill(os.getpid(), signal.SIGTERM)
websocket._say = say
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_line_that_is_told_to_stop_as_soon_as_it_says_that_it_is_there_stops(
    tmp_path: Path,
) -> None:
    with FakeBox(tmp_path) as box:
        box.welcome = msgspec.structs.replace(box.welcome, bundle=str(SMALL), notice="")
        words = ["websocket", "--socket", str(box.path), "--listen", "127.0.0.1:0"]
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", HASTY, *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 0, ran.stderr
    assert "answers at http://127.0.0.1:" in ran.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--listen", "nowhere"), 2, "expected HOST:PORT"),
        (("--tls", "/nonexistent"), 2, "has no cert.pem"),
        ((), 1, "no box answers"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "duplexbox",
            "appliance",
            "websocket",
            "--socket",
            str(tmp_path / "none.sock"),
            *words,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == code
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
