"""What `check` refuses is what `serve` refuses, and `check` leaves nothing behind."""

import os
from pathlib import Path

import pytest

from appliance import cli
from appliance.config import EXIT_CONFIG
from tests.small import SMALL


def config_of(folder: Path, more: str) -> Path:
    path = folder / "duplexbox.toml"
    path.write_text(f'[engine]\nbundle = "{SMALL}"\n{more}'.replace("TMP", str(folder)))
    return path


def tables(socket: str = "TMP/new/box.sock", ledger: str = "TMP/calls/deep") -> str:
    return f'[control]\nsocket = "{socket}"\n[ledger]\nfolder = "{ledger}"\n'


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (tables(socket="TMP/plain"), "it is there and is no socket"),
        (tables(socket="TMP/plain/box.sock"), "plain is no folder"),
        (tables(socket="TMP/" + "x" * 120), "Name a path of at most 107 bytes"),
        (tables(ledger="TMP/plain"), "[ledger] folder"),
        (tables(ledger="TMP/plain/calls"), "plain is no folder"),
        (tables() + "min_free_mb = 500_000_000\n", "every call would be removed once it has ended"),
    ],
)
def test_paths_that_cannot_be_used_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, says: str
) -> None:
    (tmp_path / "plain").touch()
    assert cli.main(["check", "--config", str(config_of(tmp_path, more))]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_elses_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    config = config_of(tmp_path, tables(ledger="TMP/locked/calls"))
    assert cli.main(["check", "--config", str(config)]) == EXIT_CONFIG
    assert "locked cannot be written to" in capsys.readouterr().err


def test_little_memory_is_told_of_and_not_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, is_told in ((1, True), (10_000, False)):
        more = tables() + f"[admission]\nmemory_mb = {limit}\n"
        assert cli.main(["check", "--config", str(config_of(tmp_path, more))]) == 0
        assert ("the others will be refused" in capsys.readouterr().out) == is_told
    assert [path.name for path in tmp_path.iterdir()] == ["duplexbox.toml"]
