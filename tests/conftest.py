"""What holds for all tests: their model is there, long files begin first, slowness of an example
proves nothing, and a test's log ends with it.

The first draw of text in a fresh clone computes tables of Unicode for seconds, and a busy machine
takes as long for anything; Hypothesis takes both for a fault of the strategy.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import small

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


LONGEST = (
    "tests/export/test_tensorrt_build.py",
    "tests/export/test_ring_stages.py",
    "tests/export/test_ring_persona.py",
    "tests/export/test_build.py",
    "tests/export/test_verify.py",
    "tests/export/test_folder_parity.py",
    "tests/appliance/lines/test_web_server.py",
    "tests/appliance/lines/test_sip_dialogs.py",
)
"""Files of half a minute and more, one of which would keep one core busy alone if it began last."""


def pytest_configure(config: pytest.Config) -> None:
    """Build the small model before tests are collected, once for all workers."""
    if not hasattr(config, "workerinput"):
        small.built()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order for `-n 2 --dist loadfile --no-loadscope-reorder`; otherwise it does no harm."""
    first = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.nodeid.partition("::")[0], len(first)))


@pytest.fixture(autouse=True)
def log_of_this_test_alone() -> Iterator[None]:
    """A verb that serves logs to the stderr it was begun with: a test's, which is closed after it.

    Whoever logs later, or in a thread that is left, would have a traceback put on the terminal.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
