"""A session's state taken out, written, read, put elsewhere: the call goes on bit for bit."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines import snapshot
from engines.bundle import Bundle, ModelInfo
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtParking
from engines.snapshot import MAGIC, Age, SnapshotError
from tests.engines import toy

AGE = Age(snapshot.NONE, 0, 3, whole=True)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return toy.write_toy(tmp_path / "toy")


def step(executor: OrtExecutor, batch: int, tick: int) -> list[bytes]:
    draw = np.random.default_rng(tick)
    executor.audio_in[:batch] = draw.standard_normal((batch, toy.SAMPLES))
    executor.step(batch)
    return [executor.audio_out[slot].tobytes() for slot in range(batch)]


@pytest.mark.parametrize("ticks", [0, 3, toy.RETAIN, 3 * toy.RETAIN + 1])
@pytest.mark.parametrize("odd", [False, True])
def test_a_restored_session_goes_on_bit_for_bit_in_any_slot(
    bundle: Bundle, tmp_path: Path, ticks: int, odd: bool
) -> None:
    executor, manifest = OrtExecutor(bundle, 4), bundle.manifest
    executor.join(0, {"sampling.gain": 1.5, "sampling.seed": 9})
    for tick in range(ticks):
        step(executor, 1, tick)
    parking = OrtParking(executor)
    saved = snapshot.save(parking, manifest, 0, Age(snapshot.NONE, 0, ticks, whole=True))
    assert saved.rings["hear.ring"].shape == (1, min(ticks, toy.RETAIN), toy.WIDTH)
    path = tmp_path / "one.snap"
    snapshot.write(path, manifest, saved)
    expected = [step(executor, 1, 100 + tick)[0] for tick in range(12)]

    other = OrtExecutor(bundle, 4)
    for slot in range(3):
        other.join(slot, {})
    for tick in range(4 + odd):  # others are under way, in either phase
        step(other, 3, tick)
    other.region("hear.ring")[3] = np.nan
    snapshot.restore(OrtParking(other), manifest, snapshot.read(path, manifest, saved.age), 3)
    found = []
    for tick in range(12):
        draw = np.random.default_rng(100 + tick)
        other.audio_in[:3] = 0.5
        other.audio_in[3] = draw.standard_normal((1, toy.SAMPLES))
        other.step(4)
        found.append(other.audio_out[3].tobytes())
    assert found == expected
    assert len(set(expected)) == 12


def test_pieces_cover_every_valid_row_once(bundle: Bundle) -> None:
    row_bytes = toy.WIDTH * 4
    for ticks, rows in ((0, 0), (3, 3), (50, toy.RETAIN)):
        age = Age(snapshot.NONE, 0, ticks, whole=True)
        for piece_bytes in (1, 2 * row_bytes, 1 << 30):
            found = list(snapshot.pieces(bundle.manifest, age, piece_bytes))
            covered = [row for p in found for row in range(p.first, p.first + p.rows)]
            assert covered == list(range(rows))
            assert all(p.rows <= max(1, piece_bytes // row_bytes) for p in found)


def cut(raw: bytearray) -> None:
    del raw[len(raw) // 2 :]


def flip(at: int) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[at] ^= 1

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, "sha256"),
        (flip(0), "does not begin like a snapshot"),
        (flip(len(MAGIC) - 1), "of this version"),
        (flip(len(MAGIC)), "sha256"),
        (flip(60), "sha256"),
        (flip(-1), "sha256"),
        (bytearray.clear, "does not begin"),
        (lambda raw: raw.extend(b"x"), "sha256"),
        (lambda raw: raw.extend(bytes(1 << 21)), "has at most"),
    ],
)
def test_a_damaged_file_is_refused(
    bundle: Bundle, tmp_path: Path, change: Callable[[bytearray], None], says: str
) -> None:
    parking, path = OrtParking(OrtExecutor(bundle, 1)), tmp_path / "one.snap"
    snapshot.write(path, bundle.manifest, snapshot.save(parking, bundle.manifest, 0, AGE))
    snapshot.read(path, bundle.manifest, AGE)
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)
    with pytest.raises(SnapshotError, match=says):
        snapshot.read(path, bundle.manifest, AGE)


def test_a_snapshot_of_something_else_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    manifest = bundle.manifest
    parking, path = OrtParking(OrtExecutor(bundle, 1)), tmp_path / "one.snap"
    snapshot.write(path, manifest, snapshot.save(parking, manifest, 0, AGE))
    names = {snapshot.file_name(manifest, AGE)}
    for age, says in (
        (Age("f00", 0, 3, whole=True), "its prompt is '', and 'f00' is wanted"),
        (Age(snapshot.NONE, 0, 4, whole=True), "its ticks is '3', and '4' is wanted"),
        (Age(snapshot.NONE, 2, 3, whole=True), "its prompt_rows"),
    ):
        with pytest.raises(SnapshotError, match=says):
            snapshot.read(path, manifest, age)
        names.add(snapshot.file_name(manifest, age))
    other = msgspec.structs.replace(manifest, model=ModelInfo("toy", 0, "1" * 64, trained=False))
    with pytest.raises(SnapshotError, match="its bundle is"):
        snapshot.read(path, other, AGE)
    assert len(names | {snapshot.file_name(other, AGE)}) == 5
    with pytest.raises(FileNotFoundError):
        snapshot.read(tmp_path / "two.snap", manifest, AGE)


def test_a_snapshot_is_this_users_alone_and_leaves_no_torn_file(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = snapshot.save(OrtParking(OrtExecutor(bundle, 1)), bundle.manifest, 0, AGE)
    path = tmp_path / "one.snap"
    snapshot.write(path, bundle.manifest, saved)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        snapshot.write(tmp_path / "two.snap", bundle.manifest, saved)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["one.snap"]
