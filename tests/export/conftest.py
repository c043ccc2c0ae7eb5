"""What the export tests share: one micro bundle, and one torch thread so that bits repeat."""

import fcntl
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from engines import bundle
from engines.bundle import Bundle
from export import build
from export.stages import Attention
from tests.export.calls import SEED


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    # The tracer logs every step for whoever listens, and pytest listens to all.
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shared(
    factory: pytest.TempPathFactory, name: str, model: str, attention: Attention = "standard"
) -> Bundle:
    """Built by whichever worker wants it first, and read by the others, who wait for it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of the workers' own folders: the run's
    folder, done = base / f"shared-{name}", base / f"shared-{name}.done"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build.build_seeded(model, folder, seed=SEED, largest_batch=4, attention=attention)
            done.touch()
    return bundle.read(folder)


@pytest.fixture(scope="session")
def micro_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The micro model; every ring of it wraps within two seconds of speech."""
    return shared(tmp_path_factory, "micro", "micro")


@pytest.fixture(scope="session")
def persona_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The micro model that takes a voice and a persona."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    return shared(tmp_path_factory, "persona", "personaplex-micro")


@pytest.fixture(scope="session")
def ring_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model as `micro_bundle`, cut at attention."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    return shared(tmp_path_factory, "ring", "micro", attention="ring")


@pytest.fixture(scope="session")
def persona_ring_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model as `persona_bundle`, cut at attention."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    return shared(tmp_path_factory, "persona-ring", "personaplex-micro", attention="ring")
