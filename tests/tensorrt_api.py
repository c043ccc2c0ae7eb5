"""What a TensorRT module really has: names and arguments, read off its bindings' own docstrings.

pybind11 writes the signature of every function into its docstring. So code that drives TensorRT
can be compared with the module without a GPU, without calling it, and for `tensorrt` 11 without
its libraries, which are on no public index: only the wheel with its bindings is installed, and
borrows from `tensorrt_rtx` the libraries its symbols are looked up in.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Api = dict[str, dict[str, str]]
"""Class -> attribute -> docstring. Class "" holds what the module itself has."""


@dataclass(frozen=True)
class Use:
    """One attribute of a TensorRT class that a source file uses; arguments None: not called."""

    owner: str
    attribute: str
    arguments: int | None
    line: int


def describe(module: ModuleType) -> Api:
    """Every class of ``module`` with its attributes, inherited ones included."""
    api: Api = {"": {name: "" for name in dir(module)}}
    for name in dir(module):
        value = getattr(module, name)
        if isinstance(value, type):
            api[name] = {
                key: str(getattr(getattr(value, key, None), "__doc__", "") or "")
                for key in dir(value)
            }
    return api


@dataclass(frozen=True)
class Form:
    """One way to call a function, ``self`` left out."""

    names: list[str]
    required: int


def forms(name: str, docstring: str) -> list[Form]:
    """Every form of a function, from the signatures in its docstring."""
    found: list[Form] = []
    for line in docstring.splitlines():
        match = re.match(rf"(?:\d+\. )?{re.escape(name)}\((.*)\) -> ", line.strip())
        if not match or match[1].startswith("*args"):
            continue
        depth, words, word = 0, [], ""
        for letter in match[1] + ",":
            depth += letter in "[(<"
            depth -= letter in "])>"
            if letter == "," and depth == 0:
                words.append(word.strip())
                word = ""
            else:
                word += letter
        words = [word for word in words if word and word.partition(":")[0] != "self"]
        found.append(
            Form([word.partition(":")[0] for word in words], sum(" = " not in w for w in words))
        )
    return found


def uses(source: str, owners: Mapping[str, str]) -> list[Use]:
    """What ``source`` uses of TensorRT. owners: name of a variable or field -> class it holds.

    ``trt`` is the module itself; `trt.A.B` is member B of class A.
    """
    found: list[Use] = []
    tree = ast.parse(source)
    calls = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base, arguments = node.value, calls.get(id(node))
        if node.attr.startswith("__"):
            continue
        if isinstance(base, ast.Subscript):
            base = base.value
        name = base.id if isinstance(base, ast.Name) else ""
        if isinstance(base, ast.Attribute):
            inner = base.value
            is_module = isinstance(inner, ast.Name) and inner.id == "trt"
            is_module |= isinstance(inner, ast.Attribute) and inner.attr == "_trt"
            if is_module:
                found.append(Use(base.attr, node.attr, arguments, node.lineno))
                continue
            name = base.attr
        if name in ("trt", "_trt"):
            found.append(Use("", node.attr, None, node.lineno))
        elif name in owners:
            found.append(Use(owners[name], node.attr, arguments, node.lineno))
    return found


def fault(use: Use, api: Api) -> str:
    """What is wrong with ``use`` for a module that has ``api``; empty when nothing is."""
    where = f"line {use.line}: {use.owner}.{use.attribute}"
    if use.owner not in api:
        return f"{where}: no such class"
    if use.attribute not in api[use.owner]:
        return f"{where}: no such name"
    if use.arguments is None:
        return ""
    known = forms(use.attribute, api[use.owner][use.attribute])
    if any(form.required <= use.arguments <= len(form.names) for form in known):
        return ""
    return f"{where} called with {use.arguments} arguments; it takes {known}"


def tensorrt_eleven(folder: Path) -> Api:
    """The API of `tensorrt` 11 from the wheel `tensorrt-cu13-bindings`, in another process.

    folder: empty; gets links to the libraries. One function is in no library at hand, and its
    name is overwritten with that of another in a copy of the bindings: nothing is ever called.
    """
    bindings = importlib.util.find_spec("tensorrt_bindings")
    libraries = importlib.util.find_spec("tensorrt_rtx_libs")
    assert bindings is not None, "pip install tensorrt-cu13-bindings"
    assert bindings.origin is not None
    assert libraries is not None, "pip install tensorrt-rtx-cu13"
    assert libraries.origin is not None
    raw = (Path(bindings.origin).parent / "tensorrt.so").read_bytes()
    missing, present = b"initLibNvInferPlugins\0", b"getPluginRegistry\0"
    assert missing in raw
    (folder / "tensorrt.so").write_bytes(raw.replace(missing, present.ljust(len(missing), b"\0")))
    (nvinfer,) = Path(libraries.origin).parent.glob("libtensorrt_rtx.so*")
    (parser,) = Path(libraries.origin).parent.glob("libtensorrt_onnxparser_rtx.so*")
    for name, target in (
        ("libnvinfer.so.11", nvinfer),
        ("libnvinfer_plugin.so.11", nvinfer),
        ("libnvonnxparser.so.11", parser),
    ):
        (folder / name).symlink_to(target)
    program = (
        "import json, sys, tensorrt\n"
        "from tests.tensorrt_api import describe\n"
        "json.dump(describe(tensorrt), sys.stdout)\n"
    )
    paths = [str(folder), str(Path(__file__).resolve().parent.parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), str(nvinfer.parent)]),
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: Any = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found
