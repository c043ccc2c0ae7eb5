"""The CPU executor on a bundle that numpy can follow step by step."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines import bundle
from engines.bundle import Bundle, BundleError
from engines.executor import SettingError
from engines.noise import gumbel
from engines.ort_executor import OrtExecutor, StageFailed
from tests.engines import toy


class Reference:
    """One session of the toy bundle in numpy."""

    def __init__(self, gain: float = 0.0, seed: int = 7) -> None:
        self.window = np.zeros(2, np.float32)
        self.means: list[float] = []
        self.gain, self.seed = gain, seed

    def step(self, pcm: np.ndarray) -> np.ndarray:
        frames = len(self.means)
        self.means.append(float(pcm.mean()))
        kept = np.array(self.means[-toy.RETAIN :])
        scores = np.exp(kept * self.means[-1] * 2 / np.sqrt(2))  # width 2, equal columns
        attended = float((scores * kept).sum() / scores.sum())
        noise = np.empty((1, 1, 4), np.float32)
        gumbel(np.array([self.seed]), np.array([frames]), noise)
        out = pcm + attended + self.window.mean() + self.gain * noise[0, 0, 0]
        self.window = pcm[-2:].copy()
        return np.asarray(out)


@pytest.fixture(scope="module")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return toy.write_toy(tmp_path_factory.mktemp("bundle") / "toy")


@pytest.fixture
def executor(toy_bundle: Bundle) -> OrtExecutor:
    return OrtExecutor(toy_bundle, 4)


def test_three_sessions_of_different_ages_follow_the_reference(executor: OrtExecutor) -> None:
    rng = np.random.default_rng(0)
    sessions: list[Reference] = []
    for tick in range(4 * toy.RETAIN):
        if tick in (0, 3, 8):
            gain = 0.5 * len(sessions)
            executor.join(len(sessions), {"sampling.gain": gain, "sampling.seed": tick})
            sessions.append(Reference(gain, tick))
        batch = len(sessions)
        executor.audio_in[:batch] = rng.normal(size=(batch, toy.SAMPLES))
        expected = [s.step(executor.audio_in[i]) for i, s in enumerate(sessions)]
        executor.step(batch)
        np.testing.assert_allclose(executor.audio_out[:batch], expected, atol=1e-6)
        ages = [len(s.means) - 1 for s in sessions]
        assert executor.text[:batch].tolist() == ages
        assert executor.valid[:batch].tolist() == [age > 0 for age in ages]


def test_a_tick_whose_parts_are_timed_is_the_same_tick(toy_bundle: Bundle) -> None:
    plain, timed = OrtExecutor(toy_bundle, 2), OrtExecutor(toy_bundle, 2)
    assert timed.stage_names() == ("hear", "noise", "speak")
    times = iter(range(0, 1000, 10))
    spent_ns = np.zeros(3, np.int64)
    for executor in (plain, timed):
        executor.join(0, {"sampling.gain": 1})
    for _ in range(2 * toy.RETAIN):
        plain.step(1)
        timed.step_timed(1, lambda: next(times), spent_ns)
        assert timed.audio_out[0].tobytes() == plain.audio_out[0].tobytes()
        assert spent_ns.tolist() == [10, 10, 10]
    timed.step_timed(0, lambda: next(times), spent_ns)  # nobody: nothing moves on
    for _ in range(2):
        plain.step(1)
        timed.step(1)
        assert timed.audio_out[0].tobytes() == plain.audio_out[0].tobytes()


def test_leaving_and_joining_change_no_bit_of_the_others(toy_bundle: Bundle) -> None:
    rng = np.random.default_rng(1)
    speech = rng.normal(size=(30, toy.SAMPLES)).astype(np.float32)

    def listen(neighbours: bool) -> list[bytes]:
        executor = OrtExecutor(toy_bundle, 4)
        slot, batch, heard = 0, 1, []
        executor.join(0, {"sampling.gain": 1})
        for tick, pcm in enumerate(speech):
            if neighbours and tick == 4:  # two join; then ours moves down into a leaver's slot
                executor.move(0, 2)
                executor.join(0, {"sampling.gain": 2})
                executor.join(1, {})
                slot, batch = 2, 3
            if neighbours and tick == 17:
                executor.move(2, 0)
                slot, batch = 0, 2
            executor.audio_in[:] = 9.0
            executor.audio_in[slot] = pcm
            executor.step(batch)
            heard.append(executor.audio_out[slot].tobytes())
        return heard

    alone = listen(neighbours=False)
    assert len(set(alone)) == len(alone)
    assert listen(neighbours=True) == alone


def test_every_graph_runs_on_one_thread(executor: OrtExecutor) -> None:
    """With more, a session's bits may depend on its batch, but only in graphs larger than these."""
    sessions = executor._sessions.values()
    assert sessions
    for session in sessions:
        options = session.get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_a_slot_inherits_nothing_not_even_nan(executor: OrtExecutor) -> None:
    for name in ("hear.window", "hear.ring", "sampling.gain"):
        executor.region(name)[0] = np.nan
    executor.join(0, {})
    reference = Reference()
    executor.audio_in[0] = pcm = np.array([1, 2, 3, 4], np.float32)
    executor.step(1)
    np.testing.assert_allclose(executor.audio_out[0], reference.step(pcm), atol=1e-6)


def test_only_the_live_rows_are_touched(executor: OrtExecutor) -> None:
    executor.audio_out[:] = np.nan
    executor.step(2)
    assert np.isfinite(executor.audio_out[:2]).all()
    assert np.isnan(executor.audio_out[2:]).all()
    before = executor.region("frames").copy()
    executor.step(0)
    assert executor.region("frames").tolist() == before.tolist()


def test_state_stays_where_it_was_allocated(executor: OrtExecutor) -> None:
    ring = executor.region("hear.ring").ctypes.data
    window = {executor.region("hear.window").ctypes.data}
    for _ in range(3):
        executor.step(1)
        assert executor.region("hear.ring").ctypes.data == ring
        window.add(executor.region("hear.window").ctypes.data)
    assert len(window) == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampling.gian": 1}, "sampling.gian is not a setting of this bundle; it has: sampling"),
        ({"hear.ring": 1}, "hear.ring is not a setting"),
        ({"sampling.gain": 2.5}, r"sampling.gain = 2.5 is outside 0..2"),
        ({"sampling.gain": float("nan")}, "sampling.gain = nan is outside"),
        ({"sampling.seed": 1.5}, "must be a whole number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    executor: OrtExecutor, settings: dict[str, float], says: str
) -> None:
    with pytest.raises(SettingError, match=says):
        executor.join(0, settings)


def test_more_slots_than_profiles_is_refused_with_the_command(toy_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"5 slots .* 1\.\.4.*--batches 1-5"):
        OrtExecutor(toy_bundle, 5)


def test_a_graph_that_is_not_what_the_manifest_says(tmp_path: Path) -> None:
    toy.write_toy(tmp_path / "toy")
    manifest = bundle.read(tmp_path / "toy").manifest
    hear, *others = manifest.stages
    swapped = msgspec.structs.replace(hear, graph="stages/speak.onnx")
    wrong = Bundle(tmp_path / "toy", msgspec.structs.replace(manifest, stages=(swapped, *others)))
    with pytest.raises(BundleError, match=r"speak\.onnx: input .* of stage hear is"):
        OrtExecutor(wrong, 1)


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    written = toy.write_toy(tmp_path / "toy")
    (tmp_path / "toy" / "stages" / "hear.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="cannot load stage hear"):
        OrtExecutor(written, 1)


def test_a_stage_that_fails_is_named(executor: OrtExecutor) -> None:
    executor.region("frames")[0] = -5  # attention refuses a negative number of valid keys
    with pytest.raises(StageFailed, match="stage hear failed at batch 1"):
        executor.step(1)


RINGS_IN_PLACE = """
import ctypes, mmap, sys
from pathlib import Path
import msgspec, numpy as np, onnx
from engines import bundle
from engines.ort_executor import OrtExecutor
from tests.engines import toy

toy.RETAIN = rows = 8192
toy.HEAR = toy.HEAR.replace(",5,2]", f",{rows},2]").replace("retain = {5}", f"retain = {{{rows}}}")
written = toy.write_toy(Path(sys.argv[1]))
executor = OrtExecutor(written, 1)
executor.step(1)
ring = executor.region("hear.ring")
page = mmap.PAGESIZE
start = -(-ring.ctypes.data // page) * page
length = (ring.ctypes.data + ring.nbytes - start) // page * page
executor.region("frames")[0] = int(sys.argv[2])  # the row the next tick writes
libc = ctypes.CDLL(None, use_errno=True)
assert length >= 8 * page
assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(length - page), 1) == 0
print("protected", flush=True)
executor.step(1)
print("stepped", flush=True)
"""


@pytest.mark.parametrize(("row", "survives"), [(1, True), (4000, False)])
def test_a_ring_is_never_copied(tmp_path: Path, row: int, survives: bool) -> None:
    """Write-protect a ring but for its first page: a tick that copied it would be killed.

    The second case is the control: writing a protected row does kill the process.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RINGS_IN_PLACE, str(tmp_path / "toy"), str(row)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == (["protected", "stepped"] if survives else ["protected"]), (
        done.stderr
    )
    assert (done.returncode == 0) is survives
