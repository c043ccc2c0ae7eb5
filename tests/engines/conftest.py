"""What tests of the CUDA executor stand on: a driver that is none, and a toy with paged rings."""

from collections.abc import Iterator

import pytest

from engines.bundle import Bundle
from tests.engines import fake_driver, toy
from tests.engines.fake_driver import FakeDriver

PAGED_ROWS = 1024
"""Rows of the toy's ring here: 8 KiB a slot, two pages of the fake driver."""


@pytest.fixture(scope="module")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The toy with a ring that needs several pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "RETAIN", PAGED_ROWS)
        text = toy.HEAR.replace(",5,2]", f",{PAGED_ROWS},2]").replace("{5}", f"{{{PAGED_ROWS}}}")
        patch.setattr(toy, "HEAR", text)
        yield toy.write_toy(tmp_path_factory.mktemp("bundle") / "toy")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return fake_driver.install(monkeypatch)
