"""`verify` passes what is right and finds what is wrong, down to one tensor of a checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engines import bundle
from engines.bundle import Bundle
from engines.golden import draw, is_drawn, written_rows
from export import build, cli, golden, verify
from export.checkpoint import open_checkpoint
from export.checkpoint_config import LM_FILE, MIMI_FILE
from export.checkpoint_file import CheckpointError
from export.source import from_checkpoint, from_seed
from export.twin import Array, Twin
from tests.export import folders
from tests.export.calls import SEED

pytestmark = pytest.mark.torch

MUTATIONS = 24
"""Tensors that are changed, one at a time, in three ways each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "micro"
    folders.write(path, folders.SIXTEEN, seed=4)
    return path


@pytest.fixture(scope="module")
def narrow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bfloat16 bundle from a PersonaPlex checkpoint."""
    source = from_checkpoint(open_checkpoint(folder), "bfloat16")
    return build.build(source, tmp_path_factory.mktemp("bundles") / "narrow", largest_batch=2)


def differing(checked: Bundle, model: Path | None = None) -> Iterator[str]:
    """What failed, as it fails."""
    source = from_checkpoint(open_checkpoint(model), "bfloat16") if model else None
    return (found.sentence for found in verify.findings(checked, source) if found.is_failure)


def failures(checked: Bundle, model: Path | None = None) -> list[str]:
    return list(differing(checked, model))


def test_a_float32_bundle_is_verified_as_it_is(micro_bundle: Bundle) -> None:
    found = list(verify.findings(micro_bundle, from_seed("micro", SEED), frames=60))
    said = [finding.sentence for finding in found]
    assert not any(finding.is_failure for finding in found), said
    assert sum("equal its golden data and torch" in sentence for sentence in said) == 4
    assert sum(sentence.endswith("as it is") for sentence in said) == 4
    assert said[-1] == "greedy call: every token of 60 frames equals torch"


def test_a_bfloat16_bundle_is_verified_through_its_twin(narrow: Bundle, folder: Path) -> None:
    said = [finding.sentence for finding in verify.findings(narrow)]
    assert sum("float32 twin in" in sentence for sentence in said) == 4
    assert failures(narrow) == []
    assert failures(narrow, folder) == []


def test_a_twin_in_many_pieces_answers_the_same_bits(narrow: Bundle) -> None:
    spec = next(spec for spec in narrow.manifest.golden if spec.stage == "temporal")
    (stage,) = (stage for stage in narrow.manifest.stages if stage.name == "temporal")
    whole, cut = Twin(narrow, stage), Twin(narrow, stage, piece_bytes=20_000)
    assert len(whole.pieces) == 1
    assert len(cut.pieces) > 4
    regions = {region.name: region for region in narrow.manifest.regions}
    ids = np.random.default_rng(1).integers(0, 20, (3, 8))
    given = {
        t.name: draw(1, regions[t.name], spec.ages)
        if t.name in regions and is_drawn(regions[t.name])
        else np.ones((3, *t.row_shape), np.int64)
        for t in stage.inputs
    } | {"user_codes": ids}
    answers: list[dict[str, bytes]] = [{}, {}]
    for twin, answer in zip((whole, cut), answers, strict=True):

        def take(name: str, value: Array, answer: dict[str, bytes] = answer) -> None:
            answer[name] = value.tobytes()

        twin.run(given, take)
    assert answers[0] == answers[1]
    assert answers[0].keys() == {t.name for t in stage.outputs}


def test_golden_sessions_are_fresh_about_to_wrap_and_long_wrapped(narrow: Bundle) -> None:
    regions = {region.name: region for region in narrow.manifest.regions}
    ages = {spec.stage: spec.ages for spec in narrow.manifest.golden}
    ring, context = regions["temporal.layers.0.k"], folders.SIXTEEN.lm.context - 1
    assert ages["temporal"] == (0, context - 1, 5 * context + 3)
    assert [written_rows(ring, age) for age in ages["temporal"]] == [[0], [context - 1], [3]]
    two = regions["mimi.encoder_transformer.layers.0.k"]
    assert [written_rows(two, age) for age in ages["mimi_encode"]] == [[0, 1], [248, 249], [6, 7]]
    drawn = draw(golden.SEED, ring, (0, 3, 99))
    assert [int(np.count_nonzero(row.any(-1))) for row in drawn] == [0, 3, context]
    assert np.array_equal(drawn, torch.from_numpy(drawn).bfloat16().float().numpy())
    assert np.array_equal(drawn, torch.from_numpy(drawn).half().float().numpy())
    assert not np.array_equal(drawn[2], draw(golden.SEED, two, (0, 3, 99))[2, :, :24, :32])


def mutations(folder: Path) -> list[tuple[str, str]]:
    """(file, tensor), drawn at random among those a tick reads."""
    found = open_checkpoint(folder)
    used = [(LM_FILE, name) for name in found.lm.shapes]
    used += [(MIMI_FILE, name) for name in found.mimi.shapes if "_initialized" not in name]
    generator = np.random.default_rng(12)
    picked = generator.choice(len(used), MUTATIONS, replace=False)
    # The caller's streams and each depth step are what a careless port forgets.
    streams = [(LM_FILE, f"emb.{stream}.weight") for stream in range(8, 16)]
    steps = [(LM_FILE, f"linears.{step}.weight") for step in range(8)]
    return [*(used[index] for index in picked), *streams, *steps]


def test_every_tensor_of_a_checkpoint_matters(folder: Path, narrow: Bundle, tmp_path: Path) -> None:
    for number, (file, name) in enumerate(mutations(folder)):
        at = f"{file} {name}"

        def edited(
            edit: Callable[[dict[str, Tensor]], None], file: str = file, number: int = number
        ) -> Path:
            return folders.changed(folder, tmp_path / str(number), file, edit)

        def value(held: dict[str, Tensor], name: str = name, number: int = number) -> None:
            held[name] = folders.shuffled(held[name], number)

        def renamed(held: dict[str, Tensor], name: str = name) -> None:
            held[f"{name}.old"] = held.pop(name)

        def reshaped(held: dict[str, Tensor], name: str = name) -> None:
            held[name] = torch.cat([held[name], held[name][:1]])

        found = differing(narrow, edited(value))
        assert next(found).startswith("checkpoint: sha256"), at
        assert next(found).startswith("stage "), at  # not the call after them: a stage, alone
        for edit in (renamed, reshaped):
            with pytest.raises(CheckpointError):
                open_checkpoint(edited(edit))
        shutil.rmtree(tmp_path / str(number))


def test_one_value_that_no_stage_reads_is_still_another_checkpoint(
    folder: Path, narrow: Bundle, tmp_path: Path
) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        held["quantizer.rvq_rest.vq.layers.3._codebook._initialized"] += 1

    found = failures(narrow, folders.changed(folder, tmp_path / "other", MIMI_FILE, edit))
    assert len(found) == 1
    assert found[0].startswith("checkpoint: sha256")


def test_a_damaged_weight_is_found_and_named(
    narrow: Bundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(narrow.path, out)
    path = out / "stages/weights/lm.bin"
    raw = bytearray(path.read_bytes())
    raw[1::512] = bytes(0x41 for _ in raw[1::512])
    path.write_bytes(raw)
    rehashed = narrow.manifest.files | {"stages/weights/lm.bin": bundle.describe_file(path)}
    bundle.write(out, msgspec.structs.replace(narrow.manifest, files=rehashed))
    assert cli.main(["verify", str(out)]) == 1
    lines = capfd.readouterr().err.splitlines()
    first = next(line for line in lines if line.startswith("stage temporal"))
    assert "differs from its golden data at frame 0: largest distance" in first
    assert "allowed 0.0001" in first or "allowed 0.0002" in first or "allowed 0.0003" in first
    assert f"duplexbox export verify {out} --checkpoint CHECKPOINT" in first
    assert lines[-1].endswith("checks failed")


def test_a_ring_whose_other_rows_moved_is_found(narrow: Bundle) -> None:
    (spec,) = (spec for spec in narrow.manifest.golden if spec.stage == "temporal")
    check = verify._Check(narrow, spec, {})
    region = check.regions["temporal.layers.0.k"]
    ring = draw(spec.seed, region, spec.ages)
    ring[1, 0, 2, 5] += 1
    check.take("temporal.layers.0.k.next", ring)
    assert [finding.sentence.partition(". ")[0] for finding in check.failures] == [
        "stage temporal: output temporal.layers.0.k.next at frame 23: 1 values of rows it must "
        "not touch"
    ]


def test_a_bundle_without_golden_data_says_so(
    narrow: Bundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(narrow.path, tmp_path / "old")
    bundle.write(tmp_path / "old", msgspec.structs.replace(narrow.manifest, golden=()))
    assert cli.main(["verify", str(tmp_path / "old")]) == 1
    assert "carries no golden data" in capfd.readouterr().err
