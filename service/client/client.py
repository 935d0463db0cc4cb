"""Clients: call the service from Python. `Client` waits for each call; `AsyncClient` is the
counterpart for asyncio.

    with Client() as client:
        generation = client.generate("def main():", max_tokens=40)
        print(generation.text)

A prompt is a text, a list of token ids, or a list of either. All other fields are keyword arguments
with the server's names (`fields.py`, /docs). `errors.py` defines the errors that a call raises.
`transport.py` contains the rules for retries.

Threads may share a client. Only one thread may use a stream.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from logitd.service.client import endpoints
from logitd.service.client.calls import Call, documented_by
from logitd.service.client.fields import GenerateFields, Prompt
from logitd.service.client.hooked import Cache, Changes, Floats, HookedCalls, Input, NamesFilter
from logitd.service.client.streaming import AsyncStream, Stream
from logitd.service.client.transport import Exchange, settings_of
from logitd.service.client.wire import AsyncWire, BlockingWire, finish, run

P = ParamSpec("P")
Result = TypeVar("Result")


def _blocking(
    build: Callable[P, Call[Result]],
) -> Callable[Concatenate["Client", P], Result]:
    """A method that sends a call and waits for its result. It has the parameters of `build`, which
    builds the call."""

    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return finish(run(self._wire, self._settings, build(*args, **kwargs)))

    documented_by(build, method)
    return method


def _awaited(
    build: Callable[P, Call[Result]],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, Result]]:
    """An async method that sends a call and returns its result. It has the parameters of `build`,
    which builds the call."""

    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await run(self._wire, self._settings, build(*args, **kwargs))

    documented_by(build, method)
    return method


class Client:
    """A client of one server. Its methods accept the fields of their endpoints.

    base_url     address of the server; by default LOGITD_BASE_URL or http://127.0.0.1:8000
    api_key      bearer token, which is never shown; by default LOGITD_API_KEY
    timeout      maximum time in seconds to wait without receiving anything from the server. This
                 also limits how long a reply that is not streamed may take to compute, and for how
                 long a call is retried. None: no limit. The field `timeout` of a request is a
                 separate limit, after which the server replies 504
    max_retries  number of retries after a temporary refusal or a lost connection
    model        model for calls that do not name one; by default the server's first model
    http         an httpx.Client of your own, for example with a proxy or certificates. `close`
                 leaves it open. `timeout` replaces that client's own timeout
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        model: str | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        self._settings = settings_of(base_url, api_key, timeout, max_retries, model, http)
        self._owned = http is None
        self._wire = BlockingWire(http or httpx.Client())
        self._hooked = HookedCalls(partial(run, self._wire, self._settings))

    def __repr__(self) -> str:
        return f"Client({self._settings.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Later calls fail."""
        if self._owned:
            self._wire.http.close()

    def stream(self, prompt: Prompt, **fields: Unpack[GenerateFields]) -> Stream:
        """Stream the continuation of one prompt or several. The request is sent when the stream is
        entered (`with`), or when the first chunk is read."""
        exchange = Exchange(self._settings, endpoints.stream(prompt, **fields))
        return Stream(AsyncStream(self._wire, exchange))

    def run_with_cache(
        self, input: Input, names_filter: NamesFilter = None, **fields: Any
    ) -> tuple[Floats, Cache]:
        """Logits (B, T, V), and a cache of the stages' values, keyed by TransformerLens' names."""
        return finish(self._hooked.run_with_cache(input, names_filter, **fields))

    def run_with_hooks(self, input: Input, fwd_hooks: Changes = (), **fields: Any) -> Floats:
        """Logits (B, T, V), computed with changes to stages: `fwd_hooks=[("blocks.0.hook_mlp_out",
        {"operation": "zero"})]`. Functions are refused: a server does not run its clients' code."""
        return finish(self._hooked.run_with_hooks(input, fwd_hooks, **fields))

    generate = _blocking(endpoints.generate)
    logits = _blocking(endpoints.logits)
    activations = _blocking(endpoints.activations)
    patch = _blocking(endpoints.patch)
    stages = _blocking(endpoints.stages)
    weights = _blocking(endpoints.weights)
    weight = _blocking(endpoints.weight)
    features = _blocking(endpoints.features)
    feature = _blocking(endpoints.feature)
    tokenize = _blocking(endpoints.tokenize)
    detokenize = _blocking(endpoints.detokenize)
    tokenizer_info = _blocking(endpoints.tokenizer_info)
    info = _blocking(endpoints.info)
    history = _blocking(endpoints.history)
    health = _blocking(endpoints.health)
    version = _blocking(endpoints.version)

    # begin: generated by `make client` from the operations
    probs = _blocking(endpoints.probs)
    score = _blocking(endpoints.score)
    hidden_states = _blocking(endpoints.hidden_states)
    attention = _blocking(endpoints.attention)
    sweep = _blocking(endpoints.sweep)
    lens = _blocking(endpoints.lens)
    induction = _blocking(endpoints.induction)
    attributions = _blocking(endpoints.attributions)
    circuit = _blocking(endpoints.circuit)
    # end: generated


class AsyncClient:
    """`Client` for asyncio, with the same arguments; `http` is an httpx.AsyncClient.

        async with AsyncClient() as client:
            generation = await client.generate("def main():", max_tokens=40)

    The tasks of one event loop may share a client. Cancelling a task ends its request.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        model: str | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._settings = settings_of(
            base_url, api_key, timeout, max_retries, model, http, kind=httpx.AsyncClient
        )
        self._owned = http is None
        self._wire = AsyncWire(http or httpx.AsyncClient())
        self._hooked = HookedCalls(partial(run, self._wire, self._settings))

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Later calls fail."""
        if self._owned:
            await self._wire.http.aclose()

    def stream(self, prompt: Prompt, **fields: Unpack[GenerateFields]) -> AsyncStream:
        """Stream the continuation of one prompt or several. The request is sent when the stream is
        entered (`async with`), or when the first chunk is read."""
        exchange = Exchange(self._settings, endpoints.stream(prompt, **fields))
        return AsyncStream(self._wire, exchange)

    async def run_with_cache(
        self, input: Input, names_filter: NamesFilter = None, **fields: Any
    ) -> tuple[Floats, Cache]:
        """Logits (B, T, V), and a cache of the stages' values, keyed by TransformerLens' names."""
        return await self._hooked.run_with_cache(input, names_filter, **fields)

    async def run_with_hooks(self, input: Input, fwd_hooks: Changes = (), **fields: Any) -> Floats:
        """Logits (B, T, V), computed with changes to stages as in `Client.run_with_hooks`."""
        return await self._hooked.run_with_hooks(input, fwd_hooks, **fields)

    generate = _awaited(endpoints.generate)
    logits = _awaited(endpoints.logits)
    activations = _awaited(endpoints.activations)
    patch = _awaited(endpoints.patch)
    stages = _awaited(endpoints.stages)
    weights = _awaited(endpoints.weights)
    weight = _awaited(endpoints.weight)
    features = _awaited(endpoints.features)
    feature = _awaited(endpoints.feature)
    tokenize = _awaited(endpoints.tokenize)
    detokenize = _awaited(endpoints.detokenize)
    tokenizer_info = _awaited(endpoints.tokenizer_info)
    info = _awaited(endpoints.info)
    history = _awaited(endpoints.history)
    health = _awaited(endpoints.health)
    version = _awaited(endpoints.version)

    # begin: generated by `make client` from the operations
    probs = _awaited(endpoints.probs)
    score = _awaited(endpoints.score)
    hidden_states = _awaited(endpoints.hidden_states)
    attention = _awaited(endpoints.attention)
    sweep = _awaited(endpoints.sweep)
    lens = _awaited(endpoints.lens)
    induction = _awaited(endpoints.induction)
    attributions = _awaited(endpoints.attributions)
    circuit = _awaited(endpoints.circuit)
    # end: generated
