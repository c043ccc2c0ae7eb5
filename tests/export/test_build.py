"""Building from a checkpoint folder: the same bytes as from memory, resumable, nothing loaded."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import bundle
from engines.bundle import Bundle
from export import build, cli, golden, source
from export.checkpoint import open_checkpoint
from export.checkpoint_config import LM_FILE
from export.hollow import hollow_lm
from export.journal import Journal
from export.source import Source, from_checkpoint, from_modules
from export.stages import graphs_of
from export.to_onnx import Weights, graph_bytes
from tests.export import folders

pytestmark = pytest.mark.torch

SEED = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "micro"
    folders.write(path, folders.THIN, seed=SEED)
    return path


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("bundles") / "built"
    return build.build(opened(folder, "bfloat16"), out, largest_batch=4)


def opened(folder: Path, dtype: source.Precision | None = None) -> Source:
    return from_checkpoint(open_checkpoint(folder), dtype)


def test_a_bundle_from_a_folder_is_the_bundle_of_the_same_modules(
    folder: Path, built: Bundle, tmp_path: Path
) -> None:
    mimi, lm = folders.write(tmp_path / "again", folders.THIN, seed=SEED)
    config = opened(folder).config
    memory = from_modules(config, mimi, lm, "bfloat16", pieces=built.pieces(), trained=True)
    found = build.build(memory, tmp_path / "memory", largest_batch=4).manifest
    expected = built.manifest
    assert found.files == {n: f for n, f in expected.files.items() if n != build.TOKENIZER}
    assert found.model.checkpoint_sha256 == expected.model.checkpoint_sha256
    assert found.model.parameters == expected.model.parameters
    for part in ("regions", "stages", "golden", "timing", "audio", "text"):
        assert getattr(found, part) == getattr(expected, part), part
    assert {r.dtype for r in found.regions if r.name.startswith("temporal.")} == {"bfloat16"}
    assert {r.dtype for r in found.regions if r.name.startswith("mimi.")} <= {"float32", "int64"}


def test_tracing_asks_for_no_matrix_and_writing_for_one_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.to_onnx.INLINE_BYTES", 0)  # nothing of this model is that large
    found = open_checkpoint(folder)
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return found.lm.tensor(name)

    lm, hollow = hollow_lm(found.config.lm, "bfloat16", read)
    matrices = {name for name, x in lm.state_dict().items() if x.dim() == 2}
    assert set(asked) == lm.state_dict().keys() - matrices
    asked.clear()
    graphs = graphs_of(found.config, opened(folder).mimi, lm, "bfloat16")
    weights = Weights(Path(), hollow)
    for graph in graphs[1:3]:
        graph_bytes(graph, weights)
    assert asked == []
    for file in weights.files:
        for _ in weights.chunks(file):
            pass
    assert set(asked) == matrices


class Killed(BaseException):
    """Stands for a kill: nothing in the product catches it."""


def test_a_killed_build_continues_with_what_is_whole(
    folder: Path, built: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, left = tmp_path / "out", Journal.write, [6]

    def write_until_killed(self: Journal, name: str, chunks: Iterator[bytes]) -> None:
        def some() -> Iterator[bytes]:
            for chunk in chunks:
                yield chunk
                if left[0] == 0:
                    raise Killed

        left[0] -= 1
        write(self, name, some())

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", write_until_killed)
        with pytest.raises(Killed):
            build.build(opened(folder, "bfloat16"), out, largest_batch=4)
    with pytest.raises(bundle.BundleError):
        bundle.read(out)
    whole = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*.*")) if path.is_file()}
    (damaged,) = (path for path in whole if path.name == "depth.onnx")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    said: list[str] = []
    again = build.build(opened(folder, "bfloat16"), out, largest_batch=4, say=said.append)
    assert said[0] == f"{out} was begun before; 4 files of it are kept"
    assert again.manifest == built.manifest
    kept = [path for path, at in whole.items() if path.exists() and path.stat().st_mtime_ns == at]
    assert len(kept) == 4
    assert damaged not in kept
    assert not list(out.rglob("*.part"))


def test_a_finished_build_is_left_alone_and_a_changed_input_is_named(
    folder: Path, built: Bundle, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(built.path, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    said: list[str] = []
    build.build(opened(folder, "bfloat16"), out, largest_batch=4, say=said.append)
    assert said == [f"{out} is already built from the same input; nothing to do"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    assert said.pop()
    journal = Journal(out, built.manifest.made_from | {"dtype": "float32", "batches": "1-2"})
    assert journal.note == (
        f"{out} is built again: batches changed from 1-4 to 1-2, "
        "dtype changed from bfloat16 to float32"
    )
    assert not journal.files
    assert not (out / "bundle.json").exists()


def test_of_a_damaged_bundle_only_the_damaged_file_is_written_again(
    built: Bundle, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(built.path, out)
    lost = "stages/weights/lm.bin"
    (out / lost).unlink()
    with pytest.raises(bundle.BundleError):
        bundle.read(out)
    journal = Journal(out, built.manifest.made_from)
    assert journal.note == f"{out}: 1 of {len(built.manifest.files)} files changed since; repaired"
    assert built.manifest.files.keys() - journal.files.keys() == {lost}
    journal.write(lost, [(built.path / lost).read_bytes()])
    assert journal.files == built.manifest.files


def test_a_personaplex_checkpoint_is_cut_to_the_steps_that_are_heard(tmp_path: Path) -> None:
    folders.write(tmp_path / "checkpoint", folders.SIXTEEN, seed=SEED)
    found = opened(tmp_path / "checkpoint")
    assert found.config.name.startswith("personaplex")
    assert found.config.lm.depth_codebooks == 8
    graphs = graphs_of(found.config, found.mimi, found.lm, found.dtype)
    weights = Weights(tmp_path, found.hollow)
    for graph in graphs[1:3]:
        graph_bytes(graph, weights)
    names = set(weights.places) - {name for name in weights.places if name.startswith("mimi.")}
    assert any(name.startswith("lm.linears.7.") for name in names)
    assert not any(name.startswith("lm.linears.8.") for name in names)
    fused = {name for name in names if "depformer.layers.0.self_attn.in_proj_weight" in name}
    assert len(fused) == 8


def test_the_context_is_what_was_asked_for(folder: Path) -> None:
    found = source.open_source(str(folder), context=24)
    temporal = graphs_of(found.config, found.mimi, found.lm, found.dtype)[1]
    rings = [spec.row_shape for spec in temporal.inputs if spec.name.endswith("0.k")]
    assert rings == [(1, 24, 32)]
    assert found.made_from["context"] == "24"


def test_a_disk_that_is_too_small_is_seen_before_the_first_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "out", {"model": "large"})
    sizes = {"a.bin": 3 * 10**9, "b.bin": 10**9}
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(build.DiskFull, match=r"has 2\.0 GB free, the bundle needs 4\.0 GB more"):
        build._check_disk(journal, sizes)
    journal.files["a.bin"] = bundle.FileSpec("0" * 64, sizes["a.bin"])
    build._check_disk(journal, sizes)


def test_a_checkpoint_with_a_weight_that_is_no_number_becomes_no_bundle(
    folder: Path, tmp_path: Path
) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        held["transformer.layers.0.norm1.alpha"][0, 0, 3] = torch.nan

    damaged = folders.changed(folder, tmp_path / "damaged", LM_FILE, edit)
    with pytest.raises(golden.NotFinite, match=r"stage temporal answers .* holds NaN"):
        build.build(from_checkpoint(open_checkpoint(damaged)), tmp_path / "b", largest_batch=1)
    assert not (tmp_path / "b/bundle.json").exists()


BAD = {
    "no such folder": (["build", "{tmp}/nothing"], "is neither a folder nor a seeded model"),
    "no tokenizer": (["build", "{tmp}/wordless"], "has no SentencePiece model"),
    "a taken folder": (["build", "micro", "-o", "{tmp}/wordless"], "is not a bundle"),
    "batches with a gap": (["build", "micro", "--batches", "2-4"], "profiles run from 1"),
    "a context of one": (["build", "{folder}", "--context", "1"], "name 2 to"),
    "an endless context": (["build", "{folder}", "--context", "9" * 12], "name 2 to"),
    "a nameless disk": (
        ["build", "micro", "-o", "/proc/none/b"],
        "No such file or directory. Mend",
    ),
    "a seeded model's context": (["build", "micro", "--context", "9"], "has its own"),
    "no bundle": (["verify", "{tmp}/nothing"], "is not a folder, so not a bundle"),
    "no checkpoint": (["verify", "{built}", "--checkpoint", "{tmp}/nothing"], "is neither"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_with_the_remedy(
    what: str,
    folder: Path,
    built: Bundle,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(folder, tmp_path / "wordless")
    (tmp_path / "wordless/tokenizer_spm_32k_3.model").unlink()
    words, expected = BAD[what]
    given = [word.format(tmp=tmp_path, folder=folder, built=built.path) for word in words]
    if given[0] == "build" and "-o" not in given:
        given += ["-o", str(tmp_path / "out")]
    assert cli.main(given) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert expected in line
    assert line.startswith(f"duplexbox export {given[0]}: ")
    assert not (tmp_path / "out/bundle.json").exists()
