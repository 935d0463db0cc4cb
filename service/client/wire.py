"""Wire: sends calls for both clients, over httpx's blocking or asynchronous client.

The code is written once, as coroutines that use a `Wire`. With a `BlockingWire` they never suspend,
so `finish` can run them without an event loop.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

import httpx

from logitd.service.client.calls import Call
from logitd.service.client.transport import MAX_REFUSAL_BYTES, Exchange, Settings

Result = TypeVar("Result")


class BlockingReply:
    """A reply that is being received."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._pieces = response.iter_bytes()

    async def read(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        return next(self._pieces, None)

    async def close(self) -> None:
        self.response.close()


class BlockingWire:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> BlockingReply:
        return BlockingReply(self.http.send(request, stream=True))

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class AsyncReply:
    """A reply that an asynchronous client is receiving."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._pieces = response.aiter_bytes()

    async def read(self) -> bytes | None:
        return await anext(self._pieces, None)

    async def close(self) -> None:
        await self.response.aclose()


class AsyncWire:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> AsyncReply:
        return AsyncReply(await self.http.send(request, stream=True))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


Reply = BlockingReply | AsyncReply
Wire = BlockingWire | AsyncWire


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that uses a `BlockingWire`, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(Result, end.value)
    raise AssertionError("a coroutine that uses a BlockingWire was suspended")


async def run(wire: Wire, settings: Settings, call: Call[Result]) -> Result:
    """Send a call and return its result."""
    exchange = Exchange(settings, call.request)
    reply, body = await begin(wire, exchange), bytearray()
    try:
        while (piece := await reply.read()) is not None:
            body += piece
    except httpx.RequestError as error:
        raise exchange.broken_off(error, len(body), stream=False) from error
    finally:
        await reply.close()
    return call.result(exchange.answer(reply.response, body))


async def begin(wire: Wire, exchange: Exchange) -> Reply:
    """Send the request, and retry until a reply that is not a refusal begins. `Exchange` decides
    whether to retry, and raises the error if no retry is left."""
    while True:
        try:
            reply = await wire.send(exchange.next_try(wire.http))
        except httpx.RequestError as error:
            wait = exchange.wait_after_error(error)
        else:
            if exchange.begun(reply.response):
                return reply
            wait = exchange.wait_after_refusal(reply.response, await _refusal_body(reply))
        await wire.sleep(wait)


async def _refusal_body(reply: Reply) -> bytes:
    """The body of a refusal, up to about MAX_REFUSAL_BYTES. If the connection fails, this is the
    part that arrived."""
    body = bytearray()
    try:
        with suppress(httpx.RequestError):  # the status alone is enough for an error
            while len(body) <= MAX_REFUSAL_BYTES and (piece := await reply.read()) is not None:
                body += piece
    finally:
        await reply.close()
    return bytes(body)
