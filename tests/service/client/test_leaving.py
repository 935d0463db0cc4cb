"""Leaving a stream or a call ends it on the server and frees its slot."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitd import AsyncClient, StreamError
from tests.service.client.conftest import Connect
from tests.service.client.scripted import scripted
from tests.service.serving import Serving, serving
from tests.service.spelling import spelled

LONG: dict[str, Any] = {"prompt": "a", "ignore_eos": True}
"""A generation that outlasts any test."""


@pytest.fixture
def watched(spelling_path: Path) -> Any:
    """A service used by this test alone, with its slots and counters."""
    with serving(spelling_path, slots=2) as running:
        yield running


def test_closing_a_stream_ends_the_request(watched: Serving, connect: Connect) -> None:
    stream = connect(watched.url).stream(**LONG)
    chunks = iter(stream)
    next(chunks)
    assert watched.served.engine.admission.sequences == 1
    stream.close()
    watched.wait_idle()
    assert watched.finished("abort") == 1
    assert watched.sample("logitd_generation_tokens_total") < 8191
    assert stream.text.startswith("b")
    assert list(chunks) == []
    stream.close()
    with pytest.raises(StreamError, match=r"early, after \d+ tokens") as caught:
        stream.result()
    assert caught.value.tokens > 0


def test_leaving_the_block_ends_the_request(watched: Serving, connect: Connect) -> None:
    def leave() -> None:
        with connect(watched.url).stream(**LONG) as stream:
            next(iter(stream))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    watched.wait_idle()
    assert watched.finished("abort") == 1


def test_unused_stream_sends_nothing(connect: Connect) -> None:
    with scripted() as server:
        stream = connect(server.url).stream(**LONG)
        stream.close()
        with stream:
            assert list(stream) == []
        assert server.requests == []


@pytest.mark.parametrize("streamed", [False, True])
def test_cancelling_a_task_ends_its_request(watched: Serving, streamed: bool) -> None:
    async def main() -> None:
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            AsyncClient(watched.url, http=http) as client,
        ):
            call = client.stream(**LONG).result() if streamed else client.generate(**LONG)
            task = asyncio.create_task(call)
            while watched.served.engine.admission.sequences == 0:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    watched.wait_idle()
    assert watched.finished("abort") == 1


def test_tasks_can_share_a_client(speller: Serving) -> None:
    async def main() -> list[str]:
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            AsyncClient(speller.url, http=http) as client,
        ):
            calls = [client.generate(chr(97 + i % 20), max_tokens=3) for i in range(40)]
            return [generation.text for generation in await asyncio.gather(*calls)]

    texts = asyncio.run(main())
    assert texts == [bytes(spelled(chr(97 + i % 20), 3)).decode() for i in range(40)]
