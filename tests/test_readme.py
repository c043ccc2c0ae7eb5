"""The README says what is there: its paths exist, its commands are accepted.

Commands are not run here, only parsed, by the parsers that a user's shell would reach.
"""

import argparse
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import duplexbox

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Commands stand in the indented blocks, with an optional comment after them.
COMMANDS = [
    line.partition("#")[0].strip()
    for line in README.splitlines()
    if re.match(r" {4}(make|duplexbox) ", line)
]


class Accepted(Exception):
    """The command line was parsed; nothing of it has run."""


def parse_only(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    """Raise Accepted where the command would start to run, SystemExit where it is refused."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
        parse(self, args)
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    duplexbox.main(words)


def make_plans(target: str) -> bool:
    """Whether make has a rule for the target; nothing is made."""
    ran = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return ran.returncode == 0


def test_every_path_on_the_map_exists() -> None:
    the_map = README.partition("## Map")[2].partition("\n## ")[0]
    paths = re.findall(r"`([\w/]+/|[\w/]+\.\w+)`", the_map)
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_readme_shows_both_kinds_of_commands() -> None:
    assert {command.partition(" ")[0] for command in COMMANDS} == {"make", "duplexbox"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("duplexbox ")])
def test_the_parsers_accept_what_the_readme_shows(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Accepted):
        parse_only(monkeypatch, shlex.split(command)[1:])


def test_a_verb_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_only(monkeypatch, ["export", "bild", "small"])


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)\b", README))))
def test_every_make_target_exists(target: str) -> None:
    assert make_plans(target)


def test_a_make_target_that_is_not_there_is_noticed() -> None:
    assert not make_plans("demonstrate")


def test_ci_runs_the_readme_s_test_command_and_nothing_else() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    runs = [line for line in script if line and not line.startswith(("#", "set ", "cd "))]
    assert runs == ["exec make test"]
    assert "make test" in COMMANDS
