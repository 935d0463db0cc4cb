"""Fixtures of the service's tests: checkpoints, servers, and a check of the log."""

import asyncio
import inspect
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.operations import generate
from logitd.model.transformer.gpt import GPT
from tests.model.factories import (
    CHAT_TEMPLATE,
    chat_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.service.serving import TEST_TIMEOUT, Serving, serving
from tests.service.spelling import save_spelling_checkpoint


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, TEST_TIMEOUT))
    return True


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> None:
    """Remove LOGITD_* variables, which would change the tests."""
    for name in [name for name in os.environ if name.startswith("LOGITD_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same seeds in every run. With random seeds, a test failed in
    one run of forty, because its sixteen samples from three words were all the same."""
    rng = random.Random(0)
    monkeypatch.setattr(generate, "new_seed", lambda: rng.getrandbits(53))


@pytest.fixture(scope="session")
def spelling_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_spelling_checkpoint(tmp_path_factory.mktemp("checkpoints") / "spelling").path


@pytest.fixture(scope="session")
def server(checkpoint_path: Path) -> Iterator[Serving]:
    """A server running the tiny random checkpoint, shared by tests."""
    with serving(checkpoint_path, slots=4) as running:
        yield running


@pytest.fixture(scope="session")
def speller(spelling_path: Path) -> Iterator[Serving]:
    """A server running the spelling checkpoint, shared by tests."""
    with serving(spelling_path, slots=4) as running:
        yield running


@pytest.fixture(scope="session")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server running a checkpoint with a chat template, shared by tests."""
    path = tmp_path_factory.mktemp("checkpoints") / "chatty"
    save_tiny_checkpoint(
        path,
        gpt=tiny_gpt(tiny_config(vocab_size=259, context_length=512)),
        tokenizer=chat_tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )
    with serving(path, slots=4) as running:
        yield running


@pytest.fixture(scope="session")
def gpt(checkpoint_path: Path) -> GPT:
    """The model that `server` serves, for tests that compute the expected numbers."""
    return load_checkpoint(checkpoint_path, device=torch.device("cpu"), dtype=torch.float32)[1]


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """Restore signal handlers after a server in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def logged_errors() -> Iterator[list[str]]:
    """Errors in the log, which fail a test. A test that provokes one must clear this list."""
    handler = _Errors()
    logging.getLogger().addHandler(handler)
    yield handler.messages
    logging.getLogger().removeHandler(handler)
    assert handler.messages == []
