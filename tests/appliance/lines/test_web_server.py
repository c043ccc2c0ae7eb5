"""The websocket line in a process of its own, on the real clock, with clients that are real.

One of them is `moshi.client` as published, fed by a fake sound card. Content and counts are
asserted; times only where a busy machine cannot move them, or after some attempts.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import sphn
from aiohttp import ClientSession, WSServerHandshakeError
from numpy.typing import NDArray

from appliance.frame_ring import Outcome
from tests.appliance.test_box import ROOT, Running, socket_path
from tests.fakes_line import FakeBox
from tests.web_clients import Heard, PageBuffer, call

pytestmark = [pytest.mark.slow, pytest.mark.clock]
SPEECH = ROOT / "appliance" / "demo" / "caller_router.wav"
RATE_HZ = 24_000
__all__ = ["socket_path"]  # a fixture


class Line:
    """The line's process."""

    def __init__(self, socket: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.web_rig", str(socket), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"ws://127.0.0.1:{self.port}/api/chat"

    def stop(self) -> str:
        """End it politely; what it logged."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, logged = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, logged
        return logged


@pytest.fixture
def box(tmp_path: Path, socket_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, socket_path, lambda batch: None, first_frame_s=3)
    running.start()
    yield running
    running.box.drain()
    running.join()
    assert running.error is None
    assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*"))


@pytest.fixture
def line(box: Running) -> Iterator[Line]:
    line = Line(box.config.control.socket, "--most-per-address", "64")
    yield line
    line.stop()


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[FakeBox]:
    """A box that lets everybody in, however busy this machine is."""
    with FakeBox(tmp_path) as box:
        yield box
    for session in box.sessions:
        heard = session.outcomes()
        # A frame this busy machine made too late has two receipts: silence, and then itself.
        too_late = sorted(set(heard[Outcome.FILLED]) & set(heard[Outcome.DISCARDED]))
        fates = Counter(r.frame_index for r in session.receipts)
        fates.subtract(too_late)
        assert fates == dict.fromkeys(range(session.frame_index), 1)
        assert session.gone == "left"


@pytest.fixture
def echo_line(echo: FakeBox) -> Iterator[Line]:
    line = Line(echo.path, "--most-per-address", "64")
    yield line
    line.stop()


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    pcm, rate_hz = soundfile.read(SPEECH, dtype="float32")
    at = np.arange(0, 6 * rate_hz, rate_hz / RATE_HZ)
    return np.asarray(np.interp(at, np.arange(len(pcm)), pcm), np.float32)


def calls_over(box: Running) -> None:
    box.wait_for(lambda: box.box.switchboard.sessions == 0)


def likeness(said: NDArray[np.float32], heard: NDArray[np.float32]) -> tuple[float, float]:
    """Best correlation of what was heard with what was said, and by how many s it is later."""
    size = 2 ** int(np.ceil(np.log2(said.size + heard.size)))
    cross = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(said, size)))
    at = int(np.argmax(cross))
    overlap = said[: heard.size] if heard.size < said.size else said
    norm = float(np.sqrt((overlap.astype(float) ** 2).sum() * (heard.astype(float) ** 2).sum()))
    return float(cross[at]) / norm, (at if at < size / 2 else at - size) / RATE_HZ


def in_pieces(said: NDArray[np.float32], heard: NDArray[np.float32]) -> float:
    """Median of how like each 240 ms of what was said the best place in what was heard is.

    A frame that came too late shifts the rest by its length; `likeness` of the whole is lost then.
    """
    size, found = RATE_HZ * 240 // 1000, []
    span = 2 ** int(np.ceil(np.log2(size + heard.size)))
    spectrum = np.fft.rfft(heard, span)
    energy = np.concatenate([[0.0], np.cumsum(heard.astype(float) ** 2)])
    there = energy[size:] - energy[:-size]
    there = np.maximum(there, there.max() / 1000)
    for piece in said[: said.size // size * size].reshape(-1, size):
        own = float((piece.astype(float) ** 2).sum())
        if own < size * float((said.astype(float) ** 2).mean()) / 10:
            continue  # a pause is like any other
        cross = np.fft.irfft(spectrum * np.conj(np.fft.rfft(piece, span)))[: there.size]
        found.append(float((cross / np.sqrt(there * own)).max()))
    return float(np.median(found))


def buffer_of(heard: Heard) -> PageBuffer:
    page = PageBuffer()
    for pcm, at_ms in zip(heard.pcm, heard.arrived_ms, strict=True):
        page.arrive(pcm.size * 1000 / RATE_HZ, at_ms)
    return page


@contextlib.contextmanager
def real_time(*processes: int) -> Iterator[None]:
    """All threads of these processes before those of other programs, where that may be had."""
    threads = [int(t.name) for p in processes for t in Path(f"/proc/{p}/task").iterdir()]

    def schedule(policy: int, priority: int) -> None:
        for thread in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 3)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def undisturbed(once: Callable[[], list[Heard]]) -> list[Heard]:
    """Repeat a call until no page dropped anything: this machine may be busy with other things."""
    found = []
    for _ in range(5):
        heard = once()
        pages = [buffer_of(h) for h in heard]
        if not any(page.drops for page in pages):
            return heard
        found.append([(page.drops, page.dry) for page in pages])
    pytest.fail(f"the page dropped audio in every one of five calls: {found}")


def test_two_pages_hear_their_own_echo_and_drop_nothing(
    echo_line: Line, speech: NDArray[np.float32]
) -> None:
    speech = speech[: 4 * RATE_HZ]
    other = speech[::-1].copy()

    def once() -> list[Heard]:
        async def both() -> list[Heard]:
            return list(
                await asyncio.gather(
                    call(echo_line.url + "?gain=1&seed=3", speech, page=True),
                    call(echo_line.url, other, page=True),
                )
            )

        return asyncio.run(both())

    with real_time(os.getpid(), echo_line.process.pid):  # as a page's audio and a box have it
        heard = undisturbed(once)
    for h in heard:
        assert h.kinds[0] == 0
        assert h.kinds.count(0) == 1
        assert set(h.kinds) <= {0, 1, 2, 4}
        assert "so it goes so it goes" in h.text
    for index in (0, 1):
        assert in_pieces((speech, other)[index], heard[index].audio) > 0.75  # 0.88 through Opus
        assert in_pieces((other, speech)[index], heard[index].audio) < 0.65  # 0.5


def test_a_client_that_streams_at_once_gets_no_backlog(
    echo_line: Line, speech: NDArray[np.float32]
) -> None:
    heard = asyncio.run(call(echo_line.url, speech))
    assert heard.kinds[0] == 0
    _, late_s = likeness(speech, heard.audio)
    assert late_s < 1.0


def test_the_published_client_unchanged_holds_a_call(
    echo: FakeBox, echo_line: Line, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tests.moshi_client"),
            *(str(SPEECH), str(tmp_path / "heard.wav"), "6"),
            *("--host", "127.0.0.1", "--port", str(echo_line.port)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "connected!" in ran.stdout + ran.stderr
    # It says "Lost connection" itself when it is interrupted, so the box is asked: a client that
    # had really lost it in mid-call would have stopped there.
    (session,) = echo.sessions
    assert session.frame_index > 45
    assert "so it goes" in ran.stdout
    heard, rate_hz = soundfile.read(tmp_path / "heard.wav", dtype="float32")
    assert rate_hz == RATE_HZ
    assert np.sqrt((heard.astype(float) ** 2).mean()) > 0.005


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
        first = asyncio.create_task(call(line.url, speech[: 2 * RATE_HZ]))
        second = asyncio.create_task(call(line.url, speech[: 2 * RATE_HZ]))
        await asyncio.sleep(1)
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


def test_a_line_that_stops_says_so(echo_line: Line, speech: NDArray[np.float32]) -> None:
    async def stopped() -> Heard:
        talking = asyncio.create_task(call(echo_line.url, speech))
        await asyncio.sleep(1.5)
        echo_line.process.send_signal(signal.SIGTERM)
        return await talking

    heard = asyncio.run(stopped())
    assert heard.close_code == 1012
    assert heard.messages[-1].startswith(b"\x05draining")
    echo_line.process.wait(20)


def test_without_a_box_newcomers_are_told_to_come_back(
    tmp_path: Path, socket_path: Path, speech: NDArray[np.float32]
) -> None:
    running = Running(tmp_path, socket_path, lambda batch: None)
    running.start()
    line = Line(socket_path)

    async def lose() -> tuple[Heard, int | None]:
        talking = asyncio.create_task(call(line.url, speech))
        await asyncio.sleep(1.5)
        running.box.drain()  # drain_s = 0: the call is ended, then the box
        heard = await talking
        await asyncio.to_thread(running.join)
        await asyncio.sleep(0.5)
        return heard, (await close_of(line.url))[0]

    heard, code = asyncio.run(lose())
    assert heard.close_code in (1012, 1013)  # refused, if the machine is very busy
    assert code == 1014
    again = Running(tmp_path, socket_path, lambda batch: None)
    again.start()
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
    again.box.drain()
    again.join()


def test_other_peoples_pages_and_those_without_the_token_stay_out(box: Running) -> None:
    line = Line(box.config.control.socket, "--token", "s3cret-s3cret-s3cret")

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
    line.stop()


def test_strangers_cost_a_call_no_frame_and_leave_no_lease(
    echo_line: Line, speech: NDArray[np.float32]
) -> None:
    """Abrupt ends at every moment, garbage, a client that does not read: beside a real call."""

    async def abrupt(wait_s: float, data: bytes | None) -> None:
        async with ClientSession() as session:
            ws = await session.ws_connect(echo_line.url)
            if data is not None:
                with contextlib.suppress(ConnectionError):
                    await ws.send_bytes(data)
            await asyncio.sleep(wait_s)
            connection = ws.get_extra_info("socket")
            assert connection is not None
            # No close frame, no FIN: a reset, as from a phone that lost its network.
            transport = ws._writer.transport
            assert transport is not None
            transport.abort()

    async def storm(until: asyncio.Task[Heard]) -> int:
        rng, count = np.random.default_rng(5), 0
        pages = sphn.OpusStreamWriter(RATE_HZ).append_pcm(np.zeros(1920, np.float32))
        choices = [None, b"", b"\x01", b"\xff" * 99, b"\x01OggS" + bytes(80), b"\x01" + pages[:200]]
        while not until.done():
            choice = choices[rng.integers(len(choices))]
            await asyncio.gather(
                *(abrupt(float(rng.random()) * 0.1, choice) for _ in range(3)),
                return_exceptions=True,
            )
            count += 3
        return count

    async def run() -> tuple[Heard, int]:
        talking = asyncio.create_task(call(echo_line.url, speech, page=True))
        await asyncio.sleep(0.5)
        storming_task = asyncio.create_task(storm(talking))
        return await talking, await storming_task

    heard, count = asyncio.run(run())
    assert count > 30
    assert heard.close_code is None or heard.close_code == 1000
    assert heard.audio.size > 4 * RATE_HZ
    # Nobody is left: `echo` looks at every frame of every session.


def test_the_figures_of_a_call_are_shown(echo_line: Line, speech: NDArray[np.float32]) -> None:
    async def look() -> dict[str, Any]:
        talking = asyncio.create_task(call(echo_line.url, speech[: 3 * RATE_HZ], page=True))
        await asyncio.sleep(2.5)
        async with ClientSession() as session:
            url = f"http://127.0.0.1:{echo_line.port}/api/line"
            async with session.get(url) as answer:
                found: dict[str, Any] = json.loads(await answer.read())
        await talking
        return found

    found = asyncio.run(look())
    assert found["box"] is True
    (figures,) = found["calls"]
    assert figures["state"] == "talking"
    for part in ("arrived_to_tick", "tick_to_made", "made_to_sent", "arrived_to_sent"):
        assert 0 < figures[part]["p50_ms"] <= figures[part]["p99_ms"] < 2000
