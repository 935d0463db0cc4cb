"""A browser, servers for it to visit, and its pages. Errors on a page fail the test."""

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from logitd.model.checkpoint.checkpoint import save_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.service.settings.common import BUNDLED_CHECKPOINT
from tests.e2e.playground.page import PROMPT, NewPage, Page, ready, wait_for_value
from tests.e2e.server import ServedProcess
from tests.model.sae.dictionaries import write_random_autoencoder
from tests.service.models.test_history import save_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        # Containers lack the rights for its sandbox.
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def server() -> Iterator[ServedProcess]:
    with ServedProcess("--threads", "1") as running:
        yield running


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server with three models: the bundled one, one of the same shape with other weights, and
    one that cannot be loaded."""
    info, gpt = load_checkpoint(BUNDLED_CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in gpt.state_dict().items()
    }
    folder = tmp_path_factory.mktemp("pair")
    save_checkpoint(
        folder / "other",
        config=info.config,
        weights=weights,
        tokenizer=info.tokenizer,
        training=info.training,
        card="",
    )
    named = (f"small={BUNDLED_CHECKPOINT}", f"other={folder / 'other'}", "gone=nowhere")
    with ServedProcess(*named, "--threads", "1") as running:
        yield running


@pytest.fixture(scope="package")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server running the bundled model with a sparse autoencoder that has 64 random features."""
    folder = tmp_path_factory.mktemp("saes") / "mine"
    write_random_autoencoder(folder, hook="blocks.3.hook_resid_post", width=256, features=64)
    with ServedProcess("--sae", f"mine={folder}", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="package")
def film(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server started with a training run and `--history`. It must outlive the pages: while it
    stops, it answers requests with status 503, which a page that is still open would log as
    errors."""
    run = save_run(tmp_path_factory.mktemp("film") / "run")
    with ServedProcess(str(run), "--history", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="package")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """As `film`, with a context of 16 tokens."""
    run = save_run(tmp_path_factory.mktemp("short") / "run", context_length=16)
    with ServedProcess(str(run), "--history", "--threads", "1") as running:
        yield running


@pytest.fixture
def new_page(browser: Any) -> Iterator[NewPage]:
    """Open pages. An error on a page, or a request to another host, fails the test."""
    contexts, problems = [], []

    def opened(url: str, *, quiet: bool = True, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.wait_for_function = partial(wait_for_value, page)
        host = urlsplit(url).netloc

        def note_request(request: Any) -> None:
            if urlsplit(request.url).netloc not in (host, ""):
                problems.append(f"asked {request.url}")

        def note_error(message: Any) -> None:
            if message.type == "error":
                problems.append(message.text)

        page.on("request", note_request)
        page.on("pageerror", lambda error: problems.append(f"failed: {error}"))
        if quiet:
            page.on("console", note_error)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def page(server: ServedProcess, new_page: NewPage) -> Page:
    return ready(new_page(f"{server.url}/#prompt={PROMPT.replace(chr(10), '%0A')}"))
