"""Reading a bundle: strict, and every refusal names the place."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import bundle
from engines.bundle import BundleError
from tests.engines import toy

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write_toy(tmp_path / "toy")
    return tmp_path / "toy"


def edit(folder: Path, change: Edit) -> None:
    path = folder / "bundle.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def test_a_bundle_survives_writing_and_reading(folder: Path) -> None:
    manifest = bundle.read(folder).manifest
    assert manifest.stages == toy.manifest().stages
    assert manifest.regions == toy.manifest().regions
    assert bundle.read(folder).pieces() == ("", "a", "b")


def test_a_newer_format_is_named_before_its_unknown_fields(folder: Path) -> None:
    edit(folder, lambda tree: tree.update(format=99, novelty=1))
    with pytest.raises(BundleError, match=r"format 99 at `\$.format`; this program reads 1"):
        bundle.read(folder)


def without(*keys: str | int) -> Edit:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


def put(value: object, *keys: str | int) -> Edit:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


GOLDEN = {"stage": "hear", "file": "pieces.json", "ages": [0, 7], "seed": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put(1, "novelty"), "unknown field `novelty`"),
        (put(1, "regions", 1, "clock", "speed"), r"unknown field `speed` - at `\$.regions\[1\]"),
        (put("2", "regions", 1, "clock", "retain"), r"at `\$.regions\[1\].clock.retain`"),
        (without("timing"), "missing required field `timing`"),
        (without("format"), "missing required field `format`"),
        (put("float31", "regions", 0, "dtype"), r"float31.*at `\$.regions\[0\].dtype`"),
        (put(81_000_000, "timing", "period_ns"), "do not last 81000000 ns"),
        (put(0, "largest_batch"), "0 is no batch"),
        (put(6, "regions", 1, "clock", "retain"), r"regions\[1\].*retain 6 is not the length 5"),
        (put(True, "regions", 0, "in_place"), "only a ring may be updated in place"),
        (put([0, 1], "regions", 0, "bounds"), "only a constant region can be set"),
        (put([1, 2], "regions", 3, "bounds"), r"0.0 is outside \[1.0, 2.0\]"),
        (put("hear.window", "regions", 1, "name"), r"regions\[1\].*used twice"),
        (put("noise", "stages", 0, "name"), r"stages\[1\]` \(noise\).*used twice"),
        (put("stages/other.onnx", "stages", 0, "graph"), r"stages/other.onnx is not among"),
        (put("", "stages", 0, "graph"), "either a graph or a builtin"),
        (put("heart", "stages", 2, "inputs", 0, "name"), "heart is neither a region nor made"),
        (put(["B", 1, 5], "stages", 2, "inputs", 0, "shape"), r"heard is float32 \[1, 5\] here"),
        (put([1, 4], "stages", 2, "inputs", 0, "shape"), 'must begin with "B"'),
        (put("heard", "stages", 2, "outputs", 0, "name"), "already the name of something else"),
        (put("frames", "stages", 2, "outputs", 3, "name"), "already the name of something else"),
        (without("stages", 2, "outputs", 3), r"regions.*\(frames\): no stage moves it on"),
        (put("sampling.gain.next", "stages", 2, "outputs", 3, "name"), "must not be updated"),
        (put("hear.window.next", "stages", 2, "outputs", 3, "name"), "does not fit region"),
        (put("pcm_in", "audio", "input"), "pcm is neither a region nor made before it"),
        (put("text", "audio", "output"), r"audio.output`: no stage makes text as float32"),
        (put("heard", "audio", "valid"), r"audio.valid`: no stage makes heard as bool"),
        (put("texts", "text", "output"), r"text.output`: no stage makes texts"),
        (put("p.json", "text", "pieces"), "p.json is not among"),
        (put([0, -1], "text", "silent_ids"), r"silent_ids\[1\]`: -1 is no text id"),
        (put([2**31], "text", "silent_ids"), "2147483648 is no text id"),
        (put(65_536, "largest_batch"), r"65536 is no batch \(1\.\.65535\)"),
        (put({"sha256": "0", "bytes": 1}, "files", "a\0b"), r"'a\\x00b' is no name of a file"),
        (
            put([GOLDEN | {"stage": "heart"}], "golden"),
            r"golden\[0\].stage`: there is no stage heart",
        ),
        (put([GOLDEN | {"file": "g"}], "golden"), r"golden\[0\].file`: g is not among"),
        (put([GOLDEN, GOLDEN | {"ages": []}], "golden"), r"golden\[1\].ages`: \[\] are no ages"),
        (put([GOLDEN | {"ages": [0, -1]}], "golden"), r"golden\[0\].ages`: \[0, -1\] are no ages"),
        (put("g", "golden_call"), "golden_call`: g is not among"),
        (put("g", "cache_report"), "cache_report`: g is not among"),
    ],
)
def test_one_wrong_thing_is_refused_with_its_place(folder: Path, change: Edit, says: str) -> None:
    edit(folder, change)
    with pytest.raises(BundleError, match=says) as caught:
        bundle.read(folder)
    assert "\n" not in str(caught.value)
    assert "duplexbox export" in str(caught.value)


def test_files_outside_the_bundle_are_refused(folder: Path) -> None:
    edit(folder, lambda tree: tree["files"].update({"../x": {"sha256": "0", "bytes": 1}}))
    with pytest.raises(BundleError, match="leads out of the bundle"):
        bundle.read(folder)


def test_a_folder_in_the_place_of_a_file_is_refused(folder: Path) -> None:
    size = (folder / "stages").stat().st_size
    edit(folder, lambda tree: tree["files"].update({"stages": {"sha256": "0", "bytes": size}}))
    with pytest.raises(BundleError, match="stages is not a file"):
        bundle.read(folder)


def test_a_path_too_long_to_exist_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder"):
        bundle.read(tmp_path / ("x" * 300))


def test_a_missing_folder_a_missing_manifest_and_a_torn_one(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a folder"):
        bundle.read(tmp_path / "nowhere")
    manifest = folder / "bundle.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BundleError, match=r"bundle\.json: Input data was truncated"):
        bundle.read(folder)
    manifest.unlink()
    with pytest.raises(BundleError, match=r"bundle\.json: No such file"):
        bundle.read(folder)


def test_a_file_that_was_cut_changed_or_lost(folder: Path) -> None:
    graph = folder / "stages" / "hear.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-1])
    with pytest.raises(BundleError, match=f"has {len(whole) - 1} bytes and should have"):
        bundle.read(folder)
    graph.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match="was changed after the bundle was built"):
        bundle.read(folder)
    bundle.read(folder, hashes=False)
    graph.unlink()
    with pytest.raises(BundleError, match=r"hear\.onnx: No such file"):
        bundle.read(folder)


def test_text_pieces_must_be_a_list_of_strings(folder: Path) -> None:
    read = bundle.read(folder)
    (folder / "pieces.json").write_text('{"a": 1}')
    with pytest.raises(BundleError, match="not a list of text pieces"):
        read.pieces()


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    import msgspec

    wrong = msgspec.structs.replace(toy.manifest(), largest_batch=0)
    with pytest.raises(BundleError, match="0 is no batch"):
        bundle.write(tmp_path, wrong)
    assert not (tmp_path / "bundle.json").exists()


def test_a_manifest_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bundle.json")
    with pytest.raises(BundleError, match=r"bundle\.json is not a file"):
        bundle.read(tmp_path)
