"""Streams: every token of a real server is counted, failures are noticed, and figures follow from
the arrival times."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest
from uvicorn.loops.auto import auto_loop_factory

from benchmarks.raw_client import RawClient
from benchmarks.streams import (
    Arrival,
    Ask,
    Failure,
    StreamRecord,
    asking,
    full_batch_rate,
    run_streams,
)
from logitd.service.client import AsyncClient
from tests.service.serving import TEST_TIMEOUT, serving


@asynccontextmanager
async def usual(url: str) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield asking(AsyncClient(url, max_retries=0, timeout=TEST_TIMEOUT, http=http))


@asynccontextmanager
async def lean(url: str) -> AsyncIterator[Ask]:
    with closing(RawClient(url)) as ask:
        yield ask


Asked = Callable[[str], AbstractAsyncContextManager[Ask]]
CLIENTS = pytest.mark.parametrize("client", [usual, lean])
"""Runs a test with each of the two clients, which must count the same tokens."""


def streams(
    url: str, prompts: Sequence[Sequence[int]], tokens: int, client: Asked
) -> list[StreamRecord]:
    async def run() -> list[StreamRecord]:
        async with client(url) as ask:
            return await run_streams(ask, prompts, tokens)

    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # like a server's
        return runner.run(run())


# Against a real server


@CLIENTS
def test_every_token_is_counted_and_failures_are_seen(checkpoint_path: Path, client: Asked) -> None:
    """The first two prompts are equal, but they are sent at the same time, so the prefix cache
    serves neither. The last prompt has an id outside the vocabulary."""
    prompt = list(range(64))
    with serving(checkpoint_path, slots=4) as running:
        *good, bad = streams(running.url, [prompt, prompt, [9999]], 20, client)
        running.wait_idle()
        assert running.sample("logitd_prompt_tokens_cached_total") == 0
        assert running.sample("logitd_generation_tokens_total") == 40
    for record in good:
        assert record.failure is None
        assert sum(arrival.tokens for arrival in record.arrivals) == 20
        moments = [record.sent, *(arrival.at for arrival in record.arrivals)]
        assert moments == sorted(moments)
    assert bad.failure is not None
    assert bad.failure.kind == "BadRequestError"


# Figures from known times


def test_rate_of_a_batch_with_a_failed_stream_is_none() -> None:
    good = StreamRecord(0.0, (Arrival(1.0, 1), Arrival(9.0, 2)))
    failed = StreamRecord(0.0, (Arrival(1.0, 1), Arrival(9.0, 2)), Failure("X", "y"))
    assert full_batch_rate([good, good]) == 2 * 2 / (9 - 1)
    assert full_batch_rate([good, failed]) is None
