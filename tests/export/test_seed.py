"""Seeded checkpoints: the published layout, the same bytes for a seed, whatever interrupts."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import checkpoint_text, cli, seed
from export.checkpoint import Checkpoint, lines, open_checkpoint
from export.checkpoint_config import CONFIG_FILE, LM_FILE, MIMI_FILE, TEXT_FILE
from export.models.config import LmConfig, MimiConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.models.streaming import fresh_state
from export.seed import SeedError, write_checkpoint
from export.seed_progress import Bar
from export.seed_values import draw
from tests.export.peer import loaders

pytestmark = pytest.mark.torch

SYNC_BYTES = 1 << 20
"""Instead of the real 128 MB, which no small file reaches."""

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """moshiko (fused and split) and personaplex at small width, all of seed 1."""
    base = tmp_path_factory.mktemp("seeded")
    for name in ("moshiko", "personaplex"):
        write_checkpoint(name, base / name, width="small", seed=1)
    write_checkpoint("moshiko", base / "split", width="small", seed=1, keys="split")
    return {path.name: path for path in base.iterdir()}


def modules(found: Checkpoint) -> tuple[Mimi, LanguageModel]:
    mimi, lm = Mimi(found.config.mimi), LanguageModel(found.config.lm)
    mimi.load_state_dict(dict(found.mimi.tensors()), strict=True)
    lm.load_state_dict(dict(found.lm.tensors()), strict=True)
    return mimi.eval(), lm.eval()


# The layout.


def test_files_are_named_as_published(folders: dict[str, Path]) -> None:
    names = sorted([CONFIG_FILE, LM_FILE, MIMI_FILE, TEXT_FILE])
    assert {name: sorted(os.listdir(path)) for name, path in folders.items()} == {
        name: names for name in folders
    }


def test_they_read_back_into_the_modules(folders: dict[str, Path]) -> None:
    for name in ("moshiko", "split", "personaplex"):
        found = open_checkpoint(folders[name])
        lm = replace(seed.SMALL_LM, context=2999) if name == "personaplex" else seed.SMALL_LM
        assert (found.config.lm, found.config.mimi) == (lm, seed.SMALL_MIMI)
        assert found.untrained == "seed=1 width=small generator=1"
        assert (found.dtype, found.split) == ("bfloat16", name == "split")
        modules(found)


@pytest.mark.parametrize("name", ["moshiko", "split"])
def test_the_published_package_takes_them_strictly(name: str, folders: dict[str, Path]) -> None:
    kwargs = json.loads((folders[name] / CONFIG_FILE).read_text())
    package = loaders.get_moshi_lm(folders[name] / LM_FILE, kwargs, dtype=torch.bfloat16)
    _, lm = modules(open_checkpoint(folders[name]))
    theirs = package.depformer.layers[1].self_attn.in_projs[5].weight
    ours = lm.state_dict()["depformer.layers.1.self_attn.in_proj_weight"].chunk(8)[5]
    assert torch.equal(theirs.float(), ours)


def test_a_bare_personaplex_config_is_enough(folders: dict[str, Path]) -> None:
    assert set(json.loads((folders["personaplex"] / CONFIG_FILE).read_text())) == {
        "model_type",
        "version",
    }


@pytest.mark.parametrize(
    ("name", "tensors", "lm_bytes"),
    [("moshiko", 355, 15_375_458_304), ("personaplex", 475, 16_742_817_792)],
)
def test_full_width_has_the_published_size(name: seed.Name, tensors: int, lm_bytes: int) -> None:
    lm, mimi = seed.plan(name, "full", 0)
    assert (len(lm.tensors), lm.bytes - len(lm.header)) == (tensors, lm_bytes)
    assert (len(mimi.tensors), mimi.bytes - len(mimi.header)) == (318, 4 * 96_151_393)
    assert seed.configs(name, "full")[1] == MimiConfig()
    config = json.loads(seed.config_json("moshiko", "full"))
    assert (config["hidden_scale"], config["depformer_dim_feedforward"]) == (4.125, 4224)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("moshiko", "moshi-7b: dep_q 8, 17 streams, context 3,000, 32 layers of 4,096 (32 heads)"),
        ("personaplex", "personaplex-7b: dep_q 16 cut to 8, 17 streams, context 2,999, 32 layers"),
    ],
)
def test_a_checkpoint_of_full_size_opens_without_being_read(
    name: seed.Name, says: str, tmp_path: Path
) -> None:
    """Headers are real, and the tensors are holes: 16 GB that take no room on the disk."""
    for file in seed.plan(name, "full", 1):
        (tmp_path / file.name).write_bytes(file.header)
        os.truncate(tmp_path / file.name, file.bytes)
    (tmp_path / CONFIG_FILE).write_bytes(seed.config_json(name, "full"))
    found = open_checkpoint(tmp_path)
    assert next(lines(found)).startswith(says)
    with torch.device("meta"):
        lm = LanguageModel(found.config.lm)
    lm.load_state_dict(dict(found.lm.tensors()), strict=True, assign=True)
    assert {tensor.dtype for tensor in lm.state_dict().values()} == {torch.bfloat16}


def test_text_pieces_belong_to_the_model(folders: dict[str, Path]) -> None:
    pieces = checkpoint_text.read_pieces(folders["moshiko"] / TEXT_FILE, seed.SMALL_LM.text_card)
    assert len(set(pieces)) > 500


# The values.


def test_the_same_seed_gives_the_same_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint("moshiko", tmp_path, width="small", seed=1)
    for path in folders["moshiko"].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_these_are_the_bytes_of_seed_one() -> None:
    """Raise GENERATOR when this must change: checkpoints are named by their seed."""
    lm = draw(1, "emb.0.weight", (2049, 4096), "bfloat16", 0, 6)
    mimi = draw(1, "downsample.conv.conv.conv.weight", (512, 512, 4), "float32", 1 << 19, 3)
    assert lm.tolist() == EMB
    assert mimi.tolist() == DOWNSAMPLE


def test_another_seed_gives_other_values() -> None:
    one, other = (draw(s, "emb.0.weight", (9, 64), "float32", 0, 576) for s in (1, 2))
    assert np.mean(one == other) < 0.01


def test_a_value_depends_on_its_place_alone() -> None:
    whole = draw(3, "text_emb.weight", (100, 64), "bfloat16", 0, 6400)
    for first, count in ((0, 1), (1, 15), (15, 2), (16, 16), (4095, 700), (6399, 1)):
        part = draw(3, "text_emb.weight", (100, 64), "bfloat16", first, count)
        assert part.tolist() == whole[first : first + count].tolist()


def test_fused_and_split_hold_the_same_numbers(folders: dict[str, Path]) -> None:
    fused, split = open_checkpoint(folders["moshiko"]), open_checkpoint(folders["split"])
    for one, other in ((fused.lm, split.lm), (fused.mimi, split.mimi)):
        for (name, expected), (same, tensor) in zip(one.tensors(), other.tensors(), strict=True):
            assert (name, torch.equal(expected, tensor)) == (same, True)


def test_personaplex_begins_with_moshis_depth_steps(folders: dict[str, Path]) -> None:
    moshi, persona = (open_checkpoint(folders[name]) for name in ("moshiko", "personaplex"))
    for (name, expected), (same, tensor) in zip(
        moshi.lm.tensors(), persona.lm.tensors(), strict=True
    ):
        assert (name, torch.equal(expected, tensor)) == (same, True)


def test_every_tensor_is_random(folders: dict[str, Path]) -> None:
    found = open_checkpoint(folders["personaplex"])
    for weights in (found.lm, found.mimi):
        for name, tensor in weights.tensors():
            assert bool(torch.isfinite(tensor).all()), name
            if tensor.numel() > 1:
                assert float(tensor.float().std()) > 0, name
            if name.endswith("alpha"):
                assert 0.9 < float(tensor.float().mean()) < 1.1, name
            if name.endswith("cluster_usage"):
                assert float(tensor.min()) >= 1, name


def test_codes_and_tokens_vary_and_nothing_runs_away(folders: dict[str, Path]) -> None:
    mimi, lm = modules(open_checkpoint(folders["moshiko"]))
    mimi.quantizer.prepare()
    heard, sound, text, spoken, hidden_std = run(mimi, lm, ticks=60)
    assert min(len(set(codes)) for codes in heard) >= 8
    assert min(len(set(codes)) for codes in spoken) >= 20
    assert len(set(text)) >= 20
    assert 0.01 < float(sound.std()) < 0.5
    assert 0.5 < hidden_std < 2


def run(
    mimi: Mimi, lm: LanguageModel, ticks: int
) -> tuple[list[list[int]], torch.Tensor, list[int], list[list[int]], float]:
    """Greedy ticks on a sweep of tones, each model's codes fed to the next, without delays.

    Returns the caller's codes and the model's per codebook, sound, text, spread of hidden.
    """
    states = {**fresh(mimi), **fresh(lm)}
    seconds = torch.arange(ticks * 1920) / 24_000
    pcm = 0.1 * torch.sin(6.28 * (200 + 150 * torch.sin(3 * seconds)) * seconds)
    heard, spoken, text, sounds, spreads = [], [], [], [], []
    before = torch.zeros(1, 9, dtype=torch.int64)
    for tick in range(ticks):
        with torch.no_grad():
            frame = pcm[tick * 1920 : (tick + 1) * 1920].view(1, 1, -1)
            user, new = mimi.encode(frame, states)
            states |= new
            ids = torch.cat([before, user], dim=1)
            hidden, logits, new = lm.temporal(ids, torch.tensor([tick]), states)
            states |= new
            before = lm.depth(hidden, logits, lambda _, scores: scores.argmax(-1))
            out, new = mimi.decode(before[:, 1:], states)
            states |= new
        heard.append(user[0].tolist())
        spoken.append(before[0, 1:].tolist())
        text.append(int(before[0, 0]))
        sounds.append(out)
        spreads.append(float(hidden.std()))
    return by_codebook(heard), torch.cat(sounds), text, by_codebook(spoken), max(spreads)


def fresh(model: Mimi | LanguageModel) -> dict[str, torch.Tensor]:
    return fresh_state(model.regions(), 1)


def by_codebook(frames: list[list[int]]) -> list[list[int]]:
    return [list(codes) for codes in zip(*frames, strict=True)]


# Writing.


class Killed(Exception):
    """Stands for whatever stops a run half way."""


def write_until(folder: Path, bytes_written: int) -> None:
    """Write seed 1, stopping once so much of the language model is there."""

    def stop(file: str, done: int, total: int) -> None:
        if file == LM_FILE and done >= bytes_written:
            raise Killed

    with pytest.raises(Killed):
        write_checkpoint("moshiko", folder, width="small", seed=1, progress=stop)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "CHUNK", 10_000)
    monkeypatch.setattr(seed, "SYNC_BYTES", SYNC_BYTES)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("stopped_at", [60_000, 2_500_000, 17_000_000])
@pytest.mark.parametrize("damage", ["", "torn", "hole"])
def test_a_killed_run_is_continued(
    stopped_at: int, damage: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_until(tmp_path, stopped_at)
    part = tmp_path / f"{LM_FILE}.part"
    assert part.stat().st_size >= stopped_at
    if damage == "torn":
        os.truncate(part, stopped_at - 7)
    elif damage == "hole":
        with part.open("r+b") as stream:
            stream.seek(stopped_at - 3000)
            stream.write(b"\0" * 3000)
    written = write_checkpoint("moshiko", tmp_path, width="small", seed=1)
    whole = sum((tmp_path / name).stat().st_size for name in (LM_FILE, MIMI_FILE))
    kept = whole - written
    assert kept <= stopped_at
    assert kept >= stopped_at - 2 * SYNC_BYTES or stopped_at < 2 * SYNC_BYTES
    for path in folders["moshiko"].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert not part.exists()


def test_a_process_killed_outright_is_continued(folders: dict[str, Path], tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from export import seed\n"
        "seed.CHUNK, seed.SYNC_BYTES = 1000, 1 << 20\n"
        "seed.write_checkpoint('moshiko', Path(sys.argv[1]), width='small', seed=1, progress="
        "lambda f, done, t: os.kill(os.getpid(), signal.SIGKILL) if done > 4_000_000 else None)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=120, check=False
    )
    assert killed.returncode == -9
    assert sorted(os.listdir(tmp_path)) == [f"{LM_FILE}.part"]
    write_checkpoint("moshiko", tmp_path, width="small", seed=1)
    for path in folders["moshiko"].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("small_chunks")
def test_an_unfinished_file_of_another_seed_is_begun_anew(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    write_until(tmp_path, 1_000_000)
    write_checkpoint("moshiko", tmp_path, width="small", seed=2)
    assert open_checkpoint(tmp_path).untrained == "seed=2 width=small generator=1"


def test_a_whole_checkpoint_is_recognised(folders: dict[str, Path]) -> None:
    before = (folders["moshiko"] / LM_FILE).stat().st_mtime_ns
    assert write_checkpoint("moshiko", folders["moshiko"], width="small", seed=1) == 0
    assert (folders["moshiko"] / LM_FILE).stat().st_mtime_ns == before


def test_another_checkpoint_is_never_overwritten(folders: dict[str, Path]) -> None:
    before = (folders["moshiko"] / LM_FILE).read_bytes()
    with pytest.raises(SeedError, match=r"is not what this command writes .*another folder"):
        write_checkpoint("moshiko", folders["moshiko"], width="small", seed=2)
    assert (folders["moshiko"] / LM_FILE).read_bytes() == before


@pytest.mark.parametrize("name", [CONFIG_FILE, TEXT_FILE])
def test_a_file_of_somebody_elses_is_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(SeedError, match=rf"{name} is there already .*another folder"):
        write_checkpoint("moshiko", tmp_path, width="small", seed=1)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"mine"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    def again(file: str, done: int, total: int) -> None:
        with pytest.raises(SeedError, match="is being written by another run"):
            write_checkpoint("moshiko", tmp_path, width="small", seed=1)
        raise Killed

    with pytest.raises(Killed):
        write_checkpoint("moshiko", tmp_path, width="small", seed=1, progress=again)


def test_a_full_disk_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(_: object) -> Any:
        return shutil._ntuple_diskusage(20 << 30, 18 << 30, 2 << 30)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(SeedError, match=r"has 2,147 MB free; .* needs 15,\d{3} MB more"):
        write_checkpoint("moshiko", tmp_path, width="full", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SeedError, match="cannot be written: Not a directory"):
        write_checkpoint("moshiko", tmp_path / "file" / "in", width="small", seed=1)


# What a person sees.


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["seed-checkpoint", "moshika", "-o", str(tmp_path), "--seed", "5"]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("moshi-4x256: dep_q 8, 17 streams, context 100")
    assert "UNTRAINED (seed=5 width=small generator=1)" in said.out
    assert f"{LM_FILE}: 0.02 of 0.02 GB\n" in said.err
    assert cli.main(words) == 0
    assert capsys.readouterr().out.endswith("already whole\n")
    assert cli.main([*words[:-1], "6"]) == 1
    assert capsys.readouterr().err.startswith("duplexbox export seed-checkpoint: ")


def test_a_log_gets_a_line_per_gigabyte() -> None:
    bar = Bar(is_terminal=False)
    steps = [bar.update("m", done << 28, 10 << 28) for done in range(1, 11)]
    assert [line for line in steps if line] == [
        "m: 1.07 of 2.68 GB\n",
        "m: 2.15 of 2.68 GB\n",
        "m: 2.68 of 2.68 GB\n",
    ]


def test_a_terminal_gets_a_bar_that_moves_by_the_percent() -> None:
    bar = Bar(is_terminal=True)
    steps = [bar.update("m", done, 1000) for done in range(1, 1001)]
    assert len([text for text in steps if text]) == 101
    assert steps[0] == "\rm [..............................] 0.00 of 0.00 GB"
    assert steps[-1] == "\rm [##############################] 0.00 of 0.00 GB\n"


def test_small_models_are_the_published_ones_in_proportion() -> None:
    full, small = LmConfig(), seed.SMALL_LM
    assert small.dimension // small.heads == full.dimension // full.heads
    assert small.depth_dimension // small.depth_heads == full.depth_dimension // full.depth_heads
    assert small.feedforward / small.dimension == full.feedforward / full.dimension
    assert small.delays == full.delays


EMB = [16002, 16304, 15985, 16333, 49007, 47951]
DOWNSAMPLE = [1008801840, 1024478696, 1027710721]
