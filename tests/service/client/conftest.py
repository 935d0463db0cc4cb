"""Fixture for the client's tests: clients of both kinds."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from logitd import AsyncClient, Client
from tests.service.client.driven import driven
from tests.service.serving import TEST_TIMEOUT

Connect = Callable[..., Client]
"""Makes a client from a URL and further arguments of `Client`."""


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Clients of either kind, closed after the test; they ignore this machine's proxies."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        def make(url: str, **options: Any) -> Client:
            options = {"timeout": TEST_TIMEOUT, **options}
            if request.param == "Client":
                http = stack.enter_context(httpx.Client(trust_env=False))
                return Client(url, **{"http": http, **options})
            http_async = httpx.AsyncClient(trust_env=False)
            stack.callback(lambda: runner.run(http_async.aclose()))
            return driven(runner, AsyncClient(url, **{"http": http_async, **options}))

        yield make
