"""Who is let in."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.admission import Headroom, Reason, admit, session_bytes
from engines.bundle import Manifest
from tests.fakes import make_bundle

ROOM = Headroom(
    slots=4, held=0, session_bytes=4012, memory_bytes=4 * 4012, ready=True, draining=False
)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_bundle(tmp_path).manifest


def test_a_newcomer_is_charged_for_its_whole_life(manifest: Manifest) -> None:
    assert session_bytes(manifest) == 1000 * 4 + 4 + 8


def test_there_is_room(manifest: Manifest) -> None:
    assert admit(ROOM, manifest, {"gain": 0.5}) is None
    assert admit(replace(ROOM, held=3), manifest, {}) is None


@pytest.mark.parametrize(
    ("room", "reason", "words"),
    [
        (replace(ROOM, held=4), Reason.LINES, "all 4 slots are taken"),
        (
            replace(ROOM, held=2, memory_bytes=3 * 4012 - 1),
            Reason.MEMORY,
            "3 sessions would own 12036 bytes at full retention; the limit is 12035",
        ),
        (replace(ROOM, draining=True, held=2), Reason.DRAINING, "2 calls"),
        (replace(ROOM, ready=False), Reason.NOT_READY, "warming up"),
    ],
)
def test_a_refusal_has_a_reason_and_the_numbers(
    manifest: Manifest, room: Headroom, reason: Reason, words: str
) -> None:
    refusal = admit(room, manifest, {})
    assert refusal is not None
    assert refusal.reason is reason
    assert words in refusal.detail


@pytest.mark.parametrize("settings", [{"gian": 1.0}, {"gain": 7.0}, {"gain": math.nan}])
def test_a_setting_the_bundle_cannot_take_is_refused(
    manifest: Manifest, settings: dict[str, float]
) -> None:
    refusal = admit(ROOM, manifest, settings)
    assert refusal is not None
    assert refusal.reason is Reason.FAULT
    assert next(iter(settings)) in refusal.detail


@pytest.mark.parametrize(
    ("room", "free"),
    [
        (ROOM, 4),
        (replace(ROOM, held=3), 1),
        (replace(ROOM, memory_bytes=2 * 4012), 2),
        (replace(ROOM, memory_bytes=0, held=1), 0),
        (replace(ROOM, ready=False), 0),
        (replace(ROOM, draining=True), 0),
    ],
)
def test_headroom_is_what_would_be_admitted_now(
    manifest: Manifest, room: Headroom, free: int
) -> None:
    assert room.free == free
    admitted = 0
    while admit(replace(room, held=room.held + admitted), manifest, {}) is None:
        admitted += 1
    assert admitted == free
