"""Load: streams that a server is asked for at once, and when their tokens came.

Reads each stream as it comes; rejections are not retried, so that they are seen. An `Ask` sends the
requests: `AsyncClient` as anybody would (`asking`), or `raw_client.py` in a fraction of the time.
Either is Python on the machine that runs this: where that is the server's own it takes processor
time from it, which is part of what is measured, and `client_cpu` says how much.

A chunk can carry several tokens: the server joins what its reader has not taken yet. Tokens are
counted by their ids. A gap is the time between two chunks of a stream that bring tokens, however
many: how long a reader waits for something new. Where chunks carry more than one token, gaps are
therefore longer than the time per token; `tokens_per_chunk` tells, and the rate has the mean.

A server of another kind has an `Ask` of its own.

Time to first token counts from the sending of a stream's request. All of a batch are sent at once,
so it holds the prefill of the prompts that were before.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from logitd.model.benchmark.spread import Spread
from logitd.model.benchmark.workload import WARM_UP, Workload, decode_case, prefill_case
from logitd.service.client import AsyncClient, LogitdError
from logitd.service.client.fields import GenerateFields


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk with tokens, at a moment of `time.perf_counter`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a stream did not bring all of its tokens: the name of an error, and its sentence."""

    kind: str
    message: str


class StreamFailed(Exception):
    """A stream ended otherwise than it should: the name of an error, and its sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


Arrived = Callable[[int], None]
"""Told how many tokens a piece of a stream brings, when it has come."""


class Ask(Protocol):
    """Asks a server for `tokens` after a prompt, with nothing that ends them earlier."""

    async def __call__(
        self, prompt: Sequence[int], tokens: int, seed: int, arrived: Arrived
    ) -> None:
        """Return at the end of the stream. Raises StreamFailed."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One stream: when its request was sent, and what came."""

    sent: float
    arrivals: tuple[Arrival, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Prompts asked for at once, a token each; None if one of them failed in every round."""

    prompts: int
    tokens_per_second: float | None
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A batch of streams. Times are those of all rounds together, streams that failed left out.

    tokens_per_second  while the whole batch decoded, the median of the rounds; None where that was
                       in no round
    client_cpu         processors that this process kept busy
    """

    batch: int
    streams: int
    tokens_per_second: float | None
    first_token: Spread | None
    gap: Spread | None
    tokens_per_chunk: float | None
    client_cpu: float
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class HttpFigures:
    prefill: tuple[PrefillLoad, ...]
    decode: tuple[DecodeLoad, ...]

    @property
    def failed(self) -> bool:
        """Whether any stream failed."""
        cases: tuple[PrefillLoad | DecodeLoad, ...] = (*self.prefill, *self.decode)
        return any(case.failures for case in cases)


async def measure_server(
    ask: Ask, workload: Workload, log: Callable[[str], None] = lambda line: None
) -> HttpFigures:
    """All cases of a workload, one after the other. Whoever asks should try nothing again and have
    connections for the largest batch."""
    await run_streams(ask, workload.prompts(1, WARM_UP), workload.tokens)
    prefill = []
    for prompts in workload.prefill_counts:
        log(f"HTTP: prefill, {prompts} at once")
        prefill.append(await _prefill(ask, workload, prompts))
    decode = []
    for batch in workload.batches:
        log(f"HTTP: decode, {batch} at once")
        decode.append(await _decode(ask, workload, batch))
    return HttpFigures(tuple(prefill), tuple(decode))


async def run_streams(
    ask: Ask, prompts: Sequence[Sequence[int]], tokens: int
) -> list[StreamRecord]:
    """Ask for `tokens` after each prompt, all at once, and read until all have ended."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(ask, prompt, tokens, seed))
            for seed, prompt in enumerate(prompts)
        ]
    return [task.result() for task in tasks]


def fields(tokens: int, seed: int) -> GenerateFields:
    """What a stream asks for, besides its prompt."""
    return {
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "prefix_reuse": False,
    }


def asking(client: AsyncClient) -> Ask:
    """Asks with a client that tries nothing again (max_retries 0)."""

    async def ask(prompt: Sequence[int], tokens: int, seed: int, arrived: Arrived) -> None:
        stream = client.stream(prompt, **fields(tokens, seed))
        try:
            async with stream:
                async for chunk in stream:
                    arrived(sum(len(choice.token_ids) for choice in chunk.choices))
        except LogitdError as error:
            raise StreamFailed(type(error).__name__, error.message) from error

    return ask


async def _stream(ask: Ask, prompt: Sequence[int], tokens: int, seed: int) -> StreamRecord:
    arrivals: list[Arrival] = []
    failure = None

    def arrived(count: int) -> None:
        if count:
            arrivals.append(Arrival(time.perf_counter(), count))

    sent = time.perf_counter()
    try:
        await ask(prompt, tokens, seed, arrived)
    except StreamFailed as error:
        failure = Failure(error.kind, error.message)
    came = sum(arrival.tokens for arrival in arrivals)
    if failure is None and came != tokens:
        failure = Failure("TokensMissing", f"{came} of {tokens} tokens came")
    return StreamRecord(sent, tuple(arrivals), failure)


async def _prefill(ask: Ask, workload: Workload, prompts: int) -> PrefillLoad:
    rates: list[float] = []
    failures: list[Failure] = []
    for number in range(workload.rounds):
        asked = workload.prompts(prompts, prefill_case(prompts, number))
        records = await run_streams(ask, asked, 1)
        failures += failures_of(records)
        if (seconds := first_tokens_seconds(records)) is not None:
            rates.append(prompts * workload.prompt_tokens / seconds)
    return PrefillLoad(prompts, median(rates), tuple(failures))


async def _decode(ask: Ask, workload: Workload, batch: int) -> DecodeLoad:
    records: list[StreamRecord] = []
    rates: list[float] = []
    began, busy = time.perf_counter(), time.process_time()
    for number in range(workload.rounds):
        asked = workload.prompts(batch, decode_case(batch, number))
        streamed = await run_streams(ask, asked, workload.tokens)
        records += streamed
        if (rate := full_batch_rate(streamed)) is not None:
            rates.append(rate)
    busy, seconds = time.process_time() - busy, time.perf_counter() - began
    whole = [record for record in records if record.failure is None]
    chunks = [arrival.tokens for record in whole for arrival in record.arrivals]
    return DecodeLoad(
        batch=batch,
        streams=len(records),
        tokens_per_second=median(rates),
        first_token=Spread.of(record.arrivals[0].at - record.sent for record in whole),
        gap=Spread.of(gap for record in whole for gap in gaps(record)),
        tokens_per_chunk=statistics.mean(chunks) if chunks else None,
        client_cpu=busy / seconds,
        failures=failures_of(records),
    )


def full_batch_rate(records: Sequence[StreamRecord]) -> float | None:
    """Tokens per second from when the last stream began to when the first one ended: those that
    came after the one and not after the other. None where a stream failed, because then there was
    no whole batch, and where the first had ended before the last began."""
    if any(record.failure is not None for record in records):
        return None
    begin = max(record.arrivals[0].at for record in records)
    end = min(record.arrivals[-1].at for record in records)
    if end <= begin:
        return None
    came = sum(
        arrival.tokens
        for record in records
        for arrival in record.arrivals
        if begin < arrival.at <= end
    )
    return came / (end - begin)


def first_tokens_seconds(records: Sequence[StreamRecord]) -> float | None:
    """Seconds from the first request to the last of the first tokens; None where a stream
    failed."""
    if any(record.failure is not None for record in records):
        return None
    return max(record.arrivals[0].at for record in records) - min(r.sent for r in records)


def gaps(record: StreamRecord) -> list[float]:
    """Seconds between the chunks of a stream."""
    return [later.at - earlier.at for earlier, later in itertools.pairwise(record.arrivals)]


def failures_of(records: Iterable[StreamRecord]) -> tuple[Failure, ...]:
    return tuple(record.failure for record in records if record.failure is not None)


def median(values: Sequence[float]) -> float | None:
    """None of none."""
    return statistics.median(values) if values else None
