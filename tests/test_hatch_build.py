"""What is compiled at installation, and that nothing else depends on it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE, LIBRARY = "appliance/lines/sip_sleep.c", "appliance/lines/sip_sleep.so"


class Interface:
    """What hatchling, which is where wheels are made and nowhere else, gives a hook."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.warnings: list[str] = []
        self.app = SimpleNamespace(display_warning=self.warnings.append)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = ""
    for part in "hatchling.builders.hooks.plugin.interface".split("."):
        name = f"{name}.{part}" if name else part
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "BuildHookInterface", Interface, raising=False)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delenv("CC", raising=False)
    return importlib.import_module("hatch_build")


def tree(folder: Path, text: str = "int answer(void) { return 42; }") -> Path:
    """Something like this project, with a library that was made of an older source."""
    source, library = folder / SOURCE, folder / LIBRARY
    source.parent.mkdir(parents=True)
    source.write_text(text)
    library.write_text("of an older source")
    return folder


def build(hook: ModuleType, root: Path, version: str) -> tuple[dict[str, Any], list[str], bytes]:
    """What hatchling is told, the warnings, and the first bytes of what it packs."""
    told: dict[str, Any] = {"force_include": {}, "pure_python": True}
    compile_pace = hook.CompilePace(root)
    compile_pace.initialize(version, told)
    made = [Path(one) for one in told["force_include"]]
    packed = b"".join(one.read_bytes()[:4] for one in made)
    compile_pace.finalize(version, told, "duplexbox.whl")
    assert not any(one.parent.exists() for one in made)
    return told, compile_pace.warnings, packed


def test_a_wheel_has_the_library_and_its_tag_and_nothing_is_written_beside_the_source(
    hook: ModuleType, tmp_path: Path
) -> None:
    root = tree(tmp_path)
    told, warnings, packed = build(hook, root, "standard")
    assert not warnings
    assert packed == b"\x7fELF"
    assert list(told["force_include"].values()) == [LIBRARY]
    assert told["pure_python"] is False
    assert told["tag"].startswith("py3-none-linux")
    assert (root / LIBRARY).read_text() == "of an older source"


def test_an_editable_installation_has_it_beside_its_source(
    hook: ModuleType, tmp_path: Path
) -> None:
    root = tree(tmp_path)
    told, warnings, _ = build(hook, root, "editable")
    assert not warnings
    assert (root / LIBRARY).read_bytes()[:4] == b"\x7fELF"
    assert told["force_include"] == {}


@pytest.mark.parametrize("compiler", ["/nonexistent", "false", '"', "cc --no-such-option"])
@pytest.mark.parametrize("version", ["editable", "standard"])
def test_without_a_compiler_it_is_left_out_and_said(
    hook: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    version: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    root = tree(tmp_path)
    told, (warning,), _ = build(hook, root, version)
    assert "is left out" in warning
    assert told == {"force_include": {}, "pure_python": True}
    assert (root / LIBRARY).exists() == (version == "standard")


def test_a_compiler_with_options_is_one(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc -DANSWER=42")
    root = tree(tmp_path, "int answer(void) { return ANSWER; }")
    assert not build(hook, root, "editable")[1]


@pytest.mark.parametrize("declared", ["", "int sem_nobody_has(void);"])
def test_a_c_library_that_lacks_something_is_found_out_before_the_first_call(
    hook: ModuleType, tmp_path: Path, declared: str
) -> None:
    root = tree(tmp_path, declared + "int answer(void) { return sem_nobody_has(); }")
    assert build(hook, root, "standard")[1]


def test_what_cannot_be_written_or_removed_is_left_out(hook: ModuleType, tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / LIBRARY).unlink()
    (root / LIBRARY).mkdir()
    assert build(hook, root, "editable")[1]
