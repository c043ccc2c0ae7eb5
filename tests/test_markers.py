"""Tests that watch the machine's clock say so, or they would run beside others and fail by them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REAL_TIME = {"MonotonicClock", "FakeBox", "Running"}
"""A clock that cannot be told to wait, and boxes that tick on it."""
ALONE = {"clock", "sound", "web", "peers"}
"""Markers of tests beside which nothing computes."""


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name


def marks(tree: ast.AST) -> set[str]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in found if ast.unparse(node.value) == "pytest.mark"}


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("from a import FakeBox\ndef test_it(): ...", True),
        ("from a import MonotonicClock\n@pytest.mark.slow\ndef test_it(): ...", True),
        ("from a import Running\n@pytest.mark.clock\ndef test_it(): ...", False),
        ("from a import Running\npytestmark = [pytest.mark.peers, pytest.mark.slow]", False),
        ("from a import FakeClock", False),
    ],
)
def test_a_missing_mark_is_seen(source: str, is_found: bool) -> None:
    assert lacks_mark(source) == is_found


def lacks_mark(source: str) -> bool:
    tree = ast.parse(source)
    return bool(REAL_TIME & set(names(tree))) and not ALONE & marks(tree)


def test_modules_that_watch_the_clock_are_marked() -> None:
    modules = sorted(TESTS.rglob("test_*.py"))
    assert len(modules) > 100
    found = [str(path.relative_to(TESTS)) for path in modules if lacks_mark(path.read_text())]
    assert found == [], "mark them, or the tests in them that do: @pytest.mark.clock"


def test_the_pass_that_watches_the_clock_looks_where_such_tests_are() -> None:
    """It is told where, or it would import torch for nothing."""
    makefile = (TESTS.parent / "Makefile").read_text()
    said = re.search(r"^CLOCKED := (.*)$", makefile, re.MULTILINE)
    assert said
    places = [TESTS.parent / place for place in said[1].split()]
    marked = [p for p in TESTS.rglob("test_*.py") if "clock" in marks(ast.parse(p.read_text()))]
    assert len(marked) > 10
    lost = [str(p) for p in marked if not any(p.is_relative_to(place) for place in places)]
    assert lost == [], "name their folders in CLOCKED of the Makefile"
