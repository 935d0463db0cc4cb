"""Fixtures shared by several packages of tests."""

import gc
import logging
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.made_once import share_certificates, share_vocabularies
from tests.model.factories import save_tiny_checkpoint
from tests.profiles import register_profiles

register_profiles()
share_vocabularies()

SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow", re.MULTILINE)
"""Pattern of the line that marks a module whose tests are all slow."""

MATPLOTLIB = "matplotlib.figure"
"""Name of the module that draws the curves of a run, if it is installed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write messages.golden from the messages"
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread. Tiny models gain nothing from a second thread, and it would take a core from
    a tested server."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trust a single certificate authority. Reading all certificates takes longer than most tests,
    and no test needs them: all servers are local."""
    share_certificates(tmp_path_factory.mktemp("certificates") / "first.pem")


@pytest.fixture(scope="session", autouse=True)
def torch_logs_to_the_root() -> None:
    """Let all of torch's loggers propagate. Otherwise, pytest adds its handlers to each logger and
    removes them again, six times per test, and torch has dozens of loggers."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Restore the number of threads after each test; more threads slow down later tests."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Seed each test, so its draws do not depend on earlier tests. `torch.manual_seed` is slower,
    because it saves a traceback for each kind of GPU."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny checkpoint (random weights, byte vocabulary). Tests must not write to it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny").path


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Hide matplotlib, which dominates the time of short runs, unless a test uses `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MATPLOTLIB, None)
        yield


@pytest.fixture
def pictures(no_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs draw their curves, if matplotlib is installed."""
    monkeypatch.delitem(sys.modules, MATPLOTLIB)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules that have only slow tests; some import large packages."""
    if config.option.markexpr != "not slow" or not collection_path.match("test_*.py"):
        return None
    return SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def _import_share(config: pytest.Config) -> None:
    """Import a worker's share of the test modules. This writes their bytecode, which the other
    workers use too. Without bytecode, pytest compiles all modules in each worker, which takes six
    seconds in all."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or config.args != config.getini("testpaths"):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    root = Path(__file__).parent
    paths = [
        path for path in sorted(root.rglob("test_*.py")) if not pytest_ignore_collect(path, config)
    ]
    for path in paths[number::count]:
        with suppress(Exception, pytest.skip.Exception):  # the collection reports it
            import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Turn off garbage collection while the tests are collected; otherwise, collecting them takes a
    quarter longer. Later garbage collections skip the modules and the tests, because they stay in
    memory anyway."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out cases in which two or more parameters have slow values; each slow value is still
    combined with quick values of the other parameters. Start with the longest tests, so that no
    worker waits for another at the end."""
    items[:] = [
        item
        for item in items
        if not isinstance(item, pytest.Function)
        or not hasattr(item, "callspec")
        or sum(mark.name == "slow" for mark in item.callspec.marks) < 2
    ]
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
