"""Streams: requests several streams from a server at once, and records when their tokens arrive.

An `Ask` sends the requests: logitd's `AsyncClient` (`asking`), `raw_client.py`, which needs a
fraction of the processor time of `AsyncClient`, or a client of another kind of server. Nothing is
retried, so rejections are seen. A chunk may carry several tokens; their number is the number of ids
in the chunk. A gap is the time between two successive chunks that contain tokens.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from logitd.service.cli.commands.bench import whole_batch_rate
from logitd.service.client import AsyncClient, LogitdError
from logitd.service.client.fields import GenerateFields


class Arrival(NamedTuple):
    """The arrival of a chunk with tokens: its time, by `time.perf_counter`, and the number of
    tokens."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a stream is incomplete: the name of an error, and its message."""

    kind: str
    message: str


class StreamFailed(Exception):
    """Raised if a stream did not end properly. It has the name of an error, and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


Arrived = Callable[[int], None]
"""Called for each chunk of a stream, with the number of tokens in the chunk."""


class Ask(Protocol):
    """Requests a stream of exactly `tokens` tokens after a prompt."""

    async def __call__(
        self, prompt: Sequence[int], tokens: int, seed: int, arrived: Arrived
    ) -> None:
        """Request a stream, and return when it ends. Raises StreamFailed."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One stream: when it was requested, its arrivals, and its failure if it has one."""

    sent: float
    arrivals: tuple[Arrival, ...]
    failure: Failure | None = None


async def run_streams(
    ask: Ask, prompts: Sequence[Sequence[int]], tokens: int
) -> list[StreamRecord]:
    """Request a stream of `tokens` tokens after each prompt, all at once, and read each stream to
    its end."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(ask, prompt, tokens, seed))
            for seed, prompt in enumerate(prompts)
        ]
    return [task.result() for task in tasks]


def fields(tokens: int, seed: int) -> GenerateFields:
    """The fields of a stream's request, except its prompt."""
    return {
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "prefix_reuse": False,
    }


def asking(client: AsyncClient) -> Ask:
    """An `Ask` that uses `client`, whose max_retries must be 0."""

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
        failure = Failure("TokensMissing", f"{came} of {tokens} tokens arrived")
    return StreamRecord(sent, tuple(arrivals), failure)


def full_batch_rate(records: Sequence[StreamRecord]) -> float | None:
    """Tokens per second while all streams of a batch ran, computed by `whole_batch_rate`. None if
    they never all ran together, or if one of them failed."""
    if failures_of(records):
        return None
    return whole_batch_rate([[(record.sent, 0), *record.arrivals] for record in records])


def gaps(record: StreamRecord) -> list[float]:
    """Seconds between successive chunks of a stream."""
    return gaps_between([arrival.at for arrival in record.arrivals])


def gaps_between(times: Sequence[float], start: float = 0, end: float = math.inf) -> list[float]:
    """Differences between successive times that lie between `start` and `end`."""
    inside = [moment for moment in times if start <= moment <= end]
    return [later - earlier for earlier, later in itertools.pairwise(inside)]


def failures_of(records: Iterable[StreamRecord]) -> tuple[Failure, ...]:
    return tuple(record.failure for record in records if record.failure is not None)
