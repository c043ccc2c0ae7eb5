"""The root command: which folder runs, and what a user sees when something is not there."""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import duplexbox

ROOT = Path(__file__).resolve().parent.parent


def stand_in_for_cli(
    monkeypatch: pytest.MonkeyPatch, folder: str, main: Callable[[Sequence[str]], int]
) -> None:
    """Let `main` be what the folder's cli module holds."""
    module = ModuleType(f"{folder}.cli")
    module.__dict__["main"] = main
    monkeypatch.setitem(sys.modules, f"{folder}.cli", module)
    importlib.import_module(folder)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "duplexbox", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_folder_gets_the_rest_of_the_line_and_its_exit_code_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Sequence[str]] = []

    def main(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 78

    stand_in_for_cli(monkeypatch, "engines", main)
    assert duplexbox.main(["engines", "show", "--json", "B"]) == 78
    assert seen == [["show", "--json", "B"]]


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch.onnx", "[export]"), ("cuda.bindings", "[cuda]"), ("soxr", "")],
)
def test_a_missing_module_is_one_sentence_with_the_command_that_brings_it(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: Sequence[str]) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    stand_in_for_cli(monkeypatch, "export", main)
    assert duplexbox.main(["export", "build"]) == 2
    assert capsys.readouterr().err == (
        f"duplexbox export needs {module.partition('.')[0]}, which is not installed. "
        f"Install it with: pip install '{ROOT}{extra}'\n"
    )


def test_every_extra_we_name_is_declared_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {f"[{name}]" for name in project["optional-dependencies"]}
    assert set(duplexbox.EXTRA_OF.values()) <= declared


def test_a_missing_module_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: Sequence[str]) -> int:
        raise ModuleNotFoundError("No module named 'engines.gone'", name="engines.gone")

    stand_in_for_cli(monkeypatch, "appliance", main)
    with pytest.raises(ModuleNotFoundError):
        duplexbox.main(["appliance", "demo"])


def test_ctrl_c_is_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    stand_in_for_cli(monkeypatch, "appliance", main)
    assert duplexbox.main(["appliance", "demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    script = (
        "import sys, types, duplexbox\n"
        "def main(argv):\n"
        "    for n in range(100_000): sys.stdout.write('line\\n')\n"
        "    return 0\n"
        "sys.modules['engines.cli'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(duplexbox.main(['engines', 'show']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"line\n"
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=60) == 141


def test_an_unknown_folder_is_named_and_the_known_ones_are_listed() -> None:
    ran = run("exprt", "build")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "no folder 'exprt'; it has export, engines, appliance" in ran.stderr


def test_no_words_is_a_usage_error_but_help_is_not() -> None:
    assert (run().returncode, run().stdout) == (2, "")
    asked = run("--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "usage: duplexbox <folder> <verb>" in asked.stdout


def test_the_version_is_the_package_s() -> None:
    assert run("--version").stdout == f"duplexbox {duplexbox.__version__}\n"
