"""Kept prompts: found again, never trusted, bounded."""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.snapshot_store import WAITING, SnapshotStore
from engines import snapshot as snapshots
from engines import tensor_file
from engines.bundle import Manifest
from engines.prefill import Prompt
from engines.snapshot import Snapshot
from tests.fakes_prompt import make_prompted_bundle, prompt_of

LIMIT = 1 << 20


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_prompted_bundle(tmp_path / "bundle").manifest


def filled(manifest: Manifest, prompt: Prompt) -> Snapshot:
    fed = (1, prompt.shared_rows - 1)
    found = snapshots.empty_snapshot(manifest, snapshots.prompt_age(prompt), fed)
    found.rings["prompt.ring"][...] = np.arange(prompt.shared_rows)[None, :, None]
    return found


def test_what_was_kept_is_found_by_a_later_box(manifest: Manifest, tmp_path: Path) -> None:
    prompt, other = prompt_of(30), prompt_of(30, first_id=500)
    store = SnapshotStore(tmp_path / "kept", manifest, LIMIT)
    assert store.load(prompt) is None
    store.start()
    store.keep(filled(manifest, prompt))
    store.stop()
    later = SnapshotStore(tmp_path / "kept", manifest, LIMIT)
    found = later.load(prompt)
    assert found is not None
    np.testing.assert_array_equal(
        found.rings["prompt.ring"], filled(manifest, prompt).rings["prompt.ring"]
    )
    assert found.fed == (1, 28)
    assert later.load(other) is None
    assert (later.hits, later.misses) == (1, 1)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_a_damaged_or_foreign_file_is_removed_with_one_line(
    manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = prompt_of(30), prompt_of(30, first_id=500)
    store = SnapshotStore(tmp_path, manifest, LIMIT)
    for damage in ("flip", "cut", "foreign"):
        store.write(filled(manifest, prompt))
        (path,) = tmp_path.glob("*.snap")
        raw = bytearray(path.read_bytes())
        if damage == "flip":
            raw[-1] ^= 1
        elif damage == "cut":
            del raw[-9:]
        else:
            path.unlink()
            store.write(filled(manifest, other))
            (theirs,) = tmp_path.glob("*.snap")
            raw = bytearray(theirs.read_bytes())
            theirs.unlink()
        path.write_bytes(raw)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert store.load(prompt) is None
        (line,) = caplog.messages
        assert f"{path} is removed and its prompt fed again" in line
        assert ("prompt is" in line) == (damage == "foreign")
        assert list(tmp_path.glob("*.snap")) == []
    store.write(filled(manifest, prompt))
    assert store.load(prompt) is not None


def test_a_pipe_in_the_folder_is_removed_and_not_waited_for(
    manifest: Manifest, tmp_path: Path
) -> None:
    prompt = prompt_of(30)
    path = tmp_path / snapshots.file_name(manifest, snapshots.prompt_age(prompt))
    os.mkfifo(path)
    assert SnapshotStore(tmp_path, manifest, LIMIT).load(prompt) is None
    assert not path.exists()


def test_one_that_goes_while_it_is_read_is_still_used(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, read = prompt_of(30), snapshots.read
    store = SnapshotStore(tmp_path, manifest, LIMIT)
    store.write(filled(manifest, prompt))

    def read_and_lose(path: Path, manifest: Manifest, age: snapshots.Age) -> Snapshot:
        found = read(path, manifest, age)
        path.unlink()  # as the store's thread does to make room
        return found

    monkeypatch.setattr(snapshots, "read", read_and_lose)
    assert store.load(prompt) is not None


def test_what_was_used_longest_ago_goes_first(manifest: Manifest, tmp_path: Path) -> None:
    prompts = [prompt_of(60, first_id=1000 * n) for n in range(4)]
    SnapshotStore(tmp_path, manifest, LIMIT).write(filled(manifest, prompts[0]))
    one = sum(path.stat().st_size for path in tmp_path.glob("*.snap"))
    store = SnapshotStore(tmp_path, manifest, limit_bytes=3 * one)
    for number, prompt in enumerate(prompts[:2]):
        store.write(filled(manifest, prompt))
        path = tmp_path / snapshots.file_name(manifest, snapshots.prompt_age(prompt))
        os.utime(path, ns=(number, number))
    assert store.load(prompts[0]) is not None  # used now, so the second is the oldest
    store.write(filled(manifest, prompts[2]))
    store.write(filled(manifest, prompts[3]))
    assert [store.load(p) is not None for p in prompts] == [True, False, True, True]
    assert sum(p.stat().st_size for p in tmp_path.glob("*.snap")) <= 3 * one


def test_one_that_is_larger_than_all_may_be_is_not_kept(
    manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, manifest, limit_bytes=10)
    store.write(filled(manifest, prompt_of(60)))
    assert "raise [persona] keep_mb" in caplog.text
    assert list(tmp_path.glob("*.snap")) == []


def test_a_slow_disk_makes_nobody_wait(
    manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, manifest, LIMIT)  # its thread has not been started
    for _ in range(WAITING + 1):
        store.keep(filled(manifest, prompt_of(9)))
    assert f"{WAITING} wait for the disk" in caplog.text


def test_a_torn_file_of_a_killed_box_is_cleared_away_and_one_that_is_being_written_is_not(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tmp_path / "abc.snap.123.part"
    torn.write_bytes(b"half")
    SnapshotStore(tmp_path, manifest, LIMIT)
    assert not torn.exists()
    encode, prompt = tensor_file.encode, prompt_of(9)

    def encode_while_another_box_starts(*given: Any) -> Iterator[Any]:
        for chunk in encode(*given):
            SnapshotStore(tmp_path, manifest, LIMIT)
            yield chunk

    store = SnapshotStore(tmp_path, manifest, LIMIT)
    monkeypatch.setattr(tensor_file, "encode", encode_while_another_box_starts)
    store.write(filled(manifest, prompt))
    assert store.load(prompt) is not None
    assert not list(tmp_path.glob("*.part"))


def test_one_that_does_not_say_how_it_was_fed_is_of_no_use_to_a_replay(
    manifest: Manifest, tmp_path: Path
) -> None:
    prompt, store = prompt_of(9), SnapshotStore(tmp_path, manifest, LIMIT)
    for fed in ((), (3, 4), (9, -1)):
        store.write(replace(filled(manifest, prompt), fed=fed))
        assert store.load(prompt) is None


def test_a_disk_that_is_slow_to_read_holds_nobody_up_but_who_asked(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, read = prompt_of(9), snapshots.read
    store = SnapshotStore(tmp_path, manifest, LIMIT)
    store.write(filled(manifest, prompt))
    turns, found = threading.Event(), queue.Queue[Snapshot | None]()

    def read_when_told(path: Path, manifest: Manifest, age: snapshots.Age) -> Snapshot:
        assert turns.wait(10)
        return read(path, manifest, age)

    monkeypatch.setattr(snapshots, "read", read_when_told)
    store.start()
    store.ask(prompt, found.put)
    store.keep(filled(manifest, prompt_of(7)))
    for _ in range(1000):
        if len(list(tmp_path.glob("*.snap"))) == 2:  # what is written does not wait for it either
            break
        turns.wait(0.01)
    assert found.empty()
    turns.set()
    assert found.get(timeout=10) is not None
    store.stop()
    assert len(list(tmp_path.glob("*.snap"))) == 2
