# ruff: noqa: F403, F405
"""AsyncClient: the service from Python, for asyncio. `Client` is its twin, one call at a time.

    async with AsyncClient() as client:
        generation = await client.generate("def main():", max_tokens=40)
        print(generation.text)

Each call is a request to one endpoint; prompts are texts, lists of token ids, or lists of either,
and everything else is a keyword argument with the server's name for it (`service/client/fields.py`,
/docs). What a call can raise is in `service/client/errors.py`, when it is tried again in
`service/client/transport.py`.

A client may be shared by the tasks of one event loop. To cancel a task ends its request.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

import httpx

from logitd.service.client import calls, transport
from logitd.service.client.arrays import (
    Activations,
    Attention,
    Chunk,
    HiddenStates,
    Logits,
    TopLogits,
)
from logitd.service.client.fields import *
from logitd.service.client.results import *
from logitd.service.client.streaming import StreamState
from logitd.service.client.transport import Exchange

Result = TypeVar("Result")


class AsyncClient:
    """Asks one server. Methods that are generated take the fields of their endpoint.

    base_url     where it is; else LOGITD_BASE_URL, else http://127.0.0.1:8000
    api_key      sent as a bearer token, and never shown; else LOGITD_API_KEY
    timeout      seconds that the server may be silent; for an answer in one piece, the time that it
                 takes. Waits before further tries are no longer, together. None: no limit. Another
                 thing is the field `timeout` of a request, after which the server gives up (504)
    max_retries  further tries where the first was refused for now, or got no answer
    model        of the server's models the one that is asked, unless a call names another; else the
                 first
    http         an httpx.AsyncClient of yours, for proxies, certificates and so on. `close` leaves
                 it open; its timeout is not used
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
        self._settings = transport.settings_of(base_url, api_key, timeout, max_retries, http)
        self._model = model
        self._owned = http is None
        self._http = httpx.AsyncClient() if http is None else http

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; no calls after this."""
        if self._owned:
            await self._http.aclose()

    async def generate(self, prompt: Prompt, **fields: Unpack[GenerateFields]) -> Generation:
        """Continue a prompt, or several."""
        return await self._run(calls.generate(prompt, self._named(fields)))

    def stream(self, prompt: Prompt, **fields: Unpack[GenerateFields]) -> "AsyncStream":
        """The same, piece by piece. The request is sent when the stream is entered (`with`), or
        when the first chunk is asked for."""
        return AsyncStream(
            self._http, Exchange(self._settings, calls.stream(prompt, self._named(fields)))
        )

    @overload
    async def logits(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, prompt: OnePrompt, **fields: Unpack[LogitsFields]
    ) -> Logits: ...
    @overload
    async def logits(  # type: ignore[overload-overlap]
        self, prompt: OnePrompt, *, top_k: int, **fields: Unpack[LogitsFields]
    ) -> TopLogits: ...
    @overload
    async def logits(self, prompt: ManyPrompts, **fields: Unpack[LogitsFields]) -> list[Logits]: ...
    @overload
    async def logits(
        self, prompt: ManyPrompts, *, top_k: int, **fields: Unpack[LogitsFields]
    ) -> list[TopLogits]: ...
    async def logits(
        self, prompt: Prompt, *, top_k: int | None = None, **fields: Unpack[LogitsFields]
    ) -> Logits | TopLogits | list[Logits] | list[TopLogits]:
        """Logits of a prompt as an array; of a list of prompts, a list of results. With `top_k`
        the largest of each row and their ids."""
        return await self._run(calls.logits(prompt, top_k, self._named(fields)))

    @overload
    async def activations(  # type: ignore[overload-overlap]
        self,
        prompt: OnePrompt,
        stages: str | Sequence[str],
        **fields: Unpack[ActivationsFields],
    ) -> Activations: ...
    @overload
    async def activations(
        self,
        prompt: ManyPrompts,
        stages: str | Sequence[str],
        **fields: Unpack[ActivationsFields],
    ) -> list[Activations]: ...
    async def activations(
        self, prompt: Prompt, stages: str | Sequence[str], **fields: Unpack[ActivationsFields]
    ) -> Activations | list[Activations]:
        """The values of stages of the forward, by name or pattern (`blocks.*.attention.q`); of a
        list of prompts, a list of results."""
        return await self._run(calls.activations(prompt, stages, self._named(fields)))

    async def patch(
        self,
        prompt: OnePrompt,
        source: OnePrompt,
        stage: str = "blocks.*.output",
        over: Sequence[str] = ("layers", "positions"),
        **fields: Unpack[SweepFields],
    ) -> Sweep:
        """The sweep that sets a stage to what `source`, a prompt of as many tokens, has there: in
        each layer and position in turn."""
        return await self._run(calls.patch(prompt, source, stage, over, self._named(fields)))

    async def stages(self, *, model: str | None = None) -> Stages:
        """The names, shapes and meanings of the stages."""
        return await self._run(calls.stages(model or self._model))

    @overload
    async def tokenize(  # type: ignore[overload-overlap]
        self, text: str, **fields: Unpack[TokenizeFields]
    ) -> Tokenized: ...
    @overload
    async def tokenize(
        self, text: Sequence[str], **fields: Unpack[TokenizeFields]
    ) -> list[Tokenized]: ...
    async def tokenize(
        self, text: str | Sequence[str], **fields: Unpack[TokenizeFields]
    ) -> Tokenized | list[Tokenized]:
        """The token ids of a text; of a list of texts, a list of results."""
        return await self._run(calls.tokenize(text, self._named(fields)))

    @overload
    async def detokenize(
        self,
        tokens: TokenIds,
        **fields: Unpack[DetokenizeFields],
    ) -> Detokenized: ...
    @overload
    async def detokenize(
        self, tokens: Sequence[TokenIds], **fields: Unpack[DetokenizeFields]
    ) -> list[Detokenized]: ...
    async def detokenize(
        self, tokens: OneOrManyIds, **fields: Unpack[DetokenizeFields]
    ) -> Detokenized | list[Detokenized]:
        """The text of token ids; of a list of lists of ids, a list of results."""
        return await self._run(calls.detokenize(tokens, self._named(fields)))

    async def tokenizer_info(self, *, model: str | None = None) -> TokenizerInfo:
        """The vocabulary."""
        return await self._run(calls.tokenizer_info(model or self._model))

    async def info(self, *, model: str | None = None) -> Info:
        """What is served, where and how."""
        return await self._run(calls.info(model or self._model))

    async def health(self) -> Health:
        """Whether requests are answered. A server that loads or shuts down gives a result, too."""
        return await self._run(calls.health())

    async def version(self) -> str:
        """The version of the server."""
        return await self._run(calls.version())

    # operations: generated by `make client`

    async def probs(self, prompt: Prompt, **fields: Unpack[ProbsFields]) -> Probs:
        """The likeliest next tokens after each prompt, or named ones, with probability, logprob
        and rank; and the entropy of the whole distribution."""
        return await self._run(
            calls.record("/probs", Probs, {"prompt": prompt, **self._named(fields)})
        )

    async def score(self, prompt: Prompt, **fields: Unpack[ScoreFields]) -> Scores:
        """The logprob of each prompt, or of continuations of it: as a sum, by token on request,
        as perplexity and as bits per byte. A prompt with several continuations is computed once."""
        return await self._run(
            calls.record("/score", Scores, {"prompt": prompt, **self._named(fields)})
        )

    @overload
    async def hidden_states(  # type: ignore[overload-overlap]
        self, prompt: OnePrompt, **fields: Unpack[HiddenStatesFields]
    ) -> HiddenStates: ...
    @overload
    async def hidden_states(
        self, prompt: ManyPrompts, **fields: Unpack[HiddenStatesFields]
    ) -> list[HiddenStates]: ...
    async def hidden_states(
        self, prompt: Prompt, **fields: Unpack[HiddenStatesFields]
    ) -> HiddenStates | list[HiddenStates]:
        """The residual stream (layers, positions, d_model): 0 is after the embeddings, i after
        block i, before the final norm."""
        return await self._run(
            calls.arrays("/hidden_states", HiddenStates, {"prompt": prompt, **self._named(fields)})
        )

    @overload
    async def attention(  # type: ignore[overload-overlap]
        self, prompt: OnePrompt, **fields: Unpack[AttentionFields]
    ) -> Attention: ...
    @overload
    async def attention(
        self, prompt: ManyPrompts, **fields: Unpack[AttentionFields]
    ) -> list[Attention]: ...
    async def attention(
        self, prompt: Prompt, **fields: Unpack[AttentionFields]
    ) -> Attention | list[Attention]:
        """Causal attention weights (layers, heads, positions, tokens). Each row sums to 1;
        tokens after the position have 0."""
        return await self._run(
            calls.arrays("/attention", Attention, {"prompt": prompt, **self._named(fields)})
        )

    async def sweep(
        self,
        prompt: OnePrompt,
        vary: Intervention,
        over: Sequence[Literal["layers", "heads", "positions"]],
        **fields: Unpack[SweepFields],
    ) -> Sweep:
        """Carry an intervention out in one layer, head or position after another, and return a
        token's logit each time, or the difference of two: ablate each head in turn, patch each
        layer and position in turn. With `stream`, an event with the members that are known
        before the cells, `{"cell": ...}` for each cell as it is computed, then `[DONE]`."""
        return await self._run(
            calls.record(
                "/sweep",
                Sweep,
                {"prompt": prompt, "vary": vary, "over": over, **self._named(fields)},
            )
        )

    async def lens(self, prompt: Prompt, **fields: Unpack[LensFields]) -> LensReadings:
        """The final norm and the head, applied to the residual stream after each layer: the
        likeliest next tokens, probability and rank of named ones, the entropy, and the
        divergence of the model's own prediction, which is the last layer's."""
        return await self._run(
            calls.record("/lens", LensReadings, {"prompt": prompt, **self._named(fields)})
        )

    async def attributions(
        self, prompt: Prompt, **fields: Unpack[AttributionsFields]
    ) -> Attributions:
        """The gradient of a token's logit, or of the difference of two, with respect to the
        vector of each token of the prompt, times that vector, at the prompt or along a path from
        a baseline; and the direct share of each head, bias and MLP. Other requests go on
        meanwhile: a step computes one block of one prompt."""
        return await self._run(
            calls.record("/attributions", Attributions, {"prompt": prompt, **self._named(fields)})
        )

    # end of what is generated

    def _named(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        """The fields of a call; with the client's model, unless they name one."""
        return fields if self._model is None else {"model": self._model, **fields}

    async def _run(self, call: calls.Call[Result]) -> Result:
        """The result of one call."""
        exchange = Exchange(self._settings, call.request)
        response, body = await _open(self._http, exchange), bytearray()
        try:
            async for piece in response.aiter_bytes():
                body += piece
        except httpx.RequestError as error:
            raise exchange.broken_off(error, len(body)) from error
        finally:
            await response.aclose()
        return call.result(exchange.answer(response, body))


class AsyncStream:
    """A generation as it comes: iterate over its chunks, within an `async with` block, whose end
    closes it. To close it early ends the request on the server.

    An error of the server is raised where it comes; StreamError if the stream breaks off. What had
    come until then stays in `text`.
    """

    def __init__(self, http: httpx.AsyncClient, exchange: Exchange) -> None:
        self._http = http
        self._exchange = exchange
        self._state = StreamState()
        self._response: httpx.Response | None = None
        self._pieces: AsyncIterator[bytes]
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._closed:
                if (chunk := self._state.next()) is not None:
                    return chunk
                await self._receive()
        except BaseException:
            await self.close()
            raise
        raise StopAsyncIteration

    async def close(self) -> None:
        """Ask for no more: if the server is not done, it stops."""
        self._closed = True
        if self._response is not None:
            await self._response.aclose()

    async def result(self) -> Generation:
        """The whole answer, as `generate` gives it; reads what has not been read."""
        async for _ in self:
            pass
        return self._state.result()

    @property
    def text(self) -> str:
        """The first completion so far."""
        return self._state.text

    @property
    def usage(self) -> Usage:
        """At the end; LogitdError before."""
        return self._state.tail.usage

    @property
    def seed(self) -> int | None:
        """At the end; LogitdError before. None if each prompt has its own: see the choices."""
        return self._state.tail.seed

    @property
    def timings(self) -> Timings:
        """At the end; LogitdError before."""
        return self._state.tail.timings

    @property
    def request_id(self) -> str:
        return self._exchange.request_id

    async def _begin(self) -> None:
        if self._response is None and not self._closed:
            self._response = await _open(self._http, self._exchange)
            self._state.request_id = self._exchange.request_id
            self._pieces = self._response.aiter_bytes()

    async def _receive(self) -> None:
        """Take in the next piece; close behind the end, of which httpx needs to see the last byte
        to use the connection again."""
        await self._begin()
        try:
            piece = await anext(self._pieces, None)
        except httpx.RequestError as error:
            if not self._state.ended:
                tokens = self._state.tokens
                raise self._exchange.stream_broken_off(error, tokens) from error
            piece = None
        if self._state.ended:
            await self.close()
        elif piece is None:
            raise self._state.cut()
        else:
            self._state.push(piece)


async def _open(http: httpx.AsyncClient, exchange: Exchange) -> httpx.Response:
    """A reply that has begun with a good status; whatever comes before it is tried again, as
    `Exchange` says."""
    while True:
        try:
            response = await http.send(exchange.next_try(http), stream=True)
        except httpx.RequestError as error:
            wait = exchange.wait_after_error(error)
        else:
            if exchange.begun(response):
                return response
            wait = exchange.wait_after_refusal(response, await _refusal_body(response))
        await asyncio.sleep(wait)


async def _refusal_body(response: httpx.Response) -> bytes:
    """The beginning of a reply that says no, as much of it as comes."""
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > transport.MAX_REFUSAL_BYTES:
                break
    except httpx.RequestError:
        pass  # the status has said the most of it
    finally:
        await response.aclose()
    return bytes(body)
