"""Imports go one way, and the serving process stays lean.

Both are checked on every module that exists, found by walking the folders: by reading the import
statements (which also sees those inside functions), and by importing each module of the serving
side in a fresh interpreter and looking at what came along.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import appliance
import engines
import export

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("export", "engines", "appliance")

# What a folder may import of ours, as module prefixes.
ALLOWED = {
    "engines": ("engines",),
    "export": (
        "export",
        # formats, and what follows
        *("engines.bundle", "engines.clocks", "engines.golden", "engines.plans"),
        *("engines.ring_stage", "engines.caches"),  # the format of one built-in stage, its rings
        # what kernels of ours must be told
        *("engines.kernels.codec_kinds", "engines.kernels.lm_kinds"),
        "engines.machine",  # what can be built here depends on what is here
    ),
    "appliance": ("appliance", "engines"),
}
# `export verify` compares a bundle with what runs it, so it alone may reach the executors.
MAY_RUN_ENGINES = {"export/verify.py", "export/cli.py"}
# Of the root module, anybody may read the version and nothing else.
ROOT_MODULE = "duplexbox"
# What builds bundles; compared with whole first components, so onnxruntime is not onnx.
BUILDERS = {"torch", "onnx", "onnx_ir", "onnxscript"}
# Builder and runtime in one library: an executor may load it, but only once it has a plan to run.
LATE = {"tensorrt", "tensorrt_lean", "tensorrt_rtx", "cuda"}
# Scripts that are run by hand in their own environment, and are no part of the serving process.
BY_HAND = {"appliance/demo/make_audio.py"}


def modules_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Every (line, imported module) of a source, inside functions and type guards too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            assert node.module is not None
            # `from engines import bundle` names engines.bundle; `from engines.bundle import X`
            # names engines.bundle.X, which has the same prefix.
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def upward_imports(path: str, source: str) -> list[str]:
    """The imports in `source` that the table forbids to the module at `path`."""
    allowed = ALLOWED[path.partition("/")[0]]
    if path in MAY_RUN_ENGINES:
        allowed += ("engines",)
    return [
        f"{path}:{line} imports {name}"
        for line, name in imports_of(source)
        if name.partition(".")[0] in FOLDERS and not is_within(name, allowed)
    ] + [
        f"{path}:{line} imports {name}"
        for line, name in imports_of(source)
        if name.partition(".")[0] == ROOT_MODULE and name != f"{ROOT_MODULE}.__version__"
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    found = modules_of(folder)
    assert found
    wrong = [
        line
        for path in found
        for line in upward_imports(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["engines", "appliance"])
def test_no_serving_module_names_a_builder(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules_of(folder)
        for line, name in imports_of(path.read_text())
        if name.partition(".")[0] in BUILDERS
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("engines/bundle.py", "def f():\n    from appliance import box", ["appliance.box"]),
        ("engines/bundle.py", "import export.cli", ["export.cli"]),
        ("appliance/box.py", "from export.models.mimi import Mimi", ["export.models.mimi.Mimi"]),
        ("export/stages.py", "import engines.ort_executor", ["engines.ort_executor"]),
        ("export/stages.py", "from engines.bundle import Bundle", []),
        ("export/verify.py", "from engines.ort_executor import OrtExecutor", []),
        ("appliance/box.py", "from engines.program import Program\nimport numpy", []),
        ("appliance/cli.py", "from duplexbox import main", ["duplexbox.main"]),
    ],
)
def test_the_table_refuses_what_it_should(path: str, source: str, expected: list[str]) -> None:
    assert [line.partition(" imports ")[2] for line in upward_imports(path, source)] == expected


def test_the_serving_process_loads_no_builder() -> None:
    names = [
        module_name(path)
        for folder in ("engines", "appliance")
        for path in modules_of(folder)
        if path.relative_to(ROOT).as_posix() not in BY_HAND
    ]
    assert {"engines.bundle", "appliance"} <= set(names)
    script = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert (BUILDERS | LATE) & set(json.loads(ran.stdout)) == set()


def test_the_folders_are_what_gets_imported() -> None:
    # A distribution that installs a package called `export` would win over an editable install.
    for package in (appliance, engines, export):
        assert package.__file__ is not None
        assert Path(package.__file__).resolve().is_relative_to(ROOT), package.__file__
