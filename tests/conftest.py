"""Fixtures that several packages of tests use."""

import gc
import logging
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.made_once import share_certificates, share_vocabularies
from tests.model.factories import save_tiny_checkpoint
from tests.profiles import register_profiles

register_profiles()
share_vocabularies()

MATPLOTLIB = "matplotlib.figure"
"""What draws the picture of a run. Where it is not installed, there is none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write messages.golden from the messages"
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models of a few kilobytes: a second thread would only spin, and take a core from a server
    under test."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reading all certificates takes longer than most tests do, and every server is local."""
    share_certificates(tmp_path_factory.mktemp("certificates") / "first.pem")


@pytest.fixture(scope="session", autouse=True)
def torch_logs_to_the_root() -> None:
    """torch has dozens of loggers that stop at themselves, and pytest adds its handlers to each of
    those and removes them again, six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Restore the number of threads after each test: more threads made later tests several times
    slower."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Seed each test, so that its draws do not depend on the tests before it. `torch.manual_seed`
    is slower: it notes a traceback for each kind of GPU."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny checkpoint (random weights, byte vocabulary). Read it, do not change it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny").path


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """matplotlib takes most of the time of a short run. Here it is not installed, except for tests
    that ask for `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MATPLOTLIB, None)
        yield


@pytest.fixture
def pictures(no_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their curves, where matplotlib is installed."""
    monkeypatch.delitem(sys.modules, MATPLOTLIB)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end. To look through them for garbage again and again makes
    the collection a quarter longer, and every full garbage collection afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes: at the end one worker would wait for the other."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
