"""Who comes in at the websocket line and who is sent away, with which code and words."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError
from numpy.typing import NDArray

from appliance import cli
from tests.appliance.test_box import Running, socket_path
from tests.fakes_line import FakeBox
from tests.web_clients import Heard, call
from tests.web_line import RATE_HZ, Line, box, echo, echo_line, line, speech

pytestmark = [pytest.mark.slow, pytest.mark.clock]
__all__ = ["box", "echo", "echo_line", "line", "socket_path", "speech"]  # fixtures


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """What a test that fails must end, too."""
    with contextlib.ExitStack() as stack:
        yield stack


def calls_over(box: Running) -> None:
    box.wait_for(lambda: box.box.switchboard.sessions == 0)


async def close_of(url: str, wait_s: float = 0) -> tuple[int | None, list[bytes]]:
    """Connect and wait to be sent away: the close code, and the messages before it."""
    got: list[bytes] = []
    await asyncio.sleep(wait_s)
    async with ClientSession() as session, session.ws_connect(url) as ws:
        async for message in ws:
            got.append(message.data)
        return ws.close_code, got


def test_a_full_box_and_a_strange_wish_are_told_apart(
    box: Running, line: Line, speech: NDArray[np.float32]
) -> None:
    async def crowd() -> tuple[int | None, list[bytes], int | None]:
        first = asyncio.create_task(call(line.url, speech[: 3 * RATE_HZ]))
        second = asyncio.create_task(call(line.url, speech[: 3 * RATE_HZ]))
        await asyncio.to_thread(box.wait_for, lambda: box.box.switchboard.sessions == 2)
        code, got = await close_of(line.url)
        strange, _ = await close_of(line.url + "?voice_prompt=../../x.pt")
        await asyncio.gather(first, second)
        return code, got, strange

    code, got, strange = asyncio.run(crowd())
    assert code == 1013
    assert got[0].startswith(b"\x05full: ")
    assert strange == 1008
    calls_over(box)


def test_a_client_that_never_speaks_loses_its_lease_and_is_told(box: Running, line: Line) -> None:
    code, got = asyncio.run(close_of(line.url))
    for _ in range(20):  # a busy box refuses for a while, for lack of time
        if code != 1013:
            break
        code, got = asyncio.run(close_of(line.url, wait_s=0.5))
    assert code == 1008
    assert got[0] == b"\x00"
    assert b"timeout" in got[-1]
    calls_over(box)


async def close_frame(url: str) -> tuple[int | None, str]:
    """Connect, say nothing, and wait to be sent away: code and reason of the close frame."""
    async with ClientSession() as session, session.ws_connect(url, autoclose=False) as ws:
        while (message := await ws.receive()).type is WSMsgType.BINARY:
            pass
        assert message.type is WSMsgType.CLOSE, message
        return message.data, message.extra or ""


def test_an_operator_ends_calls_and_clients_are_told_in_the_close(
    box: Running, line: Line, speech: NDArray[np.float32]
) -> None:
    calls = box.box.switchboard._calls

    def hang_up(session: int) -> int:
        where = [str(session), "--socket", str(box.config.control.socket)]
        return cli.main(["hangup", *where, "--why", "the hall is closing"])

    async def ended() -> tuple[Heard, tuple[int | None, str], list[int]]:
        talking = asyncio.create_task(call(line.url, speech))
        await asyncio.to_thread(box.wait_for, lambda: box.box.loop.counts.live == 1)
        silent = asyncio.create_task(close_frame(line.url))
        await asyncio.to_thread(box.wait_for, lambda: box.box.switchboard.sessions == 2)
        codes = [await asyncio.to_thread(hang_up, session) for session in sorted(calls)]
        return await talking, await silent, codes

    heard, (code, reason), codes = asyncio.run(ended())
    assert codes == [0, 0]
    assert heard.close_code == code == 1000
    assert reason == "over: an operator ended it: the hall is closing"
    assert 5 not in heard.kinds  # what a client shows as an error
    assert heard.audio.size < speech.size
    calls_over(box)
    assert {s.ended for s in box.summary().sessions} == {"operator"}


def test_a_line_that_stops_says_so(
    echo: FakeBox, echo_line: Line, speech: NDArray[np.float32]
) -> None:
    async def stopped() -> Heard:
        talking = asyncio.create_task(call(echo_line.url, speech))
        while not (echo.sessions and echo.sessions[0].frame_index > 5):
            assert not talking.done()
            await asyncio.sleep(0.05)
        echo_line.process.send_signal(signal.SIGTERM)
        return await talking

    heard = asyncio.run(stopped())
    assert heard.close_code == 1012
    assert heard.messages[-1].startswith(b"\x05draining")
    echo_line.process.wait(20)


def test_without_a_box_newcomers_are_told_to_come_back(
    tmp_path: Path, socket_path: Path, speech: NDArray[np.float32], stack: contextlib.ExitStack
) -> None:
    running = Running(tmp_path, socket_path, lambda batch: None)
    running.start()
    line = stack.enter_context(Line(socket_path))

    async def lose() -> tuple[Heard, int | None]:
        talking = asyncio.create_task(call(line.url, speech))
        await asyncio.to_thread(
            running.wait_for, lambda: running.box.switchboard.sessions == 1 or talking.done()
        )
        running.box.drain()  # drain_s = 0: the call is ended, then the box
        heard = await talking
        await asyncio.to_thread(running.join)
        for _ in range(5):
            code, _ = await close_of(line.url)
            if code != 1011:  # it had not noticed yet: whoever came then lost the box, too
                break
        return heard, code

    heard, code = asyncio.run(lose())
    assert heard.close_code in (1012, 1013)  # refused, if the machine is very busy
    assert code == 1014
    again = Running(tmp_path, socket_path, lambda batch: None, first_frame_s=1)
    stack.enter_context(again)
    # Found again: what answers is the box, be it that it is too busy to let anybody in.
    codes = {1014}
    for _ in range(20):
        code, _ = asyncio.run(close_of(line.url, wait_s=0.5))
        codes.add(code or 0)
        if code != 1014:
            break
    assert codes & {1008, 1013}
    logged = line.stop()
    assert "no box" in logged
    assert "a box answers again" in logged


def test_other_peoples_pages_and_those_without_the_token_stay_out(
    box: Running, stack: contextlib.ExitStack
) -> None:
    line = stack.enter_context(Line(box.config.control.socket, "--token", "s3cret-s3cret-s3cret"))

    async def status(query: str = "", **headers: str) -> int:
        async with ClientSession() as session:
            try:
                async with session.ws_connect(line.url + query, headers=headers):
                    return 101
            except WSServerHandshakeError as err:
                return err.status

    good = "?token=s3cret-s3cret-s3cret"
    assert asyncio.run(status()) == 401
    assert asyncio.run(status("?token=other")) == 401
    assert asyncio.run(status("?token=\u00e9")) == 401
    assert asyncio.run(status(good)) == 101
    assert asyncio.run(status(Authorization="Bearer s3cret-s3cret-s3cret")) == 101
    assert asyncio.run(status(good, Origin="https://evil.example")) == 403
    assert asyncio.run(status(good, Origin=f"http://127.0.0.1:{line.port}")) == 101
    calls_over(box)
