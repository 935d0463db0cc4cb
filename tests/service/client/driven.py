"""The asynchronous client, driven from outside its event loop, so that one test covers both
clients."""

import asyncio
from typing import Any, Self, cast

from logitd import AsyncClient, AsyncStream, Client


def driven(runner: asyncio.Runner, client: AsyncClient) -> Client:
    """An AsyncClient with the methods of a Client. Each method runs the event loop until its result
    is available."""
    return cast(Client, _Driven(runner, client))


class _Driven:
    """An AsyncClient or an AsyncStream with the methods of its blocking counterpart."""

    def __init__(self, runner: asyncio.Runner, driven: Any) -> None:
        self._runner = runner
        self._driven = driven

    def __repr__(self) -> str:
        return repr(self._driven)

    def __enter__(self) -> Self:
        self._runner.run(self._driven.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._driven.__aexit__(*error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._runner.run(self._driven.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driven, name)
        if not callable(found):
            return found

        def run(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if isinstance(result, AsyncStream):
                return _Driven(self._runner, result)
            return self._runner.run(result)

        return run
