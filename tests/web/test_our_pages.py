"""Our pages in real browsers, with a microphone that is a file, against a real box.

Run by `make test-web`, not by `make test`: it needs Chromium, Firefox and PulseAudio. Pictures of
the pages lie in out/web afterwards; they are there to be looked at.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from appliance.lines.tls import make_certificate
from tests.browsers import Page, chromium, firefox, loudspeaker, until
from tests.web.stand import OUT, ROOT, Stand, stand

pytestmark = pytest.mark.web
SPEECH = ROOT / "appliance" / "demo" / "caller_delivery.wav"
SIZES = {"360": (360, 740), "1280": (1280, 900)}
NUMBERS = ("frames", "late", "concealed", "filled", "dry")
READ = f"""Object.fromEntries({json.dumps(NUMBERS)}.map(
    id => [id, Number(document.getElementById(id).textContent)]))"""
STATE = "document.body.dataset.state"
TALK = "document.getElementById('talk').click()"


@pytest.fixture
def box() -> Iterator[Stand]:
    with stand() as made:
        yield made


@asynccontextmanager
async def browser(name: str, folder: Path, speech: Path = SPEECH) -> AsyncIterator[Page]:
    async with loudspeaker(folder / "sound") as pulse:
        if name == "chromium":
            async with chromium(folder / name, speech, pulse) as page:
                yield page
        else:
            async with firefox(folder / name, pulse) as other:
                yield other


def keep(name: str, picture: bytes) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.png").write_bytes(picture)


async def talk(page: Page, url: str) -> None:
    await page.open(url)
    await until(page, f"{STATE} === 'ready'", 20)
    await page.run(TALK)
    await until(page, f"{STATE} === 'live'", 30)


AT_ITS_END = """(log => log.scrollHeight - log.scrollTop - log.clientHeight < 40)(
    document.getElementById('transcript'))"""


async def no_wider_than_the_screen(page: Page) -> bool:
    return bool(await page.run("document.documentElement.scrollWidth <= innerWidth"))


async def call_of_a_minute(page: Page, url: str) -> dict[str, Any]:
    """How a call of 60 s went, after its first 5 s, in which buffers find their size."""
    await talk(page, url)
    await asyncio.sleep(5)
    before = await page.run(READ)
    await asyncio.sleep(55)
    after = await page.run(READ)
    assert await page.run(STATE) == "live"
    found = {name: after[name] - before[name] for name in NUMBERS}
    for what in ("heard", "spare"):
        found[what] = await page.run(f"Number(document.body.dataset.{what})")
    words = await page.run("document.querySelector('#transcript .words span').textContent")
    sys.stdout.write(f"a minute: {found}, {len(words.split())} words\n")
    return {**found, "words": words}


@pytest.mark.parametrize("name", ["chromium", "firefox"])
def test_a_browser_holds_a_call_of_a_minute(box: Stand, tmp_path: Path, name: str) -> None:
    """How often its buffer ran dry is printed (-rP); a quiet machine has none."""

    async def run() -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        async with browser(name, tmp_path) as page:
            for _ in range(3):  # a busy machine may starve one call; not three
                calls.append(await call_of_a_minute(page, box.url))
                if calls[-1]["dry"] == calls[-1]["filled"] == 0:
                    break
                await page.run(TALK)
            if name == "firefox":
                return calls
            for size, (width, height) in SIZES.items():
                await page.size(width, height)
                await until(page, AT_ITS_END, 5)  # as it was before the screen was another
                for dark in (False, True):
                    await page.dark(dark)
                    keep(f"talk-{size}{'-dark' if dark else ''}", await page.picture())
                assert await no_wider_than_the_screen(page)
            assert page.troubles() == []
        return calls

    calls = asyncio.run(run())
    last = calls[-1]
    assert last["frames"] > 55 * 12.5 * 0.95
    assert len(last["words"].split()) > 20
    assert (last["dry"], last["filled"]) == (0, 0), calls


@pytest.mark.parametrize("name", ["chromium", "firefox"])
@pytest.mark.parametrize("codec", ["opus", "pcm"])
def test_both_browsers_speak_both_codecs(box: Stand, tmp_path: Path, name: str, codec: str) -> None:
    async def run() -> tuple[dict[str, Any], str]:
        async with browser(name, tmp_path) as page:
            await talk(page, f"{box.url}/?codec={codec}" if codec == "pcm" else box.url)
            await asyncio.sleep(12)
            found = await page.run(READ)
            found["heard"] = await page.run("Number(document.body.dataset.heard)")
            detail = await page.run("document.getElementById('detail').textContent")
            if name == "firefox":
                keep(f"firefox-{codec}", await page.picture())
            assert page.troubles() == []
            return found, detail

    found, detail = asyncio.run(run())
    assert detail.endswith("Opus" if codec == "opus" else "PCM")
    assert found["frames"] > 100
    assert found["heard"] > 100 * (2 if codec == "opus" else 1) * 0.9
    assert found["concealed"] < 40


def test_over_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    """Where browsers of other machines get a microphone at all."""
    make_certificate(tmp_path / "tls", ["127.0.0.1"], datetime.now(UTC))

    async def run(url: str) -> int:
        async with browser("chromium", tmp_path) as page:
            await talk(page, url)
            await asyncio.sleep(5)
            assert page.troubles() == []
            return int(await page.run("Number(document.body.dataset.heard)"))

    with stand(4, "--tls", str(tmp_path / "tls")) as made:
        assert made.url.startswith("https://")
        assert "accept it" in made.log()
        assert asyncio.run(run(made.url)) > 60


def test_the_box_page_shows_who_talks_and_the_worst_first(box: Stand, tmp_path: Path) -> None:
    callers = [
        *("callers", *(str(p) for p in sorted(SPEECH.parent.glob("*.wav")))),
        *("--socket", str(box.socket), "--count", "3", "--talk", "60", "--stagger", "0.5"),
    ]

    async def run() -> list[str]:
        from tests.web.stand import _command, _stop

        others = _command(*callers, log=tmp_path / "callers.log")
        try:
            async with browser("chromium", tmp_path) as page:
                await page.open(f"{box.url}/box")
                rows = "document.querySelectorAll('.sessions tbody tr').length"
                await until(page, f"{rows} === 3", 30)
                await asyncio.sleep(6)
                for name, (width, height) in SIZES.items():
                    await page.size(width, height)
                    for dark in (False, True):
                        await page.dark(dark)
                        keep(f"box-{name}{'-dark' if dark else ''}", await page.picture())
                    assert await no_wider_than_the_screen(page)
                assert page.troubles() == []
                words: list[str] = await page.run(
                    "[...document.querySelectorAll('.sessions tbody th')].map(h => h.textContent)"
                )
                traces = "document.querySelectorAll('.sessions .trace').length"
                assert await page.run(traces) == 3
                return words
        finally:
            _stop(others)

    assert sorted(asyncio.run(run())) == ["1", "2", "3"]


def test_a_page_says_why_and_comes_back_by_itself(tmp_path: Path) -> None:
    """Full, draining, loading, lost: each in words, and a call again once there is a box."""

    async def run(made: Stand) -> None:
        async with browser("chromium", tmp_path) as page:
            words = "document.getElementById('state').textContent"
            await page.size(*SIZES["1280"])
            await talk(page, made.url)
            await page.run(TALK)
            await until(page, f"{STATE} === 'over'", 10)
            # The one slot is somebody else's.
            from appliance.lines.web_client import WebClient

            async with await WebClient.connect(made.url) as call:
                silence = asyncio.create_task(call.say(_silence()))
                await until(page, f"{STATE} !== 'starting'", 10)
                await page.run(TALK)
                await until(page, f"{STATE} === 'full'", 20)
                assert await page.run(words) == "The box is full."
                assert "slots" in await page.run("document.getElementById('detail').textContent")
                keep("talk-full", await page.picture())
                silence.cancel()
            await until(page, f"{STATE} === 'live'", 30)  # it tried again
            await asyncio.to_thread(made.stop_box)
            await until(page, f"['draining', 'fault', 'loading'].includes({STATE})", 20)
            if await page.run(STATE) == "fault":  # it is for the person to try again
                await page.run(TALK)
            await until(page, f"{STATE} === 'loading'", 30)
            keep("talk-loading", await page.picture())
            await asyncio.to_thread(made.start_box)
            await until(page, f"{STATE} === 'live'", 60)
            await page.run("document.getElementById('mute').click()")
            pressed = "document.getElementById('mute').getAttribute('aria-pressed')"
            assert await page.run(pressed) == "true"
            await asyncio.sleep(1)
            level = "Number(document.getElementById('you').style.getPropertyValue('--level'))"
            assert await page.run(level) < 0.2

    with stand(slots=1) as made:
        asyncio.run(run(made))


def _silence() -> Any:
    import numpy as np

    return np.zeros(60 * 24_000, np.float32)
