"""Front load: latency and throughput of a server as a client sees them, proxies included.

The load is a short request alone, the first token of a stream alone, and several streams at once.
Prompts are new each time, so no prefix is copied. The client is `benchmarks/raw_client.py`, on the
same machine. This module does not start servers.
"""

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.raw_client import RawClient
from benchmarks.streams import run_streams

PROMPT_TOKENS = 32
SHORT = 1
"""Tokens of a short request. Its time is that of the network and of a prefill."""


@dataclass(frozen=True, slots=True)
class Felt:
    """Figures of one round, as a client sees them.

    alone_ms           a request for one token, with nothing else under way: the median
    first_token_ms     the first token of streams that run together: the median
    tokens_per_second  of those streams, from the first request to the last token
    processor_ms       of the server's processes for the whole load; least affected by other
                       programs
    """

    alone_ms: float
    first_token_ms: float
    tokens_per_second: float
    processor_ms: float


class FrontLoad:
    """The same load each round, with different prompts."""

    def __init__(self, *, requests: int, streams: int, tokens: int) -> None:
        """The load is `requests` one after another, then `streams` at once with `tokens` each."""
        self._requests, self._streams, self._tokens = requests, streams, tokens
        self._prompts = _prompts()

    def round(self, url: str, processes: Sequence[int]) -> Felt:
        """Put the load on a server, which consists of these processes. Raises RuntimeError if a
        stream fails."""
        return asyncio.run(self._round(url, processes))

    async def _round(self, url: str, processes: Sequence[int]) -> Felt:
        ask, before = RawClient(url), processor_seconds(processes)
        try:
            alone = [await self._timed(ask, 1, SHORT) for _ in range(self._requests)]
            together = await self._timed(ask, self._streams, self._tokens)
        finally:
            ask.close()
        return Felt(
            alone_ms=1e3 * statistics.median(one.seconds for one in alone),
            first_token_ms=1e3 * together.first_token,
            tokens_per_second=self._streams * self._tokens / together.seconds,
            processor_ms=1e3 * (processor_seconds(processes) - before),
        )

    async def _timed(self, ask: RawClient, streams: int, tokens: int) -> "_Timed":
        prompts = list(itertools.islice(self._prompts, streams))
        begun = time.perf_counter()
        records = await run_streams(ask, prompts, tokens)
        seconds = time.perf_counter() - begun
        if failed := [record.failure for record in records if record.failure is not None]:
            raise RuntimeError(f"{len(failed)} of {streams} streams failed: {failed[0]}")
        first = statistics.median(record.arrivals[0].at - record.sent for record in records)
        return _Timed(seconds, first)


@dataclass(frozen=True, slots=True)
class _Timed:
    seconds: float
    first_token: float


def _prompts() -> Iterator[Sequence[int]]:
    """An endless sequence of prompts with different beginnings."""
    for number in itertools.count():
        yield [(7 * number + 3 * place) % 250 + 1 for place in range(PROMPT_TOKENS)]


def processor_seconds(processes: Sequence[int]) -> float:
    """Processor seconds of the processes so far; the kernel counts hundredths."""
    ticks = 0
    for pid in processes:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(told[11]) + int(told[12])  # user mode and kernel mode
    return ticks / os.sysconf("SC_CLK_TCK")


def medians(rounds: Sequence[Felt]) -> Felt:
    """Median of each figure over the rounds."""
    return Felt(
        *(statistics.median(getattr(one, part.name) for one in rounds) for part in fields(Felt))
    )


def ratios(first: Sequence[Felt], second: Sequence[Felt]) -> dict[str, float]:
    """For each figure, the median over the rounds of the ratio of the second server to the
    first."""
    return {
        part.name: statistics.median(
            getattr(b, part.name) / getattr(a, part.name)
            for a, b in zip(first, second, strict=True)
        )
        for part in fields(Felt)
    }
