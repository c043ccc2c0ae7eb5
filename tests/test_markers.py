"""Tests that watch the machine's clock say so, or they would run beside others and fail by them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REAL_TIME = {"MonotonicClock", "FakeBox", "Running"}
"""A clock that cannot be told to wait, and boxes that tick on it."""
ALONE = {"clock", "sound", "web", "peers"}
"""Markers of tests that never run on both cores at once."""


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
