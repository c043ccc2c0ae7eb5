"""The published clients, unchanged, for a minute: `moshi.client`, and Moshi's own web page.

The page is built from its source, and `make test-web MOSHI_PAGE=...` says where it lies:

    git clone https://github.com/kyutai-labs/moshi out/moshi
    npm --prefix out/moshi/client ci && npm --prefix out/moshi/client run build
    make test-web MOSHI_PAGE=out/moshi/client/dist

`moshi.client` runs in the environment of the tests, or with the interpreter that MOSHI_PYTHON
names: one of an environment of its own, with `moshi` 0.2.13 and `soundfile` in it.
"""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.browsers import chromium, loudspeaker, until
from tests.web.stand import OUT, ROOT, stand

pytestmark = pytest.mark.web
SPEECH = ROOT / "appliance" / "demo" / "caller_router.wav"
STATS = "document.body.innerText"


def test_the_command_line_client_holds_a_call_of_a_minute(tmp_path: Path) -> None:
    with stand() as made:
        port = made.url.rpartition(":")[2]
        ran = subprocess.run(
            [
                *(os.environ.get("MOSHI_PYTHON", sys.executable), "-m", "tests.moshi_client"),
                *(str(SPEECH), str(tmp_path / "heard.wav"), "60"),
                *("--host", "127.0.0.1", "--port", port),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        assert "connected!" in ran.stdout + ran.stderr
        log = made.log()
    assert '"filled":0' in log or '"filled":1,' in log, log
    heard, rate_hz = soundfile.read(tmp_path / "heard.wav", dtype="float32")
    assert rate_hz == 24_000
    assert heard.size > 55 * rate_hz
    # Untrained weights are loud noise: silence would be what was not heard.
    blocks = heard[: heard.size // 1920 * 1920].reshape(-1, 1920)
    assert (np.abs(blocks).max(axis=1) > 1e-4).mean() > 0.95


def test_the_published_page_connects_plays_and_shows_words(tmp_path: Path) -> None:
    page_folder = Path(os.environ["MOSHI_PAGE"]).resolve()

    async def run(url: str) -> dict[str, Any]:
        async with (
            loudspeaker(tmp_path / "sound") as pulse,
            chromium(tmp_path / "chromium", SPEECH, pulse) as page,
        ):
            await page.open(url)
            connect = (
                "[...document.querySelectorAll('button')]"
                ".find(b => b.textContent.trim() === 'Connect')"
            )
            await until(page, f"!!{connect}", 20)
            await page.run(f"{connect}.click()")
            await until(page, f"{STATS}.includes('Audio played')", 40)
            await asyncio.sleep(60)
            OUT.mkdir(parents=True, exist_ok=True)
            (OUT / "moshi-page.png").write_bytes(await page.picture())
            return {"text": await page.run(STATS), "troubles": page.troubles()}

    with stand(4, "--static", str(page_folder)) as made:
        found = asyncio.run(run(made.url))
        log = made.log()
    sys.stdout.write(f"{found['text']}\n{log}\n")
    played = re.search(r"Audio played:\s*(\d+):([\d.]+)", found["text"])
    assert played is not None
    assert int(played[1]) * 60 + float(played[2]) > 45  # a busy machine drops some
    assert '"state":"leaving"' in log
