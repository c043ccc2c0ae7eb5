"""The verbs, as somebody types them: what they print, and what they exit with."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from appliance import cli, ledger
from tests.appliance.test_ledger import call_bytes, header


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def write_call(folder: Path, ticks: int, due: int | None = None) -> Path:
    """A call whose frames were never made, so that no receipt is owed."""
    path = folder / ledger.file_name(header())
    path.write_bytes(call_bytes(ticks))
    if due is not None:
        import numpy as np

        end = np.zeros(1, ledger.END)
        end["kind"], end["index"], end["why"] = ledger.Kind.END, due, ledger.Why.FINISHED
        path.write_bytes(path.read_bytes() + ledger.seal(end))
    return path


def test_ledger_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_call(tmp_path, ticks=3, due=3)
    assert run("ledger", tmp_path) == 0
    out = capsys.readouterr().out
    assert "Änn" in out
    assert "every one of 3 due frames is accounted for" in out


def test_ledger_ends_with_1_when_a_frame_is_unexplained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_call(tmp_path, ticks=3, due=4)
    assert run("ledger", tmp_path) == 1
    assert "1 frames are UNEXPLAINED" in capsys.readouterr().out


def test_ledger_writes_json_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_call(tmp_path, ticks=3, due=3)
    assert run("ledger", path, "--json", "--plot", tmp_path / "x.svg") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unexplained"], found["sessions"][0]["due"]) == (0, 3)
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_ledger_sums_up_what_it_can_read_and_ends_with_1_for_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_call(tmp_path, ticks=3, due=3)
    (tmp_path / "cut.call").write_bytes(b"")
    assert run("ledger", tmp_path) == 1
    said = capsys.readouterr()
    assert "every one of 3 due frames" in said.out
    assert said.err.startswith(f"duplexbox appliance ledger: {tmp_path}/cut.call")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("words", [("ledger",), ("serve", "--config")])
def test_a_path_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run(*words, tmp_path / "none") != 0
    err = capsys.readouterr().err
    assert err.startswith(f"duplexbox appliance {words[0]}: ")
    assert err.count("\n") == 1


def test_init_writes_a_config_and_never_over_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "duplexbox.toml"
    assert run("init", path) == 0
    written = path.read_text()
    assert run("init", path) == 2
    assert path.read_text() == written
    capsys.readouterr()
    assert run("init", "-") == 0
    assert capsys.readouterr().out == written


@pytest.mark.parametrize("verb", ["serve", "check"])
def test_a_config_with_a_typo_ends_with_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path = tmp_path / "duplexbox.toml"
    path.write_text('[engine]\nbundel = "/b"\n')
    assert run(verb, "--config", path) == 78
    err = capsys.readouterr().err
    assert "`$.engine`" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["serve", "check"])
def test_a_bundle_that_is_none_ends_with_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path = tmp_path / "duplexbox.toml"
    path.write_text(f'[engine]\nbundle = "{tmp_path}/nowhere"\n')
    assert run(verb, "--config", path) == 78
    err = capsys.readouterr().err
    assert "duplexbox export build" in err
    assert err.count("\n") == 1


def test_demo_without_a_bundle_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", "--out", tmp_path / "out", "--bundle", tmp_path / "none") == 1
    err = capsys.readouterr().err
    assert err.startswith("duplexbox appliance demo: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [(), ("dial",), ("serve", "--port", "1")])
def test_a_verb_that_is_none_is_usage(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
