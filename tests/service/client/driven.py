"""The asynchronous client, driven step by step from outside its event loop: so that one test asks
both clients the same.
"""

import asyncio
import inspect
from types import TracebackType
from typing import Any, Self, cast

from logitd import AsyncClient, AsyncStream, Chunk, Client, Generation


def driven(runner: asyncio.Runner, client: AsyncClient) -> Client:
    """An AsyncClient with the calls of a Client; each runs the loop until it has its result."""
    return cast(Client, _DrivenClient(runner, client))


class _DrivenClient:
    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self._runner = runner
        self._client = client

    def __repr__(self) -> str:
        return repr(self._client)

    def __enter__(self) -> Self:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.run(self._client.__aexit__(kind, error, traceback))

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._client, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = called(*args, **kwargs)
            if isinstance(result, AsyncStream):
                return _DrivenStream(self._runner, result)
            assert inspect.iscoroutine(result)
            return self._runner.run(result)

        return run


class _DrivenStream:
    def __init__(self, runner: asyncio.Runner, stream: AsyncStream) -> None:
        self._runner = runner
        self._stream = stream

    def __enter__(self) -> Self:
        self._runner.run(self._stream.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.run(self._stream.__aexit__(kind, error, traceback))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._runner.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._runner.run(self._stream.close())

    def result(self) -> Generation:
        return self._runner.run(self._stream.result())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
