"""What the export tests share: one micro bundle, and one torch thread so that bits repeat."""

import logging
from collections.abc import Iterator

import pytest
import torch

from engines.bundle import Bundle
from export import build
from tests.export.calls import SEED


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    # The tracer logs every step for whoever listens, and pytest listens to all.
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def micro_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The micro model; every ring of it wraps within two seconds of speech."""
    folder = tmp_path_factory.mktemp("bundles") / "micro"
    return build.build_seeded("micro", folder, seed=SEED, largest_batch=4)


@pytest.fixture(scope="session")
def persona_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The micro model that takes a voice and a persona."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    folder = tmp_path_factory.mktemp("bundles") / "persona"
    return build.build_seeded("personaplex-micro", folder, seed=SEED, largest_batch=4)


@pytest.fixture(scope="session")
def ring_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model as `micro_bundle`, cut at attention."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    folder = tmp_path_factory.mktemp("bundles") / "ring"
    return build.build_seeded("micro", folder, seed=SEED, largest_batch=4, attention="ring")
