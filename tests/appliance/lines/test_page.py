"""The pages without a browser: what is served, how it is guarded, and what they are told."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from aiohttp import ClientSession

from appliance.clock import MonotonicClock
from appliance.lines.web_client import OPUS, PCM, CallError, Heard, Told, WebClient, Words
from appliance.lines.web_pages import FOLDER
from tests.appliance.test_box import ROOT
from tests.fakes_line import FakeBox
from tests.web_line import Line

pytestmark = pytest.mark.clock

LIMIT_BYTES = 60_000


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeBox]:
    with FakeBox(tmp_path_factory.mktemp("box")) as box:
        yield box


@pytest.fixture(scope="module")
def line(echo: FakeBox) -> Iterator[Line]:
    line = Line(echo.path)
    yield line
    line.stop()


def test_the_pages_are_small_and_ask_no_other_host_for_anything() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT_BYTES
    for path in files:
        text = path.read_text(encoding="utf-8")
        elsewhere = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.-]+", text)
        assert elsewhere == [], path.name
        assert not re.search(r"innerHTML|\beval\(|new Function|\sstyle=|\son\w+=\"", text), (
            path.name
        )


def test_every_file_a_page_names_is_there() -> None:
    named = set()
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"/page/([\w.]+)", text))
        named |= set(re.findall(r"from \"\./([\w.]+)\"", text))
    assert {"talk.js", "box.js", "style.css", "worklet.js", "ogg.js"} <= named
    assert [name for name in named if not (FOLDER / name).is_file()] == []


async def visit(port: int, path: str, **headers: str) -> tuple[int, Mapping[str, str], str]:
    async with (
        ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.text()


def test_pages_come_with_a_policy_that_allows_nothing_from_elsewhere(line: Line) -> None:
    for path, kind in (("/", "html"), ("/box", "html"), ("/page/talk.js", "javascript")):
        status, headers, body = asyncio.run(visit(line.port, path))
        assert status == 200
        assert kind in headers["Content-Type"]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert body
    again = {"If-None-Match": headers["ETag"]}
    assert asyncio.run(visit(line.port, "/page/talk.js", **again))[0] == 304
    for outside in ("/page/../wire.py", "/page/%2e%2e%2fwire.py", "/page/index.html", "/page/x"):
        assert asyncio.run(visit(line.port, outside))[0] == 404


def test_a_page_whose_name_was_made_to_mean_this_line_gets_nothing(line: Line) -> None:
    evil = f"evil.example:{line.port}"
    for path in ("/", "/box", "/page/talk.js", "/api/model", "/api/chat"):
        status, _, body = asyncio.run(visit(line.port, path, Host=evil, Origin=f"http://{evil}"))
        assert status == 421
        assert "evil.example" in body
        assert "--host" in body
    assert asyncio.run(visit(line.port, "/", Host=f"localhost:{line.port}"))[0] == 200


def test_what_a_page_asks_for_needs_the_token_and_the_page_itself_does_not(echo: FakeBox) -> None:
    line = Line(echo.path, "--token", "s3cret-s3cret-s3cret")
    assert asyncio.run(visit(line.port, "/"))[0] == 200
    for path in ("/api/model", "/api/live", "/api/line"):
        assert asyncio.run(visit(line.port, path))[0] == 401
    status, _, body = asyncio.run(visit(line.port, "/api/model?token=s3cret-s3cret-s3cret"))
    assert status == 200
    assert json.loads(body)["model"] == "echo"

    async def call() -> None:
        with pytest.raises(CallError, match="rules: the line answered 401"):
            await WebClient.connect(f"http://127.0.0.1:{line.port}", token="wrong")
        token = "s3cret-s3cret-s3cret"
        async with await WebClient.connect(f"http://127.0.0.1:{line.port}", token=token):
            pass

    asyncio.run(call())
    line.stop()


@pytest.mark.slow
@pytest.mark.parametrize("codec", [OPUS, PCM])
def test_a_script_talks_hears_its_echo_and_is_told_how_it_goes(line: Line, codec: str) -> None:
    said = (0.3 * np.sin(np.arange(3 * 24_000) / 9)).astype(np.float32)

    async def call() -> tuple[list[Any], str]:
        url = f"http://127.0.0.1:{line.port}"
        events: list[Any] = []
        async with await WebClient.connect(url, codec=codec) as call:

            async def speak() -> None:
                await call.say(said)
                await call.hang_up()

            speaking = asyncio.create_task(speak())
            async for event in call:
                events.append(event)
            await speaking
        return events, call.ending

    events, ending = asyncio.run(call())
    heard = np.concatenate([event.pcm for event in events if isinstance(event, Heard)])
    assert heard.size > 2 * 24_000
    tail = heard[-24_000:].astype(float)
    assert np.sqrt((tail**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.1)
    assert "so it goes" in "".join(event.text for event in events if isinstance(event, Words))
    told = [event.figures for event in events if isinstance(event, Told)]
    assert len(told) >= 3
    assert len(told[-1]["margins_ms"]) + told[-1]["filled"] >= 6
    assert all(ms > 0 for ms in told[-1]["ways_ms"])
    assert ending == "over"


def test_a_script_is_told_why_it_was_not_let_in(tmp_path: Path) -> None:
    from appliance.admission import Reason
    from tests.fakes_line import Trouble

    async def refused(port: int) -> CallError:
        with pytest.raises(CallError) as caught:
            await WebClient.connect(f"http://127.0.0.1:{port}")
        return caught.value

    with FakeBox(tmp_path, Trouble(refuse=Reason.LINES)) as box:
        line = Line(box.path)
        error = asyncio.run(refused(line.port))
        assert (error.word, error.detail) == ("full", "1 of 1 slots is taken")
        line.stop()
        assert asyncio.run(refused(line.port)).word == "lost"  # nobody listens


def test_a_script_that_gives_up_waiting_leaves_no_connection() -> None:
    async def give_up() -> bytes:
        came, closed = asyncio.Event(), asyncio.Event()
        rest = b""

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal rest
            await reader.readuntil(b"\r\n\r\n")
            came.set()
            rest = await reader.read()
            writer.close()
            closed.set()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        calling = asyncio.create_task(WebClient.connect(url))
        await came.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(closed.wait(), 10)
        server.close()
        return rest

    assert asyncio.run(give_up()) == b""


def test_a_script_that_talks_to_a_line_that_has_just_gone_is_not_interrupted() -> None:
    class Gone:
        closed = False  # it does not know yet

        async def send_bytes(self, data: bytes) -> None:
            raise ConnectionResetError("Cannot write to closing transport")

    async def talk() -> None:
        async with ClientSession() as session:
            call = WebClient(session, Gone(), PCM, MonotonicClock())  # type: ignore[arg-type]
            await call.say(np.zeros(1920, np.float32))

    asyncio.run(talk())


@pytest.mark.slow
def test_who_watches_the_box_is_told_every_second_and_costs_nothing_when_gone(
    echo: FakeBox, line: Line
) -> None:
    async def watch() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with (
            ClientSession() as session,
            session.get(f"http://127.0.0.1:{line.port}/api/live") as answer,
        ):
            assert answer.headers["Content-Type"] == "text/event-stream"
            async for raw in answer.content:
                if raw.startswith(b"data: "):
                    found.append(json.loads(raw[6:]))
                if len(found) == 3:
                    return found
        return found

    found = asyncio.run(watch())
    assert len(found) == 3
    (box,) = found[-1]["boxes"]
    assert box["ready"] is True
    assert found[-1]["connections"] == 0


def test_too_many_watchers_are_refused(line: Line) -> None:
    async def crowd() -> list[int]:
        async with ClientSession() as session:
            url = f"http://127.0.0.1:{line.port}/api/live"
            answers = [await session.get(url) for _ in range(34)]
            statuses = [answer.status for answer in answers]
            for answer in answers:
                answer.close()
            return statuses

    assert asyncio.run(crowd()) == [200] * 32 + [503] * 2


@pytest.mark.slow
def test_the_example_is_a_whole_program(line: Line, tmp_path: Path) -> None:
    said, answer = tmp_path / "said.wav", tmp_path / "answer.wav"
    tone = (0.3 * np.sin(np.arange(2 * 16_000) / 6)).astype(np.float32)
    soundfile.write(said, tone, 16_000)
    url = f"http://127.0.0.1:{line.port}"
    ran = subprocess.run(
        [sys.executable, "examples/scripted_call.py", url, str(said), str(answer)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert "so it goes" in ran.stdout
    heard, rate_hz = soundfile.read(answer, dtype="float32")
    assert rate_hz == 24_000
    assert np.abs(heard[-12_000:]).max() > 0.2
