"""Calls over the websocket line on the real clock, with clients that are real.

One of them is `moshi.client` as published, fed by a fake sound card. Content and counts are
asserted; times only where a busy machine cannot move them, or after some attempts.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import sphn
from aiohttp import ClientSession
from numpy.typing import NDArray

from tests.appliance.test_box import ROOT
from tests.fakes_line import FakeBox
from tests.web_clients import Heard, PageBuffer, call
from tests.web_line import RATE_HZ, SPEECH, Line, echo, echo_line, real_time, speech

pytestmark = [pytest.mark.slow, pytest.mark.clock]
__all__ = ["echo", "echo_line", "speech"]  # fixtures


def places(said: NDArray[np.float32], heard: NDArray[np.float32]) -> list[tuple[float, float]]:
    """For each 240 ms of what was said: how like it the best place in what was heard is, and by
    how many s that is later. A frame that came late shifts what follows, and a stretch all of it;
    the pieces are found all the same.
    """
    size, found = RATE_HZ * 240 // 1000, []
    span = 2 ** int(np.ceil(np.log2(size + heard.size)))
    spectrum = np.fft.rfft(heard, span)
    energy = np.concatenate([[0.0], np.cumsum(heard.astype(float) ** 2)])
    there = energy[size:] - energy[:-size]
    there = np.maximum(there, there.max() / 1000)
    for at in range(0, said.size - size + 1, size):
        piece = said[at : at + size]
        own = float((piece.astype(float) ** 2).sum())
        if own < size * float((said.astype(float) ** 2).mean()) / 10:
            continue  # a pause is like any other
        cross = np.fft.irfft(spectrum * np.conj(np.fft.rfft(piece, span)))[: there.size]
        like = cross / np.sqrt(there * own)
        best = int(like.argmax())
        found.append((float(like[best]), (best - at) / RATE_HZ))
    return found


def likeness(said: NDArray[np.float32], heard: NDArray[np.float32]) -> float:
    """Median over the pieces."""
    return float(np.median([like for like, _ in places(said, heard)]))


class Pacing:
    """How evenly a page was sent its frames, and what that did to its buffer."""

    def __init__(self, heard: Heard) -> None:
        page = PageBuffer()
        for pcm, at_ms in zip(heard.pcm, heard.arrived_ms, strict=True):
            page.arrive(pcm.size * 1000 / RATE_HZ, at_ms)
        gaps_ms = np.diff(heard.arrived_ms)
        self.uneven = int((np.abs(gaps_ms - 80) > 8).sum())
        self.share = self.uneven / gaps_ms.size
        self.drops, self.dry = page.drops, page.dry

    @property
    def is_right(self) -> bool:
        """Frames came a period apart, and where they did the page dropped none. A message that
        this machine delivered late is two uneven gaps, and may cost the page something."""
        return self.share < 0.2 and self.drops <= self.uneven

    def __repr__(self) -> str:
        return f"{self.share:.0%} uneven, {self.drops} drops, {self.dry} times dry"


def undisturbed(once: Callable[[], list[Heard]]) -> list[Heard]:
    """Repeat a call until its pacing is right: this machine may be busy with other things."""
    found = []
    for _ in range(5):
        heard = once()
        found.append([Pacing(one) for one in heard])
        if all(one.is_right for one in found[-1]):
            return heard
    pytest.fail(f"frames came unevenly in every one of five calls: {found}")


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
        assert likeness((speech, other)[index], heard[index].audio) > 0.75  # 0.88 through Opus
        assert likeness((other, speech)[index], heard[index].audio) < 0.65  # 0.5


def test_a_client_that_streams_at_once_gets_no_backlog(
    echo_line: Line, speech: NDArray[np.float32]
) -> None:
    heard = asyncio.run(call(echo_line.url, speech))
    assert heard.kinds[0] == 0
    late_s = np.median([late_s for _, late_s in places(speech, heard.audio)])
    # What it said before it was let in is nobody's: what it hears begins with what came then.
    unheard_s = max(0.0, heard.handshake_ms - heard.began_ms) / 1000
    assert 0 < late_s + unheard_s < 1.0


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


def test_the_figures_of_a_call_are_shown(echo_line: Line, speech: NDArray[np.float32]) -> None:
    async def look() -> dict[str, Any]:
        talking = asyncio.create_task(call(echo_line.url, speech, page=True))
        found: dict[str, Any] = {"calls": []}
        async with ClientSession() as session:
            url = f"http://127.0.0.1:{echo_line.port}/api/line"
            # Until it has been sent something, or the call is over and never was.
            while not talking.done() and not any(c["arrived_to_sent"] for c in found["calls"]):
                await asyncio.sleep(0.1)
                async with session.get(url) as answer:
                    found = json.loads(await answer.read())
        await talking
        return found

    found = asyncio.run(look())
    assert found["box"] is True
    (figures,) = found["calls"]
    assert figures["state"] == "talking"
    for part in ("arrived_to_tick", "tick_to_made", "made_to_sent", "arrived_to_sent"):
        assert 0 < figures[part]["p50_ms"] <= figures[part]["p99_ms"] < 2000
