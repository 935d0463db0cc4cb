"""The application before the first request, and while all its threads are busy."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import fastapi.dependencies.utils
import fastapi.routing
import pytest

from tests.service.serving import TEST_TIMEOUT, Serving, eventually, serving

ANSWERED_BY_THE_LOOP = (
    "/health", "/health/live", "/info", "/version", "/v1/models", "/v1/models/tiny",
)  # fmt: skip


def test_routes_are_prepared_before_the_first_request(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI prepares the routes of an included router at the first request, which blocks the
    event loop for a fifth of a second. So no router is included."""
    made: list[Any] = []
    make = fastapi.dependencies.utils.get_dependant

    def noted(*arguments: Any, **named: Any) -> Any:
        made.append(named.get("path"))
        return make(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(fastapi.routing, "get_dependant", noted)
        with serving(checkpoint_path) as server:
            assert made, "the test replaces the wrong function"
            made.clear()
            for path in ("/version", "/nowhere", "/v1/models"):
                server.client.get(path)
            server.generate("a", max_tokens=1)
            assert not made


@contextmanager
def no_free_thread(server: Serving) -> Iterator[None]:
    """During the block, occupy every thread that can run an endpoint."""
    taken, done = asyncio.Event(), asyncio.Event()

    async def take() -> None:
        limiter = anyio.to_thread.current_default_thread_limiter()
        borrowers = [object() for _ in range(int(limiter.available_tokens))]
        for borrower in borrowers:
            limiter.acquire_on_behalf_of_nowait(borrower)
        taken.set()
        await done.wait()
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)

    future = asyncio.run_coroutine_threadsafe(take(), server.loop)
    eventually(taken.is_set)
    try:
        yield
    finally:
        server.loop.call_soon_threadsafe(done.set)
        future.result(TEST_TIMEOUT)


@pytest.mark.parametrize("path", ANSWERED_BY_THE_LOOP)
def test_endpoint_without_work_needs_no_thread(server: Serving, path: str) -> None:
    """Probes must succeed even if all threads wait for a disk."""
    with no_free_thread(server):
        assert server.client.get(path, timeout=10).status_code in (200, 404)


def test_openapi_document_is_made_once_and_in_a_thread(checkpoint_path: Path) -> None:
    """Creating the document takes a quarter of a second, and much longer in many threads at
    once."""
    made_on: list[Any] = []
    with serving(checkpoint_path) as server:
        openapi = server.app.openapi

        def noted() -> Any:
            try:
                made_on.append(asyncio.get_running_loop())
            except RuntimeError:
                made_on.append(None)  # in a thread
            return openapi()

        server.app.openapi = noted
        with ThreadPoolExecutor(8) as clients:
            replies = list(clients.map(server.client.get, ["/openapi.json"] * 8))
    first, *others = (reply.json() for reply in replies)
    assert first["info"]["title"] == "logitd"
    assert (others, made_on) == ([first] * 7, [None])


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/docs", "/info"])
def test_head_is_get_without_a_body(server: Serving, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == get.headers["content-length"]
    assert server.client.head("/generate").status_code == 405
